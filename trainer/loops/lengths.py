"""The length of a run, schedules of repeated events, and limits on the batches of a loader."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta

from callbacks import Interval, Progress, duration
from trainer.data.feed import Feed


def seconds_of(time: str | timedelta | Mapping[str, float] | None) -> float | None:
    """Return the argument `max_time` in seconds; None stays None.

    Raises:
        ValueError: It is not a positive duration.
        TypeError: It is of the wrong type.
    """
    return None if time is None else duration.seconds_of("max_time", time)


@dataclass(frozen=True, kw_only=True)
class Length:
    """When a fit ends.

    Attributes:
        max_epochs: After this many epochs.
        min_epochs: Not before this many epochs, even if a stop is requested.
        max_steps: After this many updates.
        min_steps: Not before this many updates, even if a stop is requested.
        max_seconds: At the first update boundary after this time in seconds.

    Raises:
        ValueError: A number is negative, or a minimum is above its maximum.
        TypeError: A number is not an int.
    """

    max_epochs: int | None = None
    min_epochs: int | None = None
    max_steps: int | None = None
    min_steps: int | None = None
    max_seconds: float | None = None

    def __post_init__(self) -> None:
        """Check each number, and that no minimum exceeds its maximum."""
        for unit in ("epochs", "steps"):
            low, high = getattr(self, f"min_{unit}"), getattr(self, f"max_{unit}")
            for name, number in ((f"min_{unit}", low), (f"max_{unit}", high)):
                if number is None:
                    continue
                if isinstance(number, bool) or not isinstance(number, int):
                    raise TypeError(f"{name} is {number!r}; it must be an int.")
                if number < 0:
                    raise ValueError(
                        f"{name} is {number}; it must be 0 or more, or None for no such limit."
                    )
            if low is not None and high is not None and low > high:
                raise ValueError(f"min_{unit} is {low}, above max_{unit}, {high}.")

    @property
    def endless(self) -> bool:
        """Whether the run has no maximum."""
        return self.max_epochs is None and self.max_steps is None and self.max_seconds is None

    def reached(self, progress: Progress) -> bool:
        """Return whether a maximum is reached."""
        return (
            (self.max_epochs is not None and progress.epochs >= self.max_epochs)
            or (self.max_steps is not None and progress.steps >= self.max_steps)
            or (self.max_seconds is not None and progress.seconds >= self.max_seconds)
        )

    def may_stop_early(self, progress: Progress) -> bool:
        """Return whether the minimums allow an early stop."""
        return progress.steps >= (self.min_steps or 0) and progress.epochs >= (self.min_epochs or 0)


@dataclass
class Schedule:
    """Decides when a repeated event is due, such as validation or logging.

    Attributes:
        interval: How often the event is due.
        before: The run's progress at the latest call of `due`. For intervals in seconds or steps:
            the progress when the event was last due.
    """

    interval: Interval
    before: Progress = field(default_factory=Progress)

    def may_be_due(self, step: int) -> bool:
        """Return False if `due` need not be called at this update; cheaper than `due`."""
        every = self.interval.every
        return self.interval.unit != "steps" or self.before.steps // every < step // every

    def due(self, now: Progress) -> bool:
        """Return whether the event is due; call once per update, unless `may_be_due` is False."""
        due = self.interval.due(self.before, now)
        if due or self.interval.unit != "seconds":
            self.before = now
        return due


def check_limit(name: str, limit: int | float | None) -> None:
    """Check a limit: an int is a number of batches, a float a fraction of the batches.

    Raises:
        ValueError: It is negative, or a fraction above 1.
        TypeError: It is not a number.
    """
    if limit is None:
        return
    if isinstance(limit, bool) or not isinstance(limit, (int, float)):
        raise TypeError(f"{name} is {limit!r}; it must be an int (batches) or a float (fraction).")
    if isinstance(limit, float) and not 0.0 <= limit <= 1.0:
        raise ValueError(
            f"{name} is {limit}; a float is a fraction from 0.0 to 1.0, an int a number of batches."
        )
    if limit < 0:
        raise ValueError(f"{name} is {limit}; it must be 0 or more.")


def apply_limit(feed: Feed, name: str, limit: int | float | None) -> None:
    """Limit every epoch of an epoch iterator to a number of batches, counted over all ranks.

    A fraction is taken of the batches that the epoch has when it begins.

    Args:
        feed: The epoch iterator.
        name: The user's argument, for messages.
        limit: A number of batches, a fraction, or None for no limit.

    Raises:
        ValueError: It is a fraction of a stream without length, or rounds down to no batch.
    """
    feed.limited_by = name
    if limit is None or (isinstance(limit, float) and limit == 1.0):
        return
    total = feed.num_batches
    if isinstance(limit, float) and total is None:
        raise ValueError(
            f"{name} is {limit}, but the loader has no length to take a fraction of; give an int."
        )
    feed.limit = limit
    if total and limit and feed.num_batches == 0:
        raise ValueError(
            f"{name} is {limit}, which of {total} batches leaves none; give at least "
            f"{1 / total:.3g}, or an int."
        )


def require_length(feed: Feed, **intervals: Interval | str | int) -> None:
    """Raise for intervals that are a fraction of an epoch of unknown length.

    Args:
        feed: The epoch iterator.
        **intervals: The intervals by argument name.

    Raises:
        ValueError: There is such an interval.
    """
    for name, given in intervals.items():
        interval = Interval.parse(given)
        if interval.unit == "epochs" and interval.every % 1 and feed.num_rounds is None:
            raise ValueError(
                f"{name} is {interval}, but the loader has no length to take a fraction of; give "
                "steps, items, a time, or whole epochs."
            )
