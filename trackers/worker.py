"""The thread that makes a tracker's calls one after the other, and retries failed ones."""

import contextlib
import contextvars
import errno
import random
import threading
import time
from concurrent.futures import Future, wait
from functools import partial

from trackers.base import GeneralTracker
from trackers.pending import Call, DroppedRange, Pending, RecordReplay, log_call
from trainer.errors import module_logger

_logger = module_logger("trackers")
_NOT_RETRIED = ("submit", "drain", "finish")  # callers get the error; a run is closed once
_ATTEMPTS_BEFORE_NEXT = 5  # failed attempts of a call before the next record is tried first
_SUCCESSES_BEFORE_DROP = 3  # later records that must succeed before a failing call is dropped
_WARN_AFTER = 5.0  # seconds that `finish` waits before a warning
_FINISH_SHARE = 0.5  # fraction of the time limit reserved for the tracker's own `finish`
# Errors that a retry would raise again. Network errors may be subclasses of these, but are also an
# OSError, and are retried.
_PERMANENT = (
    *(ArithmeticError, AssertionError, AttributeError, ImportError, LookupError, NameError),
    *(NotImplementedError, TypeError, ValueError),
)
_random = random.SystemRandom()  # not the RNG used in training


def is_retryable(error: BaseException, method: str) -> bool:
    """Return whether to retry a call of this method that raised.

    A call with an invalid value is not retried. A call that fails because of a network, server or
    disk, or that raises an SDK's error class, is retried.
    """
    if isinstance(error, FileNotFoundError) and method in ("log_artifact", "log_model"):
        return False
    if isinstance(error, OSError):
        return error.errno != errno.ENAMETOOLONG
    return not isinstance(error, _PERMANENT)


def pause(attempt: int, first: float, longest: float) -> float:
    """Return the pause after an attempt (from 1), in seconds: exponential backoff with jitter.

    It doubles with each attempt, from `first` to `longest`. Up to half of it is random, so that
    many runs do not retry at the same time.
    """
    return min(longest, first * 2.0 ** min(attempt - 1, 60)) * _random.uniform(0.5, 1.0)


class Worker:
    """Makes queued calls on a daemon thread.

    A call that fails because of an outage is retried with increasing pauses, while all other calls
    except those of `submit` wait. A call that keeps failing while later records succeed is dropped.

    Args:
        tracker: the tracker.
        pending: the waiting calls.
        limit: the time limit of `join`, in seconds.
        pauses: the first and the longest pause, in seconds.

    Attributes:
        replay: reads records that `pending` dropped.
        running: the name of the current call.
        thread: the thread, None until `start`.
        failures: the number of attempts that raised.
        replayed: the number of records from `replay`.
    """

    def __init__(
        self, tracker: GeneralTracker, pending: Pending, limit: float, pauses: tuple[float, float]
    ) -> None:
        self.pending = pending
        self.replay: RecordReplay | None = None
        self.running = ""
        self.thread: threading.Thread | None = None
        self.failures = 0
        self.replayed = 0
        self._tracker = tracker
        self._limit = limit
        self._pauses = pauses
        self._deadline: float | None = None  # set when the end is requested
        self._gave_up = False  # whether an outage lasted beyond the end
        self._refused = False  # whether `start` failed for good; later calls are not retried
        self._retry_now = threading.Event()  # ends a pause

    def start(self, call: Call, replay: RecordReplay | None) -> None:
        """Start the thread with a call that runs before all waiting ones."""
        self.replay = replay
        self.pending.can_replay = replay is not None
        # In the caller's context, where some SDKs store the run that the script has open.
        run = partial(contextvars.copy_context().run, self._run, call)
        name = f"tracker-{self._tracker.name}"
        self.thread = threading.Thread(target=run, name=name, daemon=True)
        self.thread.start()

    def submit(self, call: Call) -> bool:
        """Queue a call that does not wait during an outage; return False after the last call."""
        taken = self.pending.put(call)
        self._retry_now.set()
        return taken

    def drain(self, timeout: float) -> None:
        """Wait until all calls queued so far are made or lost, at most `timeout` seconds."""
        done: Future[None] = Future()
        if self.submit(Call("drain", lambda _: None, record=False, future=done)):
            wait([done], timeout)
        elif self.thread is not None:  # nothing can be queued after the last call
            self.thread.join(timeout)

    def end(self, call: Call) -> None:
        """Queue the last call; its time limit begins now."""
        self._deadline = time.monotonic() + self._limit
        self.pending.put(call, last=True)
        self._retry_now.set()

    def join(self) -> bool:
        """Wait for the thread to end within the limit; return True if the tracker hangs."""
        assert self._deadline is not None
        if self.thread is not None:
            self.thread.join(max(0.0, min(_WARN_AFTER, self._deadline - time.monotonic())))
            remaining = self._deadline - time.monotonic()
            if self.thread.is_alive() and remaining > 0:
                _logger.warning(
                    "Waiting for the tracker %r, at most %.0f seconds more: it is in `%s`.",
                    self._tracker.name,
                    remaining,
                    self.running,
                )
                self.thread.join(remaining)
            if not self.thread.is_alive():
                return False
        self._abandon()
        return self.thread is not None

    def _abandon(self) -> None:
        """Drop all waiting calls except `finish`, so that the thread may still close the run."""
        text = f"The tracker {self._tracker.name!r} was finished before this call ran."
        for call in self.pending.clear():
            if call.future is not None:
                call.future.set_exception(TimeoutError(text))

    def _run(self, call: Call | DroppedRange) -> None:
        while True:
            if isinstance(call, DroppedRange):
                self._replay(call)
            else:
                self._call_with_retries(call)
            # An idle thread must not keep the tensors of the last record alive.
            del call
            if self.running == "finish":
                return
            call = self.pending.take()

    def _call_with_retries(self, call: Call) -> None:
        """Make a call, and retry it as long as its errors are retryable."""
        self.running = call.method
        attempt = 0  # failures since the pauses began to grow
        failed = later_successes = 0
        while (error := self._attempt(call)) is not None:
            if self._refused or call.method in _NOT_RETRIED or not is_retryable(error, call.method):
                self._refused = self._refused or call.method == "start"
                return
            attempt, failed = attempt + 1, failed + 1
            for submitted in self.pending.take_submitted():
                self._attempt(submitted)
            may_skip = failed >= _ATTEMPTS_BEFORE_NEXT and call.method != "start"
            if may_skip and self._next_record_succeeds():
                attempt, later_successes = 0, later_successes + 1
                if later_successes == _SUCCESSES_BEFORE_DROP:
                    self.pending.count_lost(call.record)
                    return
            if not self._pause(attempt):
                self._gave_up = True
                self.pending.count_lost(call.record)
                self._abandon()
                return
            if self._retry_now.is_set():
                self._retry_now.clear()
                attempt = 0

    def _pause(self, attempt: int) -> bool:
        """Wait before a retry, or until one is requested; return False if it is too late."""
        seconds = pause(max(attempt, 1), *self._pauses)
        if self._deadline is not None and not self._retry_now.is_set():
            remaining = self._deadline - _FINISH_SHARE * self._limit - time.monotonic()
            if remaining <= 0:
                return False
            seconds = min(seconds, remaining)
        self._retry_now.wait(seconds)
        return True

    def _next_record_succeeds(self) -> bool:
        """Try the next record; return whether the service accepts it, which shows it is available.

        That record is then logged before the failing call, and before some replayed records.
        """
        later = self.pending.take_record()
        if later is None:
            return False
        error = self._attempt(later)
        if error is not None and is_retryable(error, later.method):
            self.pending.put_back(later)
        return error is None

    def _replay(self, dropped: DroppedRange) -> None:
        """Log the records that a full queue dropped."""
        assert self.replay is not None  # otherwise no range is kept
        self.running = "log"
        self.pending.count_lost(dropped.size)  # lost until logged, since the tracker may hang
        try:
            with contextlib.closing(self.replay.between(dropped.first, dropped.last)) as records:
                for values, step in records:
                    self._call_with_retries(log_call(values, step))
                    self.pending.count_lost(-1)
                    if self._gave_up:
                        break
                    self.replayed += 1
        # Reading the local record may raise anything, which would end the thread silently.
        except Exception as error:  # noqa: BLE001
            self._report("log", error)

    def _attempt(self, call: Call) -> BaseException | None:
        """Make a call once; return the error that it raised, or None."""
        try:
            result = call.function(self._tracker)
        # Including SystemExit, which some SDKs raise. It would end the thread silently, and callers
        # would wait for their futures forever.
        except BaseException as error:  # noqa: BLE001
            self._report(call.method, error)
            if call.future is not None:
                call.future.set_exception(error)
            return error
        if call.future is not None:
            call.future.set_result(result)
        return None

    def _report(self, method: str, error: BaseException) -> None:
        self.failures += 1
        if self.failures == 1:
            _logger.warning(
                "The tracker %r failed in `%s`: %r. The run continues; during an outage, later "
                "records are queued. Further failures are counted, not logged.",
                self._tracker.name,
                method,
                error,
                exc_info=error,
            )
