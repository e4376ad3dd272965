"""Signals that ask a run to end: noted when they arrive, acted upon at the next update.

A process that receives SIGTERM (a scheduler takes the machine back), SIGINT (Ctrl-C) or SIGUSR1 (a
scheduler's early warning) continues to the end of its update. All processes then agree, save and
exit with `exit_code`, so that the next start can resume from there. The end of a time budget, by
the process's own clock, has the same effect, with the code `OUT_OF_TIME`.
"""

from __future__ import annotations

import math
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from types import FrameType
from typing import Any

import torch

from trainer.distributed.collectives import reduce
from trainer.loops.unreachable import end_unreachable, interactive, reaching

_installed: list[dict[int, Any]] = []  # the previous handlers, for each active watch
_WATCHED = [  # Windows lacks the last
    getattr(signal, name) for name in ("SIGTERM", "SIGINT", "SIGUSR1") if hasattr(signal, name)
]

OUT_OF_TIME = 124  # what timeout(1) exits with
_ROUNDS_BETWEEN_QUESTIONS = 16


def exit_code(number: int) -> int:
    """Return what a shell reports for a process ended by a signal: 143, 130 or 138."""
    return 128 + number


class SignalWatch:
    """The signals that arrived while a run was watched.

    Args:
        tells_ctrl_c: This process says so if it is interrupted: Ctrl-C reaches all of the machine's
            processes, of which one is enough. Another signal may reach a single one.

    Attributes:
        began: The time at which this start of the run began, by the monotonic clock.
        received: The first signal's number; None without one.
        answered: Whether the run has acted upon it.
        interrupted: Set once a second signal, a SIGINT, has reached its handler.
    """

    def __init__(self, *, tells_ctrl_c: bool = True) -> None:
        self._tells_ctrl_c = tells_ctrl_c
        self.began = time.monotonic()
        self.received: int | None = None
        self.answered = False
        self.interrupted = threading.Event()

    def note(self, previous: Any, number: int, frame: FrameType | None) -> None:
        """Note a signal; a second one, if SIGINT, raises, and a third one kills the process.

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
            if not interactive():  # the teardown may wait for other processes in vain
                signal.signal(signal.SIGINT, signal.SIG_DFL)
            raise KeyboardInterrupt
        # Launchers may send the same signal to a process several times.
        if not again and (number != signal.SIGINT or self._tells_ctrl_c):
            _tell(number)
        if callable(previous) and previous is not signal.default_int_handler:
            previous(number, frame)


def _tell(number: int) -> None:
    again = "interrupt" if interactive() else "press Ctrl-C"
    hint = f"; {again} again to stop at once" if number == signal.SIGINT else ""
    name = signal.Signals(number).name
    # Not print: the signal may have interrupted one. A reader of stderr, such as tee, may have
    # ended by the same Ctrl-C; that must not cost the save.
    with suppress(OSError):
        os.write(2, f"\n{name}: stopping after this update{hint}.\n".encode())


def told_to_end(watch: SignalWatch, budget: float | None) -> Callable[[], int | None]:
    """Return a function that returns the exit code once a signal came or the time is up, else None.

    Args:
        watch: Of the signals.
        budget: The time limit of this start, set-up included, in seconds; None for no limit.
    """
    deadline = math.inf if budget is None else watch.began + budget

    def told() -> int | None:
        if watch.received is not None:
            return exit_code(watch.received)
        return OUT_OF_TIME if time.monotonic() >= deadline else None

    return told


class Questions:
    """Asks, in an evaluation on several processes, whether any of them was told to end.

    A question is a blocking reduction, so there is one in 16 rounds; but, by rank 0's clock, about
    one in a second if these take longer. The rounds between two at most double each time: workers
    deliver batches in bursts, and a burst says little of the time that follows.
    """

    def __init__(self) -> None:
        self._asked, self._between, self._since = 0, 1, 0.0

    def ask(
        self, round_idx: int, told: bool, *, rank: int, device: torch.device, aligned: bool
    ) -> bool:
        """Return whether any process was told to end; collective, before every round.

        Args:
            round_idx: The round.
            told: Whether this process was.
            rank: This process.
            device: Where to reduce.
            aligned: Whether all processes have this round. Otherwise one whose data have ended does
                not answer, so that questions are as rare as they may be: the error that says that
                it has ended comes only after the last round.
        """
        if 0 < round_idx < self._asked + self._between:
            return False
        now = time.monotonic()
        own = float(told), now - self._since if rank == 0 else 0.0
        votes, seconds = reduce(torch.tensor(own, device=device)).tolist()
        if not aligned:
            self._between = _ROUNDS_BETWEEN_QUESTIONS
        elif not round_idx:
            self._between = 1
        else:
            in_a_second = int((round_idx - self._asked) / max(seconds, 1e-3))
            most = min(2 * self._between, _ROUNDS_BETWEEN_QUESTIONS)
            self._between = max(1, min(in_a_second, most))
        self._asked, self._since = round_idx, now
        return bool(votes)


@contextmanager
def watch_signals(*, tells_ctrl_c: bool = True) -> Iterator[SignalWatch]:
    """Inside, signals are noted; the previous handlers are restored afterwards.

    A signal that the run did not act upon is then raised again. Handlers that other code installed
    are called too, and a signal that was ignored stays ignored. Outside the main thread, where
    handlers cannot be installed, and in forked processes nothing is watched. A second SIGINT also
    ends a process that does not reach its handlers, except in an interactive session; see
    `trainer.loops.unreachable`.

    Args:
        tells_ctrl_c: See `SignalWatch`.
    """
    watch = SignalWatch(tells_ctrl_c=tells_ctrl_c)
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
            reaching(list(before), watch.interrupted, end_unreachable) if guarded else nullcontext()
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


def _forget() -> None:
    """Restore the handlers in a forked process, which does not save and must be easy to end."""
    if _installed:
        signal.set_wakeup_fd(-1)
    while _installed:
        _put_back(_installed.pop())


if hasattr(os, "register_at_fork"):  # not on Windows, which cannot fork
    os.register_at_fork(after_in_child=_forget)
