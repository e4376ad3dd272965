"""Choose the engine of a run: one device, DDP, DDP with a static graph, or manual optimisation."""

from __future__ import annotations

from torch import nn

from trainer.configuration import DistributedDataParallelKwargs
from trainer.distributed.agreement import Agreement
from trainer.strategies.base import Engine
from trainer.strategies.ddp import DataParallel, Replicas
from trainer.strategies.single import SingleDevice
from trainer.strategies.static import StaticDataParallel


def choose_engine(
    module: nn.Module,
    agreement: Agreement,
    *,
    world_size: int,
    automatic: bool,
    ddp_kwargs: DistributedDataParallelKwargs | None = None,
) -> Engine:
    """Return the engine for a module that is on its device.

    Args:
        module: The user's module.
        agreement: The step sync, which receives the step stats of each gradient accumulation
            window.
        world_size: The number of processes.
        automatic: Automatic optimisation: the loop runs backward and the optimizer step. If False,
            `training_step` does.
        ddp_kwargs: Arguments of DDP.

    Raises:
        ValueError: The engine does not support the arguments.
    """
    if world_size == 1:
        return SingleDevice(module, agreement)
    if automatic:
        if ddp_kwargs is not None and ddp_kwargs.static_graph:
            return StaticDataParallel(module, agreement, ddp_kwargs)
        return DataParallel(module, agreement, ddp_kwargs)
    if ddp_kwargs is not None and ddp_kwargs.comm_hook != "no":
        raise ValueError(
            f"DistributedDataParallelKwargs(comm_hook={ddp_kwargs.comm_hook.value!r}) cannot be "
            "used in manual optimisation, where each optimizer averages its own gradients, "
            "uncompressed, when it steps. Leave it out."
        )
    sends_buffers = ddp_kwargs is None or ddp_kwargs.broadcast_buffers
    return Replicas(module, agreement, sends_buffers=sends_buffers)
