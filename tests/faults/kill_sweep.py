"""A run that is killed and started again, many times over; started by `test_kill.py`.

Python and torch are imported once; each start of the run is a fork of that process, which has not
computed anything yet. Prints one line of JSON: how many kills there were, and which of them made a
difference.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from callbacks import Callback, EarlyStopping, ModelCheckpoint
from trackers import read_metrics
from trainer import Trainer, TrainModule
from trainer.checkpoint.serialization import load_tree
from trainer.checkpoint.storage import committed, verify
from trainer.checkpoint.weights import load_weights

KILLED = -signal.SIGKILL
TIMED = -signal.SIGALRM  # whose default is to end the process, wherever it is


class Noisy(Dataset[Any]):
    def __len__(self) -> int:
        return 26

    def __getitem__(self, index: int) -> Any:
        noise = torch.randn(3) + random.random() + float(numpy.random.rand())
        return noise + index / 26, torch.tensor(index % 3)


class Net(TrainModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.net = nn.Sequential(
            nn.Linear(3, 6), nn.BatchNorm1d(6), nn.Dropout(0.3), nn.Linear(6, 3)
        )

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val/loss", nn.functional.cross_entropy(self.net(batch[0]), batch[1]))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.02)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 4, 0.8)
        return {"optimizer": optimizer, "scheduler": schedule, "interval": "step"}


class Killer(Callback):
    """Kills the process at the beginning of an update."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_step_start(self, trainer: Any, module: Any) -> None:
        if trainer.global_step == self.step:
            os.kill(os.getpid(), signal.SIGKILL)


def kill_at_call(number: int) -> None:
    """Kill the process at its n-th call of what puts files on the disk."""
    left = [number]

    def counted(function: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            left[0] -= 1
            if left[0] == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*args, **kwargs)

        return call

    for name in ("fsync", "rename", "replace", "mkdir", "rmdir", "unlink"):
        setattr(os, name, counted(getattr(os, name)))


def fit(folder: Path, step: int = -1) -> None:
    trainer = Trainer(
        max_epochs=3,
        cpu=True,
        project_dir=folder,
        progress_bar=False,
        log_every=2,
        val_every=3,
        gradient_accumulation_steps=2,  # 13 batches: the last window of an epoch is short
        callbacks=[
            Killer(step),
            EarlyStopping("val/loss", patience=50),
            ModelCheckpoint(monitor="val/loss", every=1, save_top_k=2),
        ],
        seed=5,
    )
    train = DataLoader(Noisy(), 2, shuffle=True)
    validation = DataLoader([Noisy()[0] for _ in range(6)], 4)
    trainer.fit(Net(), train, validation, ckpt_path="auto")


def start(folder: Path, kind: str = "none", when: float = 0) -> int:
    """One start of the run, in a process of its own; its exit code."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            torch.manual_seed(random.randrange(2**32))  # nothing may depend on it
            if kind == "call":
                kill_at_call(int(when))
            if kind == "time":
                signal.setitimer(signal.ITIMER_REAL, when)
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            fit(folder, int(when) if kind == "step" else -1)
            code = 0
        finally:
            sys.stderr.flush()
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def without_time(tree: Any) -> Any:
    if isinstance(tree, dict):
        return {k: without_time(v) for k, v in tree.items() if k not in ("seconds", "run_id")}
    return [without_time(each) for each in tree] if isinstance(tree, list) else tree


def end_of(folder: Path) -> Any:
    """What a finished run leaves: the record, the newest state, the checkpoints that were kept."""
    checkpoints = committed(folder / "checkpoints")
    for checkpoint in checkpoints:
        verify(checkpoint)
    newest = checkpoints[-1]
    state = load_tree(newest, "trainer")
    leftovers = sorted(path.name for path in (folder / "checkpoints").iterdir())
    records = [without_time(record) for record in read_metrics(folder / "metrics.jsonl")]
    for record in records:
        record.pop("time")
    return [
        leftovers,
        records,
        repr(without_time(state)),
        repr(load_weights(newest)),
        repr(load_tree(newest, "optimizer")),
        repr(load_tree(newest, "rank-00000")),
    ]


def main() -> None:
    folder, kinds = Path(sys.argv[1]), json.loads(sys.argv[2])
    torch.set_printoptions(precision=12, threshold=100_000)
    assert start(folder / "whole") == 0
    whole = end_of(folder / "whole")
    kills, different = 0, []
    for number, kind in enumerate(kinds):
        here = folder / str(number)
        for point in kind["points"]:
            code = start(here, kind["kind"], point)
            kills += code in (KILLED, TIMED)
            if code not in (0, KILLED, TIMED):
                different.append([kind["kind"], point, f"exit code {code}"])
        if (code := start(here)) != 0:
            different.append([kind, f"exit code {code}"])
        else:
            pairs = zip(end_of(here), whole, strict=True)
            different += [
                [kind, i] for i, (found, expected) in enumerate(pairs) if found != expected
            ]
        shutil.rmtree(here)
    print(json.dumps({"kills": kills, "different": different}))


if __name__ == "__main__":
    main()
