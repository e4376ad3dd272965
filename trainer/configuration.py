"""Configurations and enumerations: keyword-only dataclasses that validate themselves when made."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from datetime import timedelta
from enum import Enum
from typing import Any

from trainer.errors import choose


class Choice(str, Enum):
    """An enumeration of strings: its members compare, print and are looked up as their values."""

    def __str__(self) -> str:
        return str(self.value)

    @classmethod
    def list(cls) -> list[str]:
        """Every value."""
        return [member.value for member in cls]

    @classmethod
    def parse(cls, value: object, what: str) -> str:
        """The value of the member that `value` names.

        Raises:
            ValueError: No member has it; the text gives the choices.
        """
        if str(value) not in cls.list():
            raise ValueError(choose(what, value, cls.list()))
        return str(value)


class DistributedType(Choice):
    """What kind of processes work together."""

    NO = "NO"
    MULTI_CPU = "MULTI_CPU"
    MULTI_GPU = "MULTI_GPU"
    MULTI_XPU = "MULTI_XPU"


class PrecisionType(Choice):
    """The precision that the forward pass computes in."""

    NO = "no"
    FP16 = "fp16"
    BF16 = "bf16"


class SchedulerTick(Choice):
    """How often a prepared scheduler advances when an update is made."""

    PROCESS = "process"
    UPDATE = "update"


def _at_least_one(what: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{what} is {value!r}; it must be an int.")
    if value < 1:
        raise ValueError(f"{what} is {value}; it must be at least 1.")


@dataclass(kw_only=True)
class DataLoaderConfiguration:
    """How prepared data loaders share the data between processes.

    Attributes:
        even_batches: Every process gets the same number of full batches; samples of the beginning
            are repeated for that. `gather_for_metrics`-like code must then drop them. The `Trainer`
            never repeats samples, whatever is said here.
        non_blocking: Copy batches to the device asynchronously; useful from pinned memory.
    """

    even_batches: bool = True
    non_blocking: bool = False


@dataclass(kw_only=True)
class GradientAccumulationPlugin:
    """How gradients are accumulated.

    Attributes:
        num_steps: Micro-batches for one update.
        sync_with_dataloader: The end of a prepared loader ends the window, however short it is.

    Raises:
        ValueError: `num_steps` is below 1.
    """

    num_steps: int
    sync_with_dataloader: bool = True

    def __post_init__(self) -> None:
        """Refuse a window without a batch."""
        _at_least_one("num_steps", self.num_steps)


@dataclass(kw_only=True)
class KwargsHandler:
    """Arguments for an object that `Accelerator` makes on its own."""

    def to_kwargs(self) -> dict[str, Any]:
        """The arguments that differ from their defaults."""
        return {
            field.name: value
            for field in dataclasses.fields(self)
            if (value := getattr(self, field.name)) != field.default
        }


@dataclass(kw_only=True)
class AutocastKwargs(KwargsHandler):
    """Arguments of ``torch.autocast``."""

    enabled: bool = True
    cache_enabled: bool | None = None


@dataclass(kw_only=True)
class DistributedDataParallelKwargs(KwargsHandler):
    """Arguments of torch's ``DistributedDataParallel``; its documentation explains them."""

    broadcast_buffers: bool = True
    bucket_cap_mb: int = 25
    find_unused_parameters: bool = False
    gradient_as_bucket_view: bool = False
    static_graph: bool = False


@dataclass(kw_only=True)
class GradScalerKwargs(KwargsHandler):
    """Arguments of ``torch.amp.GradScaler``, used with ``mixed_precision="fp16"``."""

    init_scale: float = 65536.0
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    enabled: bool = True


@dataclass(kw_only=True)
class InitProcessGroupKwargs(KwargsHandler):
    """Arguments of ``torch.distributed.init_process_group``.

    Attributes:
        backend: None chooses by the device: nccl, xccl or gloo.
        init_method: None means the launcher's address.
        timeout: How long a collective may take; None is torch's default.
    """

    backend: str | None = None
    init_method: str | None = None
    timeout: timedelta | None = None
