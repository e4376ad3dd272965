"""Ending a process that cannot handle a second Ctrl-C because it is blocked in C code.

Python calls signal handlers between bytecode instructions, and a process that waits in a collective
for a peer that never arrives, for a device or for a disk executes none. But a signal's number is
written at once to the descriptor given to `signal.set_wakeup_fd`, which a thread reads here.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress

_PATIENCE = 3.0  # seconds in which the main thread must reach its handler
_CLOSED = 0  # no signal has this number


@contextmanager
def reaching(
    watched: Collection[int], heard: threading.Event, end: Callable[[], object]
) -> Iterator[None]:
    """Inside, a SIGINT after any watched signal ends the process if its handler does not run.

    Must be entered on the main thread. An event loop that waits for signals there still receives
    them.

    Args:
        watched: The signals that have handlers.
        heard: Set by the handler of the second signal.
        end: Ends the process; called on another thread.
    """
    reader, writer = socket.socketpair()
    writer.setblocking(False)
    before = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)

    def watch() -> None:
        told = False
        while _CLOSED not in (numbers := reader.recv(64)):
            if before != -1:
                with suppress(OSError):  # its owner may have closed it
                    os.write(before, numbers)
            for number in numbers:
                if told and number == signal.SIGINT and not heard.wait(_PATIENCE):
                    end()
                told = told or number in watched

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


def end_unreachable() -> None:
    """Print the stack of every thread and end this process."""
    with suppress(OSError):
        os.write(2, b"\nSIGINT: the process did not end by itself; it is here:\n")
        faulthandler.dump_traceback(2, all_threads=True)
    os._exit(128 + signal.SIGINT)


def interactive() -> bool:
    """Return whether the process hosts a user's session, such as a notebook, and must not end."""
    # Libraries import IPython too, W&B's SDK for example; only a session has a shell.
    get_ipython = getattr(sys.modules.get("IPython"), "get_ipython", None)
    return hasattr(sys, "ps1") or bool(get_ipython and get_ipython())
