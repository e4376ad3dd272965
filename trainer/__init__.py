"""Cadence: a PyTorch trainer that resumes, accumulates and evaluates exactly.

The names here are loaded when they are first used, so that a script that needs the `Accelerator`
does not load the `Trainer`, and ``import trainer`` costs next to nothing beside ``import torch``.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from trainer._siblings import check_siblings

check_siblings()

if TYPE_CHECKING:
    from trainer.accelerator import Accelerator
    from trainer.configuration import (
        AutocastKwargs,
        DataLoaderConfiguration,
        DistributedDataParallelKwargs,
        DistributedType,
        GradientAccumulationPlugin,
        GradScalerKwargs,
        InitProcessGroupKwargs,
    )
    from trainer.errors import CheckpointError, MetricError
    from trainer.module import TrainModule
    from trainer.rng import set_seed
    from trainer.state import AcceleratorState, GradientState, PartialState
    from trainer.trainer import Trainer

_HOME = {
    "Accelerator": "accelerator",
    "AcceleratorState": "state",
    "AutocastKwargs": "configuration",
    "CheckpointError": "errors",
    "DataLoaderConfiguration": "configuration",
    "DistributedDataParallelKwargs": "configuration",
    "DistributedType": "configuration",
    "GradScalerKwargs": "configuration",
    "GradientAccumulationPlugin": "configuration",
    "GradientState": "state",
    "InitProcessGroupKwargs": "configuration",
    "MetricError": "errors",
    "PartialState": "state",
    "TrainModule": "module",
    "Trainer": "trainer",
    "set_seed": "rng",
}

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
    "TrainModule",
    "Trainer",
    "set_seed",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'trainer' has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(f"trainer.{_HOME[name]}"), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
