"""Tracebacks of errors that leave the Trainer, reduced to the user's frames."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType

from trainer.environment import read_flag

FULL = "CADENCE_FULL_TRACEBACK"
_HERE = Path(__file__).parents[1]
_PACKAGES = tuple(f"{_HERE / name}{os.sep}" for name in ("trainer", "callbacks", "trackers"))
_BETWEEN = contextlib.__file__, "<string>"  # the latter is the constructor of a dataclass


class HiddenFrames:
    """Removes the frames of Cadence from the tracebacks of errors that leave its block.

    The frames through which torch calls the user's code for Cadence are removed, too: those of
    DDP's forward pass, of a backward pass or of a loader. The innermost frame always stays, so that
    an error raised by Cadence shows its origin. Other errors get a note with the number of hidden
    frames, which ``CADENCE_FULL_TRACEBACK=1`` shows. Python 3.10 shows all frames: there a context
    manager cannot replace the traceback of its error.

    Args:
        where: Returns the position in the run at which the error occurred, for the note; may be
            empty.
    """

    def __init__(self, where: Callable[[], str] = str) -> None:
        self._where = where

    def __enter__(self) -> None:
        """Do nothing."""

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Shorten the tracebacks of the error and of its causes."""
        hidden = sum(map(shorten, _chain(error)))
        if (
            error is not None
            and hidden
            and isinstance(error, Exception)
            and hasattr(error, "add_note")
            and not any(FULL in note for note in getattr(error, "__notes__", ()))
        ):
            where = self._where()
            error.add_note(
                f"{where}{': ' if where else ''}{hidden} frame{'s' if hidden > 1 else ''} hidden, "
                f"{FULL}=1 shows them"
            )


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error, its causes, and the errors that were being handled when it was raised."""
    seen: set[int] = set()
    waiting = [error]
    while waiting:
        following = waiting.pop()
        if following is not None and id(following) not in seen:
            seen.add(id(following))
            yield following
            waiting += following.__cause__, following.__context__


def shorten(error: BaseException) -> int:
    """Remove the frames of Cadence from a traceback, except the innermost; see `HiddenFrames`.

    Returns:
        The number of removed frames; 0 if Cadence itself raised the error.
    """
    import torch  # slow, and some commands do not need it

    if read_flag(FULL):
        return 0
    entries: list[TracebackType] = []
    entry = error.__traceback__
    while entry is not None:
        entries.append(entry)
        entry = entry.tb_next
    of_torch = f"{Path(torch.__file__).parent}{os.sep}"
    files = [entry.tb_frame.f_code.co_filename for entry in entries]
    # Frames of a failure inside torch stay, even if Cadence called torch.
    last = max((n for n, file in enumerate(files) if not file.startswith(of_torch)), default=0)
    ours: list[bool] = []
    for number, file in enumerate(files):
        # Below our frames, contextlib enters our context managers, and torch calls the user's code.
        between = file in _BETWEEN or (file.startswith(of_torch) and number < last)
        ours.append(file.startswith(_PACKAGES) or (between and ours[-1:] == [True]))
    kept: TracebackType | None = None
    for entry, hide in zip(reversed(entries), reversed([*ours[:-1], False]), strict=False):
        if not hide:
            kept = TracebackType(kept, entry.tb_frame, entry.tb_lasti, entry.tb_lineno)
    error.__traceback__ = kept
    return 0 if ours[-1:] == [True] else sum(ours)
