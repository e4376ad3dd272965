"""Checkpoints in folders that also hold other files, which are preserved.

A new folder, or one that holds only a checkpoint, is committed by one rename
(:mod:`trainer.checkpoint.layout`). Into any other folder the files are moved one by one::

    folder/notes.txt                    the user's file: left alone
    folder/.cadence-staging/            a save in progress, or one that was killed …
    folder/.cadence-staging/manifest.json      … after which only the moves are left to do

Writing the staged manifest is the commit: the next process that finds it completes the moves. The
old manifest is removed first and the new one moved last, so that no reader takes a mixture of old
and new files for a checkpoint.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainer.checkpoint.atomic import sync, sync_folders
from trainer.checkpoint.layout import commit, discard, locate, open_staging, seal
from trainer.checkpoint.manifest import MANIFEST, is_ours, read_manifest
from trainer.errors import CheckpointError

STAGING = ".cadence-staging"


def open_folder(target: Path) -> Path:
    """Create an empty staging folder for a save to ``target``, whatever that folder holds.

    Raises:
        NotADirectoryError: If ``target`` is a file.
        OSError: If the staging folder cannot be created.
    """
    if target.exists() and not target.is_dir():
        raise NotADirectoryError(f"{target} is a file; a checkpoint needs a folder.")
    recover(target)
    if not is_shared(target):
        return open_staging(target)
    staging = target / STAGING
    if staging.exists():
        shutil.rmtree(staging)
    staging.mkdir()
    return staging


def commit_folder(staging: Path, target: Path, manifest: Mapping[str, Any]) -> Path:
    """Commit a staging folder from :func:`open_folder` to ``target``, durably.

    Files of an earlier checkpoint there are removed; the user's files stay, except one with the
    name of a checkpoint file, which is replaced.

    Raises:
        TypeError: If a field of ``manifest`` is not valid JSON.
        OSError: If writing fails.
    """
    if staging.parent != target:
        return commit(staging, target, manifest)
    seal(staging, manifest)
    _move(staging, target)
    return target


def recover(target: Path) -> Path:
    """Complete the moves of a save that was killed after its commit, if there was one.

    Call it on one rank, before ``target`` is read.

    Returns:
        ``target``, or the path to which a killed save has set it aside.
    """
    if is_ours(target / STAGING):
        _move(target / STAGING, target)
    return locate(target)


def abandon(staging: Path) -> None:
    """Discard a failed save, unless it was committed: the next reader then completes it."""
    if staging.name != STAGING or not is_ours(staging):
        discard(staging)


def is_shared(target: Path) -> bool:
    """Return whether a folder holds the user's files; also if it is empty: it may be a mount."""
    if not target.exists():
        return False
    # A mount point or the working folder cannot be replaced, and a symlink must stay one.
    if target.is_symlink() or os.path.ismount(target) or target.resolve() == Path.cwd().resolve():
        return True
    if not is_ours(target):
        return True  # also a damaged checkpoint: which of its files are ours is unknown
    listed = {MANIFEST, *read_manifest(target)["files"]}
    folders = {parent.as_posix() for name in listed for parent in Path(name).parents}
    names = {entry.relative_to(target).as_posix() for entry in target.rglob("*")}
    return bool(names - listed - folders)


def _move(staging: Path, target: Path) -> None:
    new, old = _listed(staging), _listed(target)
    (target / MANIFEST).unlink(missing_ok=True)
    sync(target)
    for name in new:
        if (staging / name).exists():  # otherwise it was moved before the process was killed
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            os.replace(staging / name, target / name)
    for name in set(old) - set(new):
        (target / name).unlink(missing_ok=True)
    sync_folders(target)
    os.replace(staging / MANIFEST, target / MANIFEST)
    sync(target)
    shutil.rmtree(staging)


def _listed(folder: Path) -> list[str]:
    """Return the files that a folder's manifest lists; none if it is missing or damaged."""
    try:
        return list(read_manifest(folder)["files"])
    except CheckpointError:
        return []
