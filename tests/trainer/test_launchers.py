"""`notebook_launcher` and `debug_launcher`: one function in several new processes.

A function that uses neither torch nor Cadence has a process of its own in a tenth of a second;
most tests here are of that kind.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
from pathlib import Path
from types import FunctionType
from typing import Any

import pytest
import torch
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.utils.data import DataLoader

import trainer
from tests.helpers.terminal import without_gloo
from trainer import (
    Accelerator,
    Trainer,
    TrainModule,
    debug_launcher,
    notebook_launcher,
)
from trainer.launch import LaunchError
from trainer.launch.function_group import RankFailed, machines
from trainer.state import PartialState

ROOT = Path(trainer.__file__).parents[1]


@pytest.fixture
def notebook():
    """`notebook(function)` is the function as if it was defined in a notebook's cell."""

    def defined_there(function: FunctionType) -> FunctionType:
        there = {"__name__": "__main__", "__builtins__": __builtins__}
        twin = FunctionType(function.__code__, there, function.__name__, function.__defaults__)
        twin.__module__ = "__main__"
        return twin

    return defined_there


def who(*names):
    import os

    return {name: os.environ.get(name) for name in names}


def test_each_process_is_one_rank_on_the_cpu_and_rank_0_answers(notebook, tmp_path, capfd):
    def ranks(folder):
        import os
        from pathlib import Path

        rank, size = os.environ["RANK"], os.environ["WORLD_SIZE"]
        names = ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "ACCELERATE_USE_CPU")
        names += ("ACCELERATE_MIXED_PRECISION", "OMP_NUM_THREADS", "MINE")
        text = " ".join(f"{name}={os.environ.get(name)}" for name in names)
        Path(folder, rank).write_text(f"{size} {text}")
        print(f"rank {rank} was here")
        return {"rank": int(rank)}

    os.environ["MINE"] = "7"
    before = dict(os.environ)
    try:
        assert debug_launcher(notebook(ranks), (str(tmp_path),), 3) == {"rank": 0}
        assert dict(os.environ) == before
    finally:
        del os.environ["MINE"]
    threads = max(1, len(os.sched_getaffinity(0)) // 3)
    threads = os.environ.get("OMP_NUM_THREADS", threads)
    for rank in range(3):
        assert (tmp_path / str(rank)).read_text() == (
            f"3 LOCAL_RANK={rank} LOCAL_WORLD_SIZE=3 ACCELERATE_USE_CPU=True "
            f"ACCELERATE_MIXED_PRECISION=no OMP_NUM_THREADS={threads} MINE=7"
        )
    lines = capfd.readouterr().out.splitlines()
    assert sorted(lines) == [f"rank {rank} was here" for rank in range(3)]


def fail(how):
    import os
    import signal
    import sys
    import time

    if os.environ["RANK"] != "1":
        time.sleep(600)  # it is ended
    if how == "exit":
        sys.exit(7)
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "odd":
        raise type("Odd", (Exception,), {"__str__": lambda self: 1 / 0})
    raise LookupError("a fault of mine")


# Python's words for an exception without any
UNPRINTABLE = (
    "<exception str() failed>" if sys.version_info >= (3, 11) else "<unprintable {} object>"
)


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("raise", "LookupError: a fault of mine"),
        ("odd", f"Odd: {UNPRINTABLE.format('Odd')}"),
        ("exit", "SystemExit: exit code 7"),
        ("kill", "it was ended by SIGKILL"),
    ],
)
def test_the_first_failure_is_raised_once_with_its_traceback(notebook, capfd, caplog, how, said):
    with pytest.raises(RankFailed) as caught:
        notebook_launcher(notebook(fail), (how,), num_processes=2)
    assert isinstance(caught.value, ChildFailedError)  # which scripts may expect
    message = str(caught.value)
    assert message.startswith("rank 1 ")
    assert socket.gethostname() in message
    assert message.count(said) == 1
    if how == "raise":
        assert 'raise LookupError("a fault of mine")' in message
        assert ", in fail\n" in message
        assert "launch/remote_call.py" not in message
    if how != "kill":
        noted = caught.value.failures[1].message  # as torch writes it
        assert noted["message"].endswith(said)
        assert "\n" not in noted["message"]
        assert noted["extraInfo"]["py_callstack"].rstrip().endswith(noted["message"])
    shown = capfd.readouterr()
    assert shown.out + shown.err + caplog.text == ""


def test_a_process_that_fails_is_started_again(notebook, tmp_path):
    def second_time(folder):
        from pathlib import Path

        if not Path(folder, "tried").exists():
            Path(folder, "tried").touch()
            raise RuntimeError("once")
        return "done"

    run = notebook(second_time)
    assert notebook_launcher(run, (str(tmp_path),), 2, max_restarts=3) == "done"
    (tmp_path / "tried").unlink()  # one process runs here, and is not watched
    with pytest.raises(RuntimeError, match="once"):
        notebook_launcher(run, (str(tmp_path),), 1, max_restarts=3)


def out_of_time(folder):
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    from tests.helpers.line import Line
    from trainer import Trainer

    class Net(Line):
        def training_step(self, batch, batch_idx):
            return self.layer(batch[0]).square().mean()

    data = DataLoader(TensorDataset(torch.ones(8, 2)), batch_size=2)
    trainer = Trainer(
        max_epochs=3, max_time="0.001 seconds", project_dir=folder, cpu=True, progress_bar=False
    )
    trainer.fit(Net(), data)


def test_the_end_of_max_time_is_no_failure(notebook, tmp_path, capfd):
    assert notebook_launcher(notebook(out_of_time), (str(tmp_path / "run"),), 2) is None
    output = capfd.readouterr()
    assert output.out.count("resumes from there") == 1
    assert output.err.count("Rank 0: the run was ended by max_time (exit code 124).") == 1
    assert len(list((tmp_path / "run" / "checkpoints").glob("step-*"))) == 1


def test_a_return_value_that_cannot_be_pickled_is_warned_of(notebook, capfd):
    def returns_a_lock():
        import threading

        return threading.Lock()

    def returns_what_has_an_accelerator():
        from trainer import Trainer

        return Trainer(max_epochs=1, cpu=True)

    for function, why in (
        (returns_a_lock, "lock"),
        (returns_what_has_an_accelerator, "an `Accelerator`, a `Trainer` or an object"),
    ):
        assert debug_launcher(notebook(function)) is None
        said = capfd.readouterr().err
        assert "The return value of rank 0 cannot be sent" in said
        assert why in said


def test_an_accelerator_of_this_process_is_refused(capfd):
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(torch.nn.Linear(1, 1))
    optimizer = accelerator.prepare(torch.optim.SGD(model.parameters(), lr=1.0))
    scheduler = accelerator.prepare(torch.optim.lr_scheduler.ConstantLR(optimizer))
    loader = accelerator.prepare(torch.utils.data.DataLoader([1, 2]))
    owner = Trainer(accelerator=accelerator)
    for held in (accelerator, PartialState(), optimizer, scheduler, loader, owner):

        def train(held=held):
            return held

        with pytest.raises(ValueError, match=r"train uses an `Accelerator`.* inside the function"):
            notebook_launcher(train, num_processes=2)


def test_a_function_that_cannot_be_pickled_is_refused():
    lock = threading.Lock()

    def train():
        return lock

    with pytest.raises(ValueError, match=r"train runs in new processes.*lock.*inside the function"):
        debug_launcher(train)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"num_processes": 0}, ValueError, "num_processes is 0; .* at least 1"),
        ({"num_nodes": 2, "node_rank": 2}, ValueError, "node_rank is 2 and num_nodes 2"),
        ({"mixed_precision": "bf61"}, ValueError, "mixed_precision is 'bf61'.*Did you mean 'bf16'"),
        ({"num_processes": 2, "use_port": "here"}, ValueError, "Port here of 127.0.0.1 cannot be"),
        ({"function": None}, TypeError, "function is None; give the function itself"),
        (
            {"args": 2, "num_processes": 1},
            TypeError,
            r"give a tuple .*, for one of them \(value,\)",
        ),
        ({"args": "ab", "num_processes": 1}, TypeError, "give a tuple of arguments"),
    ],
)
def test_wrong_arguments(arguments, error, message):
    with pytest.raises(error, match=message):
        notebook_launcher(**{"function": who} | arguments)


def test_a_port_that_is_taken_is_refused_and_a_free_one_is_used(notebook):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(ValueError, match=f"Port {port} .* leave it out"):
            notebook_launcher(who, num_processes=2, use_port=port)
    names = ("MASTER_ADDR", "MASTER_PORT", "ACCELERATE_MIXED_PRECISION", "ACCELERATE_USE_CPU")
    values = notebook_launcher(notebook(who), names, 2, "bf16", use_port=str(port))
    assert values == dict(zip(names, ("127.0.0.1", str(port), "bf16", None), strict=True))


def test_machines_meet_at_the_first(monkeypatch):
    common = {"node_rank": 1, "address": "node0", "conf": {"timeout": 5}}
    static = machines(num_nodes=2, backend="static", endpoint="", port=None, **common)
    assert static == {
        "machines": (2, 2),
        "backend": "static",
        "endpoint": "node0:29500",
        "rendezvous": {"rank": 1, "timeout": 5},
    }
    other = machines(num_nodes=2, backend="c10d", endpoint="there:1", port="9", **common)
    assert (other["backend"], other["endpoint"]) == ("c10d", "there:1")
    static = machines(num_nodes=2, backend="static", endpoint="", port="9", **common)
    assert static["endpoint"] == "node0:9"


ANOTHER_MACHINE = """
import sys
from trainer import notebook_launcher
def fail():
    raise ValueError("no data here")
notebook_launcher(fail, (), 1, num_nodes=2, node_rank=1, use_port=sys.argv[1])
"""


def test_a_failure_on_one_machine_ends_the_processes_of_the_others(notebook, monkeypatch):
    def wait():
        import threading

        threading.Event().wait()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    monkeypatch.setattr("trainer.launch.group._GRACE", 0.0)
    command = [sys.executable, "-c", ANOTHER_MACHINE, str(port)]
    variables = os.environ | {"PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, env=variables, stderr=subprocess.PIPE, text=True) as other:
        try:
            with pytest.raises(LaunchError, match=r"rank 1 of 2 .* failed first: .* no data here"):
                notebook_launcher(notebook(wait), (), 1, num_nodes=2, use_port=port)
            _, said = other.communicate()
        finally:
            other.kill()
    assert said.rstrip().endswith("ValueError: no data here")


# -- one process: this one -----------------------------------------------------------------------


def test_one_process_is_this_one_and_each_launch_begins_anew():
    found = []

    def train(wanted):
        accelerator = Accelerator(cpu=True)
        found.append((os.getpid(), accelerator.mixed_precision, accelerator.num_processes))
        return wanted

    for precision in ("bf16", "no"):  # a second launch may have another one
        assert notebook_launcher(train, (3,), num_processes=1, mixed_precision=precision) == 3
    assert found == [(os.getpid(), "bf16", 1), (os.getpid(), "no", 1)]
    assert "ACCELERATE_MIXED_PRECISION" not in os.environ


class Line(TrainModule):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(()))

    def training_step(self, batch, batch_idx):
        return (self.weight * batch).mean()

    def validation_step(self, batch, batch_idx):
        self.log("weight", self.weight)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.5)


@pytest.mark.parametrize("there_was_one", [False, True])
def test_objects_returned_by_one_process_are_usable(there_was_one):
    arguments = {"cpu": True, "max_epochs": 1, "progress_bar": False}
    before = Trainer(**arguments) if there_was_one else None
    loader = DataLoader(torch.ones(5), batch_size=1)

    def train():
        trainer, module = Trainer(**arguments), Line()
        trainer.fit(module, loader, loader)
        return trainer, module, Accelerator(gradient_accumulation_steps=2)

    trainer, module, accelerator = notebook_launcher(train, num_processes=1)
    assert trainer.validate(module, loader) == [{"weight": -1.5}]
    windows = []
    for _ in accelerator.prepare(loader):
        with accelerator.accumulate(module):
            windows.append(accelerator.sync_gradients)
    assert windows == [False, True, False, True, True]  # it hears of the loader's end
    assert before is None or before.accelerator.is_main_process


def test_one_process_takes_the_accelerator_that_is_there():
    accelerator = Accelerator(cpu=True, mixed_precision="bf16", gradient_accumulation_steps=3)

    def train():
        return Accelerator().mixed_precision

    assert notebook_launcher(train, num_processes=1) == "bf16"
    assert accelerator.state.initialized
    assert accelerator.gradient_accumulation_steps == 3
    with pytest.raises(ValueError, match=r"mixed_precision is 'fp16', but .* 'bf16'"):
        notebook_launcher(train, num_processes=1, mixed_precision="fp16")


def test_there_are_as_many_processes_as_devices(monkeypatch):
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 0)
    assert notebook_launcher(os.getpid) == os.getpid()


# -- a notebook ----------------------------------------------------------------------------------

CELLS = [
    """
import os, threading, torch
from pathlib import Path
from trainer import Accelerator, notebook_launcher
# All that a fork would not survive: threads of OpenMP, an Accelerator, a class of the notebook.
torch.set_num_threads(2)
weight = torch.randn(300, 300, requires_grad=True)
(weight @ weight).sum().backward()
accelerator = Accelerator(cpu=True)
class Settings:
    rate = 0.5
def train(start, steps):
    accelerator = Accelerator(cpu=True)
    net = torch.nn.Linear(2, 1)
    net.load_state_dict(start)
    net, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=Settings.rate))
    batch = torch.arange(8.0).reshape(4, 2)[accelerator.process_index::accelerator.num_processes]
    for _ in range(steps):
        accelerator.backward(net(batch / 8).pow(2).mean())
        optimizer.step()
        optimizer.zero_grad()
    (settings,) = {type(each) for each in accelerator.gather_for_metrics([Settings()], True)}
    print("trained on", accelerator.process_index)
    return accelerator.unwrap_model(net).state_dict(), settings()
start = torch.nn.Linear(2, 1).state_dict()
""",
    """
alone, _ = notebook_launcher(train, (start, 4), num_processes=1)
before = dict(os.environ)
together, settings = notebook_launcher(train, (start, 4), num_processes=2)
for name, value in alone.items():
    torch.testing.assert_close(together[name], value)
assert type(settings) is Settings
assert dict(os.environ) == before and accelerator.num_processes == 1
""",
    """
def fail():
    if os.environ["RANK"] == "1":
        raise KeyError("a fault of mine")  # seen
    threading.Event().wait()
notebook_launcher(fail, num_processes=2)
""",
    """
def wait():
    Path("rank-" + os.environ["RANK"]).write_text(str(os.getpid()))
    print("it waits")  # shown at once
    Path("started-" + os.environ["RANK"]).touch()
    threading.Event().wait()
Path("kernel").write_text(str(os.getpid()))
notebook_launcher(wait, num_processes=2)
""",
    """
print("still there", [Path("/proc", Path(f"rank-{rank}").read_text()).exists() for rank in (0, 1)])
""",
]
RUN = """
import json, os, signal, sys, threading, time
from pathlib import Path
import nbclient, nbformat

def interrupt():  # as Jupyter does
    while not all(Path(f"started-{rank}").exists() for rank in (0, 1)):
        time.sleep(0.05)
    os.killpg(os.getpgid(int(Path("kernel").read_text())), signal.SIGINT)

cells = [nbformat.v4.new_code_cell(cell) for cell in json.loads(sys.argv[1])]
notebook = nbformat.v4.new_notebook(cells=cells)
client = nbclient.NotebookClient(notebook, timeout=200, kernel_name="python3", allow_errors=True)
threading.Thread(target=interrupt, daemon=True).start()
client.execute()
Path("outputs").write_text(json.dumps([cell.outputs for cell in cells]))
"""


def test_a_notebook(tmp_path):
    # in a process of its own: the client of a kernel leaves threads behind for a while
    pytest.importorskip("nbclient")
    command = [sys.executable, "-W", "ignore", "-c", RUN, json.dumps(CELLS)]
    variables = os.environ | {"PYTHONPATH": str(ROOT)}
    del variables["PYTEST_CURRENT_TEST"]  # with which a kernel shows nothing of its children
    subprocess.run(command, check=True, cwd=tmp_path, env=variables, timeout=250)
    outputs = (tmp_path / "outputs").read_text()
    defined, trained, failed, interrupted, after = json.loads(outputs)
    assert defined == []
    assert sorted(text_of(trained).split("\n")) == ["", *["trained on 0"] * 2, "trained on 1"]
    (error,) = failed
    assert error["ename"] == "RankFailed"
    assert error["evalue"].startswith("rank 1 of 2 on ")
    assert 'raise KeyError("a fault of mine")  # seen' in error["evalue"]
    assert shows_one_frame_of_cadence(error)
    assert text_of(interrupted[:-1]) == "it waits\n" * 2
    error = interrupted[-1]
    assert (error["ename"], error["evalue"]) == (
        "KeyboardInterrupt",
        "The processes have been ended.",
    )
    assert shows_one_frame_of_cadence(error)
    assert text_of(after) == "still there [False, False]\n"


def shows_one_frame_of_cadence(error: dict[str, Any]) -> bool:
    """Return whether a cell's traceback has only the frame that raised; 3.10 hides none."""
    frames = "".join(error["traceback"]).removesuffix(error["evalue"])
    hidden = "launch/notebook.py" not in frames or sys.version_info < (3, 11)
    return hidden and "launch/function_group.py" in frames


LAUNCHER = """
import subprocess, sys
from pathlib import Path
from trainer.launch import remote_call
def wait():
    import os, threading
    Path("rank").write_text(str(os.getpid()))
    Path("started").touch()
    threading.Event().wait()
remote_call.write_call(Path.cwd(), wait, ())
process = subprocess.Popen([sys.executable, *remote_call.command(Path.cwd())])
while not Path("started").exists():
    pass
"""


def test_the_processes_end_with_that_of_the_launcher(tmp_path):
    variables = os.environ | {"PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, "-c", LAUNCHER], check=True, cwd=tmp_path, env=variables)
    wait_for_end(int((tmp_path / "rank").read_text()))


def text_of(outputs: list[dict[str, Any]]) -> str:
    assert {output["output_type"] for output in outputs} <= {"stream"}, outputs
    return without_gloo("".join(output["text"] for output in outputs))


def wait_for_end(pid: int) -> None:
    """Return when there is no such process; the test's time limit is that of the waiting."""
    while True:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            return
        if state == "Z":  # nobody has asked how it ended
            return
        threading.Event().wait(0.02)
