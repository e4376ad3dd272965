"""The records that a tracker missed, read from the local record."""

from __future__ import annotations

from collections.abc import Generator, Set
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trackers.files import regular
from trackers.jsonl import FIELDS, parse_record

if TYPE_CHECKING:
    from concurrent.futures import Future

    from trackers.background import BackgroundTracker

_PATIENCE = 120.0  # seconds for the local record to be written: twice its longest pause


class Missed:
    """Reads the records of a run between two times, in the order written.

    Each tracker has its own instance, which continues where it stopped: each request must be for
    later records than the one before.

    Args:
        record: the local record, a `JsonlTracker` on its thread.
        begin: resolves to the offset in bytes at which this run began in the record.
        private: names of values that trackers do not get.

    Attributes:
        path: the path of the record.
    """

    def __init__(self, record: BackgroundTracker, begin: Future[int], private: Set[str]) -> None:
        self.path: Path = record.wrapped.tracker
        self._record = record
        self._begin = begin
        self._private = private
        self._offset: int | None = None

    def between(
        self, first: float, last: float
    ) -> Generator[tuple[dict[str, Any], int], None, None]:
        """Read records, after waiting for the writer; to be called on the tracker's thread.

        Args:
            first: the field `time` of the first record.
            last: the field `time` of the last record.

        Yields:
            The values, without private ones, and the step.

        Raises:
            OSError: the file cannot be read.
            ValueError: a line is not JSON.
        """
        self._record.settle(_PATIENCE)
        if self._offset is None:
            self._offset = self._begin.result(_PATIENCE)
        with open(self.path, "rb", opener=regular) as lines:
            lines.seek(self._offset)
            for line in lines:
                if not line.endswith(b"\n"):  # being written, so later than `last`
                    return
                record = parse_record(line, f"{self.path}, byte {self._offset}")
                if record["time"] > last:
                    return
                self._offset += len(line)
                hidden = FIELDS | self._private
                values = {name: record[name] for name in record if name not in hidden}
                if record["time"] >= first and values:
                    yield values, record["step"]
