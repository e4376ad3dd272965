"""Read back records that a tracker's full queue dropped, from ``metrics.jsonl``."""

from __future__ import annotations

from collections.abc import Generator, Set
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trackers.jsonl import FIELDS, parse_record
from trainer.files import regular

if TYPE_CHECKING:
    from concurrent.futures import Future

    from trackers.background import BackgroundTracker

_PATIENCE = 120.0  # seconds to wait for the local record: twice its longest pause


class Missed:
    """Reads the records of a run between two times, in the order written.

    Each tracker has its own instance, which continues to read where it stopped. So each request
    must be for later records than the previous request.

    Args:
        record: the `BackgroundTracker` of the local record, a `JsonlTracker`.
        begin: a future of the file offset, in bytes, at which this run began.
        private: names of values logged with ``logger=False``, which trackers do not get.

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
        """Read records, after waiting for their writer; call it on the tracker's thread.

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
                if not line.endswith(b"\n"):  # it is being written, so it is later than `last`
                    return
                record = parse_record(line, f"{self.path}, byte {self._offset}")
                if record["time"] > last:
                    return
                self._offset += len(line)
                hidden = FIELDS | self._private
                values = {name: record[name] for name in record if name not in hidden}
                if record["time"] >= first and values:
                    yield values, record["step"]
