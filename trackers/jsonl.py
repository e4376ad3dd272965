"""The local record of a run, ``metrics.jsonl``: one JSON object is appended per line."""

import io
import json
import os
from mmap import ACCESS_READ, mmap
from pathlib import Path
from time import time
from typing import Any

from trackers.base import GeneralTracker
from trainer.errors import module_logger
from trainer.files import regular
from trainer.strict_json import dumps, from_json

_logger = module_logger("trackers")

FIELDS = frozenset({"step", "epoch", "time"})  # fields of every record, besides its metrics


def read_metrics(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Read the records that `JsonlTracker` wrote.

    If the last line has no line break, it was cut off by a crash, and is left out. The texts "NaN",
    "Infinity" and "-Infinity" become floats.

    Example::

        trainer.fit(module, train_loader, val_loader)
        for record in read_metrics(trainer.metrics_path):
            print(record["step"], record.get("val/loss"))

    Args:
        path: the file.

    Returns:
        The records, in the order written.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: a complete line is not JSON; the message gives its number.
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
    """Return an unused numbered name for another run's file, such as ``metrics.1.jsonl``."""
    number = 1
    while os.path.lexists(candidate := path.with_name(f"{path.stem}.{number}{path.suffix}")):
        number += 1
    return candidate


def is_at(file: os.stat_result, path: Path) -> bool:
    """Return whether a file is still at a path, not deleted, moved or replaced."""
    try:
        return os.path.samestat(file, os.stat(path))
    except (FileNotFoundError, NotADirectoryError):
        return False


def append_record(file: io.FileIO, record: bytes) -> None:
    """Append a record to a file completely or, if that fails, not at all.

    Raises:
        OSError: the record could not be written, for example to a full disk.
    """
    written = file.write(record)
    if written != len(record):
        file.truncate(os.fstat(file.fileno()).st_size - (written or 0))
        raise OSError(f"{file.name!s}: only {written} of {len(record)} bytes could be written.")


class JsonlTracker(GeneralTracker):
    """Appends `{"step", "epoch", "time", name: value, ...}` to a file, one JSON object per line.

    Every line is JSON that any parser reads, see `trainer.strict_json.to_json`: non-finite numbers
    are the texts "NaN", "Infinity" and "-Infinity", one-element tensors and arrays are numbers,
    longer ones are lists. Other objects are written as their `str`, so that the record's other
    metrics are not lost. Each record is one write system call, so a crash can cut off only the last
    line, and `start` removes such a partial line. If the file is deleted or moved during the run,
    the next record creates a new file, with a warning.

    Example::

        accelerator = Accelerator(log_with=JsonlTracker("runs/digits/metrics.jsonl"))
        accelerator.init_trackers("digits", config={"lr": 1e-3})
        accelerator.log({"train/loss": 0.25}, step=1)
        accelerator.end_training()

    Args:
        path: the file; `start` creates it and its directory if they do not exist.
    """

    name = "jsonl"
    requires_logging_directory = False  # it takes a file path instead

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path).absolute()  # the working directory may change
        self._file: io.FileIO | None = None
        self._last_write_failed = False  # whether the last record could not be written

    @property
    def tracker(self) -> Path:
        """The path of the file."""
        return self.path

    @property
    def offset(self) -> int:
        """The size of the file in bytes, which is the offset of the next record."""
        return self.path.stat().st_size if self.path.exists() else 0

    def start(self) -> None:
        """Open the file for appending, after removing a partial last line."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = io.FileIO(self.path, "a+", opener=regular)
        size = self.offset
        if size == 0:  # an empty file cannot be mapped
            return
        with mmap(self._file.fileno(), size, access=ACCESS_READ) as content:
            end = content.rfind(b"\n") + 1
        if end < size:
            self._file.truncate(end)
            _logger.warning(
                "%s ended in an incomplete record of %d bytes, which was removed.",
                self.path,
                size - end,
            )

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Append one record.

        Args:
            values: names and values.
            step: the number of optimizer updates so far.
            **kwargs: further fields of the record: `epoch` (None by default), `time` (in seconds
                since 1970; now by default), and any other.

        Raises:
            ValueError: a name in `values` is also the name of a field.
            RuntimeError: the tracker is not started, or is finished.
            OSError: the record could not be written; the file contains no part of it.
        """
        fields = {"step": step, "epoch": None, "time": time(), **kwargs}
        if clash := values.keys() & fields.keys():
            raise ValueError(
                f"The metrics {sorted(clash)} have the names of record fields. Rename them."
            )
        line = dumps({**fields, **values}, default=str).encode() + b"\n"
        file = self._open_file()
        self._last_write_failed = True
        append_record(file, line)
        self._last_write_failed = False

    def sync(self) -> int:
        """Sync every record to the disk (fsync).

        Returns:
            The offset after the last record, in bytes.

        Raises:
            RuntimeError: the tracker is not started, or is finished.
            OSError: the disk failed, or the last record could not be written. A retry may still
                write it, and truncating at this offset would then remove it.
        """
        os.fsync(self._open_file().fileno())
        if self._last_write_failed:
            raise OSError(f"{self.path} lacks the last record, which could not be written.")
        return self.offset

    def ends_record(self, offset: int) -> bool:
        """Return whether an offset in bytes is the end of a record, or 0."""
        if not 0 < offset <= self.offset:
            return offset == 0
        with open(self.path, "rb", opener=regular) as content:
            content.seek(offset - 1)
            return content.read(1) == b"\n"

    def truncate(self, offset: int, source: Path | None = None) -> None:
        """Remove the records after an offset, for a run that resumes from an earlier checkpoint.

        Does nothing for a file without records: a run that resumes in another folder begins a new
        file there, with a warning.

        Args:
            offset: in bytes, as returned by `offset` or `sync`.
            source: the checkpoint that the run resumes from, for the warning.

        Raises:
            ValueError: the file is shorter than the offset, or no record ends there.
        """
        size = self.offset
        if size == 0 and offset >= 0:  # there may be no file
            if offset:
                _logger.warning(
                    "%s is a new file without the earlier records%s.",
                    self.path,
                    f", which are in the folder of the run that saved {source}" if source else "",
                )
            return
        if not self.ends_record(offset):
            raise ValueError(
                f"{self.path} of {size} bytes has no record that ends at byte {offset}: it is "
                "not the file that the checkpoint recorded. Restore the original file, or move "
                "this one away."
            )
        with open(self.path, "r+b", opener=regular) as file:
            file.truncate(offset)

    def offset_behind(self, step: int) -> int:
        """Return the offset, in bytes, of the first record of a later step, for `truncate`.

        Args:
            step: the last step whose records are kept.
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

    def _open_file(self) -> io.FileIO:
        if self._file is None:
            raise RuntimeError(f"The record {self.path} is not open. Call `start` first.")
        # Records written to a deleted file would be lost.
        if not is_at(os.fstat(self._file.fileno()), self.path):
            stale = self._file
            self.start()
            stale.close()
            _logger.warning(
                "%s was deleted, moved or replaced. The records continue in a new file.", self.path
            )
        return self._file
