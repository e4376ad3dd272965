"""Checkpoints that a project names by itself."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from trainer.checkpoint.accelerator_state import PreparedObjects, load_state, save_state
from trainer.checkpoint.storage import verify
from trainer.configuration import ProjectConfiguration
from trainer.errors import CheckpointError

ALONE = SimpleNamespace(
    is_main_process=True,
    is_local_main_process=True,
    num_processes=1,
    process_index=0,
    local_process_index=0,
)
ROOT = Path("project/checkpoints")


def automatic(**kwargs) -> ProjectConfiguration:
    return ProjectConfiguration(project_dir="project", automatic_checkpoint_naming=True, **kwargs)


def save(project, step=0, output_dir=None) -> Path:
    return save_state(output_dir, PreparedObjects(step=step), ALONE, project)


def load(project, input_dir=None, **kwargs) -> int:
    return load_state(input_dir, PreparedObjects(), ALONE, project, **kwargs)


def names() -> list[str]:
    return sorted(os.listdir(ROOT))


def test_names_are_numbered_and_the_newest_is_loaded():
    project = automatic()
    for step in range(11):
        assert save(project, step, output_dir="ignored") == ROOT / f"checkpoint_{step}"
    assert project.iteration == 11
    assert os.listdir() == ["project"]
    resumed = automatic()
    assert load(resumed) == 10  # not 9, which is the last by name
    assert resumed.iteration == 11
    assert save(resumed) == ROOT / "checkpoint_11"


def test_load_an_older_checkpoint_by_its_path():
    project = automatic()
    for step in range(3):
        save(project, step)
    assert load(project, ROOT / "checkpoint_1") == 1
    assert project.iteration == 2
    assert load(project, str((ROOT / "checkpoint_0").absolute())) == 0
    assert project.iteration == 1


def test_total_limit():
    project = automatic(total_limit=2)
    for number in (2, 9, 10):
        project.iteration = number
        save(project)
    assert names() == ["checkpoint_10", "checkpoint_9"]
    (ROOT / "checkpoint_3").mkdir()  # the user's
    (ROOT / "checkpoint_old").mkdir()
    save(project)
    assert names() == ["checkpoint_10", "checkpoint_11", "checkpoint_3", "checkpoint_old"]
    project.iteration = 1  # below the others': they would go in place of this one
    with pytest.raises(
        ValueError, match=r"checkpoint_1 is the next .* checkpoint_3, checkpoint_10,"
    ):
        save(project)
    assert names() == ["checkpoint_10", "checkpoint_11", "checkpoint_3", "checkpoint_old"]
    project.total_limit = 1
    project.iteration = 12
    save(project)
    assert names() == ["checkpoint_12", "checkpoint_3", "checkpoint_old"]


def test_a_failed_save_deletes_and_counts_nothing():
    project = automatic(total_limit=1)
    save(project)
    project.iteration = 0
    with pytest.raises(
        ValueError, match=r"checkpoint_0 of another run .*configuration\.iteration to 1"
    ):
        save(project)
    assert project.iteration == 0
    verify(ROOT / "checkpoint_0")
    project.iteration = 1

    def refuse(*args):
        raise OSError("no")

    with pytest.raises(CheckpointError):
        save_state(None, PreparedObjects(), ALONE, project, hooks=[refuse])
    assert project.iteration == 1
    assert names() == ["checkpoint_0"]


def test_a_failed_delete_warns(monkeypatch, caplog):
    project = automatic(total_limit=1)
    save(project)

    def refuse(path):
        raise CheckpointError("busy")

    monkeypatch.setattr("trainer.checkpoint.save.remove", refuse)
    assert save(project) == ROOT / "checkpoint_1"
    assert "An old checkpoint was not removed:" in caplog.text
    assert project.iteration == 2
    verify(ROOT / "checkpoint_1")


def test_a_damaged_checkpoint_is_skipped(caplog):
    project = automatic()
    for step in range(3):
        save(project, step)
    (ROOT / "checkpoint_2" / "sampler.json").write_text("x")
    assert load(project) == 1
    assert project.iteration == 3  # the next save must find its name free
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert "checkpoint_2 is not used" in caplog.text
    for number in (0, 1):
        (ROOT / f"checkpoint_{number}" / "manifest.json").unlink()
    with pytest.raises(CheckpointError, match="none of the 3 checkpoints is intact"):
        load(project)


def test_leftovers_of_a_killed_delete_are_removed_by_the_next_save():
    project = automatic(total_limit=1)
    save(project, 0)
    left = ROOT / ".cadence-trash-checkpoint_9"
    left.mkdir()
    load(automatic())
    assert left.exists()  # who loads need not be who writes
    save(project, 1)
    assert not left.exists()


def test_load_without_a_checkpoint_raises():
    with pytest.raises(CheckpointError, match="holds no checkpoint_<number>"):
        load(automatic())


def test_a_folder_is_needed_without_automatic_naming():
    project = ProjectConfiguration(project_dir="project")
    with pytest.raises(ValueError, match="output_dir is None and automatic"):
        save(project)
    with pytest.raises(ValueError, match="input_dir is None and automatic"):
        load(project)
    assert save(project, 4, output_dir="a/b") == Path("a/b")
    assert save(project, 5, output_dir="a/b") == Path("a/b")
    assert project.iteration == 2  # as documented, of these saves too
    assert load(project, "a/b") == 5
    assert project.iteration == 2
    with pytest.raises(TypeError, match="map_location"):
        load(project, "a/b", map_location="x")


def test_automatic_naming_needs_a_project_dir():
    project = ProjectConfiguration(automatic_checkpoint_naming=True)
    for function in (save, load):
        with pytest.raises(ValueError, match="needs a project_dir"):
            function(project)
    saved = save(automatic(), 3)
    assert load(project, saved) == 3  # which needs no names
    assert project.iteration == 0
