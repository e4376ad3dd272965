"""Commit a checkpoint into a folder that also holds the user's files, which are preserved.

A new folder, or one that holds only a checkpoint, is committed by one rename
(:mod:`trainer.checkpoint.layout`). A folder with other files cannot be replaced, so the files of
the checkpoint are moved into it one by one::

    folder/notes.txt                    the user's file: left alone
    folder/.cadence-staging/            a save in progress, or one that was killed
    folder/.cadence-staging/manifest.json      present once the save is committed

The save is committed when the manifest in the staging folder is written. From then on readers use
the staging folder. It stays complete until every file is also linked into the target folder. If the
process is killed before that, the next save finishes the move. The target's old manifest is removed
before the first file moves and its new manifest is written last, so that no reader can take a
mixture of old and new files for a checkpoint. Reading changes nothing on the disk.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Collection, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from trainer.checkpoint.atomic import sync, sync_folders
from trainer.checkpoint.layout import clear, commit, discard, locate, open_staging, seal
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
    clear(staging)
    staging.mkdir()
    return staging


def commit_folder(staging: Path, target: Path, manifest: Mapping[str, Any]) -> Path:
    """Commit a staging folder from :func:`open_folder` to ``target``, synced to disk.

    Files of an earlier checkpoint in ``target`` are removed. The user's files stay, except that a
    file with the same name as one of the checkpoint's is replaced.

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
    """Finish a save to ``target`` that was killed after its commit, if there is one.

    Call it on one rank, before ``target`` is written.

    Returns:
        ``target``, or the path to which a killed save renamed it.
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
        The folder to read, and its manifest. The folder is ``target``, or the path to which a
        killed save renamed it, or the staging folder of a save that was killed after its commit.

    Raises:
        CheckpointError: See :func:`trainer.checkpoint.verify`.
    """
    path = locate(target)
    if (manifest := _committed(path / STAGING, hashes=hashes)) is not None:
        return path / STAGING, manifest
    return path, verify(path, hashes=hashes)


def abandon(staging: Path) -> None:
    """Delete the staging folder of a failed save, unless the save was already committed."""
    if staging.name != STAGING or not is_ours(staging):
        discard(staging)


def is_shared(target: Path) -> bool:
    """Return whether a folder may hold the user's files, so that it must not be replaced."""
    if not target.exists():
        return False
    # A mount point or the working folder cannot be replaced, and a symlink must stay one.
    if target.is_symlink() or os.path.ismount(target) or target.resolve() == Path.cwd().resolve():
        return True
    if not is_ours(target):
        return True  # a damaged manifest does not tell which files are the checkpoint's
    return bool(strangers(target, read_manifest(target)))


def _committed(staging: Path, *, hashes: bool = True) -> dict[str, Any] | None:
    """Return the manifest of a complete and intact staging folder, else None."""
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
    (staging / MANIFEST).unlink()  # from here on readers use the target
    shutil.rmtree(staging)


def _name(source: Path, goal: Path, staging: Path) -> None:
    """Hard-link a file to a second name, atomically; copy it if there are no hard links."""
    other = staging / f"{STAGING}-link"
    other.unlink(missing_ok=True)
    try:
        os.link(source, other, follow_symlinks=False)
    except OSError:
        shutil.copyfile(source, other)
        sync(other)
    os.replace(other, goal)
    other.unlink(missing_ok=True)  # rename does nothing if both names are the same file


def _delete_regular(target: Path, name: str) -> None:
    """Delete a file of an earlier checkpoint, unless something else has taken its place."""
    with suppress(OSError):
        open_listed(target, name).close()
        (target / name).unlink()
