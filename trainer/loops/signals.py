"""Signals that ask a run to end: noted when they come, acted upon at the next update.

A process that is told to end by SIGTERM (a scheduler takes the machine back), SIGINT (Ctrl-C) or
SIGUSR1 (a scheduler's early warning) goes on to the end of its update. All processes then agree,
save and exit with `exit_code`, so that the next start can go on from there. The end of a time
budget, by the process's own clock, is such a signal too.
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

from trainer.loops.unreachable import end_unreachable, interactive, reaching

_installed: list[dict[int, Any]] = []  # the handlers before each watch at hand
_WATCHED = [  # Windows lacks the last
    getattr(signal, name) for name in ("SIGTERM", "SIGINT", "SIGUSR1") if hasattr(signal, name)
]

OUT_OF_TIME = 124  # what timeout(1) exits with


def exit_code(number: int) -> int:
    """What a shell reports for a process that a signal ended: 143, 130 and 138."""
    return 128 + number


class SignalWatch:
    """What came while a run was watched.

    Attributes:
        began: When this start of the run did, by the monotonic clock.
        received: The first signal's number; None without one.
        answered: The run has acted upon it.
        interrupted: A second signal has come to its handler, which ends the process.
    """

    def __init__(self) -> None:
        self.began = time.monotonic()
        self.received: int | None = None
        self.answered = False
        self.interrupted = threading.Event()

    def note(self, previous: Any, number: int, frame: FrameType | None) -> None:
        """A signal came; a second SIGINT ends the process at once, a third one by itself.

        Args:
            previous: What has handled it before.
            number: The signal.
            frame: Where the process is.

        Raises:
            KeyboardInterrupt: It is that.
        """
        again = self.received is not None
        self.received = self.received or number
        if number == signal.SIGINT and again:
            self.interrupted.set()
            if not interactive():  # what is torn down may wait for others in vain
                signal.signal(signal.SIGINT, signal.SIG_DFL)
            raise KeyboardInterrupt
        again_how = "interrupt" if interactive() else "press Ctrl-C"
        hint = f"; {again_how} again to stop at once" if number == signal.SIGINT else ""
        name = signal.Signals(number).name
        # Not print: the signal may have come in the middle of one. Whoever reads it, such as tee,
        # may have ended by the same Ctrl-C; that must not cost the save.
        with suppress(OSError):
            os.write(2, f"\n{name}: stopping after this update{hint}.\n".encode())
        if callable(previous) and previous is not signal.default_int_handler:
            previous(number, frame)


def told_to_end(watch: SignalWatch, budget: float | None) -> Callable[[], int | None]:
    """A function that gives the code to exit with, once a signal came or the time is up.

    Args:
        watch: Of the signals.
        budget: Seconds that the whole start has, with its set-up; None for no limit.
    """
    deadline = math.inf if budget is None else watch.began + budget

    def told() -> int | None:
        if watch.received is not None:
            return exit_code(watch.received)
        return OUT_OF_TIME if time.monotonic() >= deadline else None

    return told


@contextmanager
def watch_signals() -> Iterator[SignalWatch]:
    """Inside, the signals are noted; afterwards their handlers are what they were.

    A signal that the run did not act upon is sent again then. Handlers that somebody else installed
    are called too; a signal that is ignored stays so, and in another thread than the main one,
    where handlers cannot be installed, nothing is watched. Forked processes do not watch either. A
    second SIGINT also ends a process that does not come to its handlers, unless it is somebody's
    session; see `trainer.loops.unreachable`.
    """
    watch = SignalWatch()
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
    """In a forked process: it is not the one that saves, and whoever ends it must be able to."""
    if _installed:
        signal.set_wakeup_fd(-1)
    while _installed:
        _put_back(_installed.pop())


if hasattr(os, "register_at_fork"):  # not on Windows, which cannot fork
    os.register_at_fork(after_in_child=_forget)
