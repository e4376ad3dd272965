"""Checkpoints in folders that hold other files too."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from trainer.checkpoint.storage import (
    commit,
    discard,
    link,
    open_staging,
    recover,
    staging_path,
    verify,
    write_manifest,
)


def save(target: Path, files: dict[str, str], **fields) -> Path:
    staging = open_staging(target, shared=True)
    for name, text in files.items():
        (staging / name).parent.mkdir(parents=True, exist_ok=True)
        (staging / name).write_text(text)
    return commit(staging, target, fields)


def contents(target: Path) -> dict[str, str]:
    return {
        path.relative_to(target).as_posix(): path.read_text()
        for path in sorted(target.rglob("*"))
        if path.is_file() and path.name != "manifest.json"
    }


@pytest.fixture
def target(tmp_path) -> Path:
    return tmp_path / "out"


def test_a_folder_with_nothing_else_is_replaced(target, monkeypatch):
    save(target, {"a": "1", "sub/b": "2"})
    staging = open_staging(target, shared=True)
    assert staging == staging_path(target)  # beside it
    (staging / "c").write_text("3")
    commit(staging, target, {})
    assert contents(target) == {"c": "3"}


@pytest.mark.parametrize("others", [{}, {"notes.txt": "mine", "logs/x": "y"}])
def test_other_files_in_the_folder_stay(target, others):
    target.mkdir()
    for name, text in others.items():
        (target / name).parent.mkdir(exist_ok=True)
        (target / name).write_text(text)
    save(target, {"a": "1", "sub/b": "2"}, n=1)
    assert verify(target)["files"].keys() == {"a", "sub/b"}
    assert contents(target) == {**others, "a": "1", "sub/b": "2"}
    save(target, {"a": "3", "logs/c": "4"}, n=2)
    assert verify(target)["n"] == 2
    assert contents(target) == {**others, "a": "3", "logs/c": "4"}
    assert os.listdir(target.parent) == ["out"]


def test_a_link_and_the_working_directory_are_kept(target, monkeypatch):
    real = target.with_name("real")
    save(real, {"a": "1"})
    target.symlink_to(real)
    save(target, {"a": "2"})
    assert target.is_symlink()
    assert contents(real) == {"a": "2"}
    monkeypatch.chdir(real)
    inode = real.stat().st_ino
    save(real, {"a": "3"})
    assert real.stat().st_ino == inode
    assert contents(real) == {"a": "3"}


def test_a_link_to_a_checkpoint_replaces_another_but_no_file(target):
    first, second = target / "v" / "step-00000001", target / "v" / "step-00000002"
    for path in (first, second):
        save(path, {"a": path.name})
    above, users = target / "last", target / "file"
    users.touch()
    link(first, above)
    link(second, above)
    assert os.readlink(above) == "v/step-00000002"
    assert contents(above) == {"a": second.name}
    with pytest.raises(FileExistsError, match="is not a link"):
        link(first, users)


def test_a_file_in_place_of_the_folder_raises(target):
    target.write_text("x")
    with pytest.raises(NotADirectoryError, match="out is a file; a checkpoint needs a folder"):
        open_staging(target, shared=True)


def test_a_committed_save_is_finished_by_the_next(target):
    target.mkdir()
    staging = open_staging(target, shared=True)
    (staging / "a").write_text("1")
    write_manifest(staging, {"n": 1})  # and killed here
    (open_staging(target, shared=True) / "a").write_text("2")  # which fails, say
    assert verify(target)["n"] == 1


@pytest.mark.parametrize("manifest", [None, "{", "{}"])
def test_a_save_killed_before_its_commit_leaves_the_earlier_one(target, manifest):
    target.mkdir()
    save(target, {"a": "1"}, n=1)
    (target / "mine").write_text("m")
    staging = open_staging(target, shared=True)
    (staging / "a").write_text("2")
    if manifest is not None:
        (staging / "manifest.json").write_text(manifest)
    assert recover(target) == target
    assert verify(target)["n"] == 1
    assert contents(target)["a"] == "1"
    discard(staging)
    assert contents(target) == {"a": "1", "mine": "m"}


def test_recover_finds_a_checkpoint_set_aside(target):
    save(target, {"a": "1"})
    aside = target.with_name(".cadence-replaced-out")
    os.rename(target, aside)
    assert recover(target) == aside
