"""Report the error that ends a command once, even if several processes run the command.

Under `trainer launch` each process writes its error to a file, and the launcher prints it. Under
torchrun the processes share a store, and the first process to claim a message there prints it.
"""

from __future__ import annotations

import hashlib
import os
from datetime import timedelta

from trainer import environment
from trainer.cli.parsing import echo
from trainer.launch import entry

_PATIENCE = timedelta(seconds=10)  # to wait for another process to print the same message


class Reported(SystemExit):
    """The exit of a process after `report`; the launcher need not report the error again."""

    reported = True  # read by `trainer.launch.entry`, which imports nothing of ours


def report(message: str, code: int) -> None:
    """Report a message once, even if many processes end with it.

    The process must exit afterwards, since its error file is only read then.

    Args:
        message: The complete message.
        code: The exit code of the process.
    """
    if environment.read(entry.ERROR_PID) == str(os.getpid()):
        refused = code == 2  # the launcher does not retry, as that would fail too
        noted = entry.write_error_file(entry.REFUSED if refused else "SystemExit", message, code)
        if noted and (refused or not entry.is_started_again()):
            return
    if environment.read("TORCHELASTIC_USE_AGENT_STORE") != "True":
        echo(message, error=True)
    else:
        entry.write_error_file("SystemExit", f"exit code {code}; see the message above.", code)
        _print_once(message)


def _print_once(message: str) -> None:
    """Print the message if no other process has claimed it.

    This is not left to rank 0, since a problem of one machine may be unknown to the others. Other
    processes wait until the message is printed, since the launcher ends all processes when one
    exits.
    """
    # Imported here because a single process does not need torch. Torch's stubs lack DistError.
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
    except DistError:  # the launcher or the other process is gone; better to print twice than never
        echo(message, error=True)
        return
    echo(message, error=True)
    store.set(f"{claim}/printed", "")


def _claim(message: str) -> str:
    attempt = environment.read("TORCHELASTIC_RESTART_COUNT")
    return f"cadence/reported/{attempt}/{hashlib.sha256(message.encode()).hexdigest()}"
