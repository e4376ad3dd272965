"""Choose the engine of a run: one device, DDP, DDP with a static graph, or manual optimisation."""

from __future__ import annotations

from torch import nn

from trainer.configuration import DistributedDataParallelKwargs
from trainer.distributed.step_sync import StepSync
from trainer.engines.base import Engine
from trainer.engines.ddp import DataParallel, Replicas, StaticDataParallel
from trainer.engines.single import SingleDevice


def choose_engine(
    module: nn.Module,
    step_sync: StepSync,
    *,
    world_size: int,
    automatic: bool,
    ddp_kwargs: DistributedDataParallelKwargs | None = None,
) -> Engine:
    """Return the engine for a module that is on its device.

    Args:
        module: The user's module.
        step_sync: The step sync, which receives the step stats of each gradient accumulation
            window.
        world_size: The number of processes.
        automatic: Automatic optimisation: the loop runs backward and the optimizer step. If False,
            `training_step` does.
        ddp_kwargs: Arguments of DDP.

    Raises:
        ValueError: The engine does not support the arguments.
    """
    if world_size == 1:
        return SingleDevice(module, step_sync)
    if automatic:
        if ddp_kwargs is not None and ddp_kwargs.static_graph:
            return StaticDataParallel(module, step_sync, ddp_kwargs)
        return DataParallel(module, step_sync, ddp_kwargs)
    if ddp_kwargs is not None and ddp_kwargs.comm_hook != "no":
        raise ValueError(
            f"DistributedDataParallelKwargs(comm_hook={ddp_kwargs.comm_hook.value!r}) cannot be "
            "used in manual optimisation, where each optimizer averages its own gradients, "
            "uncompressed, when it steps. Leave it out."
        )
    sends_buffers = ddp_kwargs is None or ddp_kwargs.broadcast_buffers
    return Replicas(module, step_sync, sends_buffers=sends_buffers)
