"""`BackgroundTracker`: runs a tracker's calls on a thread, through a queue."""

import atexit
import random
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from importlib import import_module
from typing import Any, TypeVar

from trackers.base import GeneralTracker, ServiceTracker, Status
from trackers.media import size_of, snapshot
from trackers.pending import Call, Pending, RecordReplay, log_call
from trackers.redaction import redact, redacted_texts
from trackers.worker import Worker
from trainer.errors import module_logger

_logger = module_logger("trackers")
_T = TypeVar("_T")
# Never dropped: they are few and important.
_KEPT = ("store_init_configuration", "log_artifact", "log_model")


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


def _without_none(values: dict[str, Any]) -> dict[str, Any]:
    return {
        name: _without_none(value) if isinstance(value, dict) else value
        for name, value in values.items()
        if value is not None
    }


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

    Example::

        tracker = BackgroundTracker(TensorBoardTracker("digits", "runs"), finish_timeout=60)
        tracker.start()
        tracker.log({"train/loss": 0.25}, step=1)
        tracker.finish()

    Args:
        tracker: the tracker, not started. Use it only through this object from now on.
        capacity: the maximum number of records in the queue.
        memory: the approximate maximum number of bytes of images, tables and so on in the queue; a
            single one may be larger.
        finish_timeout: the maximum time that `finish` waits, in seconds.
        first_pause: the approximate pause before the first retry, in seconds.
        longest_pause: the maximum pause, in seconds; each pause is about twice the previous one.
        gathering: the maximum time, in seconds, that a record waits for others, so that the thread
            wakes up once for many records.

    Attributes:
        wrapped: the tracker.
        replay: reads records that a full queue dropped; may be set before `start`.
    """

    name = "background"  # each instance takes the wrapped tracker's value
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
        self.wrapped = tracker
        self.name = getattr(tracker, "kind", tracker.name)
        self.logs_epoch = getattr(tracker, "logs_epoch", False)
        self.requires_logging_directory = tracker.requires_logging_directory
        self.main_process_only = tracker.main_process_only
        self.finish_timeout = finish_timeout
        self.replay: RecordReplay | None = None
        pending = Pending(capacity, gathering, memory)
        self._worker = Worker(tracker, pending, finish_timeout, (first_pause, longest_pause))
        self._finished = False
        self._waited = False
        self._unsupported: set[str] = set()  # methods with a warning already logged
        self._start_error: BaseException | None = None  # of the last attempt
        self._prepare: Callable[[], None] | None = None  # before `start`

    @property  # type: ignore[misc]  # it can be set elsewhere
    def __class__(self) -> Any:
        """The wrapped tracker's class, so that `isinstance` accepts this object."""
        return type(self.wrapped)

    @property
    def started(self) -> bool:
        """Whether `start` was called."""
        return self._worker.thread is not None

    @property
    def dropped(self) -> int:
        """The number of records lost so far, to a full queue, an outage, or after `finish`."""
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

        Waits for `start` and for these calls, at most `finish_timeout` seconds; not while attempts
        of `start` fail.

        Raises:
            TimeoutError: `start` has not ended in that time.
            Exception: the error of the last attempt of `start`.
        """
        return self._started().tracker

    def __getattr__(self, name: str) -> Any:
        """Return the wrapped tracker's attribute; its methods run on the calling thread.

        Waits as `tracker` does.
        """
        if name.startswith("_"):  # Python protocols, and attributes before `__init__`
            raise AttributeError(name)
        return getattr(self._started(), name)

    @property
    def run_id(self) -> str | None:  # type: ignore[override]  # the tracker sets it
        """The tracker's `run_id`, or None if it is not known yet; does not wait."""
        try:
            return self.wrapped.run_id
        # A tracker's own property may fail before `start`. Its AttributeError would make Python
        # call `__getattr__`, which waits.
        except Exception:  # noqa: BLE001
            return None

    def resume(self, run_id: str | None, step: int | None) -> None:
        """Call `resume` of the tracker on the thread, before its `start`."""
        self._prepare = lambda: self.wrapped.resume(run_id, step)

    def begin_anew(self) -> None:
        """Call `begin_anew` of the tracker on the thread, before its `start`."""
        self._prepare = self.wrapped.begin_anew

    def start(self) -> None:
        """Start the thread, and the tracker on it.

        Raises:
            RuntimeError: it was started or finished before.
        """
        if self._worker.thread is not None or self._finished:
            raise RuntimeError(
                f"The tracker {self.name!r} can be started only once. Create a new instance."
            )
        if isinstance(self.wrapped, ServiceTracker) and self.wrapped.imports_early:
            state = random.getstate()
            with suppress(Exception):  # `start` will log it
                import_module(self.wrapped.imports_early)
            random.setstate(state)
        self._start_error = TimeoutError(f"The tracker {self.name!r} has not started yet.")
        self._worker.start(Call("start", self._begin, record=False), self.replay)

    def call_at_exit(self, end: Callable[[], object]) -> None:
        """Call `end` when the interpreter exits, before any exit hook that `start` registers.

        The exit hook of an SDK closes its connection, after which no record can be sent.
        """
        self.submit(lambda _: atexit.register(end))

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Store the configuration, on the thread; secrets in it are redacted."""
        self._queue("store_init_configuration", redact(values))

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Queue values to be recorded. None values are left out; secrets in texts are redacted."""
        self._queue("log", redacted_texts(_without_none(values)), step, **kwargs)

    def log_recorded(self, values: dict[str, Any], step: int, time: float) -> None:
        """Queue values that are also in the local record, so that they can be read back if dropped.

        Args:
            values: names and numbers, in a dict that must not change.
            step: the number of optimizer updates so far.
            time: the field `time` of the local record; later than in the previous call.
        """
        self._worker.pending.put(log_call(values, step, time))

    def log_images(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Queue images to be recorded."""
        self._relay("log_images", values, step, **kwargs)

    def log_table(self, table_name: str, *args: Any, **kwargs: Any) -> None:
        """Queue a table to be recorded."""
        self._relay("log_table", table_name, *args, **kwargs)

    def log_histogram(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Queue histograms to be recorded."""
        self._relay("log_histogram", values, step, **kwargs)

    def log_figure(self, *args: Any, **kwargs: Any) -> None:
        """Draw figures now and queue their pixels, so that the caller may change the figures."""
        self._relay("log_figure", *args, **kwargs)

    def log_text(self, values: dict[str, str], step: int | None = None, **kwargs: Any) -> None:
        """Queue texts to be recorded."""
        self._relay("log_text", redacted_texts(values), step, **kwargs)

    def log_artifact(self, *args: Any, **kwargs: Any) -> None:
        """Queue a file or a folder to be recorded; a full queue does not drop it."""
        self._relay("log_artifact", *args, **kwargs)

    def log_artifacts(self, local_dir: Any, artifact_path: str | None = None) -> None:
        """Like `log_artifact`, with MLflow's names; the default is the root of the run's files."""
        self._relay("log_artifact", local_dir, artifact_path or "")

    def log_model(self, path: Any, *args: Any, **kwargs: Any) -> None:
        """Queue a model to be recorded; a full queue does not drop it."""
        self._relay("log_model", path, *args, **kwargs)

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

    def drain(self, timeout: float) -> None:
        """Wait until all calls queued so far are made or lost; call it from another thread.

        Args:
            timeout: the maximum wait, in seconds.
        """
        self._worker.drain(timeout)

    def begin_finish(self) -> None:
        """Request the end without waiting; the time limit of `finish` begins now."""
        if self._finished:
            return
        if self.status == "running":
            self.status = "finished"
        self._finished = True
        self._worker.end(Call("finish", self._end, record=False))

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
                f", which are in {self.replay.path}," if self.replay and self.dropped else "",
                self.failures,
                f"; it was abandoned in {at}" if hangs else "",
            )

    def _started(self) -> GeneralTracker:
        """Return the wrapped tracker after it has started and made the calls queued so far."""
        failed = self._start_error is not None and self.failures  # an outage may last: do not wait
        if self._worker.thread is not None and not failed:
            self.drain(self.finish_timeout)
        if self._start_error is not None:
            raise self._start_error
        return self.wrapped

    def _begin(self, tracker: GeneralTracker) -> None:
        try:
            tracker.status = "running"  # an instance may have been used for a run before
            if self._prepare is not None:
                self._prepare()
            tracker.start()
        except BaseException as error:
            self._start_error = error
            raise
        self._start_error = None

    def _end(self, tracker: GeneralTracker) -> None:
        tracker.status = self.status
        tracker.finish()

    def _relay(self, method: str, *args: Any, **kwargs: Any) -> None:
        """Queue a call of a method that some trackers lack."""
        override = getattr(getattr(self.wrapped, method), "__func__", None)
        if override is not getattr(GeneralTracker, method):
            self._queue(method, *args, **kwargs)
        elif method not in self._unsupported:
            self._unsupported.add(method)
            _logger.warning(
                "The tracker %r does not implement %s; it does not record these values.",
                self.name,
                method,
            )

    def _queue(self, method: str, *args: Any, **kwargs: Any) -> None:
        """Queue a call of a method with copies of its arguments."""
        record = method not in _KEPT
        arrivals: list[Any] = []
        error: ValueError | None = None
        size = 0
        try:
            args, kwargs = snapshot((args, kwargs), arrivals)
            size = size_of(kwargs) + sum(map(size_of, args)) if record else 0
        # Other libraries may raise anything, which must not end the run, so the queued call raises
        # it.
        except Exception as cause:  # noqa: BLE001
            error = ValueError(f"A value cannot be copied or rendered: {cause!r}")
            error.__cause__ = cause

        def call(tracker: GeneralTracker) -> None:
            if error is not None:
                raise error
            for event in arrivals:
                event.synchronize()
            getattr(tracker, method)(*args, **kwargs)

        self._worker.pending.put(Call(method, call, record, size=size))
