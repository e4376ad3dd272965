"""What configure_optimizers chose, compared between the starts of a run."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import DataLoader

from tests.numerics.running import quiet_trainer
from trainer import TrainModule
from trainer.errors import CheckpointError
from trainer.optim.configure import OptimizerEntry, SchedulerEntry
from trainer.optim.fingerprint import options_of


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


def messages(caplog):
    return [
        each.getMessage() for each in caplog.records if each.name == "trainer.optim.fingerprint"
    ]


def test_a_changed_learning_rate_is_warned_of_and_that_of_the_checkpoint_kept(caplog):
    fit(1)
    for epochs in (2, 3):  # at each start, while the script says so
        caplog.clear()
        assert fit(epochs, lr=1.0) == pytest.approx(0.1 * 0.5**epochs)
        (text,) = messages(caplog)
        assert "has changed: lr of SGD stays 0.1, not 1. To change" in text
        assert "set it in on_train_start" in text
    caplog.clear()
    fit(4)  # the script says again what the run does
    assert messages(caplog) == []


def test_equal_numbers_of_other_types_are_no_change(caplog):
    fit(1, lr=1)
    fit(2, lr=1.0)
    fit(3, lr=torch.tensor(1.0))
    assert messages(caplog) == []


@pytest.mark.parametrize("epochs", [1, 2])
def test_the_same_script_is_not_warned(epochs, caplog):
    fit(1, groups=2)
    fit(epochs, groups=2)
    assert messages(caplog) == []


def test_a_schedule_that_depends_on_the_length_is_warned_of_when_the_run_is_extended(caplog):
    class Cosine(Line):
        def configure_optimizers(self):
            optimizer = torch.optim.SGD(self.parameters(), lr=self.lr)
            updates = self.trainer.estimated_stepping_batches
            return optimizer, torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, updates)

    for epochs in (1, 2):
        trainer = quiet_trainer(max_epochs=epochs, project_dir="run", checkpointing=True)
        trainer.fit(Cosine(), DataLoader(torch.ones(4, 2), 2), ckpt_path="auto")
    (text,) = messages(caplog)
    assert "T_max of scheduler 0 (CosineAnnealingLR) stays 2, not 4." in text


def test_the_parts_of_schedules_are_compared_too():
    def options(gamma, milestone):
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(2))], lr=0.1)
        kinds = torch.optim.lr_scheduler
        parts = [kinds.StepLR(optimizer, 2, gamma), kinds.MultiStepLR(optimizer, [milestone, 9])]
        both = kinds.SequentialLR(optimizer, parts, [milestone])
        entry = OptimizerEntry(optimizer=optimizer)
        return options_of(["SGD"], [entry], [SchedulerEntry(scheduler=both)])

    place = "scheduler 0 (SequentialLR)"
    ours, others = options(0.5, 3), options(0.25, 4)
    assert {name for name in ours if ours[name] != others[name]} == {
        f"gamma of {place}, part 0",
        f"milestones of {place}, part 1",
    }


def test_a_schedule_of_another_class_is_refused():
    class Other(Line):
        def configure_optimizers(self):
            optimizer = torch.optim.SGD(self.parameters(), lr=self.lr)
            return optimizer, torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)

    fit(1)
    trainer = quiet_trainer(max_epochs=2, project_dir="run", checkpointing=True)
    with pytest.raises(CheckpointError, match=r"a ExponentialLR, but.*is StepLR, whose state"):
        trainer.fit(Other(), DataLoader(torch.ones(4, 2), 2), ckpt_path="auto")


def test_a_value_that_a_hook_has_set_is_in_effect(caplog):
    class Set(Line):
        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=self.lr)

        def on_train_start(self):
            self.optimizers().param_groups[0]["lr"] = 0.5

    def start(epochs, module):
        caplog.clear()
        trainer = quiet_trainer(max_epochs=epochs, project_dir="run", checkpointing=True)
        trainer.fit(module, DataLoader(torch.ones(4, 2), 2), ckpt_path="auto")
        return messages(caplog)

    assert start(1, Set(lr=0.1)) == []
    assert start(2, Set(lr=0.1)) == []  # as each start before
    assert start(3, Set(lr=0.5)) == []
    (text,) = start(4, Set(lr=0.1))
    assert "lr of SGD stays 0.5, not 0.1" in text


class Moody(torch.optim.lr_scheduler.StepLR):
    """Keeps what it likes."""

    def __init__(self, optimizer, mood):
        self.mood = mood
        super().__init__(optimizer, 2)


class Warm:
    """A factor that has read a table, and knows itself."""

    def __init__(self, mood):
        self.table = {"mood": mood}
        self.table["self"] = self.table

    def __call__(self, epoch):
        return 1.0


@pytest.mark.parametrize(
    "make",
    [
        lambda kinds, optimizer, mood: kinds.SequentialLR(
            optimizer, [kinds.ConstantLR(optimizer), Moody(optimizer, mood)], [3]
        ),
        lambda kinds, optimizer, mood: kinds.ChainedScheduler([Moody(optimizer, mood)]),
        lambda kinds, optimizer, mood: kinds.LambdaLR(optimizer, Warm(mood)),
    ],
    ids=["in sequence", "in a chain", "a function"],
)
def test_user_objects_inside_schedules_are_not_compared(make):
    def options(mood):
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(2))], lr=0.1)
        scheduler = make(torch.optim.lr_scheduler, optimizer, mood)
        entry = OptimizerEntry(optimizer=optimizer)
        return options_of(["SGD"], [entry], [SchedulerEntry(scheduler=scheduler)])

    assert options(1.0) == options(2.0)


class Frozen(TrainModule):
    """The optimizer has the parameters that require a gradient at the start."""

    def __init__(self, trains_body=False):
        super().__init__()
        self.body, self.head = torch.nn.Linear(2, 2), torch.nn.Linear(2, 1)
        self.body.requires_grad_(trains_body)

    def training_step(self, batch, batch_idx):
        return self.head(self.body(batch)).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD([each for each in self.parameters() if each.requires_grad], 0.1)


@pytest.mark.parametrize(("first", "what"), [(False, "now also has"), (True, "no longer has")])
def test_parameters_that_an_optimizer_gained_or_lost_are_named(first, what):
    def start(epochs, trains_body):
        trainer = quiet_trainer(max_epochs=epochs, project_dir="run", checkpointing=True)
        trainer.fit(Frozen(trains_body), DataLoader(torch.ones(4, 2), 2), ckpt_path="auto")

    start(1, first)
    with pytest.raises(CheckpointError, match=f"{what} body.bias, body.weight"):
        start(2, not first)


def test_other_parameter_groups_than_in_the_checkpoint_are_counted():
    def start(epochs, *sizes):
        module = Frozen(trains_body=True)

        def configure_optimizers():
            parameters = iter(module.parameters())
            groups = [{"params": [next(parameters) for _ in range(size)]} for size in sizes]
            return torch.optim.SGD(groups, 0.1)

        module.configure_optimizers = configure_optimizers
        trainer = quiet_trainer(max_epochs=epochs, project_dir="run", checkpointing=True)
        trainer.fit(module, DataLoader(torch.ones(4, 2), 2), ckpt_path="auto")

    start(1, 4)
    with pytest.raises(CheckpointError) as caught:
        start(2, 1, 3)
    assert str(caught.value).endswith(
        "an optimizer had 1 parameter group (4 parameters), and now has 2 parameter groups (1, 3 "
        "parameters). Return the same parameter groups from configure_optimizers as when the run "
        "began."
    )
    assert caught.value.__cause__ is None
    assert caught.value.__suppress_context__


def test_an_error_about_a_checkpoint_is_shown_once():
    fit(1)
    module = Line()
    module.configure_optimizers = lambda: torch.optim.AdamW(module.parameters())
    trainer = quiet_trainer(max_epochs=2, project_dir="run", checkpointing=True)
    with pytest.raises(CheckpointError, match=r"the optimizers 'SGD', but .* 'AdamW'") as caught:
        trainer.fit(module, DataLoader(torch.ones(4, 2), 2), ckpt_path="auto")
    assert caught.value.__cause__ is None
    assert caught.value.__suppress_context__
