"""Single files that appear whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from trainer.checkpoint.layout import sync

_TEMPORARY = ".cadence-writing-"


def write_aside(file: Path, write: Callable[[Path], object]) -> Path:
    """Write a file beside its place, under a hidden name, and wait until it is on the disk.

    Args:
        file: Where it will belong; a rename of the result puts it there.
        write: Writes the file that it is given.

    Returns:
        The hidden file. If ``write`` fails nothing is left of it.
    """
    # Named after its process too: whoever writes the same file at the same time has another.
    temporary = file.with_name(f"{_TEMPORARY}{os.getpid()}-{file.name}")
    try:
        write(temporary)
        sync(temporary)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    return temporary


def write_whole(file: Path, write: Callable[[Path], object]) -> None:
    """Write a file so that its name never stands for a part of it; one of that name is replaced."""
    os.replace(write_aside(file, write), file)
    sync(file.parent)


def sweep_aside(file: Path) -> None:
    """Remove what killed processes have left of this file; nobody else may be writing it now."""
    for left in file.parent.glob(f"{_TEMPORARY}*-{file.name}"):
        left.unlink(missing_ok=True)
