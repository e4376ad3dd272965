"""A process of a group is killed, the launcher starts all again: nothing differs (P1, P2)."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset

from callbacks import Callback, ModelCheckpoint
from trackers import read_metrics
from trainer import Trainer, TrainModule
from trainer.checkpoint.serialization import load_tree
from trainer.checkpoint.storage import committed
from trainer.checkpoint.weights import load_weights
from trainer.environment import Launch
from trainer.state.group import _rendezvous

ROOT = Path(__file__).resolve().parents[2]
LIMIT = 250  # seconds for processes that import torch on a busy machine
SAMPLES, EPOCHS = 26, 2


class Data(Dataset[Any]):
    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Any:
        return index, torch.randn(4) + index / SAMPLES, torch.tensor([float(index)])


class Net(TrainModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(
            torch.nn.Linear(4, 8), torch.nn.Dropout(0.2), torch.nn.Linear(8, 1)
        )

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = torch.nn.functional.mse_loss(self.net(batch[1]), batch[2])
        self.log("loss", loss, on_step=True, on_epoch=True)
        self.log("sum", batch[0].double().sum(), on_step=False, on_epoch=True, reduce="sum")
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=0.01)


class Faults(Callback):
    """What happens to a run, each once.

    Args:
        kind: "process": rank 1 is killed in the middle of the first epoch, and the launcher is told
            to end in the second one. "machine": a process is killed with its launcher, where DOOMED
            is set. "none": nothing.
    """

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def on_train_start(self, trainer: Any, module: Any) -> None:
        print(f"began at {trainer.global_step}", flush=True)

    def on_train_step_start(self, trainer: Any, module: Any) -> None:
        if self.kind == "machine" and trainer.global_step == 3:
            trainer.wait_for_save()
            trainer.accelerator.wait_for_everyone()
            if "DOOMED" in os.environ:
                os.kill(os.getppid(), signal.SIGKILL)
                os.kill(os.getpid(), signal.SIGKILL)
        if self.kind == "process":
            rank, folder = trainer.accelerator.process_index, Path(trainer.project_dir)
            if (trainer.global_step, rank) == (1, 1) and first_time(folder / "killed"):
                os.kill(os.getpid(), signal.SIGKILL)
            if (trainer.global_step, rank) == (4, 0) and first_time(folder / "told"):
                tell_launcher()


def first_time(mark: Path) -> bool:
    if mark.exists():
        return False
    mark.touch()
    return True


def tell_launcher() -> None:
    """Send SIGTERM to the launcher, and wait until it has handed it on."""
    came: list[int] = []
    previous: Any = signal.getsignal(signal.SIGTERM)

    def hear(number: int, frame: Any) -> None:
        previous(number, frame)
        came.append(number)

    signal.signal(signal.SIGTERM, hear)
    os.kill(os.getppid(), signal.SIGTERM)
    while not came:
        signal.sigtimedwait([], 0.01)  # no signal is taken: the handler has it
    signal.signal(signal.SIGTERM, previous)


def fit(folder: str, batch: int, kind: str) -> None:
    trainer = Trainer(
        max_epochs=EPOCHS,
        seed=3,
        cpu=True,
        log_every=1,
        project_dir=folder,
        progress_bar=False,
        gradient_accumulation_steps=2,
        callbacks=[Faults(kind), ModelCheckpoint(every=1, save_top_k=-1)],
    )
    trainer.fit(Net(), DataLoader(Data(), batch, shuffle=True), ckpt_path="auto")


SCRIPT = """
import sys
from tests.faults.test_restarts import fit

if __name__ == "__main__":
    fit(sys.argv[1], int(sys.argv[2]), sys.argv[3])
"""


def launch(folder: Path, *options: str, **variables: str) -> subprocess.Popen[str]:
    (folder / "script.py").write_text(SCRIPT)
    return subprocess.Popen(
        [sys.executable, "-m", "trainer", "launch", "--cpu", *options],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        env={
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1",
            "HF_HOME": "nowhere",
            **variables,
        },
    )


def finish(*processes: subprocess.Popen[str]) -> list[tuple[int, str]]:
    """Wait for launchers; they are gone with their processes afterwards, whatever happens."""
    try:
        outputs = [process.communicate(timeout=LIMIT)[0] for process in processes]
    finally:
        for process in processes:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)  # its processes have sessions of their own
                process.communicate()
    return [(process.returncode, text) for process, text in zip(processes, outputs, strict=True)]


def end_of(folder: Path) -> list[str]:
    """What a finished run leaves, apart from the time it took."""

    def plain(tree: Any) -> Any:
        if isinstance(tree, dict):
            return {k: plain(v) for k, v in tree.items() if k not in ("seconds", "run_id", "time")}
        return [plain(each) for each in tree] if isinstance(tree, list) else tree

    newest = committed(folder / "checkpoints")[-1]
    torch.set_printoptions(precision=12, threshold=100_000)
    names = ["trainer", "optimizer", *sorted(path.stem for path in newest.glob("rank-*.json"))]
    return [
        newest.name,
        json.dumps([plain(record) for record in read_metrics(folder / "metrics.jsonl")]),
        repr(load_weights(newest)),
        *(repr(plain(load_tree(newest, name))) for name in names),
    ]


def test_a_run_with_a_killed_rank_and_a_sigterm_equals_an_uninterrupted_one(tmp_path, ranks3):
    whole, run = tmp_path / "whole", tmp_path / "run"
    options = ["--num_processes", "3", "--max_restarts", "3", "script.py", str(run), "2", "process"]
    ((code, output),) = finish(launch(tmp_path, *options))
    assert code == 128 + signal.SIGTERM, output
    assert (run / "killed").exists()
    # Once at first and once after the kill, from what was saved; not after SIGTERM.
    assert output.count("began at 0") in (3, 6), output
    assert output.count("began at") == 6, output
    assert "resumes from there" in output
    ranks3(fit, str(run), 2, "none")
    ranks3(fit, str(whole), 2, "none")
    found, expected = end_of(run), end_of(whole)
    assert len(expected) == 8  # with the state of three ranks
    assert found == expected


def test_restarts_use_separate_keys_in_the_agent_store(monkeypatch):
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    for name, value in {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": server.port,
        "TORCHELASTIC_USE_AGENT_STORE": True,
        "TORCHELASTIC_RESTART_COUNT": 2,
        "GROUP_WORLD_SIZE": 1,
    }.items():
        monkeypatch.setenv(name, str(value))
    started = Launch(
        launcher="torchrun", world_size=2, master_addr="127.0.0.1", master_port=server.port
    )
    place = _rendezvous(started, None)
    place["store"].set("address", "here")
    assert server.get("attempt-2/address") == b"here"
    monkeypatch.setenv("GROUP_WORLD_SIZE", "2")  # whose agents do not count alike
    assert _rendezvous(started, None) == {"init_method": "env://"}


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


@pytest.mark.long
def test_training_goes_on_without_a_lost_machine(tmp_path):
    run, endpoint = tmp_path / "run", f"localhost:{free_port()}"
    options = [
        *("--nnodes", "1:2", "--nproc_per_node", "1", "--max_restarts", "3"),
        *("--rdzv_backend", "c10d", "--rdzv_endpoint", endpoint),
        *("--rdzv_conf", "keep_alive_interval=1,keep_alive_max_attempt=3,last_call_timeout=20"),
        *("script.py", str(run), "3", "machine"),
    ]
    with socket.socket() as place:  # the first one has the place where both meet
        first = launch(tmp_path, *options)
        while place.connect_ex(("127.0.0.1", int(endpoint.partition(":")[2]))):
            assert first.poll() is None
    second = launch(tmp_path, *options, DOOMED="1", TMPDIR=str(tmp_path))  # it cannot tidy up
    (code, output), (killed, _) = finish(first, second)
    assert code == 0, output
    assert killed == -signal.SIGKILL
    assert "began at 0" not in output.partition("began at 3")[2]
    sums = [each["sum"] for each in read_metrics(run / "metrics.jsonl") if "sum" in each]
    assert sums == [sum(range(SAMPLES))] * EPOCHS
