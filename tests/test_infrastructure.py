"""The pool of ranks and the fixture that fails a test for what it leaves behind."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import warnings
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.helpers.ranks import RankError, RankPool

ROOT = Path(__file__).resolve().parents[1]


@dataclass
class Point:
    x: int


def double(value: int) -> int:
    return 2 * value


@pytest.fixture(scope="module")
def own_pool() -> Iterator[RankPool]:
    """A pool whose processes a test may break."""
    pool = RankPool(2)
    yield pool
    pool.close()


def test_call_returns_one_value_per_rank(ranks2):
    def sum_of_ranks(point: Point) -> tuple[int, int]:
        tensor = torch.tensor([point.x + dist.get_rank()])
        dist.all_reduce(tensor)
        return dist.get_rank(), double(int(tensor))

    assert ranks2(sum_of_ranks, Point(10)) == [(0, 42), (1, 42)]


def test_classes_of_the_test_come_back_as_themselves(ranks2):
    values = ranks2(lambda: Point(dist.get_rank()))
    assert values == [Point(0), Point(1)]
    assert type(values[0]) is Point


def test_ranks_have_the_environment_of_torchrun(ranks2):
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
    values = ranks2(lambda: [os.environ[name] for name in names])
    assert values == [["0", "0", "2", "2"], ["1", "1", "2", "2"]]


def test_a_call_leaves_no_trace_in_the_next(ranks2):
    def change() -> None:
        os.environ["LEFT"] = "over"
        os.environ["RANK"] = "7"
        torch.set_default_dtype(torch.float64)
        torch.use_deterministic_algorithms(True)
        torch.set_num_threads(2)
        torch.manual_seed(99)
        os.chdir("/")

    def look() -> tuple[object, ...]:
        return (
            os.environ.get("LEFT"),
            os.environ["RANK"],
            torch.get_default_dtype(),
            torch.are_deterministic_algorithms_enabled(),
            torch.get_num_threads(),
            torch.rand(1).item(),
            os.getcwd(),
        )

    before = ranks2(look)
    ranks2(change)
    assert ranks2(look) == before
    assert before[0][0] is None


def test_failure_shows_the_traceback_and_names_the_rank(ranks2):
    def fail_on_one() -> None:
        if dist.get_rank() == 1:
            raise LookupError("the first rank is well")

    with pytest.raises(RankError, match="1 of 2 ranks failed, rank 1 first") as caught:
        ranks2(fail_on_one)
    assert list(caught.value.failures) == [1]
    assert "in fail_on_one" in str(caught.value)
    assert "LookupError: the first rank is well" in str(caught.value)


def test_pool_survives_a_failure_that_left_the_ranks_in_step(ranks2):
    before = ranks2(os.getpid)
    with pytest.raises(RankError, match="2 of 2 ranks failed"):
        ranks2(lambda: [][1])
    assert ranks2(os.getpid) == before


def test_a_value_that_cannot_travel_is_a_failure(ranks2):
    with pytest.raises(RankError, match="cannot pickle"):
        ranks2(threading.Lock)


def test_warnings_are_errors_on_ranks(ranks2):
    with pytest.raises(RankError, match="UserWarning: beware"):
        ranks2(lambda: warnings.warn("beware", stacklevel=1))


def test_a_crash_in_a_thread_of_a_rank_is_a_failure(ranks2):
    def crash() -> None:
        thread = threading.Thread(target=lambda: 1 // 0, name="divider")
        thread.start()
        thread.join()

    with pytest.raises(RankError, match=r"thread 'divider' crashed:(?s:.)*ZeroDivisionError"):
        ranks2(crash)


def test_a_peer_that_waits_for_a_failed_rank_is_shown_and_replaced(own_pool, monkeypatch):
    monkeypatch.setattr("tests.helpers.ranks.GRACE", 0.5)
    before = own_pool(os.getpid)

    def fail_before_the_barrier() -> None:
        if dist.get_rank() == 0:
            raise LookupError("gone")
        dist.barrier()

    with pytest.raises(RankError, match="rank 0 first") as caught:
        own_pool(fail_before_the_barrier)
    assert "LookupError: gone" in caught.value.failures[0]
    assert "still waiting" in caught.value.failures[1]
    assert "in barrier" in caught.value.failures[1]
    assert set(own_pool(os.getpid)).isdisjoint(before)


def test_a_hang_names_the_silent_rank_and_shows_its_stack(own_pool):
    before = own_pool(os.getpid)

    def wait_on_one() -> None:
        if dist.get_rank() == 1:
            threading.Event().wait()

    with pytest.raises(TimeoutError, match="1 of 2 ranks were silent for 1 s: rank 1") as caught:
        own_pool(wait_on_one, timeout=1)
    assert "in wait_on_one" in str(caught.value)
    assert own_pool(dist.get_rank) == [0, 1]
    assert set(own_pool.pids).isdisjoint(before)


def test_a_death_is_a_failure_of_that_rank(own_pool):
    def die() -> None:
        if dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)

    with pytest.raises(RankError, match="the process died: SIGKILL") as caught:
        own_pool(die)
    assert list(caught.value.failures) == [1]
    assert own_pool(dist.get_rank) == [0, 1]


def test_ranks_out_of_step_are_replaced(own_pool):
    before = own_pool(os.getpid)

    def form_a_group_on_one() -> None:
        if dist.get_rank() == 0:
            dist.new_group([0])

    own_pool(form_a_group_on_one)
    assert set(own_pool(os.getpid)).isdisjoint(before)


def test_what_a_rank_leaves_behind_is_a_failure(own_pool):
    def leave() -> None:
        threading.Thread(target=threading.Event().wait, name="left", daemon=True).start()

    with pytest.raises(RankError, match="left behind: thread 'left'"):
        own_pool(leave)


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel ends the ranks only on Linux")
def test_no_rank_outlives_its_caller(tmp_path):
    script = (
        "import os, signal, threading\n"
        "from tests.helpers.ranks import RankPool\n"
        "def kill_the_caller_and_wait():\n"
        "    os.kill(os.getppid(), signal.SIGKILL)\n"
        "    threading.Event().wait()\n"
        "RankPool(2)(kill_the_caller_and_wait)\n"
    )
    # The ranks hold the pipe as well: reading it to its end waits for theirs.
    run = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path)},
        stdout=subprocess.PIPE,
        timeout=120,
    )
    assert run.returncode == -signal.SIGKILL


LEAKING_TESTS = """
import os, signal, subprocess, sys, threading
import pytest, torch
import torch.distributed as dist

kept = []

def test_clean(tmp_path):
    (tmp_path / "file").write_text("closed")
    thread = threading.Thread(target=print)
    thread.start()
    subprocess.run([sys.executable, "-c", ""], check=True)

def test_monkeypatch_is_no_leak(monkeypatch):
    monkeypatch.setenv("FOR_A_WHILE", "1")

def test_environment():
    os.environ["LEFT"] = "over"

def test_environment_was_put_back():
    assert "LEFT" not in os.environ

def test_thread():
    threading.Thread(target=threading.Event().wait, name="left", daemon=True).start()

def test_process():
    kept.append(subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE))

def test_process_was_killed():
    assert kept[0].wait(10) != 0
    kept[0].stdin.close()

def test_file(tmp_path):
    kept.append(open(tmp_path / "file", "w"))

def test_file_was_named():
    kept[-1].close()

def test_handler():
    signal.signal(signal.SIGTERM, print)

def test_handler_was_put_back():
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL

def test_group(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)

def test_group_was_destroyed():
    assert not dist.is_initialized()

def test_settings():
    kept.append(torch.rand(1).item())
    torch.set_default_dtype(torch.float64)
    torch.use_deterministic_algorithms(True)

def test_settings_were_put_back():
    assert torch.get_default_dtype() is torch.float32
    assert not torch.are_deterministic_algorithms_enabled()
    assert torch.rand(1).item() == kept[-1]

def test_folder(tmp_path):
    assert os.getcwd() == str(tmp_path)

@pytest.mark.gpu
def test_gpu():
    assert torch.cuda.is_available()
"""


@pytest.fixture(scope="module")
def leaking_session(tmp_path_factory) -> dict[str, str]:
    """Run the tests above with our conftest; return what is reported about each."""
    folder = tmp_path_factory.mktemp("leaking")
    (folder / "test_leaking.py").write_text(LEAKING_TESTS)
    report = folder / "report.xml"
    options = [f"--rootdir={folder}", f"--junitxml={report}", "-p", "no:cacheprovider"]
    options += [f"--basetemp={folder / 'temporary'}"]  # which pytest keeps: its tests fail
    command = [sys.executable, "-m", "pytest", "-p", "tests.conftest", *options, "test_leaking.py"]
    (folder / "pytest.ini").write_text("[pytest]\nmarkers = gpu\nfilterwarnings = error\n")
    run = subprocess.run(
        command,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert run.returncode == 1, run.stdout + run.stderr
    found: dict[str, str] = {}
    for case in ElementTree.parse(report).iter("testcase"):
        texts = [
            f"{child.get('message')} {child.text}" for child in case if child.tag != "system-out"
        ]
        found[case.attrib["name"]] = found.get(case.attrib["name"], "") + "".join(texts)
    return found


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("test_environment", "environment variable LEFT: None became 'over'"),
        ("test_thread", "thread 'left'"),
        ("test_process", r"child process \d+: .*input\(\)"),
        ("test_file", "open file .*/file"),
        ("test_handler", "signal handler of SIGTERM"),
    ],
)
def test_a_leak_fails_the_test(leaking_session, name, message):
    assert re.search("the test left behind:(?s:.)*" + message, leaking_session[name])


@pytest.mark.parametrize(
    "name",
    [
        "test_clean",
        "test_monkeypatch_is_no_leak",
        "test_environment_was_put_back",
        "test_process_was_killed",
        "test_file_was_named",
        "test_handler_was_put_back",
        "test_group",
        "test_group_was_destroyed",
        "test_settings",
        "test_settings_were_put_back",
        "test_folder",
    ],
)
def test_a_test_that_cleans_up_passes(leaking_session, name):
    assert leaking_session[name] == ""


def test_a_gpu_test_is_skipped_only_for_want_of_a_gpu(leaking_session):
    assert "needs a CUDA device" in leaking_session["test_gpu"]
