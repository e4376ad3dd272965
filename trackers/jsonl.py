"""The local record: one JSON object per line, appended, readable even if the writer was killed."""

import io
import json
import logging
import os
from mmap import ACCESS_READ, mmap
from pathlib import Path
from time import time
from typing import Any

from trackers.base import GeneralTracker
from trackers.files import regular
from trackers.strict_json import dumps, from_json

_logger = logging.getLogger("trackers")

FIELDS = frozenset({"step", "epoch", "time"})  # in every record, beside its metrics


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
    with open(path, "rb", opener=regular) as lines:
        return [
            parse_record(line, f"{path}, line {number}")
            for number, line in enumerate(lines, start=1)
            if line.endswith(b"\n")
        ]


def parse_record(line: bytes, where: str) -> dict[str, Any]:
    """Return the record in a line.

    Raises:
        ValueError: the line is not JSON; the message says where it is.
    """
    try:
        record: dict[str, Any] = from_json(json.loads(line))
    except (ValueError, RecursionError) as error:  # the latter for excessively nested brackets
        raise ValueError(f"{where} is not JSON ({error}): {line!r}") from error
    return record


def unused_name(path: Path) -> Path:
    """Return an unused numbered name to keep another run's file under: ``metrics.1.jsonl``."""
    number = 1
    while os.path.lexists(aside := path.with_name(f"{path.stem}.{number}{path.suffix}")):
        number += 1
    return aside


def is_at(file: os.stat_result, path: Path) -> bool:
    """Return whether a file is still at a path, not deleted, moved or replaced."""
    try:
        return os.path.samestat(file, os.stat(path))
    except (FileNotFoundError, NotADirectoryError):
        return False


def append_whole(file: io.FileIO, record: bytes) -> None:
    """Append a record to a file, or nothing of it: the next one would be appended to a part.

    Raises:
        OSError: the record could not be written, for example to a full disk.
    """
    written = file.write(record)
    if written != len(record):
        file.truncate(os.fstat(file.fileno()).st_size - (written or 0))
        raise OSError(f"{file.name!s}: only {written} of {len(record)} bytes could be written.")


class JsonlTracker(GeneralTracker):
    """Appends `{"step", "epoch", "time", name: value, ...}` to a file, one JSON object per line.

    Every line is JSON that any parser reads, see `trackers.strict_json.to_json`: non-finite numbers
    are the texts "NaN", "Infinity" and "-Infinity", tensors and arrays of one element are numbers,
    longer ones lists. Other objects are their `str`, rather than losing the record's other metrics.
    Each record is one write to the operating system, so a crash can tear only the last line, and
    `start` cuts off a torn one. If the file is deleted or moved away meanwhile, the next record
    begins a new one, with a warning.

    Args:
        path: the file; `start` creates it and its directory if they do not exist.
    """

    name = "jsonl"
    requires_logging_directory = False  # it takes the path of its file instead

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path).absolute()  # the working directory may change
        self._file: io.FileIO | None = None
        self._lacks = False  # whether the last record could not be written

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
        self._file = io.FileIO(self.path, "a+", opener=regular)
        size = self.offset
        if size == 0:  # an empty file cannot be mapped
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
                since 1970; now by default), and any other.

        Raises:
            ValueError: a name in `values` is also that of a field.
            RuntimeError: the tracker is not started, or is finished.
            OSError: the record could not be written. The file is left without it.
        """
        fields = {"step": step, "epoch": None, "time": time(), **kwargs}
        if clash := values.keys() & fields.keys():
            raise ValueError(
                f"The metrics {sorted(clash)} have the names of record fields "
                f"({sorted(FIELDS | fields.keys())}). Log them under other names."
            )
        line = dumps({**fields, **values}, default=str).encode() + b"\n"
        file = self._opened()
        self._lacks = True
        append_whole(file, line)
        self._lacks = False

    def sync(self) -> int:
        """Wait until every record is synced to the disk.

        Returns:
            The offset after the last record, in bytes.

        Raises:
            RuntimeError: the tracker is not started, or is finished.
            OSError: the disk failed; or the last record could not be written, but may be later:
                truncating at this offset would then remove it.
        """
        os.fsync(self._opened().fileno())
        if self._lacks:
            raise OSError(f"{self.path} lacks the last record, which could not be written.")
        return self.offset

    def ends_record(self, offset: int) -> bool:
        """Return whether a record ends at an offset in bytes, or the first one begins there (0)."""
        if not 0 < offset <= self.offset:
            return offset == 0
        with open(self.path, "rb", opener=regular) as content:
            content.seek(offset - 1)
            return content.read(1) == b"\n"

    def truncate(self, offset: int) -> None:
        """Cut off the records after an offset, as a run does that resumes from before them.

        A file without records has nothing to cut off: a run that resumes in another folder begins a
        new record there, with a warning.

        Args:
            offset: in bytes, as returned by `offset` or `sync`.

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
                f"the file that the offset refers to: put that one back or move this one away."
            )
        with open(self.path, "r+b", opener=regular) as file:
            file.truncate(offset)

    def offset_behind(self, step: int) -> int:
        """Return the offset at which records of later steps begin, in bytes, for `truncate`.

        Args:
            step: the last step whose records are wanted.
        """
        offset = 0
        with open(self.path, "rb", opener=regular) as lines:
            for number, line in enumerate(lines, start=1):
                if (parse_record(line, f"{self.path}, line {number}")["step"] or 0) > step:
                    break
                offset += len(line)
        return offset

    def finish(self) -> None:
        """Sync the records to the disk and close the file."""
        if self._file is not None:
            try:
                os.fsync(self._file.fileno())
            finally:  # close the file even if the disk fails
                self._file.close()
                self._file = None

    def _opened(self) -> io.FileIO:
        if self._file is None:
            raise RuntimeError(f"The record {self.path} is not open. Call `start` first.")
        # What is written to a file that is gone would be lost.
        if not is_at(os.fstat(self._file.fileno()), self.path):
            left = self._file
            self.start()
            left.close()
            _logger.warning(
                "%s was deleted, moved or replaced while it was open. The records continue in the "
                "file that is there now; the earlier ones are in the old file.",
                self.path,
            )
        return self._file
