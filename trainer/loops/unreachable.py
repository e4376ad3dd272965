"""Hard interrupt: a second Ctrl-C ends a process even if it is blocked in C code.

Python runs signal handlers only between bytecode instructions. A process that waits in C code, such
as in a collective for a rank that never arrives, for a device or for a disk, runs none. But the
signal's number is written at once to the file descriptor given to `signal.set_wakeup_fd`. A thread
reads it here.
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

_PATIENCE = 3.0  # seconds until the main thread must have run its handler
_CLOSED = 0  # no signal has this number


@contextmanager
def reaching(
    watched: Collection[int], heard: threading.Event, end: Callable[[], object]
) -> Iterator[None]:
    """End the process on a SIGINT that follows a watched signal, if its handler does not run.

    Enter it on the main thread. Signal numbers are passed on to an earlier wakeup descriptor, such
    as that of an asyncio event loop.

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
                with suppress(OSError):  # the event loop may have closed it
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
    """Return whether this is an interactive session, such as a notebook, which must not be ended.

    That IPython is imported does not suffice: libraries such as W&B's SDK import it, too. Only a
    session has a shell.
    """
    get_ipython = getattr(sys.modules.get("IPython"), "get_ipython", None)
    return hasattr(sys, "ps1") or bool(get_ipython and get_ipython())
