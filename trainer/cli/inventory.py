"""List the checkpoints in a folder and check whether they are intact; nothing is changed.

A folder is a checkpoint if the Trainer (``step-00000100``) or the `Accelerator` (``checkpoint_3``)
named it, or if it has one of our manifests. Its state is

    sound        as it was written, as far as was checked
    damaged      a file or the manifest is missing or altered
    unreadable   it cannot be read, or a later release wrote it
    unfinished   a killed save only has to be moved into place; the next save does that
    foreign      named like one, but without a manifest: accelerate's or somebody else's

This module works without torch and does not import it.
"""

from __future__ import annotations

import math
import os
import re
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from trainer.checkpoint import storage
from trainer.checkpoint.storage import MANIFEST, is_ours, read_manifest
from trainer.checkpoint.storage import STAGING as INNER_STAGING
from trainer.errors import CheckpointError
from trainer.files import read_json

State = Literal["sound", "damaged", "unreadable", "unfinished", "foreign"]

_RANKING = re.compile(r"\w+\((.+), (min|max)(?:, .+)?\)")

QUIET = 3600.0  # after so many seconds without a write, no running save owns a leftover
SET_ASIDE = "renamed by a killed save; the next start restores it"

_ASIDE = {
    "damaged": "damaged, renamed by a save of that step; never removed automatically",
    "replaced": "replaced, but contains other files; never removed automatically",
    "abandoned": "the run resumed from an earlier one; never removed automatically",
}
_MEANINGS = {
    "staging": "a running or killed save",
    "replaced": "replaced by a later save",
    "trash": "a running or killed removal",
}


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One checkpoint.

    Attributes:
        name: The original name, even if a killed save has renamed it.
        path: The current path.
        state: See the module's docstring.
        note: A description of the problem, with its file, or other useful information; else None.
        hashed: Whether every byte was read to determine the state.
        manifest: Its manifest; empty if that cannot be read.
        size: In bytes.
        saved: When it was saved, in seconds since 1970; infinite if unknown.
    """

    name: str
    path: Path
    state: State
    note: str | None
    hashed: bool
    manifest: dict[str, Any]
    size: int
    saved: float

    @property
    def number(self) -> int | None:
        """The step or number in its name; None if the user chose the name."""
        numbered = storage.NUMBERED.fullmatch(self.name)
        return int(numbered[1]) if numbered else storage.step_of(self.name)

    @property
    def is_step(self) -> bool:
        """Whether the Trainer named it, after its step."""
        return storage.step_of(self.name) is not None

    @property
    def kind(self) -> str | None:
        """``"trainer"``, or the kind in the manifest, such as ``"accelerator"``."""
        return str(self.manifest.get("kind", "trainer")) if self.manifest else None

    @property
    def is_bad(self) -> bool:
        """Whether it needs the user's attention."""
        return self.state in ("damaged", "unreadable")

    @property
    def metrics(self) -> dict[str, float]:
        """The numeric metrics that were saved with it."""
        return storage.metrics_of(self.manifest)


@dataclass(frozen=True, kw_only=True)
class Leftover:
    """The folder of a running or killed save or removal, or a quarantined one.

    Attributes:
        path: The folder.
        meaning: A description.
        size: In bytes.
        touched: The time of the latest write in it, in seconds since 1970; infinite if a part
            cannot be read.
    """

    path: Path
    meaning: str
    size: int
    touched: float

    @property
    def name(self) -> str:
        """Its name, preceded by the checkpoint's name if it is inside one."""
        inside = self.path.name == INNER_STAGING
        return f"{self.path.parent.name}/{self.path.name}" if inside else self.path.name


def find_root(folder: Path) -> tuple[Path, bool]:
    """Return the folder to inspect, and whether it is a single checkpoint.

    Args:
        folder: A project's folder, its ``checkpoints``, or one checkpoint.

    Raises:
        NotADirectoryError: There is no such folder.
    """
    path = storage.locate(folder)
    if not path.is_dir():
        what = "is a file" if path.exists() else "does not exist"
        raise NotADirectoryError(
            f"{folder} {what}. Give the folder of a project, its 'checkpoints', or one checkpoint."
        )
    inner = path / "checkpoints"
    if _is_named(_own_name(path)) or not inner.is_dir():
        return path, _is_named(_own_name(path)) or _is_candidate(path, path.name)
    return inner, False


def read_folder(root: Path, *, hashes: bool) -> tuple[list[Entry], list[Leftover]]:
    """Return the checkpoints in a folder, by number, user-named ones last; and the leftovers.

    Args:
        root: The folder. Checkpoints that disappear meanwhile are left out.
        hashes: Read every byte, not only manifests and sizes.
    """
    entries, leftovers = [], []
    for path in sorted(path for path in root.iterdir() if path.is_dir()):
        name, leftover = _own_name(path), storage.LEFTOVER.fullmatch(path.name)
        stands = name == path.name or not os.path.lexists(root / name)
        if aside := storage.QUARANTINED.fullmatch(path.name):
            leftovers.append(_leftover(path, _ASIDE[aside[1]]))
        elif stands and _is_candidate(path, name):
            if entry := read_entry(path, hashes=hashes):
                entries.append(entry)
                inner = path / INNER_STAGING
                if inner.is_dir() and not _is_unfinished(path):
                    leftovers.append(_leftover(inner, _MEANINGS["staging"]))
        elif leftover:
            leftovers.append(_leftover(path, _MEANINGS[leftover[1]]))
    entries.sort(key=lambda entry: (entry.number is None, not entry.is_step, entry.number or 0))
    return entries, leftovers


def read_entry(path: Path, *, hashes: bool) -> Entry | None:
    """Return the entry of one checkpoint; None if it disappeared meanwhile."""
    state: State = "sound"
    manifest: dict[str, Any] = {}
    note = None if path.name == _own_name(path) else f"{SET_ASIDE}."
    try:
        if not _is_unfinished(path):
            manifest = read_manifest(path)  # known even if a file is damaged
        place, manifest = storage.examine(path, hashes=hashes)
        if place != path:
            state = "unfinished"
            note = "a killed save only has to be moved; the next save does that."
    except CheckpointError as error:
        state, note = _state_of(path, error), str(error)
    if state == "foreign":
        note = (
            "has no manifest, like a checkpoint of accelerate; it is neither checked nor removed."
        )
    size, touched = _measure(path)
    if not path.is_dir():
        return None
    with suppress(OSError):
        touched = (path / MANIFEST).stat().st_mtime  # written last
    return Entry(
        name=_own_name(path),
        path=path,
        state=state,
        note=note,
        hashed=hashes,
        manifest=manifest,
        size=size,
        saved=touched,
    )


def is_dead(leftover: Leftover) -> bool:
    """Return whether a leftover, in its present state on disk, is from a killed save or removal.

    A leftover that was written to within the last hour may belong to a running save.
    """
    path = leftover.path
    match = storage.LEFTOVER.fullmatch(path.name)
    if storage.QUARANTINED.fullmatch(path.name):
        return False
    if match and match[1] == "replaced" and not is_ours(path.with_name(match[2])):
        return False  # it may be the only copy of that checkpoint
    return time.time() - _measure(path)[1] >= QUIET


def ranked_by(entries: list[Entry]) -> list[tuple[str, str]]:
    """Return the metrics that rank the checkpoints, each with its mode: ``"min"`` or ``"max"``.

    They are taken from the newest checkpoint that names some.
    """
    for entry in reversed(entries):
        try:
            document = read_json(entry.path / "trainer.json")
            keys = list(document["tree"]["callbacks"])
        except (OSError, ValueError, KeyError, TypeError):  # not the Trainer's, or damaged
            continue
        matches = (_RANKING.fullmatch(str(key)[:1000]) for key in keys)
        return [(match[1], match[2]) for match in matches if match]
    return []


def _own_name(path: Path) -> str:
    match = storage.LEFTOVER.fullmatch(path.name)
    return match[2] if match and match[1] == "replaced" else path.name


def _is_named(name: str) -> bool:
    return storage.step_of(name) is not None or bool(storage.NUMBERED.fullmatch(name))


def _is_candidate(path: Path, name: str) -> bool:
    if storage.LEFTOVER.fullmatch(name):
        return False
    return _is_named(name) or _is_unfinished(path) or _has_manifest(path)


def _has_manifest(path: Path) -> bool:
    """Return whether there is a manifest of ours, or one too damaged to be identified."""
    try:
        read_json(path / MANIFEST)
        return is_ours(path)
    except ValueError:
        return True
    except OSError:  # it does not exist or may not be read
        return False


def _is_unfinished(path: Path) -> bool:
    try:
        read_manifest(path / INNER_STAGING)
    except CheckpointError:
        return False
    return True


def _state_of(path: Path, error: CheckpointError) -> State:
    cause = error.__cause__
    if isinstance(cause, OSError) and not isinstance(cause, FileNotFoundError):
        return "unreadable"
    if not os.path.isfile(path / MANIFEST):
        # The Trainer's folders appear only when complete, so there was a manifest.
        return "damaged" if storage.step_of(_own_name(path)) is not None else "foreign"
    return "unreadable" if storage.is_newer(path) else "damaged"


def _leftover(path: Path, meaning: str) -> Leftover:
    size, touched = _measure(path)
    return Leftover(path=path, meaning=meaning, size=size, touched=touched)


def _measure(folder: Path) -> tuple[int, float]:
    """Return the bytes of all files in a folder, and when it was last written to.

    A file that cannot be inspected counts as written in the future, so that it never seems old.
    """
    size, touched = 0, -math.inf
    for place, _, names in os.walk(folder):
        for path in (place, *(os.path.join(place, name) for name in names)):
            try:
                found = os.lstat(path)
            except OSError:
                touched = math.inf
                continue
            size += 0 if path == place else found.st_size
            touched = max(touched, found.st_mtime)
    return size, touched if math.isfinite(touched) else math.inf


def size_text(count: float) -> str:
    """Return a number of bytes in a readable unit."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"
