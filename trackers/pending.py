"""The queue of calls that wait for a tracker."""

from __future__ import annotations

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
        future: the future that the caller waits for.
        size: the approximate memory of its values in bytes; 0 for single numbers, and for calls
            that are no records.
    """

    what: str
    function: Callable[[GeneralTracker], Any]
    record: bool = True
    future: Future[Any] | None = None
    size: int = 0


class Pending:
    """The queue of waiting calls, in order; a full queue drops its oldest record.

    Args:
        capacity: the maximum number of calls. Another record drops the oldest one.
        memory: the maximum bytes of the records' values (images, tables and so on). Another such
            record drops the oldest ones that take memory.
        gathering: how many seconds the first record waits for others. Waking the thread for each
            record costs several times as much as the record itself, also in training time.

    Attributes:
        lost: the number of dropped records, and of those that came after the end.
    """

    def __init__(self, capacity: int, gathering: float = 0.0, memory: int = 2**30) -> None:
        self.capacity = capacity
        self.memory = memory
        self._size = 0  # bytes of all waiting calls
        self._gathering = gathering
        self.lost = 0
        self._calls: deque[Call] = deque()
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
            while call.size and self._size and self._size + call.size > self.memory:
                self._drop_oldest(sized=True)
            self._calls.append(call)
            self._size += call.size
            filling = 2 * len(self._calls) >= self.capacity
            self._urgent = self._urgent or not call.record or filling
            if self._urgent or len(self._calls) == 1:  # otherwise it gathers, or is busy
                self._changed.notify()
            return True

    def take(self) -> Call:
        """Wait for the next call; remove and return it."""
        with self._changed:
            if not self._calls:
                self._urgent = False
                self._changed.wait_for(lambda: self._calls)
                self._changed.wait_for(lambda: self._urgent, self._gathering)
            return self._pop(0)

    def take_record(self) -> Call | None:
        """Remove and return the next record; None if there is none."""
        with self._changed:
            place = next((at for at, call in enumerate(self._calls) if call.record), None)
            return None if place is None else self._pop(place)

    def put_back(self, call: Call) -> None:
        """Make a call the next one again."""
        with self._changed:
            self._calls.appendleft(call)
            self._size += call.size

    def take_awaited(self) -> list[Call]:
        """Remove and return the calls of `submit`, for whose futures callers wait."""
        with self._changed:
            return self._take_all(lambda call: call.what == "submit")

    def clear(self) -> list[Call]:
        """Remove and return all calls except the last, `finish`; records are counted as lost."""
        with self._changed:
            cleared = self._take_all(lambda call: call.what != "finish")
            self.lost += sum(call.record for call in cleared)
            return cleared

    def lose(self, call: Call) -> None:
        """Count a call as lost that was taken from the queue, if it is a record."""
        with self._changed:
            self.lost += call.record

    def _pop(self, place: int) -> Call:
        call = self._calls[place]
        del self._calls[place]
        self._size -= call.size
        return call

    def _take_all(self, wanted: Callable[[Call], bool]) -> list[Call]:
        taken = [call for call in self._calls if wanted(call)]
        self._calls = deque(call for call in self._calls if not wanted(call))
        self._size -= sum(call.size for call in taken)
        return taken

    def _drop_oldest(self, *, sized: bool = False) -> None:
        """Drop the oldest record, or the oldest one that takes memory."""
        for place, call in enumerate(self._calls):
            if call.record and (call.size or not sized):
                self._pop(place)
                self.lost += 1
                return
