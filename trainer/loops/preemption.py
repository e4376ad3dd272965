"""Preemption: exit signals are recorded when they arrive, and handled at the next update.

A process that receives SIGTERM (the scheduler takes the machine back), SIGINT (Ctrl-C) or SIGUSR1
(the scheduler's early warning) finishes its update. The step sync then informs all ranks, which
save and exit with `exit_code`, so that the next start can resume. The end of a time budget, by the
process's own clock, has the same effect, with the exit code `TIMEOUT_EXIT_CODE`.

Hard interrupt: a second Ctrl-C ends a process even if it is blocked in C code. Python runs signal
handlers only between bytecode instructions. A process that waits in C code, such as in a collective
for a rank that never arrives, for a device or for a disk, runs none. But the signal's number is
written at once to the file descriptor given to `signal.set_wakeup_fd`, which a thread reads.
"""

from __future__ import annotations

import faulthandler
import math
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from itertools import count
from types import FrameType
from typing import Any

import torch

from trainer.distributed.collectives import reduce
from trainer.distributed.guards import decided_by_all, read_back
from trainer.environment import slurm_job
from trainer.errors import TIMEOUT_EXIT_CODE, module_logger

logger = module_logger(__name__)

_PATIENCE = 3.0  # seconds within which the main thread must run its handler
_CLOSED = 0  # no signal has this number


@contextmanager
def hard_interrupt(
    watched: Collection[int], heard: threading.Event, end: Callable[[], object]
) -> Iterator[None]:
    """End the process on a SIGINT that follows a watched signal, if its handler does not run.

    Enter it on the main thread. Signal numbers are passed on to an earlier wakeup descriptor, such
    as that of an asyncio event loop.

    Args:
        watched: The signals that have handlers.
        heard: An event that the handler of the second signal sets.
        end: Ends the process; called on another thread.
    """
    reader, writer = socket.socketpair()
    writer.setblocking(False)
    before = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)

    def watch() -> None:
        first_passed = False
        while _CLOSED not in (numbers := reader.recv(64)):
            if before != -1:
                with suppress(OSError):  # the event loop may have closed it
                    os.write(before, numbers)
            for number in numbers:
                if first_passed and number == signal.SIGINT and not heard.wait(_PATIENCE):
                    end()
                first_passed = first_passed or number in watched

    thread = threading.Thread(target=watch, name="cadence-signals", daemon=True)
    thread.start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(before)
        heard.set()
        if thread.is_alive():  # not in a forked process
            writer.setblocking(True)
            writer.send(bytes([_CLOSED]))
            thread.join()
        reader.close()
        writer.close()


def end_process() -> None:
    """Print the stack of every thread and end this process."""
    with suppress(OSError):
        os.write(2, b"\nSIGINT: the process did not end by itself; it is here:\n")
        faulthandler.dump_traceback(2, all_threads=True)
    os._exit(128 + signal.SIGINT)


def interactive() -> bool:
    """Return whether this is an interactive session, such as a notebook, which must not be ended.

    An imported IPython is not enough, since libraries such as W&B's SDK import it too. Only a
    session has a shell.
    """
    get_ipython = getattr(sys.modules.get("IPython"), "get_ipython", None)
    return hasattr(sys, "ps1") or bool(get_ipython and get_ipython())


_LIMIT = 60.0  # seconds; the controller may be busy


def requeue(code: int) -> None:
    """Ask SLURM to requeue this job if the run ended because of its time limit.

    The job is requeued after SIGUSR1, which ``sbatch --signal=USR1@120`` sends 120 seconds before
    the limit, or after ``max_time``. It is not requeued after Ctrl-C and SIGTERM (``scancel``),
    with which a user ends it. SLURM itself requeues a job that it preempts. Outside SLURM nothing
    happens. A failure is logged.

    Args:
        code: The run's exit code.
    """
    job = slurm_job()
    if job is None or code not in (TIMEOUT_EXIT_CODE, exit_code(signal.SIGUSR1)):
        return
    command = ["scontrol", "requeue", job]
    try:
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=_LIMIT)
    except (OSError, subprocess.SubprocessError) as error:
        reason = getattr(error, "stderr", None) or error
        logger.error("SLURM did not requeue job %s: %s", job, str(reason).strip())
    else:
        logger.warning("SLURM has requeued job %s.", job)


_installed: list[dict[int, Any]] = []  # the previous handlers, for each active `watch_signals`
_WATCHED = [  # Windows has no SIGUSR1
    getattr(signal, name) for name in ("SIGTERM", "SIGINT", "SIGUSR1") if hasattr(signal, name)
]

_MAX_BATCHES_BETWEEN_VOTES = 16


def exit_code(number: int) -> int:
    """Return the exit code that a shell reports for a signal: 128 + number, such as 143."""
    return 128 + number


class SignalWatch:
    """Records the exit signals that arrive during a run.

    Args:
        announces: Whether this process prints a message on a signal. Ctrl-C and a launcher's
            SIGTERM reach all processes of the machine, so one of them should print.
        budget: The time limit of this start in seconds, set-up included; None for no limit.

    Attributes:
        received: The number of the first signal; None without one.
        answered: Whether the run has handled the signal, by saving and ending.
        interrupted: Set once a second signal, a SIGINT, has reached its handler.
    """

    def __init__(self, *, announces: bool = True, budget: float | None = None) -> None:
        self._announces = announces
        self._deadline = math.inf if budget is None else time.monotonic() + budget
        self.received: int | None = None
        self.answered = False
        self.interrupted = threading.Event()

    def note(self, previous: Any, number: int, frame: FrameType | None) -> None:
        """Handle a signal: record the first one; a second SIGINT raises, a third one kills.

        Args:
            previous: The handler that was installed before.
            number: The signal.
            frame: The interrupted stack frame.

        Raises:
            KeyboardInterrupt: The signal is a SIGINT and not the first signal.
        """
        again = self.received is not None
        self.received = self.received or number
        if number == signal.SIGINT and again:
            self.interrupted.set()
            if not interactive():  # the teardown may hang in a wait for other ranks
                signal.signal(signal.SIGINT, signal.SIG_DFL)
            raise KeyboardInterrupt
        # Launchers may send the same signal to a process several times.
        if not again and self._announces:
            _announce(number)
        if callable(previous) and previous is not signal.default_int_handler:
            previous(number, frame)

    def exit_code(self) -> int | None:
        """Return the exit code once a signal or the time budget ends this process, else None."""
        if self.received is not None:
            return exit_code(self.received)
        return TIMEOUT_EXIT_CODE if time.monotonic() >= self._deadline else None


def _announce(number: int) -> None:
    again = "interrupt" if interactive() else "press Ctrl-C"
    hint = f"; {again} again to stop at once" if number == signal.SIGINT else ""
    name = signal.Signals(number).name
    # Do not use print: the signal may have interrupted another print. Ignore a broken pipe: the
    # same Ctrl-C may have ended the reader of stderr, such as tee, and the run must still be saved.
    with suppress(OSError):
        os.write(2, f"\n{name}: stopping after this update{hint}.\n".encode())


class ExitVote:
    """Exchanges between ranks, in an evaluation, whether any of them received the exit signal.

    Evaluation has no step sync, so this takes a blocking all-reduce. It is done about once a second
    by rank 0's clock, but at least every 16 global batches. The interval at most doubles each time:
    workers deliver batches in bursts, so a short measurement is not reliable.
    """

    def __init__(self) -> None:
        self._voted, self._between, self._since = 0, 1, 0.0

    def any_rank(
        self, batch_idx: int, signalled: bool, *, rank: int, device: torch.device, aligned: bool
    ) -> bool:
        """Return whether any rank received the exit signal; call before every global batch.

        Collective in some of the calls, the same on all ranks.

        Args:
            batch_idx: The index of the global batch, from 0.
            signalled: Whether this process received the exit signal.
            rank: The rank of this process.
            device: The device of the all-reduce.
            aligned: Whether all ranks are known to reach this global batch. Otherwise a rank whose
                data have ended does not take part, so the exchange is done as rarely as allowed:
                the error about that rank is raised only after the last global batch.
        """
        if 0 < batch_idx < self._voted + self._between:
            return False
        now = time.monotonic()
        vote = float(signalled), now - self._since if rank == 0 else 0.0
        votes, seconds = read_back(reduce(torch.tensor(vote, device=device))).tolist()
        if not aligned:
            self._between = _MAX_BATCHES_BETWEEN_VOTES
        elif not batch_idx:
            self._between = 1
        else:
            in_a_second = int((batch_idx - self._voted) / max(seconds, 1e-3))
            most = min(2 * self._between, _MAX_BATCHES_BETWEEN_VOTES)
            self._between = max(1, min(in_a_second, most))
        self._voted, self._since = batch_idx, now
        return bool(votes)


class Stopping:
    """Stop requests of a fit: this process's own, and the joint decision at the next update.

    Args:
        exit_code: Returns the exit code once a signal or the time budget ends this process, else
            None.
    """

    _fits = count()

    def __init__(self, exit_code: Callable[[], int | None]) -> None:
        self._exit_code = exit_code
        self._requested = False  # by this process
        self._decided = False  # by all ranks
        self._exit_vote = ExitVote()
        self._number = next(self._fits)  # the number of the fit in this program, equal on all ranks

    def ignore_signals(self) -> None:
        """Leave signals and the time budget to the code after the fit."""
        self._exit_code = _no_exit

    def exit_code(self) -> int | None:
        """Return the exit code once a signal or the time budget ends this process, else None."""
        return self._exit_code()

    def request(self, stop: bool) -> None:
        """Request a stop, or withdraw the request."""
        self._requested = stop

    def votes(self) -> tuple[float, float]:
        """Return this process's votes to stop, and to exit for a signal; 1.0 or 0.0 each."""
        return 1.0 if self._requested else 0.0, 0.0 if self._exit_code() is None else 1.0

    def decide(self, stop: bool) -> None:
        """Set the joint decision: stop or continue."""
        self._decided = stop

    def decided(self, votes: float = 0.0) -> bool:
        """Return whether all ranks have decided to stop, as they do once one votes."""
        if votes > 0:
            self._decided = True
        return self._decided

    def decide_at_boundary(self, stop: bool, *, step: int, world_size: int) -> None:
        """Stop at once if all ranks request it at the update boundary of a step.

        Callbacks decide from shared values, so ranks normally agree. If they do not, the request
        remains a vote for the next step sync, so no rank leaves the loop alone.
        """
        if self._decided != stop and (
            world_size == 1 or decided_by_all(f"{self._number}/{step}/{stop}")
        ):
            self._decided = stop

    def any_rank_exits(
        self, batch_idx: int, *, rank: int, device: torch.device, aligned: bool
    ) -> bool:
        """Return whether any rank received the exit signal, see `ExitVote.any_rank`."""
        signalled = self._exit_code() is not None
        return self._exit_vote.any_rank(
            batch_idx, signalled, rank=rank, device=device, aligned=aligned
        )


def _no_exit() -> None:
    return None


@contextmanager
def watch_signals(*, announces: bool = True, budget: float | None = None) -> Iterator[SignalWatch]:
    """Record exit signals inside; restore the previous handlers on exit.

    A signal that the run has not handled is raised again on exit. Handlers that other code has
    installed are called, too, and an ignored signal stays ignored. Nothing is recorded outside the
    main thread, where Python cannot install handlers, and in forked processes. A second SIGINT also
    ends a process that is blocked in C code, except in an interactive session; see
    `trainer.loops.preemption`.

    Args:
        announces: See `SignalWatch`.
        budget: See `SignalWatch`.

    Yields:
        The recorded signals.
    """
    watch = SignalWatch(announces=announces, budget=budget)
    before: dict[int, Any] = {}
    _installed.append(before)
    try:
        if threading.current_thread() is threading.main_thread():
            for number in _WATCHED:
                previous = signal.getsignal(number)
                if previous not in (None, signal.SIG_IGN):
                    before[number] = signal.signal(number, partial(watch.note, previous))
        guarded = signal.SIGINT in before and not interactive()
        with (
            hard_interrupt(list(before), watch.interrupted, end_process)
            if guarded
            else nullcontext()
        ):
            yield watch
    finally:
        _installed.remove(before)
        _put_back(before)
    if watch.received is not None and not watch.answered:
        signal.raise_signal(watch.received)


def _put_back(before: dict[int, Any]) -> None:
    for number, previous in before.items():
        signal.signal(number, previous)


def _restore_handlers_in_fork() -> None:
    """Restore the handlers in a forked process, which saves nothing and should end at once."""
    if _installed:
        signal.set_wakeup_fd(-1)
    while _installed:
        _put_back(_installed.pop())


if hasattr(os, "register_at_fork"):  # not on Windows, which cannot fork
    os.register_at_fork(after_in_child=_restore_handlers_in_fork)
