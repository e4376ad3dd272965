"""TensorBoard's event files, written by the calling thread."""

import io
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trackers.jsonl import append_whole, is_at


def scalars(numbers: Mapping[str, float]) -> Any:
    """Return the summary of some numbers, as ``add_scalar`` makes one for each."""
    from tensorboard.compat.proto.summary_pb2 import Summary

    values = [Summary.Value(tag=name, simple_value=number) for name, number in numbers.items()]
    return Summary(value=values)


class EventFile:
    """Writes events to an event file at once; takes the place of a writer's `EventFileWriter`.

    That one has a thread, for loops that wait for each event, and opens its file anew for each.
    A tracker has a thread already, and flushes each record: handing every event over to another
    thread, and waiting for it, takes ten times as long as writing it.

    Args:
        begun: a writer that has begun a file, which it writes no more.
    """

    def __init__(self, begun: Any) -> None:
        from tensorboard.summary.writer.record_writer import RecordWriter

        begun.close()  # ends its thread
        self.path = Path(begun._file_name)  # it has no public name for it
        self._file = io.FileIO(self.path, "a")
        self._records = RecordWriter(self)  # frames what it passes to `write`

    @property
    def is_there(self) -> bool:
        """Whether the file is still at its path, not deleted, moved or replaced."""
        return is_at(self._file, self.path)

    def add_event(self, event: Any) -> None:
        """Write an event.

        Raises:
            OSError: the disk failed. The file is left without the event.
        """
        self._records.write(event.SerializeToString())

    def write(self, record: bytes) -> None:
        """Write the bytes of an event, all or none: TensorBoard reads no further than a torn one.

        Raises:
            OSError: see `add_event`.
        """
        append_whole(self._file, record)

    def get_logdir(self) -> str:
        """Return the folder of the file."""
        return os.fspath(self.path.parent)

    def flush(self) -> None:
        """Do nothing: events are written at once."""

    def close(self) -> None:
        """Close the file."""
        self._file.close()
