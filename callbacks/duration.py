"""Parse durations such as ``"30 minutes"``."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta

from callbacks.interval import Interval

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
    seconds = _seconds(name, time)
    if not seconds > 0:
        raise ValueError(f"{name} is {time!r}; it must be above zero.")
    return seconds


def _seconds(name: str, time: str | timedelta | Mapping[str, float]) -> float:
    if isinstance(time, timedelta):
        return time.total_seconds()
    if not isinstance(time, (str, Mapping)):
        raise TypeError(f"{name} is {time!r} of type {type(time).__name__}; give {_TIMES}.")
    try:
        if isinstance(time, Mapping):
            return timedelta(**time).total_seconds()
        if time.count(":") == 3:
            days, hours, minutes, seconds = map(int, time.split(":"))
            return ((days * 24 + hours) * 60 + minutes) * 60.0 + seconds
        interval = Interval.parse(time)
    except (OverflowError, TypeError, ValueError) as error:
        raise ValueError(f"{name} is {time!r}; give {_TIMES}.") from error
    if interval.unit != "seconds":
        raise ValueError(
            f"{name} is {time!r}; give {_TIMES}. To limit epochs or steps, use max_epochs or "
            "max_steps."
        )
    return float(interval.every)
