"""Checkpoints in folders that also hold other files, which are preserved.

A new folder, or one that holds only a checkpoint, is committed by one rename
(:mod:`trainer.checkpoint.layout`). Into any other folder the files are moved one by one::

    folder/notes.txt                    the user's file: left alone
    folder/.cadence-staging/            a save in progress, or one that was killed …
    folder/.cadence-staging/manifest.json      … after which its files only need their names

Writing the staged manifest is the commit: from then on readers take the staging folder, which stays
whole until every file has its name in the folder, and the next save completes that. The old
manifest is removed first and the new one comes last, so that no reader takes a mixture of old and
new files for a checkpoint. Reading changes nothing on the disk.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Collection, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from trainer.checkpoint.atomic import sync, sync_folders
from trainer.checkpoint.layout import commit, discard, locate, open_staging, seal
from trainer.checkpoint.manifest import (
    MANIFEST,
    check_folders,
    is_ours,
    open_listed,
    read_manifest,
    strangers,
    verify,
)
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
    if os.path.lexists(staging):
        shutil.rmtree(staging)  # refuses a link
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
    _put_in_place(staging, target, read_manifest(staging)["files"])
    return target


def recover(target: Path) -> Path:
    """Complete a save to a folder that was killed after its commit, if there was one.

    Call it on one rank, before ``target`` is written.

    Returns:
        ``target``, or the path to which a killed save has set it aside.
    """
    staging = target / STAGING
    if (manifest := _committed(staging)) is not None:
        _put_in_place(staging, target, manifest["files"])
    return locate(target)


def examine(target: Path, *, hashes: bool = True) -> tuple[Path, dict[str, Any]]:
    """Check the files of a checkpoint against its manifest; nothing is changed on the disk.

    Args:
        target: The checkpoint.
        hashes: See :func:`trainer.checkpoint.verify`.

    Returns:
        The folder to read, and its manifest: ``target``, the path to which a killed save has set it
        aside, or the staging folder of a save that was killed after its commit.

    Raises:
        CheckpointError: See :func:`trainer.checkpoint.verify`.
    """
    path = locate(target)
    if (manifest := _committed(path / STAGING, hashes=hashes)) is not None:
        return path / STAGING, manifest
    return path, verify(path, hashes=hashes)


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
    return bool(strangers(target, read_manifest(target)))


def _committed(staging: Path, *, hashes: bool = True) -> dict[str, Any] | None:
    """Return the manifest of a staging folder that is complete and intact; else None."""
    try:
        return None if staging.is_symlink() else verify(staging, hashes=hashes)
    except CheckpointError:
        return None


def _put_in_place(staging: Path, target: Path, new: Collection[str]) -> None:
    for name in new:
        check_folders(target, name)
    old = list(read_manifest(target)["files"]) if is_ours(target) else []
    (target / MANIFEST).unlink(missing_ok=True)
    sync(target)
    for name in new:
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        _name(staging / name, target / name, staging)
    for name in set(old) - set(new):
        _delete_regular(target, name)
    sync_folders(target)
    _name(staging / MANIFEST, target / MANIFEST, staging)
    sync(target)
    (staging / MANIFEST).unlink()  # from here on readers take the target
    shutil.rmtree(staging)


def _name(source: Path, goal: Path, staging: Path) -> None:
    """Give a file another name too, atomically; copy it where the file system has no hard links."""
    other = staging / f"{STAGING}-link"
    other.unlink(missing_ok=True)
    try:
        os.link(source, other, follow_symlinks=False)
    except OSError:
        shutil.copyfile(source, other)
        sync(other)
    os.replace(other, goal)
    other.unlink(missing_ok=True)  # it stays if both were names of the same file


def _delete_regular(target: Path, name: str) -> None:
    """Delete a file of an earlier checkpoint, unless something else has taken its place."""
    with suppress(OSError):
        open_listed(target, name).close()
        (target / name).unlink()
