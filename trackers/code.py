"""The version of the code that a run uses: the git commit."""

from __future__ import annotations

import os
import re
from pathlib import Path, PurePosixPath

from trainer.errors import module_logger
from trainer.files import read_bytes

_HASH = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
_LARGEST = 1 << 26  # bytes of the packed references

_logger = module_logger("trackers")


def git_commit(folder: str | os.PathLike[str]) -> str | None:
    """Return the commit of the git repository that contains a folder; git need not be installed.

    Uncommitted changes are not detected. Like git, it ignores a repository that belongs to another
    user, because anybody who can write to a parent folder can put one there.

    Args:
        folder: a folder in the working tree.

    Returns:
        The hash in hexadecimal digits. None without a repository or before its first commit. None
        with a warning if its files cannot be read or belong to another user.
    """
    try:
        found = _commit(folder)
    except (OSError, ValueError) as error:  # another user's files, or a deleted folder
        _logger.warning("The commit of the code cannot be read: %s.", error)
        return None
    return found if found and _HASH.fullmatch(found) else None


def _commit(folder: str | os.PathLike[str]) -> str | None:
    here = Path(folder).resolve()
    for parent in (here, *here.parents):
        git = parent / ".git"
        if git.is_file():  # in a submodule or another working tree, it points to the real folder
            _expect_own(git)
            git = parent / _text(git).removeprefix("gitdir:").strip()
        if (git / "HEAD").is_file():
            _expect_own(git)
            return _resolve(git)
    return None


def _resolve(git: Path) -> str | None:
    head = _text(git / "HEAD").strip()
    if not head.startswith("ref:"):
        return head
    name = head.removeprefix("ref:").strip()
    if not name.startswith("refs/") or ".." in PurePosixPath(name).parts:
        return None
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
    return os.fsdecode(read_bytes(path, _LARGEST))


def _expect_own(path: Path) -> None:
    """Raise if a file or folder belongs to another user; for a symlink, the link's owner counts."""
    if hasattr(os, "geteuid") and path.lstat().st_uid != os.geteuid():
        raise PermissionError(f"{path} belongs to another user")
