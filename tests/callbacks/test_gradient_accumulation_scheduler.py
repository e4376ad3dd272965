from __future__ import annotations

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from callbacks import Callback, GradientAccumulationScheduler, LambdaCallback
from tests.helpers.line import Line
from tests.numerics.running import Watch, assert_same, on_processes, quiet_trainer
from trainer import Trainer

SAMPLES, SIZE = 22, 2  # 11 batches


def loader():
    generator = torch.Generator().manual_seed(0)
    return DataLoader(
        TensorDataset(torch.randn(SAMPLES, 2, generator=generator, dtype=torch.float64)), SIZE
    )


class Model(Line):
    def __init__(self):
        torch.manual_seed(1)
        super().__init__()
        self.double()


class Windows(Callback):
    """How many micro-batches each update has."""

    def __init__(self):
        self.sizes = []

    def on_train_step_start(self, trainer, module):
        self.sizes.append(0)

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        self.sizes[-1] += 1


def sizes(scheduling, **options):
    windows = Windows()
    trainer = quiet_trainer(
        **{"max_epochs": 4, "callbacks": [GradientAccumulationScheduler(scheduling), windows]}
        | options
    )
    trainer.fit(Model(), loader())
    return windows.sizes


def epoch(size, batches=11):
    rest = [batches % size] if batches % size else []
    return [size] * (batches // size) + rest


def test_accumulation_changes_at_epoch_starts():
    assert sizes({2: 3, 0: 8, 3: 1}) == epoch(8) * 2 + epoch(3) + epoch(1)


def test_before_the_first_epoch_given_the_trainer_decides():
    found = sizes({1: 5, 2: 2}, gradient_accumulation_steps=4)
    assert found == epoch(4) + epoch(5) + epoch(2) * 2


@pytest.mark.parametrize("world", [1, 2])
def test_each_update_is_that_of_the_whole_window(ranks, world):
    """Growing and shrinking, from windows of one micro-batch and back."""
    scheduling = {0: 1, 1: 4, 2: 2, 3: 1}

    def fit():
        watch = Watch()
        callbacks = [GradientAccumulationScheduler(scheduling), watch]
        trainer = quiet_trainer(max_epochs=4, callbacks=callbacks)
        trainer.fit(Model(), loader())
        assert trainer.gradient_accumulation_steps == 1  # the Trainer's own, after the fit
        return watch.weights

    module = Model()
    optimizer = module.configure_optimizers()
    (data,) = loader().dataset.tensors
    expected = []
    for size in scheduling.values():
        for rows in data.split(size * world * SIZE):
            optimizer.zero_grad()
            module.training_step([rows], 0).backward()
            optimizer.step()
            expected.append({name: value.clone() for name, value in module.state_dict().items()})
    for weights in on_processes(ranks, world, fit):
        torch.testing.assert_close(weights, expected, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("stop", [3, 5, 8])
def test_a_resumed_run_is_exact(stop):
    """Stopped at the end of an epoch, inside the next, and inside the third."""

    def fit(folder, **options):
        watch, windows = Watch(), Windows()
        scheduling = GradientAccumulationScheduler({0: 4, 1: 3, 2: 2})
        options = {"max_epochs": 3, "project_dir": folder, "checkpointing": True} | options
        trainer = quiet_trainer(callbacks=[scheduling, watch, windows], **options)
        trainer.fit(Model(), loader(), ckpt_path="auto")
        return watch.weights, windows.sizes

    whole, sizes = fit("whole")
    fit("cut", max_steps=stop)
    rest, rest_sizes = fit("cut")
    assert sizes == epoch(4) + epoch(3) + epoch(2)
    assert rest_sizes == sizes[stop:]
    assert_same(rest, whole[stop:])


def test_the_length_of_the_run_is_known_when_schedules_are_made():
    found = []

    class Asking(Model):
        def configure_optimizers(self):
            found.append(self.trainer.estimated_stepping_batches)
            return super().configure_optimizers()

    callback = GradientAccumulationScheduler({1: 4, 3: 2})
    trainer = quiet_trainer(max_epochs=4, callbacks=callback, gradient_accumulation_steps=8)
    trainer.fit(Asking(), loader())
    assert found == [2 + 3 + 3 + 6] == [trainer.global_step]


def test_any_callback_may_change_it_for_the_next_window():
    def grow(trainer, module, batch, batch_idx):
        trainer.gradient_accumulation_steps = trainer.global_step + 1

    windows = Windows()
    growing = LambdaCallback(on_train_batch_start=grow)
    trainer = quiet_trainer(max_epochs=1, callbacks=[growing, windows])
    trainer.fit(Model(), loader())
    assert windows.sizes == [1, 1, 2, 3, 4]


def test_an_invalid_number_is_refused():
    def change(trainer, module):
        trainer.gradient_accumulation_steps = 0

    callback = LambdaCallback(on_train_epoch_start=change)
    with pytest.raises(ValueError, match="gradient_accumulation_steps is"):
        quiet_trainer(max_epochs=1, callbacks=callback).fit(Model(), loader())


def test_setting_it_without_effect_is_refused():
    trainer = Trainer(max_epochs=1, cpu=True, gradient_accumulation_steps=3)
    assert trainer.gradient_accumulation_steps == 3
    with pytest.raises(RuntimeError, match="only while fit runs"):
        trainer.gradient_accumulation_steps = 2

    class Manual(Model):
        automatic_optimization = False

        def on_train_start(self):
            self.trainer.gradient_accumulation_steps = 2

    with pytest.raises(RuntimeError, match="manual optimisation"):
        quiet_trainer(max_epochs=1).fit(Manual(), loader())
    trainer = quiet_trainer(max_epochs=1, callbacks=GradientAccumulationScheduler({0: 2}))
    with pytest.raises(ValueError, match="manual optimisation"):
        trainer.fit(Manual(), loader())


@pytest.mark.parametrize(
    ("scheduling", "error", "text"),
    [
        ({}, ValueError, "must be a dict"),
        ({-1: 2}, ValueError, "the epoch -1 of scheduling is -1; it must be"),
        ({0: 0}, ValueError, r"scheduling\[0\] is 0; it must be a whole number of at least 1"),
        ([4], ValueError, r"\[4\]; it must be a dict"),
    ],
)
def test_invalid_arguments_are_refused(scheduling, error, text):
    with pytest.raises(error, match=text):
        GradientAccumulationScheduler(scheduling)
