"""What a tracker missed, read from the local record."""

from __future__ import annotations

from collections.abc import Generator, Set
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trackers.jsonl import FIELDS, parse_record

if TYPE_CHECKING:
    from concurrent.futures import Future

    from trackers.background import BackgroundTracker

_PATIENCE = 120.0  # seconds for the local record to be written: twice its longest pause


class Missed:
    """The records of a run between two times, in the order written.

    Each tracker has one of its own, which goes on where it was: what it is asked for is later each
    time.

    Args:
        record: the local record, a `JsonlTracker` on its thread.
        begin: gives the offset in bytes at which this run began in it.
        private: names that the trackers are not told.

    Attributes:
        path: the file.
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
        """Read records; called on the thread of the tracker, where it waits for the writer.

        Args:
            first: the time of the first record, as it has it.
            last: that of the last.

        Yields:
            The values, without those that are private, and the step.

        Raises:
            OSError: the file cannot be read.
            ValueError: a line is not JSON.
        """
        self._record.settle(_PATIENCE)
        if self._offset is None:
            self._offset = self._begin.result(_PATIENCE)
        with open(self.path, "rb") as lines:
            lines.seek(self._offset)
            for line in lines:
                if not line.endswith(b"\n"):  # behind what is asked for: it is being written
                    return
                record = parse_record(line, f"{self.path}, byte {self._offset}")
                if record["time"] > last:
                    return
                self._offset += len(line)
                hidden = FIELDS | self._private
                values = {name: record[name] for name in record if name not in hidden}
                if record["time"] >= first and values:
                    yield values, record["step"]
