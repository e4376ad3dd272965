"""What several processes with one command line have to say reaches the user once."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest
from torch.distributed import TCPStore
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from trainer.cli import main, telling
from trainer.cli.launch import entry
from trainer.cli.launch.failure import failures_of

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def launcher(monkeypatch) -> Callable[..., TCPStore]:
    """Lets this process be one of torchrun's, which has a store that outlives its processes."""

    def be_one_of_its(attempt: int = 0) -> TCPStore:
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", str(attempt))
        monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
        monkeypatch.setenv("MASTER_PORT", str(store.port))
        return store

    return be_one_of_its


@pytest.fixture
def noted(monkeypatch, tmp_path) -> Callable[[], dict[str, object]]:
    """What this process has noted for its launcher; empty if nothing."""
    file = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(file))

    def read() -> dict[str, object]:
        more = json.loads(file.read_text())["message"]["extraInfo"] if file.exists() else {}
        return {name: more[name] for name in ("py_callstack", "kind", "code") if more}

    return read


def test_alone_a_command_says_it_itself(capsys, noted):
    telling.tell("trainer fit: no", 2)
    assert capsys.readouterr().err == "trainer fit: no\n"
    assert noted() == {}


def test_each_text_is_said_by_the_first_that_comes_with_it(launcher, monkeypatch, capsys, noted):
    store = launcher()
    for text in ("one", "one", "two", "one"):
        telling.tell(text, 2)
    assert capsys.readouterr().err == "one\ntwo\n"
    assert noted()["py_callstack"] == "exit code 2, see what it has said above."
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    telling.tell("one", 2)  # another attempt, after other lines
    assert capsys.readouterr().err == "one\n"
    del store


def test_who_comes_second_stays_until_it_is_said(launcher, monkeypatch, capsys):
    store = launcher()
    saying, may_say, ended = threading.Event(), threading.Event(), threading.Event()

    def slowly(message: str) -> None:
        saying.set()
        assert may_say.wait(20)
        sys.stderr.write(message)

    def second() -> None:
        telling.tell("one", 2)
        ended.set()

    monkeypatch.setattr(telling, "_say", slowly)
    first, other = (
        threading.Thread(target=each) for each in (lambda: telling.tell("one", 2), second)
    )
    first.start()
    assert saying.wait(20)
    other.start()
    assert not ended.wait(0.2)  # its end is that of the first one
    may_say.set()
    first.join()
    other.join()
    assert capsys.readouterr().err == "one"
    del store


def test_better_twice_than_not_at_all(launcher, monkeypatch, capsys):
    monkeypatch.setattr(telling, "_PATIENCE", timedelta(milliseconds=300))
    store = launcher()
    store.add(telling._claim("one"), 1)  # by a process that was ended before it could say so
    telling.tell("one", 2)
    assert capsys.readouterr().err == "one\n"
    del store
    telling.tell("two", 2)  # to nobody
    assert capsys.readouterr().err.endswith("two\n")


@pytest.mark.parametrize(
    ("code", "restarts", "kind", "said"),
    [
        (2, 0, entry.REFUSED, ""),
        (2, 3, entry.REFUSED, ""),  # there will be none
        (1, 0, "SystemExit", ""),
        (1, 3, "SystemExit", "no\n"),  # before the others of the next attempt
    ],
)
def test_our_launcher_says_what_is_noted(
    launcher, monkeypatch, capsys, noted, code, restarts, kind, said
):
    store = launcher()
    monkeypatch.setenv(entry.MARK, str(os.getpid()))
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", str(restarts))
    telling.tell("no", code)
    if not said:
        assert noted() == {"py_callstack": "no", "kind": kind, "code": code}
        file = os.environ["TORCHELASTIC_ERROR_FILE"]  # as the launcher reads it, which ended us
        ended = ProcessFailure(local_rank=0, pid=0, exitcode=-15, error_file=file)
        (found,) = failures_of({0: ended})
        assert (found.exit_code, found.refused, found.text) == (code, code == 2, "no")
    assert capsys.readouterr().err == said
    del store


def test_a_process_that_a_marked_one_started_is_not_marked(monkeypatch, capsys, noted):
    monkeypatch.setenv(entry.MARK, str(os.getppid()))
    telling.tell("no", 2)
    assert (capsys.readouterr().err, noted()) == ("no\n", {})


def test_commands_tell_by_it(monkeypatch, capsys, noted):
    monkeypatch.setenv(entry.MARK, str(os.getpid()))
    assert main(["estimate-memory", "nowhere:Net"]) == 1
    assert capsys.readouterr().err == ""
    assert str(noted()["py_callstack"]).startswith("trainer estimate-memory: There is no module")


def test_torchruns_processes_refuse_once():
    variables = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2"),
            *("--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0", "--monitor-interval=1"),
            *("-m", "trainer", "fit", "--trainer.max_epochz=3"),
        ],
        env=variables,
        capture_output=True,
        text=True,
        timeout=150,
    )
    assert ended.returncode == 1  # torchrun's own
    assert ended.stderr.count("trainer fit: ") == 1
    assert ended.stderr.count("Did you mean 'max_epochs'?") == 1
    assert ended.stderr.count("exitcode  : 2 ") >= 1
    assert ended.stderr.count("traceback : exit code 2, see what it has said above.") >= 1
