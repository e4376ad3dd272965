"""The errors that Cadence raises where Python has no better name for them.

Wrong input is a plain ``ValueError`` or ``TypeError``, raised where it entered. The types here are
for what goes wrong later::

    CheckpointError   a checkpoint is missing, damaged, foreign or could not be written
    MetricError       ranks disagree about what was logged, or `log` was called where it cannot work
    DistributedOperationException
                      ranks called different collectives, or one with tensors that do not fit
    Preempted         not an error: a signal ended the run after it was saved
"""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches
from signal import Signals
from typing import Any


class CheckpointError(RuntimeError):
    """A checkpoint is missing, damaged, foreign, or could not be written."""


class LaterReleaseError(CheckpointError):
    """A later release wrote the checkpoint: it is sound, but cannot be read here."""


class MetricError(RuntimeError):
    """Ranks disagree about what was logged, or ``log`` was called where it cannot work."""


class DistributedOperationException(RuntimeError):
    """Ranks called different collectives, or the same one with tensors that do not fit.

    Attributes:
        plans: What each rank was about to do.
    """

    def __init__(self, message: str = "", plans: Iterable[str] = ()) -> None:
        super().__init__(message)
        self.plans = tuple(plans)


class Preempted(SystemExit):
    """A signal or the clock ended the run, after what it had reached was saved.

    A ``SystemExit``: uncaught it ends the process, with `code` and without a traceback.

    Attributes:
        code: What a shell reports for the signal: 143 for SIGTERM, 130 for SIGINT (Ctrl-C), 138 for
            SIGUSR1; 124 for the end of ``max_time``.
    """

    def __str__(self) -> str:  # which notebooks show
        whys: dict[Any, str] = {128 + each: f" by {each.name}" for each in Signals}
        why = (whys | {124: " by max_time"}).get(self.code, "")
        return f"the run was ended{why} (exit code {self.code})"


def choose(what: str, value: object, choices: Iterable[str]) -> str:
    """The text of an error about a value outside its choices, with the nearest of them.

    Args:
        what: What the value stands for, as the user knows it: an argument or a key.
        value: What was given.
        choices: What could have been given.
    """
    names = sorted(choices)
    near = get_close_matches(str(value), names, n=1)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    return f"{what} is {value!r}; it must be one of {', '.join(map(repr, names))}.{hint}"
