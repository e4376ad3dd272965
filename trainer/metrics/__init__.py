"""Logged metrics: kept on the device, reduced once, read back in one transfer.

`MetricStore` has two kinds of cells. A step cell accumulates the values logged in one window of
micro-batches, and is reduced at a log interval. An epoch cell holds running sums until the epoch
(or the evaluation) ends. Both are (total, weight) pairs, so that a mean over processes is the mean
over all items and never a mean of means (P5).
"""

from trainer.metrics.cells import (
    EMPTY,
    TRAIN_EPOCH,
    TRAIN_STEP,
    Cell,
    Kind,
    Scope,
    Value,
    on_accelerator,
    stacked,
    to_floats,
)
from trainer.metrics.store import MetricStore

__all__ = [
    "EMPTY",
    "TRAIN_EPOCH",
    "TRAIN_STEP",
    "Cell",
    "Kind",
    "MetricStore",
    "Scope",
    "Value",
    "on_accelerator",
    "stacked",
    "to_floats",
]
