"""The version of the code that a run uses: the git commit."""

from __future__ import annotations

import os
import subprocess


def git_commit(folder: str | os.PathLike[str]) -> str | None:
    """Return the commit of the git repository that contains a folder, by asking git.

    Uncommitted changes are not detected.

    Args:
        folder: a folder in the working tree.

    Returns:
        The hash in hexadecimal digits. None without git, without a repository, before its first
        commit, or if git refuses the repository, as one of another user.
    """
    command = ["git", "rev-parse", "--verify", "HEAD"]
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    except OSError:  # git is not installed, or the folder is gone
        return None
    return done.stdout.strip() or None
