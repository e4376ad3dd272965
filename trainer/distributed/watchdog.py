"""Watchdog: names a hanging or failed rank, with its Python stack, before the backend times out.

In each process, a thread writes a note to the store of the process group every few seconds, with
the phase and step of the training thread. This needs no collective and does not involve the
training thread. A process that has waited in one phase for a long time reads the notes of the
others. It then logs which ranks are not waiting, with their phase, step and Python stack. A process
that fails writes its error to its note. The others lose their connection to it, and report this
cause instead of only the backend's message.
"""

from __future__ import annotations

import itertools
import json
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any, NamedTuple

import torch.distributed as dist

from trainer import environment
from trainer.distributed.guards import waiting
from trainer.distributed.process_control import is_of_a_loss, is_of_backend, shown
from trainer.errors import Preempted, module_logger

logger = module_logger(__name__)

# Patience: seconds in one phase after which a waiting process logs a warning; a fraction of the
# backend's timeout, if that is shorter.
_PATIENCE = 30.0
_OF_LIMIT = 0.25
_LOOKS = 6  # notes that a process writes during the patience
_SILENT = 2  # after so many looks without a new note, a process counts as stopped
_FRAMES = 15  # the number of innermost stack frames to show
_READ = 100  # ranks whose notes are read at the end; reading thousands would overload the store
_SHOWN = 8  # ranks to name if it is unknown which one is lost
_NO_STORE = (
    "the store of the process group does not answer: its machine, that of rank 0, has failed or "
    "cannot be reached"
)
_ALL_STAND = 4  # multiple of the patience after which a wait of all processes is logged
# Modules in whose code a process waits for others: in a collective or a backward pass.
# Cadence's own code marks where it waits; see `trainer.distributed.guards.waiting`.
_WAITS = (
    *("torch.distributed", "torch.autograd.graph", "torch.cuda", "torch.nn.parallel"),
    *("megatron.core.pipeline_parallel", "megatron.core.tensor_parallel"),
    *("megatron.core.distributed", "deepspeed.comm", "deepspeed.runtime.zero"),
)
_watching = threading.Lock()  # only the outermost of nested runs is watched
_runs = itertools.count()  # run numbers, equal on every process, for the keys of the notes


class Note(NamedTuple):
    """A note that a process writes to the store, for the other processes to read.

    Attributes:
        phase: The phase and the step of the run, as text for the log.
        inside: Whether the process is in the run.
        seconds: The time in seconds for which `phase` has not changed.
        waits: Whether the training thread waits for other processes.
        stack: The formatted Python stack of the training thread; empty unless it has been in one
            phase for half the patience.
        looks: The number of notes that the process has written.
        failure: The error that ended the run on this process; empty without one.
    """

    phase: str = ""
    inside: bool = False
    seconds: float = 0.0
    waits: bool = False
    stack: str = ""
    looks: int = 0
    failure: str = ""


@contextmanager
def watched(phase: Callable[[], str]) -> Iterator[Callable[[], None]]:
    """Run the watchdog thread inside the block; it does nothing with one process.

    Args:
        phase: Returns the phase and step of the run; the watchdog thread calls it.

    Yields:
        A function to call when the run fails, before teardown. It records the phase of the failure.

    Raises:
        RuntimeError: Another process failed. It names that rank and its error, and replaces the
            error of the backend.
    """
    alone = not dist.is_initialized() or dist.get_world_size() == 1
    if alone or not _watching.acquire(blocking=False):
        yield lambda: None
        return
    watchdog = _Watchdog(phase)
    thread = threading.Thread(target=watchdog.look, name="cadence-watchdog", daemon=True)
    thread.start()

    def end() -> None:
        watchdog.ended.set()
        _watching.release()
        thread.join(_PATIENCE)  # with a timeout: the store of a lost machine may never answer
        watchdog.explain()

    try:
        yield watchdog.note_phase
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


def complaint(rank: int, notes: Sequence[Note], silent: set[int], patience: float) -> str | None:
    """Return the warning about the ranks that the others wait for; None if there is none.

    Args:
        rank: The rank of this process, the lowest of the waiting ranks.
        notes: The latest note of each rank.
        silent: The ranks that have not written a new note for a while.
        patience: The patience in seconds.
    """
    waiters = [rank for rank, note in enumerate(notes) if note.waits and rank not in silent]
    phase, _, seconds, *_ = notes[rank]
    others = [
        description
        for rank, note in enumerate(notes)
        if rank not in waiters and (description := _describe(rank, note, rank in silent, patience))
    ]
    if others:
        ranks = ", ".join(map(str, waiters))
        who = f"rank {ranks} has" if len(waiters) == 1 else f"ranks {ranks} have"
        return f"{who} waited for {seconds:.0f} seconds, in {phase}:\n" + "\n".join(others)
    if len(waiters) < len(notes) or seconds < _ALL_STAND * patience:
        return None
    reports = [f"rank {rank} is in {note.phase}:\n{note.stack}" for rank, note in enumerate(notes)]
    return f"No process has made progress for {seconds:.0f} seconds:\n" + "\n".join(reports)


def _describe(rank: int, note: Note, silent: bool, patience: float) -> str | None:
    """Return a line about a rank that does not wait; None if it only makes slow progress."""
    if note.failure:
        return f"rank {rank} has failed in {note.phase}: {note.failure}"
    if not note.inside:
        return f"rank {rank} is not in this run: it has finished, or has not started."
    if silent:
        return (
            f"rank {rank} does not respond; it was last in {note.phase}. Its process is stopped "
            "or dead, or some code holds Python's global lock.\n"
            f"{note.stack}"
        )
    if note.seconds < patience / 2:  # slow, but making progress
        return None
    return f"rank {rank} has been in {note.phase} for {note.seconds:.0f} seconds:\n{note.stack}"


def unexplained(phase: str, notes: Mapping[int, Note], error: str) -> str:
    """Describe an error of the backend for which no process has reported a cause.

    Args:
        phase: The phase and step of this process.
        notes: The latest notes of the other ranks.
        error: The backend's error, as text.
    """
    inside = [rank for rank, note in notes.items() if note.inside]
    last = [f"rank {rank} in {notes[rank].phase}" for rank in inside[:_SHOWN]]
    last += [f"{len(inside) - _SHOWN} more"] * (len(inside) > _SHOWN)
    return (
        "Communication with the other processes failed: a process has died or does not answer, "
        f"and none has reported an error. This process was in {phase}; the others, some seconds "
        f"earlier: {'; '.join(last) or 'none'}. The backend reports: {error}"
    )


def _waits_at(frame: FrameType | None) -> bool:
    """Return whether a frame is in torch or an engine's library, at a point where it waits.

    The innermost frame may be in another part of torch, for example ``torch._ops`` while a
    `DTensor` waits. So the search goes outwards to the first frame that is not torch's.
    """
    while frame is not None:
        module = str(frame.f_globals.get("__name__"))
        if module.startswith(_WAITS):
            return True
        if module.partition(".")[0] != "torch":
            return False
        frame = frame.f_back
    return False


class _Watchdog:
    """The watchdog of the thread that creates it, the training thread.

    Attributes:
        ended: An event to set when the run has ended.
        cause: The message about the rank that caused this process's error; empty if no other rank
            did.
    """

    def __init__(self, phase: Callable[[], str]) -> None:
        group = dist.group.WORLD
        assert group is not None
        store: Any = group.get_group_store()
        self._store = store.clone()  # the training thread may be blocked in the original store
        self._rank = dist.get_rank()
        run = f"cadence/run/{next(_runs)}"
        self._keys = [f"{run}/{rank}" for rank in range(dist.get_world_size())]
        self._first = f"{run}/first"  # the key for the rank that failed first
        self._patience = min(_PATIENCE, store.timeout.total_seconds() * _OF_LIMIT)
        self._phase, self._thread = phase, threading.get_ident()
        self._looks = 0
        self._since = time.monotonic(), ""
        self._read: deque[dict[int, int]] = deque(maxlen=_SILENT)  # `Note.looks` by rank
        self._ended_in = self._error = ""
        self._lost = self._replaced = False
        self.cause = ""
        self.ended = threading.Event()

    def note_phase(self) -> None:
        """Record the current phase as the one in which the run failed."""
        self._ended_in = self._phase()

    def note_error(self, error: BaseException) -> None:
        """Record the error as text; the error object would keep all objects of the run alive."""
        if isinstance(error, Preempted):
            return
        self._replaced, self._lost = is_of_backend(error), is_of_a_loss(error)
        self._error = shown(error)

    def look(self) -> None:
        """Write and read notes until the run has ended."""
        speaks_at = self._patience
        try:
            with self._log_if_silent():
                self._publish(self._make_note())
            while not self.ended.wait(self._patience / _LOOKS):
                note = self._make_note()
                with self._log_if_silent():
                    self._publish(note)
                    if not note.waits or note.seconds < self._patience / 2:
                        self._read.clear()
                        continue
                    read = self._read_all()
                if read is None or note.seconds < speaks_at:
                    continue
                if text := complaint(self._rank, *read, self._patience):
                    logger.warning(text.rstrip())
                    speaks_at *= 2  # warn less often if the others are only slow
            self._sign_off()
        except (RuntimeError, OSError) as error:
            # The process that hosts the store has ended, or the backend has timed out.
            logger.debug("The phases of the other processes can no longer be read: %s", error)

    @contextmanager
    def _log_if_silent(self) -> Iterator[None]:
        """Log a warning if the store does not answer inside the block.

        Without the store, the state of the other processes is unknown. This needs a separate
        thread, because the watchdog thread may block in the store until the operating system gives
        up the connection to the lost machine.
        """
        timer = threading.Timer(self._patience / 2, self._log_silence)
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()

    def _log_silence(self) -> None:
        if not environment.read_int("LOCAL_RANK"):  # only one process per machine logs
            logger.warning("rank %d is in %s, and %s.", self._rank, self._phase(), _NO_STORE)

    def explain(self) -> None:
        """Set `cause` if the backend has failed and the store does not answer."""
        if self._replaced and not self.cause:
            self.cause = (
                f"Communication with the other processes failed, and {_NO_STORE}. This process "
                f"was in {self._ended_in}. The backend reports: {self._error}"
            )

    def _sign_off(self) -> None:
        """Write a last note about how the run ended, and find the rank that caused a failure."""
        phase = self._ended_in or self._phase()
        self._publish(Note(phase, looks=self._looks + 1, failure=self._error))
        if self._error and not self._lost and self._failure() is None:
            self._store.set(self._first, str(self._rank))
        elif self._replaced:
            others = [rank for rank in range(len(self._keys)) if rank != self._rank]
            self.cause = self._failure() or unexplained(
                phase, {rank: self._read_note(rank) for rank in others[:_READ]}, self._error
            )

    def _failure(self) -> str | None:
        """Describe the failure of the rank that failed first; None if no rank has failed.

        After a restart, the store may still name a rank whose new note has no failure.
        """
        if not self._store.check([self._first]):
            return None
        rank = int(self._store.get(self._first))
        note = self._read_note(rank)
        if not note.failure:
            return None
        message = f"in {note.phase}: {note.failure}"
        return f"Rank {rank} failed while the others waited for it, {message}"

    def _make_note(self) -> Note:
        now, phase = time.monotonic(), self._phase()
        if phase != self._since[1]:
            self._since = now, phase
        seconds = now - self._since[0]
        frame = sys._current_frames()[self._thread]
        waits = self._thread in waiting.threads or _waits_at(frame)
        long = seconds >= self._patience / 2
        stack = "".join(traceback.format_stack(frame, limit=_FRAMES)) if long else ""
        self._looks += 1
        return Note(phase, True, seconds, waits, stack, self._looks)

    def _publish(self, note: Note) -> None:
        self._store.set(self._keys[self._rank], json.dumps(note))

    def _read_note(self, rank: int) -> Note:
        key = self._keys[rank]
        return Note(*json.loads(self._store.get(key))) if self._store.check([key]) else Note()

    def _read_all(self) -> tuple[list[Note], set[int]] | None:
        """Return the notes of all ranks and the set of silent ranks; None if a lower rank waits.

        Only the lowest waiting rank reports, so that not every process reads all notes.
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
