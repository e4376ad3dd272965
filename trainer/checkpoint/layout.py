"""Names on disk and the commit protocol: a checkpoint is a folder that one rename made visible.

A save fills a staging folder beside its target. :func:`commit` syncs every file, writes the
manifest last and renames the folder to the target's name, so that no reader meets a partial one::

    root/step-00000100/                     a committed checkpoint: it has a manifest
    root/.cadence-staging-step-00000200/    a save that runs, or was killed
    root/.cadence-replaced-step-00000100/   what a save over an existing checkpoint replaces
    root/.cadence-trash-step-00000050/      a removal that runs, or was killed

Folders under the last three names are ours alone; :func:`sweep` clears them. What stands in the way
and may be somebody's is renamed, and never deleted (:func:`set_aside`)::

    root/damaged-step-00000100/             it had no manifest that can be read
    root/replaced-step-00000100/            a checkpoint with files that are not the checkpoint's
    root/abandoned-step-00000100/           the run went on from an earlier one
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from trainer.errors import CheckpointError

FORMAT_VERSION = 1
MANIFEST = "manifest.json"

_STAGING = ".cadence-staging-"
_REPLACED = ".cadence-replaced-"
_TRASH = ".cadence-trash-"
LEFTOVER = re.compile(r"\.cadence-(staging|replaced|trash)-(.+)")
ASIDE = re.compile(r"(damaged|replaced|abandoned)-(step-\d{8,})(-\d+)?")
NUMBERED = re.compile(r"checkpoint_(\d+)")  # as the Accelerator's projects name theirs
_STEP_NAME = re.compile(r"step-(\d{8}|[1-9]\d{8,})")
_OWN_FIELDS = ("format_version", "files", "sha256")

logger = logging.getLogger(__name__)


def checkpoint_name(step: int) -> str:
    """The folder's name of the checkpoint taken after ``step`` updates.

    Raises:
        ValueError: If ``step`` is negative.
    """
    if step < 0:
        raise ValueError(f"step is {step}; it counts updates, so it must be 0 or more.")
    return f"step-{step:08d}"


def step_of(path: str | os.PathLike[str]) -> int | None:
    """The step in the name of a checkpoint's folder, or None where it is not named by us."""
    match = _STEP_NAME.fullmatch(Path(path).name.removeprefix(_REPLACED))
    return int(match[1]) if match else None


def rank_stem(rank: int) -> str:
    """The stem of the files that hold what belongs to one rank: ``rank-00000``."""
    return f"rank-{rank:05d}"


def staging_path(target: Path) -> Path:
    """Where a save of ``target`` is prepared: beside it, under a name that no reader takes."""
    return target.with_name(_STAGING + target.name)


def open_staging(target: Path) -> Path:
    """Make the empty staging folder of ``target``, clearing what a killed save left in it.

    What is no checkpoint but named by step, a damaged one or the user's, is set aside as
    ``damaged-…``: it must not stop the run from saving that step.

    Raises:
        CheckpointError: If there is something else under another name, or a checkpoint of a later
            release: told before anything is written, not after.
        OSError: If the folder cannot be made.
    """
    there = step_of(target) is not None and os.path.lexists(target)
    if there and not is_ours(target) and not is_newer(target):
        logger.warning("%s is no sound checkpoint. It is now %s.", target, set_aside(target))
    _refuse_foreign(target)
    staging = staging_path(target)
    if staging.exists():
        shutil.rmtree(staging)
    staging.mkdir(parents=True)
    return staging


def describe_files(staging: Path) -> dict[str, dict[str, Any]]:
    """Size in bytes and SHA-256 of every file in a folder, by name relative to it."""
    names = sorted(file.relative_to(staging).as_posix() for file in files_in(staging))
    return {
        name: {"size": (staging / name).stat().st_size, "sha256": sha256_of(staging / name)}
        for name in names
        if name != MANIFEST
    }


def commit(staging: Path, target: Path, manifest: Mapping[str, Any]) -> Path:
    """Make a staged checkpoint visible under its name, durably and at once.

    A crash at any instant leaves the old checkpoint, the new one, or the old one set aside under a
    name that :func:`locate` and :func:`committed` know.

    Args:
        staging: The folder from :func:`open_staging`, complete but for its manifest.
        target: The checkpoint's final path. A committed checkpoint there is replaced.
        manifest: The caller's fields: values that JSON can hold.

    Returns:
        ``target``.

    Raises:
        CheckpointError: If ``target`` is something else than a checkpoint of ours.
        TypeError: If JSON cannot hold a field of ``manifest``.
        ValueError: If a field has a name that the format keeps for itself.
        OSError: If the disk refuses; ``target`` is then as it was.
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
    """Complete a staging folder by its manifest; everything in it is on the disk then.

    Raises:
        TypeError: If JSON cannot hold a field of ``manifest``.
        ValueError: If a field has a name that the format keeps for itself.
        OSError: If the disk refuses.
    """
    for file in files_in(staging):
        sync(file)
    write_manifest(staging, manifest)
    sync_folders(staging)


def locate(path: Path) -> Path:
    """``path``, or where a save that was killed while replacing it had set it aside."""
    aside = _aside(path)
    return aside if aside.is_dir() and not path.exists() else path


def set_aside(path: Path, why: Literal["damaged", "replaced", "abandoned"] = "damaged") -> Path:
    """Give a folder or file a name that no reader takes and nobody clears, numbered if taken.

    Returns:
        Its new path, such as ``damaged-step-00000100`` beside the old one.

    Raises:
        OSError: If the disk refuses.
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
    """The committed checkpoints named by step in a folder, oldest first; they may be damaged.

    Staging folders, folders without a manifest and everything that is not ours are left out.
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
    """The folders named by step that have no manifest: damaged checkpoints, or not ours."""
    if not root.is_dir():
        return []
    named = (each for each in root.iterdir() if _STEP_NAME.fullmatch(each.name) and each.is_dir())
    return sorted(path for path in named if not (path / MANIFEST).is_file())


def read_manifest(path: Path) -> dict[str, Any]:
    """The manifest of a committed checkpoint.

    Raises:
        CheckpointError: If it is missing, torn, altered, or of a newer format. The text names the
            file.
    """
    file = path / MANIFEST
    try:
        manifest = json.loads(file.read_bytes())
    except FileNotFoundError as error:
        raise CheckpointError(
            f"{file} is missing: {path} is not a checkpoint, or its save never finished."
        ) from error
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file} is damaged: {error}. Use another checkpoint.") from error
    if not isinstance(manifest, dict) or not all(field in manifest for field in _OWN_FIELDS):
        raise CheckpointError(
            f"{file} lacks one of the fields {', '.join(_OWN_FIELDS)}: it is damaged or not ours."
        )
    version = manifest["format_version"]
    if version not in range(1, FORMAT_VERSION + 1):
        raise CheckpointError(
            f"{file} has format version {version}; this release reads 1 to {FORMAT_VERSION}. "
            "Load it with the release that wrote it, or a later one."
        )
    digest = manifest.pop("sha256")
    if digest != _manifest_digest(manifest):
        raise CheckpointError(f"{file} is damaged: its hash differs. Use another checkpoint.")
    return manifest


def verify(path: Path, *, hashes: bool = True) -> dict[str, Any]:
    """Check every file of a checkpoint against the manifest.

    Args:
        path: The checkpoint.
        hashes: Their contents too, and not their sizes alone; this reads all of it.

    Returns:
        The manifest.

    Raises:
        CheckpointError: Naming the file and what is wrong with it.
    """
    manifest = read_manifest(path)
    for name, expected in manifest["files"].items():
        file = path / name
        try:
            size = file.stat().st_size
            sound = size == expected["size"]
            intact = sound and (not hashes or sha256_of(file) == expected["sha256"])
        except FileNotFoundError as error:
            raise CheckpointError(f"{file} is missing from the checkpoint.") from error
        except OSError as error:
            raise CheckpointError(f"{file} cannot be read: {error}.") from error
        if not sound:
            raise CheckpointError(
                f"{file} is damaged: it has {size} bytes, the manifest says {expected['size']}."
            )
        if not intact:
            raise CheckpointError(f"{file} is damaged: its SHA-256 is not the manifest's.")
    return manifest


def is_ours(path: Path) -> bool:
    """Whether we may replace or delete a folder: its manifest is sound, and says what is in it."""
    try:
        read_manifest(path)
    except CheckpointError:
        return False
    return True


def is_newer(path: Path) -> bool:
    """Whether a later release wrote a checkpoint: it is no damage, but cannot be read here."""
    version = peek(path).get("format_version")
    return isinstance(version, int) and version > FORMAT_VERSION


def peek(path: Path) -> dict[str, Any]:
    """A folder's manifest as it is, of any version and unchecked; empty where there is none."""
    try:
        manifest = json.loads((path / MANIFEST).read_bytes())
    except (OSError, ValueError):
        return {}
    return manifest if isinstance(manifest, dict) else {}


def remove(path: Path) -> None:
    """Delete a checkpoint: for readers it is gone at once.

    Raises:
        CheckpointError: If ``path`` is not a checkpoint of ours, or if its files could not be
            deleted; in that case it is no checkpoint any more, and the text says where the rest is.
    """
    if not is_ours(path):
        raise CheckpointError(
            f"{path} has no manifest of this format, so it is not deleted. Delete it by hand if it "
            "is not needed."
        )
    if others := _strangers(path):
        raise CheckpointError(
            f"{path} holds files that are not the checkpoint's ({', '.join(others[:3])}), so it is "
            "not deleted. Move them away, or delete it by hand."
        )
    trash = path.with_name(_TRASH + path.name)
    try:
        if trash.exists():
            shutil.rmtree(trash)
        os.rename(path, trash)
        sync(path.parent)
        shutil.rmtree(trash)
    except OSError as error:
        rest = trash if trash.exists() else path
        raise CheckpointError(
            f"Deleting {path} failed: {error}. What is left lies in {rest}; delete it by hand."
        ) from error


def _strangers(path: Path) -> list[str]:
    """Files in a checkpoint's folder that its manifest does not list."""
    listed = {MANIFEST, *read_manifest(path)["files"]}
    return sorted({file.relative_to(path).as_posix() for file in files_in(path)} - listed)


def sweep(root: Path) -> list[Path]:
    """Clear what killed saves and removals left in a folder; nothing else is touched.

    Call it on one rank, while no save runs in ``root`` and before a checkpoint is chosen: one that
    a killed save had set aside gets its name back. What cannot be deleted is told in a warning of
    the log.

    Returns:
        The leftovers found.
    """
    if not root.is_dir():
        return []
    ours = (_STAGING, _REPLACED, _TRASH)
    leftovers = [
        entry for entry in sorted(root.iterdir()) if entry.name.startswith(ours) and entry.is_dir()
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
    """Delete a folder of ours that no reader sees; failing is told in a warning of the log."""
    try:
        shutil.rmtree(path)
    except OSError as error:
        if path.exists():
            logger.warning("%s is not needed any more but could not be deleted: %s", path, error)


def _discard_replaced(aside: Path) -> None:
    """Delete what a save has replaced, unless there is more in it than a checkpoint."""
    try:
        if not is_ours(aside) or _strangers(aside):
            kept = set_aside(aside, "replaced")
            logger.warning("A checkpoint was replaced that held other files: it is now %s.", kept)
            return
        trash = aside.with_name(aside.name.replace(_REPLACED, _TRASH, 1))
        if trash.exists():
            shutil.rmtree(trash)
        os.rename(aside, trash)  # of which a part is a leftover, and not a checkpoint of somebody's
    except OSError as error:
        logger.warning("%s is not needed any more but could not be moved: %s", aside, error)
    else:
        discard(trash)


def _refuse_foreign(target: Path) -> None:
    if is_newer(target):
        raise CheckpointError(
            f"{target} was written by a later release, so it is not replaced. Go on with that "
            "release, or save elsewhere."
        )
    if os.path.lexists(target) and not is_ours(target):
        raise CheckpointError(
            f"{target} exists and has no manifest of this format, so it is not replaced. Save "
            "under another name, or move it away."
        )


def _replace(staging: Path, target: Path, aside: Path) -> None:
    """Put ``staging`` in the place of ``target``: no single rename replaces a folder with files."""
    if aside.exists():
        _discard_replaced(aside)
    os.rename(target, aside)
    try:
        os.rename(staging, target)
    except OSError:
        os.rename(aside, target)
        raise


def _aside(path: Path) -> Path:
    named = path if path.name else Path(os.path.abspath(path))  # that of `.` has no name
    return named.with_name(_REPLACED + named.name)


def write_manifest(staging: Path, fields: Mapping[str, Any]) -> None:
    """Describe a folder's files in its manifest, and wait until that is on the disk.

    Raises:
        TypeError: If JSON cannot hold a field.
        ValueError: If a field has a name that the format keeps for itself.
    """
    taken = [field for field in _OWN_FIELDS if field in fields]
    if taken:
        raise ValueError(f"The manifest's fields {taken} are the format's own; use other names.")
    own = {"format_version": FORMAT_VERSION, **fields, "files": describe_files(staging)}
    manifest = json.loads(json.dumps(own))  # as a reader will see it: string keys, lists
    text = json.dumps({**manifest, "sha256": _manifest_digest(manifest)}, indent=1)
    with open(staging / MANIFEST, "x", encoding="utf-8") as stream:
        stream.write(text + "\n")
        stream.flush()
        os.fsync(stream.fileno())


def _manifest_digest(manifest: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def files_in(folder: Path) -> list[Path]:
    """Every file under a folder, those in its subfolders too."""
    return [file for file in folder.rglob("*") if file.is_file()]


def sha256_of(file: Path) -> str:
    """The hash of a file's bytes, in hexadecimal."""
    digest = hashlib.sha256()
    with open(file, "rb") as stream:
        while chunk := stream.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


def sync_folders(folder: Path) -> None:
    """Wait until the names in a folder, and in those below it, are on the disk."""
    for each, _, _ in os.walk(folder, topdown=False):
        sync(Path(each))


def sync(path: Path) -> None:
    """Wait until a file's bytes, or a folder's names, are on the disk."""
    if os.name == "nt" and path.is_dir():
        return  # Windows cannot open a folder; its file system orders renames by itself
    descriptor = os.open(path, os.O_RDWR if os.name == "nt" else os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
