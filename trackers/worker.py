"""The thread that makes a tracker's calls, one behind the other, over outages."""

import contextlib
import logging
import threading
import time
from concurrent.futures import Future, wait
from functools import partial
from typing import Any

from trackers import retry
from trackers.base import GeneralTracker
from trackers.missed import Missed
from trackers.pending import Call, Gap, Pending

_logger = logging.getLogger("trackers")
_ONCE = ("submit", "settle", "finish")  # whoever asked is told; a run at a service closes once
_MANY = 5  # so many attempts fail before others are tried ahead of a call
_SURE = 3  # so many others get through before it is given up: with one the service just returned
_SILENT = 5.0  # seconds of the end that nobody wonders about
_LAST = 0.5  # of the time limit of the end is left to the tracker's own `finish`


def log(tracker: GeneralTracker, *, values: dict[str, Any], step: int | None) -> None:
    """Let the tracker log a copy: others have the same dict."""
    tracker.log(dict(values), step)


class Worker:
    """Makes the calls that are put to it, on a daemon thread.

    A call that fails as in an outage is made again, with growing pauses, and all others wait behind
    it, but for those of `submit`. One that fails while the next records get through is left out.

    Args:
        tracker: the tracker.
        capacity: how many calls may wait until a further record drops one.
        memory: see `Pending`.
        limit: how long the end may take, in seconds.
        pauses: the first and the longest one, in seconds.
        gathering: see `Pending`.

    Attributes:
        pending: what waits.
        missed: where to find what `pending` dropped.
        running: the name of the call that is made.
        thread: None until `start`.
        failures: how many attempts raised.
        replayed: how many records came from `missed`.
    """

    def __init__(
        self,
        tracker: GeneralTracker,
        *,
        capacity: int,
        memory: int,
        limit: float,
        pauses: tuple[float, float],
        gathering: float,
    ) -> None:
        self.pending = Pending(capacity, gathering, memory)
        self.missed: Missed | None = None
        self.running = ""
        self.thread: threading.Thread | None = None
        self.failures = 0
        self.replayed = 0
        self._tracker = tracker
        self._limit = limit
        self._pauses = pauses
        self._deadline: float | None = None  # once the end was asked for
        self._gave_up = False  # on an outage, at the end
        self._left_behind = False
        self._refused = False  # `start`, for good: nothing behind it is worth a second attempt
        self._hurry = threading.Event()  # ends a pause
        self._untold = 0  # records of the gap that is being filled

    def start(self, call: Call, missed: Missed | None) -> None:
        """Begin, with a call that comes before all that waits."""
        self.missed = missed
        self.pending.fills = missed is not None
        self.thread = threading.Thread(
            target=self._run, args=(call,), name=f"tracker-{self._tracker.name}", daemon=True
        )
        self.thread.start()

    def submit(self, call: Call) -> bool:
        """Put a call that does not wait for the end of an outage; False behind the last one."""
        taken = self.pending.put(call)
        self._hurry.set()
        return taken

    def settle(self, timeout: float) -> None:
        """Wait until all that waits by now is made or lost, at most `timeout` seconds."""
        done: Future[None] = Future()
        if self.submit(Call("settle", lambda _: None, record=False, future=done)):
            wait([done], timeout)
        elif self.thread is not None:  # nothing is put behind the last call
            self.thread.join(timeout)

    def end(self, call: Call) -> None:
        """Put the last call; the time limit runs from here."""
        self._deadline = time.monotonic() + self._limit
        self.pending.put(call, last=True)
        self._hurry.set()

    def join(self) -> bool:
        """Wait for the end, within its limit; whether the tracker hangs, and is left behind."""
        assert self._deadline is not None
        if self.thread is not None:
            self.thread.join(max(0.0, min(_SILENT, self._deadline - time.monotonic())))
            left = self._deadline - time.monotonic()
            if self.thread.is_alive() and left > 0:
                _logger.warning(
                    "Waiting for the tracker %r, at most %.0f seconds more: it is in `%s`.",
                    self._tracker.name,
                    left,
                    self.running,
                )
                self.thread.join(left)
            if not self.thread.is_alive():
                return False
        self._left_behind = True
        self.abandon()
        # Where the thread comes to tell them after all it counts them back.
        untold, self._untold = self._untold, 0
        self.pending.lose(untold)
        return self.thread is not None

    def abandon(self) -> None:
        """Drop what waits, but for `finish`: a thread that hangs may yet come to close the run."""
        for call in self.pending.clear():
            if call.future is not None:
                call.future.set_exception(
                    TimeoutError(
                        f"The tracker {self._tracker.name!r} did not come to this before its end."
                    )
                )

    def _run(self, call: Call | Gap) -> None:
        while True:
            if isinstance(call, Gap):
                self._replay(call)
            else:
                self._make(call)
            # An idle thread must not keep the tensors of the last record alive.
            del call
            if self.running == "finish":
                return
            call = self.pending.take()

    def _make(self, call: Call) -> None:
        """Make a call, again and again while it fails as in an outage."""
        self.running = call.what
        attempt = 0  # since the pauses began to grow
        failed = passed_over = 0
        while (error := self._attempt(call)) is not None:
            if self._refused or call.what in _ONCE or not retry.may_pass(error, call.what):
                self._refused = self._refused or call.what == "start"
                return
            attempt, failed = attempt + 1, failed + 1
            for other in self.pending.take_awaited():
                self._attempt(other)
            if failed >= _MANY and call.what != "start" and self._others_pass():
                attempt, passed_over = 0, passed_over + 1
                if passed_over == _SURE:
                    self._lose(call)
                    return
            if not self._pause(attempt):
                self._gave_up = True
                self._lose(call)
                self.abandon()
                return
            if self._hurry.is_set():
                self._hurry.clear()
                attempt = 0

    def _pause(self, attempt: int) -> bool:
        """Wait before another attempt, or until someone asks for one; False if it is too late."""
        seconds = retry.pause(max(attempt, 1), *self._pauses)
        if self._deadline is not None and not self._hurry.is_set():
            left = self._deadline - _LAST * self._limit - time.monotonic()
            if left <= 0:
                return False
            seconds = min(seconds, left)
        self._hurry.wait(seconds)
        return True

    def _others_pass(self) -> bool:
        """Whether the service takes the next record: then it is not away, or no longer.

        That record so comes ahead of what it was tried for, and of some that are replayed.
        """
        other = self.pending.oldest_record()
        if other is None:
            return False
        error = self._attempt(other)
        if error is None or not retry.may_pass(error, other.what):
            self.pending.remove(other)
        return error is None

    def _replay(self, gap: Gap) -> None:
        """Tell the tracker what a full queue dropped."""
        assert self.missed is not None  # or there would be no gap
        self._untold = gap.size
        self.running = "log"
        try:
            with contextlib.closing(self.missed.between(gap.first, gap.last)) as records:
                for values, step in records:
                    self._make(Call("log", partial(log, values=values, step=step)))
                    self._untold -= 1
                    if self._gave_up:
                        break
                    self.replayed += 1
        # Whatever reading the local record raises: it would end the thread without a word.
        except Exception as error:  # noqa: BLE001
            self._report("log", error)
        self.pending.lose(self._untold)
        self._untold = 0

    def _attempt(self, call: Call) -> BaseException | None:
        """Make a call once; gives what it raised."""
        try:
            result = call.function(self._tracker)
        # SystemExit too, which some SDKs raise: it would end the thread without a word, and who
        # waits for a future would wait for ever.
        except BaseException as error:  # noqa: BLE001
            self._report(call.what, error)
            if call.future is not None:
                call.future.set_exception(error)
            return error
        if call.future is not None:
            call.future.set_result(result)
        return None

    def _lose(self, call: Call) -> None:
        self.pending.lose(call.record)

    def _report(self, what: str, error: BaseException) -> None:
        self.failures += 1
        if self.failures > 1:
            return
        if self._left_behind:
            _logger.warning(
                "The tracker %r failed in `%s` after it was left behind: %r.",
                self._tracker.name,
                what,
                error,
            )
        else:
            _logger.warning(
                "The tracker %r failed in `%s`: %r. The run goes on; in an outage what comes next "
                "waits. Further failures are only counted.",
                self._tracker.name,
                what,
                error,
                exc_info=error,
            )
