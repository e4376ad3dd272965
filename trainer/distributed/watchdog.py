"""A process that the others wait for is named, with where it is, before the backend gives up.

Each process of a run has a thread that notes every few seconds where the training thread is, in the
store by which the processes found each other: no collective, and nothing for the training thread to
do. A process that has stood in one place for long, waiting, reads what the others have noted, and
the log says who does not wait: its phase and step, and its Python stack. A process that fails notes
by what, and where: the others, who lose their connection to it, say so before the backend's words.
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

_PATIENCE = 30.0  # seconds in one place until the log says so, …
_OF_LIMIT = 0.25  # … or this part of the time after which the backend gives up, if that is less
_LOOKS = 6  # in that time
_SILENT = 2  # looks without another note: whoever has left it stands still as a whole
_FRAMES = 15  # of a stack, the innermost ones
_ASKED = 100  # processes, at the end: that each asks thousands would take the store too long
_SHOWN = 8  # of those of which one may have gone
_NO_STORE = (
    "the store by which the processes found each other does not answer: its machine, that of rank "
    "0, has gone or cannot be reached"
)
_ALL_STAND = 4  # times the patience, until processes that all wait are told of
_WAITING = (  # where a process is that waits for others: in a collective, or in a backward pass, …
    "/torch/distributed/",
    "/torch/autograd/graph.py",
    "/torch/cuda/",
    "/trainer/distributed/",
    # … or with NCCL, whose calls return at once, where something is read from the device
    "/trainer/loops/moving.py",
    "/trainer/loops/record.py",
    "/trainer/metrics/cells.py",
    "/trainer/metrics/reduction.py",
    "/trainer/optim/finite.py",
)
_watching = threading.Lock()  # of runs inside each other the outer one is watched
_runs = itertools.count()  # every process watches the same ones: what one leaves is no other's


class Note(NamedTuple):
    """What a process leaves for the others to read.

    Attributes:
        place: The phase and the step, for people; another one says that the run goes on.
        inside: It is in the run.
        seconds: For how long it has been there.
        waits: The training thread waits for other processes.
        stack: Where that thread is, as Python formats it, once it has been there for long.
        looks: How often the process has looked.
        failure: The error that has ended the run there.
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
    """Inside, this process leaves notes, and says in the log for whom it has long waited.

    Args:
        place: Where the run is; called by another thread.

    Yields:
        A function that notes the place of a failure, to be called before the run is torn down.

    Raises:
        RuntimeError: In place of the backend's own, where another process has failed; it says how.
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
        thread.join(_PATIENCE)  # no longer: a store on a machine that is gone may not answer
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
    if note.failure:
        return f"rank {rank} has failed in {note.place}: {note.failure}"
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


def unexplained(place: str, notes: Mapping[int, Note], error: str) -> str:
    """What is known where the backend has failed and no process has said that it did.

    Args:
        place: Where this process was.
        notes: The latest ones of others.
        error: The backend's.
    """
    inside = [rank for rank, note in notes.items() if note.inside]
    last = [f"rank {rank} in {notes[rank].place}" for rank in inside[:_SHOWN]]
    last += [f"{len(inside) - _SHOWN} more"] * (len(inside) > _SHOWN)
    return (
        "The exchange with the other processes has failed, as where one has gone or does not "
        f"answer, and none has said why. This one was in {place}; last seen: "
        f"{'; '.join(last) or 'none'}. The backend says: {error}"
    )


class _Watchdog:
    """Looks at the thread that made it.

    Attributes:
        ended: To be set when the run has ended.
        cause: Why it has, where another process's end is behind the error of this one.
    """

    def __init__(self, place: Callable[[], str]) -> None:
        group = dist.group.WORLD
        assert group is not None
        store: Any = group.get_group_store()
        self._store = store.clone()  # the training thread may be waiting in the other
        self._rank = dist.get_rank()
        run = f"cadence/run/{next(_runs)}"
        self._keys = [f"{run}/{rank}" for rank in range(dist.get_world_size())]
        self._first = f"{run}/first"  # the rank that has failed before the others
        self._patience = min(_PATIENCE, store.timeout.total_seconds() * _OF_LIMIT)
        self._place, self._thread = place, threading.get_ident()
        self._looks = 0
        self._since = time.monotonic(), ""
        self._read: deque[dict[int, int]] = deque(maxlen=_SILENT)  # how often each had looked
        self._ended_in = self._error = ""
        self._lost = self._replaced = False
        self.cause = ""
        self.ended = threading.Event()

    def note_place(self) -> None:
        """The run ends where it is now."""
        self._ended_in = self._place()

    def note_error(self, error: BaseException) -> None:
        """By this one; kept as text, since it holds all that the run held."""
        if isinstance(error, Preempted):
            return
        self._replaced, self._lost = is_of_backend(error), is_of_a_loss(error)
        self._error = shown(error)

    def look(self) -> None:
        """Until the run has ended."""
        speaks_at = self._patience
        try:
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
                    speaks_at *= 2  # if the others are only slow, it is not said at every step
            self._take_leave()
        except (RuntimeError, OSError) as error:
            # The store has ended with its process, or the backend has given up.
            logger.debug("No process can be asked any longer where it is: %s", error)

    @contextmanager
    def _told_if_silent(self) -> Iterator[None]:
        """Inside, the log says so where the store does not answer: no other process can be asked.

        By a thread of its own. That of the watchdog may wait until the system gives the connection
        to a machine up, which is gone or out of reach.
        """
        timer = threading.Timer(self._patience / 2, self._tell_of_silence)
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()
            timer.join()

    def _tell_of_silence(self) -> None:
        since, place = self._since
        if self._place() == place and not environment.read_int("LOCAL_RANK"):  # one of a machine
            seconds = time.monotonic() - since
            told = "rank %d has been in %s for %.0f seconds, and %s."
            logger.warning(told, self._rank, place, seconds, _NO_STORE)

    def explain(self) -> None:
        """Give the cause where the backend has failed and the store could not be asked for it."""
        if self._replaced and not self.cause:
            self.cause = (
                f"The exchange with the other processes has failed, and {_NO_STORE}. This one was "
                f"in {self._ended_in}. The backend says: {self._error}"
            )

    def _take_leave(self) -> None:
        """Note how the run has ended here; learn whose failure was the cause."""
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
        """That of the process that failed first, as the others are told it; None if there is none.

        Processes that were started again may find a rank there, but no failure in its new note.
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
        """The notes of all ranks and those who are silent; None if a lower rank waits as well.

        It speaks then. Else of a thousand processes each would read a thousand notes.
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
