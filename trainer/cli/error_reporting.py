"""Report the error that ends a command; under `trainer launch` once for all processes.

There each process writes a note, and the launcher prints what it finds.
"""

from __future__ import annotations

import os

from trainer import environment
from trainer.cli.launch import entry
from trainer.cli.parsing import echo


class Reported(SystemExit):
    """The exit of a process after `report`: the launcher knows the error or need not report it."""


def report(message: str, code: int) -> None:
    """Report a message to the launcher, or print it.

    The process must exit afterwards: its note is read only then.

    Args:
        message: The complete message.
        code: The code that the process is about to exit with.
    """
    if environment.read(entry.MARK) == str(os.getpid()):
        refused = code == 2  # a retry would fail too, so the launcher makes none
        noted = entry.note(entry.REFUSED if refused else "SystemExit", message, code)
        if noted and (refused or not entry.is_started_again()):
            return
    echo(message, error=True)
