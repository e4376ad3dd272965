"""The queue of calls that wait for a tracker, and reading back records that it dropped."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Generator, Set
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, NamedTuple

from trackers.base import GeneralTracker
from trackers.jsonl import FIELDS, parse_record
from trainer.files import regular

if TYPE_CHECKING:
    from trackers.background import BackgroundTracker

_PATIENCE = 120.0  # seconds to wait for the local record: twice its longest pause


class Call(NamedTuple):
    """A queued call of a tracker.

    Attributes:
        method: the name of the method, for messages.
        function: makes the call, given the tracker.
        record: whether a full queue may drop the call.
        time: the field `time` of the same record in the local record (``metrics.jsonl``), to read
            it back from there if it is dropped.
        future: the future that the caller waits for.
        size: the approximate memory of its values in bytes; 0 for single numbers, and for calls
            that are not records.
    """

    method: str
    function: Callable[[GeneralTracker], Any]
    record: bool = True
    time: float | None = None
    future: Future[Any] | None = None
    size: int = 0


def log_call(values: dict[str, Any], step: int, time: float | None = None) -> Call:
    """Return a call of `log`, with a copy of the values for each tracker."""
    return Call("log", lambda tracker: tracker.log(dict(values), step), time=time)


class DroppedRange(NamedTuple):
    """Dropped records: the first and last `time`, and their number."""

    first: float
    last: float
    size: int


class Pending:
    """The queue of waiting calls, in order.

    A full queue drops its oldest record. The dropped records are older than all waiting records, so
    they form one range, which is replayed from ``metrics.jsonl`` before the next call.

    Args:
        capacity: the maximum number of calls. Another record drops the oldest one.
        memory: the maximum bytes of the records' values (images, tables and so on). Another such
            record drops the oldest ones that take memory.
        gathering: the number of seconds that the first record waits for others. Waking the thread
            for each record takes several times as long as the record itself, and slows training.

    Attributes:
        can_replay: whether dropped records can be read back from the local record.
        lost: the number of dropped records that cannot be read back, or that came after the end.
    """

    def __init__(self, capacity: int, gathering: float = 0.0, memory: int = 2**30) -> None:
        self.capacity = capacity
        self.memory = memory
        self._size = 0  # bytes of all waiting calls
        self._gathering = gathering
        self.can_replay = False
        self.lost = 0
        self._calls: deque[Call] = deque()
        self._dropped: DroppedRange | None = None
        self._ended = False
        self._urgent = False  # wake the thread: a non-record call, or many records
        self._changed = threading.Condition()

    def put(self, call: Call, *, last: bool = False) -> bool:
        """Add a call and return True, or return False if the queue has ended."""
        with self._changed:
            if self._ended:
                self.lost += call.record
                return False
            self._ended = last
            if call.record and len(self._calls) >= self.capacity:
                self._drop_oldest()
            while call.size and self._size and self._size + call.size > self.memory:
                self._drop_oldest(sized=True)
            self._calls.append(call)
            self._size += call.size
            filling = 2 * len(self._calls) >= self.capacity
            self._urgent = self._urgent or not call.record or filling
            if self._urgent or len(self._calls) == 1:  # otherwise the thread is gathering or busy
                self._changed.notify()
            return True

    def take(self) -> Call | DroppedRange:
        """Wait for the next call, or the dropped records before it; remove and return it."""
        with self._changed:
            if not self._calls and self._dropped is None:
                self._urgent = False
                self._changed.wait_for(lambda: self._calls or self._dropped)
                self._changed.wait_for(lambda: self._urgent, self._gathering)
            dropped, self._dropped = self._dropped, None
            return dropped or self._pop(0)

    def take_record(self) -> Call | None:
        """Remove and return the next record; None if there is none or dropped ones come first."""
        with self._changed:
            indices = [] if self._dropped else range(len(self._calls))
            index = next((at for at in indices if self._calls[at].record), None)
            return None if index is None else self._pop(index)

    def put_back(self, call: Call) -> None:
        """Make a call the next one again; it joins a dropped range, whose records are later."""
        with self._changed:
            if self._dropped and call.time is not None:
                self._count_dropped(call)
                return
            self._calls.appendleft(call)
            self._size += call.size

    def take_submitted(self) -> list[Call]:
        """Remove and return the calls of `submit`, for whose futures callers wait."""
        with self._changed:
            return self._take_all(lambda call: call.method == "submit")

    def clear(self) -> list[Call]:
        """Remove and return all calls except the last, `finish`; records are counted as lost."""
        with self._changed:
            cleared = self._take_all(lambda call: call.method != "finish")
            self.lost += sum(call.record for call in cleared)
            self.lost += self._dropped.size if self._dropped else 0
            self._dropped = None
            return cleared

    def count_lost(self, count: int) -> None:
        """Count records as lost that were taken from the queue but not logged."""
        with self._changed:
            self.lost += count

    def _pop(self, index: int) -> Call:
        call = self._calls[index]
        del self._calls[index]
        self._size -= call.size
        return call

    def _take_all(self, wanted: Callable[[Call], bool]) -> list[Call]:
        taken = [call for call in self._calls if wanted(call)]
        self._calls = deque(call for call in self._calls if not wanted(call))
        self._size -= sum(call.size for call in taken)
        return taken

    def _drop_oldest(self, *, sized: bool = False) -> None:
        """Drop the oldest record, or the oldest one that takes memory."""
        for index, call in enumerate(self._calls):
            if call.record and (call.size or not sized):
                self._count_dropped(self._pop(index))
                return

    def _count_dropped(self, call: Call) -> None:
        if call.time is None or not self.can_replay:
            self.lost += 1
        else:
            dropped = self._dropped or DroppedRange(call.time, call.time, 0)
            first, last = min(dropped.first, call.time), max(dropped.last, call.time)
            self._dropped = DroppedRange(first, last, dropped.size + 1)


class RecordReplay:
    """Reads the records of a run between two times, in the order written.

    Each tracker has its own instance, which continues to read where it stopped. So each request
    must be for later records than the previous request.

    Args:
        record: the `BackgroundTracker` of the local record, a `JsonlTracker`.
        begin: a future of the file offset, in bytes, at which this run began.
        private: names of values logged with ``logger=False``, which are not sent to trackers.
    """

    def __init__(self, record: BackgroundTracker, begin: Future[int], private: Set[str]) -> None:
        self.path = record.wrapped.tracker
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
        self._record.drain(_PATIENCE)
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
