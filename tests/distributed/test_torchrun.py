"""Real launches: one script, unchanged on one process and on several, whoever starts them."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.helpers.programs import run_script

ROOT = Path(__file__).resolve().parents[2]
LIMIT = 150  # seconds for processes that import torch on a busy machine
LAUNCHERS = ("RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "SLURM_", "OMPI_", "MV2_", "PMI_", "MPI_")

SCRIPT = """
import json
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, TensorDataset
from trainer import Accelerator

torch.manual_seed(0)
accelerator = Accelerator()
model = torch.nn.Linear(2, 1).double()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
x = torch.linspace(-1, 1, 16, dtype=torch.float64).reshape(8, 2)
loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), 4 // accelerator.num_processes)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for _ in range(3):
    for inputs, targets in loader:
        optimizer.zero_grad()
        accelerator.backward(torch.nn.functional.mse_loss(model(inputs), targets))
        optimizer.step()
found = {
    "weights": [value for p in model.parameters() for value in p.flatten().tolist()],
    "type": accelerator.distributed_type,
    "group": dist.is_initialized(),
    "updates": optimizer.steps,
}
with open(f"rank-{accelerator.process_index}-of-{accelerator.num_processes}.json", "w") as file:
    json.dump(found, file)
accelerator.wait_for_everyone()
accelerator.state.destroy_process_group()
"""


FAILS = """
import os
import signal
import sys
import torch
from torch.utils.data import DataLoader
from trainer import Trainer, TrainModule

class Line(TrainModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)

    def training_step(self, batch, batch_idx):
        if self.trainer.global_rank == 1 and batch_idx == 3:
            FAIL
        return self.layer(batch).mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.0)

Trainer(max_epochs=1, cpu=True, barebones=True).fit(Line(), DataLoader(torch.zeros(16, 1), 1))
"""


@pytest.fixture
def script(tmp_path) -> Path:
    path = tmp_path / "own_loop.py"
    path.write_text(SCRIPT)
    return path


def environ(**more: object) -> dict[str, str]:
    """The environment of a process that no launcher has started, and these variables."""
    own = {name: value for name, value in os.environ.items() if not name.startswith(LAUNCHERS)}
    own |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    if sys.platform == "linux":
        own["GLOO_SOCKET_IFNAME"] = "lo"  # do not ask the host for its own name
    return own | {name: str(value) for name, value in more.items()}


@contextmanager
def started(*command: str, **variables: object) -> Iterator[subprocess.Popen[str]]:
    """Start a command; it is gone with all its children when the block is left."""
    process = subprocess.Popen(
        [sys.executable, "-W", "error::FutureWarning:trainer", *command],
        env=environ(**variables),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def output_of(process: subprocess.Popen[str]) -> str:
    """What it has said."""
    try:
        output, _ = process.communicate(timeout=LIMIT)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        pytest.fail(f"not done within {LIMIT} s:\n{process.communicate()[0]}")
    return output


def finish(process: subprocess.Popen[str]) -> None:
    output = output_of(process)
    assert process.returncode == 0, output


def torchrun(script: Path, processes: int) -> None:
    with started(
        "-m",
        "torch.distributed.run",
        f"--nproc-per-node={processes}",
        "--rdzv-backend=c10d",
        "--rdzv-endpoint=localhost:0",  # a free port
        str(script),
    ) as process:
        finish(process)


def results(folder: Path) -> dict[str, dict[str, object]]:
    return {path.stem: json.loads(path.read_text()) for path in sorted(folder.glob("rank-*.json"))}


def test_a_script_runs_unchanged_on_one_process_and_on_two(script, tmp_path):
    run_script(str(script))
    torchrun(script, 2)
    found = results(tmp_path)
    assert list(found) == ["rank-0-of-1", "rank-0-of-2", "rank-1-of-2"]
    alone = found.pop("rank-0-of-1")
    assert (alone["type"], alone["group"], alone["updates"]) == ("NO", False, 6)
    for each in found.values():
        assert (each["type"], each["group"], each["updates"]) == ("MULTI_CPU", True, 6)
        assert each["weights"] == pytest.approx(alone["weights"], rel=1e-12)


def test_torchrun_with_one_process_starts_no_group(script, tmp_path):
    torchrun(script, 1)
    (found,) = results(tmp_path).values()
    assert (found["type"], found["group"]) == ("NO", False)


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def mpirun_variables(port: int, rank: int) -> dict[str, object]:
    """The variables of one of two processes that mpirun has started."""
    return {
        "OMPI_COMM_WORLD_RANK": rank,
        "OMPI_COMM_WORLD_SIZE": 2,
        "OMPI_COMM_WORLD_LOCAL_RANK": rank,
        "OMPI_COMM_WORLD_LOCAL_SIZE": 2,
        "MASTER_PORT": port,
    }


def test_processes_started_by_mpirun_form_a_group(script, tmp_path):
    port = free_port()
    with (
        started(str(script), **mpirun_variables(port, 0)) as one,
        started(str(script), **mpirun_variables(port, 1)) as two,
    ):
        finish(one)
        finish(two)
    found = results(tmp_path)
    assert list(found) == ["rank-0-of-2", "rank-1-of-2"]
    first, second = found.values()
    assert first["weights"] == second["weights"]
    assert first["type"] == second["type"] == "MULTI_CPU"


@pytest.mark.parametrize(
    ("fail", "messages"),
    [
        ("raise ValueError('of its own')", "in {}: ValueError: of its own\n"),
        ("sys.exit(0)", "in {}: SystemExit: 0\n"),
        (
            "os.kill(os.getpid(), signal.SIGKILL)",
            "This process was in {}; the others, some seconds earlier: rank 1 in fit, ",
        ),
    ],
    ids=["error", "exit", "kill"],
)
def test_the_other_ranks_name_a_rank_that_died(tmp_path, fail, messages):
    path, port = tmp_path / "fails.py", free_port()
    path.write_text(FAILS.replace("FAIL", fail))
    with (
        started(str(path), **mpirun_variables(port, 0)) as one,
        started(str(path), **mpirun_variables(port, 1)) as two,
    ):
        output_of(two)
        text = output_of(one)
    assert one.returncode == 1, text
    *_, last = re.split("RuntimeError: (?=Rank 1 failed while the others|Communication with)", text)
    assert messages.format("fit, epoch 1, after update 3, batch 3") in last, text
