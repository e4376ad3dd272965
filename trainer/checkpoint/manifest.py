"""The manifest: it lists a checkpoint's files with their sizes and hashes, and makes it one."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trackers.strict_json import dumps, to_json
from trainer.errors import CheckpointError

FORMAT_VERSION = 1
MANIFEST = "manifest.json"

_OWN_FIELDS = ("format_version", "files", "sha256")


def write_manifest(staging: Path, fields: Mapping[str, Any]) -> None:
    """Write the manifest of a folder's files, and sync it to disk.

    Raises:
        TypeError: If a field has no form in JSON.
        ValueError: If the name of a field is reserved by the format.
    """
    taken = [field for field in _OWN_FIELDS if field in fields]
    if taken:
        raise ValueError(f"The manifest's fields {taken} are reserved; use other names.")
    own = {"format_version": FORMAT_VERSION, **fields, "files": describe_files(staging)}
    manifest = to_json(own)  # as a reader will parse it
    text = dumps({**manifest, "sha256": _manifest_digest(manifest)}, indent=1)
    with open(staging / MANIFEST, "x", encoding="utf-8") as stream:
        stream.write(text + "\n")
        stream.flush()
        os.fsync(stream.fileno())


def describe_files(staging: Path) -> dict[str, dict[str, Any]]:
    """Return the size in bytes and SHA-256 of every file in a folder, by relative name."""
    names = sorted(file.relative_to(staging).as_posix() for file in files_in(staging))
    return {
        name: {"size": (staging / name).stat().st_size, "sha256": sha256_of(staging / name)}
        for name in names
        if name != MANIFEST
    }


def read_manifest(path: Path) -> dict[str, Any]:
    """Read the manifest of a committed checkpoint.

    Raises:
        CheckpointError: If it is missing, truncated, altered, or of a newer format. The message
            names the file.
    """
    file = path / MANIFEST
    try:
        manifest = json.loads(file.read_bytes())
    except FileNotFoundError as error:
        raise CheckpointError(
            f"{file} is missing: {path} is not a checkpoint, is an incomplete copy of one (copy it "
            "again), or its save never finished."
        ) from error
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error}.") from error
    except ValueError as error:
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
        hashes: Check the files' hashes too, not only their sizes; this reads the whole checkpoint.

    Returns:
        The manifest.

    Raises:
        CheckpointError: A file is missing, damaged or unreadable; the message names it.
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
                f"{file} is damaged: it has {size} bytes, but the manifest says {expected['size']}."
            )
        if not intact:
            raise CheckpointError(f"{file} is damaged: its SHA-256 is not the manifest's.")
    return manifest


def is_ours(path: Path) -> bool:
    """Return whether a folder is a checkpoint of this format, which we may replace or delete."""
    try:
        read_manifest(path)
    except CheckpointError:
        return False
    return True


def is_newer(path: Path) -> bool:
    """Return whether a later release wrote a checkpoint: it is intact, but unreadable here."""
    version = peek(path).get("format_version")
    return isinstance(version, int) and version > FORMAT_VERSION


def peek(path: Path) -> dict[str, Any]:
    """Return a folder's manifest unchecked, of any version; empty if there is none."""
    try:
        manifest = json.loads((path / MANIFEST).read_bytes())
    except (OSError, ValueError):
        return {}
    return manifest if isinstance(manifest, dict) else {}


def strangers(path: Path, manifest: Mapping[str, Any]) -> list[str]:
    """Return the files in a checkpoint's folder that its manifest does not list."""
    listed = {MANIFEST, *manifest.get("files", ())}
    return sorted({file.relative_to(path).as_posix() for file in files_in(path)} - listed)


def _manifest_digest(manifest: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def files_in(folder: Path) -> list[Path]:
    """Return all files in a folder and its subfolders."""
    return [file for file in folder.rglob("*") if file.is_file()]


def sha256_of(file: Path) -> str:
    """Return the SHA-256 of a file in hexadecimal."""
    digest = hashlib.sha256()
    with open(file, "rb") as stream:
        while chunk := stream.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()
