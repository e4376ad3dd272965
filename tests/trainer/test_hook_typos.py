import logging
import re

import pytest
import torch

from callbacks import Callback, EarlyStopping, ModelCheckpoint
from trainer import DataModule, Trainer, TrainModule
from trainer.hooks import hook_typos, warn_of_hook_typos


class Odd(TrainModule):
    def on_trian_epoch_end(self):
        pass

    def on_train_batch_ends(self, outputs, batch, batch_idx):
        pass

    def validation_step(self, batch, batch_idx):
        pass

    def validation_step2(self, batch, batch_idx):  # beside the hook: a part of it
        pass

    def on_success(self):
        pass

    def train_dataloaders(self):
        pass


class OddCallback(Callback):
    def on_boundry(self, trainer, module):
        pass

    def on_train_epoch_begin(self, trainer, module):
        pass

    def on_val_batch_end(self, trainer, module):
        pass


class OddData(DataModule):
    def val_dataloadr(self):
        pass


@pytest.mark.parametrize(
    ("owner", "base", "expected"),
    [
        (
            Odd,
            TrainModule,
            [
                ("on_train_batch_ends", "on_train_batch_end"),
                ("on_trian_epoch_end", "on_train_epoch_end"),
                ("train_dataloaders", "train_dataloader"),
            ],
        ),
        (
            OddCallback,
            Callback,
            [
                ("on_boundry", "on_boundary"),
                ("on_train_epoch_begin", "on_train_epoch_start"),
                ("on_val_batch_end", "on_validation_batch_end"),
            ],
        ),
        (OddData, DataModule, [("val_dataloadr", "val_dataloader")]),
    ],
)
def test_method_named_almost_like_a_hook_warns(owner, base, expected, caplog):
    warn_of_hook_typos(owner(), base)
    assert [record.getMessage() for record in caplog.records] == [
        f"{owner.__name__} defines {name}, which is not a hook, so the Trainer never calls it; "
        f"did you mean {near}?"
        for name, near in expected
    ]


def test_instance_attribute_named_almost_like_a_hook_warns(caplog):
    callback = Callback()
    callback.on_boundry = callback.on_train_end = lambda trainer, module: None
    warn_of_hook_typos(callback, Callback)
    assert [record.args for record in caplog.records] == [("Callback", "on_boundry", "on_boundary")]


def test_own_callbacks_have_no_hook_typos(caplog):
    for callback in (EarlyStopping("loss"), ModelCheckpoint()):
        warn_of_hook_typos(callback, Callback)
    assert caplog.records == []


def test_fit_checks_module_callbacks_and_datamodule_for_hook_typos(caplog):
    class Data(OddData):
        def test_dataloader(self):
            return [[1]]

    class Module(Odd):
        def test_step(self, batch, batch_idx):
            pass

    trainer = Trainer(callbacks=[OddCallback()], progress_bar=False, cpu=True)
    with caplog.at_level(logging.WARNING, "trainer.hooks"):
        trainer.test(Module(), datamodule=Data())
    messages = [r.getMessage().split(" defines ")[0] for r in caplog.records]
    assert messages == ["Module"] * 3 + ["OddCallback"] * 3 + ["Data"]


class Good(TrainModule):
    def training_step(self, batch, batch_idx):
        pass

    def validation_step(self, batch, batch_idx):
        return self.val_step(batch)

    def configure_optimizers(self):
        pass


class Child(Good):
    def val_step(self, batch):  # what the parent's hook calls
        pass

    def configure_optimizer(self):
        pass


class GrandChild(Child):
    def configure_optimizer(self):
        pass


class Private(Good):
    def _validation_step(self, batch):
        pass

    def _setup(self):
        pass


class Parent(Good):
    def validation_step(self, batch, batch_idx):
        return self.validation_steps(batch)

    def validation_steps(self, batch):
        pass


class Overrides(Parent):
    def validation_steps(self, batch):
        pass


def test_typo_of_a_hook_that_a_parent_defines_is_found():
    assert hook_typos(Child(), TrainModule) == {"configure_optimizer": "configure_optimizers"}
    assert hook_typos(GrandChild(), TrainModule) == {"configure_optimizer": "configure_optimizers"}
    assert hook_typos(Overrides(), TrainModule) == {}  # the parent has both: one calls the other
    assert hook_typos(Private(), TrainModule) == {}


class Misspelt(TrainModule):
    def train_step(self, batch, batch_idx):
        pass

    def validaton_step(self, batch, batch_idx):
        pass

    def configure_optimizer(self):
        pass

    def on_fit_strat(self):
        pass


class OnlyValidation(Misspelt):
    def training_step(self, batch, batch_idx):
        return self.loss

    def configure_optimizers(self):
        self.loss = torch.nn.Parameter(torch.ones(()))
        return torch.optim.SGD([self.loss], lr=0.1)

    train_step = configure_optimizer = None


def fit(module, val, caplog):
    trainer = Trainer(max_steps=1, progress_bar=False, cpu=True, project_dir=None)
    with caplog.at_level(logging.WARNING):
        trainer.fit(module, [torch.ones(1)], val)


def test_the_error_for_a_missing_method_names_its_typo(caplog):
    with pytest.raises(TypeError) as info:
        fit(Misspelt(), [torch.ones(1)], caplog)
    assert str(info.value).splitlines() == [
        "Misspelt does not define training_step, which fit needs: def training_step(self, batch, "
        "batch_idx). It defines train_step; did you mean training_step?",
        "Misspelt does not define configure_optimizers, which fit needs: "
        "def configure_optimizers(self). It defines configure_optimizer; "
        "did you mean configure_optimizers?",
    ]
    assert [record.args[1] for record in caplog.records] == ["on_fit_strat"]


def test_typo_of_validation_step_is_named_where_its_absence_is(caplog):
    class WithData(OnlyValidation):
        def val_dataloader(self):
            return [torch.ones(1)]

    end = "does not define validation_step.* It defines validaton_step; did you mean"
    with pytest.raises(TypeError, match=end):
        fit(OnlyValidation(), [torch.ones(1)], caplog)
    assert "validaton_step" not in caplog.text
    caplog.clear()
    fit(WithData(), None, caplog)
    assert caplog.text.count("validaton_step") == 1
    assert re.search(end, caplog.text)
    caplog.clear()
    fit(OnlyValidation(), None, caplog)
    said = [text for text in caplog.messages if text.startswith("No validation")]
    assert said == [
        "No validation will run: OnlyValidation does not define validation_step, and there is no "
        "validation data. It defines validaton_step; did you mean validation_step? To disable "
        "validation, pass limit_val_batches=0."
    ]
    assert caplog.text.count("validaton_step") == 1
