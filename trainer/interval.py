"""Intervals (how often something is due), the progress of a run, and durations."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Literal, NamedTuple, get_args

Unit = Literal["steps", "epochs", "items", "seconds", "batches"]

# unit as written (plural) -> unit of Progress, and the factor
_UNITS: dict[str, tuple[Unit, int]] = {
    "steps": ("steps", 1),
    "epochs": ("epochs", 1),
    "items": ("items", 1),
    "seconds": ("seconds", 1),
    "minutes": ("seconds", 60),
    "hours": ("seconds", 3600),
    "batches": ("batches", 1),
}
_OF_EPOCHS = re.compile(r"each epoch|every (\d+) epochs?")
_EXAMPLES = "'500 steps', '1 epoch', '0.25 epochs', '1e9 items' or '30 minutes'"


def _parse_text(text: str) -> tuple[float, Unit, int]:
    """``'30 minutes'`` -> ``(1800.0, 'seconds', 0)``."""
    counted, _, of = text.strip().partition(" of ")
    number, _, word = counted.partition(" ")
    found = _OF_EPOCHS.fullmatch(of)
    if of and found is None:
        raise ValueError(
            "An interval that restarts in each epoch ends in 'of each epoch' or in 'of every 3 "
            f"epochs', got {text!r}."
        )
    of_epochs = int(found[1] or 1) if found else 0
    word = word.strip().lower()
    try:
        every = float(number)
    except ValueError:
        raise ValueError(
            f"An interval is a number and a unit, got {text!r}. Write for example {_EXAMPLES}."
        ) from None
    plural = word if word.endswith("s") else f"{word}{'es' if word == 'batch' else 's'}"
    if plural not in _UNITS:
        near = difflib.get_close_matches(plural, _UNITS, n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise ValueError(
            f"Unknown unit {word!r} in the interval {text!r}; the units are "
            f"{', '.join(_UNITS)}.{hint} Write for example {_EXAMPLES}."
        )
    unit, size = _UNITS[plural]
    return every * size, unit, of_epochs


class Progress(NamedTuple):
    """The progress of a run, in every unit that an interval may count.

    Example::

        class PrintItems(Callback):
            def on_train_epoch_end(self, trainer, module):
                print(f"{trainer.progress.items} items in {trainer.progress.seconds:.0f} s")

        trainer = Trainer(max_epochs=10, callbacks=[PrintItems()])

    Attributes:
        steps: Optimizer updates.
        epochs: Complete epochs, plus the fraction of the current one if its length is known.
        items: What the loss was averaged over (samples or tokens), over all ranks.
        seconds: Training time in seconds by rank 0's clock; the same number on every rank.
        epoch: The current epoch, from 0.
        batch: Batches of the current epoch so far, on each process.
        batches: All batches of the current epoch, on each process; 0 if unknown.
    """

    steps: int = 0
    epochs: float = 0.0
    items: float = 0.0
    seconds: float = 0.0
    epoch: int = 0
    batch: int = 0
    batches: int = 0


@dataclass(frozen=True, slots=True)
class Interval:
    """How often something is due: once per ``every`` of ``unit``, such as 500 ``"steps"``.

    Users write a string or an int, see :meth:`parse`.

    Example::

        trainer = Trainer(max_epochs=10, val_every=Interval(500, "steps"))  # or "500 steps"

    Attributes:
        every: How many of the unit.
        unit: The unit.
        of_epochs: 0 counts through the whole run. Another number *n* counts only in every *n*-th
            epoch, and anew in each; the unit is then batches (on each process), or epochs for a
            fraction of the epoch's batches.

    Raises:
        ValueError: If ``every`` is not a finite number above zero, is not whole for a ``unit`` of
            steps, batches or items, or ``unit`` is unknown or does not fit ``of_epochs``.
    """

    every: float
    unit: Unit
    of_epochs: int = 0

    def __post_init__(self) -> None:
        if self.unit not in get_args(Unit):
            raise ValueError(f"unit must be one of {get_args(Unit)}, got {self.unit!r}.")
        if isinstance(self.every, bool) or not (math.isfinite(self.every) and self.every > 0):
            raise ValueError(
                f"An interval must be a finite number above zero, got {self.every!r} {self.unit}. "
                f"Write for example {_EXAMPLES}."
            )
        if self.of_epochs < 0 or (self.unit == "batches") > bool(self.of_epochs):
            raise ValueError("An interval in batches is written '100 batches of each epoch'.")
        if self.of_epochs and self.unit not in ("batches", "epochs"):
            raise ValueError(
                "Only batches or a fraction of an epoch can be counted per epoch, got "
                f"{self.unit}: write '100 batches of each epoch' or '0.3 epochs of each epoch'."
            )
        if self.unit in ("steps", "items", "batches") and self.every != int(self.every):
            raise ValueError(
                f"An interval in {self.unit} must be a whole number, got {self.every!r}. "
                "Only epochs and the clock have fractions, as in '0.25 epochs'."
            )

    @classmethod
    def given(cls, name: str, value: Interval | str | int) -> Interval:
        """Parse the argument `name`; error messages contain its name.

        Raises:
            ValueError: See `parse`.
            TypeError: See `parse`.
        """
        try:
            return cls.parse(value)
        except (TypeError, ValueError) as error:
            raise type(error)(f"{name}: {error}") from None

    @classmethod
    def parse(cls, value: Interval | str | int) -> Interval:
        """Read an interval as users write it.

        Args:
            value: An :class:`Interval`, an int (steps), or a number and a unit: ``"500 steps"``,
                ``"1 epoch"``, ``"0.25 epochs"``, ``"1e9 items"``, ``"45 seconds"``,
                ``"30 minutes"``, ``"2 hours"``, ``"100 batches of each epoch"``,
                ``"0.3 epochs of every 2 epochs"``.

        Raises:
            ValueError: If the number or the unit is invalid.
            TypeError: If ``value`` is none of these types.
        """
        if isinstance(value, Interval):
            return value
        if isinstance(value, bool):
            raise ValueError(f"An interval cannot be {value}. Write for example {_EXAMPLES}.")
        if isinstance(value, int):
            return cls(value, "steps")
        if isinstance(value, str):
            return cls(*_parse_text(value))
        raise TypeError(
            f"An interval is an int (steps) or a string, got {value!r} of type "
            f"{type(value).__name__}. Write for example {_EXAMPLES}."
        )

    def due(self, before: Progress, now: Progress) -> bool:
        """Return whether a multiple of the interval lies in ``(before, now]``.

        If several multiples lie between two checks, it is due once, at the later check. ``before``
        is the progress at the previous check, or when it was last due.
        """
        if self.of_epochs:
            return self._due_in_epoch(before, now)
        if self.unit == "steps":  # a fast path, like the next: called at every update
            return before.steps // self.every < now.steps // self.every
        if self.unit == "epochs" and self.every == 1:
            return before.epochs // 1 < now.epochs // 1
        return self._multiples(before) < self._multiples(now)

    def _due_in_epoch(self, before: Progress, now: Progress) -> bool:
        if (now.epoch + 1) % self.of_epochs:
            return False
        size = int(self.every)
        if self.unit == "epochs":  # a number of batches that is rounded down, as in Lightning
            size = max(1, int(now.batches * self.every))
        begun = before.batch if before.epoch == now.epoch else 0
        return begun // size < now.batch // size

    def _multiples(self, progress: Progress) -> int:
        ratio: float = getattr(progress, self.unit) / self.every
        if self.unit == "epochs":
            # 3 of 10 batches are 0.3 epochs, and 0.3 / 0.1 is a little less than 3
            nearest = round(ratio)
            if math.isclose(ratio, nearest, rel_tol=1e-9, abs_tol=1e-9):
                return nearest
        return math.floor(ratio)

    def __str__(self) -> str:
        every, word = self.every, str(self.unit)
        if self.unit == "seconds":
            for larger in ("hours", "minutes"):
                size = _UNITS[larger][1]
                if self.every % size == 0:
                    every, word = self.every / size, larger
                    break
        number = f"{every:.0f}" if every == int(every) else f"{every!r}"
        single = {"batches": "batch"}.get(word, word.removesuffix("s"))
        text = f"{number} {single if every == 1 else word}"
        if self.of_epochs == 0:
            return text
        return (
            f"{text} of {f'every {self.of_epochs} epochs' if self.of_epochs > 1 else 'each epoch'}"
        )


_TIMES = (
    "'30 minutes', '00:12:00:00' (days, hours, minutes, seconds), a timedelta, or its arguments as "
    "a dict such as {'hours': 12}"
)


def seconds_of(name: str, time: str | timedelta | Mapping[str, float]) -> float:
    """Return a duration in seconds.

    Args:
        name: The name of the argument, for errors.
        time: ``"30 minutes"``, ``"00:12:00:00"`` (days, hours, minutes, seconds), a ``timedelta``,
            or its arguments as a dict.

    Raises:
        ValueError: ``time`` is not a duration above zero.
        TypeError: ``time`` is none of these types.
    """
    if not isinstance(time, (str, timedelta, Mapping)):
        raise TypeError(f"{name} is {time!r} of type {type(time).__name__}; give {_TIMES}.")
    try:
        if isinstance(time, timedelta):
            seconds = time.total_seconds()
        elif isinstance(time, Mapping):
            seconds = timedelta(**time).total_seconds()
        elif time.count(":") == 3:
            days, hours, minutes, whole = map(int, time.split(":"))
            seconds = ((days * 24 + hours) * 60 + minutes) * 60.0 + whole
        else:
            interval = Interval.parse(time)
            seconds = interval.every if interval.unit == "seconds" else math.nan
    except (OverflowError, TypeError, ValueError) as error:
        raise ValueError(f"{name} is {time!r}; give {_TIMES}.") from error
    if not seconds > 0:
        raise ValueError(f"{name} is {time!r}; it must be a time above zero: {_TIMES}.")
    return float(seconds)
