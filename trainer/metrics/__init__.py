"""Logged metrics: accumulated on the device, reduced over ranks, read back in one transfer.

`MetricStore` has two kinds of accumulators, called cells. A step cell accumulates the values logged
in one gradient accumulation window, and is reduced at a log interval. An epoch cell accumulates
until the epoch or the evaluation ends. Both are (total, weight) pairs, so a mean over ranks is the
mean over all items, never a mean of means (P5).
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
