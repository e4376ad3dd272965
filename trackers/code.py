"""Which version of the code a run is of."""

from __future__ import annotations

import os
from pathlib import Path


def git_commit(folder: str | os.PathLike[str]) -> str | None:
    """The commit that the git repository around a folder is at; git itself need not be there.

    Changes that are not committed cannot be seen in this way.

    Args:
        folder: a folder in the working tree.

    Returns:
        The hash in hexadecimal digits; None without a repository, or before its first commit.

    Raises:
        OSError: the files of the repository cannot be read.
    """
    here = Path(folder).resolve()
    for parent in (here, *here.parents):
        git = parent / ".git"
        if git.is_file():  # of a submodule or another working tree: it says where the real one is
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
    """What a file says, of whose letters none is lost: it may name a folder."""
    return os.fsdecode(path.read_bytes())
