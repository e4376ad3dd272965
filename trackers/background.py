"""A queue and a thread between the training loop and a tracker."""

import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, NamedTuple, TypeVar

from trackers.base import GeneralTracker, Status
from trackers.copies import frozen

_logger = logging.getLogger("trackers")
_T = TypeVar("_T")
_KEPT = ("log_artifact", "log_model")  # they are few, and each is dear


class _Call(NamedTuple):
    what: str
    function: Callable[[GeneralTracker], Any]
    future: "Future[Any] | None"  # None for a record, which may be dropped


def finish_all(trackers: Sequence[GeneralTracker], status: Status) -> None:
    """Close trackers side by side: several that hang cost one time limit, not one each.

    Args:
        trackers: started; those that were finished before are left alone.
        status: How the run ended; `finish` finds it in the tracker.
    """
    for tracker in trackers:
        if tracker.status == "running":
            tracker.status = status
        if isinstance(tracker, BackgroundTracker):
            tracker.begin_finish()
    for tracker in trackers:
        tracker.finish()


def _with_copies(
    values: Any, function: Callable[[GeneralTracker, Any], None]
) -> Callable[[GeneralTracker], None]:
    """A call of `function` with the values as they are now."""
    arrivals: list[Any] = []
    copies = frozen(values, arrivals)

    def call(tracker: GeneralTracker) -> None:
        for event in arrivals:
            event.synchronize()
        function(tracker, copies)

    return call


def _finish(tracker: GeneralTracker, *, status: Status) -> None:
    _mark(tracker, status)
    tracker.finish()


def _mark(tracker: GeneralTracker, status: Status) -> None:
    # A class may have a read-only `status` of its own; it does not look for ours.
    with contextlib.suppress(AttributeError):
        tracker.status = status


class BackgroundTracker(GeneralTracker):
    """Runs every call of a tracker on one daemon thread, in order, so that it cannot hurt the loop.

    `log` and its kin copy the values, tensors too, put them into a queue and return. A call that
    raises is reported once, by a warning of the logger "trackers", and counted; it never raises
    here. Images, tables and so on that the tracker has no method for are left out, with one
    warning. A full queue drops its oldest record and counts it. `finish` waits for the queue to
    empty, at most `finish_timeout`, and reports what was lost.

    Public attributes that are not of the interface are the tracker's own, once it has started.

    Args:
        tracker: the tracker, not started. From here on it belongs to the thread.
        capacity: how many records may wait.
        finish_timeout: how long `finish` waits, in seconds.

    Attributes:
        wrapped: the tracker.
        failures: how many calls raised.
        dropped: how many records were dropped: by a full queue, by the time limit of `finish`, or
            because they came after it.

    Raises:
        ValueError: `capacity` or `finish_timeout` is not positive.
    """

    name = "background"  # each instance takes the wrapped tracker's
    requires_logging_directory = False

    def __init__(
        self, tracker: GeneralTracker, *, capacity: int = 10_000, finish_timeout: float = 30.0
    ) -> None:
        if capacity < 1:
            raise ValueError(f"capacity={capacity} records: a queue holds at least 1.")
        if not finish_timeout > 0:
            raise ValueError(f"finish_timeout={finish_timeout} seconds: give a positive time.")
        self.wrapped = tracker
        self.name = tracker.name
        self.requires_logging_directory = tracker.requires_logging_directory
        self.main_process_only = tracker.main_process_only
        self.capacity = capacity
        self.finish_timeout = finish_timeout
        self.failures = 0
        self.dropped = 0
        self._calls: deque[_Call] = deque()
        self._changed = threading.Condition()
        self._running = ""
        self._finished = False
        self._waited = False
        self._deadline = 0.0  # of `finish`
        self._unsupported: set[str] = set()  # what was warned of
        self._thread: threading.Thread | None = None
        self._started: Future[None] | None = None
        self._resumes: tuple[str | None, int | None] | None = None

    @property
    def tracker(self) -> Any:
        """The object of the SDK underneath. Waits for `start` to end, at most `finish_timeout`.

        Raises:
            concurrent.futures.TimeoutError: `start` has not ended in that time.
            Exception: what `start` raised.
        """
        if self._started is not None:
            self._started.result(self.finish_timeout)
        return self.wrapped.tracker

    def __getattr__(self, name: str) -> Any:
        """The wrapped tracker's own, such as `writer`; called here, it runs on this thread."""
        if name.startswith("_"):  # Python's own protocols, and whatever an unmade object lacks
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        if self._started is not None:
            self._started.result(self.finish_timeout)
        return getattr(self.wrapped, name)

    @property
    def run_id(self) -> str | None:  # type: ignore[override]  # the tracker sets it
        """The tracker's, as soon as it knows it; waits for nothing."""
        return self.wrapped.run_id

    def resume(self, run_id: str | None, step: int | None) -> None:
        """Tell the tracker, on the thread before it starts, that the run goes on."""
        self._resumes = (run_id, step)

    def start(self) -> None:
        """Start the thread, and on it the tracker.

        Raises:
            RuntimeError: it was started or finished before.
        """
        if self._thread is not None or self._finished:
            raise RuntimeError(f"The tracker {self.name!r} can be started once. Make another one.")
        self._started = Future()
        call = _Call("start", self._begin, self._started)
        self._thread = threading.Thread(
            target=self._run, args=(call,), name=f"tracker-{self.name}", daemon=True
        )
        self._thread.start()

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Store the configuration, on the thread."""
        store = _with_copies(
            values, lambda tracker, copies: tracker.store_init_configuration(copies)
        )
        self._submit("store_init_configuration", store)

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Queue values to be recorded."""
        call = _with_copies(values, lambda tracker, copies: tracker.log(copies, step, **kwargs))
        self._put(_Call("log", call, None))

    def log_images(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Queue images to be recorded."""
        self._relay("log_images", "images", values, step, **kwargs)

    def log_table(self, table_name: str, *args: Any, **kwargs: Any) -> None:
        """Queue a table to be recorded."""
        self._relay("log_table", "tables", table_name, *args, **kwargs)

    def log_histogram(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Queue histograms to be recorded."""
        self._relay("log_histogram", "histograms", values, step, **kwargs)

    def log_figure(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Draw figures, which the loop may go on with, and queue their pixels to be recorded."""
        self._relay("log_figure", "figures", values, step, **kwargs)

    def log_text(self, values: dict[str, str], step: int | None = None, **kwargs: Any) -> None:
        """Queue texts to be recorded."""
        self._relay("log_text", "texts", values, step, **kwargs)

    def log_artifact(self, path: Any, *args: Any, **kwargs: Any) -> None:
        """Queue a file or a folder to be recorded; a full queue does not drop it."""
        self._relay("log_artifact", "files", path, *args, **kwargs)

    def log_model(self, path: Any, *args: Any, **kwargs: Any) -> None:
        """Queue a model to be recorded; a full queue does not drop it."""
        self._relay("log_model", "models", path, *args, **kwargs)

    def submit(self, function: Callable[[GeneralTracker], _T]) -> "Future[_T]":
        """Call a function with the tracker on the thread, after all that is queued by now.

        A checkpoint syncs the local record up to its step in this way. Such calls are not dropped
        by a full queue.

        Args:
            function: takes the wrapped tracker.

        Returns:
            The future of what the function returns or raises. It raises `TimeoutError` where
            `finish` gave up first, and `RuntimeError` behind `finish`.
        """
        return self._submit("submit", function)

    def begin_finish(self) -> None:
        """Ask for the end and return; the time limit of `finish` runs from here."""
        if self._finished:
            return
        status: Status = "finished" if self.status == "running" else self.status
        self.status = status
        self._deadline = time.monotonic() + self.finish_timeout
        self._submit("finish", partial(_finish, status=status), last=True)

    def finish(self) -> None:
        """Wait until all is recorded and the tracker closed, at most `finish_timeout` seconds.

        The tracker's `status` is then this object's, or "finished" where nobody set that. What was
        lost is reported by a warning. Calls behind it only count what they drop.
        """
        self.begin_finish()
        if self._waited:
            return
        self._waited = True
        thread = self._thread
        if thread is not None:
            thread.join(max(0.0, self._deadline - time.monotonic()))
        hangs = thread is not None and thread.is_alive()
        if hangs or thread is None:
            self._abandon()
        if self.dropped or self.failures or hangs:
            _logger.warning(
                "The tracker %r lost %d records and failed in %d calls%s.",
                self.name,
                self.dropped,
                self.failures,
                f"; it is left behind in `{self._running}` after {self.finish_timeout:g} seconds"
                if hangs
                else "",
            )

    def _begin(self, tracker: GeneralTracker) -> None:
        _mark(tracker, "running")  # an instance may have been through a run before
        if self._resumes is not None:
            tracker.resume(*self._resumes)
        tracker.start()

    def _relay(self, method: str, what: str, *args: Any, **kwargs: Any) -> None:
        if not self._has(method, what):
            return
        call = _with_copies(
            (args, kwargs),
            lambda tracker, copies: getattr(tracker, method)(*copies[0], **copies[1]),
        )
        if method in _KEPT:
            self._submit(method, call)
        else:
            self._put(_Call(method, call, None))

    def _has(self, method: str, what: str) -> bool:
        own = getattr(getattr(self.wrapped, method), "__func__", None)
        if own is not getattr(GeneralTracker, method):
            return True
        if method not in self._unsupported:
            self._unsupported.add(method)
            _logger.warning("The tracker %r takes no %s. They are left out there.", self.name, what)
        return False

    def _submit(
        self, what: str, function: Callable[[GeneralTracker], _T], *, last: bool = False
    ) -> "Future[_T]":
        future: Future[_T] = Future()
        future.set_running_or_notify_cancel()  # it cannot be cancelled
        if not self._put(_Call(what, function, future), last=last):
            future.set_exception(RuntimeError(f"The tracker {self.name!r} is finished."))
        return future

    def _put(self, call: _Call, *, last: bool = False) -> bool:
        with self._changed:
            if self._finished:
                self.dropped += call.future is None
                return False
            self._finished = last
            if call.future is None and len(self._calls) >= self.capacity:
                self._drop_oldest()
            self._calls.append(call)
            self._changed.notify()
            return True

    def _drop_oldest(self) -> None:
        for position, call in enumerate(self._calls):
            if call.future is None:
                del self._calls[position]
                self.dropped += 1
                return

    def _abandon(self) -> None:
        """Drop what waits, but for `finish`: a thread that hangs may yet come to close the run."""
        with self._changed:
            waiting = [call for call in self._calls if call.what != "finish"]
            self._calls = deque(call for call in self._calls if call.what == "finish")
            self.dropped += sum(call.future is None for call in waiting)
        for call in waiting:
            if call.future is not None:
                call.future.set_exception(
                    TimeoutError(f"The tracker {self.name!r} did not come to this before its end.")
                )

    def _run(self, call: _Call) -> None:
        while True:
            self._running = call.what
            self._execute(call)
            # An idle thread must not keep the tensors of the last record alive.
            del call
            if self._running == "finish":
                return
            with self._changed:
                while not self._calls:
                    self._changed.wait()
                call = self._calls.popleft()

    def _execute(self, call: _Call) -> None:
        try:
            result = call.function(self.wrapped)
        # SystemExit too, which some SDKs raise: it would end the thread without a word, and who
        # waits for a future would wait for ever.
        except BaseException as error:  # noqa: BLE001
            self._report(call, error)
            if call.future is not None:
                call.future.set_exception(error)
        else:
            if call.future is not None:
                call.future.set_result(result)

    def _report(self, call: _Call, error: BaseException) -> None:
        self.failures += 1
        if self.failures == 1:
            _logger.warning(
                "The tracker %r failed in `%s`: %r. The run goes on; further failures are only "
                "counted.",
                self.name,
                call.what,
                error,
                exc_info=error,
            )
