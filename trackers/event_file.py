"""TensorBoard's event files, written by the thread that has the events.

This module needs tensorboard: it is imported where a file is begun.
"""

from __future__ import annotations

import io
import os
import socket
import threading
from collections.abc import Mapping
from pathlib import Path
from time import time
from typing import Any

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.record_writer import RecordWriter
from torch.utils.tensorboard import FileWriter, SummaryWriter

from trackers.files import regular
from trackers.jsonl import append_whole, is_at

_VERSION = "brain.Event:2"  # since 2 a reader drops steps again only where a file says so


def scalars(numbers: Mapping[str, float]) -> Summary:
    """Return the summary of some numbers, as ``add_scalar`` makes one for each."""
    values = [Summary.Value(tag=name, simple_value=number) for name, number in numbers.items()]
    return Summary(value=values)


class EventFile:
    """Writes each event at once, whole or not at all; takes the place of an `EventFileWriter`.

    That one has a thread, for loops that wait for each event, and opens its file anew for each.
    A tracker has a thread already, and flushes each record: handing every event over to another
    thread, and waiting for it, takes five times as long as writing it.

    An event for a file that was deleted, moved or replaced begins another one. It has another name:
    an open page would go on in a file of the same name where it stopped reading.

    Args:
        folder: Where to make files.
        suffix: The end of their names.
        purge_step: TensorBoard hides what earlier files hold of this step and later ones.

    Attributes:
        path: The file, once it has begun.
        renewals: How often another one was begun.
    """

    path: Path

    def __init__(self, folder: Path, *, suffix: str, purge_step: int | None) -> None:
        self._folder, self._suffix, self._purge_step = folder, suffix, purge_step
        self.renewals = 0
        self._lock = threading.RLock()  # scripts may write on another thread than the tracker's

    @property
    def is_there(self) -> bool:
        """Whether the file is still at its path, not deleted, moved or replaced."""
        return is_at(self._identity, self.path)

    def begin(self) -> None:
        """Begin a file.

        Raises:
            OSError: The disk failed. There is no new file.
        """
        self._folder.mkdir(parents=True, exist_ok=True)
        # TensorBoard reads files in the order of their names. Those that torch's own writer begins
        # in the same second end in a number instead of the microseconds, and come first.
        second, fraction = f"{time():017.6f}".split(".")
        place = f"{second}.{socket.gethostname()}.{os.getpid()}"
        path = self._folder / f"events.out.tfevents.{place}.us{fraction}{self._suffix}"
        file = io.FileIO(path, "a", opener=regular)
        try:
            append_whole(file, _record(Event(wall_time=time(), file_version=_VERSION)))
            if self._purge_step is not None:
                start = SessionLog(status=SessionLog.START)
                hides = Event(wall_time=time(), step=self._purge_step, session_log=start)
                # Twice: one of TensorBoard's readers takes the first of a run for its beginning.
                append_whole(file, _record(hides) * 2)
        except BaseException:
            file.close()
            path.unlink(missing_ok=True)
            raise
        self.path, self._file, self._identity = path, file, os.fstat(file.fileno())

    def add_event(self, event: Event) -> None:
        """Write an event.

        Raises:
            OSError: The disk failed, and the file is left without the event.
        """
        record = _record(event)
        with self._lock:
            if not self.is_there:
                self._file.close()
                self.begin()
                self.renewals += 1
            elif self._file.closed:  # by a script that goes on
                self._file = io.FileIO(self.path, "a")
            append_whole(self._file, record)

    def get_logdir(self) -> str:
        """Return the folder of the file."""
        return os.fspath(self._folder)

    def flush(self) -> None:
        """Do nothing: events are written at once."""

    def close(self) -> None:
        """Close the file. The next event opens it again."""
        with self._lock:
            self._file.close()


def _record(event: Event) -> bytes:
    """Return an event as it lies in a file, with its length and checksums."""
    framed = io.BytesIO()
    RecordWriter(framed).write(event.SerializeToString())
    return framed.getvalue()


class _FileWriter(FileWriter):
    def __init__(self, file: EventFile) -> None:
        self.event_writer = file  # torch's own would begin a file and a thread


class Writer(SummaryWriter):
    """A `SummaryWriter` of one `EventFile`, also after a script has closed it."""

    file_writer: Any
    all_writers: Any

    def __init__(self, file: EventFile, **options: Any) -> None:
        self._events = file
        super().__init__(file.get_logdir(), **options)

    def _get_file_writer(self) -> Any:
        if self.file_writer is None:
            self.file_writer = _FileWriter(self._events)
            self.all_writers = {self._events.get_logdir(): self.file_writer}
        return self.file_writer
