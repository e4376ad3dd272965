"""The version of the code that a run uses."""

from __future__ import annotations

import logging
import os
from pathlib import Path

_logger = logging.getLogger("trackers")


def git_commit(folder: str | os.PathLike[str]) -> str | None:
    """Return the commit of the git repository around a folder; git need not be installed.

    Uncommitted changes are not detected.

    Args:
        folder: a folder in the working tree.

    Returns:
        The hash in hexadecimal digits; None without a repository, before its first commit, and,
        with a warning, if its files cannot be read.
    """
    try:
        return _commit(folder)
    except OSError as error:  # somebody else's files, or a folder that is gone
        _logger.warning("The commit of the code cannot be read: %s.", error)
        return None


def _commit(folder: str | os.PathLike[str]) -> str | None:
    here = Path(folder).resolve()
    for parent in (here, *here.parents):
        git = parent / ".git"
        if git.is_file():  # in a submodule or another working tree, it points to the real folder
            git = parent / _text(git).removeprefix("gitdir:").strip()
        if (git / "HEAD").is_file():
            return _resolve(git)
    return None


def _resolve(git: Path) -> str | None:
    head = _text(git / "HEAD").strip()
    if not head.startswith("ref:"):
        return head
    name = head.removeprefix("ref:").strip()
    link = git / "commondir"
    common = git / _text(link).strip() if link.is_file() else git
    for path in (git / name, common / name):
        if path.is_file():
            return _text(path).strip()
    packed = common / "packed-refs"
    lines = _text(packed).splitlines() if packed.is_file() else []
    return next((line.split()[0] for line in lines if line.endswith(f" {name}")), None)


def _text(path: Path) -> str:
    """Return the text of a file, decoded as file names are, since it may be a path."""
    return os.fsdecode(path.read_bytes())
