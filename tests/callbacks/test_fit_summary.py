"""What a run prints before its first epoch and after its last one."""

import re
from pathlib import Path

import torch
from torch.utils.data import DataLoader, TensorDataset

from callbacks import Callback, EarlyStopping, ModelCheckpoint
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
    assert following.startswith("  next  ckpt_path='auto' with project_dir='run' and a larger")
    assert report == "        trainer report run shows it"


def test_a_run_without_checkpoints_names_none(capsys):
    first, *_, finished = printed(capsys, checkpointing=False, mixed_precision="bf16")
    assert first == "Training Net (3 parameters) on cpu, bf16, files in run"
    assert finished == "Finished 2 epochs, 4 updates, 1 s"


def test_a_run_with_nothing_left_to_do_says_only_that(capsys, caplog):
    printed(capsys)
    trainer = Trainer(max_epochs=2, val_every="3 epochs", project_dir="run", cpu=True)
    trainer.fit(Net(), loader(), loader(), ckpt_path="auto")  # without a warning of no validation
    said = capsys.readouterr()
    assert said.out.count("Nothing is left to do") == 1
    assert said.err == ""
    assert caplog.messages == []


class Further(Callback):
    def on_train_start(self, trainer, module):
        self.begun = trainer.global_step


def test_what_a_run_says_of_its_continuation_continues_it(capsys, monkeypatch):
    """A stopped run stays stopped under "auto", and without project_dir there is no "auto"."""

    def fit(epochs, *callbacks, ckpt_path=None, **arguments):
        trainer = Trainer(max_epochs=epochs, cpu=True, callbacks=[*callbacks], **arguments)
        trainer.fit(Net(), loader(), loader(), ckpt_path=ckpt_path)
        *_, following, _ = capsys.readouterr().err.splitlines()
        return trainer.global_step, dict(re.findall(r"(\w+)='([^']*)'", following))

    assert fit(2)[0] == 4
    folder = next(Path("runs").iterdir())
    begun = Further()
    _, named = fit(3, project_dir=folder, ckpt_path="auto")
    assert named == {"ckpt_path": "auto", "project_dir": str(folder)}
    assert fit(4, begun, **named)[0] == 8
    assert begun.begun == 6

    steps, named = fit(3, EarlyStopping("val/loss", patience=1), project_dir="stopped")
    assert steps == 4
    assert named == {"ckpt_path": "stopped/checkpoints/step-00000004"}
    assert fit(3, begun, project_dir="stopped", **named)[0] == 6
    assert begun.begun == 4
