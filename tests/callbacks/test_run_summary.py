"""What a run prints before its first epoch and after its last one."""

import re

import torch
from torch.utils.data import DataLoader, TensorDataset

from callbacks import ModelCheckpoint
from tests.helpers.line import Line
from trainer import Trainer


class Net(Line):
    def training_step(self, batch, batch_idx):
        return self.layer(batch[0]).square().mean()

    def validation_step(self, batch, batch_idx):
        self.log("val/loss", float(self.current_epoch))


def loader():
    return DataLoader(TensorDataset(torch.ones(4, 2)), batch_size=2)


def printed(capsys, **arguments):
    trainer = Trainer(max_epochs=2, project_dir="run", cpu=True, **arguments)
    trainer.fit(Net(), loader(), loader())
    return re.sub(r"[\d.]+ s$", "1 s", capsys.readouterr().err, flags=re.MULTILINE).splitlines()


def test_a_run_says_what_it_trains_and_what_it_leaves(capsys):
    first, *epochs, finished, best, last, following, report = printed(
        capsys, callbacks=ModelCheckpoint(monitor="val/loss")
    )
    assert first == "Training Net (3 parameters) on cpu, fp32, files in run"
    assert [line.split(",")[0] for line in epochs] == ["epoch 1/2: 2/2", "epoch 2/2: 2/2"]
    assert finished == "Finished 2 epochs, 4 updates, 1 s"
    assert best == "  best  run/checkpoints/step-00000002  val/loss=0"
    assert last == "  last  run/checkpoints/step-00000004"
    assert following.startswith("  next  ckpt_path='auto' with")
    assert report == "        trainer report run shows it"


def test_a_run_without_checkpoints_names_none(capsys):
    first, *_, finished = printed(capsys, checkpointing=False, mixed_precision="bf16")
    assert first == "Training Net (3 parameters) on cpu, bf16, files in run"
    assert finished == "Finished 2 epochs, 4 updates, 1 s"
