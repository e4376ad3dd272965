"""The batch script of ``trainer launch --slurm``, run by bash with a stand-in for SLURM's `srun`.

The stand-in starts the tasks with the variables that SLURM sets, and the tasks are real processes
of a real run.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

from tests.helpers.programs import run_on_ranks
from trainer.cli import main

ROOT = Path(__file__).parents[2]

SRUN = """#!/bin/bash
while [[ $1 == --* ]]; do shift; done
export SLURM_STEP_NUM_TASKS=2 SLURM_STEP_TASKS_PER_NODE=2 SLURM_STEP_NODELIST=localhost
export SLURM_LAUNCH_NODE_IPADDR=127.0.0.1 SLURM_NODEID=0
for rank in 0 1; do
    SLURM_PROCID=$rank SLURM_LOCALID=$rank "$@" &
done
code=0
for task in $(jobs -p); do wait "$task" || code=$?; done
exit $code
"""
SCONTROL = '#!/bin/bash\necho "$@" >> requeued\n'
TRAIN = """
import os, pathlib, signal, sys
import torch
from torch.utils.data import DataLoader
from callbacks import LambdaCallback
from trainer import Trainer, TrainModule

class Line(TrainModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net = torch.nn.Linear(4, 1)
    def training_step(self, batch, batch_idx):
        loss = self.net(batch).square().mean()
        self.log("loss", loss)
        return loss
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)

def out_of_time(trainer, module):  # as SLURM says to each task
    if trainer.global_step == 3 and "once" in sys.argv and not pathlib.Path("requeued").exists():
        os.kill(os.getpid(), signal.SIGUSR1)

trainer = Trainer(
    max_epochs=2, seed=1, log_every=1, slurm_requeue=True, project_dir=sys.argv[1],
    progress_bar=False, callbacks=[LambdaCallback(on_train_step_end=out_of_time)],
)
assert trainer.accelerator.num_processes == 2
data = torch.randn(64, 4, generator=torch.Generator().manual_seed(0))
trainer.fit(Line(), DataLoader(data, 4, shuffle=True), ckpt_path="auto")
"""


def submit(capsys, *words: str) -> int:
    """Write the batch script and run it; return the job's exit code."""
    assert main(["launch", "--slurm", "--cpu", "--num_processes", "2", "train.py", *words]) == 0
    Path("job.sh").write_text(capsys.readouterr().out)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    variables = {
        "PATH": os.pathsep.join(
            map(str, (Path("bin").resolve(), Path(sys.executable).parent, os.environ["PATH"]))
        ),
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "SLURM_JOB_ID": "77",
        "MASTER_PORT": str(port),  # else it follows from the job's number
        "OMP_NUM_THREADS": "1",
    }
    return subprocess.run(
        ["bash", "job.sh"], env={**os.environ, **variables}, timeout=200, check=False
    ).returncode


def losses(folder: str) -> list[tuple[int, float]]:
    records = map(json.loads, Path(folder, "metrics.jsonl").read_text().splitlines())
    return [(record["step"], record["loss"]) for record in records if "loss" in record]


def test_a_job_out_of_time_is_requeued_and_goes_on(ranks2, tmp_path, capsys):
    Path("bin").mkdir()
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL)):
        Path("bin", name).write_text(text)
        Path("bin", name).chmod(0o755)
    Path("train.py").write_text(TRAIN)
    run_on_ranks(ranks2, "train.py", "whole")
    assert not Path("requeued").exists()
    assert submit(capsys, "cut", "once") == 138  # 128 + SIGUSR1
    assert Path("requeued").read_text() == "requeue 77\n"  # by one of the two tasks
    assert len(losses("cut")) < 16
    assert submit(capsys, "cut", "once") == 0
    assert losses("cut") == losses("whole")
    assert [step for step, _ in losses("whole")] == list(range(1, 17))
