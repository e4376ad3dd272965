"""A process that the others wait for is named, with where it is, before the backend gives up.

Each process of a run has a thread that notes every few seconds where the training thread is, in the
store by which the processes found each other: no collective, and nothing for the training thread to
do. A process that has stood in one place for long, waiting, reads what the others have noted, and
the log says who does not wait: its phase and step, and its Python stack.
"""

from __future__ import annotations

import json
import logging
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch.distributed as dist

logger = logging.getLogger(__name__)

_PATIENCE = 30.0  # seconds in one place until the log says so, …
_OF_LIMIT = 0.25  # … or this part of the time after which the backend gives up, if that is less
_LOOKS = 6  # in that time
_SILENT = 2  # looks without another note: whoever has left it stands still as a whole
_FRAMES = 15  # of a stack, the innermost ones
_ALL_STAND = 4  # times the patience, until processes that all wait are told of
_WAITING = (  # where a process is that waits for others: in a collective, or in a backward pass
    "/torch/distributed/",
    "/torch/autograd/graph.py",
    "/torch/cuda/",
    "/trainer/distributed/",
)
_watching = threading.Lock()  # of runs inside each other the outer one is watched


class Note(NamedTuple):
    """What a process leaves for the others to read.

    Attributes:
        place: The phase and the step, for people; another one says that the run goes on.
        inside: It is in the run.
        seconds: For how long it has been there.
        waits: The training thread waits for other processes.
        stack: Where that thread is, as Python formats it, once it has been there for long.
        looks: How often the process has looked.
    """

    place: str = ""
    inside: bool = False
    seconds: float = 0.0
    waits: bool = False
    stack: str = ""
    looks: int = 0


@contextmanager
def watched(place: Callable[[], str]) -> Iterator[None]:
    """Inside, this process leaves notes, and says in the log for whom it has long waited.

    Args:
        place: Where the run is; called by another thread.
    """
    alone = not dist.is_initialized() or dist.get_world_size() == 1
    if alone or not _watching.acquire(blocking=False):
        yield
        return
    watchdog = _Watchdog(place)
    thread = threading.Thread(target=watchdog.look, name="cadence-watchdog", daemon=True)
    thread.start()
    try:
        yield
    finally:
        watchdog.ended.set()
        _watching.release()
        thread.join(_PATIENCE)  # no longer: a store on a machine that is gone may not answer


def complaint(own: int, notes: Sequence[Note], silent: set[int], patience: float) -> str | None:
    """What the log should say; None for nothing.

    Args:
        own: This process's rank, the lowest of those who wait.
        notes: The latest ones of all ranks.
        silent: Those who have left no other for a while.
        patience: In seconds.
    """
    waiting = [rank for rank, note in enumerate(notes) if note.waits and rank not in silent]
    place, _, seconds, *_ = notes[own]
    others = [
        said
        for rank, note in enumerate(notes)
        if rank not in waiting and (said := _about(rank, note, rank in silent, patience))
    ]
    if others:
        ranks = ", ".join(map(str, waiting))
        who = f"rank {ranks} has" if len(waiting) == 1 else f"ranks {ranks} have"
        return f"{who} waited for {seconds:.0f} seconds, in {place}:\n" + "\n".join(others)
    if len(waiting) < len(notes) or seconds < _ALL_STAND * patience:
        return None
    places = [f"rank {rank} is in {note.place}:\n{note.stack}" for rank, note in enumerate(notes)]
    return f"No process has gone on for {seconds:.0f} seconds:\n" + "\n".join(places)


def _about(rank: int, note: Note, silent: bool, patience: float) -> str | None:
    """What is wrong with a process that does not wait."""
    if not note.inside:
        return f"rank {rank} is not in this run: it has ended it, or not begun."
    if silent:
        return (
            f"rank {rank} gives no sign; it was last in {note.place}. Its process has been stopped "
            f"or has gone, or something keeps Python's lock there.\n{note.stack}"
        )
    if note.seconds < patience / 2:  # slow, but it goes on
        return None
    return f"rank {rank} has been in {note.place} for {note.seconds:.0f} seconds:\n{note.stack}"


class _Watchdog:
    """Looks at the thread that made it."""

    def __init__(self, place: Callable[[], str]) -> None:
        group = dist.group.WORLD
        assert group is not None
        store: Any = group.get_group_store()
        self._store = store.clone()  # the training thread may be waiting in the other
        self._rank = dist.get_rank()
        self._keys = [f"cadence/place/{rank}" for rank in range(dist.get_world_size())]
        self._patience = min(_PATIENCE, store.timeout.total_seconds() * _OF_LIMIT)
        self._place, self._thread = place, threading.get_ident()
        self._looks = 0
        self._since = time.monotonic(), ""
        self._read: deque[dict[int, int]] = deque(maxlen=_SILENT)  # how often each had looked
        self.ended = threading.Event()

    def look(self) -> None:
        """Until the run has ended."""
        speaks_at = self._patience
        try:
            self._leave(self._note())
            while not self.ended.wait(self._patience / _LOOKS):
                note = self._note()
                self._leave(note)
                if not note.waits or note.seconds < self._patience / 2:
                    self._read.clear()
                    continue
                read = self._read_all()
                if read is None or note.seconds < speaks_at:
                    continue
                if text := complaint(self._rank, *read, self._patience):
                    logger.warning(text.rstrip())
                    speaks_at *= 2  # if the others are only slow, it is not said at every step
            self._leave(Note(looks=self._looks + 1))
        except (RuntimeError, OSError) as error:
            # The store has ended with its process, or the backend has given up.
            logger.debug("No process can be asked any longer where it is: %s", error)

    def _note(self) -> Note:
        now, place = time.monotonic(), self._place()
        if place != self._since[1]:
            self._since = now, place
        seconds = now - self._since[0]
        frame = sys._current_frames()[self._thread]
        file = frame.f_code.co_filename.replace("\\", "/")
        long = seconds >= self._patience / 2
        stack = "".join(traceback.format_stack(frame, limit=_FRAMES)) if long else ""
        self._looks += 1
        waits = any(part in file for part in _WAITING)
        return Note(place, True, seconds, waits, stack, self._looks)

    def _leave(self, note: Note) -> None:
        self._store.set(self._keys[self._rank], json.dumps(note))

    def _read_all(self) -> tuple[list[Note], set[int]] | None:
        """The notes of all ranks and those who are silent; None if a lower rank waits as well.

        It speaks then. Else of a thousand processes each would read a thousand notes.
        """
        before = self._read[0] if len(self._read) == _SILENT else {}
        looks: dict[int, int] = {}
        self._read.append(looks)
        notes, silent = [], set()
        for rank, key in enumerate(self._keys):
            note = Note(*json.loads(self._store.get(key))) if self._store.check([key]) else Note()
            looks[rank] = note.looks
            notes.append(note)
            if before.get(rank) == note.looks:
                silent.add(rank)
            elif note.waits and rank < self._rank:
                return None
        return notes, silent
