"""Choose the engine of a loop: one device, DDP, FSDP, DeepSpeed, or megatron-core."""

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

    Raises:
        ValueError: The sizes of the mesh do not multiply to the number of processes.
        TypeError: The user's own engine is not a class.
    """
    if options.engine is not None:
        if not callable(options.engine):
            raise TypeError(
                f"engine is {options.engine!r}; it must be a class with the methods of "
                "trainer.engines.base.Engine. To choose a built-in engine, pass its plugin, such "
                "as fsdp_plugin or deepspeed_plugin; DDP needs none."
            )
        return options.engine(options)
    if options.deepspeed_plugin is not None:
        from trainer.engines.deepspeed import ZeroRedundancy  # imports deepspeed

        return ZeroRedundancy(options)
    if options.megatron_lm_plugin is not None:
        from trainer.engines.megatron import Megatron  # imports much of torch.distributed

        return Megatron(options)
    config = options.parallelism_config
    if config is not None and config.total_size != options.world_size:
        raise ValueError(
            f"parallelism_config has the sizes {config.to_json()}, whose product is "
            f"{config.total_size}; the number of processes is {options.world_size}."
        )
    if options.device.type == "xla":
        from trainer.engines.xla import XLADevice, XLAReplicas

        if options.world_size == 1:
            return XLADevice(options)
        return XLAReplicas(options, in_backward=automatic)
    if options.world_size == 1:
        return SingleDevice(options)
    if config is not None and config.pp_enabled:
        from trainer.engines.pipeline import Pipeline  # imports much of torch.distributed

        return Pipeline(options)
    if options.fsdp_plugin is not None or config is not None:
        from trainer.engines.fsdp import FullyShard  # imports much of torch.distributed

        return FullyShard(options)
    if not automatic:
        return Replicas(options)
    static = options.ddp_kwargs is not None and options.ddp_kwargs.static_graph
    return StaticDataParallel(options) if static else DataParallel(options)
