"""Cadence: a PyTorch trainer that resumes, accumulates and evaluates exactly."""

# ruff: noqa: E402 - a shadowed sibling must be told before anything imports it
from trainer._siblings import check_siblings

check_siblings()

from trainer.accelerator import Accelerator
from trainer.configuration import (
    AutocastKwargs,
    DataLoaderConfiguration,
    DistributedDataParallelKwargs,
    DistributedType,
    GradientAccumulationPlugin,
    GradScalerKwargs,
    InitProcessGroupKwargs,
    ProjectConfiguration,
)
from trainer.errors import CheckpointError, MetricError
from trainer.module import TrainModule
from trainer.rng import set_seed
from trainer.state import AcceleratorState, GradientState, PartialState
from trainer.trainer import Trainer

__all__ = [
    "Accelerator",
    "AcceleratorState",
    "AutocastKwargs",
    "CheckpointError",
    "DataLoaderConfiguration",
    "DistributedDataParallelKwargs",
    "DistributedType",
    "GradScalerKwargs",
    "GradientAccumulationPlugin",
    "GradientState",
    "InitProcessGroupKwargs",
    "MetricError",
    "PartialState",
    "ProjectConfiguration",
    "TrainModule",
    "Trainer",
    "set_seed",
]
