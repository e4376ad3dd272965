"""Accumulators of logged values that are not reduced yet: running totals and metric objects."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor

from trainer.distributed.guards import read_back

Value: TypeAlias = "float | Tensor"
Kind: TypeAlias = "Literal['mean', 'sum', 'min', 'max']"
KINDS = ("mean", "sum", "min", "max")
EMPTY = {"mean": 0.0, "sum": 0.0, "min": float("inf"), "max": float("-inf")}
LOADER = re.compile(r"/dataloader_idx_\d+$")  # the suffix of names with several loaders


class Scope(NamedTuple):
    """The part of the run in which `log` is called.

    Attributes:
        phase: ``"train"``, ``"validation"``, ``"test"`` or ``"predict"``.
        on_step: The default of the argument `on_step` of `log`; None outside steps, where values
            are accumulated over the epoch.
        by_callbacks: Whether these are the callbacks' epoch-end hooks. They run after the epoch's
            values are reduced, so that they can read them; values that they log are reduced
            separately.
    """

    phase: str
    on_step: bool | None
    by_callbacks: bool = False


TRAIN_STEP = Scope("train", True)
TRAIN_EPOCH = Scope("train", None)


@dataclass(slots=True)
class Cell:
    """The accumulator of one name on this rank.

    Attributes:
        kind: The reduction: ``"mean"``, ``"sum"``, ``"min"`` or ``"max"``.
        total: The total: for a mean the weighted sum, for min and max the extreme value.
        weight: The sum of the weights.
        prog_bar: Whether the progress bar shows it.
        last: The latest value.
    """

    kind: str
    total: Value
    weight: float = 0.0
    prog_bar: bool = False
    last: Value = 0.0

    def add(self, value: Value, weight: float) -> None:
        """Accumulate one more value."""
        if self.kind == "mean" and not weight:
            return  # a mean over no items is NaN, and NaN times a weight of 0 is still NaN
        self.last = value
        if self.kind == "mean":
            weighted = value * weight
            self.total = self.total + weighted if self.weight else weighted
        elif self.kind == "sum":
            self.total = self.total + value
        elif isinstance(value, Tensor) or isinstance(self.total, Tensor):
            pick = torch.minimum if self.kind == "min" else torch.maximum
            self.total = pick(as_tensor(self.total, value), as_tensor(value, self.total))
        else:
            better = value < self.total if self.kind == "min" else value > self.total
            if better or math.isnan(value):  # once NaN, always NaN, as in torch
                self.total = value
        self.weight += weight


def as_tensor(value: Value, like: Value) -> Tensor:
    """Return the value as a tensor of the dtype and on the device of `like`."""
    if isinstance(value, Tensor):
        return value
    assert isinstance(like, Tensor)
    # Fill on the device: copying a number from the host would synchronise with the device.
    return torch.full((), value, dtype=like.dtype, device=like.device)


@dataclass(slots=True)
class Cells:
    """The cells and metric objects of one interval: an update, or an epoch of a phase.

    Attributes:
        cells: The cells by name.
        objects: The metric objects (with ``compute`` and ``reset``) logged in the interval, by
            name.
        all_objects: All metric objects of this and earlier intervals by name, including copies of
            objects that only other ranks have.
        agreed: The (name, kind) pairs that all ranks agreed on in the latest exchange.
        ran: The name suffixes of the loaders from which this rank ran a batch in the interval.
    """

    cells: dict[str, Cell] = field(default_factory=dict)
    objects: dict[str, Any] = field(default_factory=dict)
    all_objects: dict[str, Any] = field(default_factory=dict)
    agreed: tuple[tuple[str, str], ...] = ()
    ran: set[str] = field(default_factory=set)

    def names(self) -> list[tuple[str, str]]:
        """Return this rank's (name, kind) pairs in the order of logging, metric objects last."""
        pairs = [(name, cell.kind) for name, cell in self.cells.items()]
        return pairs + [(name, "object") for name in self.objects]

    def own_values(self) -> dict[str, Value]:
        """Return this rank's values without reduction; metric objects are left out."""
        return {
            name: cell.total / cell.weight if cell.kind == "mean" else cell.total
            for name, cell in self.cells.items()
            if cell.kind != "mean" or cell.weight > 0
        }

    def differs(self) -> bool:
        """Return whether this rank has a name not agreed on, or lacks one that it should log."""
        own_names, agreed = set(self.names()), set(self.agreed)
        missing = agreed - own_names
        return not own_names <= agreed or any(is_collective(name, self.ran) for name, _ in missing)


def is_collective(name: str, ran: set[str]) -> bool:
    """Return whether a rank that ran batches of these loaders should have logged the name."""
    loader = LOADER.search(name)
    return bool(ran) if loader is None else loader[0] in ran


def weight_of(name: str, batch_size: float) -> float:
    """Return the argument `batch_size` of `log` as a weight.

    Raises:
        ValueError: `batch_size` is negative or NaN.
    """
    if not batch_size >= 0:
        raise ValueError(f"batch_size of the metric {name!r} is {batch_size}; give 0 or more.")
    return float(batch_size)


def value_of_call(metric: Any) -> Any:
    """Return a torchmetrics object's value for the latest batch alone; None if unknown.

    It is the result of the call ``metric(preds, target)``.
    """
    return getattr(metric, "_forward_cache", None)  # torchmetrics has no public name for it


def forget_call(metric: Any) -> None:
    """Clear the value for the latest batch, since a new batch begins."""
    if value_of_call(metric) is not None:
        metric._forward_cache = None  # as torchmetrics' `reset` does


def computed(name: str, value: Any) -> Value:
    """Return the result of a metric object as one number.

    Raises:
        ValueError: It is a dict, or has several elements.
        TypeError: It is not a number.
    """
    if isinstance(value, Mapping):
        raise ValueError(
            f"The metric {name!r} computes a dict; log each of its values: "
            "self.log_dict(metric.compute())."
        )
    return scalar(name, value)


def scalar(name: str, value: Any) -> Value:
    """Return a logged value as a float; on an accelerator as a detached tensor of shape ().

    Raises:
        ValueError: It is a tensor of several elements.
        TypeError: It is not a number, a tensor or a metric object.
    """
    if isinstance(value, Tensor):
        if value.numel() != 1:
            raise ValueError(
                f"The metric {name!r} is a tensor of shape {tuple(value.shape)}; log a single "
                "number, for example its .mean()."
            )
        if not value.is_cpu:
            return value.detach().reshape(())
        value = value.item()  # on the CPU this does not synchronise with a device
    try:
        return float(value)  # also numpy's scalars
    except (TypeError, ValueError):
        raise TypeError(
            f"The metric {name!r} is {value!r} of type {type(value).__name__}; log a number, a "
            "tensor of one element, or an object with update, compute and reset. For a dict use "
            "log_dict."
        ) from None


def to_floats(values: Mapping[str, Value]) -> dict[str, float]:
    """Return all values as floats; those on an accelerator are copied in one transfer."""
    on_device = on_accelerator(values)
    if not on_device:
        return {name: float(value) for name, value in values.items()}
    read = dict(zip(on_device, read_back(stacked(on_device.values())).tolist(), strict=True))
    return {name: read[name] if name in read else float(values[name]) for name in values}


def on_accelerator(values: Mapping[str, Value]) -> dict[str, Tensor]:
    """Return the values that are tensors on an accelerator: reading them waits for the device."""
    return {
        name: value
        for name, value in values.items()
        if isinstance(value, Tensor) and not value.is_cpu
    }


def stacked(tensors: Iterable[Tensor]) -> Tensor:
    """Stack scalar tensors of one device into a float64 tensor of shape (N,); float32 on MPS."""
    return torch.stack(
        [t.to(torch.float32 if t.device.type == "mps" else torch.float64) for t in tensors]
    )
