"""Names, the commit and its crashes, damage, removal and sweeping."""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from trainer.checkpoint import storage
from trainer.checkpoint.save import remove_or_warn
from trainer.checkpoint.storage import (
    FORMAT_VERSION,
    MANIFEST,
    describe_files,
    read_manifest,
    verify,
)
from trainer.errors import CheckpointError


def make(root: Path, step: int = 100, content: str = "weights", **fields: object) -> Path:
    target = root / storage.checkpoint_name(step)
    staging = storage.open_staging(target)
    (staging / "model.bin").write_text(content)
    (staging / "shards").mkdir()
    (staging / "shards" / "0.bin").write_text(content * 2)
    return storage.commit(staging, target, {"step": step, **fields})


def content(path: Path) -> str:
    verify(path)
    return (path / "model.bin").read_text()


def names(root: Path) -> list[str]:
    return sorted(entry.name for entry in root.iterdir())


def test_checkpoint_names():
    steps = [0, 100, 99_999_999, 100_000_000]
    assert storage.checkpoint_name(100) == "step-00000100"
    assert [storage.step_of(storage.checkpoint_name(step)) for step in steps] == steps
    for foreign in ("step-1", "step-000000100", "step-00000100.bak", "last", "step-"):
        assert storage.step_of(foreign) is None
    with pytest.raises(ValueError, match="step is -1"):
        storage.checkpoint_name(-1)


def test_manifest(tmp_path):
    path = make(tmp_path, metrics={"loss": 0.1}, world_size=2)
    manifest = read_manifest(path)
    assert manifest == {
        "format_version": FORMAT_VERSION,
        "step": 100,
        "metrics": {"loss": 0.1},
        "world_size": 2,
        "files": {
            name: {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
            for name, data in {"model.bin": b"weights", "shards/0.bin": b"weightsweights"}.items()
        },
    }
    assert verify(path) == manifest
    assert describe_files(path, manifest["files"]) == manifest["files"]
    assert names(tmp_path) == ["step-00000100"]


def test_nan_metrics_in_the_manifest(tmp_path):
    path = make(tmp_path, metrics={"loss": float("nan"), 3: (float("inf"), None)})
    assert verify(path)["metrics"] == {"loss": "NaN", "3": ["Infinity", None]}


def test_manifests_of_earlier_releases_with_nan(tmp_path):
    path = make(tmp_path, metrics={"loss": 0.0})
    manifest = read_manifest(path)
    manifest["metrics"]["loss"] = float("nan")
    digest = hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()
    (path / "manifest.json").write_text(json.dumps({**manifest, "sha256": digest}))
    assert math.isnan(verify(path)["metrics"]["loss"])


def test_a_manifest_that_is_no_json_commits_nothing(tmp_path):
    with pytest.raises(TypeError):
        make(tmp_path, module=object())
    assert storage.committed(tmp_path) == []


def test_files_are_synced_before_the_rename_and_the_parent_after(tmp_path, monkeypatch):
    events = []
    fsync, rename = os.fsync, os.rename
    monkeypatch.setattr(os, "fsync", lambda fd: (events.append(os.fstat(fd).st_ino), fsync(fd)))
    monkeypatch.setattr(os, "rename", lambda *a: (events.append("rename"), rename(*a)))
    path = make(tmp_path)
    before, after = events[: events.index("rename")], events[events.index("rename") + 1 :]
    everything = [path, *path.rglob("*")]
    assert {entry.stat().st_ino for entry in everything} <= set(before)
    manifest = before.index((path / MANIFEST).stat().st_ino)
    files = [file for file in everything if file.is_file() and file.name != MANIFEST]
    assert all(before.index(file.stat().st_ino) < manifest for file in files)
    assert after == [tmp_path.stat().st_ino]


def test_a_second_save_replaces_the_first(tmp_path):
    make(tmp_path, content="old")
    path = make(tmp_path, content="new")
    assert content(path) == "new"
    assert names(tmp_path) == ["step-00000100"]


def test_a_failed_rename_restores_the_old_checkpoint(tmp_path, monkeypatch):
    path = make(tmp_path, content="old")
    rename = os.rename

    def refuse_staging(source, target):
        if source == storage.staging_path(path):
            raise OSError("disk on fire")
        rename(source, target)

    monkeypatch.setattr(os, "rename", refuse_staging)
    with pytest.raises(OSError, match="disk on fire"):
        make(tmp_path, content="new")
    assert content(path) == "old"


@pytest.mark.parametrize("kind", ["folder", "file", "newer"])
def test_foreign_folders_are_neither_replaced_nor_removed(tmp_path, kind):
    target = tmp_path / ("step-00000100" if kind == "newer" else "mine")
    if kind == "file":
        target.write_text("mine")
    else:
        target.mkdir()
        (target / "mine").write_text("mine")
    if kind == "newer":
        newer = {"format_version": FORMAT_VERSION + 1, "files": {}}
        (target / MANIFEST).write_text(json.dumps(newer))
    text = "was written by a later release" if kind == "newer" else "mine exists and"
    with pytest.raises(CheckpointError, match=rf"{text}.* not replaced"):
        storage.open_staging(target)
    with pytest.raises(CheckpointError, match=rf"{target.name} .* not deleted"):
        storage.remove(target)
    assert (target if kind == "file" else target / "mine").read_text() == "mine"
    assert names(tmp_path) == [target.name]


def test_a_step_folder_without_a_manifest_is_set_aside(tmp_path, caplog):
    target = tmp_path / "step-00000100"
    kept = {}
    for number, manifest in enumerate(
        [None, "{", "[]", "{}", '{"format_version": 0}', "a file"], 1
    ):
        if manifest == "a file":
            target.write_text(manifest)
        else:
            target.mkdir()
            (target / "mine").write_text(f"{number}")
        if target.is_dir() and manifest is not None:
            (target / MANIFEST).write_text(manifest)
        kept[f"damaged-step-00000100{f'-{number}' if number > 1 else ''}"] = number
        with pytest.raises(CheckpointError, match="not deleted"):
            storage.remove(target)
        assert content(make(tmp_path, content="new")) == "new"
        assert names(tmp_path) == sorted([*kept, target.name])
        storage.sweep(tmp_path)
        assert storage.committed(tmp_path) == [target]
        storage.remove(target)
        assert caplog.messages[-1].endswith(f"it was renamed to {tmp_path / list(kept)[-1]}.")
    assert (tmp_path / "damaged-step-00000100-6").read_text() == "a file"
    for name, number in list(kept.items())[:-1]:
        assert (tmp_path / name / "mine").read_text() == f"{number}"


def test_other_files_in_a_replaced_checkpoint_are_kept(tmp_path, caplog):
    for number in ("1", "2"):
        (make(tmp_path) / "notes.txt").write_text(number)
    make(tmp_path, content="new")
    aside = [tmp_path / f"replaced-step-00000100{more}" for more in ("", "-2")]
    assert [(path / "notes.txt").read_text() for path in aside] == ["1", "2"]
    assert str(aside[1]) in caplog.text
    storage.sweep(tmp_path)
    assert names(tmp_path) == [*(path.name for path in aside), "step-00000100"]
    assert content(tmp_path / "step-00000100") == "new"


@pytest.mark.parametrize("damage", ["notes", "manifest"])
def test_other_files_left_by_a_killed_save_are_kept(tmp_path, damage):
    make(tmp_path, content="new")
    aside = make(tmp_path, 7).rename(tmp_path / ".cadence-replaced-step-00000100")
    (aside / ("notes.txt" if damage == "notes" else MANIFEST)).write_text("mine")
    storage.sweep(tmp_path)
    assert names(tmp_path) == ["replaced-step-00000100", "step-00000100"]


def replace_in_manifest(old: str, new: str) -> Callable[[Path], None]:
    def replace(path: Path) -> None:
        text = (path / MANIFEST).read_text()
        (path / MANIFEST).write_text(text.replace(old, new))

    return replace


def truncate(path: Path) -> None:
    (path / "model.bin").write_text("weig")


def flip_a_bit(path: Path) -> None:
    file = path / "shards" / "0.bin"
    data = bytearray(file.read_bytes())
    data[3] ^= 1
    file.write_bytes(data)


def make_the_manifest_unreadable(path: Path) -> None:
    (path / MANIFEST).unlink()
    (path / MANIFEST).mkdir()  # for root too


DAMAGE = {
    "truncated": (truncate, r"model\.bin is damaged: it has 4 bytes, but the manifest says 7"),
    "flipped bit": (flip_a_bit, r"0\.bin is damaged: its SHA-256"),
    "missing file": (lambda path: (path / "model.bin").unlink(), r"model\.bin is missing"),
    "missing manifest": (lambda p: (p / MANIFEST).unlink(), r"manifest\.json is missing"),
    "torn manifest": (replace_in_manifest("}", ""), r"manifest\.json is damaged"),
    "unreadable manifest": (make_the_manifest_unreadable, r"manifest\.json cannot be read: .*Err"),
    "altered manifest": (
        replace_in_manifest('"step": 100', '"step": 101'),
        r"manifest\.json is damaged: its hash differs",
    ),
    "empty manifest": (
        lambda path: (path / MANIFEST).write_text("{}"),
        r"manifest\.json lacks one of the fields",
    ),
    "future version": (
        replace_in_manifest('"format_version": 1', '"format_version": 2'),
        r"manifest\.json has format version 2; .* reads 1 to 1",
    ),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_damage_is_detected(tmp_path, kind):
    path = make(tmp_path)
    damage, message = DAMAGE[kind]
    damage(path)
    with pytest.raises(CheckpointError, match=message):
        verify(path)


@pytest.mark.parametrize("kind", sorted(DAMAGE.keys() - {"future version"}))
def test_a_damaged_checkpoint_can_be_saved_again(tmp_path, kind):
    damage, _ = DAMAGE[kind]
    damage(make(tmp_path, content="old"))
    assert content(make(tmp_path, content="new")) == "new"
    aside = ["damaged-step-00000100"] if "manifest" in kind else []  # else it is known what it was
    assert names(tmp_path) == [*aside, "step-00000100"]


def test_a_checkpoint_set_aside_is_found_by_a_relative_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    root = Path("relative")
    aside = root / ".cadence-replaced-step-00000100"
    make(root).rename(aside)
    assert storage.locate(root / "step-00000100") == aside
    assert storage.committed(root) == [aside]


def test_verify_without_hashes_compares_sizes(tmp_path):
    path = make(tmp_path)
    flip_a_bit(path)
    verify(path, hashes=False)
    truncate(path)
    with pytest.raises(CheckpointError, match="is damaged: it has"):
        verify(path, hashes=False)


def test_committed_lists_checkpoints_by_step(tmp_path):
    assert storage.committed(tmp_path / "nowhere") == []
    expected = [make(tmp_path, step) for step in (20, 3, 100_000_000)]
    storage.open_staging(tmp_path / "step-00000200")
    (tmp_path / "step-00000300").mkdir()
    (tmp_path / "step-00000400").write_text("a file")
    (tmp_path / "logs").mkdir()
    make(tmp_path).rename(tmp_path / "best")
    assert storage.committed(tmp_path) == [expected[1], expected[0], expected[2]]


def test_removing_a_deleted_checkpoint_does_not_warn(tmp_path, caplog):
    remove_or_warn(tmp_path / "step-00000001")
    assert caplog.records == []
    (tmp_path / "step-00000002").mkdir()
    remove_or_warn(tmp_path / "step-00000002")
    assert "An old checkpoint was not removed:" in caplog.text


def test_a_removed_checkpoint_disappears_by_one_rename(tmp_path, monkeypatch):
    keep, path = make(tmp_path, 1), make(tmp_path, 2)
    seen = []
    rmtree = shutil.rmtree
    monkeypatch.setattr(
        shutil, "rmtree", lambda p: (seen.append(storage.committed(tmp_path)), rmtree(p))
    )
    storage.remove(path)
    assert seen == [[keep]]
    assert names(tmp_path) == ["step-00000001"]


def test_files_that_cannot_be_deleted_are_swept_later(tmp_path, monkeypatch, caplog):
    path = make(tmp_path)

    def refuse(folder):
        raise PermissionError(f"stale handle {folder.name}")

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", refuse)
        with pytest.raises(CheckpointError, match=r"Deleting .* stale handle .* are in .*trash"):
            storage.remove(path)
        assert storage.committed(tmp_path) == []
        leftovers = storage.sweep(tmp_path)
        assert "could not be deleted: stale handle" in caplog.text
    assert storage.sweep(tmp_path) == leftovers
    assert names(tmp_path) == []


def test_sweep_removes_only_leftovers_of_killed_saves(tmp_path):
    assert storage.sweep(tmp_path / "nowhere") == []
    kept = make(tmp_path)
    foreign = [".staging-mine", ".trash", "step-00000300", "cadence-staging-x", "tmp-checkpoint"]
    for name in foreign:
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text("mine")
    (tmp_path / ".cadence-staging-file").write_text("a file")
    before = names(tmp_path)
    staging = storage.open_staging(tmp_path / "step-00000200")
    (staging / "half").write_text("written")
    assert storage.sweep(tmp_path) == [staging]
    assert names(tmp_path) == before
    assert content(kept) == "weights"


def test_a_checkpoint_set_aside_is_not_swept_while_its_name_is_taken(tmp_path):
    path = make(tmp_path)
    aside = path.rename(tmp_path / f".cadence-replaced-{path.name}")
    path.mkdir()
    storage.sweep(tmp_path)
    assert content(aside) == "weights"


# One process: every attempt is a fork of it that ends at its n-th call that changes names on the
# disk or waits for it, so all that a killed save can leave behind is there to look at.
KILL = """
import itertools, os, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from test_layout import make, storage

def arm(n):
    calls = itertools.count(1)
    for name in ("fsync", "rename", "replace", "unlink", "rmdir", "mkdir"):
        def dying(*args, _real=getattr(os, name), **kwargs):
            if next(calls) == n:
                os._exit(9)
            return _real(*args, **kwargs)
        setattr(os, name, dying)

action, folder = sys.argv[2], Path(sys.argv[3])
for n in itertools.count(1):
    root = folder / f"{n:03}"
    root.mkdir()
    if action != "create":
        make(root, content="old")
    if action == "set aside":
        (root / "step-00000100" / "manifest.json").unlink()
    if action == "keep notes":
        (root / "step-00000100" / "notes.txt").write_text("mine")
    if (child := os.fork()) == 0:
        arm(n)
        storage.remove(root / "step-00000100") if action == "remove" else make(root, content="new")
        os._exit(0)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if code == 0:
        break
    assert code == 9, code
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="os.fork is needed")
@pytest.mark.parametrize(
    ("action", "before", "after"),
    [("replace", ["old"], ["new"]), ("create", [], ["new"]), ("remove", ["old"], [])],
)
def test_a_kill_at_any_call_leaves_the_old_or_the_new_checkpoint(tmp_path, action, before, after):
    command = [sys.executable, "-c", KILL, str(Path(__file__).parent), action, str(tmp_path)]
    subprocess.run(command, check=True, timeout=120)
    roots = sorted(tmp_path.iterdir())
    seen = [[content(path) for path in storage.committed(root)] for root in roots]
    changed = seen.index(after)
    assert changed > 0
    assert seen == [before] * changed + [after] * (len(seen) - changed)
    for root, contents in zip(roots, seen, strict=True):
        again = tmp_path / f"{root.name}-again"
        shutil.copytree(root, again)
        assert content(make(again, content="next")) == "next"  # the next save needs no sweep
        storage.sweep(root)
        assert names(root) == ["step-00000100"] * len(contents)
        assert [content(path) for path in storage.committed(root)] == contents


@pytest.mark.skipif(not hasattr(os, "fork"), reason="os.fork is needed")
@pytest.mark.parametrize(
    ("action", "file", "text", "aside"),
    [
        ("set aside", "model.bin", "old", "damaged-step-00000100"),
        ("keep notes", "notes.txt", "mine", "replaced-step-00000100"),
    ],
)
def test_a_kill_at_any_call_loses_no_file_of_the_user(tmp_path, action, file, text, aside):
    command = [sys.executable, "-c", KILL, str(Path(__file__).parent), action, str(tmp_path)]
    subprocess.run(command, check=True, timeout=120)
    for root in sorted(tmp_path.iterdir()):
        storage.sweep(root)
        assert content(make(root, content="next")) == "next"
        assert (root / aside / file).read_text() == text
        assert names(root) == [aside, "step-00000100"]


def test_a_checkpoint_of_any_name_is_found_when_set_aside(tmp_path):
    path = make(tmp_path).rename(tmp_path / "best")
    assert storage.locate(path) == path
    aside = path.rename(tmp_path / ".cadence-replaced-best")
    assert storage.locate(path) == aside
    storage.sweep(tmp_path)
    assert content(storage.locate(path)) == "weights"
