"""`BackgroundTracker`: runs a tracker's calls on a thread, through a queue."""

import atexit
import contextlib
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, TypeVar

from trackers.base import GeneralTracker, Status
from trackers.copies import frozen, size_of
from trackers.masking import masked, masked_texts
from trackers.missed import Missed
from trackers.pending import Call
from trackers.worker import Worker, log
from trainer.errors import module_logger

_logger = module_logger("trackers")
_T = TypeVar("_T")
_KEPT = ("log_artifact", "log_model")  # never dropped: they are few and important


def finish_all(trackers: Sequence[GeneralTracker], status: Status) -> None:
    """Finish trackers in parallel, so that several that hang cost one time limit in total.

    Args:
        trackers: started trackers; those already finished are skipped.
        status: How the run ended; it is set as each tracker's `status`.
    """
    for tracker in trackers:
        if tracker.status == "running":
            tracker.status = status
        if isinstance(tracker, BackgroundTracker):
            tracker.begin_finish()
    for tracker in trackers:
        tracker.finish()


def _with_copies(
    what: str, values: Any, function: Callable[[GeneralTracker, Any], None], *, record: bool = True
) -> Call:
    """Return a call of `function` with copies of the values, or one that raises if copying failed.

    The error must not be raised here: a figure that cannot be drawn must not end the run.
    """
    arrivals: list[Any] = []
    try:
        copies = frozen(values, arrivals)
        size = size_of(copies) if record else 0
    except Exception as error:  # noqa: BLE001  # other libraries may raise anything
        refused = ValueError(f"A value cannot be copied or drawn: {error!r}")
        refused.__cause__ = error
        return Call(what, partial(_refuse, refused), record)

    def call(tracker: GeneralTracker) -> None:
        for event in arrivals:
            event.synchronize()
        function(tracker, copies)

    return Call(what, call, record, size=size)


def _without_none(values: dict[str, Any]) -> dict[str, Any]:
    return {
        name: _without_none(value) if isinstance(value, dict) else value
        for name, value in values.items()
        if value is not None
    }


def _refuse(error: ValueError, _: GeneralTracker) -> None:
    raise error


def _finish(tracker: GeneralTracker, *, status: Status) -> None:
    _mark(tracker, status)
    tracker.finish()


def _mark(tracker: GeneralTracker, status: Status) -> None:
    # A tracker class may define its own read-only `status`.
    with contextlib.suppress(AttributeError):
        tracker.status = status


class BackgroundTracker(GeneralTracker):
    """Runs all calls of a tracker in order on one daemon thread, so that it cannot delay training.

    `log` and the other `log_…` methods copy the values (including tensors), put them into a queue
    and return. Errors of the tracker are not raised in the training loop; the first failure is
    logged as a warning by the logger "trackers".

    * Outage: a call that fails because of a network, server or disk is retried with increasing
      pauses. Later calls wait, so that the service gets everything in order.
    * Invalid value: a call that raises one of Python's own errors, such as TypeError, or that keeps
      failing while later calls succeed, is dropped.
    * Full queue: the oldest record is dropped. Records of `log_recorded` are later read back from
      the local record (``metrics.jsonl``).
    * Unsupported type: if the tracker has no method for images, tables and so on, they are dropped
      with one warning.

    `finish` waits until everything is recorded, at most `finish_timeout` seconds, and reports what
    was lost. Other public attributes are forwarded to the tracker once it has started.

    Args:
        tracker: the tracker, not started. Use it only through this object from now on.
        capacity: the maximum number of records in the queue.
        memory: about the maximum number of bytes of images, tables and so on in the queue; a single
            one may be larger.
        finish_timeout: the maximum time that `finish` waits, in seconds.
        first_pause: about the pause before the first retry, in seconds.
        longest_pause: the maximum pause, in seconds; each pause is about twice the previous one.
        gathering: the maximum time, in seconds, that a record waits for others, so that the thread
            wakes up once for many records.

    Attributes:
        wrapped: the tracker.
        missed: reads records that a full queue dropped; may be set before `start`.

    Raises:
        ValueError: an argument is not positive (`gathering` may be 0), or `longest_pause` is below
            `first_pause`.
    """

    name = "background"  # each instance takes the wrapped tracker's
    requires_logging_directory = False

    def __init__(
        self,
        tracker: GeneralTracker,
        *,
        capacity: int = 10_000,
        memory: int = 2**30,
        finish_timeout: float = 30.0,
        first_pause: float = 0.5,
        longest_pause: float = 60.0,
        gathering: float = 0.1,
    ) -> None:
        if capacity < 1:
            raise ValueError(f"capacity={capacity} records: a queue holds at least 1.")
        if memory < 1:
            raise ValueError(f"memory={memory} bytes: give 1 or more.")
        if not finish_timeout > 0:
            raise ValueError(f"finish_timeout={finish_timeout} seconds: give a positive time.")
        if not 0 < first_pause <= longest_pause:
            raise ValueError(
                f"first_pause={first_pause} and longest_pause={longest_pause} seconds: give "
                "positive times, the first not above the longest."
            )
        if not gathering >= 0:
            raise ValueError(f"gathering={gathering} seconds: give 0 or more.")
        self.wrapped = tracker
        self.name = tracker.name
        self.requires_logging_directory = tracker.requires_logging_directory
        self.main_process_only = tracker.main_process_only
        self.finish_timeout = finish_timeout
        self.missed: Missed | None = None
        self._worker = Worker(
            tracker,
            capacity=capacity,
            memory=memory,
            limit=finish_timeout,
            pauses=(first_pause, longest_pause),
            gathering=gathering,
        )
        self._finished = False
        self._waited = False
        self._unsupported: set[str] = set()  # methods with a warning already logged
        self._started: Future[None] | None = None
        self._key_metrics: Callable[[GeneralTracker], None] | None = None  # before it starts

    @property
    def dropped(self) -> int:
        """The number of records lost so far: in a full queue, in an outage, or after `finish`."""
        return self._worker.pending.lost

    @property
    def failures(self) -> int:
        """The number of attempts that raised."""
        return self._worker.failures

    @property
    def replayed(self) -> int:
        """The number of records that a full queue dropped and that were read back."""
        return self._worker.replayed

    @property
    def tracker(self) -> Any:
        """The underlying SDK object, after all calls queued so far.

        Waits for `start` and for these calls, at most `finish_timeout` seconds each.

        Raises:
            concurrent.futures.TimeoutError: `start` has not ended in that time.
            Exception: the error of the last attempt of `start`.
        """
        return self._settled().tracker

    def __getattr__(self, name: str) -> Any:
        """Return the wrapped tracker's attribute; methods of it run on the calling thread.

        Waits as `tracker` does.
        """
        if name.startswith("_"):  # Python protocols, and attributes before `__init__`
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self._settled(), name)

    @property
    def run_id(self) -> str | None:  # type: ignore[override]  # the tracker sets it
        """The tracker's `run_id`, or None if it is not known yet; does not wait."""
        try:
            return self.wrapped.run_id
        # The tracker's own property may fail before `start`. Its AttributeError would make Python
        # call `__getattr__`, which waits.
        except Exception as error:  # noqa: BLE001
            started = self._started is not None and self._started.done()
            if started and "run_id" not in self._unsupported:
                self._unsupported.add("run_id")
                _logger.warning("The run_id of the tracker %r is unknown: %r.", self.name, error)
            return None

    def resume(self, run_id: str | None, step: int | None) -> None:
        """Call `resume` of the tracker on the thread, before its `start`."""
        self._key_metrics = lambda tracker: tracker.resume(run_id, step)

    def begin_anew(self) -> None:
        """Call `begin_anew` of the tracker on the thread, before its `start`."""
        self._key_metrics = lambda tracker: tracker.begin_anew()

    def start(self) -> None:
        """Start the thread, and the tracker on it.

        Raises:
            RuntimeError: it was started or finished before.
        """
        if self._worker.thread is not None or self._finished:
            raise RuntimeError(
                f"The tracker {self.name!r} can be started only once. Make another one."
            )
        self._started = Future()
        self._worker.start(Call("start", self._begin, record=False), self.missed)

    def call_at_exit(self, end: Callable[[], object]) -> None:
        """Call `end` when the interpreter exits, before whatever `start` has registered for that.

        The exit hook of an SDK closes its connection, after which no record can be sent.
        """
        assert self._started is not None  # after `start`
        self._started.add_done_callback(lambda _: atexit.register(end))

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Store the configuration, on the thread; secrets in it are masked."""
        what = "store_init_configuration"
        store = _with_copies(
            what,
            masked(values),
            lambda tracker, copies: getattr(tracker, what)(copies),
            record=False,
        )
        self._worker.pending.put(store)

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Queue values to be recorded. None values are left out; secrets in texts are masked."""
        values = masked_texts(_without_none(values))
        self._worker.pending.put(
            _with_copies("log", values, lambda tracker, copies: tracker.log(copies, step, **kwargs))
        )

    def log_recorded(self, values: dict[str, Any], step: int, time: float) -> None:
        """Queue values that are also in the local record, so that they can be read back if dropped.

        Args:
            values: names and numbers, in a dict that must not change.
            step: the number of optimizer updates so far.
            time: the field `time` of the local record; later than in the previous call.
        """
        self._worker.pending.put(Call("log", partial(log, values=values, step=step), time=time))

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
        """Draw figures now and queue their pixels, so that the caller may change the figures."""
        self._relay("log_figure", "figures", values, step, **kwargs)

    def log_text(self, values: dict[str, str], step: int | None = None, **kwargs: Any) -> None:
        """Queue texts to be recorded."""
        self._relay("log_text", "texts", masked_texts(values), step, **kwargs)

    def log_artifact(self, path: Any, *args: Any, **kwargs: Any) -> None:
        """Queue a file or a folder to be recorded; a full queue does not drop it."""
        self._relay("log_artifact", "files", path, *args, **kwargs)

    def log_model(self, path: Any, *args: Any, **kwargs: Any) -> None:
        """Queue a model to be recorded; a full queue does not drop it."""
        self._relay("log_model", "models", path, *args, **kwargs)

    def submit(self, function: Callable[[GeneralTracker], _T]) -> "Future[_T]":
        """Call a function with the tracker on the thread, after all calls queued so far.

        A checkpoint uses this to sync the local record up to its step. Such calls are never dropped
        by a full queue. In an outage they do not wait: they run before the calls in the queue.

        Args:
            function: takes the wrapped tracker.

        Returns:
            A future with the function's result or error. It raises `TimeoutError` if `finish` gave
            up first, and `RuntimeError` after `finish`.
        """
        future: Future[_T] = Future()
        future.set_running_or_notify_cancel()  # it cannot be cancelled
        if not self._worker.submit(Call("submit", function, record=False, future=future)):
            future.set_exception(RuntimeError(f"The tracker {self.name!r} is finished."))
        return future

    def settle(self, timeout: float) -> None:
        """Wait until all calls queued so far are made or lost; call it from another thread.

        Args:
            timeout: the longest wait, in seconds.
        """
        self._worker.settle(timeout)

    def begin_finish(self) -> None:
        """Request the end without waiting; the time limit of `finish` begins now."""
        if self._finished:
            return
        status: Status = "finished" if self.status == "running" else self.status
        self.status = status
        self._finished = True
        self._worker.end(Call("finish", partial(_finish, status=status), record=False))

    def finish(self) -> None:
        """Wait until all is recorded and the tracker closed, at most `finish_timeout` seconds.

        The tracker's `status` is set to this object's, or "finished" if it was not set. A warning
        reports what was lost. Later calls record nothing; they are counted as dropped.
        """
        self.begin_finish()
        if self._waited:
            return
        self._waited = True
        hangs = self._worker.join()
        if self.dropped or self.failures or hangs:
            at = f"`{self._worker.running}` after {self.finish_timeout:g} seconds"
            _logger.warning(
                "The tracker %r lost %d records%s and failed in %d calls%s.",
                self.name,
                self.dropped,
                f", which are in {self.missed.path}," if self.missed and self.dropped else "",
                self.failures,
                f"; it is left behind in {at}" if hangs else "",
            )

    def _settled(self) -> GeneralTracker:
        """Return the wrapped tracker once it has started and made the calls queued so far."""
        if self._started is not None:
            self._started.result(self.finish_timeout)
            self.settle(self.finish_timeout)
        return self.wrapped

    def _begin(self, tracker: GeneralTracker) -> None:
        if self._started is None or self._started.done():  # a retry
            self._started = Future()
        try:
            _mark(tracker, "running")  # an instance may have been used for a run before
            if self._key_metrics is not None:
                self._key_metrics(tracker)
            tracker.start()
        except BaseException as error:
            self._started.set_exception(error)
            raise
        self._started.set_result(None)

    def _relay(self, method: str, what: str, *args: Any, **kwargs: Any) -> None:
        if not self._has(method, what):
            return
        call = _with_copies(
            method,
            (args, kwargs),
            lambda tracker, copies: getattr(tracker, method)(*copies[0], **copies[1]),
            record=method not in _KEPT,
        )
        self._worker.pending.put(call)

    def _has(self, method: str, what: str) -> bool:
        own = getattr(getattr(self.wrapped, method), "__func__", None)
        if own is not getattr(GeneralTracker, method):
            return True
        if method not in self._unsupported:
            self._unsupported.add(method)
            _logger.warning(
                "The tracker %r does not support %s. They are left out there.", self.name, what
            )
        return False
