"""A real process is told to end: it saves, says so, exits with its code; the next goes on (P11)."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from tests.helpers.programs import run_on_ranks, run_script
from trackers import read_metrics

ROOT = Path(__file__).resolve().parents[2]
LIMIT = 200  # seconds for a process that imports torch on a busy machine

SCRIPT = """
import sys, threading
import torch
from torch.utils.data import DataLoader, Dataset
from callbacks import Callback, ModelCheckpoint
from trainer import Trainer, TrainModule

class Data(Dataset):
    def __len__(self):
        return 24
    def __getitem__(self, index):
        return torch.randn(4) + index, torch.tensor([float(index)])

class Line(TrainModule):
    def __init__(self):
        super().__init__()
        self.line = torch.nn.Linear(4, 1)
    def training_step(self, batch, batch_idx):
        loss = torch.nn.functional.mse_loss(self.line(batch[0]), batch[1])
        self.log("loss", loss)
        return loss
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1e-3)

class Wait(Callback):
    "Says where the run is, and lets the test send its signal before it goes on."
    def on_train_step_start(self, trainer, module):
        if trainer.global_step == int(sys.argv[2]) and trainer.accelerator.is_main_process:
            print("now", flush=True)
            sys.stdin.readline()

if __name__ == "__main__":
    workers, at = int(sys.argv[1]), int(sys.argv[2])
    trainer = Trainer(max_epochs=4, seed=3, cpu=True, project_dir=sys.argv[3], log_every=1,
                      callbacks=[Wait(), ModelCheckpoint(save_top_k=-1)], progress_bar=False)
    loader = DataLoader(Data(), 2, shuffle=True, num_workers=workers,
                        multiprocessing_context=sys.argv[4] if workers else None)
    trainer.fit(Line(), loader, ckpt_path="auto")
    print("done", flush=True)
"""


def start(folder: Path, *arguments: object, processes: int = 1) -> subprocess.Popen[str]:
    """Start the script in a session of its own, as a terminal's foreground job."""
    (folder / "script.py").write_text(SCRIPT)
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    return subprocess.Popen(
        [sys.executable, *(launcher if processes > 1 else []), "script.py", *map(str, arguments)],
        cwd=folder,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
    )


def finish(process: subprocess.Popen[str], line: str = "") -> tuple[int, str, str]:
    try:
        output, errors = process.communicate(line, timeout=LIMIT)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
    return process.returncode, output, errors


def wait_for(process: subprocess.Popen[str], text: str) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        if text in line:
            return
    pytest.fail(f"{text!r} never came: {finish(process)}")


def record(folder: Path) -> list[dict[str, float]]:
    records = read_metrics(folder / "metrics.jsonl")
    return [{key: value for key, value in each.items() if key != "time"} for each in records]


@pytest.fixture
def whole(tmp_path):
    """The folder of an uninterrupted run on one process without workers."""
    (tmp_path / "script.py").write_text(SCRIPT)
    run_script("script.py", 0, -1, "whole", "fork")
    return tmp_path / "whole"


@pytest.mark.parametrize(
    ("number", "workers", "context"),
    [(signal.SIGINT, 2, "fork"), (signal.SIGTERM, 1, "spawn")],
)
def test_a_signal_saves_and_the_next_start_resumes(tmp_path, whole, number, workers, context):
    first = start(tmp_path, workers, 17, "run", context)  # inside the second of four epochs
    wait_for(first, "now")
    os.killpg(first.pid, number)  # its workers too
    code, output, errors = finish(first, "\n")
    assert code == 128 + number, errors
    assert "Traceback" not in errors
    assert f"{number.name}: stopping after this update" in errors
    saved = re.search(
        r"Saved to (\S+); ckpt_path='auto' with project_dir='run' resumes from there", output
    )
    assert saved is not None
    assert saved[1] == f"{tmp_path}/run/checkpoints/step-00000018"
    assert "done" not in output

    code, output, errors = finish(start(tmp_path, workers, -1, "run", context))
    assert code == 0, errors
    assert f"Resuming from {tmp_path}/run/checkpoints/step-00000018" in output
    assert record(tmp_path / "run") == record(whole)
    # What was saved for the restart alone is gone, what was due is there.
    names = [
        {path.name for path in (run / "checkpoints").iterdir()} for run in (tmp_path / "run", whole)
    ]
    assert names[0] == names[1]


def test_a_second_ctrl_c_ends_at_once(tmp_path):
    process = start(tmp_path, 0, 2, "run", "fork")
    wait_for(process, "now")
    os.killpg(process.pid, signal.SIGINT)
    assert process.stderr is not None
    for line in process.stderr:
        if "press Ctrl-C again" in line:
            break
    os.killpg(process.pid, signal.SIGINT)
    code, output, errors = finish(process)
    # As of any program that Ctrl-C interrupts: by the signal, or 1 if code that runs at the exit,
    # such as an import in a handler of torch's, makes Python forget the signal.
    assert code in (-signal.SIGINT, 1)
    assert "KeyboardInterrupt" in errors
    assert not list(tmp_path.glob("run/checkpoints/step-*"))
    assert "done" not in output


def test_two_processes_save_and_resume_together(ranks2, tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    run_on_ranks(ranks2, "script.py", 0, -1, "whole", "fork")
    first = start(tmp_path, 0, 4, "run", "fork", processes=2)
    wait_for(first, "now")
    os.killpg(first.pid, signal.SIGINT)  # Ctrl-C reaches the launcher and both processes
    code, output, errors = finish(first, "\n")
    assert code != 0
    assert "resumes from there" in output, errors
    assert errors.count("SIGINT: stopping after this update") == 1, errors
    code, output, errors = finish(start(tmp_path, 0, -1, "run", "fork", processes=2))
    assert code == 0, errors
    assert "Resuming from" in output
    assert record(tmp_path / "run") == record(tmp_path / "whole")


BLOCKED = """
import os, signal, sys, threading
import torch.distributed as dist
from trainer.loops.preemption import watch_signals

def names(frame):
    return [frame.f_code.co_name, *names(frame.f_back)] if frame else []

def tell():
    "Says so once the main thread is where it waits for the other process."
    while "all_reduce" not in names(sys._current_frames()[main]):
        pass
    print("now", flush=True)

if __name__ == "__main__":
    rank = int(sys.argv[1])
    store = dist.FileStore(sys.argv[2], 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    if rank == 1:
        sys.stdin.readline()  # it never enters
        os._exit(0)
    import torch
    main = threading.main_thread().ident
    with watch_signals():
        threading.Thread(target=tell, daemon=True).start()
        dist.all_reduce(torch.zeros(1))
"""


def test_a_second_ctrl_c_ends_a_process_blocked_in_a_collective(tmp_path):
    (tmp_path / "blocked.py").write_text(BLOCKED)
    both = [
        subprocess.Popen(
            [sys.executable, "blocked.py", str(rank), str(tmp_path / "store")],
            cwd=tmp_path,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        )
        for rank in (0, 1)
    ]
    try:
        wait_for(both[0], "now")
        for _ in range(LIMIT):
            both[0].send_signal(signal.SIGINT)  # two that come at once are one
            with suppress(subprocess.TimeoutExpired):
                both[0].wait(1)
                break
        code, _, errors = finish(both[0])
    finally:
        finish(both[1], "\n")
    assert code in (130, -signal.SIGINT), errors
    assert "all_reduce" in errors  # where it waited
