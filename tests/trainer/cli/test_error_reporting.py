"""What several processes with one command line have to say reaches the user once."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from torch.distributed import TCPStore
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from trainer.cli import error_reporting, main, program
from trainer.launch import entry
from trainer.launch.failure import failures_of

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


def test_a_single_process_prints_the_error(capsys, noted):
    error_reporting.report("trainer fit: no", 2)
    assert capsys.readouterr().err == "trainer fit: no\n"
    assert noted() == {}


def test_each_error_is_printed_by_one_process(launcher, monkeypatch, capsys, noted):
    store = launcher()
    for text in ("one", "one", "two", "one"):
        error_reporting.report(text, 2)
    assert capsys.readouterr().err == "one\ntwo\n"
    assert noted()["py_callstack"] == "exit code 2; see the message above."
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    error_reporting.report("one", 2)  # another attempt, after other lines
    assert capsys.readouterr().err == "one\n"
    del store


def test_other_processes_wait_until_it_is_printed(launcher, monkeypatch, capsys):
    store = launcher()
    saying, may_say, ended = threading.Event(), threading.Event(), threading.Event()

    def slowly(message: str, *, error: bool) -> None:
        saying.set()
        assert may_say.wait(20)
        sys.stderr.write(message)

    def second() -> None:
        error_reporting.report("one", 2)
        ended.set()

    monkeypatch.setattr(error_reporting, "echo", slowly)
    first, other = (
        threading.Thread(target=each) for each in (lambda: error_reporting.report("one", 2), second)
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


@pytest.mark.parametrize(
    ("code", "restarts", "kind", "said"),
    [
        (2, 0, entry.REFUSED, ""),
        (2, 3, entry.REFUSED, ""),  # there will be none
        (1, 0, "SystemExit", ""),
        (1, 3, "SystemExit", "no\n"),  # before the others of the next attempt
    ],
)
def test_our_launcher_prints_the_noted_error(
    launcher, monkeypatch, capsys, noted, code, restarts, kind, said
):
    store = launcher()
    monkeypatch.setenv(entry.ERROR_PID, str(os.getpid()))
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", str(restarts))
    error_reporting.report("no", code)
    if not said:
        assert noted() == {"py_callstack": "no", "kind": kind, "code": code}
        file = os.environ["TORCHELASTIC_ERROR_FILE"]  # as the launcher reads it, which ended us
        ended = ProcessFailure(local_rank=0, pid=0, exitcode=-15, error_file=file)
        (found,) = failures_of({0: ended})
        assert (found.exit_code, found.refused, found.text) == (code, code == 2, "no")
    assert capsys.readouterr().err == said
    del store


def test_a_child_process_prints_its_own_errors(monkeypatch, capsys, noted):
    monkeypatch.setenv(entry.ERROR_PID, str(os.getppid()))
    error_reporting.report("no", 2)
    assert (capsys.readouterr().err, noted()) == ("no\n", {})


REFUSED = [
    ("estimate-memory nowhere:Net", 1, "trainer estimate-memory: There is no module 'nowhere'"),
    ("launch nothing.py", 2, "trainer launch: there is no script 'nothing.py'"),
    ("fitt", 2, "trainer: error: COMMAND is 'fitt'. Did you mean 'fit'? It must be one of"),
    ("--hlep", 2, "trainer: error: unrecognized arguments: --hlep. Did you mean --help?"),
    ("estimate-memory --bogus", 2, "trainer estimate-memory: error: the following arguments are"),
    ("checkpoints /nowhere", 2, "trainer checkpoints: /nowhere does not exist"),
    ("launch --tee 3 here.py", 2, "trainer launch: error: --tee needs --log_dir"),
    ("test --num-processes 0", 2, "trainer test: error: argument --num_processes/--num-processes"),
]


@pytest.mark.parametrize(("words", "code", "said"), REFUSED)
def test_the_program_notes_its_error_for_the_launcher(
    monkeypatch, capsys, noted, words, code, said
):
    monkeypatch.setenv(entry.ERROR_PID, str(os.getpid()))
    monkeypatch.setattr("sys.argv", ["trainer", *words.split()])
    with pytest.raises(error_reporting.Reported) as end:
        program()
    assert end.value.code == code
    assert tuple(capsys.readouterr()) == ("", "")
    note = noted()
    text = str(note["py_callstack"])
    assert said in text
    assert text.startswith("usage: trainer " if ": error: " in said else said)
    kind = entry.REFUSED if code == 2 else "SystemExit"
    assert (note["kind"], note["code"]) == (kind, code)


def test_a_call_of_main_prints_its_error(launcher, monkeypatch, capsys, noted):
    words, code, said = REFUSED[0]
    store = launcher()
    monkeypatch.setenv(entry.ERROR_PID, str(os.getpid()))
    for _ in range(2):
        assert main(words.split()) == code
    out, err = capsys.readouterr()
    assert (out, err.count(said)) == ("", 2)
    assert noted() == {}
    del store


def test_the_entry_point_is_the_program():
    text = (ROOT / "pyproject.toml").read_text()
    assert f'\n[project.scripts]\ntrainer = "{program.__module__}:{program.__name__}"\n' in text


# Modules of the package without torch, which takes seconds.
LIGHT = f"""
import os, sys, types
package = types.ModuleType("trainer")
package.__path__ = [{str(ROOT / "trainer")!r}]
sys.modules["trainer"] = package
from trainer.cli import main, program
"""


def launch(*words: str) -> int:
    return main(["launch", "--cpu", *words, "train.py"])


def test_a_script_that_calls_a_command_fails_for_its_own_reason(capfd):
    Path("train.py").write_text(
        f"{LIGHT}assert main(['fitt']) == 2\n"
        "sys.argv = ['trainer', 'lanch']\n"
        "try:\n    program()\nexcept SystemExit:\n    pass\n"  # and its note means nothing
        "sys.exit({'0': 3, '1': 'no data', '2': 0}[os.environ['TORCHELASTIC_RESTART_COUNT']])\n"
    )
    assert launch("--max_restarts", "2") == 0  # it is tried again
    text = capfd.readouterr().err
    assert text.count("COMMAND is 'fitt'") == 3
    told = [line.partition("first, ")[2] for line in text.splitlines() if "restarted" in line]
    assert told == [
        "with SystemExit. All processes are restarted (1 of 2).",
        "with SystemExit. All processes are restarted (2 of 2).",
    ]
    assert text.count("no data\n") == 1
    assert launch("--num_processes", "2") == 3
    text = capfd.readouterr().err
    assert text.endswith("failed first:\nit exited with code 3.\n")
    assert "lanch" not in text


def test_under_torchrun_an_error_is_printed_once():
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
    assert ended.stderr.count("unrecognized arguments: --trainer.max_epochz=3\n") == 1
    assert ended.stderr.count("exitcode  : 2 ") >= 1
    assert ended.stderr.count("traceback : exit code 2; see the message above.") >= 1
