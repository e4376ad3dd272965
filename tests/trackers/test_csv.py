import csv
import errno
import fcntl
import math
import os
import shutil
import subprocess
import sys

import pytest
import torch

from trackers import CSVTracker

LOCK = ".metrics.csv.lock"


def table(path):
    with open(path, newline="", encoding="utf-8") as text:
        return list(csv.DictReader(text))


def files(tracker):
    return sorted(path.name for path in tracker.path.parent.iterdir())


@pytest.fixture
def started(tmp_path):
    opened = []

    def start(**options):
        tracker = CSVTracker("run", tmp_path, **options)
        tracker.start()
        opened.append(tracker)
        return tracker

    yield start
    for tracker in opened:
        tracker.finish()


def test_one_row_a_step_and_one_column_a_name(started):
    tracker = started()
    tracker.log({"loss": 0.1, "note": 'say "a, b"\nü'}, 1)
    tracker.log({"loss": 1 / 3, "note": None}, 2)
    tracker.log({"loss": torch.tensor(0.5)}, 3)
    tracker.log({"loss": math.nan}, 4)
    assert table(tracker.path) == [
        {"step": "1", "loss": "0.1", "note": 'say "a, b"\nü'},
        {"step": "2", "loss": repr(1 / 3), "note": ""},
        {"step": "3", "loss": "0.5", "note": ""},
        {"step": "4", "loss": "nan", "note": ""},
    ]


def test_values_of_one_step_share_its_row(started):
    tracker = started()
    tracker.log({"loss": 1.0, "val": 5.0}, 1)
    tracker.log({"loss": 2.0, "val": 123.456}, 2)
    tracker.log({"val": 6.0}, 2)  # a shorter text than what it replaces
    tracker.log({"loss": 3.0}, 3)
    tracker.log({"val": 7.0}, 3)
    tracker.log({"loss": 4.0})
    tracker.log({"loss": 5.0})
    rows = [(row["step"], row["loss"], row["val"]) for row in table(tracker.path)]
    assert rows == [
        ("1", "1.0", "5.0"),
        ("2", "2.0", "6.0"),
        ("3", "3.0", "7.0"),
        ("", "4.0", ""),
        ("", "5.0", ""),
    ]


def test_a_value_step_is_the_step_or_no_value(started):
    """The column is what a run that goes on reads, and takes for integers."""
    tracker = started()
    tracker.log({"step": 3, "loss": 1.0}, 3)
    tracker.log({"step": 4, "loss": 2.0})
    with pytest.raises(ValueError, match=r"'step' is 0\.5, but the step is 5\. Log it under"):
        tracker.log({"step": 0.5, "loss": 3.0}, 5)
    for value in (0.5, "next", True):
        with pytest.raises(ValueError, match=f"'step' is {value!r}, but the step is None"):
            tracker.log({"step": value, "loss": 4.0})
    tracker.log({"val": 4.0}, 5)
    tracker.finish()
    assert table(started(purge_step=5).path) == [
        {"step": "3", "loss": "1.0", "val": ""},
        {"step": "4", "loss": "2.0", "val": ""},
        *[{"step": "", "loss": "4.0", "val": ""}] * 3,
    ]


def test_a_new_name_adds_a_column(started):
    tracker = started()
    tracker.log({"loss": 1.0}, 1)
    tracker.log({"loss": 2.0}, 2)
    tracker.log({"val": {"accuracy": 0.5}}, 2)
    tracker.log({"lr": 0.1, "loss": 3.0}, 3)
    tracker.log({"loss": 4.0}, 4)
    assert tracker.path.read_text() == (
        "step,loss,val/accuracy,lr\n1,1.0,,\n2,2.0,0.5,\n3,3.0,,0.1\n4,4.0,,\n"
    )
    assert files(tracker) == ["metrics.csv"]


def test_a_resumed_run_has_no_step_twice_and_none_missing(started):
    tracker = started()
    for step in range(1, 6):
        tracker.log({"loss": float(step)}, step)
    tracker.finish()
    with open(tracker.path, "a") as torn:
        torn.write("1,1")  # of step 123: no row of its own
    resumed = started(purge_step=4)
    for step in range(4, 8):
        resumed.log({"loss": float(step), "lr": 0.1}, step)
    assert [(row["step"], row["loss"]) for row in table(tracker.path)] == [
        (str(step), str(float(step))) for step in range(1, 8)
    ]


@pytest.mark.parametrize("says_so", [True, False])
def test_a_new_run_keeps_the_table_of_another(started, tmp_path, caplog, says_so):
    tracker = started()
    tracker.log({"val": 1.0}, 1)
    tracker.finish()
    for other in (CSVTracker("run", tmp_path), tracker):
        if says_so:  # as a fit of the Trainer does
            other.begin_anew()
        other.start()
        other.log({"loss": 2.0}, 1)
        other.finish()
    assert table(tracker.path) == [{"step": "1", "loss": "2.0"}]
    assert table(tracker.path.with_name("metrics.1.csv")) == [{"step": "1", "val": "1.0"}]
    assert table(tracker.path.with_name("metrics.2.csv")) == [{"step": "1", "loss": "2.0"}]
    assert len(caplog.messages) == (0 if says_so else 2)
    assert all("purge_step" in m and "metrics.csv" in m for m in caplog.messages)


def test_evaluations_of_a_step_have_a_row_each(tmp_path):
    tracker = CSVTracker("run", tmp_path)
    tracker.start()
    tracker.log({"loss": 1.0}, 5)
    for score in (2.0, 3.0):
        tracker.resume(None, None)
        tracker.start()
        tracker.log({"score": score}, 5)
        tracker.log({"more": score}, 5)
        tracker.finish()
    assert tracker.path.read_text() == "step,loss,score,more\n5,1.0,,\n5,,2.0,2.0\n5,,3.0,3.0\n"


def test_a_table_that_another_process_adds_to_loses_nothing(started, caplog):
    fit, evaluation = started(), started(purge_step=100)
    fit.log({"loss": 1.0}, 1)
    evaluation.log({"score": 0.5}, 1)  # it replaces the file by one with another column
    fit.log({"loss": 2.0}, 2)
    evaluation.log({"score": 0.6}, 2)
    fit.log({"lr": 0.1}, 2)  # the row that it belongs to is no longer the last
    fit.log({"lr": 0.2}, 2)
    evaluation.log({"score": 0.7}, 3)
    assert fit.path.read_text().splitlines() == [
        "step,loss,score,lr",
        "1,1.0,,",
        "1,,0.5,",
        "2,2.0,,",
        "2,,0.6,",
        "2,,,0.2",
        "3,,0.7,",
    ]
    assert caplog.messages == []


def test_a_row_of_another_process_is_not_overwritten(started, tmp_path):
    fit, other = started(), CSVTracker("run", tmp_path)
    fit.log({"loss": 1.0}, 1)
    other.begin_anew()
    other.start()
    other.log({"loss": 7.0}, 1)
    other.finish()
    fit.log({"loss": 2.0}, 1)  # its table has another name, and this one is as long
    assert fit.path.read_text() == "step,loss\n1,7.0\n1,2.0\n"


CHUNKS, ROWS = 30, 60
WRITER = f"""
import sys
from trackers import CSVTracker

name, logging_dir = sys.argv[1:]
tracker = CSVTracker("run", logging_dir)


def start():
    tracker.resume(None, None)
    tracker.start()


start()
for chunk in range({CHUNKS}):
    print("ready", flush=True)
    sys.stdin.readline()  # both are in the same chunk
    for number in range(chunk * {ROWS}, (chunk + 1) * {ROWS}):
        if number % 150 == 10 * len(name):
            start()
        tracker.log({{f"{{name}}/{{chunk // 3}}": number}}, number)
tracker.finish()
"""


def test_processes_that_write_at_once_lose_no_row_and_no_column(tmp_path):
    names = ("fit", "evaluation")
    writers = [
        subprocess.Popen(
            [sys.executable, "-c", WRITER, name, tmp_path],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for name in names
    ]
    try:
        for _ in range(CHUNKS):
            assert [writer.stdout.readline() for writer in writers] == ["ready\n"] * 2
            for writer in writers:
                print(file=writer.stdin, flush=True)
        assert [writer.communicate()[1] for writer in writers] == ["", ""]
    finally:
        for writer in writers:
            writer.kill()
            writer.communicate()
    found = [
        (row.pop("step"), {name: value for name, value in row.items() if value})
        for row in table(tmp_path / "run/metrics.csv")
    ]
    for name in names:
        mine = [one for one in found if next(iter(one[1])).startswith(name)]
        assert mine == [
            (str(number), {f"{name}/{number // ROWS // 3}": str(number)})
            for number in range(CHUNKS * ROWS)
        ]
    assert len(found) == 2 * CHUNKS * ROWS
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["metrics.csv"]


def test_the_lock_is_released_although_a_forked_process_has_its_file(started, monkeypatch):
    tracker = started()
    forked, real = [], fcntl.flock

    def flock(file, operation):
        if operation == fcntl.LOCK_EX:
            forked.append(os.dup(file.fileno()))  # as a worker of a loader has it
        real(file, operation)

    with monkeypatch.context() as patched:
        patched.setattr(fcntl, "flock", flock)
        tracker.log({"loss": 1.0}, 1)
    try:
        with open(tracker.path.with_name(LOCK), "ab") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    finally:
        for descriptor in forked:
            os.close(descriptor)
    assert len(forked) == 1


@pytest.mark.parametrize("how", ["refused", "missing"])
def test_without_file_locks_the_table_is_still_written(started, monkeypatch, caplog, how):
    def refuse(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    if how == "missing":
        monkeypatch.setitem(sys.modules, "fcntl", None)
    else:
        monkeypatch.setattr(fcntl, "flock", refuse)
    tracker = started()
    tracker.log({"loss": 1.0}, 1)
    tracker.log({"val": 2.0}, 2)
    assert tracker.path.read_text() == "step,loss,val\n1,1.0,\n2,,2.0\n"
    assert files(tracker) == ["metrics.csv"]
    logged = [message for message in caplog.messages if "cannot be locked" in message]
    assert caplog.messages == logged
    assert len(logged) == (how == "refused")
    assert all("No locks available" in message and "may be lost" in message for message in logged)


@pytest.mark.parametrize("what", ["file", "folder"])
def test_a_deleted_table_begins_again_with_a_warning(started, caplog, what):
    tracker = started()
    tracker.log({"loss": 1.0}, 1)
    shutil.rmtree(tracker.path.parent) if what == "folder" else tracker.path.unlink()
    tracker.log({"loss": 2.0}, 2)
    tracker.log({"loss": 3.0, "val": 4.0}, 3)
    assert tracker.path.read_text() == "step,loss,val\n2,2.0,\n3,3.0,4.0\n"
    (logged,) = caplog.messages
    assert "was deleted or moved" in logged


def test_long_texts_and_their_line_ends_stay_when_a_column_is_added(started):
    tracker = started()
    limit = csv.field_size_limit()
    tracker.log({"text": "a\r\nb\rc\nd" + "x" * (limit + 1)}, 1)
    tracker.log({"loss": 1.0}, 2)
    assert csv.field_size_limit() == limit
    head, tail = tracker.path.read_bytes().split(b"x" * (limit + 1))
    assert head == b'step,text,loss\n1,"a\r\nb\rc\nd'
    assert tail == b'",\n2,,1.0\n'


class FullDisk:
    """A file that cannot grow beyond `size` bytes."""

    def __init__(self, file, size):
        self.file, self.size = file, size

    def __getattr__(self, name):
        return getattr(self.file, name)

    def write(self, line):
        return self.file.write(line[: self.size - self.file.tell()])


def test_a_full_disk_leaves_whole_rows(started):
    tracker = started()
    tracker.log({"loss": 1.0, "val": 1.0}, 1)
    tracker.log({"loss": 2.0}, 2)
    file = tracker._file
    tracker._file = FullDisk(file, tracker.path.stat().st_size)
    for step, values in ((2, {"val": 123.456}), (3, {"loss": 3.0})):
        with pytest.raises(OSError, match="could be written"):
            tracker.log(values, step)
        assert [row["loss"] for row in table(tracker.path)] == ["1.0", "2.0"]
    tracker._file = file
    tracker.log({"val": 3.0}, 2)
    assert table(tracker.path)[1] == {"step": "2", "loss": "2.0", "val": "3.0"}


def test_a_disk_without_room_for_another_column_leaves_the_table(started, monkeypatch):
    tracker = started()
    tracker.log({"loss": 1.0}, 1)

    def full(path, content):
        assert str(os.getpid()) in path.name  # of this process alone
        with open(path, "wb") as half:
            half.write(content[: len(content) // 2])
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr("pathlib.Path.write_bytes", full)
        with pytest.raises(OSError, match="No space"):
            tracker.log({"val": 2.0}, 2)
    assert files(tracker) == ["metrics.csv"]
    tracker.log({"loss": 3.0}, 3)
    assert [row["step"] for row in table(tracker.path)] == ["1", "3"]


def test_log_before_start_is_an_error(tmp_path):
    with pytest.raises(RuntimeError, match="start"):
        CSVTracker("run", tmp_path / "logs").log({"loss": 1.0}, 1)
    assert list(tmp_path.iterdir()) == []


def test_a_run_that_goes_on_keeps_its_rows(tmp_path):
    tracker = CSVTracker("run", tmp_path)
    for previous, steps in ((None, range(1, 6)), (3, range(4, 6)), ("evaluation", [6])):
        if previous is not None:
            tracker.resume(None, previous if isinstance(previous, int) else None)
        tracker.start()
        for step in steps:
            tracker.log({"loss": step}, step)
        tracker.finish()
    lines = tracker.path.read_text().split()
    assert lines == ["step,loss", *(f"{step},{step}" for step in range(1, 7))]
    tracker.start()  # another run: the table is kept under another name
    tracker.finish()
    assert files(tracker) == ["metrics.1.csv", "metrics.csv"]
