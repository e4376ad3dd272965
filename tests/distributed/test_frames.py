"""From `trainer.fit` to the user's step in at most six Python frames of ours."""

from __future__ import annotations

import traceback
from pathlib import Path

import torch
from torch.utils.data import DataLoader, TensorDataset

import callbacks
import trackers
import trainer
from trainer import Trainer, TrainModule

OURS = {Path(package.__file__).parent for package in (trainer, callbacks, trackers)}


def frames_of_ours() -> list[str]:
    found: list[str] = []

    class Line(TrainModule):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(2, 1)

        def training_step(self, batch, batch_idx):
            stack = traceback.extract_stack()
            found[:] = [each.name for each in stack if OURS & set(Path(each.filename).parents)]
            return self.layer(batch[0]).mean()

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    data = DataLoader(TensorDataset(torch.ones(4, 2)), batch_size=2)
    Trainer(max_epochs=1, cpu=True, progress_bar=False, checkpointing=False).fit(Line(), data)
    return found


def test_fit_calls_training_step_through_five_frames():
    assert frames_of_ours() == ["fit", "fit", "train_epoch", "train_window", "forward"]


def test_ddp_adds_one_frame(ranks2):
    expected = ["fit", "fit", "train_epoch", "train_window", "forward", "forward"]
    assert ranks2(frames_of_ours, timeout=30) == [expected] * 2
