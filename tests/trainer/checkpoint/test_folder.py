"""Checkpoints in folders that hold other files too."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from trainer.checkpoint import storage as folder_module
from trainer.checkpoint.storage import (
    commit,
    discard,
    open_staging,
    read_manifest,
    recover,
    staging_path,
    verify,
    write_manifest,
)
from trainer.errors import CheckpointError


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


def test_a_new_folder_is_committed_by_one_rename(target):
    assert save(target, {"a": "1", "sub/b": "2"}, n=1) == target
    assert verify(target)["n"] == 1
    assert contents(target) == {"a": "1", "sub/b": "2"}
    assert os.listdir(target.parent) == ["out"]


def test_a_checkpoint_alone_is_replaced_by_one_rename(target, monkeypatch):
    save(target, {"a": "1", "sub/b": "2"})
    staging = open_staging(target, shared=True)
    assert staging == staging_path(target)  # beside it
    (staging / "c").write_text("3")
    commit(staging, target, {})
    assert contents(target) == {"c": "3"}


@pytest.mark.parametrize("others", [{}, {"notes.txt": "mine", "logs/x": "y"}])
def test_files_of_the_user_stay(target, others):
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


def test_an_empty_folder_of_the_user_stays_too(target):
    save(target, {"a": "1"})
    (target / "logs").mkdir()
    save(target, {"b": "1"})
    assert (target / "logs").is_dir()
    assert contents(target) == {"b": "1"}


def test_a_file_added_to_a_checkpoint_later_stays(target):
    save(target, {"a": "1", "old": "x"})
    (target / "tokenizer.json").write_text("t")
    save(target, {"a": "2"})
    assert contents(target) == {"a": "2", "tokenizer.json": "t"}


def test_a_link_and_the_working_folder_stay_what_they_are(target, monkeypatch):
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


def test_a_damaged_checkpoint_is_saved_over(target):
    save(target, {"a": "1"})
    (target / "manifest.json").write_text("{")
    save(target, {"a": "2"})
    assert verify(target)
    assert contents(target) == {"a": "2"}


def test_a_file_is_no_folder(target):
    target.write_text("x")
    with pytest.raises(NotADirectoryError, match="out is a file; a checkpoint needs a folder"):
        open_staging(target, shared=True)


def test_what_a_killed_save_staged_is_cleared(target):
    target.mkdir()
    (open_staging(target, shared=True) / "torn").write_text("x")
    save(target, {"a": "1"})
    assert contents(target) == {"a": "1"}


@pytest.mark.parametrize("moves", [0, 1, 2, 3])
def test_a_save_that_is_killed_between_its_moves_is_finished(target, monkeypatch, moves):
    target.mkdir()
    (target / "mine").write_text("m")
    save(target, {"a": "1", "b": "1", "c": "1"}, n=1)
    real, done = os.replace, []

    def killed(source, goal):
        if len(done) == moves:
            raise KeyboardInterrupt
        done.append(goal)
        real(source, goal)

    monkeypatch.setattr(folder_module.os, "replace", killed)
    with pytest.raises(KeyboardInterrupt):
        save(target, {"a": "2", "b": "2", "d": "2"}, n=2)
    with pytest.raises(CheckpointError, match=r"manifest\.json is missing"):
        read_manifest(target)
    monkeypatch.undo()
    discard(target / ".cadence-staging")  # as a save that sees the error does
    assert recover(target) == target
    assert verify(target)["n"] == 2
    assert {k: v for k, v in contents(target).items() if k != "c"} == {
        "a": "2",
        "b": "2",
        "d": "2",
        "mine": "m",
    }
    assert not (target / ".cadence-staging").exists()


def test_a_save_that_was_committed_is_finished_before_the_next_begins(target):
    target.mkdir()
    staging = open_staging(target, shared=True)
    (staging / "a").write_text("1")
    write_manifest(staging, {"n": 1})  # and killed here
    (open_staging(target, shared=True) / "a").write_text("2")  # which fails, say
    assert verify(target)["n"] == 1


@pytest.mark.parametrize("manifest", [None, "{", "{}"])
def test_a_save_that_is_killed_before_its_commit_leaves_the_earlier_one(target, manifest):
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


def test_a_checkpoint_set_aside_is_found(target):
    save(target, {"a": "1"})
    aside = target.with_name(".cadence-replaced-out")
    os.rename(target, aside)
    assert recover(target) == aside
