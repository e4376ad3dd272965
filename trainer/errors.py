"""The errors that Cadence raises where no built-in exception fits.

Invalid input raises a plain ``ValueError`` or ``TypeError`` at once. The types here are for errors
that occur later::

    CheckpointError   a checkpoint is missing, damaged, of another library or run, or not written
    MetricError       ranks disagree about what was logged, or `log` was called where it cannot work
    DistributedOperationException
                      ranks called different collectives, or one with tensors that do not fit
    Preempted         not an error: a signal or the time limit ended the run after a save
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterable
from signal import Signals
from typing import Any

# Characters that a terminal interprets as commands: ESC and other control characters.
_CONTROLS = {
    code: f"\\x{code:02x}" for code in (*range(0x20), *range(0x7F, 0xA0)) if chr(code) not in "\t\n"
}


def printable(text: str) -> str:
    """Return text for a terminal: control characters, e.g. in file names, appear as escapes."""
    return text.translate(_CONTROLS)


def echo(text: object = "", *, error: bool = False) -> None:
    """Print text, with `error` to standard error; control characters are escaped."""
    stream = sys.stderr if error else sys.stdout
    print(printable(str(text)), file=stream, flush=error)


def module_logger(name: str) -> logging.Logger:
    """Return the logger of one of our modules, which escapes control characters in messages."""
    logger = logging.getLogger(name)
    logger.addFilter(_escape)
    return logger


def _escape(record: logging.LogRecord) -> bool:
    text = record.getMessage()
    if (shown := printable(text)) != text:
        record.msg, record.args = shown, None
    return True


class _Error(RuntimeError):
    """An error whose message contains names from files, which may be untrusted."""

    def __str__(self) -> str:
        return printable(super().__str__())


class CheckpointError(_Error):
    """A checkpoint is missing, damaged, from another library or run, or could not be written."""


class LaterReleaseError(CheckpointError):
    """A later release wrote the checkpoint: it is intact, but this release cannot read it."""


class MetricError(_Error):
    """Ranks disagree about the logged metrics, or ``log`` was called where it cannot work."""


class DistributedOperationException(_Error):
    """Ranks called different collectives, or the same one with tensors that do not match.

    Attributes:
        plans: The operation of each rank.
    """

    def __init__(self, message: str = "", plans: Iterable[str] = ()) -> None:
        super().__init__(message)
        self.plans = tuple(plans)


TIMEOUT_EXIT_CODE = 124  # the exit code of timeout(1)


class Preempted(SystemExit):
    """A signal or the time limit ended the run, after its state was saved.

    A ``SystemExit``: uncaught, it ends the process with exit status `code` and no traceback.

    Attributes:
        code: The exit status a shell reports for the signal: 143 for SIGTERM, 130 for SIGINT
            (Ctrl-C), 138 for SIGUSR1; 124 for the end of ``max_time``.
    """

    def __str__(self) -> str:  # shown by notebooks
        whys: dict[Any, str] = {128 + each: f" by {each.name}" for each in Signals}
        why = (whys | {TIMEOUT_EXIT_CODE: " by max_time"}).get(self.code, "")
        return f"the run was ended{why} (exit code {self.code})"
