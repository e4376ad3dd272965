"""Launching as a library: the parts of `trainer launch` and of the notebook launchers.

| module | what is there |
|---|---|
| `configuration` `cluster` | the configuration file, and how a script is started |
| `settings` `options` | the settings that a file and a command line have in common; the options |
| `plan` | from options, file and environment to commands and variables |
| `group` `rendezvous` | the processes of one machine, watched by torch's agent; how they meet |
| `entry` `failure` | what each process runs, and which failure was the first |
| `notebook` `function_group` `remote_call` | functions instead of scripts |

Neither this file nor the modules that read the configuration import torch.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager


class LaunchError(Exception):
    """Nothing can be started, or the rendezvous of the machines failed.

    Attributes:
        code: The exit code of a command that ends with this error.
    """

    def __init__(self, message: str, code: int = 1) -> None:
        super().__init__(message)
        self.code = code


@contextmanager
def sigint_default() -> Iterator[None]:
    """Inside, Ctrl-C ends the process immediately and silently; for code that imports torch.

    The import takes seconds, and C code in it that imports numpy may swallow ``KeyboardInterrupt``,
    so that the command would continue.
    """
    usual = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if not usual or threading.current_thread() is not threading.main_thread():
        yield
        return
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
