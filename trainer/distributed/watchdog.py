"""Names the process that the others wait for, and where it is, before the backend times out.

In each process a thread writes every few seconds where the training thread is into the store of the
process group's rendezvous: that takes no collective and no work of the training thread. A process
that has waited in one place for long reads the others' notes, and logs which do not wait, with
their phase, step and Python stack. A process that fails notes its error and place, so that the
others, which lose their connection to it, can report the cause ahead of the backend's own message.
"""

from __future__ import annotations

import itertools
import json
import logging
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch.distributed as dist

from trainer import environment
from trainer.distributed.control import is_of_a_loss, is_of_backend, shown
from trainer.errors import Preempted

logger = logging.getLogger(__name__)

_PATIENCE = 30.0  # seconds in one place until it is logged, …
_OF_LIMIT = 0.25  # … or this fraction of the backend's timeout, if that is less
_LOOKS = 6  # notes written in that time
_SILENT = 2  # looks without a new note, after which the whole process counts as stopped
_FRAMES = 15  # innermost frames of a stack
_ASKED = 100  # processes read at the end: if each read thousands, the store would take too long
_SHOWN = 8  # processes named when it is unknown which one is gone
_NO_STORE = (
    "the store of the process group does not answer: its machine, that of rank 0, is gone or "
    "cannot be reached"
)
_ALL_STAND = 4  # times the patience, until it is logged that all processes wait
_WAITING = (  # files in which a process waits for others: in a collective or a backward pass, …
    "/torch/distributed/",
    "/torch/autograd/graph.py",
    "/torch/cuda/",
    "/trainer/distributed/",
    # … or, with NCCL, whose calls return at once, where values are read from the device
    "/trainer/loops/moving.py",
    "/trainer/loops/record.py",
    "/trainer/metrics/cells.py",
    "/trainer/metrics/reduction.py",
    "/trainer/optim/finite.py",
)
_watching = threading.Lock()  # of nested runs only the outer one is watched
_runs = itertools.count()  # the same on every process: keeps the notes of runs apart


class Note(NamedTuple):
    """What a process writes for the others to read.

    Attributes:
        place: The phase and the step, for people; it changes while the run progresses.
        inside: Whether the process is in the run.
        seconds: How long it has been in this place.
        waits: Whether the training thread waits for other processes.
        stack: The thread's formatted stack, once it has been in one place for long.
        looks: How often the process has written a note.
        failure: The error that ended the run on this process.
    """

    place: str = ""
    inside: bool = False
    seconds: float = 0.0
    waits: bool = False
    stack: str = ""
    looks: int = 0
    failure: str = ""


@contextmanager
def watched(place: Callable[[], str]) -> Iterator[Callable[[], None]]:
    """Write notes inside the block, and log which processes this one has long waited for.

    Args:
        place: Returns where the run is; called by another thread.

    Yields:
        A function that notes the place of a failure, to be called before the run is torn down.

    Raises:
        RuntimeError: Replaces the backend's error where another process failed, with the cause.
    """
    alone = not dist.is_initialized() or dist.get_world_size() == 1
    if alone or not _watching.acquire(blocking=False):
        yield lambda: None
        return
    watchdog = _Watchdog(place)
    thread = threading.Thread(target=watchdog.look, name="cadence-watchdog", daemon=True)
    thread.start()

    def end() -> None:
        watchdog.ended.set()
        _watching.release()
        thread.join(_PATIENCE)  # limited: a store on a machine that is gone may never answer
        watchdog.explain()

    try:
        yield watchdog.note_place
    except BaseException as error:
        try:
            watchdog.note_error(error)
        finally:
            end()
        if watchdog.cause:
            raise RuntimeError(watchdog.cause) from error
        raise
    else:
        end()


def complaint(own: int, notes: Sequence[Note], silent: set[int], patience: float) -> str | None:
    """Return what should be logged, or None.

    Args:
        own: This process's rank, the lowest of those that wait.
        notes: The latest note of each rank.
        silent: Ranks without a new note for a while.
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
    return f"No process has made progress for {seconds:.0f} seconds:\n" + "\n".join(places)


def _about(rank: int, note: Note, silent: bool, patience: float) -> str | None:
    """Return what is wrong with a process that does not wait, or None."""
    if note.failure:
        return f"rank {rank} has failed in {note.place}: {note.failure}"
    if not note.inside:
        return f"rank {rank} is not in this run: it has ended it, or not begun it."
    if silent:
        return (
            f"rank {rank} does not respond; it was last in {note.place}. Its process is stopped "
            f"or gone, or something there holds Python's global lock.\n{note.stack}"
        )
    if note.seconds < patience / 2:  # slow, but making progress
        return None
    return f"rank {rank} has been in {note.place} for {note.seconds:.0f} seconds:\n{note.stack}"


def unexplained(place: str, notes: Mapping[int, Note], error: str) -> str:
    """Describe a failure of the backend that no process has explained.

    Args:
        place: Where this process was.
        notes: The latest notes of the others.
        error: The backend's error.
    """
    inside = [rank for rank, note in notes.items() if note.inside]
    last = [f"rank {rank} in {notes[rank].place}" for rank in inside[:_SHOWN]]
    last += [f"{len(inside) - _SHOWN} more"] * (len(inside) > _SHOWN)
    return (
        "The exchange with the other processes has failed, as it does when one is gone or does not "
        f"answer, and none has reported why. This one was in {place}; seen some seconds "
        f"earlier: {'; '.join(last) or 'none'}. The backend says: {error}"
    )


class _Watchdog:
    """Watches the thread that created it.

    Attributes:
        ended: To be set when the run has ended.
        cause: Why it ended, if another process caused the error of this one.
    """

    def __init__(self, place: Callable[[], str]) -> None:
        group = dist.group.WORLD
        assert group is not None
        store: Any = group.get_group_store()
        self._store = store.clone()  # the training thread may be blocked in the original
        self._rank = dist.get_rank()
        run = f"cadence/run/{next(_runs)}"
        self._keys = [f"{run}/{rank}" for rank in range(dist.get_world_size())]
        self._first = f"{run}/first"  # the rank that failed first
        self._patience = min(_PATIENCE, store.timeout.total_seconds() * _OF_LIMIT)
        self._place, self._thread = place, threading.get_ident()
        self._looks = 0
        self._since = time.monotonic(), ""
        self._read: deque[dict[int, int]] = deque(maxlen=_SILENT)  # the `looks` of each rank
        self._ended_in = self._error = ""
        self._lost = self._replaced = False
        self.cause = ""
        self.ended = threading.Event()

    def note_place(self) -> None:
        """Note that the run ends in its current place."""
        self._ended_in = self._place()

    def note_error(self, error: BaseException) -> None:
        """Note the error as text: the object would keep everything in the run alive."""
        if isinstance(error, Preempted):
            return
        self._replaced, self._lost = is_of_backend(error), is_of_a_loss(error)
        self._error = shown(error)

    def look(self) -> None:
        """Write and read notes until the run has ended."""
        speaks_at = self._patience
        try:
            with self._told_if_silent():
                self._leave(self._note())
            while not self.ended.wait(self._patience / _LOOKS):
                note = self._note()
                with self._told_if_silent():
                    self._leave(note)
                    if not note.waits or note.seconds < self._patience / 2:
                        self._read.clear()
                        continue
                    read = self._read_all()
                if read is None or note.seconds < speaks_at:
                    continue
                if text := complaint(self._rank, *read, self._patience):
                    logger.warning(text.rstrip())
                    speaks_at *= 2  # if the others are only slow, it is not logged at every step
            self._take_leave()
        except (RuntimeError, OSError) as error:
            # The store has ended with its process, or the backend has timed out.
            logger.debug("The other processes can no longer be asked where they are: %s", error)

    @contextmanager
    def _told_if_silent(self) -> Iterator[None]:
        """Log it if the store does not answer inside the block: no other process can be asked then.

        It takes a thread of its own. The watchdog's may block until the system gives up the
        connection to a machine that is gone or unreachable.
        """
        answered = threading.Event()
        teller = threading.Thread(target=self._tell_of_silence, args=(answered,), daemon=True)
        teller.start()
        try:
            yield
        finally:
            answered.set()
            teller.join()

    def _tell_of_silence(self, answered: threading.Event) -> None:
        if environment.read_int("LOCAL_RANK"):  # one process per machine
            return
        while not answered.wait(self._patience / 2):
            since, place = self._since
            if (now := self._place()) != place:  # the training has gone on since the note
                self._since = time.monotonic(), now
                continue
            seconds = time.monotonic() - since
            told = "rank %d has been in %s for %.0f seconds, and %s."
            logger.warning(told, self._rank, place, seconds, _NO_STORE)
            return

    def explain(self) -> None:
        """Set the cause where the backend has failed and the store could not be asked."""
        if self._replaced and not self.cause:
            self.cause = (
                f"The exchange with the other processes has failed, and {_NO_STORE}. This one was "
                f"in {self._ended_in}. The backend says: {self._error}"
            )

    def _take_leave(self) -> None:
        """Note how the run ended here, and find out whose failure was the cause."""
        place = self._ended_in or self._place()
        self._leave(Note(place, looks=self._looks + 1, failure=self._error))
        if self._error and not self._lost and self._failure() is None:
            self._store.set(self._first, str(self._rank))
        elif self._replaced:
            others = [rank for rank in range(len(self._keys)) if rank != self._rank]
            self.cause = self._failure() or unexplained(
                place, {rank: self._read_note(rank) for rank in others[:_ASKED]}, self._error
            )

    def _failure(self) -> str | None:
        """Describe the failure of the process that failed first, for the others; None without one.

        Restarted processes may find a rank there, but no failure in its new note.
        """
        if not self._store.check([self._first]):
            return None
        rank = int(self._store.get(self._first))
        note = self._read_note(rank)
        if not note.failure:
            return None
        told = f"in {note.place}: {note.failure}"
        return f"Rank {rank} failed while the others waited for it, {told}"

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

    def _read_note(self, rank: int) -> Note:
        key = self._keys[rank]
        return Note(*json.loads(self._store.get(key))) if self._store.check([key]) else Note()

    def _read_all(self) -> tuple[list[Note], set[int]] | None:
        """Return the notes of all ranks and the silent ones; None if a lower rank waits as well.

        That rank reports then: otherwise each of a thousand processes would read all notes.
        """
        before = self._read[0] if len(self._read) == _SILENT else {}
        looks: dict[int, int] = {}
        self._read.append(looks)
        notes, silent = [], set()
        for rank in range(len(self._keys)):
            note = self._read_note(rank)
            looks[rank] = note.looks
            notes.append(note)
            if before.get(rank) == note.looks:
                silent.add(rank)
            elif note.waits and rank < self._rank:
                return None
        return notes, silent
