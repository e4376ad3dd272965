"""TensorBoard event files, written directly by the tracker's thread.

This module needs tensorboard, so it is imported only when a file is created.
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

from trackers.jsonl import append_record, is_at
from trainer.errors import module_logger
from trainer.files import regular

_logger = module_logger("trackers")

_VERSION = "brain.Event:2"  # since version 2, only SessionLog.START purges steps


def scalars(numbers: Mapping[str, float]) -> Summary:
    """Return one summary of some numbers; ``add_scalar`` makes a summary for each."""
    values = [Summary.Value(tag=name, simple_value=number) for name, number in numbers.items()]
    return Summary(value=values)


class EventFile:
    """Writes each event at once, completely or not at all; replaces torch's `EventFileWriter`.

    `EventFileWriter` writes on its own thread. A tracker already has a thread and flushes each
    record; passing each event to another thread and waiting for it takes five times as long as
    writing it.

    If the file was deleted, moved or replaced, the next event creates a new file. Its name is
    different, because TensorBoard continues to read a file of the same name at the old position.

    Args:
        folder: The folder for the files.
        suffix: The suffix of file names.
        purge_step: TensorBoard hides events of this step and later ones in earlier files.

    Attributes:
        path: The file, once it is created.
    """

    path: Path

    def __init__(self, folder: Path, *, suffix: str, purge_step: int | None) -> None:
        self._folder, self._suffix, self._purge_step = folder, suffix, purge_step
        self._lock = threading.RLock()  # scripts may write from other threads

    @property
    def exists(self) -> bool:
        """Whether the file is still at its path, not deleted, moved or replaced."""
        return is_at(self._identity, self.path)

    def begin(self) -> None:
        """Create a file.

        Raises:
            OSError: The disk failed. No file is created.
        """
        self._folder.mkdir(parents=True, exist_ok=True)
        # TensorBoard reads files in the order of their names. With microseconds in the name, this
        # file comes after the files that torch's own writer creates in the same second.
        second, fraction = f"{time():017.6f}".split(".")
        identity = f"{second}.{socket.gethostname()}.{os.getpid()}"
        path = self._folder / f"events.out.tfevents.{identity}.us{fraction}{self._suffix}"
        file = io.FileIO(path, "a", opener=regular)
        try:
            append_record(file, _record(Event(wall_time=time(), file_version=_VERSION)))
            if self._purge_step is not None:
                start = SessionLog(status=SessionLog.START)
                hides = Event(wall_time=time(), step=self._purge_step, session_log=start)
                # Twice, because one of TensorBoard's readers ignores the first one of a run.
                append_record(file, _record(hides) * 2)
        except BaseException:
            file.close()
            path.unlink(missing_ok=True)
            raise
        self.path, self._file, self._identity = path, file, os.fstat(file.fileno())

    def add_event(self, event: Event) -> None:
        """Write an event.

        Raises:
            OSError: The disk failed. The file then contains no part of the event.
        """
        record = _record(event)
        with self._lock:
            gone = not self.exists
            if gone:
                self._file.close()
                self.begin()
            elif self._file.closed:  # by a script that continues to write
                self._file = io.FileIO(self.path, "a")
            append_record(self._file, record)
        if gone:  # without the lock, which a log handler's thread may want
            _logger.warning(
                "TensorBoard's event file in %s was deleted, moved or replaced while it was "
                "open. Later values are written to a new file, which lacks the earlier ones.",
                self._folder,
            )

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
    """Return an event in the file format (TFRecord), with its length and checksums."""
    framed = io.BytesIO()
    RecordWriter(framed).write(event.SerializeToString())
    return framed.getvalue()


class _FileWriter(FileWriter):
    def __init__(self, file: EventFile) -> None:
        self.event_writer = file  # torch's own would create a file and a thread


class Writer(SummaryWriter):
    """A `SummaryWriter` that keeps its one `EventFile`, even after a script has closed it."""

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
