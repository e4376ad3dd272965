"""Files opened by a known name, where somebody else has put something else."""

from __future__ import annotations

import io
import os
from pathlib import Path

import pytest

from trackers import CSVTracker, JsonlTracker, TensorBoardTracker
from trackers.jsonl import unused_name
from trainer.files import hidden_beside, read_json, regular, sweep_hidden


@pytest.fixture
def victim(tmp_path) -> Path:
    file = tmp_path / "victim"
    file.write_text("precious\n")
    return file


def plant(kind: str, path: Path, victim: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    if kind == "link":
        path.symlink_to(victim)
    elif kind == "dangling":
        path.symlink_to(victim.with_name("new"))
    elif kind == "pipe":
        os.mkfifo(path)
    else:
        path.mkdir()


KINDS = ("link", "dangling", "pipe", "folder")
pytestmark = pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="os.mkfifo is needed")


@pytest.mark.parametrize("mode", ["rb", "wb", "ab"])
@pytest.mark.parametrize("kind", KINDS)
def test_only_a_regular_file_is_opened(tmp_path, victim, kind, mode):
    plant(kind, tmp_path / "file", victim)
    with pytest.raises(OSError, match=r"/file"), open(tmp_path / "file", mode, opener=regular):
        pass
    assert victim.read_text() == "precious\n"
    assert not victim.with_name("new").exists()
    with io.FileIO(victim, "r", opener=regular) as file:
        assert file.readall() == b"precious\n"


def test_a_hidden_name_is_never_one_that_exists(tmp_path):
    names = {hidden_beside(tmp_path / "a[1].json") for _ in range(3)}
    assert len(names) == 3
    (tmp_path / ".cadence-writing-1-a1.json").touch()  # of another file
    sweep_hidden(tmp_path / "a[1].json")
    assert os.listdir(tmp_path) == [".cadence-writing-1-a1.json"]


@pytest.mark.parametrize("text", ["[" * 100_000, "{", '"\xff"'])
def test_what_is_not_json_is_a_value_error(tmp_path, text):
    (tmp_path / "a").write_bytes(text.encode("latin-1"))
    with pytest.raises(ValueError, match=r"nest|Expecting|decode"):
        read_json(tmp_path / "a")
    with pytest.raises(ValueError, match="more than the 0 that are read"):
        read_json(tmp_path / "a", limit=0)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["metrics.jsonl", ".metrics.csv.lock", "metrics.csv"])
def test_a_tracker_does_not_write_through_links_or_pipes(tmp_path, victim, kind, name):
    folder = tmp_path / "run"
    plant(kind, folder / name, victim)
    if name == "metrics.jsonl":
        tracker = JsonlTracker(folder / name)
    else:
        tracker = CSVTracker("run", tmp_path)
        tracker.resume(None, None)
    if (kind, name) == ("dangling", "metrics.csv"):
        tracker.start()  # which replaces it, as a table that does not exist
        assert (folder / name).read_text() == "step\n"
    else:
        with pytest.raises(OSError, match=r"metrics"):
            tracker.start()
    tracker.finish()
    assert victim.read_text() == "precious\n"
    assert not victim.with_name("new").exists()


def test_the_record_is_not_truncated_through_a_link(tmp_path, victim):
    plant("link", tmp_path / "metrics.jsonl", victim)
    with pytest.raises(OSError, match="link, which is not followed"):
        JsonlTracker(tmp_path / "metrics.jsonl").truncate(9)
    plant("dangling", tmp_path / "a.1.jsonl", victim)
    assert unused_name(tmp_path / "a.jsonl").name == "a.2.jsonl"  # a copy would write through it


@pytest.mark.parametrize(
    "make",
    [
        lambda: JsonlTracker("logs/run/metrics.jsonl"),
        lambda: CSVTracker("run", "logs"),
        lambda: TensorBoardTracker("run", "logs"),
    ],
)
def test_files_stay_in_their_folder_if_the_working_folder_changes(tmp_path, monkeypatch, make):
    tracker = make()
    tracker.start()
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path / "other")
    (file,) = (tmp_path / "logs" / "run").iterdir()
    for step in (1, 2):  # a new name rewrites the table
        size = file.stat().st_size
        tracker.log({f"loss {step}": 1.0}, step)
        assert file.stat().st_size > size
    tracker.finish()
    assert not list((tmp_path / "other").iterdir())
