"""The local record: one JSON object a line, appended, readable whatever happened to the writer."""

import io
import json
import logging
import math
import os
from mmap import ACCESS_READ, mmap
from pathlib import Path
from time import time
from typing import Any

from trackers.base import GeneralTracker, python_number

_logger = logging.getLogger("trackers")

# JSON has no such numbers: they are written as these texts, which `float` takes back.
_NON_FINITE = {"NaN", "Infinity", "-Infinity"}
FIELDS = frozenset({"step", "epoch", "time"})  # of every record, beside its metrics


def read_metrics(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Read the records that `JsonlTracker` wrote.

    A last line without its line break was torn by a crash and is left out. The texts "NaN",
    "Infinity" and "-Infinity" become floats.

    Args:
        path: the file.

    Returns:
        The records, in the order written.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: a whole line is not JSON; the message gives its number.
    """
    with open(path, "rb") as lines:
        return [
            parse_record(line, f"{path}, line {number}")
            for number, line in enumerate(lines, start=1)
            if line.endswith(b"\n")
        ]


def parse_record(line: bytes, where: str) -> dict[str, Any]:
    """The record in a line.

    Raises:
        ValueError: it is not JSON; the message says where it is.
    """
    try:
        record: dict[str, Any] = _from_json(json.loads(line))
    except (ValueError, RecursionError) as error:  # the second: brackets without end
        raise ValueError(f"{where} is not JSON ({error}): {line!r}") from error
    return record


def to_json(value: Any) -> Any:
    """The value as JSON has it: numbers that are not finite as texts, arrays as lists."""
    value = python_number(value)
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, dict):
        return {str(key): to_json(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_json(item) for item in value]
    # Arrays and tensors become lists. What JSON has no form for is recorded as its text: a record
    # of the other metrics is worth more than none.
    return to_json(value.tolist()) if hasattr(value, "tolist") else str(value)


def _from_json(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _from_json(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_from_json(item) for item in value]
    return float(value) if isinstance(value, str) and value in _NON_FINITE else value


def unused_name(path: Path) -> Path:
    """A numbered name beside a file, for one of another run that is kept: ``metrics.1.jsonl``."""
    number = 1
    while (aside := path.with_name(f"{path.stem}.{number}{path.suffix}")).exists():
        number += 1
    return aside


def is_at(file: io.FileIO, path: Path) -> bool:
    """Whether an open file is the one at a path: it may have been deleted, moved or replaced."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False


class JsonlTracker(GeneralTracker):
    """Appends `{"step", "epoch", "time", name: value, ...}` to a file, one JSON object a line.

    Every line is valid JSON: non-finite numbers are the texts "NaN", "Infinity" and "-Infinity",
    tensors and arrays of one element are numbers, longer ones lists, and other objects their `str`.
    Each record is one write to the operating system, so a crash can tear the last line alone, and
    `start` cuts a torn one off. Where the file is deleted or moved away meanwhile, the next record
    begins another, which a warning says.

    Args:
        path: the file; it and its directory are made by `start` if they do not exist.
    """

    name = "jsonl"
    requires_logging_directory = False  # it takes the path of its file instead

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path).absolute()  # who changes the working folder leaves the file in its
        self._file: io.FileIO | None = None
        self._lacks = False  # the record that was to be written last

    @property
    def tracker(self) -> Path:
        """The path of the file."""
        return self.path

    @property
    def offset(self) -> int:
        """The size of the file in bytes: where the next record begins."""
        return self.path.stat().st_size if self.path.exists() else 0

    def start(self) -> None:
        """Open the file for appending, after cutting off a last line that a crash tore."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = io.FileIO(self.path, "a+")
        size = self.offset
        if size == 0:  # nothing cannot be mapped
            return
        with mmap(self._file.fileno(), size, access=ACCESS_READ) as content:
            whole = content.rfind(b"\n") + 1
        if whole < size:
            self._file.truncate(whole)
            _logger.warning(
                "%s ended in a torn record of %d bytes, which was cut off.", self.path, size - whole
            )

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Append one record.

        Args:
            values: names and values.
            step: the number of optimizer updates so far.
            **kwargs: further fields of the record: `epoch` (None by default), `time` (in seconds
                since 1970; the present by default), and any other.

        Raises:
            ValueError: a name in `values` is that of another field.
            RuntimeError: the tracker is not started, or finished.
            OSError: the record could not be written. The file is left without it.
        """
        fields = {"step": step, "epoch": None, "time": time(), **kwargs}
        if clash := values.keys() & fields.keys():
            raise ValueError(
                f"The metrics {sorted(clash)} have the names of fields of the record "
                f"({sorted(FIELDS | fields.keys())}). Log them under other names."
            )
        line = json.dumps(to_json({**fields, **values}), allow_nan=False).encode() + b"\n"
        file = self._opened()
        self._lacks = True
        written = file.write(line)
        if written != len(line):
            # A full disk: leave no half of a line for the next record to be glued to.
            file.truncate(self.offset - (written or 0))
            raise OSError(f"{self.path}: {written} of {len(line)} bytes could be written.")
        self._lacks = False

    def sync(self) -> int:
        """Wait until every record is on the disk itself.

        Returns:
            The offset behind the last record, in bytes.

        Raises:
            RuntimeError: the tracker is not started, or finished.
            OSError: the disk refused; or it refused the last record, which may yet come: whoever
                cuts at this offset would cut that off.
        """
        os.fsync(self._opened().fileno())
        if self._lacks:
            raise OSError(f"{self.path} lacks the last record, which could not be written.")
        return self.offset

    def ends_record(self, offset: int) -> bool:
        """Whether a record of the file ends at an offset in bytes; at 0 none has begun."""
        if not 0 < offset <= self.offset:
            return offset == 0
        with open(self.path, "rb") as content:
            content.seek(offset - 1)
            return content.read(1) == b"\n"

    def truncate(self, offset: int) -> None:
        """Cut off the records behind an offset, as a run does that resumes from before them.

        A file without any record has nothing to cut: a run that resumes in another folder begins a
        record there, which a warning says.

        Args:
            offset: in bytes, as `offset` or `sync` gave it.

        Raises:
            ValueError: the file is shorter than that, or no record ends there.
        """
        size = self.offset
        if size == 0 and offset >= 0:  # there may be no file
            if offset:
                _logger.warning("%s begins here: the earlier records are elsewhere.", self.path)
            return
        if not self.ends_record(offset):
            raise ValueError(
                f"{self.path} of {size} bytes has no record that ends at byte {offset}. It is not "
                f"the file that the offset was taken from: put that back or move this one away."
            )
        os.truncate(self.path, offset)

    def offset_behind(self, step: int) -> int:
        """Where the records of later steps begin, in bytes; for `truncate` without an offset.

        Args:
            step: the last one whose records are wanted.
        """
        offset = 0
        with open(self.path, "rb") as lines:
            for number, line in enumerate(lines, start=1):
                if (parse_record(line, f"{self.path}, line {number}")["step"] or 0) > step:
                    break
                offset += len(line)
        return offset

    def finish(self) -> None:
        """Put the records on the disk and close the file."""
        if self._file is not None:
            try:
                os.fsync(self._file.fileno())
            finally:  # a disk that refuses must not keep the file open
                self._file.close()
                self._file = None

    def _opened(self) -> io.FileIO:
        if self._file is None:
            raise RuntimeError(f"The record {self.path} is not open. Call `start` first.")
        if not is_at(self._file, self.path):  # what is written there now would be lost
            left = self._file
            self.start()
            left.close()
            _logger.warning(
                "%s was deleted, moved or replaced while it was written. The records go on in the "
                "file that is there now; the earlier ones are where it was taken.",
                self.path,
            )
        return self._file
