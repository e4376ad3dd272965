"""Folder names on disk and atomic commit: one rename makes a complete checkpoint visible.

A save writes to a staging folder beside its target. :func:`commit` syncs every file, writes the
manifest last and renames the folder to the target's name. So no reader sees a partial checkpoint::

    root/step-00000100/                     a committed checkpoint: it has a manifest
    root/.cadence-staging-step-00000200/    a save in progress, or one that was killed
    root/.cadence-replaced-step-00000100/   the old checkpoint during a save that replaces it
    root/.cadence-trash-step-00000050/      a removal in progress, or one that was killed

Folders with the last three prefixes belong to the library; :func:`sweep` deletes or restores them.
Any other folder that is in the way may hold the user's data. It is quarantined, that is renamed and
never deleted (:func:`set_aside`)::

    root/damaged-step-00000100/             it had no readable manifest
    root/replaced-step-00000100/            an old checkpoint whose folder also held other files
    root/abandoned-step-00000100/           a later checkpoint than the one a run resumed from
"""

from __future__ import annotations

import logging
import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from trainer.checkpoint.atomic import sync, sync_folders
from trainer.checkpoint.manifest import (
    MANIFEST,
    files_in,
    is_folder,
    is_newer,
    is_ours,
    read_manifest,
    strangers,
    write_manifest,
)
from trainer.errors import CheckpointError

_STAGING = ".cadence-staging-"
_REPLACED = ".cadence-replaced-"
_TRASH = ".cadence-trash-"
LEFTOVER = re.compile(r"\.cadence-(staging|replaced|trash)-(.+)")
ASIDE = re.compile(r"(damaged|replaced|abandoned)-(step-\d{8,})(-\d+)?")
NUMBERED = re.compile(r"checkpoint_(\d+)")  # automatic names of the Accelerator's checkpoints
_STEP_NAME = re.compile(r"step-(\d{8}|[1-9]\d{8,})")

logger = logging.getLogger(__name__)


def checkpoint_name(step: int) -> str:
    """Return the folder name of the checkpoint taken after ``step`` updates.

    Raises:
        ValueError: If ``step`` is negative.
    """
    if step < 0:
        raise ValueError(f"step is {step}; it counts updates, so it must be 0 or more.")
    return f"step-{step:08d}"


def step_of(path: str | os.PathLike[str]) -> int | None:
    """Return the step in a checkpoint folder's name, or None if the name is not in our format."""
    match = _STEP_NAME.fullmatch(Path(path).name.removeprefix(_REPLACED))
    return int(match[1]) if match else None


def rank_stem(rank: int) -> str:
    """Return the stem of the files that hold one rank's state: ``rank-00000``."""
    return f"rank-{rank:05d}"


def staging_path(target: Path) -> Path:
    """Return the staging folder of ``target``: beside it, under a name that readers ignore."""
    return target.with_name(_STAGING + target.name)


def open_staging(target: Path) -> Path:
    """Create an empty staging folder for ``target``, deleting one that a killed save left.

    If ``target`` has a step name but is not an intact checkpoint, it is renamed to ``damaged-…``,
    so that the run can save that step.

    Raises:
        CheckpointError: If ``target`` has another name and is not a checkpoint, or is a checkpoint
            of a later release; raised before anything is written.
        OSError: If the folder cannot be created.
    """
    there = step_of(target) is not None and os.path.lexists(target)
    if there and not is_ours(target) and not is_newer(target):
        logger.warning("%s is not an intact checkpoint. It is now %s.", target, set_aside(target))
    _refuse_foreign(target)
    staging = staging_path(target)
    clear(staging)
    staging.mkdir(parents=True)
    return staging


def commit(staging: Path, target: Path, manifest: Mapping[str, Any]) -> Path:
    """Make a staged checkpoint visible under its name, durably and atomically.

    A crash at any time leaves either the new checkpoint or the old one. The old one may then have a
    temporary name, which :func:`locate` and :func:`committed` recognise.

    Args:
        staging: The folder from :func:`open_staging`, complete except for its manifest.
        target: The checkpoint's final path. A committed checkpoint there is replaced.
        manifest: The caller's fields; `to_json` lists the types of values.

    Returns:
        ``target``.

    Raises:
        CheckpointError: If ``target`` exists and is not a checkpoint of this format.
        TypeError: If a field of ``manifest`` cannot be written as JSON.
        ValueError: If the name of a field is reserved by the format.
        OSError: If the disk fails; ``target`` is then unchanged.
    """
    _refuse_foreign(target)
    seal(staging, manifest)
    aside = _aside(target)
    if target.exists():
        _replace(staging, target, aside)
    else:
        os.rename(staging, target)
    sync(target.parent)
    if aside.exists():
        _discard_replaced(aside)
    return target


def seal(staging: Path, manifest: Mapping[str, Any]) -> None:
    """Sync every file in a staging folder to disk, then write its manifest.

    Raises:
        TypeError: If a field of ``manifest`` cannot be written as JSON.
        ValueError: If the name of a field is reserved by the format.
        OSError: If the disk fails.
    """
    for file in files_in(staging):
        sync(file)
    write_manifest(staging, manifest)
    sync_folders(staging)


def locate(path: Path) -> Path:
    """Return ``path``, or its temporary name if a save was killed while replacing it."""
    aside = _aside(path)
    return aside if aside.is_dir() and not path.exists() else path


def set_aside(path: Path, why: Literal["damaged", "replaced", "abandoned"] = "damaged") -> Path:
    """Quarantine a folder or file: rename it so that readers and :func:`sweep` ignore it.

    Returns:
        The new path, such as ``damaged-step-00000100`` beside the old one. If that name exists, a
        number is added.

    Raises:
        OSError: If the rename fails.
    """
    name = f"{why}-{path.name.removeprefix(_REPLACED)}"
    number, target = 1, path.with_name(name)
    while os.path.lexists(target):
        number += 1
        target = path.with_name(f"{name}-{number}")
    os.rename(path, target)
    sync(path.parent)
    return target


def committed(root: Path) -> list[Path]:
    """Return the committed checkpoints with step names in a folder, oldest first.

    They are not verified, so they may be damaged. Staging folders, folders without a manifest and
    folders with other names are left out.
    """
    if not root.is_dir():
        return []
    named = (entry for entry in root.iterdir() if step_of(entry) is not None)
    found = {locate(root / entry.name.removeprefix(_REPLACED)) for entry in named}
    return sorted(
        (path for path in found if (path / MANIFEST).is_file()),
        key=lambda path: step_of(path) or 0,
    )


def without_manifest(root: Path) -> list[Path]:
    """Return folders with a step name but no manifest: damaged checkpoints, or the user's."""
    if not root.is_dir():
        return []
    named = (each for each in root.iterdir() if _STEP_NAME.fullmatch(each.name) and each.is_dir())
    return sorted(path for path in named if not (path / MANIFEST).is_file())


def remove(path: Path) -> None:
    """Delete a checkpoint; it disappears atomically for readers.

    Raises:
        CheckpointError: If ``path`` is not a checkpoint of this format, or if its files could not
            be deleted. In the latter case it is no longer a checkpoint, and the message says where
            the remaining files are.
    """
    if not is_ours(path):
        raise CheckpointError(
            f"{path} has no manifest of this format, so it is not deleted. Delete it by hand if it "
            "is not needed."
        )
    if path.is_symlink():
        raise CheckpointError(f"{path} is a link, so it is not deleted. Delete it by hand.")
    if others := strangers(path, read_manifest(path)):
        raise CheckpointError(
            f"{path} holds files that are not the checkpoint's ({', '.join(others[:3])}), so it is "
            "not deleted. Move them away, or delete it by hand."
        )
    trash = path.with_name(_TRASH + path.name)
    try:
        clear(trash)
        os.rename(path, trash)
        sync(path.parent)
        shutil.rmtree(trash)
    except OSError as error:
        rest = trash if trash.exists() else path
        raise CheckpointError(
            f"Deleting {path} failed: {error}. Its remaining files are in {rest}: delete that."
        ) from error


def sweep(root: Path) -> list[Path]:
    """Clean up the temporary folders that killed saves and removals left in ``root``.

    Nothing else is touched. A checkpoint that a killed save was replacing gets its name back, so
    call this before a checkpoint is chosen. Call it on one rank, while no save runs in ``root``. A
    failure to delete is logged as a warning.

    Returns:
        The leftovers found.
    """
    if not root.is_dir():
        return []
    ours = (_STAGING, _REPLACED, _TRASH)
    leftovers = [
        entry
        for entry in sorted(root.iterdir())
        if entry.name.startswith(ours) and entry.is_dir() and not entry.is_symlink()
    ]
    for entry in leftovers:
        target = root / entry.name.removeprefix(_REPLACED)
        if not target.exists():
            os.rename(entry, target)
            sync(root)
        elif target == entry:
            discard(entry)
        elif is_ours(target):
            _discard_replaced(entry)
    return leftovers


def discard(path: Path) -> None:
    """Delete a staging or trash folder; a failure is logged as a warning."""
    try:
        shutil.rmtree(path)
    except OSError as error:
        if path.exists():
            logger.warning("%s is no longer needed but could not be deleted: %s", path, error)


def clear(path: Path) -> None:
    """Delete a staging or trash folder, if it exists.

    Raises:
        OSError: If it is a symlink or no folder, or cannot be deleted.
    """
    if is_folder(path):
        shutil.rmtree(path)
    elif os.path.lexists(path):
        raise NotADirectoryError(f"{path} is not a real folder; move it away")


def _discard_replaced(aside: Path) -> None:
    """Delete a replaced checkpoint, unless it is a link or its folder holds other files."""
    try:
        manifest = read_manifest(aside) if is_ours(aside) and not aside.is_symlink() else None
        if manifest is None or strangers(aside, manifest):
            kept = set_aside(aside, "replaced")
            logger.warning("The replaced checkpoint held other files: it is now %s.", kept)
            return
        trash = aside.with_name(aside.name.replace(_REPLACED, _TRASH, 1))
        clear(trash)
        os.rename(aside, trash)  # a partial deletion is then trash, not a checkpoint
    except OSError as error:
        logger.warning("%s is no longer needed but could not be moved: %s", aside, error)
    else:
        discard(trash)


def _refuse_foreign(target: Path) -> None:
    if is_newer(target):
        raise CheckpointError(
            f"{target} was written by a later release, so it is not replaced. Continue with that "
            "release, or save elsewhere."
        )
    if os.path.lexists(target) and not is_ours(target):
        raise CheckpointError(
            f"{target} exists and has no manifest of this format, so it is not replaced. Save "
            "under another name, or move it away."
        )


def _replace(staging: Path, target: Path, aside: Path) -> None:
    """Replace ``target`` by ``staging`` with two renames: one cannot replace a non-empty folder."""
    if aside.exists():
        _discard_replaced(aside)
    os.rename(target, aside)
    try:
        os.rename(staging, target)
    except OSError:
        os.rename(aside, target)
        raise


def _aside(path: Path) -> Path:
    named = path if path.name else Path(os.path.abspath(path))  # Path(".") has no name
    return named.with_name(_REPLACED + named.name)
