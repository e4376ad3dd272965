"""What configure_optimizers chose, compared between the starts of a run."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import DataLoader

from tests.numerics.running import quiet_trainer
from trainer import TrainModule
from trainer.loops.options import options_of
from trainer.optim.configure import OptimizerEntry, SchedulerEntry


class Line(TrainModule):
    def __init__(self, lr=0.1, gamma=0.5, groups=1):
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)
        self.lr, self.gamma, self.groups = lr, gamma, groups

    def training_step(self, batch, batch_idx):
        return self.layer(batch).square().mean()

    def configure_optimizers(self):
        weights = list(self.parameters())
        groups = [{"params": weights[number :: self.groups]} for number in range(self.groups)]
        optimizer = torch.optim.SGD(groups, lr=self.lr)
        return optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 1, self.gamma)


def fit(epochs, **changed):
    module = Line(**changed)
    trainer = quiet_trainer(max_epochs=epochs, project_dir="run", checkpointing=True)
    trainer.fit(module, DataLoader(torch.ones(4, 2), 2), ckpt_path="auto")
    return trainer.optimizers[0].param_groups[0]["lr"]


def told(caplog):
    return [each.getMessage() for each in caplog.records if each.name == "trainer.loops.options"]


def test_a_changed_learning_rate_is_told_once_and_that_of_the_checkpoint_kept(caplog):
    fit(1)
    assert fit(2, lr=1.0) == pytest.approx(0.1 * 0.5**2)
    (text,) = told(caplog)
    assert "lr of SGD was 0.1, is 1.0; initial_lr of SGD was 0.1, is 1.0; base_lrs of" in text
    assert text.endswith("To change a value within a run, set it in on_train_start.")
    caplog.clear()
    fit(3, lr=1.0)
    assert told(caplog) == []


def test_a_changed_schedule_is_told(caplog):
    fit(1)
    fit(2, gamma=0.9)
    assert "gamma of scheduler 0 (StepLR) was 0.5, is 0.9." in told(caplog)[0]


@pytest.mark.parametrize("epochs", [1, 2])
def test_the_same_script_is_told_nothing(epochs, caplog):
    fit(1, groups=2)
    fit(epochs, groups=2)
    assert told(caplog) == []


def test_options_are_numbers_and_words_and_of_other_objects_the_type():
    weight = torch.nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.Adam([weight], lr=torch.tensor(0.5), betas=(0.8, 0.9))
    optimizer.param_groups[0]["of its own"] = object()
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    options = options_of(
        [OptimizerEntry(optimizer=optimizer)], [SchedulerEntry(scheduler=scheduler)]
    )
    assert options["lr of Adam"] == "0.5"
    assert options["betas of Adam"] == "[0.8, 0.9]"
    assert options["of its own of Adam"] == "object"
    assert options["the number of parameters of Adam"] == "1"
    assert options["lr_lambdas of scheduler 0 (LambdaLR)"] == "[None]"
