"""Engines without a Trainer or an Accelerator."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn
from tqdm import tqdm

from trainer.configuration import DistributedDataParallelKwargs
from trainer.distributed.step_sync import StepSync
from trainer.engines.base import EngineOptions
from trainer.engines.choose import choose_engine
from trainer.engines.model import prepare_model
from trainer.precision import Precision
from trainer.state import PartialState

CPU = torch.device("cpu")


def options(ddp_kwargs: DistributedDataParallelKwargs | None = None) -> EngineOptions:
    """Return the options of an engine of this process."""
    state = PartialState(cpu=True)
    return EngineOptions(
        device=CPU, rank=state.process_index, world_size=state.num_processes, ddp_kwargs=ddp_kwargs
    )


def started(
    kind: Any,
    module: nn.Module,
    step_sync: StepSync,
    ddp_kwargs: DistributedDataParallelKwargs | None = None,
) -> Any:
    """Return an engine of this class that runs a module."""
    engine = kind(options(ddp_kwargs))
    engine.start(module, step_sync)
    return engine


def prepare(
    model: nn.Module,
    mode: str = "no",
    *,
    ddp_kwargs: DistributedDataParallelKwargs | None = None,
    **kwargs: Any,
) -> nn.Module:
    """Prepare a model as an `Accelerator` does."""
    tqdm.monitor_interval = 0  # inductor's bars would start a thread that never ends
    engine = choose_engine(options(ddp_kwargs))
    arguments = {"precision": Precision(mode, CPU), "device": CPU, **kwargs}
    return prepare_model(model, engine, **arguments)


def no_sync(model: nn.Module) -> AbstractContextManager[None]:
    """Return the `no_sync` of the engine of a loop of one's own."""
    return choose_engine(options()).no_sync(model)


def trigger_sync(model: nn.Module) -> AbstractContextManager[None]:
    """Return the `trigger_sync` of the engine of a loop of one's own."""
    return choose_engine(options()).trigger_sync(model)
