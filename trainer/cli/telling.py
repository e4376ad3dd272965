"""Why a command has ended, said once where several processes run the same one.

Under `trainer launch` each process notes it, and the launcher says what it finds. Under torchrun
the processes have a store in common, where each text is said by the first one that comes with it.
"""

from __future__ import annotations

import hashlib
import os
import sys
from datetime import timedelta

from trainer import environment
from trainer.cli.launch import entry

_PATIENCE = timedelta(seconds=10)  # for one that says the same, before it is ended with the others


class Told(SystemExit):
    """The end of a process after `tell`: its launcher knows why, or need not say it."""


def tell(message: str, code: int) -> None:
    """Have a message reach the user once, whatever the number of processes that end with it.

    The process must end after it: what is noted is read only then.

    Args:
        message: All of it.
        code: What the process is about to exit with.
    """
    if environment.read(entry.MARK) == str(os.getpid()):
        refused = code == 2  # as it would be in another attempt, which the launcher does not make
        noted = entry.note(entry.REFUSED if refused else "SystemExit", message, code)
        if noted and (refused or not entry.is_started_again()):
            return
    if environment.read("TORCHELASTIC_USE_AGENT_STORE") != "True":
        _say(message)
    else:
        entry.note("SystemExit", f"exit code {code}, see what it has said above.", code)
        _say_once(message)


def _say(message: str) -> None:
    print(message, file=sys.stderr, flush=True)


def _say_once(message: str) -> None:
    """Say it unless another process has: each text is claimed by the first that comes with it.

    It is not left to rank 0, which may have nothing to say: what one machine lacks, its processes
    alone know. The others wait until it is said, since the launcher ends all when one has ended.
    """
    # Torch, which a single process needs not; its stubs forget the store.
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
            store.wait([f"{claim}/said"], _PATIENCE)
            return
    except DistError:  # the launcher or the other process is gone: better twice than not at all
        _say(message)
        return
    _say(message)
    store.set(f"{claim}/said", "")


def _claim(message: str) -> str:
    attempt = environment.read("TORCHELASTIC_RESTART_COUNT")
    return f"cadence/told/{attempt}/{hashlib.sha256(message.encode()).hexdigest()}"
