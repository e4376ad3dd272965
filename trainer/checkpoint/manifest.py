"""The manifest of a checkpoint: the list of its files with their sizes and SHA-256 hashes.

A folder with a manifest is a checkpoint. A checkpoint may come from an untrusted source, and
correct hashes say nothing about its author. So only files that the manifest lists are read, moved
or removed. They must be regular files, in folders inside the checkpoint that are not symlinks.
Their contents are compared with an expected form (:func:`check_form`) before they are used.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path, PurePosixPath, PureWindowsPath
from types import NoneType
from typing import Any, BinaryIO

from trackers.files import LARGEST, read_json, regular
from trackers.strict_json import dumps, fits_64_bits, from_json, is_unicode, to_json
from trainer.errors import CheckpointError

FORMAT_VERSION = 1
MANIFEST = "manifest.json"

_OWN_FIELDS = ("format_version", "files", "sha256")


def count(value: Any) -> bool:
    """Return whether a value is an integer from 0 to 2**64 - 1; for :func:`check_form`."""
    return type(value) is int and 0 <= value < 2**64


_FILE = {"size": count, "sha256": str}
_FIELDS = {  # of all kinds of checkpoints; code that needs a field checks that it exists
    **dict.fromkeys(("step?", "epoch?", "world_size?"), count),
    **dict.fromkeys(("models?", "optimizers?", "schedulers?", "custom_objects?"), count),
    **dict.fromkeys(("weights_only?", "scaler?"), bool),
    **dict.fromkeys(("metrics?", "hyper_parameters?"), dict),
    "run_id?": (str, NoneType),
    "kind?": str,
    "loaders?": {"epoch": count, "step": count, "seed": count},
}


def check_form(value: Any, form: Any, where: object) -> None:
    """Check that parsed data has the expected types and keys.

    Args:
        value: The data.
        form: A type or a tuple of types, a function that returns whether a value is valid,
            ``[form]`` for a list of such values, or a dict of the forms of some keys. A key that
            ends in ``?`` may be missing.
        where: The place of the data, for the error message.

    Raises:
        CheckpointError: The data has another form; the message names the place.
    """
    if isinstance(form, dict) and isinstance(value, dict):
        for key, each in form.items():
            name = key.removesuffix("?")
            if name in value:
                check_form(value[name], each, f"{where}[{name!r}]")
            elif name == key:
                raise CheckpointError(f"{where} lacks {name!r}: it is damaged or not ours.")
    elif isinstance(form, list) and isinstance(value, list):
        for index, item in enumerate(value):
            check_form(item, form[0], f"{where}[{index}]")
    else:
        fits = isinstance(form, (type, tuple)) and isinstance(value, form)
        if not (fits or (callable(form) and not isinstance(form, type) and form(value))):
            raise CheckpointError(
                f"{where} is a {type(value).__name__} that does not belong there: it is damaged or "
                "not ours."
            )


@contextmanager
def reading(what: object, problem: str = "cannot be read") -> Iterator[None]:
    """Turn any exception in the block, such as from malformed data, into a CheckpointError."""
    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:  # any type, since malformed data can raise anything
        raise CheckpointError(f"{what} {problem}: {error!r}.") from error


def write_manifest(staging: Path, fields: Mapping[str, Any]) -> None:
    """Write the manifest of a folder's files, and sync it to disk.

    Raises:
        TypeError: If a field cannot be written as JSON.
        ValueError: If the name of a field is reserved by the format.
        CheckpointError: If the folder holds anything but regular files with portable names.
    """
    taken = [field for field in _OWN_FIELDS if field in fields]
    if taken:
        raise ValueError(f"The manifest's fields {taken} are reserved; use other names.")
    own = {"format_version": FORMAT_VERSION, **fields, "files": describe_files(staging)}
    manifest = to_json(own)  # the same values that a reader will parse
    text = dumps({**manifest, "sha256": _manifest_digest(manifest)}, indent=1)
    if len(text) >= LARGEST:
        raise ValueError(
            f"The manifest has {len(text):,} characters, of which {LARGEST:,} can be read: keep "
            "large values out of the hyper-parameters."
        )
    with open(staging / MANIFEST, "x", encoding="utf-8") as stream:
        stream.write(text + "\n")
        stream.flush()
        os.fsync(stream.fileno())


def describe_files(staging: Path) -> dict[str, dict[str, Any]]:
    """Return the size in bytes and SHA-256 of every file in a folder, by relative name.

    Raises:
        CheckpointError: If an entry is not a regular file, or its name is not portable.
    """
    described = {}
    names = (file.relative_to(staging).as_posix() for file in files_in(staging))
    for name in sorted(set(names) - {MANIFEST}):
        if not is_portable(name):
            raise CheckpointError(
                f"{staging / name} has a name that not every system can read; choose another one."
            )
        try:
            with open(staging / name, "rb", opener=regular) as stream:
                size = os.fstat(stream.fileno()).st_size
                described[name] = {"size": size, "sha256": _digest(stream)}
        except OSError as error:
            raise CheckpointError(f"{staging / name} cannot be saved: {error}.") from error
    return described


def read_manifest(path: Path) -> dict[str, Any]:
    """Read the manifest of a committed checkpoint.

    Raises:
        CheckpointError: If it is missing, truncated, altered, malformed, or of a newer format. The
            message names the file.
    """
    file = path / MANIFEST
    with reading(file):
        try:
            manifest = read_json(file)
        except FileNotFoundError as error:
            raise CheckpointError(
                f"{file} is missing: {path} is not a checkpoint, is an incomplete copy of one "
                "(copy it again), or its save never finished."
            ) from error
        except OSError as error:
            raise CheckpointError(f"{file} cannot be read: {error}.") from error
        except ValueError as error:
            raise CheckpointError(f"{file} is damaged: {error}. Use another checkpoint.") from error
        if not isinstance(manifest, dict) or not all(field in manifest for field in _OWN_FIELDS):
            raise CheckpointError(
                f"{file} lacks one of the fields {', '.join(_OWN_FIELDS)}: it is damaged or not "
                "ours."
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
        check_form(manifest, {"files": dict, **_FIELDS}, file)
        for name, described in manifest["files"].items():
            if not is_portable(name):
                raise CheckpointError(f"{file} lists {name!r}, which is no name of its own files.")
            check_form(described, _FILE, f"{file}[{name!r}]")
    return manifest


def verify(path: Path, *, hashes: bool = True) -> dict[str, Any]:
    """Check every file of a checkpoint against the manifest.

    Args:
        path: The checkpoint.
        hashes: Also check the files' hashes, which reads the whole checkpoint. False checks only
            their sizes.

    Returns:
        The manifest.

    Raises:
        CheckpointError: A file is missing, damaged or unreadable, or is not a regular file, or is
            in a folder that is a symlink. The message names the file.
    """
    manifest = read_manifest(path)
    for name, expected in manifest["files"].items():
        file = path / name
        try:
            with open_listed(path, name) as stream:
                size = os.fstat(stream.fileno()).st_size
                sound = size == expected["size"]
                intact = sound and (not hashes or _digest(stream) == expected["sha256"])
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


def open_listed(path: Path, name: str) -> BinaryIO:
    """Open a regular file in a checkpoint. No folder below ``path`` may be a symlink.

    Raises:
        OSError: If it is not a regular file, a folder is a symlink, or it cannot be opened.
    """
    check_folders(path, name)
    return open(path / name, "rb", opener=regular)


def check_folders(path: Path, name: str) -> None:
    """Check that no folder between a checkpoint and a file in it is a symlink.

    Folders that do not exist are allowed.

    Raises:
        NotADirectoryError: If one is a symlink, or is not a folder.
    """
    for folder in _folders_of([name]):
        if os.path.lexists(path / folder) and not is_folder(path / folder):
            raise NotADirectoryError(f"{path / folder} is not a real folder")


def check_file(path: Path) -> None:
    """Raise a CheckpointError for a pipe or device file: opening a pipe would block."""
    if path.exists() and not path.is_file():
        raise CheckpointError(f"{path} is not a file.")


def is_ours(path: Path) -> bool:
    """Return whether a folder is a checkpoint of this format, so that it may be replaced."""
    try:
        read_manifest(path)
    except CheckpointError:
        return False
    return True


def is_newer(path: Path) -> bool:
    """Return whether a later release wrote a checkpoint, so that it cannot be read here."""
    version = peek(path).get("format_version")
    return isinstance(version, int) and version > FORMAT_VERSION


def run_id_of(path: Path) -> str | None:
    """Return the id of the run that wrote a checkpoint, without verification; None if unknown."""
    run_id = peek(path).get("run_id")
    return run_id if isinstance(run_id, str) else None


def metrics_of(manifest: Mapping[str, Any]) -> dict[str, float]:
    """Return the numeric metrics in a manifest; they may be NaN or infinite."""
    values = from_json(manifest.get("metrics", {}))
    return {
        name: value
        for name, value in values.items()
        if isinstance(value, float) or (isinstance(value, int) and fits_64_bits(value))
    }


def peek(path: Path) -> dict[str, Any]:
    """Return a folder's manifest of any version without verification; empty if there is none."""
    try:
        manifest = read_json(path / MANIFEST)
    except (OSError, ValueError):
        return {}
    return manifest if isinstance(manifest, dict) else {}


def strangers(path: Path, manifest: Mapping[str, Any]) -> list[str]:
    """Return the entries in a checkpoint's folder that its manifest does not list.

    Empty folders are included, and so are symlinks that have replaced a listed file.
    """
    files = {MANIFEST, *manifest.get("files", ())}
    folders = set(_folders_of(files))
    found = {entry.relative_to(path).as_posix(): entry for entry in path.rglob("*")}
    return sorted(
        name
        for name, entry in found.items()
        if not (name in folders if is_folder(entry) else name in files and _is_regular(entry))
    )


def files_in(folder: Path) -> list[Path]:
    """Return all entries of a folder and its subfolders, except folders that are not symlinks."""
    return [entry for entry in folder.rglob("*") if not is_folder(entry)]


def is_portable(name: str) -> bool:
    """Return whether a name is a normalised relative path that is valid on every system."""
    return (
        not {"", ".", ".."} & set(name.split("/"))
        and not {"\\", "\0"} & set(name)
        and not PureWindowsPath(name).drive
        and is_unicode(name)
        and name != MANIFEST
    )


def _folders_of(names: Collection[str]) -> list[str]:
    """Return the folders of files with these relative names, parents first."""
    parents = {parent.as_posix() for name in names for parent in PurePosixPath(name).parents}
    return sorted(parents - {"."})


def is_folder(path: Path) -> bool:
    """Return whether a path is a folder, and no link to one."""
    return path.is_dir() and not path.is_symlink()


def _is_regular(path: Path) -> bool:
    return path.is_file() and not path.is_symlink()


def _manifest_digest(manifest: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def sha256_of(file: Path) -> str:
    """Return the SHA-256 of a file in hexadecimal."""
    with open(file, "rb") as stream:
        return _digest(stream)


def _digest(stream: BinaryIO) -> str:
    digest = hashlib.sha256()
    while chunk := stream.read(1 << 20):
        digest.update(chunk)
    return digest.hexdigest()
