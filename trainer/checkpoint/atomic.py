"""Atomic and durable writes."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from trackers.files import hidden_beside


def write_aside(file: Path, write: Callable[[Path], object]) -> Path:
    """Write a file under a hidden temporary name beside its final path, and fsync it.

    Args:
        file: The final path; the caller renames the result to it.
        write: Writes to the path that it is given.

    Returns:
        The hidden file. If ``write`` fails, it is removed.
    """
    temporary = hidden_beside(file)
    try:
        write(temporary)
        sync(temporary)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    return temporary


def write_whole(file: Path, write: Callable[[Path], object]) -> None:
    """Write a file atomically (temporary file, then rename), replacing an existing one."""
    os.replace(write_aside(file, write), file)
    sync(file.parent)


def sync(path: Path) -> None:
    """Call fsync on a file, or on a folder to sync its directory entries."""
    if os.name == "nt" and path.is_dir():
        return  # Windows cannot open a folder; its file system orders renames itself
    descriptor = os.open(path, os.O_RDWR if os.name == "nt" else os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_folders(folder: Path) -> None:
    """Sync the directory entries of a folder and its subfolders to disk."""
    for each, _, _ in os.walk(folder, topdown=False):
        sync(Path(each))
