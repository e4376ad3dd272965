import json
import math
import shutil
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from trackers import JsonlTracker, read_metrics


@pytest.fixture
def tracker(tmp_path):
    tracker = JsonlTracker(tmp_path / "new folder" / "metrics.jsonl")
    tracker.start()
    yield tracker
    tracker.finish()


def test_records_come_back(tracker):
    before = time.time()
    tracker.log({"loss": 0.1}, 1, epoch=0)
    tracker.log({"loss": 1 / 3, "n": 7, "note": "ü", "flag": True}, 2, time=5.0, source="val")
    first, second = read_metrics(tracker.path)
    assert before <= first.pop("time") <= time.time()
    assert first == {"step": 1, "epoch": 0, "loss": 0.1}
    assert second == {
        "step": 2,
        "epoch": None,
        "time": 5.0,
        "source": "val",
        "loss": 1 / 3,
        "n": 7,
        "note": "ü",
        "flag": True,
    }


def test_tensors_arrays_and_other_objects(tracker):
    tracker.log(
        {
            "one": torch.tensor([2.5]),
            "more": torch.tensor([[1, 2], [3, 4]]),
            "array": np.array([0.5, np.inf]),
            "numpy": np.float32(0.25),
            "pair": (1, None),
            "path": Path("some/where"),
            "keys": {3: "x"},
        },
        1,
    )
    (record,) = read_metrics(tracker.path)
    assert record["one"] == 2.5
    assert record["more"] == [[1, 2], [3, 4]]
    assert record["array"] == [0.5, math.inf]
    assert record["numpy"] == 0.25
    assert record["pair"] == [1, None]
    assert record["path"] == str(Path("some/where"))
    assert record["keys"] == {"3": "x"}


@pytest.mark.parametrize("name", ["step", "epoch", "time", "source"])
def test_a_metric_with_the_name_of_a_field_is_rejected(tracker, name):
    with pytest.raises(ValueError, match=rf"\['{name}'\].*Rename"):
        tracker.log({name: 1}, 1, source="val")
    assert read_metrics(tracker.path) == []


def test_each_record_is_on_disk_at_once_and_offset_is_its_end(tracker):
    assert tracker.offset == 0
    for step in range(3):
        tracker.log({"x": step}, step)
        content = tracker.path.read_bytes()
        assert content.count(b"\n") == step + 1
        assert content.endswith(b"\n")
        assert tracker.sync() == tracker.offset == len(content)


def test_truncate_leaves_what_was_there_and_goes_on_behind_it(tracker):
    tracker.log({"x": 1}, 1)
    offset, content = tracker.offset, tracker.path.read_bytes()
    tracker.log({"x": 2}, 2)
    tracker.truncate(offset)
    assert tracker.path.read_bytes() == content
    tracker.log({"x": 3}, 3)
    assert [record["x"] for record in read_metrics(tracker.path)] == [1, 3]


def test_truncate_before_start_and_to_nothing(tmp_path):
    tracker = JsonlTracker(tmp_path / "metrics.jsonl")
    tracker.truncate(0)
    tracker.path.write_bytes(b"{}\n{}\n")
    tracker.truncate(3)
    assert tracker.path.read_bytes() == b"{}\n"
    tracker.truncate(0)
    assert tracker.path.read_bytes() == b""


@pytest.mark.parametrize("offset", [-1, 2, 4, 7])
def test_truncate_refuses_an_offset_that_ends_no_record(tmp_path, offset):
    tracker = JsonlTracker(tmp_path / "metrics.jsonl")
    tracker.path.write_bytes(b"{}\n{}\n")
    with pytest.raises(ValueError, match=rf"6 bytes.*byte {offset}\b"):
        tracker.truncate(offset)
    assert tracker.path.read_bytes() == b"{}\n{}\n"


@pytest.mark.parametrize("whole", [b"", b'{"x": 1}\n'])
def test_a_torn_last_line_is_not_read_and_is_cut_off_at_start(tmp_path, caplog, whole):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(whole + b'{"x": 2')
    expected = [json.loads(line) for line in whole.splitlines()]
    assert read_metrics(path) == expected
    tracker = JsonlTracker(path)
    tracker.start()
    assert "incomplete record of 7 bytes" in caplog.text
    assert path.read_bytes() == whole
    tracker.log({"x": 3}, 3)
    tracker.finish()
    assert [record["x"] for record in read_metrics(path)] == [*(r["x"] for r in expected), 3]


def test_a_whole_line_that_is_not_json_is_an_error(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"x": 1}\n{"x": \n')
    with pytest.raises(ValueError, match="line 2 is not JSON"):
        read_metrics(path)


def test_a_full_disk_leaves_no_half_of_a_record(tracker, monkeypatch):
    tracker.log({"x": 1}, 1)
    real = tracker._file

    class FullDisk:
        truncate = staticmethod(real.truncate)
        fileno = staticmethod(real.fileno)
        name = real.name

        def write(self, line):
            return real.write(line[:5])

    monkeypatch.setattr(tracker, "_file", FullDisk())
    with pytest.raises(OSError, match="5 of"):
        tracker.log({"x": 2}, 2)
    monkeypatch.setattr(tracker, "_file", real)
    with pytest.raises(OSError, match="lacks"):  # a run that is cut there would miss it, if it came
        tracker.sync()
    tracker.log({"x": 3}, 3)
    assert tracker.sync() == tracker.offset
    assert [record["x"] for record in read_metrics(tracker.path)] == [1, 3]


def test_logging_to_a_closed_record_is_an_error(tmp_path):
    tracker = JsonlTracker(tmp_path / "metrics.jsonl")
    with pytest.raises(RuntimeError, match="start"):
        tracker.log({"x": 1}, 1)
    tracker.finish()
    assert not tracker.tracker.exists()


@pytest.mark.parametrize("what", ["folder", "moved", "replaced"])
def test_a_deleted_or_moved_record_is_recreated(tracker, caplog, what):
    tracker.log({"x": 1}, 1)
    taken = tracker.path.with_name("taken.jsonl")
    if what == "folder":
        shutil.rmtree(tracker.path.parent)
    else:
        tracker.path.rename(taken)
    if what == "replaced":
        shutil.copy(taken, tracker.path)
    tracker.log({"x": 2}, 2)
    assert tracker.sync() == tracker.offset > 0
    tracker.log({"x": 3}, 3)
    kept = [1] if what == "replaced" else []
    assert [record["x"] for record in read_metrics(tracker.path)] == [*kept, 2, 3]
    if what != "folder":
        assert [record["x"] for record in read_metrics(taken)] == [1]
    (logged,) = caplog.messages
    assert "was deleted, moved or replaced" in logged


def test_a_deleted_record_that_cannot_be_recreated_is_an_error(tracker):
    tracker.path.unlink()
    tracker.path.mkdir()
    for _ in range(2):
        with pytest.raises(IsADirectoryError):
            tracker.log({"x": 1}, 1)
    tracker.path.rmdir()
    tracker.log({"x": 2}, 2)
    assert [record["x"] for record in read_metrics(tracker.path)] == [2]
