import os
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from callbacks import ModelCheckpoint, OnExceptionCheckpoint
from trainer import Trainer, TrainModule
from trainer.checkpoint.storage import verify
from trainer.checkpoint.weights import load_weights


class Net(TrainModule):
    def __init__(self, error=None):
        super().__init__()
        torch.manual_seed(1)
        self.layer = torch.nn.Linear(2, 1)
        self.error = error

    def training_step(self, batch, batch_idx):
        if self.error is not None and self.trainer.global_step == 3:
            raise self.error
        return self.layer(batch[0]).square().mean()

    def validation_step(self, batch, batch_idx):
        raise ArithmeticError("the user's own")

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def loader():
    return DataLoader(TensorDataset(torch.ones(12, 2)), batch_size=2)


def make(*callbacks, **arguments):
    return Trainer(
        max_epochs=1,
        project_dir="run",
        progress_bar=False,
        cpu=True,
        callbacks=list(callbacks),
        **arguments,
    )


@pytest.mark.parametrize("folder", [None, "elsewhere"])
def test_the_weights_of_that_moment_are_kept_and_a_run_goes_on_from_the_checkpoints(folder, caplog):
    module = Net(ArithmeticError("the user's own"))
    keep = [OnExceptionCheckpoint(folder), ModelCheckpoint(every=2)]
    with pytest.raises(ArithmeticError):
        make(*keep).fit(module, loader())
    path = Path(folder or "run/checkpoints", "exception-00000003-rank-00000")
    assert str(path) in caplog.text
    assert verify(path)["step"] == 3
    saved = load_weights(path)
    assert all(torch.equal(saved[name], value) for name, value in module.state_dict().items())
    trainer = make(*keep)
    trainer.fit(Net(), loader(), ckpt_path="auto")
    assert trainer.global_step == 6
    assert path.is_dir()


def test_it_does_not_stand_in_for_the_default_checkpoints():
    make(OnExceptionCheckpoint()).fit(Net(), loader())
    assert os.listdir("run/checkpoints") == ["step-00000006"]


def test_an_interrupt_and_an_evaluation_save_nothing():
    with pytest.raises(KeyboardInterrupt):
        make(OnExceptionCheckpoint(), checkpointing=False).fit(Net(KeyboardInterrupt()), loader())
    with pytest.raises(ArithmeticError):
        make(OnExceptionCheckpoint()).validate(Net(), loader())
    with pytest.raises(ArithmeticError):
        make(OnExceptionCheckpoint(), fast_dev_run=True).fit(
            Net(), loader(), [torch.ones(1, 2)], ckpt_path=None
        )
    assert not list(Path("run").rglob("exception-*"))
