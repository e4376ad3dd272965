"""Atomic and durable writes."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

_TEMPORARY = ".cadence-writing-"


def write_aside(file: Path, write: Callable[[Path], object]) -> Path:
    """Write a file under a hidden name beside its final path, and sync it to disk.

    Args:
        file: The final path; the caller renames the result to it.
        write: Writes to the path that it is given.

    Returns:
        The hidden file. If ``write`` fails, it is removed.
    """
    # The name includes the process id, since another process may write the same file.
    temporary = file.with_name(f"{_TEMPORARY}{os.getpid()}-{file.name}")
    try:
        write(temporary)
        sync(temporary)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    return temporary


def write_whole(file: Path, write: Callable[[Path], object]) -> None:
    """Write a file atomically, replacing an existing one."""
    os.replace(write_aside(file, write), file)
    sync(file.parent)


def sweep_aside(file: Path) -> None:
    """Remove hidden files that killed processes left; no other process may be writing this file."""
    for left in file.parent.glob(f"{_TEMPORARY}*-{file.name}"):
        left.unlink(missing_ok=True)


def sync(path: Path) -> None:
    """Sync a file's contents, or a folder's entries, to disk."""
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
