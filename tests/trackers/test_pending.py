import threading
from time import monotonic

from trackers.pending import Call, DroppedRange, Pending


def record(time):
    return Call("log", print, time=time)


def filled(times, capacity=2):
    pending = Pending(capacity)
    pending.can_replay = True
    for time in times:
        pending.put(record(time))
    return pending


def taken(pending):
    pending.put(Call("finish", print, record=False), last=True)
    found = []
    while not found or getattr(found[-1], "method", "") != "finish":
        found.append(pending.take())
    return [one if isinstance(one, DroppedRange) else one.time for one in found[:-1]]


def test_a_record_that_is_put_back_before_a_gap_joins_it():
    """Otherwise the gap, whose records are later, would be filled first."""
    pending = filled([1.0, 2.0])
    first = pending.take_record()
    for time in (3.0, 4.0):
        pending.put(record(time))
    pending.put_back(first)
    assert taken(pending) == [DroppedRange(1.0, 2.0, 2), 3.0, 4.0]
    assert pending.lost == 0


class Clockless(threading.Condition):
    """Does not wait where that has an end: it notes for how long it was to be."""

    def __init__(self):
        super().__init__()
        self.waits = []

    def wait_for(self, predicate, timeout=None):
        if timeout is None:
            return super().wait_for(predicate)
        if not predicate():
            self.waits.append(timeout)
        return predicate()


def gathering(seconds, capacity=10):
    pending = Pending(capacity, seconds)
    pending._changed = Clockless()
    return pending, pending._changed.waits


def until_it_waits(pending):
    """Until a thread waits; whoever is notified has to come back to it."""
    deadline = monotonic() + 30
    while not pending._changed._waiters:
        assert monotonic() < deadline, "nobody waits"


def taking(pending, number):
    """A thread that takes so many calls, and what it has taken; it waits for the first."""
    found = []

    def take():
        while len(found) < number:
            found.append(pending.take())

    thread = threading.Thread(target=take)
    thread.start()
    until_it_waits(pending)
    return thread, found


def test_the_queue_gathers_each_batch_of_records():
    pending, waits = gathering(7.0)
    for time in (1.0, 2.0):
        taker, _ = taking(pending, 1)
        pending.put(record(time))
        taker.join(30)
        assert not taker.is_alive()
    assert waits == [7.0, 7.0]


def test_waiting_records_are_taken_without_gathering():
    pending, waits = gathering(7.0)
    for time in (1.0, 2.0):
        pending.put(record(time))
    assert [pending.take().time for _ in range(2)] == [1.0, 2.0]
    assert waits == []


def test_a_call_that_is_no_record_ends_gathering():
    pending = Pending(10, gathering=3600.0)
    taker, found = taking(pending, 3)
    pending.put(record(1.0))
    pending.put(record(2.0))
    until_it_waits(pending)
    assert found == []
    pending.put(Call("submit", print, record=False))
    taker.join(30)
    assert [call.method for call in found] == ["log", "log", "submit"]


def test_a_half_full_queue_ends_gathering():
    pending = Pending(10, gathering=3600.0)
    taker, found = taking(pending, 5)
    for time in range(4):
        pending.put(record(time))
    until_it_waits(pending)
    assert found == []
    pending.put(record(4))
    taker.join(30)
    assert [call.time for call in found] == [0, 1, 2, 3, 4]
    assert pending.lost == 0
