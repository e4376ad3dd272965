"""Storage of checkpoints: names, manifest, commit, retention and quarantine.

A save writes to a staging folder beside its target. :func:`commit` syncs every file, writes the
manifest (sizes and hashes of all files) last and renames the folder to the target's name. So no
reader sees a partial checkpoint::

    root/step-00000100/                     a committed checkpoint: it has a manifest
    root/.cadence-staging-step-00000200/    a save in progress, or one that was killed
    root/.cadence-replaced-step-00000100/   the old checkpoint during a save that replaces it
    root/.cadence-trash-step-00000050/      a removal in progress, or one that was killed
    root/.cadence-upload-step-00000100/     hard links, while its files are uploaded to a mirror

Folders with the last four prefixes belong to the library; :func:`sweep` deletes or restores them.
Any other folder that is in the way may hold the user's data. It is quarantined: renamed, never
deleted::

    root/damaged-step-00000100/             it had no readable manifest
    root/replaced-step-00000100/            an old checkpoint whose folder also held other files
    root/abandoned-step-00000100/           a later checkpoint than the one a run resumed from

A checkpoint may have additional names: symlinks made by :func:`link`.

An `Accelerator` also saves into a folder that holds the user's files. It cannot be replaced by a
rename, so the files are moved into it from ``folder/.cadence-staging/``. That save is committed
when the manifest there is written: from then on readers use the staging folder, until every file is
linked into the target. If the process is killed in between, the next save finishes the move. The
target's old manifest is removed before the first file is moved, and the new one is added last, so
that no reader takes a mixture for a checkpoint. Reading changes nothing on the disk.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any, BinaryIO, Literal

from trainer.errors import CheckpointError, module_logger
from trainer.files import LARGEST, hidden_beside, read_json, regular
from trainer.strict_json import dumps, fits_64_bits, from_json, is_unicode, to_json

logger = module_logger(__name__)

FORMAT_VERSION = 1
MANIFEST = "manifest.json"

# The types of the fields, where present; an int is a count.
_TYPES: dict[str, Any] = {
    "files": dict,
    **dict.fromkeys(("step", "epoch", "world_size", "data_size"), int),
    **dict.fromkeys(("models", "optimizers", "schedulers", "custom_objects"), int),
    **dict.fromkeys(("scaler", "weights_only", "main_process_alone"), bool),
    **dict.fromkeys(("metrics", "hyper_parameters", "configuration", "versions"), dict),
    "run_id": (str, type(None)),
    "kind": str,
}

_OWN_FIELDS = ("format_version", "files", "sha256")

STAGING = ".cadence-staging"  # in a folder that is shared with the user's files
_STAGING = ".cadence-staging-"
_REPLACED = ".cadence-replaced-"
_TRASH = ".cadence-trash-"
_UPLOAD = ".cadence-upload-"
LEFTOVER = re.compile(r"\.cadence-(staging|replaced|trash|upload)-(.+)")
QUARANTINED = re.compile(r"(damaged|replaced|abandoned)-(step-\d{8,})(-\d+)?")
NUMBERED = re.compile(r"checkpoint_(\d+)")  # automatic names of the Accelerator's checkpoints
_STEP_NAME = re.compile(r"step-(\d{8}|[1-9]\d{8,})")


def write_temporary(file: Path, write: Callable[[Path], object]) -> Path:
    """Write a file under a hidden temporary name beside its final path, and fsync it.

    Args:
        file: The final path; the caller renames the result to it.
        write: Called with the path to write to.

    Returns:
        The hidden file. If ``write`` fails, it is removed.
    """
    temporary = hidden_beside(file)
    try:
        write(temporary)
        sync(temporary)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    return temporary


def write_whole(file: Path, write: Callable[[Path], object]) -> None:
    """Write a file atomically (temporary file, then rename), replacing an existing one."""
    os.replace(write_temporary(file, write), file)
    sync(file.parent)


def sync(path: Path) -> None:
    """Call fsync on a file, or on a folder to sync its directory entries."""
    if os.name == "nt" and path.is_dir():
        return  # Windows cannot open a folder; its file system orders renames itself
    descriptor = os.open(path, os.O_RDWR if os.name == "nt" else os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_folders(folder: Path) -> None:
    """Sync the directory entries of a folder and its subfolders to disk."""
    for directory, _, _ in os.walk(folder, topdown=False):
        sync(Path(directory))


@contextmanager
def reading(what: object, problem: str = "cannot be read") -> Iterator[None]:
    """Turn any exception in the block, such as from malformed data, into a CheckpointError."""
    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:  # any type, since malformed data can raise anything
        raise CheckpointError(f"{what} {problem}: {error!r}.") from error


def write_manifest(
    staging: Path, fields: Mapping[str, Any], described: Mapping[str, Any] | None = None
) -> None:
    """Write the manifest of a folder's files, and sync it to disk.

    Args:
        staging: The folder.
        fields: The caller's fields.
        described: The results of `describe_files` for some of the files; other files are read.

    Raises:
        TypeError: If a field cannot be written as JSON.
        ValueError: If the name of a field is reserved by the format.
        CheckpointError: If the folder holds anything but regular files with portable names.
    """
    assert not fields.keys() & set(_OWN_FIELDS)
    described = described or {}
    names = {file.relative_to(staging).as_posix() for file in files_in(staging)}
    files = {**described, **describe_files(staging, names - described.keys() - {MANIFEST})}
    text = _manifest_text(fields, files)
    with open(staging / MANIFEST, "x", encoding="utf-8") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())


def add_files(staging: Path, target: Path) -> None:
    """Add the files of a folder to a committed checkpoint, and list them in its manifest.

    A reader sees either none or all of the new files. Existing files are kept.

    Raises:
        CheckpointError: ``target`` is not a checkpoint, or a file has a name that is not portable.
        OSError: The disk fails.
    """
    manifest = read_manifest(target)
    names = {file.relative_to(staging).as_posix() for file in files_in(staging)}
    added = describe_files(staging, names - manifest["files"].keys())
    for name in added:
        check_folders(target, name)
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        os.replace(staging / name, target / name)
    sync_folders(target)
    text = _manifest_text(fields_of(manifest), {**manifest["files"], **added})
    write_whole(target / MANIFEST, lambda file: file.write_text(text, encoding="utf-8"))


def fields_of(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a manifest that its writer passed to `commit`."""
    return {name: value for name, value in manifest.items() if name not in _OWN_FIELDS}


def _manifest_text(fields: Mapping[str, Any], files: Mapping[str, Any]) -> str:
    files = dict(sorted(files.items()))
    document = {"format_version": FORMAT_VERSION, **fields, "files": files}
    manifest = to_json(document)  # the values as a reader will parse them
    text = dumps({**manifest, "sha256": _manifest_digest(manifest)}, indent=1)
    if len(text) >= LARGEST:
        raise ValueError(
            f"The manifest has {len(text):,} characters; the limit is {LARGEST:,}: keep large "
            "values out of the hyper-parameters."
        )
    return text + "\n"


def describe_files(staging: Path, names: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Sync files in a folder to disk; return the size in bytes and SHA-256 of each by name.

    Raises:
        CheckpointError: A file is not a regular file, or its name is not portable.
    """
    described = {}
    for name in sorted(names):
        if not is_portable(name):
            raise CheckpointError(
                f"{staging / name} has a name that not every system can read; choose another one."
            )
        try:
            with open(staging / name, "rb", opener=regular) as stream:
                sync(staging / name)
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
                f"{file} lacks one of the fields {', '.join(_OWN_FIELDS)}: it is damaged, or not "
                "a manifest of Cadence."
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
        for name in manifest["files"]:
            if not is_portable(name):
                raise CheckpointError(
                    f"{file} lists {name!r}, which is not a valid name of a checkpoint file."
                )
        _check_types(file, manifest)
    return manifest


def _check_types(file: Path, manifest: Mapping[str, Any]) -> None:
    """Check the types of the fields that readers rely on.

    Raises:
        CheckpointError: One has another type, or a count does not fit 64 bits.
    """
    typed = [(name, manifest[name], kind) for name, kind in _TYPES.items() if name in manifest]
    for name, described in manifest["files"].items():
        described = described if isinstance(described, dict) else {}
        typed.append((f"size of {name}", described.get("size"), int))
        typed.append((f"hash of {name}", described.get("sha256"), str))
    for what, value, kind in typed:
        sound = isinstance(value, kind)
        if kind is int:
            sound = type(value) is int and value >= 0 and fits_64_bits(value)
        if not sound:
            raise CheckpointError(f"{file} is damaged: its {what} is {str(value)[:100]}.")
    metrics_of(manifest)


def verify(path: Path, *, hashes: bool = True, share: tuple[int, int] = (0, 1)) -> dict[str, Any]:
    """Check every file of a checkpoint against the manifest.

    Args:
        path: The checkpoint.
        hashes: Also check the files' hashes, which reads the whole checkpoint. False checks only
            their sizes.
        share: The process's number and the number of processes that check the hashes together; each
            checks the files in its share of the bytes.

    Returns:
        The manifest.

    Raises:
        CheckpointError: A file is missing, damaged or unreadable, or is not a regular file, or is
            in a folder that is a symlink. The message names the file.
    """
    manifest = read_manifest(path)
    ours = share_of_files(manifest["files"], *share)
    for name, expected in manifest["files"].items():
        file = path / name
        try:
            with open_listed(path, name) as stream:
                size = os.fstat(stream.fileno()).st_size
                sound = size == expected["size"]
                read = hashes and name in ours
                intact = sound and (not read or _digest(stream) == expected["sha256"])
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


def share_of_files(files: Mapping[str, Any], number: int, count: int) -> set[str]:
    """Return the files of one of `count` shares with about equal numbers of bytes."""
    filled = [0] * count
    ours = set()
    for name in sorted(files, key=lambda name: (-files[name]["size"], name)):
        least = filled.index(min(filled))
        filled[least] += files[name]["size"]
        if least == number:
            ours.add(name)
    return ours


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


def unknown_files(path: Path, manifest: Mapping[str, Any]) -> list[str]:
    """Return the entries in a checkpoint's folder that its manifest does not list.

    Empty folders are included, and so are symlinks that have replaced a listed file.
    """
    files = {MANIFEST, *manifest.get("files", ())}
    folders = set(_folders_of(files))
    entries = {entry.relative_to(path).as_posix(): entry for entry in path.rglob("*")}
    return sorted(
        name
        for name, entry in entries.items()
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
    """Return whether a path is a folder, and not a link to one."""
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


def open_staging(target: Path, *, shared: bool = False) -> Path:
    """Create an empty staging folder for ``target``, deleting one that a killed save left.

    If ``target`` has a step name but is not an intact checkpoint, it is renamed to ``damaged-…``,
    so that the run can save that step.

    Args:
        target: The checkpoint's final path.
        shared: ``target`` may hold the user's files, which stay.

    Raises:
        CheckpointError: If ``target`` exists and is neither `shared` nor a checkpoint, or is a
            checkpoint of a later release; raised before anything is written.
        OSError: If the folder cannot be created.
    """
    staging = staging_path(target)
    if shared:
        if target.exists() and not target.is_dir():
            raise NotADirectoryError(f"{target} is a file; a checkpoint needs a folder.")
        recover(target)
        if is_shared(target):
            staging = target / STAGING
    elif (
        step_of(target) is not None
        and os.path.lexists(target)
        and not (is_ours(target) or is_newer(target))
    ):
        logger.warning(
            "%s is not an intact checkpoint; it was renamed to %s.", target, quarantine(target)
        )
    if staging.parent != target:
        _check_ours(target)
    clear(staging)
    staging.mkdir(parents=True)
    return staging


def commit(
    staging: Path,
    target: Path,
    manifest: Mapping[str, Any],
    described: Mapping[str, Any] | None = None,
) -> Path:
    """Make a staged checkpoint visible under its name, durably and atomically.

    A crash at any time leaves either the new checkpoint or the old one. The old one may then have a
    temporary name, which :func:`locate` and :func:`committed` recognise. In a shared folder, files
    of an earlier checkpoint are removed, and the user's files stay unless the checkpoint has a file
    of that name.

    Args:
        staging: The folder from :func:`open_staging`, complete except for its manifest.
        target: The checkpoint's final path. A committed checkpoint there is replaced.
        manifest: The caller's fields; `to_json` lists the types of values.
        described: See `write_manifest`.

    Returns:
        ``target``.

    Raises:
        CheckpointError: If ``target`` exists and is not a checkpoint of this format.
        TypeError: If a field of ``manifest`` cannot be written as JSON.
        ValueError: If the name of a field is reserved by the format.
        OSError: If the disk fails; ``target`` is then unchanged.
    """
    in_place = staging.parent == target
    if not in_place:
        _check_ours(target)
    write_manifest(staging, manifest, described)
    sync_folders(staging)
    if in_place:
        _put_in_place(staging, target, read_manifest(staging)["files"])
        return target
    old = _replaced_path(target)
    if target.exists():
        _replace(staging, target, old)
    else:
        os.rename(staging, target)
    sync(target.parent)
    if old.exists():
        _discard_replaced(old)
    return target


def link(target: Path, name: Path) -> None:
    """Give a checkpoint another name, by a relative symlink; an existing symlink is replaced.

    Raises:
        OSError: The file system has no symlinks, or something else has the name.
    """
    if os.path.lexists(name) and not name.is_symlink():
        raise FileExistsError(f"{name} exists and is not a link")
    temporary = hidden_beside(name)
    temporary.unlink()
    temporary.symlink_to(os.path.relpath(target, name.parent), target_is_directory=True)
    os.replace(temporary, name)
    sync(name.parent)


def link_files(path: Path) -> Path | None:
    """Return a hidden folder with hard links to a checkpoint's files, which outlast the checkpoint.

    Without hard links on the file system, the files are copied. The caller deletes the folder.

    Returns:
        The folder, beside the checkpoint; None if the checkpoint is damaged, or was removed or
        replaced meanwhile.

    Raises:
        OSError: The disk fails.
    """
    links = path.with_name(_UPLOAD + path.name)
    clear(links)
    links.mkdir()
    with suppress(FileNotFoundError, CheckpointError):
        manifest = read_manifest(path)
        for name in (*manifest["files"], MANIFEST):
            (links / name).parent.mkdir(parents=True, exist_ok=True)
            _name(path / name, links / name, links)
        if read_manifest(links) == manifest:
            return links
    discard(links)
    return None


def locate(path: Path) -> Path:
    """Return ``path``, or its temporary name if a save was killed while replacing it."""
    old = _replaced_path(path)
    return old if old.is_dir() and not path.exists() else path


def quarantine(path: Path, why: Literal["damaged", "replaced", "abandoned"] = "damaged") -> Path:
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
    paths = {locate(root / entry.name.removeprefix(_REPLACED)) for entry in named}
    return sorted(
        (path for path in paths if (path / MANIFEST).is_file()),
        key=lambda path: step_of(path) or 0,
    )


def without_manifest(root: Path) -> list[Path]:
    """Return folders with a step name but no manifest: damaged checkpoints, or the user's."""
    if not root.is_dir():
        return []
    named = (path for path in root.iterdir() if _STEP_NAME.fullmatch(path.name) and path.is_dir())
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
    if others := unknown_files(path, read_manifest(path)):
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
    ours = (_STAGING, _REPLACED, _TRASH, _UPLOAD)
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
    """Delete a staging or trash folder; a failure is logged as a warning.

    A staging folder inside its target stays if its save was already committed.
    """
    if path.name == STAGING and is_ours(path):
        return
    try:
        shutil.rmtree(path)
    except OSError as error:
        if path.exists():
            logger.warning("%s is no longer needed but could not be deleted: %s", path, error)


def clear(path: Path) -> None:
    """Delete a staging or trash folder, if it exists.

    Raises:
        OSError: If it is a symlink or not a folder, or cannot be deleted.
    """
    if is_folder(path):
        shutil.rmtree(path)
    elif os.path.lexists(path):
        raise NotADirectoryError(f"{path} is not a real folder; move it away")


def _discard_replaced(old: Path) -> None:
    """Delete a replaced checkpoint, unless it is a link or its folder holds other files."""
    try:
        manifest = read_manifest(old) if is_ours(old) and not old.is_symlink() else None
        if manifest is None or unknown_files(old, manifest):
            quarantined = quarantine(old, "replaced")
            logger.warning(
                "The replaced checkpoint contained other files; it was renamed to %s.", quarantined
            )
            return
        trash = old.with_name(old.name.replace(_REPLACED, _TRASH, 1))
        clear(trash)
        os.rename(old, trash)  # a partial deletion is then trash, not a checkpoint
    except OSError as error:
        logger.warning("%s is no longer needed but could not be moved: %s", old, error)
    else:
        discard(trash)


def _check_ours(target: Path) -> None:
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


def _replace(staging: Path, target: Path, old: Path) -> None:
    """Replace ``target`` by ``staging`` with two renames: one cannot replace a non-empty folder."""
    if old.exists():
        _discard_replaced(old)
    os.rename(target, old)
    try:
        os.rename(staging, target)
    except OSError:
        os.rename(old, target)
        raise


def _replaced_path(path: Path) -> Path:
    named = path if path.name else Path(os.path.abspath(path))  # Path(".") has no name
    return named.with_name(_REPLACED + named.name)


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


def examine(
    target: Path, *, hashes: bool = True, share: tuple[int, int] = (0, 1)
) -> tuple[Path, dict[str, Any]]:
    """Check the files of a checkpoint against its manifest; nothing is changed on the disk.

    Args:
        target: The checkpoint.
        hashes: See :func:`verify`.
        share: See :func:`trainer.checkpoint.verify`.

    Returns:
        The folder to read, and its manifest. The folder is ``target``, or the path to which a
        killed save renamed it, or the staging folder of a save that was killed after its commit.

    Raises:
        CheckpointError: See :func:`verify`.
    """
    path = locate(target)
    alone = share[1] == 1  # a share alone cannot decide which folder to read
    if (manifest := _committed(path / STAGING, hashes=hashes and alone)) is not None:
        path = path / STAGING
        return path, manifest if alone else verify(path, hashes=hashes, share=share)
    return path, verify(path, hashes=hashes, share=share)


def is_shared(target: Path) -> bool:
    """Return whether a folder may hold the user's files, so that it must not be replaced."""
    if not target.exists():
        return False
    # A mount point or the working folder cannot be replaced, and a symlink must stay one.
    if target.is_symlink() or os.path.ismount(target) or target.resolve() == Path.cwd().resolve():
        return True
    if not is_ours(target):
        return True  # a damaged manifest does not show which files belong to the checkpoint
    return bool(unknown_files(target, read_manifest(target)))


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


def check_same_run(chosen: Path, roots: Iterable[Path]) -> None:
    """Raise a ValueError if a folder holds a checkpoint of another run than the chosen one."""
    run_id = run_id_of(chosen)
    for path in (path for root in roots for path in committed(root)):
        other = run_id_of(path)
        if None not in (run_id, other) and run_id != other:
            raise ValueError(
                f"{path} belongs to a different run than {chosen}, from which this run resumes. "
                "Give another project_dir, or move it away."
            )


def later_than(chosen: Path, roots: Iterable[Path]) -> list[Path]:
    """Return the checkpoints in the folders that are later than the chosen one, newest first."""
    step = read_manifest(chosen)["step"]
    later = [path for root in roots for path in committed(root) if (step_of(path) or 0) > step]
    return sorted(later, key=lambda path: step_of(path) or 0, reverse=True)


def leave_branch(chosen: Path, later: Iterable[Path]) -> None:
    """Rename the checkpoints from :func:`later_than` to ``abandoned-…``, with a warning each.

    Under their old names, the next start would choose one of them. If a rename fails, the older
    ones still have their names (`later` is newest first), and the next start finds them.
    """
    step = read_manifest(chosen)["step"]
    for path in later:
        quarantined = quarantine(path, "abandoned")
        logger.warning(
            "The run resumes from update %d; the later checkpoint %s was renamed to %s.",
            step,
            path,
            quarantined,
        )
