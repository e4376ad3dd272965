"""The bounded queue of calls that wait for a tracker, and the gap of dropped records in it."""

import math
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, NamedTuple

from trackers.base import GeneralTracker


class Call(NamedTuple):
    """A queued call of a tracker.

    Attributes:
        what: the name of the method, for messages.
        function: makes the call, given the tracker.
        record: whether a full queue may drop the call.
        time: the field `time` of the same record in the local record (``metrics.jsonl``), to read
            it back from there if it is dropped.
        future: the future that the caller waits for.
        size: the approximate memory of its values in bytes; 0 for single numbers.
    """

    what: str
    function: Callable[[GeneralTracker], Any]
    record: bool = True
    time: float | None = None
    future: "Future[Any] | None" = None
    size: int = 0


class Gap(NamedTuple):
    """Consecutive dropped records: the first and last `time`, and their number."""

    first: float
    last: float
    size: int


class Pending:
    """The queue of waiting calls, in order.

    A full queue drops its oldest record. The dropped records are older than all waiting records, so
    they form one gap, which is filled (from ``metrics.jsonl``) before the next call.

    Args:
        capacity: the maximum number of calls. Another record drops the oldest one.
        memory: the maximum bytes of the records' values (images, tables and so on). Another such
            record drops the oldest ones that take memory.
        gathering: how many seconds the first record waits for others. Waking the thread for each
            record costs several times as much as the record itself, also in training time.

    Attributes:
        fills: whether dropped records can be read back from the local record.
        lost: the number of dropped records that cannot be read back, or that came after the end.
    """

    def __init__(self, capacity: int, gathering: float = 0.0, memory: int = 2**30) -> None:
        self.capacity = capacity
        self.memory = memory
        self._size = 0  # bytes of all waiting calls
        self._gathering = gathering
        self.fills = False
        self.lost = 0
        self._calls: deque[Call] = deque()
        self._gap: Gap | None = None
        self._ended = False
        self._urgent = False  # wake the thread: a call that is no record, or many records
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
            if call.size and self._size and self._size + call.size > self.memory:
                self._make_room(call.size)
            self._calls.append(call)
            self._size += call.size
            filling = 2 * len(self._calls) >= self.capacity
            self._urgent = self._urgent or not call.record or filling
            if self._urgent or len(self._calls) == 1:  # otherwise it gathers, or is busy
                self._changed.notify()
            return True

    def take(self) -> Call | Gap:
        """Wait for the next call, or for the gap before it; remove and return it."""
        with self._changed:
            if not self._calls and self._gap is None:
                self._urgent = False
                self._changed.wait_for(lambda: self._calls or self._gap)
                self._changed.wait_for(lambda: self._urgent, self._gathering)
            gap, self._gap = self._gap, None
            return gap or self._remove_at(0)

    def oldest_record(self) -> Call | None:
        """Return the next record; None if the queue is empty or a gap comes first."""
        with self._changed:
            return None if self._gap else next((c for c in self._calls if c.record), None)

    def remove(self, call: Call) -> None:
        """Remove a record that was sent to the tracker before its turn."""
        with self._changed:
            for position, waiting in enumerate(self._calls):
                if waiting is call:
                    self._remove_at(position)
                    return
            # In the meantime it was dropped, as the first of the gap.
            if self._gap is None or call.time is None:
                self.lost -= 1
            elif self._gap.size == 1:
                self._gap = None
            else:
                behind = math.nextafter(self._gap.first, math.inf)
                self._gap = Gap(behind, self._gap.last, self._gap.size - 1)

    def take_awaited(self) -> list[Call]:
        """Remove and return the calls of `submit`, for whose futures callers wait."""
        with self._changed:
            awaited = [call for call in self._calls if call.what == "submit"]
            self._calls = deque(call for call in self._calls if call.what != "submit")
            return awaited

    def clear(self) -> list[Call]:
        """Remove and return all calls except the last, `finish`; records are counted as lost."""
        with self._changed:
            cleared = [call for call in self._calls if call.what != "finish"]
            self._calls = deque(call for call in self._calls if call.what == "finish")
            self._size = 0
            self.lost += sum(call.record for call in cleared)
            self.lost += self._gap.size if self._gap else 0
            self._gap = None
            return cleared

    def lose(self, count: int) -> None:
        """Count records as lost that were taken from the queue but not logged."""
        with self._changed:
            self.lost += count

    def _remove_at(self, position: int) -> Call:
        call = self._calls[position]
        del self._calls[position]
        self._size -= call.size
        return call

    def _make_room(self, size: int) -> None:
        """Drop the oldest records that take memory until `size` bytes are free."""
        kept: deque[Call] = deque()
        for call in self._calls:
            if call.record and call.size and self._size + size > self.memory:
                self._size -= call.size
                self._count_dropped(call)
            else:
                kept.append(call)
        self._calls = kept

    def _drop_oldest(self) -> None:
        for position, call in enumerate(self._calls):
            if call.record:
                self._count_dropped(self._remove_at(position))
                break

    def _count_dropped(self, call: Call) -> None:
        if call.time is None or not self.fills:
            self.lost += 1
        elif self._gap is None:
            self._gap = Gap(call.time, call.time, 1)
        else:
            self._gap = Gap(self._gap.first, call.time, self._gap.size + 1)
