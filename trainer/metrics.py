"""What the module logs: kept on the device, reduced once, read back in one transfer.

`MetricStore` has two kinds of cells. A step cell holds what one window of micro-batches logged; at
a log interval it becomes one value. An epoch cell holds running sums until the epoch (or the
evaluation) ends. Both are (total, weight) pairs, so that a mean over processes is the mean over all
items and never a mean of means (P5).
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from trainer.distributed.collectives import all_gather_object, broadcast_object
from trainer.errors import MetricError, choose

Value: TypeAlias = "float | Tensor"
Kind: TypeAlias = "Literal['mean', 'sum', 'min', 'max']"
RESERVED = frozenset({"step", "epoch", "time"})
KINDS = ("mean", "sum", "min", "max")
_LOADER = re.compile(r"/dataloader_idx_\d+$")  # ends the names of each of several loaders
_EMPTY = {"mean": 0.0, "sum": 0.0, "min": float("inf"), "max": float("-inf")}


@dataclass(frozen=True, slots=True)
class Scope:
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
            self.total = pick(_as_tensor(self.total, value), _as_tensor(value, self.total))
        else:
            self.total = (min if self.kind == "min" else max)(self.total, value)
        self.weight += weight


def _as_tensor(value: Value, like: Value) -> Tensor:
    if isinstance(value, Tensor):
        return value
    assert isinstance(like, Tensor)
    return torch.as_tensor(value, dtype=like.dtype, device=like.device)


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

    def names(self) -> set[tuple[str, str]]:
        """What this process has, as (name, kind)."""
        pairs = {(name, cell.kind) for name, cell in self.cells.items()}
        return pairs | {(name, "object") for name in self.objects}

    def differs(self) -> bool:
        """This process has a name that was not agreed, or lacks one that it owes."""
        own, agreed = self.names(), set(self.agreed)
        return not own <= agreed or any(_owes(name, self.ran) for name, _ in agreed - own)


class MetricStore:
    """Everything that was logged and is not yet reduced.

    Args:
        device: Where totals are kept.
        world_size: How many processes there are.

    Attributes:
        scope: Where in the run `log` is called from; None where it cannot work.
        names: Every name that was logged.
    """

    def __init__(self, device: torch.device, *, world_size: int = 1) -> None:
        self._device, self._world_size = device, world_size
        # The totals of a long epoch need the digits; MPS has no float64.
        self._dtype = torch.float32 if device.type == "mps" else torch.float64
        self.scope: Scope | None = None
        self._muted = False
        self.items = 1.0
        self.loader_suffix = ""
        self.names: set[str] = set()
        self.step = Cells()
        self.epochs: dict[str, Cells] = {}
        self._kept: dict[str, Value] = {}  # for the progress bar: the last epoch's values
        self._shown: dict[str, Tensor] = {}

    @contextmanager
    def muted(self) -> Iterator[None]:
        """Inside, `log` does nothing: the batch at hand is not this process's own."""
        self._muted = True
        try:
            yield
        finally:
            self._muted = False

    def begin_batch(self, items: float, loader_suffix: str = "") -> None:
        """A batch comes: the weight of what it logs, unless told otherwise."""
        assert self.scope is not None
        self.items = items
        self.loader_suffix = loader_suffix
        self.step.ran.add(loader_suffix)
        self.epoch(self.scope.phase).ran.add(loader_suffix)

    def begin_epoch_values(self) -> None:
        """No batch is at hand: what is logged now counts once for each process."""
        self.items = 1.0
        self.loader_suffix = ""

    def epoch(self, phase: str) -> Cells:
        """The cells of a phase's current epoch."""
        return self.epochs.setdefault(phase, Cells())

    # -- logging -------------------------------------------------------------------------------

    def log(
        self,
        name: str,
        value: Any,
        *,
        on_step: bool | None = None,
        on_epoch: bool | None = None,
        prog_bar: bool = False,
        reduce: Kind = "mean",
        batch_size: float | None = None,
    ) -> None:
        """See `TrainModule.log`."""
        if self._muted:
            return
        scope = self.scope
        if scope is None:
            raise MetricError(
                f"log({name!r}) was called where no value can be recorded. Call it inside a step, "
                "or in the hooks from on_train_start to on_train_end, on_validation_* or on_test_*."
            )
        if reduce not in KINDS:
            raise ValueError(choose(f"reduce of the metric {name!r}", reduce, KINDS))
        if not isinstance(name, str):
            raise TypeError(f"A metric's name is {name!r}; it must be a string.")
        if name in RESERVED:
            raise ValueError(
                f"A metric cannot be called {name!r}: each record has a field of that name."
            )
        is_object = hasattr(value, "compute") and hasattr(value, "reset")
        if on_step is None:
            on_step = bool(scope.on_step) and not is_object
        elif on_step and scope.on_step is None:
            raise ValueError(
                f"log({name!r}, on_step=True) was called outside a step; use on_epoch=True there."
            )
        if on_epoch is None:
            on_epoch = not on_step
        if not is_object:
            value = _scalar(name, value)
        weight = self.items if batch_size is None else _weight(name, batch_size)
        suffix = self.loader_suffix
        both = on_step and on_epoch
        if on_step and scope.phase == "train":  # an evaluation's steps have no place in the record
            key = f"{name}_step{suffix}" if both else name + suffix
            self._keep(self.step, key, value, weight, reduce, prog_bar, is_object)
        if on_epoch:
            key = f"{name}_epoch{suffix}" if both else name + suffix
            self._keep(self.epoch(scope.phase), key, value, weight, reduce, prog_bar, is_object)

    def _keep(
        self,
        cells: Cells,
        key: str,
        value: Any,
        weight: float,
        kind: str,
        prog_bar: bool,
        is_object: bool,
    ) -> None:
        self.names.add(key)
        if is_object:
            if self._world_size > 1 and not hasattr(value, "sync_on_compute"):
                raise TypeError(
                    f"The metric {key!r} is a {type(value).__name__}, which cannot combine the "
                    f"states of {self._world_size} processes. Log a torchmetrics.Metric, or plain "
                    "values."
                )
            cells.objects[key] = cells.known[key] = value
            return
        cell = cells.cells.get(key)
        if cell is None:
            cell = cells.cells[key] = Cell(kind, _EMPTY[kind])
        elif cell.kind != kind:
            raise ValueError(
                f"The metric {key!r} was logged with reduce={cell.kind!r} and now with "
                f"reduce={kind!r}; give every call the same."
            )
        cell.prog_bar = prog_bar
        if isinstance(value, Tensor) and value.dtype != self._dtype:
            value = value.to(self._dtype)
        cell.add(value, weight)

    # -- reducing ------------------------------------------------------------------------------

    def reduce_step(self) -> dict[str, Value]:
        """The window's values over all processes; collective; nothing is read back."""
        return self._reduce(self.step, "this update")

    def clear_step(self) -> None:
        """A new window begins."""
        self.step.cells.clear()
        self.step.objects.clear()
        self.step.ran.clear()

    def reduce_epoch(self, phase: str) -> dict[str, Value]:
        """The epoch's values over all processes, which start anew; collective."""
        cells = self.epoch(phase)
        values = self._reduce(cells, f"this epoch of {phase}")
        shown = [name for name, cell in cells.cells.items() if cell.prog_bar]
        self._kept.update({name: values[name] for name in shown if name in values})
        for name, kind in self._reduced_pairs(cells):
            if kind == "object":
                cells.known[name].reset()
        cells.cells.clear()
        cells.objects.clear()
        cells.ran.clear()
        return values

    def _reduce(self, cells: Cells, what: str) -> dict[str, Value]:
        if self._world_size == 1:
            reduced = {
                name: cell.total / cell.weight if cell.kind == "mean" else cell.total
                for name, cell in cells.cells.items()
                if cell.kind != "mean" or cell.weight > 0
            }
        else:
            reduced = self._all_reduce(cells, what)
        for name, kind in self._reduced_pairs(cells):
            if kind == "object":
                reduced[name] = _computed(name, cells.known[name].compute())
        return reduced

    def _reduced_pairs(self, cells: Cells) -> Sequence[tuple[str, str]]:
        """What a reduction is over, in the same order on all processes."""
        return sorted(cells.names()) if self._world_size == 1 else cells.agreed

    def _all_reduce(self, cells: Cells, what: str) -> dict[str, Value]:
        """One reduction for means and sums; a second and third only where min or max are used.

        The names are those agreed before; a flag in the sum says that somebody has others now, and
        only then are they exchanged.
        """
        while True:
            totals: list[Value] = [float(cells.differs())]
            for name, kind in cells.agreed:
                if kind in ("mean", "sum"):
                    cell = cells.cells.get(name)
                    totals += [cell.total, cell.weight] if cell else [0.0, 0.0]
            summed = self._vector(totals)
            dist.all_reduce(summed)
            read = summed.tolist()
            if not read[0]:
                break
            cells.agreed = _agree(cells.names(), cells.ran, what)
            self._share_objects(cells)
        reduced: dict[str, Value] = {}
        position = 1
        for name, kind in cells.agreed:
            if kind in ("mean", "sum"):
                total, weight = summed[position], summed[position + 1]
                if kind == "sum" or read[position + 1] > 0:
                    reduced[name] = total / weight if kind == "mean" else total
                position += 2
        for kind, operation in (("min", dist.ReduceOp.MIN), ("max", dist.ReduceOp.MAX)):
            names = [name for name, other in cells.agreed if other == kind]
            if names:
                empty = _EMPTY[kind]
                vector = self._vector(
                    [cells.cells[name].total if name in cells.cells else empty for name in names]
                )
                dist.all_reduce(vector, op=operation)
                reduced.update(zip(names, vector, strict=True))
        return reduced

    def _share_objects(self, cells: Cells) -> None:
        """Give each process every metric object, since computing one needs all of them.

        Where a process has run no batch, a copy without data stands in.
        """
        names = [name for name, kind in cells.agreed if kind == "object"]
        if not names:
            return
        holders = all_gather_object(set(cells.known))
        for name in names:
            if all(name in held for held in holders):
                continue
            owner = next(rank for rank, held in enumerate(holders) if name in held)
            shared = broadcast_object(_emptied(cells.known.get(name)), owner)
            cells.known.setdefault(name, shared.to(self._device))

    def _vector(self, values: list[Value]) -> Tensor:
        if not any(isinstance(value, Tensor) for value in values):
            return torch.tensor(values, dtype=self._dtype, device=self._device)
        like = torch.empty((), dtype=self._dtype, device=self._device)
        return torch.stack([_as_tensor(value, like).reshape(()) for value in values])

    # -- showing -------------------------------------------------------------------------------

    def forget_shown(self) -> None:
        """Show nothing of what was logged so far."""
        self._kept.clear()

    def progress_values(self) -> dict[str, float]:
        """The latest values with ``prog_bar``, of this process alone.

        On an accelerator they are those of the previous call, whose transfer has ended since.
        """
        cells = [self.step, *self.epochs.values()]
        live = {n: c.last for group in cells for n, c in group.cells.items() if c.prog_bar}
        latest = live | {n: value for n, value in self._kept.items() if n not in live}
        if self._device.type == "cpu":
            return {name: float(value) for name, value in latest.items()}
        shown = {name: float(value) for name, value in self._shown.items()}
        self._shown = {
            name: torch.as_tensor(value).to("cpu", non_blocking=True)
            for name, value in latest.items()
        }
        return shown


def _owes(name: str, ran: set[str]) -> bool:
    """A process that ran batches of these loaders should have logged the name."""
    loader = _LOADER.search(name)
    return bool(ran) if loader is None else loader[0] in ran


def _agree(own: set[tuple[str, str]], ran: set[str], what: str) -> tuple[tuple[str, str], ...]:
    """Exchange the names; a rank that ran a loader's batches and lacks some is an error on all."""
    reports = all_gather_object((sorted(own), ran))
    union = sorted({pair for names, _ in reports for pair in names})
    for rank, (names, ran_there) in enumerate(reports):
        missing = [pair for pair in union if pair not in names and _owes(pair[0], ran_there)]
        if missing:
            having = next(r for r, (others, _) in enumerate(reports) if missing[0] in others)
            raise MetricError(
                f"Rank {rank} did not log {', '.join(repr(name) for name, _ in missing)} in "
                f"{what}, but rank {having} did. Every rank that runs a batch must log the same "
                "names with the same `reduce`: move the call out of the condition that only some "
                "ranks meet."
            )
    return tuple(union)


def _weight(name: str, batch_size: float) -> float:
    if not batch_size >= 0:
        raise ValueError(f"batch_size of the metric {name!r} is {batch_size}; give 0 or more.")
    return float(batch_size)


def _scalar(name: str, value: Any) -> Value:
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
        return value.detach().reshape(())
    if isinstance(value, (int, float)):
        return float(value)
    try:  # numpy's scalars
        return float(value)
    except (TypeError, ValueError):
        raise TypeError(
            f"The metric {name!r} is {value!r} of type {type(value).__name__}; log a number, a "
            "tensor of one element, or an object with update, compute and reset. For a dict use "
            "log_dict."
        ) from None


def _emptied(metric: Any) -> Any:
    """A copy of a torchmetrics object on the host, without data."""
    if metric is None:
        return None
    emptied = copy.deepcopy(metric).cpu()
    emptied.reset()
    return emptied


def _computed(name: str, value: Any) -> Value:
    if isinstance(value, Mapping):
        raise ValueError(
            f"The metric {name!r} computes a dict; log each of its values: "
            "self.log_dict(metric.compute())."
        )
    return _scalar(name, value)


def to_floats(values: Mapping[str, Value]) -> dict[str, float]:
    """Read every value back, the tensors among them in one transfer."""
    tensors = [value for value in values.values() if isinstance(value, Tensor)]
    if not tensors:
        return {name: float(value) for name, value in values.items()}
    wide = torch.float32 if tensors[0].device.type == "mps" else torch.float64
    read = iter(torch.stack([tensor.to(wide) for tensor in tensors]).tolist())
    return {
        name: next(read) if isinstance(value, Tensor) else value for name, value in values.items()
    }
