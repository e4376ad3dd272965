"""Read what a run writes about itself: its record, also while it grows, and `run.json`."""

from __future__ import annotations

import os
from array import array
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from trackers.jsonl import FIELDS, parse_record
from trainer.files import read_json, regular

Floats = NDArray[np.float64]

RECORD, ABOUT, CHECKPOINTS = "metrics.jsonl", "run.json", "checkpoints"
_DATES_END = 253_402_214_400  # seconds since 1970: the last day of the year 9999


@dataclass(frozen=True, kw_only=True, eq=False)
class Series:
    """All values of a metric, in the order recorded; the arrays have shape (values,).

    Attributes:
        steps: Updates; the number of the line where the record has none.
        times: In seconds since 1970; NaN where the record has none.
        epochs: From 0; NaN where the record has none.
        values: As recorded, including NaN and infinity.
    """

    steps: Floats
    times: Floats
    epochs: Floats
    values: Floats

    @cached_property
    def finite(self) -> NDArray[np.bool_]:
        """Which values are finite."""
        return np.isfinite(self.values)

    def at(self, index: int) -> tuple[float, int]:
        """Return a value and its step."""
        return float(self.values[index]), int(self.steps[index])

    def extreme(self, mode: str) -> tuple[float, int] | None:
        """Return the smallest ("min") or largest finite value and its step; of equals the first."""
        if not self.finite.any():
            return None
        values = np.where(self.finite, self.values, np.inf if mode == "min" else -np.inf)
        return self.at(int(values.argmin() if mode == "min" else values.argmax()))


class Record:
    """The record of a run, read piece by piece.

    Args:
        path: The file; it may not exist yet.

    Attributes:
        exists: Whether the file was there at the last `read`.
        damaged: What is wrong with each line that is not a record, by line number.
        others: Names of values that are not numbers.
        incomplete: The last line has no end: it is being written, or was cut off.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._inode: int | None = None
        self._reset()

    def _reset(self) -> None:
        self._records = (array("d"), array("d"), array("d"))  # step, time and epoch of each
        self._values: dict[str, tuple[array[int], array[float]]] = {}  # line and value of each
        self.damaged: dict[int, str] = {}
        self.others: dict[str, None] = {}
        self.incomplete = False
        self._offset, self._last_line = 0, b""

    @property
    def exists(self) -> bool:
        """Whether the file was there at the last `read`; it may be empty."""
        return self._inode is not None

    def read(self) -> bool:
        """Read what was added since the last call; return whether anything has changed.

        A record that was truncated or replaced, as by a run that resumes from a checkpoint, is read
        from the start.

        Raises:
            OSError: The record exists and cannot be read.
        """
        try:
            with open(self.path, "rb", opener=regular) as content:
                return self._read_from(content)
        except (FileNotFoundError, NotADirectoryError):
            gone, self._inode = self.exists, None
            self._reset()
            return gone

    def _read_from(self, content: BinaryIO) -> bool:
        inode = os.fstat(content.fileno()).st_ino
        # The last line is compared, which has the time: a truncated record may have grown again.
        content.seek(self._offset - len(self._last_line))
        anew = inode != self._inode or content.read(len(self._last_line)) != self._last_line
        if anew:
            self._reset()
        self._inode, before = inode, self._offset
        content.seek(self._offset)
        for line in content:
            self.incomplete = not line.endswith(b"\n")
            if self.incomplete:
                break
            self._offset += len(line)
            self._last_line = line
            self._take(line)
        return anew or self._offset != before

    def _take(self, line: bytes) -> None:
        number = len(self._records[0]) + 1
        where = f"{self.path.name}, line {number}"
        record: Any = {}
        try:
            record = parse_record(line, where)
            if not isinstance(record, dict):
                raise ValueError(f"{where} is not a record: {line!r}")
        except ValueError as error:
            self.damaged[number] = str(error)
            record = {}
        place = [_number(record.get(name)) for name in ("step", "time", "epoch")]
        if place[1] is not None and not is_date(place[1]):
            place[1] = None
        for column, each in zip(self._records, place, strict=True):
            column.append(np.nan if each is None or not np.isfinite(each) else each)
        for name, value in record.items():
            if name in FIELDS:
                continue
            if (known := _number(value)) is None:
                self.others[name] = None
                continue
            lines, values = self._values.setdefault(name, (array("q"), array("d")))
            lines.append(number - 1)
            values.append(known)

    def columns(self) -> tuple[Floats, Floats, Floats]:
        """Return the steps, times and epochs of all lines, NaN where they have none."""
        steps, times, epochs = (np.array(column) for column in self._records)
        return steps, times, epochs

    def series(self) -> dict[str, Series]:
        """Return the metrics by name, in order of first appearance."""
        steps, times, epochs = self.columns()
        steps = np.where(np.isfinite(steps), steps, np.arange(1.0, len(steps) + 1))
        return {
            name: Series(
                steps=steps[rows], times=times[rows], epochs=epochs[rows], values=np.array(values)
            )
            for name, (lines, values) in self._values.items()
            for rows in (np.array(lines),)
        }

    def speed(self, last: int = 0) -> float | None:
        """Return the updates per second: the median over the (last) intervals between records."""
        steps, times, _ = self.columns()
        known = np.isfinite(steps) & np.isfinite(times)
        steps, times = steps[known], times[known]
        order = np.lexsort((times, steps))
        steps, first = np.unique(steps[order], return_index=True)
        steps, seconds = np.diff(steps)[-last:], np.diff(times[order][first])[-last:]
        rates = steps[seconds > 0] / seconds[seconds > 0]
        return float(np.median(rates)) if len(rates) else None


def _number(value: Any) -> float | None:
    """Return a number as a float, and None for anything else."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        return float(value)
    except OverflowError:  # an integer too large for a float
        return None


def is_date(value: Any) -> bool:
    """Return whether a value is a time in seconds since 1970, of a year that Python has."""
    return isinstance(value, (int, float)) and 0 <= value < _DATES_END


def read_about(folder: Path) -> dict[str, Any]:
    """Return the content of a folder's `run.json`; empty if there is none.

    Raises:
        OSError: It cannot be read.
        ValueError: It is not JSON, or has another form.
    """
    try:
        about = read_json(folder / ABOUT)
    except FileNotFoundError:
        return {}
    try:
        begins = [start["begin"] for start in about["starts"]]
        others = [start.get("end") for start in about["starts"]]
        others += [each.get("time") for each in about.get("warnings", ())]
    except (TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"it is damaged, or not ours: {error!r}") from error
    if not all(map(is_date, begins + [time for time in others if time is not None])):
        raise ValueError("it is damaged, or not ours: a time is no number of seconds since 1970")
    return dict(about)


def thinned(x: Floats, y: Floats, columns: int) -> tuple[Floats, Floats]:
    """Return the points that a chart needs: the smallest and largest value of each column.

    The first and the last value are kept, and the first non-finite value of each column, as NaN:
    the line has a gap there.

    Returns:
        At most 3 · `columns` + 2 points.
    """
    if len(x) <= 2 * columns:
        return x, np.where(np.isfinite(y), y, np.nan)
    low, high = np.nanmin(x), np.nanmax(x)
    place = np.floor((x - low) / max(high - low, 1e-300) * columns)
    column = np.cumsum(np.diff(place, prepend=place[0]) != 0)  # a curve that goes back begins anew
    finite = np.isfinite(y)
    # In each column, finite points come first, sorted by value, then the others in their order.
    order = np.lexsort((np.where(finite, y, 0.0), ~finite, column))
    first = np.flatnonzero(np.diff(column, prepend=-1))
    numbers = np.add.reduceat(finite, first)
    size = np.diff(np.append(first, len(x)))
    lowest, highest = first[numbers > 0], (first + numbers - 1)[numbers > 0]
    gaps = (first + numbers)[numbers < size]
    ends = [[0], [len(x) - 1]]
    chosen = np.unique(np.concatenate([*ends, order[lowest], order[highest], order[gaps]]))
    return x[chosen], np.where(np.isfinite(y[chosen]), y[chosen], np.nan)
