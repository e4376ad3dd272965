"""The version of the code that a run uses: the git commit."""

from __future__ import annotations

import os
import subprocess

from trainer.errors import module_logger

_TIMEOUT = 10  # seconds, for folders on a network

_logger = module_logger("trackers")


def git_commit(folder: str | os.PathLike[str]) -> str | None:
    """Return the commit of the git repository that contains a folder, as reported by git.

    Call it on the thread that starts data loader workers. A worker forked while git starts would
    inherit git's pipe, and the caller would wait until the worker ends.

    Uncommitted changes are not detected. Git ignores a repository that belongs to another user,
    because anyone who can write to a parent folder can put one there.

    Args:
        folder: a folder in the working tree.

    Returns:
        The hash in hexadecimal digits. None without git, without a repository and before its first
        commit.
    """
    command = ["git", "-C", os.fspath(folder), "rev-parse", "--quiet", "--verify", "HEAD"]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_TIMEOUT, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        _logger.debug("The git commit of the code could not be read: %s", error)
        return None
    return done.stdout.strip() or None
