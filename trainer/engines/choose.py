"""Choose the engine of a loop: one device, or DDP in the variant that the loop needs."""

from __future__ import annotations

from trainer.engines.base import Engine, EngineOptions
from trainer.engines.ddp import DataParallel, Replicas, StaticDataParallel
from trainer.engines.single import SingleDevice


def choose_engine(options: EngineOptions, *, automatic: bool = False) -> Engine:
    """Return an engine.

    Args:
        options: The process and the user's options.
        automatic: Whether it is for a fit in automatic optimisation, where the loop runs backward
            and the optimizers. If False, the user's own loop or `training_step` does.
    """
    if options.engine is not None:
        return options.engine(options)
    if options.world_size == 1:
        return SingleDevice(options)
    if not automatic:
        return Replicas(options)
    static = options.ddp_kwargs is not None and options.ddp_kwargs.static_graph
    return StaticDataParallel(options) if static else DataParallel(options)
