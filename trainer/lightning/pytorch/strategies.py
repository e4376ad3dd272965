"""Lightning's strategies, as arguments of Cadence's Trainer."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

from trainer.configuration import DistributedDataParallelKwargs
from trainer.deepspeed_plugin import DeepSpeedPlugin
from trainer.lightning.missing import getter
from trainer.parallelism import FullyShardedDataParallelPlugin


@dataclass
class Strategy:
    """Arguments of `trainer.Trainer`.

    Attributes:
        arguments: The arguments by name.
    """

    arguments: dict[str, Any] = field(default_factory=dict)


class SingleDeviceStrategy(Strategy):
    """One device."""

    def __init__(self, device: Any = None) -> None:
        super().__init__({} if device is None or str(device) != "cpu" else {"cpu": True})


class DDPStrategy(Strategy):
    """Data parallelism; other arguments are those of `DistributedDataParallelKwargs`."""

    def __init__(self, **kwargs: Any) -> None:
        handlers = [DistributedDataParallelKwargs(**kwargs)] if kwargs else []
        super().__init__({"kwargs_handlers": handlers} if handlers else {})


class FSDPStrategy(Strategy):
    """Sharded models; other arguments are those of `FullyShardedDataParallelPlugin`."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__({"fsdp_plugin": FullyShardedDataParallelPlugin(**kwargs)})


class DeepSpeedStrategy(Strategy):
    """DeepSpeed's ZeRO.

    Args:
        stage: The stage, 0 to 3.
        offload_optimizer: Whether the optimizer's state is in host memory.
        offload_parameters: The same of parameters, in stage 3.
        config: A configuration of DeepSpeed instead, as a path or a dict.
    """

    def __init__(
        self,
        stage: int = 2,
        offload_optimizer: bool = False,
        offload_parameters: bool = False,
        config: Any = None,
    ) -> None:
        plugin = (
            DeepSpeedPlugin(hf_ds_config=config)
            if config is not None
            else DeepSpeedPlugin(
                zero_stage=stage,
                offload_optimizer_device="cpu" if offload_optimizer else "none",
                offload_param_device="cpu" if offload_parameters else "none",
            )
        )
        super().__init__({"deepspeed_plugin": plugin})


def strategy_of(given: Any) -> Strategy:
    """Return the strategy of Lightning's name for it.

    Raises:
        ValueError: There is no such strategy.
    """
    if isinstance(given, Strategy):
        return given
    name = str(given)
    if name in ("auto", "ddp", "ddp_spawn", "ddp_fork", "ddp_notebook", "single_device"):
        return Strategy()
    if name in ("ddp_find_unused_parameters_true", "ddp_spawn_find_unused_parameters_true"):
        return DDPStrategy(find_unused_parameters=True)
    if name == "fsdp":
        return FSDPStrategy()
    if found := re.fullmatch(r"deepspeed(?:_stage_([123]))?(_offload)?", name):
        stage, offload = int(found[1] or 2), found[2] is not None
        return DeepSpeedStrategy(stage, offload, offload_parameters=offload and stage == 3)
    raise ValueError(
        f"strategy is {given!r}; it must be 'auto', 'ddp', 'ddp_find_unused_parameters_true', "
        "'fsdp', 'deepspeed', 'deepspeed_stage_1', 'deepspeed_stage_2', 'deepspeed_stage_3' or an "
        "object of trainer.lightning.pytorch.strategies."
    )


__getattr__ = getter(__name__)
