import threading

import pytest

from trackers.pending import Call, Gap, Pending


def record(time):
    return Call("log", print, time=time)


def filled(times, capacity=2):
    pending = Pending(capacity)
    pending.fills = True
    for time in times:
        pending.put(record(time))
    return pending


def taken(pending):
    pending.put(Call("finish", print, record=False), last=True)
    found = []
    while not found or getattr(found[-1], "what", "") != "finish":
        found.append(pending.take())
    return [one if isinstance(one, Gap) else one.time for one in found[:-1]]


def test_what_is_dropped_is_one_gap_before_what_waits():
    pending = filled([1.0, 2.0, 3.0, 4.0, 5.0])
    assert pending.oldest_record() is None  # the gap comes first
    assert taken(pending) == [Gap(1.0, 3.0, 3), 4.0, 5.0]
    assert pending.lost == 0


def test_what_cannot_be_had_again_is_lost():
    pending = filled([1.0, 2.0])
    for time in (None, None, 3.0):
        pending.put(record(time))
    assert taken(pending) == [Gap(1.0, 2.0, 2), None, 3.0]
    assert pending.lost == 1


@pytest.mark.parametrize(
    ("behind", "left"),
    [([], [2.0]), ([3.0], [2.0, 3.0]), ([3.0, 4.0], ["rest", 3.0, 4.0])],
)
def test_a_record_told_before_its_turn_is_not_told_again(behind, left):
    """Also where it was dropped while it was told: then the gap begins behind it."""
    pending = filled([1.0, 2.0])
    first = pending.oldest_record()
    for time in behind:
        pending.put(record(time))
    pending.remove(first)
    found = taken(pending)
    if left[0] == "rest":
        gap = found[0]
        assert 1.0 < gap.first <= gap.last == 2.0
        assert gap.size == 1
        found[0] = "rest"
    assert found == left
    assert pending.lost == 0


def test_a_record_told_while_it_was_lost_is_not_lost():
    pending = Pending(1)
    pending.put(first := record(None))
    pending.put(record(None))
    assert pending.lost == 1
    pending.remove(first)
    assert pending.lost == 0


def test_what_is_awaited_comes_out_of_turn_and_the_rest_stays():
    pending = filled([1.0], capacity=9)
    pending.put(Call("submit", print, record=False))
    pending.put(record(2.0))
    assert [call.what for call in pending.take_awaited()] == ["submit"]
    assert taken(pending) == [1.0, 2.0]


def test_at_the_end_gap_and_records_are_lost_and_finish_stays():
    pending = filled([1.0, 2.0, 3.0, 4.0])
    pending.put(Call("log_model", print, record=False))
    pending.put(Call("finish", print, record=False), last=True)
    assert not pending.put(record(9.0))
    assert [call.what for call in pending.clear()] == ["log", "log", "log_model"]
    assert pending.lost == 5
    assert pending.take().what == "finish"


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


def gathering(seconds):
    pending = Pending(10, seconds)
    pending._changed = Clockless()
    return pending, pending._changed.waits


def test_the_first_record_waits_for_others():
    pending, waits = gathering(7.0)
    taker = threading.Thread(target=pending.take)  # which finds nothing, or the first record
    taker.start()
    for time in (1.0, 2.0, 3.0):
        pending.put(record(time))
    taker.join()
    assert [pending.take().time for _ in range(2)] == [2.0, 3.0]
    assert waits in ([7.0], [])  # once for all, or not at all where they were there before


def test_what_is_no_record_ends_the_waiting():
    pending = Pending(10, gathering=3600.0)
    found = []

    def take():
        found.extend(pending.take() for _ in range(3))

    taker = threading.Thread(target=take)
    taker.start()
    pending.put(record(1.0))
    pending.put(record(2.0))
    pending.put(Call("submit", print, record=False))
    taker.join(30)
    assert [call.what for call in found] == ["log", "log", "submit"]


def test_each_batch_is_waited_for_anew():
    pending, waits = gathering(7.0)
    for time in (1.0, 2.0):
        taker = threading.Thread(target=pending.take)
        taker.start()
        while not pending._changed._waiters:
            pass
        pending.put(record(time))
        taker.join(30)
        assert not taker.is_alive()
    assert waits == [7.0, 7.0]
