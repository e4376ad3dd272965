"""Read the record of a run while it grows."""

from __future__ import annotations

import argparse
import itertools
import math
import os
import statistics
from array import array
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from trackers.jsonl import FIELDS, parse_record
from trainer.checkpoint import storage
from trainer.checkpoint.lock import holder_of
from trainer.files import read_json

RECORD = "metrics.jsonl"
_DATES_END = 253_402_214_400  # seconds since 1970: the last day of the year 9999
_RATE_OVER = 20  # intervals between records


@dataclass
class Series:
    """The values of a metric.

    Attributes:
        steps: The steps of the finite values.
        values: The finite values.
        lowest: Value and step of the first minimum; None without values.
        highest: Value and step of the first maximum; None without values.
        last: The last value, finite or not.
        not_finite: How many values were NaN or infinite.
    """

    steps: array[float] = field(default_factory=lambda: array("d"))
    values: array[float] = field(default_factory=lambda: array("d"))
    lowest: tuple[float, float] | None = None
    highest: tuple[float, float] | None = None
    last: float = math.nan
    not_finite: int = 0

    def add(self, step: float, value: float) -> None:
        """Add a value."""
        self.last = value
        if not math.isfinite(value):
            self.not_finite += 1
            return
        self.steps.append(step)
        self.values.append(value)
        if self.lowest is None or value < self.lowest[0]:
            self.lowest = (value, step)
        if self.highest is None or value > self.highest[0]:
            self.highest = (value, step)


class Run:
    """A run that is running, has ended or has not begun.

    Args:
        path: Its folder, or a record file of any name.
        name: The name to show.

    Attributes:
        series: Its metrics by name, in order of first appearance.
        step: Of the last record.
        epoch: Of the last record that has one.
        time: Of the last record, in seconds since 1970.
        state: "waiting" without a record; "running" while a process of this machine locks the
            folder; afterwards "finished", "failed", "preempted" or "killed" according to its
            `run.json`, or "not running" without one. "" for a record file.
        error: The error that ended a failed run.
        checkpoint: The newest one in its folder, if any.
        damaged: A message for each line that is not a record.

    Raises:
        argparse.ArgumentTypeError: The path is another file.
    """

    def __init__(self, path: Path, name: str) -> None:
        alone = path.is_file()
        if alone and path.suffix != ".jsonl":
            raise argparse.ArgumentTypeError(
                f"{path} is a file; give the folder of a run, or its {RECORD}."
            )
        self.name = name
        self.path = path if alone else path / RECORD
        self._folder = None if alone and path.name != RECORD else self.path.parent
        self._inode: int | None = None
        self._forget()
        self.state, self.error, self.checkpoint = self._look()

    @property
    def has_record(self) -> bool:
        """Whether there is a record; it may be empty."""
        return self._inode is not None

    @property
    def below(self) -> list[str]:
        """Subfolders that have a record: the user may have named a folder of several runs."""
        return sorted(path.parent.name for path in self.path.parent.glob(f"*/{RECORD}"))

    @property
    def rate(self) -> float | None:
        """Updates per second over the last records: the median, which ignores a pause."""
        rates = [
            (later[0] - mark[0]) / (later[1] - mark[1])
            for mark, later in itertools.pairwise(self._marks)
            if later[1] > mark[1]
        ]
        return statistics.median(rates) if rates else None

    @property
    def seconds(self) -> float | None:
        """Seconds between the first record and the last."""
        return None if self.time is None or self._began is None else self.time - self._began

    def read(self) -> bool:
        """Read what was added since the last call.

        A record that was truncated or replaced, as by a run that resumes from a checkpoint, is read
        from the start.

        Returns:
            Whether anything has changed.

        Raises:
            OSError: The record exists and cannot be read.
        """
        came = self._read_record()
        seen = (self.state, self.error, self.checkpoint)
        self.state, self.error, self.checkpoint = now = self._look()
        return came or seen != now

    def _read_record(self) -> bool:
        try:
            with open(self.path, "rb") as content:
                return self._read_from(content)
        except (FileNotFoundError, NotADirectoryError):
            gone, self._inode = self.has_record, None
            self._forget()
            return gone

    def _read_from(self, content: BinaryIO) -> bool:
        inode = os.fstat(content.fileno()).st_ino
        anew = inode != self._inode or not self._continues(content)
        if anew:
            self._forget()
        self._inode = inode
        before = self._offset
        self._take_lines(content)
        return anew or self._offset != before

    def _forget(self) -> None:
        self.series: dict[str, Series] = {}
        self.step: int | None = None
        self.epoch: int | None = None
        self.time: float | None = None
        self.damaged: list[str] = []
        self._began: float | None = None
        self._marks: deque[tuple[float, float]] = deque(maxlen=_RATE_OVER + 1)
        self._offset = 0
        self._tail = b""
        self._lines = 0

    def _continues(self, content: BinaryIO) -> bool:
        """Return whether what was read is still in the file.

        The last line read is compared, which contains the time, rather than the size: a truncated
        record may have grown past its former size.
        """
        content.seek(self._offset - len(self._tail))
        return content.read(len(self._tail)) == self._tail

    def _take_lines(self, content: BinaryIO) -> None:
        content.seek(self._offset)
        for line in content:
            if not line.endswith(b"\n"):  # it is being written, or was cut off
                break
            self._offset += len(line)
            self._tail = line
            self._lines += 1
            where = f"{self.path.name}, line {self._lines}"
            try:
                record: Any = parse_record(line, where)
            except ValueError as error:
                self.damaged.append(str(error))
                continue
            if isinstance(record, dict):
                self._take(record)
            else:
                self.damaged.append(f"{where} is not a record: {line!r}")

    def _take(self, record: dict[str, Any]) -> None:
        step = _number(record.get("step"))
        position = float(self._lines) if step is None else step
        when = _number(record.get("time"))
        if when is not None and 0 <= when < _DATES_END:  # else it is not a time
            self._began = when if self._began is None else self._began
            self.time = when
            if step is not None and (not self._marks or step > self._marks[-1][0]):
                self._marks.append((step, when))
        self.step = self.step if step is None else int(step)
        epoch = _number(record.get("epoch"))
        self.epoch = self.epoch if epoch is None else int(epoch)
        for name, value in record.items():
            number = _number(value, finite=False)
            if name not in FIELDS and number is not None:
                self.series.setdefault(name, Series()).add(position, number)

    def _look(self) -> tuple[str, str | None, str | None]:
        """Return the state, the error that ended the run and the name of the newest checkpoint."""
        state = "" if self.has_record else "waiting"
        if self._folder is None:
            return state, None, None
        saved = storage.committed(self._folder / "checkpoints")
        newest = saved[-1].name if saved else None
        if holder_of(self._folder) is not None:
            return "running", None, newest
        if state:
            return state, None, newest
        return *_end_of(self._folder), newest


def _number(value: Any, *, finite: bool = True) -> float | None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        number = float(value)
    except OverflowError:  # an integer too large for a float
        return None
    return None if finite and not math.isfinite(number) else number


def _end_of(folder: Path) -> tuple[str, str | None]:
    """Return how the last start of a run ended, according to `run.json`, and its error."""
    try:
        start = read_json(folder / "run.json")["starts"][-1]
        status, error = start["status"], start["error"]
    except (OSError, ValueError, LookupError, TypeError):  # an older run has no such file
        return "not running", None
    if status == "running":  # but no process locks the folder
        return "killed", None
    return str(status), None if error is None else str(error).strip()
