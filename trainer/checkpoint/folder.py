"""Checkpoints in folders that hold other files too, which stay.

A new folder, or one that holds nothing but a checkpoint, is committed by one rename
(:mod:`trainer.checkpoint.layout`). Into any other, the user's, the files are moved one by one::

    folder/notes.txt                    the user's: left alone
    folder/.cadence-staging/            a save that runs, or was killed …
    folder/.cadence-staging/manifest.json      … and if this is there, it only has to be moved

The staged manifest is the commit: whoever finds it moves what was not moved yet. The old manifest
goes first and the new one comes last, so no reader takes old and new files for one checkpoint.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainer.checkpoint.layout import (
    MANIFEST,
    commit,
    discard,
    is_ours,
    locate,
    open_staging,
    read_manifest,
    seal,
    sync,
    sync_folders,
)
from trainer.errors import CheckpointError

STAGING = ".cadence-staging"


def open_folder(target: Path) -> Path:
    """Make the empty staging folder of a save to ``target``, whatever that holds.

    Raises:
        NotADirectoryError: If ``target`` is a file.
        OSError: If the folder cannot be made.
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
    """Make what :func:`open_folder` began visible in ``target``, durably.

    Files of an earlier checkpoint there go; files that are neither its nor ours stay. Where the
    user's file has the name of one of ours, ours replaces it.

    Raises:
        TypeError: If JSON cannot hold a field of ``manifest``.
        OSError: If the disk refuses.
    """
    if staging.parent != target:
        return commit(staging, target, manifest)
    seal(staging, manifest)
    _move(staging, target)
    return target


def recover(target: Path) -> Path:
    """Finish what a killed save had committed but not moved; do nothing where there is no such.

    Call it on one rank, before ``target`` is read.

    Returns:
        ``target``, or where a killed save had set it aside.
    """
    if is_ours(target / STAGING):
        _move(target / STAGING, target)
    return locate(target)


def abandon(staging: Path) -> None:
    """Give up a save that failed, unless it is committed: then the next reader finishes it."""
    if staging.name != STAGING or not is_ours(staging):
        discard(staging)


def is_shared(target: Path) -> bool:
    """Whether a folder is the user's, wholly or in part; an empty one is: it may be a mount."""
    if not target.exists():
        return False
    # A mount or the working folder cannot be replaced, and a link shall stay one.
    if target.is_symlink() or os.path.ismount(target) or target.resolve() == Path.cwd().resolve():
        return True
    if not is_ours(target):
        return True  # also a damaged one: what is ours in it cannot be told
    listed = {MANIFEST, *read_manifest(target)["files"]}
    folders = {parent.as_posix() for name in listed for parent in Path(name).parents}
    names = {entry.relative_to(target).as_posix() for entry in target.rglob("*")}
    return bool(names - listed - folders)


def _move(staging: Path, target: Path) -> None:
    new, old = _listed(staging), _listed(target)
    (target / MANIFEST).unlink(missing_ok=True)
    sync(target)
    for name in new:
        if (staging / name).exists():  # else it was moved before the kill
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            os.replace(staging / name, target / name)
    for name in set(old) - set(new):
        (target / name).unlink(missing_ok=True)
    sync_folders(target)
    os.replace(staging / MANIFEST, target / MANIFEST)
    sync(target)
    shutil.rmtree(staging)


def _listed(folder: Path) -> list[str]:
    """The files that a folder's manifest names; of a damaged one, none."""
    try:
        return list(read_manifest(folder)["files"])
    except CheckpointError:
        return []
