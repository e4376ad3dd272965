import logging

import pytest

from callbacks import Callback, EarlyStopping, ModelCheckpoint
from trainer import DataModule, Trainer, TrainModule
from trainer.hooks import check_hook_typos


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
    check_hook_typos(owner(), base)
    assert [record.getMessage() for record in caplog.records] == [
        f"{owner.__name__} defines {name}, which is not a hook, so the Trainer never calls it; "
        f"did you mean {near}?"
        for name, near in expected
    ]


def test_instance_attribute_named_almost_like_a_hook_warns(caplog):
    callback = Callback()
    callback.on_boundry = callback.on_train_end = lambda trainer, module: None
    check_hook_typos(callback, Callback)
    assert [record.args for record in caplog.records] == [("Callback", "on_boundry", "on_boundary")]


def test_own_callbacks_have_no_hook_typos(caplog):
    for callback in (EarlyStopping("loss"), ModelCheckpoint()):
        check_hook_typos(callback, Callback)
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
