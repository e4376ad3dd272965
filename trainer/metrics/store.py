"""The store of logged values behind `TrainModule.log`."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from trainer.checks import choice_error
from trainer.errors import MetricError
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
    on_accelerator,
    scalar,
    stacked,
    to_floats,
    value_of_call,
    weight_of,
)
from trainer.metrics.reduction import Reduction
from trainer.tree import start_copy_to_host

RESERVED = frozenset({"step", "epoch", "time"})
_HIDDEN = "\0"  # prefix of the hidden loader suffix of a name, with add_dataloader_idx=False


class _Slot(NamedTuple):
    """The destination of a logged value: a set of cells, and the value's name in it."""

    cells: Cells
    key: str


class MetricStore:
    """Accumulates logged values until they are reduced.

    Args:
        device: The device of the totals.
        world_size: The number of processes.
        counts: See `Reduction`.
        quiet_training: Whether to drop values logged in training.

    Attributes:
        device: The constructor's `device`.
        quiet_training: The constructor's `quiet_training`.
        scope: The part of the run in which `log` is called; None where it may not be called.
        private: Names that are not sent to trackers.
        loader_of: For values of the latest epoch logged with ``add_dataloader_idx=False``: the
            loader suffix by name.
        stepwise: The metric objects logged on steps of the current epoch; they are reset at its
            end.
        outer_updates: Inside a validation: the number of updates of metric objects that hold values
            from before it, by ``id``; -1 where the number is unknown.
        step_reduced: Whether the values of the latest update are already reduced.
    """

    def __init__(
        self,
        device: torch.device,
        *,
        world_size: int = 1,
        counts: bool = True,
        quiet_training: bool = False,
    ) -> None:
        self.device, self._world_size = device, world_size
        # Totals of a long epoch need float64. MPS does not support it.
        self._dtype = torch.float32 if device.type == "mps" else torch.float64
        self._reduction = Reduction(device, self._dtype, world_size, counts=counts)
        self.scope: Scope | None = None
        self._muted = False
        self.quiet_training = quiet_training
        self._ignored_phase = "train" if quiet_training else None
        self.items = 1.0
        self.loader_suffix = ""
        self.private: set[str] = set()
        self.loader_of: dict[str, str] = {}
        self.step = Cells()
        self.epochs: dict[str, Cells] = {}
        self._slots: dict[tuple[Any, ...], list[_Slot]] = {}
        self._epoch_values: dict[str, Value] = {}  # values of finished epochs, for the progress bar
        self._shown_values: dict[str, float] = {}
        # In flight: the values on the host, the names of the others, their copies and the event.
        self._copies: tuple[dict[str, float], list[str], Tensor, Any] | None = None
        self._objects_shown: set[str] = set()  # metric objects that the progress bar shows
        self.stepwise: dict[str, Any] = {}
        self._computed: list[Any] = []  # metric objects to be reset
        self.outer_updates: dict[int, int] = {}
        self.step_reduced = False
        self._first = (False, False)  # whether the batch is the first of its update and epoch
        self._overridden: set[str] = set()  # names with a validation value newer than the update

    @property
    def names(self) -> set[str]:
        """All names logged so far; names of other ranks as of the latest reduction."""
        return self._reduction.names

    @names.setter
    def names(self, names: set[str]) -> None:
        self._reduction.names = names
        self._slots.clear()  # so that the next call of `log` adds its name again

    @contextmanager
    def muted(self) -> Iterator[None]:
        """Make `log` a no-op inside, such as for a dummy batch."""
        self._muted = True
        try:
            yield
        finally:
            self._muted = False

    def begin_batch(self, items: float, loader_suffix: str = "") -> None:
        """Begin a batch.

        Args:
            items: The number of items, the default weight of values logged from here on.
            loader_suffix: ``/dataloader_idx_N`` with several loaders, else empty.
        """
        assert self.scope is not None
        self.items = items
        self.loader_suffix = loader_suffix
        # Step values are kept during a validation, which may run before they are recorded.
        ran = self.epoch(self.scope.phase).ran
        if self.scope.phase == "train":
            self._first = loader_suffix not in self.step.ran, loader_suffix not in ran
            self.step.ran.add(loader_suffix)
            for metric in self.stepwise.values():
                forget_call(metric)
        ran.add(loader_suffix)

    def leave_batch(self) -> None:
        """Leave the training batch that has begun: this rank does not run it."""
        for cells, first in zip((self.step, self.epoch("train")), self._first, strict=True):
            if first:
                cells.ran.discard(self.loader_suffix)

    def begin_epoch_values(self) -> None:
        """Leave the batches: values logged from here on have a weight of 1 on each rank."""
        self.items = 1.0
        self.loader_suffix = ""

    def epoch(self, phase: str) -> Cells:
        """Return the cells of a phase's current epoch."""
        cells = self.epochs.get(phase)
        if cells is None:
            cells = self.epochs[phase] = Cells()
        return cells

    def _epoch_of(self, scope: Scope) -> Cells:
        return self.epoch(f"{scope.phase}, callbacks" if scope.by_callbacks else scope.phase)

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
        if self._muted or (scope is not None and scope.phase == self._ignored_phase):
            return
        if scope is None:
            raise MetricError(
                f"log({name!r}) was called where no value can be recorded. Call it inside a step, "
                "in a hook before or after one, or in on_train_epoch_end, "
                "on_validation_epoch_end or on_test_epoch_end."
            )
        if reduce not in KINDS:  # in line, since every step runs this
            raise ValueError(choice_error(f"reduce of the metric {name!r}", reduce, KINDS))
        is_number = isinstance(value, (Tensor, float, int))
        is_object = not is_number and hasattr(value, "compute") and hasattr(value, "reset")
        if not is_object:
            value = scalar(name, value)
        weight = self.items if batch_size is None else weight_of(name, batch_size)
        call = (scope, name, on_step, on_epoch, is_object, self.loader_suffix)
        slots = self._slots.get(call)
        if slots is None:  # cached for further calls with the same arguments
            slots = self._slots[call] = self._find_slots(*call)
            self.names.update(_public_name(slot.key) for slot in slots)
        for slot in slots:
            if not is_object:
                self._keep(slot, value, weight, reduce, prog_bar)
            elif slot.cells is self.step and (of_call := value_of_call(value)) is not None:
                self._keep(slot, computed(name, of_call), weight, "mean", prog_bar)
            else:  # an epoch cell, or the batch's value is unknown: use the value so far
                self._keep_object(slot, value, prog_bar)
            if is_object and slot.cells is self.step:
                self.stepwise[name] = value

    def _find_slots(
        self,
        scope: Scope,
        name: str,
        on_step: bool | None,
        on_epoch: bool | None,
        is_object: bool,
        suffix: str,
    ) -> list[_Slot]:
        """Return the cells that a call of `log` writes to: step, epoch or both."""
        if name in RESERVED:
            raise ValueError(
                f"A metric cannot be called {name!r}: each record has a field with that name."
            )
        on_step, on_epoch = _step_and_epoch(name, scope, on_step, on_epoch, is_object=is_object)
        kinds = ("_step", "_epoch") if on_step and on_epoch else ("", "")
        slots = []
        if on_step and scope.phase == "train":  # evaluations record epoch values only
            slots.append(_Slot(self.step, name + kinds[0] + suffix))
        if on_epoch:
            slots.append(_Slot(self._epoch_of(scope), name + kinds[1] + suffix))
        return slots

    @contextmanager
    def renamed(self, name: str, *, logger: bool, add_dataloader_idx: bool) -> Iterator[None]:
        """Change how `log` treats a name inside.

        Args:
            name: The name.
            logger: Whether the value is sent to trackers.
            add_dataloader_idx: Whether the loader suffix is appended to the name.
        """
        suffix = self.loader_suffix
        if not logger:
            suffixed = "" if not add_dataloader_idx else suffix
            self.private.update(name + end + suffixed for end in ("", "_step", "_epoch"))
        if suffix and not add_dataloader_idx:
            self.loader_suffix = _HIDDEN + suffix
        try:
            yield
        finally:
            self.loader_suffix = suffix

    def _keep(self, slot: _Slot, value: Value, weight: float, kind: Kind, prog_bar: bool) -> None:
        cells, key = slot
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

    def _keep_object(self, slot: _Slot, value: Any, prog_bar: bool) -> None:
        cells, key = slot
        if prog_bar:
            self._objects_shown.add(key)
        if self._world_size > 1 and not hasattr(value, "sync_on_compute"):
            raise TypeError(
                f"The metric {key!r} is a {type(value).__name__}, which cannot combine the "
                f"states of {self._world_size} processes. Log a torchmetrics.Metric, or plain "
                "values."
            )
        if getattr(value, "update_count", 0) > self.outer_updates.get(id(value), math.inf):
            raise ValueError(
                f"The metric object {_public_name(key)!r} holds values of the training, which "
                "would be mixed with those of the validation. Use one object for each phase."
            )
        if self.loader_suffix:
            _check_one_loader(key, value, cells.objects)
        cells.objects[key] = cells.all_objects[key] = value

    # -- reducing ------------------------------------------------------------------------------

    def reduce_step(self) -> dict[str, Value]:
        """Return the values of the current update, reduced over all ranks; collective."""
        self.step_reduced = True
        return self._reduction.reduce(self.step, "this update")

    def begin_window(self) -> None:
        """Begin a gradient accumulation window: drop the step values of the one before."""
        self.scope = TRAIN_STEP
        self.step_reduced = False
        if self._overridden:
            self._overridden.clear()
        self.step.cells.clear()
        self.step.objects.clear()
        self.step.ran.clear()
        self.items, self.loader_suffix = 1.0, ""

    def reduce_epoch(self, scope: Scope) -> dict[str, Value]:
        """Return a phase's epoch values, reduced over all ranks, and reset them; collective.

        Metric objects are reset by `reset_objects`, since callbacks may still compute them.
        """
        cells, phase = self._epoch_of(scope), scope.phase
        if scope.by_callbacks:
            cells.ran.add("")  # every rank calls these hooks, and so logs the same names
        else:
            self.loader_of = {}
        values = self._reduction.reduce(cells, f"this epoch of {phase}")
        shown = [name for name, cell in cells.cells.items() if cell.prog_bar]
        shown += self._objects_shown.intersection(cells.objects)
        self._epoch_values |= {_public_name(n): values[n] for n in shown if n in values}
        pairs = self._reduction.pairs(cells)
        self._computed += [cells.all_objects[name] for name, kind in pairs if kind == "object"]
        if phase == "train" and not scope.by_callbacks:
            self._keep_last(cells, values)
            self._computed += self.stepwise.values()
            self.stepwise.clear()
        if phase != "train":
            self._overridden.update(map(_public_name, values))
        cells.cells.clear()
        cells.objects.clear()
        cells.ran.clear()
        return self._renamed(values)

    def reset_objects(self) -> None:
        """Reset the metric objects of the epochs that were reduced."""
        for metric in self._computed:
            metric.reset()
        self._computed.clear()

    def _keep_last(self, cells: Cells, values: dict[str, Value]) -> None:
        """Replace the metric objects of the epoch's last update by their values.

        The objects are reset at the end of the epoch, but the update may be recorded later. Their
        value at this point is the epoch's value. Objects that were not logged over the epoch are
        dropped.
        """
        for key, metric in self.step.objects.items():
            for name, of_epoch in cells.objects.items():
                if of_epoch is metric and name in values:
                    self._keep(_Slot(self.step, key), values[name], 1.0, "mean", prog_bar=False)
        self.step.objects.clear()

    def _renamed(self, values: dict[str, Value]) -> dict[str, Value]:
        """Return the values under their public names, without hidden suffixes.

        Raises:
            ValueError: Several loaders logged the same name with ``add_dataloader_idx=False``.
        """
        renamed = {_public_name(key): value for key, value in values.items()}
        if len(renamed) < len(values):
            suffixed = [_public_name(key) for key in values]
            twice = next(name for name in suffixed if suffixed.count(name) > 1)
            raise ValueError(
                f"Several loaders logged {twice!r} with add_dataloader_idx=False; log each under a "
                "different name, or leave the argument out."
            )
        parts = [key.partition(_HIDDEN) for key in values]
        self.loader_of |= {name: suffix for name, _, suffix in parts if suffix}
        return renamed

    def forget(self, phase: str) -> None:
        """Drop the epoch values of a phase, after an evaluation was abandoned."""
        cells = self.epochs.pop(phase, Cells())
        self._slots.clear()
        for metric in cells.objects.values():
            metric.reset()

    # -- showing -------------------------------------------------------------------------------

    def own_values(self) -> dict[str, Value]:
        """Return this rank's logged values that are not reduced yet; not collective.

        Epoch values cover the epoch so far. Metric objects are left out, since their ``compute`` is
        collective.
        """
        train = self.epoch("train").own_values()
        if not self.step_reduced:
            train |= self.step.own_values()
        evaluated = [c.own_values() for phase, c in self.epochs.items() if phase != "train"]
        latest = {_public_name(key): value for key, value in train.items()}
        latest = {name: value for name, value in latest.items() if name not in self._overridden}
        return latest | {
            _public_name(key): value for values in evaluated for key, value in values.items()
        }

    def forget_shown(self) -> None:
        """Drop the epoch values that the progress bar shows."""
        self._epoch_values.clear()

    def progress_values(self, *, wait: bool = False) -> dict[str, float]:
        """Return the values for the progress bar: of the current update, and of finished epochs.

        Values of the update are this rank's own. On an accelerator the host does not wait for the
        device: the values are those of the latest asynchronous copy that has arrived.

        Args:
            wait: Whether to wait for the device and return the present values.
        """
        live = {_public_name(n): c.last for n, c in self.step.cells.items() if c.prog_bar}
        latest = live | {n: value for n, value in self._epoch_values.items() if n not in live}
        away = on_accelerator(latest)
        if wait or not away:
            self._copies, self._shown_values = None, to_floats(latest)
            return dict(self._shown_values)
        if self._copies is not None and self._copies[-1].query():
            values, names, host, _ = self._copies
            read = dict(zip(names, host.tolist(), strict=True))
            self._shown_values = {name: read.get(name, value) for name, value in values.items()}
            self._copies = None
        if self._copies is None:
            on_host = {name: 0.0 if name in away else float(latest[name]) for name in latest}
            self._copies = on_host, list(away), *start_copy_to_host(stacked(away.values()))
        return dict(self._shown_values)


def _check_one_loader(key: str, metric: Any, objects: Mapping[str, Any]) -> None:
    """Raise if a metric object is logged for several loaders, since it would mix their data.

    Raises:
        ValueError: The object was logged for another loader before.
    """
    for other, logged in objects.items():
        if logged is metric and _loader_of(other) != _loader_of(key):
            name = _public_name(LOADER.sub("", key))
            raise ValueError(
                f"The metric object {name!r} is logged for several loaders, and each value would "
                "include the data of all. Use one object for each: "
                "self.accuracies[dataloader_idx], of a ModuleList."
            )


def _loader_of(key: str) -> str:
    match = LOADER.search(key)
    return match.group() if match else ""


def _public_name(key: str) -> str:
    """Return the public name of a value, without its hidden suffix."""
    return key.partition(_HIDDEN)[0]


def _step_and_epoch(
    name: str, scope: Scope, on_step: bool | None, on_epoch: bool | None, *, is_object: bool
) -> tuple[bool, bool]:
    """Return (on_step, on_epoch): whether a value is recorded per update, and per epoch.

    Raises:
        ValueError: The arguments request a record that this scope does not have.
    """
    shown = "" if on_step is None else f"on_step={on_step}, "
    if on_step is None:
        on_step = bool(scope.on_step) and not is_object
    elif on_step and scope.on_step is None:
        raise ValueError(
            f"log({name!r}, on_step=True) was called outside a step; use on_epoch=True there."
        )
    if on_step is False and on_epoch is False:
        other = ", or pass on_step=True" if scope.on_step else ""
        raise ValueError(
            f"log({name!r}, {shown}on_epoch=False) records nothing; leave on_epoch out{other}."
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
