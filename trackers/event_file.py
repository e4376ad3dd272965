"""TensorBoard's event files, written by the thread that has the events."""

import io
import os
import threading
from collections.abc import Mapping
from pathlib import Path
from time import time
from typing import Any

from trackers.jsonl import append_whole, is_at

_VERSION = "brain.Event:2"  # since 2 a reader drops steps again only where a file says so


def scalars(numbers: Mapping[str, float]) -> Any:
    """Return the summary of some numbers, as ``add_scalar`` makes one for each."""
    from tensorboard.compat.proto.summary_pb2 import Summary

    values = [Summary.Value(tag=name, simple_value=number) for name, number in numbers.items()]
    return Summary(value=values)


class EventFile:
    """Writes events to an event file at once; takes the place of a writer's `EventFileWriter`.

    That one has a thread, for loops that wait for each event, and opens its file anew for each.
    A tracker has a thread already, and flushes each record: handing every event over to another
    thread, and waiting for it, takes five times as long as writing it.

    Args:
        begun: A writer that has begun a file, which it writes no more.
        renewals: How often files before it were taken away.

    Attributes:
        path: The file.
        renewals: The same with this one, which is begun again if it is deleted, moved or replaced.
    """

    def __init__(self, begun: Any, renewals: int) -> None:
        from tensorboard.summary.writer.record_writer import RecordWriter

        begun.close()  # ends its thread
        self.path = Path(begun._file_name)  # it has no public name for it
        self._file = io.FileIO(self.path, "a")
        self._records = RecordWriter(self)  # frames what it passes to `write`
        self.renewals = renewals
        self._lock = threading.RLock()  # scripts may write on another thread than the tracker's

    @property
    def is_there(self) -> bool:
        """Whether the file is still at its path, not deleted, moved or replaced."""
        return not self._file.closed and is_at(self._file, self.path)

    def add_event(self, event: Any) -> None:
        """Write an event.

        Raises:
            OSError: The disk failed, and the file is left without the event; or it is closed.
        """
        self._records.write(event.SerializeToString())

    def write(self, record: bytes) -> None:
        """Write the bytes of an event, all or none: TensorBoard reads no further than a torn one.

        Raises:
            OSError: See `add_event`.
        """
        with self._lock:
            if self._file.closed:
                raise OSError(f"{self.path} is closed.")
            if not self.is_there:
                self._begin_again()
            append_whole(self._file, record)

    def _begin_again(self) -> None:
        from tensorboard.compat.proto.event_pb2 import Event

        self.path.parent.mkdir(parents=True, exist_ok=True)
        left, self._file = self._file, io.FileIO(self.path, "a")
        try:
            self.add_event(Event(wall_time=time(), file_version=_VERSION))
        except BaseException:
            self._file.close()
            self._file = left  # so that the next event begins it again
            raise
        left.close()
        self.renewals += 1

    def get_logdir(self) -> str:
        """Return the folder of the file."""
        return os.fspath(self.path.parent)

    def flush(self) -> None:
        """Do nothing: events are written at once."""

    def close(self) -> None:
        """Close the file."""
        with self._lock:
            self._file.close()
