"""Reading what ``configure_optimizers`` returned."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from trainer.errors import choose

_SCHEDULER_KEYS = ("scheduler", "interval", "frequency", "monitor", "name")
_PORTED_KEYS = ("strict", "reduce_on_plateau")  # Lightning's; what they say is so anyway
_OPTIMIZER_KEYS = ("optimizer", "lr_scheduler", *_SCHEDULER_KEYS)
_SHAPES = (
    "Return an optimizer, a pair (optimizer, scheduler), a dict with 'optimizer' and optionally "
    "'scheduler', 'interval', 'frequency', 'monitor' and 'name', or a list of these."
)


@dataclass(frozen=True, kw_only=True)
class SchedulerEntry:
    """A scheduler and when it ticks.

    Attributes:
        scheduler: Torch's or any object with ``step``, ``state_dict`` and ``load_state_dict``.
        interval: ``"step"``, once an update, or ``"epoch"``.
        frequency: Every how many of those.
        monitor: The metric that a plateau scheduler, or one that is not torch's, is stepped with;
            torch's others take none.
        name: What its learning rate is called where it is logged.

    Raises:
        ValueError: A unit is unknown, a number is not positive, or a plateau scheduler has no
            metric.
    """

    scheduler: Any
    interval: str = "epoch"
    frequency: int = 1
    monitor: str | None = None
    name: str | None = None

    def __post_init__(self) -> None:
        """Refuse what could never tick."""
        if not callable(getattr(self.scheduler, "step", None)):
            raise TypeError(
                f"configure_optimizers returned the scheduler {self.scheduler!r} of type "
                f"{type(self.scheduler).__name__}; it must have a step method."
            )
        if self.interval not in ("step", "epoch"):
            raise ValueError(choose("A scheduler's interval", self.interval, ("step", "epoch")))
        if isinstance(self.frequency, bool) or not isinstance(self.frequency, int):
            raise TypeError(f"A scheduler's frequency is {self.frequency!r}; it must be an int.")
        if self.frequency < 1:
            raise ValueError(f"A scheduler's frequency is {self.frequency}; it must be 1 or more.")
        if isinstance(self.scheduler, ReduceLROnPlateau) and self.monitor is None:
            raise ValueError(
                "ReduceLROnPlateau needs the metric to look at: return {'optimizer': …, "
                "'scheduler': …, 'monitor': 'val/loss'}."
            )

    def tick(self, metrics: Mapping[str, float]) -> None:
        """Advance by one.

        Raises:
            ValueError: The monitored metric has not been logged; the text lists those that were.
        """
        if self.monitor is None or not self._takes_metric:
            if getattr(self.scheduler, "_step_count", 0) > 1:
                self.scheduler.step()
                return
            with warnings.catch_warnings():
                # A first update skipped for overflow still is a tick, which torch takes for a
                # mistake. Only here: each such block lets once-only warnings come again.
                warnings.filterwarnings(
                    "ignore", "Detected call of `lr_scheduler.step", UserWarning
                )
                self.scheduler.step()
        elif self.monitor in metrics:
            self.scheduler.step(metrics[self.monitor])
        elif metrics:
            raise ValueError(choose("A scheduler's monitor", self.monitor, metrics))
        else:
            raise ValueError(
                f"A scheduler's monitor is {self.monitor!r}, but nothing was recorded yet; log it "
                f"with self.log({self.monitor!r}, value, on_epoch=True) so that it is there when "
                "the scheduler ticks."
            )

    @property
    def _takes_metric(self) -> bool:
        torchs = isinstance(self.scheduler, LRScheduler)
        return isinstance(self.scheduler, ReduceLROnPlateau) or not torchs


def read_optimizers(returned: Any) -> tuple[list[Optimizer], list[SchedulerEntry]]:
    """The optimizers and schedulers in whatever form they were returned.

    Raises:
        TypeError: It is none of the forms, or there is no optimizer in it.
        ValueError: A key or a unit is unknown.
    """
    if isinstance(returned, tuple) and all(isinstance(part, Optimizer) for part in returned):
        optimizers, entries = list(returned), []
    elif isinstance(returned, (list, tuple)) and len(returned) == 2 and _two_lists(returned):
        optimizers, schedulers = list(returned[0]), list(returned[1])
        entries = [_entry(scheduler) for scheduler in schedulers]
    elif isinstance(returned, list):
        parts = [_one(part) for part in returned]
        optimizers = [optimizer for optimizer, _ in parts]
        entries = [entry for _, entry in parts if entry is not None]
    else:
        optimizer, entry = _one(returned)
        optimizers, entries = [optimizer], [] if entry is None else [entry]
    for optimizer in optimizers:
        if not isinstance(optimizer, Optimizer):
            raise TypeError(_unreadable(optimizer))
    if not optimizers:
        raise TypeError(_unreadable(returned))
    return optimizers, entries


def _two_lists(pair: Sequence[Any]) -> bool:
    return all(isinstance(part, (list, tuple)) for part in pair)


def _one(part: Any) -> tuple[Any, SchedulerEntry | None]:
    if isinstance(part, Optimizer):
        return part, None
    if isinstance(part, tuple) and len(part) == 2:
        return part[0], _entry(part[1])
    if not isinstance(part, Mapping):
        raise TypeError(_unreadable(part))
    _check_keys(part, _OPTIMIZER_KEYS)
    if "optimizer" not in part:
        raise ValueError(f"configure_optimizers returned a dict without 'optimizer': {part!r}.")
    options = {key: value for key, value in part.items() if key in _SCHEDULER_KEYS}
    if "lr_scheduler" in part:  # Lightning's name, for a scheduler or a dict of its options
        if "scheduler" in part:
            raise ValueError("Give a scheduler as 'scheduler' or as 'lr_scheduler', not as both.")
        nested = part["lr_scheduler"]
        if isinstance(nested, Mapping):
            return part["optimizer"], _entry({**options, **nested})
        options["scheduler"] = nested
    if "scheduler" not in options:
        if options:
            raise ValueError(
                f"configure_optimizers returned {', '.join(map(repr, options))} but no 'scheduler'."
            )
        return part["optimizer"], None
    return part["optimizer"], _entry(options)


def _entry(scheduler: Any) -> SchedulerEntry:
    if isinstance(scheduler, Mapping):
        options = dict(scheduler)
        if not options.get("strict", True):
            raise ValueError(
                "configure_optimizers returned 'strict': False for a scheduler, which would let it "
                "go on without its metric; leave it out, and log the metric before it ticks."
            )
        for key in _PORTED_KEYS:
            options.pop(key, None)
        _check_keys(options, _SCHEDULER_KEYS)
        return SchedulerEntry(**options)
    return SchedulerEntry(scheduler=scheduler)


def _check_keys(part: Mapping[Any, Any], valid: Sequence[str]) -> None:
    for key in part:
        if key not in valid:
            raise ValueError(choose("A key that configure_optimizers returned", key, valid))


def _unreadable(value: Any) -> str:
    what = "no optimizer" if value is None else f"{value!r} of type {type(value).__name__}"
    if isinstance(value, (LRScheduler, ReduceLROnPlateau)):
        what = f"a scheduler, {type(value).__name__}, where an optimizer belongs"
    return f"configure_optimizers returned {what}. {_SHAPES}"
