"""Paths from users, and files opened by a known name.

In a folder that others can write to, a file may have been replaced by something else.
"""

from __future__ import annotations

import errno
import glob
import json
import os
import re
import stat
import uuid
from pathlib import Path
from typing import Any

LARGEST = 1 << 26  # bytes; the limit for JSON files that are read whole

_HIDDEN = ".cadence-writing-"


def regular(path: str | os.PathLike[str], flags: int) -> int:
    """Open a regular file; pass it to `open` or `io.FileIO` as their ``opener``.

    A symlink instead of the file is not followed, and opening a pipe does not block. The parent
    folders may be symlinks.

    Args:
        path: the file.
        flags: as for `os.open`.

    Returns:
        The descriptor.

    Raises:
        OSError: the path is a symlink, a folder, a device or a pipe, or it cannot be opened.
    """
    if os.path.islink(path):
        raise OSError(errno.ELOOP, "It is a link, which is not followed", os.fspath(path))
    safe = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
    descriptor = os.open(path, flags & ~os.O_TRUNC | safe, 0o666)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "It is not a regular file", os.fspath(path))
        if flags & os.O_TRUNC:
            os.ftruncate(descriptor, 0)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def hidden_beside(file: Path) -> Path:
    """Create an empty hidden temporary file beside `file`, to be renamed to it later."""
    hidden = file.with_name(f"{_HIDDEN}{os.getpid()}-{uuid.uuid4().hex[:12]}-{file.name}")
    hidden.touch(exist_ok=False)  # exclusive creation: never opens an existing file or symlink
    return hidden


def sweep_hidden(file: Path) -> None:
    """Remove temporary files of killed processes; no process may be writing `file`."""
    for left in file.parent.glob(f"{_HIDDEN}*-{glob.escape(file.name)}"):
        left.unlink(missing_ok=True)


def read_bytes(path: str | os.PathLike[str], limit: int) -> bytes:
    """Read a regular file.

    Args:
        path: the file.
        limit: the maximum size in bytes.

    Raises:
        OSError: the file cannot be opened, see `regular`.
        ValueError: the file is larger.
    """
    with open(path, "rb", opener=regular) as stream:
        size = os.fstat(stream.fileno()).st_size
        if size > limit:
            raise ValueError(f"it has {size:,} bytes, more than the {limit:,} that are read")
        return stream.read(size)  # no more, since the buffer is allocated first


def read_json(path: str | os.PathLike[str], limit: int = LARGEST) -> Any:
    """Read a regular file of JSON.

    Args:
        path: the file.
        limit: the maximum size in bytes.

    Raises:
        OSError: the file cannot be opened, see `regular`.
        ValueError: the file is larger, is not JSON, or is nested too deeply.
    """
    try:
        return json.loads(read_bytes(path, limit))
    except RecursionError as error:
        raise ValueError(f"its brackets are nested too deeply ({error})") from error


def with_home(name: str, path: str | os.PathLike[str]) -> str:
    """Return a path with ``~`` replaced by the home directory.

    Args:
        name: The argument's name, for errors.
        path: Its value.

    Raises:
        ValueError: The path is a URL, or the home directory is unknown.
    """
    if re.match(r"[a-z][a-z0-9+]+:/", text := os.fspath(path), re.IGNORECASE):
        raise ValueError(
            f"{name} is {text!r}, but files are written to a local folder. To copy checkpoints to "
            "a bucket, use ModelCheckpoint(mirror=…)."
        )
    known = os.path.expanduser(path)  # Path.expanduser would also expand ./~
    if known.startswith("~"):
        raise ValueError(
            f"{name} is {known!r}, but that home folder is unknown. Give the whole path, or "
            "./~… for a folder of that name."
        )
    return known


def absolute_path(name: str, path: str | os.PathLike[str]) -> Path:
    """Return `with_home` as an absolute path, because hooks may change the working directory."""
    return Path(with_home(name, path)).absolute()


def absolute_folder(dirpath: str | os.PathLike[str] | None) -> Path | None:
    """Return a callback's ``dirpath`` as an absolute path; None if it is None or empty."""
    return None if dirpath is None or dirpath == "" else absolute_path("dirpath", dirpath)
