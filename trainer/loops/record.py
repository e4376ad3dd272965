"""Where reduced values go: the callbacks' view, the local record, the trackers."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from typing import Any, cast

import torch
from torch import Tensor

from trackers import BackgroundTracker, GeneralTracker, JsonlTracker
from trackers.background import finish_all
from trackers.base import Status
from trackers.missed import Missed
from trainer.loops.about import AboutRun, Listener, text_of
from trainer.metrics import Value, on_accelerator, stacked, to_floats

logger = logging.getLogger(__name__)
_PATIENCE = 120.0  # seconds that a save waits for the local record's disk
_PATIENCE_FOR_CURVES = 5.0  # and for trackers that write files, once; healthy ones take millis


class Recorder:
    """Reads values back and hands them on.

    Args:
        local: The record on this machine's disk.
        trackers: The services, none where this process does not write; `local` then is a no-op
            object. What they miss they get from `local`.
        about: Told of the start, of warnings in the log and of the end, on the thread of `local`.

    Attributes:
        latest: The last value of every name.
        private: Names that the trackers are not told; the local record has them.
        updates: The update at which each became known.
    """

    def __init__(
        self,
        local: GeneralTracker,
        trackers: Sequence[BackgroundTracker],
        about: AboutRun | None = None,
    ) -> None:
        self._local = local
        self._trackers = trackers
        self._about = about
        self._listener = Listener(lambda record: self._tell(lambda about: about.warn(record)))
        self._finished = False
        self._end: int | None = None  # of the local record, once it is closed
        self._hanging: dict[BackgroundTracker, Future[None]] = {}  # what a save has given up on
        self._last = 0.0  # the time of the last record
        self._pending: tuple[dict[str, float], list[str], Tensor, Any, int, int] | None = None
        self.latest: dict[str, float] = {}
        self.updates: dict[str, int] = {}
        self.private: set[str] = set()

    def record(self, values: Mapping[str, Value], *, step: int, epoch: int) -> dict[str, float]:
        """Read the values back, in one transfer, and record them under their step.

        Returns:
            The values as floats.
        """
        self.flush()
        return self._write(to_floats(values), step, epoch)

    def record_later(self, values: Mapping[str, Value], *, step: int, epoch: int) -> None:
        """Start one transfer to the host now; read and record it at the next call of anything here.

        On the CPU there is nothing to wait for, and it is recorded at once.
        """
        self.flush()
        away = on_accelerator(values)
        if not away:
            self._write(to_floats(values), step, epoch)
            return
        vector = stacked(away.values())
        host = torch.empty_like(vector, device="cpu", pin_memory=vector.device.type == "cuda")
        host.copy_(vector, non_blocking=True)
        event = torch.Event(vector.device)
        event.record()
        here = {name: 0.0 if name in away else float(values[name]) for name in values}
        self._pending = (here, list(away), host, event, step, epoch)

    def flush(self, *, arrived: int | None = None) -> None:
        """Record what `record_later` sent on its way.

        Args:
            arrived: The update at which callbacks see it for the first time.
        """
        if self._pending is not None:
            here, names, host, event, step, epoch = self._pending
            self._pending = None
            event.synchronize()
            read = here | dict(zip(names, host.tolist(), strict=True))
            self._write(read, step, epoch, arrived=arrived)

    def _write(
        self, read: dict[str, float], step: int, epoch: int, *, arrived: int | None = None
    ) -> dict[str, float]:
        self._remember(read, step if arrived is None else arrived)
        if read:
            # Trackers find again by its time what they missed: no two records have the same.
            self._last = max(time.time(), math.nextafter(self._last, math.inf))
            self._local.log(read, step, epoch=epoch, time=self._last)
            told = {name: read[name] for name in read if name not in self.private}
            for tracker in self._trackers if told else ():
                tracker.log_recorded(told, step, self._last)
        return read

    def _remember(self, read: dict[str, float], step: int) -> None:
        self.latest.update(read)
        self.updates.update(dict.fromkeys(read, step))

    @property
    def trackers(self) -> list[GeneralTracker]:
        """The services; none where this process does not write."""
        return list(self._trackers)

    @property
    def run_ids(self) -> dict[str, str]:
        """What the services know this run by, as far as they have told it."""
        ids = {key: tracker.run_id for key, tracker in self._by_key().items()}
        return {key: run_id for key, run_id in ids.items() if run_id is not None}

    def resume(self, run_ids: Mapping[str, str], step: int | None) -> None:
        """Let the trackers go on with a run; before `start`.

        Args:
            run_ids: What `run_ids` was; a service without one begins another run.
            step: The update that it goes on from; None for an evaluation behind it.
        """
        for key, tracker in self._by_key().items():
            tracker.resume(run_ids.get(key), step)

    def begin_anew(self) -> None:
        """Let the trackers know that the run goes on from none; before `start`."""
        for tracker in self._trackers:
            tracker.begin_anew()

    def _by_key(self) -> dict[str, GeneralTracker]:
        """The trackers by their names; a second instance of one has a number too."""
        keyed: dict[str, GeneralTracker] = {}
        for tracker in self._trackers:
            number = sum(key.partition("/")[0] == tracker.name for key in keyed)
            keyed[f"{tracker.name}/{number}" if number else tracker.name] = tracker
        return keyed

    def start(
        self,
        configuration: dict[str, Any],
        *,
        about: Mapping[str, Any] | None = None,
        step: int = 0,
        cut_at: int | None = None,
        cut_behind: int | None = None,
    ) -> None:
        """Begin the record; only an object that is no no-op does anything.

        Args:
            configuration: Stored by the trackers.
            about: What else the folder of the run says of it.
            step: The update that it begins behind.
            cut_at: The local record's length at the checkpoint that is resumed; what was written
                after it is dropped.
            cut_behind: The update of that checkpoint, by which it is cut where the length could
                not be found out.
        """
        try:
            self._local.start()
            if isinstance(self._local, BackgroundTracker):
                cut = self._local.submit(
                    lambda record: _begin(cast(JsonlTracker, record), cut_at, cut_behind)
                )
                for tracker in self._trackers:
                    tracker.missed = Missed(self._local, cut, self.private)
            if about is not None:
                self._tell(lambda file: file.begin(dict(about), step))
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
        """Begin to put what the local record has by now on the disk, and to write the curves.

        A checkpoint calls it, so that a run that is killed and goes on from there has no holes in
        the files of its trackers. Those of services, which may be away, are not waited for.

        Returns:
            A function that waits until it is there; for trackers that write files a short time. One
            that takes longer is told in the log, and left out by `sync` until it has come that far.
            The function gives the record's length in bytes, at which a run that resumes from here
            cuts it; None where this process keeps no record, or it could not be written, which is
            told in the log.
        """
        if self._finished or not isinstance(self._local, BackgroundTracker):
            return lambda: self._end
        synced = self._local.submit(lambda record: cast(JsonlTracker, record).sync())
        curves = self._write_curves()

        def length() -> int | None:
            known = _length(synced, _PATIENCE)
            self._hanging |= _wait_for(curves)
            return known

        return length

    def _write_curves(self) -> dict[BackgroundTracker, Future[None]]:
        """Ask the trackers that write files to come this far, but those that hang."""
        hanging = {tracker for tracker, future in self._hanging.items() if not future.done()}
        return {
            tracker: tracker.submit(_come_this_far)
            for tracker in self._trackers
            if tracker.requires_logging_directory and tracker not in hanging
        }

    def _tell(self, what: Callable[[AboutRun], None]) -> None:
        """Change the file about the run, on the local record's thread."""
        about = self._about
        if about is not None and isinstance(self._local, BackgroundTracker):
            self._local.submit(lambda _: what(about))

    def finish(self, status: Status = "finished", error: BaseException | None = None) -> None:
        """Wait, within limits, until everything is written.

        Args:
            status: How the run ended, for the trackers.
            error: What ended it.
        """
        self._listener.close()
        if self._finished:
            return
        local, synced = self._local, None
        try:
            self.flush()  # may fail where the device has
            if isinstance(local, BackgroundTracker):
                synced = local.submit(lambda record: cast(JsonlTracker, record).sync())
        finally:
            self._finished = True
            if self._listener.began:
                self._tell(lambda about: about.end(status, text_of(error)))
            finish_all([local, *self._trackers], status)
        if synced is not None:
            self._end = _length(synced, 0.0)  # a disk that hangs has had its time


def _begin(record: JsonlTracker, cut_at: int | None, cut_behind: int | None) -> int:
    """Cut the record, on its thread, and give its length."""
    if cut_at is None and cut_behind is not None:
        cut_at = record.offset_behind(cut_behind)
    if cut_at is not None:
        record.truncate(cut_at)
    return record.offset


def _come_this_far(tracker: GeneralTracker) -> None:
    """Nothing: a tracker's calls are made in order, and what it logs is in its file behind each."""


def _wait_for(
    curves: Mapping[BackgroundTracker, Future[None]],
) -> dict[BackgroundTracker, Future[None]]:
    """Wait a short time; give those that hang, which are told in the log."""
    done, _ = wait(curves.values(), _PATIENCE_FOR_CURVES)
    late = {tracker: future for tracker, future in curves.items() if future not in done}
    if late:
        logger.warning(
            "A save has not waited longer than %g seconds for %s to write what was logged before "
            "it, and the next ones do not wait at all until that is written; a run that is killed "
            "and goes on from one of these may have holes in those curves, and none in "
            "metrics.jsonl.",
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
