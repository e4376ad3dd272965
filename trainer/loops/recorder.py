"""The recorder: sends reduced metrics to the callbacks, the local record and the trackers."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

from trackers import BackgroundTracker, GeneralTracker, JsonlTracker
from trackers.background import finish_all
from trackers.base import Status
from trackers.pending import RecordReplay
from trainer.distributed.transport import HostCopy
from trainer.errors import module_logger
from trainer.loops.run_metadata import Listener, RunMetadata, text_of
from trainer.metrics import Value, on_accelerator, stacked, to_floats

logger = module_logger(__name__)
_PATIENCE = 120.0  # seconds: how long a save waits until the local record is synced to disk
# Seconds that a save waits for trackers that write files. They usually take milliseconds.
_PATIENCE_FOR_CURVES = 5.0


class Recorder:
    """Copies reduced values from the device to the host and records them.

    Args:
        local: The local record, ``metrics.jsonl``; a no-op object if this process does not write.
        trackers: The trackers; empty if this process does not write. A tracker that missed records,
            for example in an outage, reads them from `local` later.
        run_metadata: Writes the run metadata (start, logged warnings, end) to ``run.json``, on the
            thread of `local`.

    Attributes:
        latest: The last value of every name.
        updates: The update at which each name's last value became available.
        validated: For every name that validation logs, its last value and the update at which it
            became available. It is None before the first validation, for names known from the
            sanity check.
        sanity_checking: Whether the current evaluation is the sanity check before training.
        private: Names that go to the local record, but not to the trackers.
    """

    def __init__(
        self,
        local: GeneralTracker,
        trackers: Sequence[BackgroundTracker],
        run_metadata: RunMetadata | None = None,
    ) -> None:
        self._local = local
        self._trackers = trackers
        self._run_metadata = run_metadata
        self._listener = Listener(
            lambda record: self._tell(lambda run_metadata: run_metadata.warn(record))
        )
        self._finished = False
        self._end: int | None = None  # the length of the local record, once it is closed
        self._hanging: dict[BackgroundTracker, Future[None]] = {}  # saves do not wait for these
        self._last = 0.0  # the time of the last record, in seconds since 1970
        self._pending: tuple[dict[str, float], list[str], HostCopy, int, int] | None = None
        self.latest: dict[str, float] = {}
        self.updates: dict[str, int] = {}
        self.validated: dict[str, tuple[float, int] | None] = {}
        self.private: set[str] = set()
        self.sanity_checking = False

    @contextmanager
    def sanity_check(self) -> Iterator[None]:
        """Let `record` only remember values inside, and restore the latest values on exit.

        After an error `sanity_checking` stays set, to show where the run failed.
        """
        latest, updates = dict(self.latest), dict(self.updates)
        self.sanity_checking = True
        try:
            yield
            self.sanity_checking = False
        finally:
            self.latest, self.updates = latest, updates

    def record(self, values: Mapping[str, Value], *, step: int, epoch: int) -> dict[str, float]:
        """Copy the values to the host, in one transfer, and record them; waits for the device.

        Args:
            values: The reduced values by name.
            step: The update that they belong to.
            epoch: The current epoch.

        Returns:
            The values as floats; none in a sanity check, where they are only remembered.
        """
        self.flush()
        if self.sanity_checking:
            self.remember(to_floats(values), step)
            return {}
        return self._write(to_floats(values), step, epoch)

    def record_later(self, values: Mapping[str, Value], *, step: int, epoch: int) -> None:
        """Start one asynchronous transfer to the host; the next call of any method records it.

        That is: the next call of `record_later`, `record` or `flush`. Values on the CPU are
        recorded at once.

        Args:
            values: The reduced values by name.
            step: The update that they belong to.
            epoch: The current epoch.
        """
        self.flush()
        away = on_accelerator(values)
        if not away:
            self._write(to_floats(values), step, epoch)
            return
        vector = stacked(away.values())
        on_host = {name: 0.0 if name in away else float(values[name]) for name in values}
        self._pending = (on_host, list(away), HostCopy(vector), step, epoch)

    def flush(self, *, arrived: int | None = None) -> None:
        """Record the values whose transfer `record_later` started.

        Args:
            arrived: The update at which callbacks see the values for the first time; None for the
                update that they belong to.
        """
        if self._pending is not None:
            read, (*_, step, epoch) = self._arriving(), self._pending
            self._pending = None
            self._write(read, step, epoch, arrived=arrived)

    def _arriving(self) -> dict[str, float]:
        """Wait for the values whose transfer `record_later` started."""
        if self._pending is None:
            return {}
        on_host, names, copied, *_ = self._pending
        return on_host | dict(zip(names, copied.read().tolist(), strict=True))

    def latest_values(self) -> dict[str, float]:
        """Return the last value of every name, after waiting for a transfer in progress."""
        return self.latest | self._arriving()

    def monitored(self, name: str) -> tuple[float, int] | None:
        """Return a monitored metric's value and the update at which it became available, or None.

        If training and validation both log the name, it is the validation's value.
        """
        if name in self.validated:
            return self.validated[name]
        return (self.latest[name], self.updates[name]) if name in self.latest else None

    def _write(
        self, read: dict[str, float], step: int, epoch: int, *, arrived: int | None = None
    ) -> dict[str, float]:
        self.remember(read, step if arrived is None else arrived)
        if read:
            # Trackers find missed records by their time, so each record has a different time.
            self._last = max(time.time(), math.nextafter(self._last, math.inf))
            self._local.log(read, step, epoch=epoch, time=self._last)
            read_values = {name: read[name] for name in read if name not in self.private}
            for tracker in self._trackers if read_values else ():
                values = {"epoch": epoch, **read_values} if tracker.logs_epoch else read_values
                tracker.log_recorded(values, step, self._last)
        return read

    def remember(self, read: Mapping[str, float], step: int) -> None:
        """Make values available to callbacks as of this update, without recording them."""
        self.latest.update(read)
        self.updates.update(dict.fromkeys(read, step))

    def state_dict(self) -> dict[str, Any]:
        """Return the latest values and their updates."""
        return {"latest": self.latest, "updates": self.updates, "validated": self.validated}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore them; names seen since the start, such as in the sanity check, are kept."""
        self.latest.update(state["latest"])
        self.updates.update((name, state["updates"].get(name, 0)) for name in state["latest"])
        self.validated.update(state.get("validated", {}))  # missing in earlier releases

    @property
    def trackers(self) -> list[GeneralTracker]:
        """The trackers; empty if this process does not write."""
        return list(self._trackers)

    @property
    def run_ids(self) -> dict[str, str]:
        """The run's id in each tracker, for trackers that have one."""
        ids = {key: tracker.run_id for key, tracker in self._by_key().items()}
        return {key: run_id for key, run_id in ids.items() if run_id is not None}

    def resume(self, run_ids: Mapping[str, str], step: int | None) -> None:
        """Make the trackers resume earlier tracker runs; called before `start`.

        Args:
            run_ids: The `run_ids` of the earlier run. A tracker without an id starts a new run.
            step: The update that the run resumes from; None for an evaluation after the run.
        """
        for key, tracker in self._by_key().items():
            tracker.resume(run_ids.get(key), step)

    def begin_anew(self) -> None:
        """Make the trackers start new runs, without resuming; called before `start`."""
        for tracker in self._trackers:
            tracker.begin_anew()

    def _by_key(self) -> dict[str, GeneralTracker]:
        """Return the trackers by name; further ones of the same name as ``name/1``, ``name/2``."""
        keyed: dict[str, GeneralTracker] = {}
        for tracker in self._trackers:
            number = sum(key.partition("/")[0] == tracker.name for key in keyed)
            keyed[f"{tracker.name}/{number}" if number else tracker.name] = tracker
        return keyed

    def start(
        self,
        configuration: dict[str, Any],
        *,
        run_metadata: Mapping[str, Any] | None = None,
        step: int = 0,
        cut_at: int | None = None,
        cut_behind: int | None = None,
        source: Path | None = None,
    ) -> None:
        """Start the local record and the trackers; does nothing if they are no-op objects.

        A resumed run truncates the local record to its length at the checkpoint, since it writes
        later records again.

        Args:
            configuration: The configuration, stored by the trackers.
            run_metadata: The run metadata for ``run.json``; None leaves the file as it is.
            step: The number of updates before this start.
            cut_at: The length in bytes to which the local record is truncated; None if unknown.
            cut_behind: The update after which the record is truncated if `cut_at` is None.
            source: The checkpoint that the run resumes from.
        """
        try:
            self._local.start()
            if isinstance(self._local, BackgroundTracker):
                cut = self._local.submit(
                    lambda record: _begin(cast(JsonlTracker, record), cut_at, cut_behind, source)
                )
                for tracker in self._trackers:
                    tracker.replay = RecordReplay(self._local, cut, self.private)
            if run_metadata is not None:
                self._tell(lambda file: file.begin(dict(run_metadata), step))
                self._listener.listen()
            for tracker in self._trackers:
                tracker.start()
                tracker.store_init_configuration(configuration)
            cuts = cut_at is not None or cut_behind is not None
            if cuts and isinstance(self._local, BackgroundTracker):
                cut.result()
        except BaseException:
            self.finish("failed")
            raise

    def sync(self) -> Callable[[], int | None]:
        """Start to sync the local record to disk, and to flush trackers that write files.

        Each save calls this, so that a run that is killed and resumes from the checkpoint has no
        gaps in its curves. Trackers of online services are not waited for.

        Returns:
            A function that waits until the data are written. It waits at most 5 seconds for
            trackers that write files. A slower tracker is logged, and later saves do not wait for
            it until it has caught up. The function returns the length of the record in bytes, to
            which a run resumed from the checkpoint truncates it. It returns None if this process
            keeps no record or if the sync failed, which is logged.
        """
        if self._finished or not isinstance(self._local, BackgroundTracker):
            return lambda: self._end
        synced = self._local.submit(lambda record: cast(JsonlTracker, record).sync())
        curves = self._write_curves()

        def length() -> int | None:
            offset = _length(synced, _PATIENCE)
            self._hanging |= _wait_for(curves)
            return offset

        return length

    def _write_curves(self) -> dict[BackgroundTracker, Future[None]]:
        """Submit a no-op to each tracker that writes files, except those that hang.

        Its future is done when the tracker has written all earlier values.
        """
        hanging = {tracker for tracker, future in self._hanging.items() if not future.done()}
        return {
            tracker: tracker.submit(lambda _: None)
            for tracker in self._trackers
            if tracker.requires_logging_directory and tracker not in hanging
        }

    def _tell(self, update: Callable[[RunMetadata], None]) -> None:
        """Update ``run.json``, on the thread of the local record."""
        run_metadata = self._run_metadata
        if run_metadata is not None and isinstance(self._local, BackgroundTracker):
            self._local.submit(lambda _: update(run_metadata))

    def finish(self, status: Status = "finished", error: BaseException | None = None) -> None:
        """Finish the record and the trackers; wait, with a time limit, until all is written.

        Args:
            status: How the run ended, for the trackers.
            error: The error that ended the run, if any.
        """
        self._listener.close()
        if self._finished:
            return
        local, synced = self._local, None
        try:
            self.flush()  # may fail if the device has failed
            if isinstance(local, BackgroundTracker):
                synced = local.submit(lambda record: cast(JsonlTracker, record).sync())
        finally:
            self._finished = True
            if self._listener.began:
                self._tell(lambda run_metadata: run_metadata.end(status, text_of(error)))
            finish_all([local, *self._trackers], status)
        if synced is not None:
            self._end = _length(synced, 0.0)  # `finish_all` has waited already


def _begin(
    record: JsonlTracker, cut_at: int | None, cut_behind: int | None, source: Path | None
) -> int:
    """Truncate the record, on its thread, and return its length in bytes."""
    if cut_at is None and cut_behind is not None:
        cut_at = record.offset_behind(cut_behind)
    if cut_at is not None:
        record.truncate(cut_at, source)
    return record.offset


def _wait_for(
    curves: Mapping[BackgroundTracker, Future[None]],
) -> dict[BackgroundTracker, Future[None]]:
    """Wait at most 5 seconds; log and return the trackers that are not done."""
    done, _ = wait(curves.values(), _PATIENCE_FOR_CURVES)
    late = {tracker: future for tracker, future in curves.items() if future not in done}
    if late:
        logger.warning(
            "A save waited %g seconds for %s to write earlier values; later saves do not wait "
            "for it. If the run is killed, that tracker may miss values; metrics.jsonl has all "
            "of them.",
            _PATIENCE_FOR_CURVES,
            " and ".join(tracker.name for tracker in late),
        )
    return late


def _length(synced: Future[int], patience: float) -> int | None:
    try:
        return synced.result(patience)
    except Exception:
        logger.warning("metrics.jsonl could not be synced before a save.", exc_info=True)
        return None
