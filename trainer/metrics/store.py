"""The store behind `TrainModule.log`."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from trainer.errors import MetricError, choose
from trainer.metrics.cells import (
    EMPTY,
    KINDS,
    LOADER,
    TRAIN_STEP,
    Cell,
    Cells,
    Kind,
    Scope,
    Value,
    computed,
    forget_call,
    scalar,
    to_floats,
    value_of_call,
    weight_of,
)
from trainer.metrics.reduction import Reduction

RESERVED = frozenset({"step", "epoch", "time"})
_UNTOLD = "\0"  # begins an internal suffix of a name: the loader of the value


class _Place(NamedTuple):
    """The destination of a logged value: a set of cells, and the value's name in it."""

    cells: Cells
    key: str


class MetricStore:
    """All values that were logged and not yet reduced.

    Args:
        device: The device of the totals.
        world_size: The number of processes.
        quiet_training: Drop values logged in training.

    Attributes:
        device: The constructor's `device`.
        quiet_training: The constructor's `quiet_training`.
        scope: The part of the run in which `log` is called; None where it cannot be called.
        private: Names that are not logged to trackers.
        loader_of: The loader suffix of each value of the latest epoch whose name lacks it.
        stepwise: The metric objects logged on steps of the current epoch, which its end resets.
        held: Inside a validation, the number of updates of metric objects that hold values from
            before it, by id; -1 where it is unknown.
        step_reduced: Whether the values of the latest update were reduced.
    """

    def __init__(
        self, device: torch.device, *, world_size: int = 1, quiet_training: bool = False
    ) -> None:
        self.device, self._world_size = device, world_size
        # The totals of a long epoch need the precision; MPS has no float64.
        self._dtype = torch.float32 if device.type == "mps" else torch.float64
        self._reduction = Reduction(device, self._dtype, world_size)
        self.scope: Scope | None = None
        self._muted = False
        self.quiet_training = quiet_training
        self._unheard = "train" if quiet_training else None
        self.items = 1.0
        self.loader_suffix = ""
        self.private: set[str] = set()
        self.loader_of: dict[str, str] = {}
        self.step = Cells()
        self.epochs: dict[str, Cells] = {}
        self._places: dict[tuple[Any, ...], list[_Place]] = {}
        self._kept: dict[str, Value] = {}  # for the progress bar: the last epoch's values
        self._shown: dict[str, float] = {}
        self._arriving: tuple[dict[str, Tensor], Any] | None = None  # copies in flight, their event
        self._objects_shown: set[str] = set()  # metric objects that the bar shows
        self.stepwise: dict[str, Any] = {}
        self.held: dict[int, int] = {}
        self.step_reduced = False
        self._outdated: set[str] = set()  # names that were validated since the latest update

    @property
    def names(self) -> set[str]:
        """All names logged so far; those of other processes as of the latest reduction."""
        return self._reduction.names

    @names.setter
    def names(self, names: set[str]) -> None:
        self._reduction.names = names
        self._places.clear()  # the next call of `log` adds its name

    @contextmanager
    def muted(self) -> Iterator[None]:
        """Make `log` a no-op in the block, whose batch is not this process's own."""
        self._muted = True
        try:
            yield
        finally:
            self._muted = False

    def begin_batch(self, items: float, loader_suffix: str = "") -> None:
        """Begin a batch, and set the default weight of its values."""
        assert self.scope is not None
        self.items = items
        self.loader_suffix = loader_suffix
        if self.scope.phase == "train":  # a validation runs before its update's values are dropped
            self.step.ran.add(loader_suffix)
            for metric in self.stepwise.values():
                forget_call(metric)
        self.epoch(self.scope.phase).ran.add(loader_suffix)

    def begin_epoch_values(self) -> None:
        """Leave the batches: values logged now have a weight of 1 on each process."""
        self.items = 1.0
        self.loader_suffix = ""

    def epoch(self, phase: str) -> Cells:
        """Return the cells of a phase's current epoch."""
        cells = self.epochs.get(phase)
        if cells is None:
            cells = self.epochs[phase] = Cells()
        return cells

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
        scope = self.scope
        if self._muted or (scope is not None and scope.phase == self._unheard):
            return
        if scope is None:
            raise MetricError(
                f"log({name!r}) was called where no value can be recorded. Call it inside a step, "
                "in a hook before or after one, or in the module's own on_train_epoch_end, "
                "on_validation_epoch_end or on_test_epoch_end: callbacks' epoch-end hooks run "
                "after the epoch's values were reduced."
            )
        if reduce not in KINDS:
            raise ValueError(choose(f"reduce of the metric {name!r}", reduce, KINDS))
        if not isinstance(name, str):
            raise TypeError(f"A metric's name is {name!r}; it must be a string.")
        is_number = isinstance(value, (Tensor, float, int))
        is_object = not is_number and hasattr(value, "compute") and hasattr(value, "reset")
        if not is_object:
            value = scalar(name, value)
        weight = self.items if batch_size is None else weight_of(name, batch_size)
        call = (scope, name, on_step, on_epoch, is_object, self.loader_suffix)
        places = self._places.get(call)
        if places is None:  # cached for further calls with the same arguments
            places = self._places[call] = self._find_places(*call)
            self.names.update(_told(place.key) for place in places)
        for place in places:
            if not is_object:
                self._keep(place, value, weight, reduce, prog_bar)
            elif place.cells is self.step and (of_call := value_of_call(value)) is not None:
                self._keep(place, computed(name, of_call), weight, "mean", prog_bar)
            else:  # in a step cell without a value of the call: its value so far
                self._keep_object(place, value, prog_bar)
            if is_object and place.cells is self.step:
                self.stepwise[name] = value

    def _find_places(
        self,
        scope: Scope,
        name: str,
        on_step: bool | None,
        on_epoch: bool | None,
        is_object: bool,
        suffix: str,
    ) -> list[_Place]:
        """Return the destinations of a call's value."""
        if name in RESERVED:
            raise ValueError(
                f"A metric cannot be called {name!r}: each record has a field with that name."
            )
        on_step, on_epoch = _when(name, scope, on_step, on_epoch, is_object=is_object)
        kinds = ("_step", "_epoch") if on_step and on_epoch else ("", "")
        places = []
        if on_step and scope.phase == "train":  # steps of an evaluation are not recorded
            places.append(_Place(self.step, name + kinds[0] + suffix))
        if on_epoch:
            places.append(_Place(self.epoch(scope.phase), name + kinds[1] + suffix))
        return places

    @contextmanager
    def renamed(self, name: str, *, logger: bool, add_dataloader_idx: bool) -> Iterator[None]:
        """Change how `log` treats this name in the block: no trackers, or no loader suffix."""
        suffix = self.loader_suffix
        if not logger:
            told = "" if not add_dataloader_idx else suffix
            self.private.update(name + end + told for end in ("", "_step", "_epoch"))
        if suffix and not add_dataloader_idx:
            self.loader_suffix = _UNTOLD + suffix
        try:
            yield
        finally:
            self.loader_suffix = suffix

    def _keep(self, place: _Place, value: Value, weight: float, kind: Kind, prog_bar: bool) -> None:
        cells, key = place
        cell = cells.cells.get(key)
        if cell is None:
            cell = cells.cells[key] = Cell(kind, EMPTY[kind])
        elif cell.kind != kind:
            raise ValueError(
                f"The metric {key!r} was logged with reduce={cell.kind!r} and now with "
                f"reduce={kind!r}; use the same in every call."
            )
        cell.prog_bar = prog_bar
        if isinstance(value, Tensor) and value.dtype != self._dtype:
            value = value.to(self._dtype)
        cell.add(value, weight)

    def _keep_object(self, place: _Place, value: Any, prog_bar: bool) -> None:
        cells, key = place
        if prog_bar:
            self._objects_shown.add(key)
        if self._world_size > 1 and not hasattr(value, "sync_on_compute"):
            raise TypeError(
                f"The metric {key!r} is a {type(value).__name__}, which cannot combine the "
                f"states of {self._world_size} processes. Log a torchmetrics.Metric, or plain "
                "values."
            )
        if getattr(value, "update_count", 0) > self.held.get(id(value), math.inf):
            raise ValueError(
                f"The metric object {_told(key)!r} holds values of training, which would mix with "
                "those of the validation. Use one object for each phase."
            )
        if self.loader_suffix:
            _refuse_several_loaders(key, value, cells.objects)
        cells.objects[key] = cells.known[key] = value

    # -- reducing ------------------------------------------------------------------------------

    def reduce_step(self) -> dict[str, Value]:
        """Return the window's values over all processes; collective."""
        self.step_reduced = True
        return self._reduction.reduce(self.step, "this update")

    def begin_window(self) -> None:
        """Begin a new window."""
        self.scope = TRAIN_STEP
        self.step_reduced = False
        if self._outdated:
            self._outdated.clear()
        self.step.cells.clear()
        self.step.objects.clear()
        self.step.ran.clear()
        self.items, self.loader_suffix = 1.0, ""

    def reduce_epoch(self, phase: str) -> dict[str, Value]:
        """Return the epoch's values over all processes, and reset them; collective."""
        cells = self.epoch(phase)
        values = self._reduction.reduce(cells, f"this epoch of {phase}")
        shown = [name for name, cell in cells.cells.items() if cell.prog_bar]
        shown += self._objects_shown.intersection(cells.objects)
        self._kept.update({_told(name): values[name] for name in shown if name in values})
        for name, kind in self._reduction.pairs(cells):
            if kind == "object":
                cells.known[name].reset()
        if phase == "train":
            self._keep_last(cells, values)
            for metric in self.stepwise.values():
                metric.reset()
            self.stepwise.clear()
        else:
            self._outdated.update(map(_told, values))
        cells.cells.clear()
        cells.objects.clear()
        cells.ran.clear()
        return self._renamed(values)

    def _keep_last(self, cells: Cells, values: dict[str, Value]) -> None:
        """Replace objects of the epoch's last update, which are reset, by their values so far.

        That is the epoch's value; objects that were not logged over the epoch are dropped.
        """
        for key, metric in self.step.objects.items():
            for name, of_epoch in cells.objects.items():
                if of_epoch is metric and name in values:
                    self._keep(_Place(self.step, key), values[name], 1.0, "mean", prog_bar=False)
        self.step.objects.clear()

    def _renamed(self, values: dict[str, Value]) -> dict[str, Value]:
        """Return the values under their public names."""
        renamed = {_told(key): value for key, value in values.items()}
        if len(renamed) < len(values):
            told = [_told(key) for key in values]
            twice = next(name for name in told if told.count(name) > 1)
            raise ValueError(
                f"Several loaders logged {twice!r} with add_dataloader_idx=False; log each under a "
                "different name, or leave the argument out."
            )
        parts = [key.partition(_UNTOLD) for key in values]
        self.loader_of = {name: suffix for name, _, suffix in parts if suffix}
        return renamed

    def forget(self, phase: str) -> None:
        """Drop the values of an abandoned epoch."""
        cells = self.epochs.pop(phase, Cells())
        self._places.clear()
        for metric in cells.objects.values():
            metric.reset()

    # -- showing -------------------------------------------------------------------------------

    def own_values(self) -> dict[str, Value]:
        """Return this process's own values of what was logged and is not yet reduced.

        Values of an epoch are those of its part so far. Metric objects, which compute over all
        processes, are left out.
        """
        train = self.epoch("train").own_values()
        if not self.step_reduced:
            train |= self.step.own_values()
        evaluated = [c.own_values() for phase, c in self.epochs.items() if phase != "train"]
        own = {_told(key): value for key, value in train.items()}
        own = {name: value for name, value in own.items() if name not in self._outdated}
        return own | {_told(key): value for values in evaluated for key, value in values.items()}

    def forget_shown(self) -> None:
        """Show none of the values logged so far."""
        self._kept.clear()

    def progress_values(self, *, wait: bool = False) -> dict[str, float]:
        """Return this process's values with ``prog_bar``: of its update, and of finished epochs.

        On an accelerator these are the latest values whose asynchronous copy has arrived: the host
        does not wait, unless it is asked to.
        """
        live = {_told(n): c.last for n, c in self.step.cells.items() if c.prog_bar}
        latest = live | {n: value for n, value in self._kept.items() if n not in live}
        if wait or self.device.type == "cpu":
            self._arriving, self._shown = None, to_floats(latest)
            return dict(self._shown)
        if self._arriving is not None and self._arriving[1].query():
            self._shown = {name: float(value) for name, value in self._arriving[0].items()}
            self._arriving = None
        if self._arriving is None:
            away = {
                name: torch.as_tensor(value).to("cpu", non_blocking=True)
                for name, value in latest.items()
            }
            event = torch.Event(self.device)
            event.record()
            self._arriving = away, event
        return dict(self._shown)


def _refuse_several_loaders(key: str, metric: Any, objects: Mapping[str, Any]) -> None:
    """Refuse a metric object that would hold the data of several loaders.

    Raises:
        ValueError: It was logged for another one.
    """
    for other, logged in objects.items():
        if logged is metric and _loader_of(other) != _loader_of(key):
            name = _told(LOADER.sub("", key))
            raise ValueError(
                f"The metric object {name!r} is logged for several loaders, and each value would "
                "include the data of all. Use one object for each: "
                "self.accuracies[dataloader_idx], of a ModuleList."
            )


def _loader_of(key: str) -> str:
    found = LOADER.search(key)
    return found.group() if found else ""


def _told(key: str) -> str:
    """Return the public name of a value."""
    return key.partition(_UNTOLD)[0]


def _when(
    name: str, scope: Scope, on_step: bool | None, on_epoch: bool | None, *, is_object: bool
) -> tuple[bool, bool]:
    """Return whether a value is recorded on the step, and whether over the epoch.

    Raises:
        ValueError: The arguments ask for something that is not recorded in this scope.
    """
    given = "" if on_step is None else f"on_step={on_step}, "
    if on_step is None:
        on_step = bool(scope.on_step) and not is_object
    elif on_step and scope.on_step is None:
        raise ValueError(
            f"log({name!r}, on_step=True) was called outside a step; use on_epoch=True there."
        )
    if on_step is False and on_epoch is False:
        other = ", or pass on_step=True" if scope.on_step else ""
        raise ValueError(
            f"log({name!r}, {given}on_epoch=False) records nothing; leave on_epoch out{other}."
        )
    evaluates = scope.phase != "train"
    if on_epoch is None:
        on_epoch = evaluates or not on_step
    elif on_step and evaluates and not on_epoch:
        raise ValueError(
            f"log({name!r}, on_step=True, on_epoch=False) was called in {scope.phase}, where only "
            "the values of the whole pass are recorded; leave both arguments out there."
        )
    return on_step, on_epoch
