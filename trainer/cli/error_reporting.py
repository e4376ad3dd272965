"""Report the error that ends a command once, even if several processes run the command.

Under `trainer launch` each process writes a note, and the launcher prints what it finds. Under
torchrun the processes share a store, and the first process to claim a message there prints it.
"""

from __future__ import annotations

import hashlib
import os
from datetime import timedelta

from trainer import environment
from trainer.cli.parsing import echo
from trainer.launch import entry

_PATIENCE = timedelta(seconds=10)  # to wait until another process has printed the same message


class Reported(SystemExit):
    """The exit of a process after `report`: the launcher knows the error or need not report it."""

    reported = True  # read by `trainer.launch.entry`, which imports nothing of ours


def report(message: str, code: int) -> None:
    """Report a message once, however many processes end with it.

    The process must exit afterwards: its note is read only then.

    Args:
        message: The complete message.
        code: The code that the process is about to exit with.
    """
    if environment.read(entry.ERROR_PID) == str(os.getpid()):
        refused = code == 2  # a retry would fail too, so the launcher makes none
        noted = entry.write_error_file(entry.REFUSED if refused else "SystemExit", message, code)
        if noted and (refused or not entry.is_started_again()):
            return
    if environment.read("TORCHELASTIC_USE_AGENT_STORE") != "True":
        echo(message, error=True)
    else:
        entry.write_error_file("SystemExit", f"exit code {code}; see the message above.", code)
        _print_once(message)


def _print_once(message: str) -> None:
    """Print the message unless another process does: the first process to claim it prints it.

    This is not left to rank 0: only the processes of a machine know what that machine lacks. The
    others wait until it is printed, since the launcher ends all processes when one exits.
    """
    # Imported here because a single process does not need torch, whose stubs lack the store.
    from torch.distributed import DistError, TCPStore  # type: ignore[attr-defined]

    claim = _claim(message)
    try:
        store = TCPStore(
            environment.read("MASTER_ADDR") or "localhost",
            environment.read_int("MASTER_PORT") or 0,
            is_master=False,
            timeout=_PATIENCE,
            wait_for_workers=False,
        )
        if store.add(claim, 1) > 1:
            store.wait([f"{claim}/printed"], _PATIENCE)
            return
    except DistError:  # the launcher or the other process is gone: better twice than never
        echo(message, error=True)
        return
    echo(message, error=True)
    store.set(f"{claim}/printed", "")


def _claim(message: str) -> str:
    attempt = environment.read("TORCHELASTIC_RESTART_COUNT")
    return f"cadence/reported/{attempt}/{hashlib.sha256(message.encode()).hexdigest()}"
