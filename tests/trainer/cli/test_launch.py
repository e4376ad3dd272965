"""The command `trainer launch`. Most scripts here need no torch, and start at once."""

from __future__ import annotations

import argparse
import ipaddress
import itertools
import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
import zipapp
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.helpers.requires import NO_KUBERNETES_VALIDATE
from trainer.cli import main
from trainer.cli.launch import parser
from trainer.launch import entry, group
from trainer.launch.failure import Failure, first_of, report
from trainer.launch.plan import configure, launch_command, launch_command_parser, make_plan
from trainer.launch.rendezvous import private_variables

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(autouse=True)
def no_file(monkeypatch, tmp_path):
    """No configuration of whoever runs the tests, and none of a launcher around them."""
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    for name in list(os.environ):
        if name.startswith(("ACCELERATE_", "SLURM_", "OMP_NUM", "RANK", "WORLD_SIZE", "LOCAL_")):
            monkeypatch.delenv(name)
    # Where an error is missed, a single process would take the place of pytest and end well.
    monkeypatch.setattr("os.execvp", lambda *_: pytest.fail("this process becomes the script"))


def write(name: str, text: str) -> str:
    Path(name).write_text(text)
    return name


# Not `signal.pause()`: a signal that comes just before it is heard by the one after only.
WAIT = "import time\nwhile True:\n    time.sleep(0.01)\n"


def launch(*words: str) -> int:
    """Start processes on the CPU, from this process."""
    return main(["launch", "--cpu", *words])


def plan(*words: str):
    arguments = parser("trainer launch").parse_args(words)
    return make_plan(arguments, configure(arguments))


# -- what a process sees ---------------------------------------------------------------------------

SEEN = """
import json, multiprocessing, os, pickle, sys

class Own:
    pass

def child(queue):
    queue.put(Own())

if __name__ == "__main__":
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    process = context.Process(target=child, args=(queue,))
    process.start()
    own = queue.get(timeout=100)
    process.join()
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "ACCELERATE_USE_CPU", "OMP_NUM_THREADS",
             "ACCELERATE_MIXED_PRECISION")
    seen = {"argv": sys.argv, "path": sys.path[0], "file": __file__,
            "own": type(own) is Own, "trainer": "trainer" in sys.modules,
            "main": sys.modules["__main__"].__dict__ is globals(),
            **{name: os.environ.get(name) for name in names}}
    with open(f"seen-{os.environ.get('RANK')}.json", "w") as file:
        json.dump(seen, file)
"""


def seen(rank: object) -> dict[str, object]:
    return json.loads(Path(f"seen-{rank}.json").read_text())


def test_each_process_runs_the_script_as_python_would(tmp_path):
    Path("folder").mkdir()
    write("folder/train.py", SEEN)
    assert launch("--num_processes", "2", "folder/train.py", "--x_y", "-m", "--cpu") == 0
    for rank in range(2):
        found = seen(rank)
        assert found["argv"] == ["folder/train.py", "--x_y", "-m", "--cpu"]
        assert found["path"] == str(tmp_path / "folder")
        assert found["file"] == str(tmp_path / "folder" / "train.py")
        assert found["own"]  # a class of the script crosses to a spawned process and back
        assert found["main"]
        assert not found["trainer"]  # which the folder might have one of its own of
        assert (found["RANK"], found["LOCAL_RANK"], found["WORLD_SIZE"]) == (str(rank),) * 2 + (
            "2",
        )
        assert found["ACCELERATE_USE_CPU"] == "true"
        assert found["OMP_NUM_THREADS"] == str(max(1, len(os.sched_getaffinity(0)) // 2))
        assert found["ACCELERATE_MIXED_PRECISION"] is None
    assert "ACCELERATE_USE_CPU" not in os.environ


BESIDE = """
import json, os, sys

import beside

with open(f"seen-{os.environ['RANK']}.json", "w") as file:
    json.dump([__name__, beside.RATE, sys.argv[1:], sys.path[0]], file)
"""


@pytest.mark.parametrize("program", ["program", "program.pyz"])
def test_a_folder_and_an_archive_are_run_as_python_would(program, tmp_path):
    Path("program").mkdir()
    write("program/beside.py", "RATE = 3")
    write("program/__main__.py", BESIDE)
    zipapp.create_archive("program", "program.pyz")
    assert launch("--num_processes", "2", program, "--x") == 0
    assert seen(0) == seen(1) == ["__main__", 3, ["--x"], str(tmp_path / program)]


def test_a_tool_that_python_starts_with_does_not_hide_the_script(monkeypatch, tmp_path):
    write("train.py", SEEN)
    Path("tools").mkdir()
    write("tools/sitecustomize.py", "import multiprocessing")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "tools"), prepend=os.pathsep)
    assert launch("--num_processes", "1", "--max-restarts=1", "--cpu", "train.py") == 0
    assert seen(0)["own"]


def test_a_module_and_a_program(tmp_path):
    Path("package").mkdir()
    write("package/__init__.py", "")
    write("package/train.py", SEEN)
    options = ("--max-restarts=1", "--mixed-precision", "bf16")  # a single one that is watched
    assert launch(*options, "-m", "package.train", "--x") == 0
    found = seen(0)
    assert found["argv"] == [str(tmp_path / "package" / "train.py"), "--x"]
    assert found["path"] == str(tmp_path)
    assert found["own"]
    assert found["ACCELERATE_MIXED_PRECISION"] == "bf16"
    assert launch("--num_processes", "2", "--no_python", "sh", "-c", "echo > $RANK.txt") == 0
    assert Path("0.txt").exists()
    assert Path("1.txt").exists()


def test_one_process_becomes_the_script(tmp_path):
    write("train.py", SEEN + "    print(os.getpid())\n    sys.exit(9)\n")
    process = subprocess.Popen(
        [sys.executable, "-m", "trainer", "launch", "--cpu", "train.py", "--x"],
        stdout=subprocess.PIPE,
        text=True,
    )
    output, _ = process.communicate(timeout=100)
    assert process.returncode == 9
    assert output == f"{process.pid}\n"
    found = seen(None)
    assert found["argv"] == ["train.py", "--x"]
    assert found["ACCELERATE_USE_CPU"] == "true"
    assert found["WORLD_SIZE"] is None


@pytest.fixture
def port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return str(listener.getsockname()[1])


@contextmanager
def launcher(number: int, port: str, *words: str):
    """Another launcher on this host, as if it were on another one."""
    meeting = ["--num_machines", "2", "--main_process_ip", "127.0.0.1", "--main_process_port", port]
    command = [sys.executable, "-m", "trainer", "launch", "--cpu", "--machine_rank", str(number)]
    process = subprocess.Popen([*command, *meeting, *words])
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def test_machines_meet(port):
    script = "import os\nopen(os.environ['RANK'] + ' of ' + os.environ['WORLD_SIZE'], 'w').close()"
    words = ["--num_processes", "4", write("train.py", script)]
    with launcher(0, port, *words) as first, launcher(1, port, *words) as second:
        assert first.wait(100) == second.wait(100) == 0
    assert sorted(path.name for path in Path().glob("* of 4")) == [f"{n} of 4" for n in range(4)]


@pytest.mark.parametrize("failing", [0, 1])
def test_a_machine_that_fails_ends_those_that_wait_for_it(monkeypatch, capfd, port, failing):
    script = (
        "import os, time\n"
        f"if os.environ['RANK'] == '{failing}':\n    raise ValueError('no data here')\n"
        "time.sleep(100)\n"
    )
    words = ["--num_processes", "2", write("train.py", script)]
    monkeypatch.setattr("trainer.launch.group._GRACE", 0.0)
    meeting = ["--num_machines", "2", "--main_process_ip", "127.0.0.1", "--main_process_port", port]
    with launcher(failing, port, *words) as other:
        assert launch("--machine_rank", str(1 - failing), *meeting, *words) == 1
        assert other.wait(100) == 1
    said = capfd.readouterr().err
    host = socket.gethostname()
    assert (
        f"trainer launch: rank {failing} of 2 on {host} failed first: ValueError: no data here. "
        "The processes of this machine were still running 0 seconds later and were terminated."
        in said
    )


def test_a_machine_ended_by_a_signal_is_not_waited_for(port):
    script = (
        "import os, signal, sys, time\n"
        "if os.environ['RANK'] == '1':\n"
        "    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))\n"
        "    os.kill(os.getppid(), signal.SIGTERM)\n"
        "    time.sleep(100)\n"
    )
    words = ["--num_processes", "2", write("train.py", script)]
    with launcher(0, port, *words) as first, launcher(1, port, *words) as second:
        assert second.wait(100) == 143
        assert first.wait(100) == 0


def test_waiting_for_other_machines_is_shown_with_how_they_meet(monkeypatch, capfd, port):
    monkeypatch.setattr("trainer.launch.group._NOTICE", 0.0)
    words = ["--num_machines", "2", "--machine_rank", "0", "--main_process_ip", "127.0.0.1"]
    words += ["--main_process_port", port, "--rdzv_conf", "timeout=1", write("train.py", "")]
    assert launch(*words) == 1
    said = capfd.readouterr().err
    how = f"machine 0 must be 127.0.0.1, and all must reach its port {port}."
    same = "The same program must be launched on all machines"
    assert f"still waiting for 2 machines. {same}; {how}" in said
    assert f"the rendezvous of the launchers at 127.0.0.1:{port} failed: " in said
    assert said.rstrip().endswith(how)


# -- what is said at the end -----------------------------------------------------------------------


def test_the_failing_rank_is_named_with_its_traceback(capfd, tmp_path):
    write(
        "train.py",
        "import os, signal\n"
        "def deep():\n    raise ValueError('number one is bad\\nin two lines')\n"
        "if os.environ['RANK'] == '0':\n    signal.pause()\n"
        "try:\n    {}['key']\nexcept KeyError:\n    deep()\n",
    )
    assert launch("--num_processes", "2", "train.py") == 1
    text = capfd.readouterr().err
    assert text.count("ValueError: number one is bad") == 1
    _, _, last = text.partition(f"rank 1 of 2 on {socket.gethostname()} failed first:\n")
    assert last.startswith("Traceback (most recent call last):\n")
    assert f'File "{tmp_path}/train.py", line 3, in deep' in last
    assert last.endswith("ValueError: number one is bad\nin two lines\n")
    assert "KeyError: 'key'" in last  # from which it came
    assert "launch/entry.py" not in text
    assert "runpy" not in text


# Python's words for an exception without any
UNPRINTABLE = (
    "<exception str() failed>" if sys.version_info >= (3, 11) else "<unprintable {} object>"
)


@pytest.mark.parametrize(
    ("line", "code", "said"),
    [
        ("sys.exit(7)", 7, "rank 1 of 2 on {host} failed first:\nit exited with code 7.\n"),
        ("sys.exit('no data')", 1, "rank 1 of 2 on {host} failed first:\nno data\n"),
        (
            "os.kill(os.getpid(), 9)",
            137,
            "rank 1 on {host} failed first:\n"
            "it was ended by SIGKILL, as when the machine runs out of memory.\n",
        ),
        ("exec('def')", 1, "SyntaxError: invalid syntax\n"),
        (
            "E = type('E', (Exception,), {'__str__': lambda self: 1 / 0})\nraise E",
            1,
            f"E: {UNPRINTABLE.format('E')}\n",
        ),
    ],
)
def test_the_code_is_that_of_the_failing_process(capfd, line, code, said):
    write(
        "train.py",
        f"import os, signal, sys\nsignal.pause() if os.environ['RANK'] == '0' else None\n{line}\n",
    )
    assert launch("--num_processes", "2", "train.py") == code
    text = capfd.readouterr().err
    assert text.endswith(said.format(host=socket.gethostname()))
    assert text.count(said.splitlines()[-1]) == 1


# Torch does not close the files of processes that have ended by themselves.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_output_is_kept_in_the_log_dir(capfd):
    write("train.py", "print('hello')")
    assert launch("--log_dir", "logs", "train.py") == 0
    assert capfd.readouterr().out == ""
    assert launch("--log_dir", "logs", "--tee", "3", "train.py") == 0
    assert capfd.readouterr().out == "[rank 0] hello\n"
    kept = [path.read_text() for path in Path("logs").rglob("stdout.log")]
    assert kept == ["hello\n"] * 2


@pytest.mark.parametrize(
    ("line", "shown"),
    [
        ("raise ValueError('bad')", "ValueError: bad"),
        ("sys.exit('no data')", "no data"),
        ("os.kill(os.getpid(), signal.SIGKILL)", "it was ended by SIGKILL"),
    ],
)
def test_a_failure_is_shown_before_all_are_restarted(capfd, line, shown):
    write(
        "train.py",
        "import os, signal, sys\n"
        f"if os.environ['TORCHELASTIC_RESTART_COUNT'] != '2':\n    {line}\n",
    )
    assert launch("--max_restarts", "2", "train.py") == 0
    text = capfd.readouterr().err
    assert text.count(shown) == 2
    told = [each for each in text.splitlines() if "All processes are restarted" in each]
    for number, each in enumerate(told, 1):
        assert each.startswith("rank 0 ")
        assert each.endswith(f"({number} of 2).")
    assert len(told) == 2
    assert "launch/entry.py" not in text


def test_pythonsafepath_is_respected(monkeypatch, tmp_path):
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path / 'own'}{os.pathsep}{ROOT}")
    monkeypatch.setenv("PYTHONSAFEPATH", "1")  # of Python 3.11; earlier ones do not look at it
    Path("own").mkdir()
    write("own/owned.py", "")
    write("train.py", "import owned")
    assert launch("--max_restarts", "1", "train.py") == 0


def test_hooks_of_services_hear_of_the_exception(capfd):
    write(
        "train.py",
        "import sys\n"
        "def hook(kind, error, frames):\n    open(str(error), 'w').close()\n"
        "    sys.__excepthook__(kind, error, frames)\n"
        "sys.excepthook = hook\nraise ValueError('heard')\n",
    )
    assert launch("--num_processes", "2", "train.py") == 1
    assert Path("heard").exists()
    assert capfd.readouterr().err.count("ValueError: heard\n") <= 2  # the last, and a summary


def failure(rank: int, code: int = 1, seen: float = 100, raised: float | None = None) -> Failure:
    return Failure(rank=rank, code=code, seen=seen, raised=raised, kind="", text="", who="")


@pytest.mark.parametrize(
    ("failures", "rank"),
    [
        ([failure(0, raised=100.9), failure(1, raised=100.2)], 1),
        # Its peers noticed that it was gone before the launcher did.
        ([failure(0, raised=100.9), failure(1, -9, seen=101)], 1),
        # The launcher gave up waiting for it.
        ([failure(0, raised=100.9), failure(1, -9, seen=130)], 0),
        ([failure(0, -15), failure(1, seen=101, raised=101.5)], 1),
        ([failure(0, -15)], 0),
        ([failure(0, code=3, seen=102), failure(1, seen=101, raised=101.5)], 1),
    ],
)
def test_the_first_failure_is_distinguished_from_those_that_follow(failures, rank):
    assert first_of(failures, 0.1).rank == rank
    assert first_of(failures[::-1], 0.1).rank == rank


@pytest.mark.parametrize(
    "gone",
    [
        "RuntimeError: [/b/gloo/transport/tcp/pair.cc:553] Connection closed by peer [::1]:1.",
        "RuntimeError: Rank 1 failed while the others waited for it, in fit: KeyboardInterrupt",
    ],
)
def test_a_collective_that_failed_follows_from_the_exception_of_another_rank(gone):
    # Rank 1 had left its group, as a `finally` may, before its exception reached the top.
    kinds = {"rank": 0, "code": 1, "seen": 100, "kind": "RuntimeError", "who": "rank 0"}
    victim = Failure(raised=100.1, text=f"Traceback\n{gone}", **kinds)
    assert first_of([victim, failure(1, raised=100.2)], 0.1).rank == 1
    assert first_of([victim, failure(1, raised=100.2, seen=100)][:1], 0.1).rank == 0
    # The peer that did not answer was stopped, and the launcher ended it in the end.
    assert first_of([victim, failure(1, -9, seen=130)], 0.1).rank == 0
    assert first_of([victim, failure(1, -9, seen=101)], 0.1).rank == 1


def test_exit_codes_of_signals():
    assert failure(0, -15, raised=100.1).exit_code == 1
    assert replace(failure(0, -15, raised=100.1), meant=2).exit_code == 2
    assert failure(0, -15).exit_code == 143
    assert report([failure(0, -40)], 0.1) == (" failed first:\nit was ended by signal 40.", 168)


def test_the_same_message_of_several_ranks_is_shown_once():
    def said(rank: int, text: str) -> Failure:
        return replace(failure(rank, raised=100.1 + rank), text=text, who=f"rank {rank} of 4 on a")

    two = [said(0, "no data\nat all"), said(1, "no data\nat all")]
    other = said(2, "it is\nanother")
    first = "rank 0 of 4 on a failed first:\nno data\nat all"
    assert report(two, 0.1) == (f"rank 1 failed the same way.\n{first}", 1)
    text, _ = report([*two, other, said(3, "no data\nat all")], 0.1)
    told = "rank 2 of 4 on a failed after that: another\nranks 1, 3 failed the same way.\n"
    assert text == told + first
    dead = [failure(0, -9), failure(1, -9)]  # of which neither could say why
    assert "same way" not in report(dead, 0.1)[0]


def test_a_note_below_an_exception_does_not_hide_it():
    """The Trainer notes the hidden frames below each exception."""
    frames = 'Traceback (most recent call last):\n  File "a.py", line 1, in <module>\n    fit()\n'
    note = "\nepoch 0, update 4: 9 frames hidden"
    lost = "RuntimeError: [gloo/transport/tcp/pair.cc:547] Connection closed by peer"
    peer = replace(failure(0, raised=100.1), text=frames + lost + note)
    cause = replace(failure(1, raised=100.2), text=frames + "ValueError: no labels" + note)
    text, _ = report([peer, cause], 0.1)
    assert text.startswith(f" failed after that: {lost}\n")
    assert text.endswith(cause.text)


def test_a_process_that_the_launcher_had_to_kill_is_no_sign_of_full_memory():
    first = failure(0, 7, seen=100)
    told, code = report([first, failure(1, -9, seen=130)], 0.1)
    assert told.startswith(" did not end within 30 seconds after that, and was killed.\n")
    assert code == 7
    earlier, _ = report([first, failure(1, -9, seen=129)], 0.1)
    assert earlier.startswith(" failed after that: it was ended by SIGKILL")
    noted = replace(failure(1, -9, seen=130, raised=101), text="ValueError: late")
    assert " failed after that: ValueError: late\n" in report([first, noted], 0.1)[0]


def test_an_invalid_configuration_is_shown_once_and_not_restarted(capfd):
    Path("mine.py").write_text("import trainer\nclass Net(trainer.TrainModule): pass\n")
    words = "--model mine.Net --trainer.max_epochs=-3"
    options = ("--num_processes", "2", "--max_restarts", "1", "--monitor_interval", "1")
    assert launch(*options, "-m", "trainer", "fit", *words.split()) == 2
    text = capfd.readouterr().err
    assert text.count("max_epochs is -3") == 1
    last = text.partition(f" of 2 on {socket.gethostname()} failed first:\n")[2]
    assert last.startswith("trainer fit: max_epochs is -3; it must be a whole number of at least 0")
    assert "restarted" not in text
    assert "exited with code" not in text


# -- signals ---------------------------------------------------------------------------------------


def test_a_preempted_run_is_neither_restarted_nor_ended_in_its_teardown(capfd):
    write(
        "train.py",
        "import os, time\nfrom trainer.errors import Preempted\n"
        "rank = os.environ['RANK']\nopen(f'began-{rank}', 'a').write('x')\n"
        "class Own(Preempted): pass\n"
        "try:\n    raise Own(143)\n"
        "finally:\n"
        "    while rank == '0' and not os.path.exists('over'):\n        time.sleep(0.01)\n"
        "    open(f'down-{rank}', 'w').close()\n"
        "    if rank == '1':\n        os.fork() or (time.sleep(1), open('over', 'w').close())\n",
    )
    assert launch("--num_processes", "2", "--max_restarts", "2", "train.py") == 143
    assert Path("began-0").read_text() == Path("began-1").read_text() == "x"
    assert Path("down-0").exists()
    assert "failed" not in capfd.readouterr().err


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT", "SIGUSR1"])
def test_a_signal_to_the_launcher_reaches_the_processes_which_may_save(name):
    write(
        "train.py",
        "import os, signal, sys\n"
        f"def save(*_):\n    open('saved-' + os.environ['RANK'], 'w').close()\n    sys.exit(3)\n"
        f"signal.signal(signal.{name}, save)\n"
        "open('ready-' + os.environ['RANK'], 'w').close()\n"
        "while not (os.path.exists('ready-0') and os.path.exists('ready-1')):\n    pass\n"
        f"if os.environ['RANK'] == '1':\n    os.kill(os.getppid(), signal.{name})\n" + WAIT,
    )
    handlers = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    assert launch("--num_processes", "2", "--max_restarts", "1", "train.py") == 128 + getattr(
        signal, name
    )
    assert Path("saved-0").exists()
    assert Path("saved-1").exists()
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)] == handlers


def test_an_exception_during_a_preemption_save_is_a_failure(capfd):
    write(
        "train.py",
        "import os, signal\n"
        "def save(*_):\n    raise OSError('the disk is full')\n"
        "signal.signal(signal.SIGTERM, save)\n"
        "os.kill(os.getppid(), signal.SIGTERM)\n" + WAIT,
    )
    assert launch("--max_restarts", "1", "train.py") == 1
    text = capfd.readouterr().err
    assert text.endswith("OSError: the disk is full\n")
    assert "rank 0 of 1" in text


def test_sighup_is_ignored_under_nohup():
    write("train.py", "import os, signal\nos.kill(os.getppid(), signal.SIGHUP)")
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        assert launch("--max_restarts", "1", "train.py") == 0
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.skipif(sys.platform != "linux", reason="other systems tell nobody of it")
def test_processes_end_when_the_launcher_is_killed(monkeypatch, tmp_path):
    monkeypatch.setenv("TMPDIR", str(tmp_path))  # where it leaves its folder
    write(
        "train.py",
        "import os, signal\n"
        "def end(*_):\n    os.rename(mine, 'told-' + os.environ['RANK'])\n    os._exit(0)\n"
        "signal.signal(signal.SIGTERM, end)\n"
        "mine = 'ready-' + os.environ['RANK']\n"
        "open(mine, 'w').close()\n"
        "while mine == 'ready-0' and not os.path.exists('ready-1'):\n    pass\n"
        "if mine == 'ready-0':\n    os.kill(os.getppid(), signal.SIGKILL)\n" + WAIT,
    )
    words = ["--cpu", "--num_processes", "2", "train.py"]
    done = subprocess.run([sys.executable, "-m", "trainer", "launch", *words], check=False)
    assert done.returncode == -signal.SIGKILL
    end = time.monotonic() + 60
    while not (Path("told-0").exists() and Path("told-1").exists()):
        assert time.monotonic() < end, "they go on, with nobody who watches them"
        time.sleep(0.05)


STUCK = """
import os, signal
from datetime import timedelta
import torch
import torch.distributed as dist

dist.init_process_group("gloo", timeout=timedelta(seconds=100))
signal.signal(signal.SIGTERM, lambda *_: None)  # a run notes it, and goes on to its next update
dist.barrier()
rank = int(os.environ["RANK"])
if rank == 0:
    os.kill(os.getppid(), signal.SIGKILL)
dist.recv(torch.zeros(1), src=1 - rank)
"""


def test_stuck_processes_end_too_when_the_launcher_is_killed(monkeypatch, tmp_path):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    words = ["--cpu", "--num_processes", "2", "--shutdown_timeout", "1", write("train.py", STUCK)]
    command = [sys.executable, "-m", "trainer", "launch", *words]
    # It returns when the last process that has the pipes has ended.
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == -signal.SIGKILL
    assert " did not end within 1 seconds after its launcher, and is stopped." in done.stderr


@pytest.mark.skipif(sys.platform != "linux", reason="other systems tell nobody of it")
def test_processes_that_start_when_the_launcher_is_gone_end_at_once(tmp_path):
    write(
        "train.py",
        "import os\n"
        "told = open('/proc/self/environ').read().split('\\0')\n"
        "assert f'CADENCE_LAUNCHER={os.getppid()}' in told\n"  # as this process began
        "assert 'CADENCE_LAUNCHER' not in os.environ\n"  # and processes of its own begin without
        "open('ran-' + os.environ['RANK'], 'w').close()\n",
    )
    assert launch("--num_processes", "2", "train.py") == 0
    assert len(list(tmp_path.glob("ran-*"))) == 2
    launcher = subprocess.Popen(["true"])
    launcher.wait()
    done = subprocess.run(
        [sys.executable, entry.__file__, "train.py"],
        env=os.environ | {"RANK": "2", "CADENCE_LAUNCHER": str(launcher.pid)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (1, "The parent process has exited.\n")
    assert not Path("ran-2").exists()


def test_a_second_signal_reaches_them_too():
    write(
        "train.py",
        "import os, signal, sys\n"
        "came = []\n"
        "def hear(*_):\n"
        "    came.append(1)\n"
        "    if len(came) == 1:\n        os.kill(os.getppid(), signal.SIGINT)\n"
        "    else:\n        open('twice', 'w').close(); os._exit(1)\n"
        "signal.signal(signal.SIGINT, hear)\n"
        "os.kill(os.getppid(), signal.SIGINT)\n" + WAIT,
    )
    assert launch("--max_restarts", "1", "--shutdown_timeout", "10", "train.py") == 130
    assert Path("twice").exists()


# -- what is started -------------------------------------------------------------------------------


def test_the_command_line_is_over_the_file_is_over_the_environment(monkeypatch, tmp_path):
    write("train.py", "")
    write("own.yaml", "mixed_precision: bf16\nnum_processes: 3\nuse_cpu: true\ndebug: true\n")
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp16")
    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "eager")
    found = plan("--config_file", "own.yaml", "--mixed_precision", "no", "train.py")
    assert found.processes == 3
    assert not found.here
    assert found.variables["ACCELERATE_MIXED_PRECISION"] == "no"
    assert found.variables["ACCELERATE_DEBUG_MODE"] == "true"
    assert "ACCELERATE_DYNAMO_BACKEND" not in found.variables  # it stays what it is
    assert (
        plan("--config_file", "own.yaml", "train.py").variables["ACCELERATE_MIXED_PRECISION"]
        == "bf16"
    )
    assert "ACCELERATE_MIXED_PRECISION" not in plan("--cpu", "train.py").variables
    assert plan("--config_file", "own.yaml", "--num_processes", "1", "train.py").here


def test_the_default_file_is_read(tmp_path):
    write("train.py", "")
    Path("hf/accelerate").mkdir(parents=True)
    write("hf/accelerate/default_config.yaml", "num_processes: 2\nuse_cpu: true\n")
    assert plan("train.py").processes == 2


@pytest.fixture
def machine(monkeypatch):
    """Gives the machine so many devices, whatever the environment says."""

    def equip(count: int) -> None:
        monkeypatch.setattr("trainer.launch.plan.accelerators", lambda: count)
        monkeypatch.setattr("trainer.launch.plan.device_count", lambda: count)

    return equip


def test_each_option_becomes_its_variable(machine):
    machine(4)
    write("train.py", "")
    words = "--num_processes 2 --gradient_accumulation_steps 4 --dynamo_backend inductor "
    words += "--dynamo_mode reduce-overhead --dynamo_use_fullgraph --dynamo-use-dynamic --debug "
    words += "--num_cpu_threads_per_process 3 --gpu_ids 1,3 train.py"
    assert plan(*words.split()).variables == {
        "ACCELERATE_USE_CPU": "false",
        "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "4",
        "ACCELERATE_DYNAMO_BACKEND": "inductor",
        "ACCELERATE_DYNAMO_MODE": "reduce-overhead",
        "ACCELERATE_DYNAMO_USE_FULLGRAPH": "true",
        "ACCELERATE_DYNAMO_USE_DYNAMIC": "true",
        "ACCELERATE_DEBUG_MODE": "true",
        "OMP_NUM_THREADS": "3",
        "CUDA_VISIBLE_DEVICES": "1,3",
    }


def test_processes_are_counted_as_the_machine_or_the_user_says(machine):
    write("train.py", "")
    machine(4)
    assert plan("train.py").processes == 4
    assert plan("--gpu_ids", "0,2", "train.py").processes == 2
    assert plan("--cpu", "train.py").processes == 1
    machines = ("--num_machines", "2", "--main_process_ip", "node0")
    assert plan(*machines, "train.py").processes == 4
    assert plan(*machines, "--num_processes", "6", "train.py").processes == 3
    assert plan(*machines, "--nproc_per_node", "6", "train.py").processes == 6
    elastic = plan("--nnodes", "1:3", "--nproc_per_node=2", "--rdzv_endpoint=a:1", "train.py")
    assert (elastic.processes, elastic.machines) == (2, (1, 3))


@pytest.mark.parametrize(
    ("count", "words", "said"),
    [
        (0, "--gpu_ids 0,1", "gpu_ids is '0,1', but this machine has no accelerator"),
        (0, "--gpu_ids 0,1", "leave it out and pass --cpu --num_processes 2 to use the CPU"),
        (0, "--gpu_ids 0,1 --num_processes 4", "pass --cpu to use"),  # that many, as it says
        (0, "--gpu_ids all", "gpu_ids is 'all', but this machine has no accelerator"),
        (0, "--multi_gpu --num_processes 2", "--multi_gpu needs accelerators, but this"),
        (0, "--config_file two.yaml", "gpu_ids is '0,1', but this machine has no accelerator"),
        (2, "--gpu_ids 1,2", "gpu_ids is '1,2', but this machine has accelerators 0, 1. Name"),
        (2, "--gpu_ids 1,1", "Name existing devices, each once, or leave it out"),
        (2, "--gpu_ids 1,0", None),
        (1, "--gpu_ids all", None),
        (2, "--multi_gpu", None),
        (0, "--config_file two.yaml --cpu", None),
        (0, "--config_file all.yaml", None),  # as accelerate writes it on any machine
        (0, "--num_processes 2", None),
        (0, "--slurm --gpu_ids 0,1", None),  # for another machine
    ],
)
def test_devices_that_were_asked_for_must_be_there(machine, capsys, count, words, said):
    write("train.py", "")
    write("two.yaml", "gpu_ids: 0,1\n")
    write("all.yaml", "gpu_ids: all\nnum_processes: 2\n")
    machine(count)
    code = main(["launch", "--dry_run", *words.split(), "train.py"])
    assert code == (0 if said is None else 2)
    assert (said or "") in capsys.readouterr().err


@pytest.mark.parametrize("shell", [None, "1"])
@pytest.mark.parametrize(("ids", "there"), [("0,1", True), ("0,2", False), ("GPU-b,GPU-a", True)])
def test_gpu_ids_are_those_of_the_machine_not_of_the_shell(monkeypatch, ids, there, shell):
    def count() -> int:
        """As CUDA counts: the devices before the first in the variable that does not exist."""
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0,1").split(",")
        known = {"0", "1", "GPU-a", "GPU-b"}
        return len(list(itertools.takewhile(known.__contains__, visible)))

    write("train.py", "")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if shell is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", shell)
    monkeypatch.setattr("trainer.launch.plan.accelerators", count)
    if there:
        assert plan("--gpu_ids", ids, "train.py").variables["CUDA_VISIBLE_DEVICES"] == ids
    else:
        with pytest.raises(argparse.ArgumentTypeError, match="has accelerators 0, 1"):
            plan("--gpu_ids", ids, "train.py")
    assert os.environ.get("CUDA_VISIBLE_DEVICES") == shell


def test_a_cpu_of_the_environment_is_asked_for_too(machine, monkeypatch):
    write("train.py", "")
    write("two.yaml", "gpu_ids: 0,1\n")
    machine(0)
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    assert plan("--config_file", "two.yaml", "train.py").processes == 2
    with pytest.raises(argparse.ArgumentTypeError, match="no accelerator"):
        plan("--gpu_ids", "0,1", "train.py")  # the command line is over the environment


@pytest.mark.parametrize(
    "variables",
    [
        {"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "4", "SLURM_LAUNCH_NODE_IPADDR": "n0"},
        {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "4"},
    ],
)
def test_a_process_that_srun_or_mpirun_started_becomes_the_script(monkeypatch, variables):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    write("train.py", "")
    found = plan("--cpu", "--mixed_precision", "bf16", "train.py")
    assert found.here
    assert found.command == [sys.executable, "-u", "train.py"]
    assert found.variables["ACCELERATE_MIXED_PRECISION"] == "bf16"
    assert plan("--cpu", "--num_processes", "4", "train.py").here
    # One task for each machine, which starts processes of its own.
    assert not plan("--cpu", "--num_processes", "2", "train.py").here


def test_a_dry_run_shows_and_starts_nothing(capsys):
    write("train.py", "open('ran', 'w')")
    assert launch("--dry_run", "--num_processes", "2", "train.py", "--name", "a b") == 0
    shown = capsys.readouterr().out
    assert "processes on this machine  2" in shown
    assert "ACCELERATE_USE_CPU         true" in shown
    assert shown.endswith("launch/entry.py train.py --name 'a b'\n")
    assert not Path("ran").exists()


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        ("nothing.py", 2, "there is no script 'nothing.py'"),
        ("--num_proceses 2 train.py", 2, "--num_proceses. Did you mean --num_processes?\n"),
        ("--cpu", 2, "error: the following arguments are required: script.py\n"),
        ("--num_machines 2 --num_processes 2 train.py", 2, "pass --main_process_ip HOST"),
        ("-m --no_python train", 2, "not allowed with argument"),
        ("--nnodes 3:1 --nproc_per_node 1 train.py", 2, "must be a number, or a range such as 1:4"),
        ("--num_processes 2 --nproc_per_node 2 train.py", 2, "pass one of them"),
        ("--config_file none.yaml train.py", 1, "there is no configuration file none.yaml"),
        ("--max_restarts -1 train.py", 2, "of at least 0"),
        ("--num_processes 2 --rdzv_conf timeout train.py", 2, "like timeout=600"),
        ("-t 3 train.py", 2, "needs --log_dir"),
        ("--cpu --gpu_ids 0 train.py", 2, "omit --multi_gpu and --gpu_ids"),
        ("--sbatch=--mem=4G train.py", 2, "--sbatch needs --slurm"),
        ("--slurm --max_restarts 2 train.py", 2, "SLURM itself requeues a job"),
        ("--nnodes 1:2 --num_machines 2 train.py", 2, "--nnodes replaces --num_machines"),
        ("--tpu --cpu train.py", 2, "--tpu uses neither the CPU nor GPUs"),
        ("--env A=1 train.py", 2, "--env is not supported: start the command on each machine"),
        ("--aws_access_key_id 1 train.py", 2, "use Amazon SageMaker's launcher"),
        ("--mpirun_hostfile hosts train.py", 2, "mpirun -hostfile FILE -np 4 trainer launch"),
        (
            "--nnodes 1:2 --nproc_per_node 1 --rdzv_endpoint 127.0.0.1:0 "
            "--rdzv_conf join_timeout=soon train.py",
            1,
            "127.0.0.1:0 failed: The rendezvous configuration option 'join_timeout'",
        ),
        ("--num_processes 2 --no_python ./nothing", 2, "no executable program './nothing'"),
        ("--cpu --no_python nothing", 2, "no executable program 'nothing'"),
    ],
)
def test_wrong_usage_is_refused(capsys, words, code, said):
    write("train.py", "")
    found = launch(*words.split())
    text = capsys.readouterr().err
    assert found == code
    assert any(each in text for each in said.split("|")), text
    assert "Traceback" not in text


@pytest.mark.parametrize("processes", [1, 2])
def test_a_program_launches_a_script_and_goes_on(processes):
    write(
        "train.py", "import sys, pathlib; pathlib.Path('ran').touch(); sys.exit(int(sys.argv[1]))"
    )
    words = ["--cpu", "--no_tpu_cluster", "--num_processes", str(processes), "train.py"]
    assert launch_command(launch_command_parser().parse_args([*words, "0"])) is None
    assert Path("ran").exists()
    with pytest.raises(SystemExit, match="3"):
        launch_command(launch_command_parser().parse_args([*words, "3"]))


def test_a_tpu_is_asked_for_by_its_variable(monkeypatch):
    write("train.py", "")
    Path("mine.yaml").write_text("use_cpu: true\nnum_processes: 3\n")
    found = plan("--config_file", "mine.yaml", "--tpu", "--num_processes", "4", "train.py")
    assert (found.processes, found.variables["PJRT_DEVICE"]) == (4, "TPU")
    assert "ACCELERATE_USE_CPU" not in found.variables
    with pytest.raises(argparse.ArgumentTypeError, match="this machine has no TPU chips"):
        plan("--config_file", "mine.yaml", "--tpu", "train.py")
    Path("mine.yaml").write_text("distributed_type: XLA\nnum_processes: 8\n")
    assert plan("--config_file", "mine.yaml", "train.py").processes == 8
    assert "PJRT_DEVICE" not in plan("--config_file", "mine.yaml", "--cpu", "train.py").variables


def test_options_after_the_script_are_its_own():
    write("train.py", "")
    found = plan("--cpu", "--num_processes", "2", "train.py", "--num_processes", "5", "--help")
    assert found.processes == 2
    assert found.command[-4:] == ["train.py", "--num_processes", "5", "--help"]
    found = plan("--cpu", "-q", "--", "train.py", "--", "-m", "--", "--cpu")
    assert found.command[-5:] == ["train.py", "--", "-m", "--", "--cpu"]


def test_machines_by_the_names_of_torchrun():
    write("train.py", "")
    words = ["--nnodes", "2", "--node_rank", "1", "--nproc_per_node", "4", "--master_addr", "node0"]
    arguments = parser("trainer launch").parse_args([*words, "train.py"])
    found = configure(arguments)
    assert (found.num_machines, found.machine_rank, found.num_processes) == (2, 1, 8)
    assert (make_plan(arguments, found).machines, plan(*words, "train.py").processes) == ((2, 2), 4)


@pytest.mark.parametrize(
    ("words", "endpoint"),
    [
        ("--rdzv_endpoint a:1", "a:1"),
        ("--rdzv_endpoint a", "a:29500"),
        ("--rdzv_endpoint a --main_process_port 7", "a:7"),
        ("--main_process_ip fe80::1", "fe80::1:29500"),
    ],
)
def test_the_place_where_machines_meet_has_a_port(monkeypatch, words, endpoint):
    write("train.py", "")
    groups = []
    monkeypatch.setattr(group, "run_group", lambda group: groups.append(group) or 0)
    assert launch("--nnodes", "2", "--nproc_per_node", "1", *words.split(), "train.py") == 0
    assert [each.endpoint for each in groups] == [endpoint]


# -- who can reach the processes -------------------------------------------------------------------

LISTENING = """
import json, os, sys
import psutil
import torch.distributed as dist

ours = sys.argv[1] == "ours"
launcher = psutil.Process(os.getppid())
attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
for _ in range(2 if ours else 1):  # ours may join again after leaving
    if ours:
        from trainer.state import PartialState
        state = PartialState()
    else:
        dist.init_process_group("gloo")
    ranks = [None] * 2
    dist.all_gather_object(ranks, (dist.get_rank(), attempt))
    listeners = [
        connection.laddr.ip
        for process in (launcher, *launcher.children())
        for connection in process.net_connections()
        if connection.status == psutil.CONN_LISTEN
    ]
    dist.barrier()  # the other one has looked too
    dist.destroy_process_group()
    if ours:
        state._reset_state()
if attempt == "0":
    sys.exit("once more")
with open(f"seen-{os.environ['RANK']}.json", "w") as file:
    json.dump([listeners, ranks], file)
"""


@pytest.mark.parametrize("who", ["ours", "plain"])
def test_processes_of_one_machine_listen_on_loopback_only(who, port):
    write("train.py", LISTENING)
    words = ["--num_processes", "2", "--max_restarts", "1", "--main_process_port", port]
    assert launch(*words, "train.py", who) == 0
    for rank in range(2):
        listeners, ranks = seen(rank)
        assert {ipaddress.ip_address(each).is_loopback for each in listeners} == {True}
        assert ranks == [[0, "1"], [1, "1"]]


def test_interfaces_that_the_user_chose_are_kept(monkeypatch, tmp_path):
    monkeypatch.delenv("NCCL_SOCKET_IFNAME", raising=False)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth7")
    made = private_variables(str(tmp_path))
    assert "GLOO_SOCKET_IFNAME" not in made
    assert made["NCCL_SOCKET_IFNAME"] == ("lo0" if sys.platform == "darwin" else "lo")


@pytest.mark.parametrize(
    "more",
    [
        "",
        "--num_machines 2 --main_process_ip 127.0.0.1",
        "--num_machines 2 --main_process_ip 127.0.0.1 --rdzv_backend c10d",
    ],
)
def test_a_port_in_use_is_refused_at_once(capfd, more):
    write("train.py", "open('ran', 'w')")
    with socket.create_server(("", 0)) as server:
        port = server.getsockname()[1]
        words = ["--num_processes", "2", "--main_process_port", str(port), *more.split()]
        assert launch(*words, "train.py") == 1
    said = capfd.readouterr().err
    assert str(port) in said
    assert "address already in use" in said.lower()
    assert not Path("ran").exists()


# -- SLURM -----------------------------------------------------------------------------------------


def test_the_batch_script(capsys):
    write("train.py", "")
    words = "--slurm --sbatch=--time=04:00:00 --num_machines 2 --num_processes 8 "
    words += "--num_cpu_threads_per_process 6 --mixed_precision bf16 train.py --name"
    assert main(["launch", *words.split(), "a b"]) == 0
    text = capsys.readouterr().out
    assert subprocess.run(["bash", "-n"], input=text, text=True).returncode == 0
    lines = text.splitlines()
    assert lines[0] == "#!/bin/bash"
    assert [line.removeprefix("#SBATCH ") for line in lines if line.startswith("#SBATCH ")] == [
        "--nodes=2",
        "--ntasks-per-node=4",
        "--gpus-per-node=4",
        "--cpus-per-task=6",
        "--signal=USR1@120",
        "--requeue",
        "--open-mode=append",
        "--time=04:00:00",
    ]
    assert "export ACCELERATE_MIXED_PRECISION=bf16" in lines
    assert shlex.split(lines[-1]) == [
        *("exec", "srun", "--kill-on-bad-exit=0"),
        *("python", "-u", "train.py", "--name", "a b"),
    ]
    assert "export OMP_NUM_THREADS=6" in lines


def test_the_batch_script_for_the_cpu_asks_for_no_gpu(capsys, monkeypatch):
    write("train.py", "")
    assert launch("--slurm", "--num_processes", "4", "train.py") == 0
    text = capsys.readouterr().out
    assert "gpu" not in text
    assert "#SBATCH --ntasks-per-node=4\n" in text
    assert "export ACCELERATE_USE_CPU=true\n" in text
    monkeypatch.setenv("ACCELERATE_USE_CPU", "1")  # which sbatch hands on to the job
    assert main(["launch", "--slurm", "--num_processes", "4", "train.py"]) == 0
    assert "gpu" not in capsys.readouterr().out


def jobset() -> Any:
    page = Path(__file__).parents[3] / "docs" / "guides" / "clusters.md"
    (text,) = re.findall(r'^```yaml title="jobset.yaml"\n(.*?)^```', page.read_text(), re.M | re.S)
    return yaml.safe_load(text)


def test_the_manifest_for_kubernetes_starts_the_processes_of_its_machines(machine):
    manifest = jobset()
    (workers,) = manifest["spec"]["replicatedJobs"]
    job = workers["template"]["spec"]
    pod = job["template"]["spec"]
    (container,) = pod["containers"]
    first = f"{manifest['metadata']['name']}-{workers['name']}-0-0.{manifest['metadata']['name']}"
    assert job["completions"] == job["parallelism"] == 2
    assert job["completionMode"] == "Indexed"
    assert {each["name"] for each in container["volumeMounts"]} == {
        each["name"] for each in pod["volumes"]
    }
    write("train.py", "")
    machine(8)
    shell, _, command = container["command"]
    for index in range(job["completions"]):
        shown = subprocess.run(
            [shell, "-c", command.replace("exec trainer", "echo")],
            env={**os.environ, "JOB_COMPLETION_INDEX": str(index)},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        _, *words = shlex.split(shown)
        arguments = launch_command_parser().parse_args(words)
        configuration = configure(arguments)
        found = make_plan(arguments, configuration)
        assert found.processes == container["resources"]["limits"]["nvidia.com/gpu"]
        assert found.machines == (job["completions"], job["completions"])
        assert (configuration.machine_rank, configuration.main_process_ip) == (index, first)
        assert arguments.words == ["train.py"]


def test_the_manifest_for_kubernetes_has_the_fields_of_its_schema():
    """Of Kubernetes' own part, a Job; JobSet's schema is in no package."""
    validate = pytest.importorskip("kubernetes_validate", reason=NO_KUBERNETES_VALIDATE)
    job = jobset()["spec"]["replicatedJobs"][0]["template"]
    whole = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "line"}, **job}
    validate.validate(whole, "1.30", strict=True)
    whole["spec"]["completionsMode"] = "Indexed"
    with pytest.raises(validate.ValidationError, match="completionsMode"):
        validate.validate(whole, "1.30", strict=True)
