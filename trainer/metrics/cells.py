"""What was logged and is not yet reduced, by name: running totals and metric objects."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor

Value: TypeAlias = "float | Tensor"
Kind: TypeAlias = "Literal['mean', 'sum', 'min', 'max']"
KINDS = ("mean", "sum", "min", "max")
EMPTY = {"mean": 0.0, "sum": 0.0, "min": float("inf"), "max": float("-inf")}
_LOADER = re.compile(r"/dataloader_idx_\d+$")  # ends the names of each of several loaders


class Scope(NamedTuple):
    """Where in the run `log` is called, and what it does there unless told otherwise.

    Attributes:
        phase: ``"train"``, ``"validation"``, ``"test"`` or ``"predict"``.
        on_step: The default of `log`; None where there is no step. What is not logged on the step
            is accumulated over the epoch.
    """

    phase: str
    on_step: bool | None


TRAIN_STEP = Scope("train", True)
TRAIN_EPOCH = Scope("train", None)


@dataclass(slots=True)
class Cell:
    """Running total and weight of one name on this process."""

    kind: str
    total: Value
    weight: float = 0.0
    prog_bar: bool = False
    last: Value = 0.0

    def add(self, value: Value, weight: float) -> None:
        """Take in one more value."""
        if self.kind == "mean" and not weight:
            return  # a mean over nothing is NaN, which no weight would make harmless
        self.last = value
        if self.kind == "mean":
            self.total = self.total + value * weight
        elif self.kind == "sum":
            self.total = self.total + value
        elif isinstance(value, Tensor) or isinstance(self.total, Tensor):
            pick = torch.minimum if self.kind == "min" else torch.maximum
            self.total = pick(as_tensor(self.total, value), as_tensor(value, self.total))
        else:
            better = value < self.total if self.kind == "min" else value > self.total
            if better or math.isnan(value):  # which stays, as in torch: nothing is better than it
                self.total = value
        self.weight += weight


def as_tensor(value: Value, like: Value) -> Tensor:
    """The value as a tensor, of the other's type and on its device."""
    if isinstance(value, Tensor):
        return value
    assert isinstance(like, Tensor)
    # Filled there: a number that is copied to an accelerator waits for it.
    return torch.full((), value, dtype=like.dtype, device=like.device)


@dataclass(slots=True)
class Cells:
    """The cells of one interval, and the metric objects that go with them.

    Attributes:
        cells: By name.
        objects: Those with ``compute`` and ``reset``, by name.
        known: Those of earlier intervals too, and copies of those that only others have.
        agreed: The (name, kind) pairs that all processes have, as they last agreed.
        ran: The suffixes of the loaders of which this process has run a batch in the interval.
    """

    cells: dict[str, Cell] = field(default_factory=dict)
    objects: dict[str, Any] = field(default_factory=dict)
    known: dict[str, Any] = field(default_factory=dict)
    agreed: tuple[tuple[str, str], ...] = ()
    ran: set[str] = field(default_factory=set)

    def names(self) -> list[tuple[str, str]]:
        """What this process has, as (name, kind), in the order of logging; objects last."""
        pairs = [(name, cell.kind) for name, cell in self.cells.items()]
        return pairs + [(name, "object") for name in self.objects]

    def differs(self) -> bool:
        """This process has a name that was not agreed, or lacks one that it owes."""
        own, agreed = set(self.names()), set(self.agreed)
        return not own <= agreed or any(owes(name, self.ran) for name, _ in agreed - own)


def owes(name: str, ran: set[str]) -> bool:
    """A process that ran batches of these loaders should have logged the name."""
    loader = _LOADER.search(name)
    return bool(ran) if loader is None else loader[0] in ran


def weight_of(name: str, batch_size: float) -> float:
    """The `batch_size` of a call of `log` as a weight.

    Raises:
        ValueError: It is negative.
    """
    if not batch_size >= 0:
        raise ValueError(f"batch_size of the metric {name!r} is {batch_size}; give 0 or more.")
    return float(batch_size)


def value_of_call(metric: Any) -> Any:
    """What a torchmetrics object's call returned for this batch alone; None if nothing is known."""
    return getattr(metric, "_forward_cache", None)  # torchmetrics gives it no other name


def forget_call(metric: Any) -> None:
    """Make an earlier call's value none of the batch that comes."""
    if value_of_call(metric) is not None:
        metric._forward_cache = None  # as its reset does


def computed(name: str, value: Any) -> Value:
    """What a metric object returned, as one number.

    Raises:
        ValueError: It is several.
        TypeError: It is no number.
    """
    if isinstance(value, Mapping):
        raise ValueError(
            f"The metric {name!r} computes a dict; log each of its values: "
            "self.log_dict(metric.compute())."
        )
    return scalar(name, value)


def scalar(name: str, value: Any) -> Value:
    """The value without its graph.

    Raises:
        TypeError: It is neither a number nor a tensor of one element, nor a metric object.
    """
    if isinstance(value, Tensor):
        if value.numel() != 1:
            raise ValueError(
                f"The metric {name!r} is a tensor of shape {tuple(value.shape)}; log a single "
                "number, for example its .mean()."
            )
        if not value.is_cpu:
            return value.detach().reshape(())
        value = value.item()  # nothing waits for the host
    try:
        return float(value)  # numpy's scalars too
    except (TypeError, ValueError):
        raise TypeError(
            f"The metric {name!r} is {value!r} of type {type(value).__name__}; log a number, a "
            "tensor of one element, or an object with update, compute and reset. For a dict use "
            "log_dict."
        ) from None


def to_floats(values: Mapping[str, Value]) -> dict[str, float]:
    """Read every value back, those that are on an accelerator in one transfer."""
    away = on_accelerator(values)
    if not away:
        return {name: float(value) for name, value in values.items()}
    read = dict(zip(away, stacked(away.values()).tolist(), strict=True))
    return {name: read[name] if name in read else float(values[name]) for name in values}


def on_accelerator(values: Mapping[str, Value]) -> dict[str, Tensor]:
    """Those of the values that reading waits for."""
    return {
        name: value
        for name, value in values.items()
        if isinstance(value, Tensor) and value.device.type != "cpu"
    }


def stacked(tensors: Iterable[Tensor]) -> Tensor:
    """Scalars of one accelerator as one vector, with as many digits as there are on it."""
    return torch.stack(
        [one.to(torch.float32 if one.device.type == "mps" else torch.float64) for one in tensors]
    )
