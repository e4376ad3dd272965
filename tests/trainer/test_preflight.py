"""A validation that was asked for and would not run is told, or refused where one waits for it."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import DataLoader, IterableDataset

from callbacks import (
    EarlyStopping,
    GradientAccumulationScheduler,
    Interval,
    ModelCheckpoint,
    SpikeDetection,
)
from tests.helpers.line import Line
from tests.helpers.line import loader as line_loader
from tests.numerics.running import quiet_trainer
from trainer import DataModule, Trainer, TrainModule
from trainer.data.epoch_iterator import EpochIterator
from trainer.data.sampler import DataShard
from trainer.loops.config import Length
from trainer.loops.preflight import can_be_due


class Net(TrainModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.layer(batch).square().mean()
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", self.layer(batch).square().mean())

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


class Blind(Net):
    validation_step = TrainModule.validation_step


class Plateau(Net):
    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        return {"optimizer": optimizer, "scheduler": ReduceLROnPlateau(optimizer), "monitor": "val"}


def loader(batches: int = 10) -> Any:
    return DataLoader(torch.zeros(batches, 1))


def messages(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [
        record.getMessage() for record in caplog.records if record.name == "trainer.loops.preflight"
    ]


NEVER = [
    {"val_every": "11 steps", "max_steps": 10},
    {"val_every": "21 steps", "max_epochs": 2},
    {"val_every": "11 steps", "max_epochs": 2, "gradient_accumulation_steps": 2},
    {"val_every": "1 epoch", "max_steps": 9},
    {"val_every": "3 epochs", "max_epochs": 2},
    {"val_every": "1.5 epochs", "max_steps": 14},
    {"val_every": "0.5 epochs", "max_steps": 2, "gradient_accumulation_steps": 2},
    {"val_every": "1 hour", "max_time": "1 minute"},
]
DUE = [
    {"val_every": "10 steps", "max_steps": 10},
    {"val_every": "20 steps", "max_epochs": 2},
    {"val_every": "10 steps", "max_epochs": 2, "gradient_accumulation_steps": 2},
    {"val_every": "1 epoch", "max_steps": 10},
    {"val_every": "1.5 epochs", "max_steps": 15},
    {"val_every": "0.5 epochs", "max_steps": 3, "gradient_accumulation_steps": 2},
]


@pytest.mark.parametrize("options", NEVER)
def test_run_shorter_than_val_every_warns(caplog, options):
    if "max_time" in options:
        options = {**options, "callbacks": Ended()}
    trainer = quiet_trainer(**options)
    trainer.fit(Net(), loader(), loader(1))
    assert trainer.validations == 0
    (text,) = messages(caplog)
    assert f"val_every is {Interval.parse(options['val_every'])}, but the run ends before" in text
    assert "pass limit_val_batches=0" in text


class Ended(EarlyStopping):
    """Asks for the end at once, of a run that only the clock would end."""

    def __init__(self) -> None:
        super().__init__("loss", stopping_threshold=float("inf"))


@pytest.mark.parametrize("options", DUE)
def test_run_as_long_as_val_every_does_not_warn(caplog, options):
    trainer = quiet_trainer(**options)
    trainer.fit(Net(), loader(), loader(1))
    assert trainer.validations >= 1
    assert messages(caplog) == []


def test_scheduled_accumulation_counts_towards_val_every(caplog):
    grows = GradientAccumulationScheduler({0: 1, 1: 5})
    trainer = quiet_trainer(max_epochs=3, val_every="15 steps", callbacks=grows)
    trainer.fit(Net(), loader(), loader(1))
    assert trainer.global_step == 14
    assert "15 steps, but the run ends before" in messages(caplog)[0]


WATCHERS = {
    "EarlyStopping": lambda: (Net(), EarlyStopping("val")),
    "ModelCheckpoint": lambda: (Net(), ModelCheckpoint(monitor="val")),
    "ReduceLROnPlateau": lambda: (Plateau(), None),
}


@pytest.mark.parametrize("who", WATCHERS)
def test_monitor_of_an_unreachable_validation_raises_before_training(who):
    module, callback = WATCHERS[who]()
    trainer = quiet_trainer(
        max_steps=5, val_every="6 steps", callbacks=callback, num_sanity_val_steps=1
    )
    with pytest.raises(ValueError, match=rf"{who} monitors 'val'.*val_every is 6 steps\. Choose"):
        trainer.fit(module, loader(), loader(1))
    assert trainer.global_step == 0


def test_training_metric_can_be_monitored_without_validation():
    trainer = quiet_trainer(
        max_steps=10,
        val_every="11 steps",
        callbacks=[EarlyStopping("loss"), ModelCheckpoint(monitor="loss")],
        num_sanity_val_steps=1,
    )
    trainer.fit(Net(), loader(), loader(1))
    assert trainer.callbacks[-1].best_model_score is not None


@pytest.mark.parametrize("who", ["EarlyStopping", "ModelCheckpoint"])
@pytest.mark.parametrize(
    ("options", "val"),
    [
        ({"val_every": "99 steps"}, loader(1)),  # no sanity check has shown whose metric it is
        ({}, None),
        ({"limit_val_batches": 0}, loader(1)),
    ],
)
def test_missing_monitor_without_validation_raises_at_epoch_end(who, options, val):
    module, callback = WATCHERS[who]()
    trainer = quiet_trainer(max_epochs=5, callbacks=callback, **options)
    with pytest.raises(ValueError, match=r"'val' was never logged.*No validation has run"):
        trainer.fit(module, loader(), val)
    assert trainer.global_step == 10


def test_monitor_waits_for_the_first_validation():
    """Though a sanity check has logged the name, and an epoch has ended before the validation."""
    stopping = EarlyStopping("val", patience=1)
    trainer = quiet_trainer(
        max_epochs=4, val_every="2 epochs", callbacks=stopping, num_sanity_val_steps=1
    )
    trainer.fit(Net(), loader(2), loader(1))
    assert trainer.validations == 2
    assert stopping.best_score is not None


def test_metric_logged_only_in_the_sanity_check_counts_as_not_logged():
    class Once(Net):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            if self.trainer.sanity_checking:
                super().validation_step(batch, batch_idx)

    trainer = quiet_trainer(max_epochs=2, callbacks=EarlyStopping("val"), num_sanity_val_steps=1)
    with pytest.raises(ValueError, match="'val' was never logged"):
        trainer.fit(Once(), loader(2), loader(1))


class Scores(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.log_dict({"train_loss": 1.0, "value_loss": 1.0})
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", 1.0)

    def on_validation_epoch_end(self) -> None:
        if not self.trainer.sanity_checking:
            self.log("valuation", 1.0)

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        plateau = ReduceLROnPlateau(optimizer)
        return {"optimizer": optimizer, "scheduler": plateau, "monitor": self.of_the_schedule}

    of_the_schedule = "val_loss"


@pytest.mark.parametrize("who", ["EarlyStopping", "ModelCheckpoint", "ReduceLROnPlateau"])
def test_a_misspelt_monitor_is_told_before_training(who, caplog):
    module, callback = Scores(), None
    if who == "ReduceLROnPlateau":
        module.of_the_schedule = "val_los"
    else:
        callback = {"EarlyStopping": EarlyStopping, "ModelCheckpoint": ModelCheckpoint}[who](
            monitor="val_los"
        )
    trainer = quiet_trainer(max_epochs=1, callbacks=callback, num_sanity_val_steps=1)
    with pytest.raises(ValueError, match="'val_los'"):
        trainer.fit(module, loader(2), loader(1))
    text = "The monitored metric 'val_los' was not logged in the sanity check."
    assert messages(caplog) == [f"{text} Did you mean 'val_loss'?"]


@pytest.mark.parametrize("name", ["val_loss", "train_loss", "value_loss", "valuation"])
def test_a_monitor_that_is_logged_later_is_not_called_misspelt(name, caplog):
    trainer = quiet_trainer(
        max_epochs=1, callbacks=EarlyStopping(name), num_sanity_val_steps=1, log_every=1
    )
    trainer.fit(Scores(), loader(2), loader(1))
    assert trainer.callbacks[0].best_score == 1.0
    assert messages(caplog) == []


class Data(DataModule):
    def train_dataloader(self) -> Any:
        return loader(2)

    def val_dataloader(self) -> Any:
        return loader(2)


class Own(Blind):
    def val_dataloader(self) -> Any:
        return loader(2)


@pytest.mark.parametrize(
    ("module", "data", "options", "text"),
    [
        (Net, {"train_dataloaders": loader(2)}, {}, "Net defines validation_step, but there is no"),
        (Blind, {"datamodule": Data()}, {}, "but Blind does not define validation_step"),
        (Own, {"train_dataloaders": loader(2)}, {}, "but Own does not define validation_step"),
        (
            Blind,
            {"train_dataloaders": loader(2)},
            {"val_every": 3},
            "val_every is 3 steps, but there is no validation data",
        ),
        (Blind, {"train_dataloaders": loader(2)}, {}, None),
        (Net, {"train_dataloaders": loader(2)}, {"limit_val_batches": 0}, None),
        (Blind, {"datamodule": Data()}, {"limit_val_batches": 0}, None),
    ],
)
def test_a_validation_that_lacks_data_or_step_is_warned_of(caplog, module, data, options, text):
    quiet_trainer(max_epochs=1, **options).fit(module(), **data)
    if text is None:
        assert messages(caplog) == []
    else:
        assert text in messages(caplog)[0]


@pytest.mark.parametrize("val_every", ["1 hour", "1e6 items"])
def test_validation_that_never_became_due_warns_at_the_end(caplog, val_every):
    quiet_trainer(max_epochs=1, val_every=val_every).fit(Net(), loader(2), loader(1))
    (text,) = messages(caplog)
    assert "The run ended before a validation was due" in text


def test_checkpoint_that_is_never_ranked_warns(caplog):
    saves = ModelCheckpoint(monitor="val", every="3 steps")
    quiet_trainer(max_steps=4, val_every="2 steps", callbacks=saves, limit_train_batches=5).fit(
        Net(), loader(), loader(1)
    )
    assert "No checkpoint was ranked" not in caplog.text  # the final one is
    caplog.clear()
    saves = ModelCheckpoint(monitor="val", every="3 steps")
    trainer = quiet_trainer(max_steps=5, val_every="2 steps", callbacks=saves, project_dir="other")
    trainer.fit(Net(), loader(), loader(1))
    assert "No checkpoint was ranked by 'val'" in caplog.text
    assert "every 3 steps" in caplog.text


@pytest.mark.parametrize("watcher", [EarlyStopping, SpikeDetection])
def test_a_monitor_of_steps_that_are_not_recorded_warns(watcher, caplog):
    trainer = quiet_trainer(max_steps=3, log_every=4, callbacks=watcher("loss"))
    trainer.fit(Blind(), loader())
    assert f"{watcher.__name__} saw no value of 'loss'" in caplog.text
    assert "use a shorter log_every" in caplog.text


@pytest.mark.parametrize("max_steps", [4, 5])  # the last save is due, or made at the end
def test_a_checkpoint_is_ranked_by_steps_that_are_not_recorded(caplog, max_steps):
    saves = ModelCheckpoint(monitor="loss", every=2, save_top_k=-1)
    quiet_trainer(max_steps=max_steps, log_every=50, callbacks=saves).fit(Blind(), loader())
    steps = sorted(path.name for path in saves.best_k_models)
    assert steps == [f"step-{step:08}" for step in sorted({2, 4, max_steps})]
    assert caplog.records == []


def test_a_misspelt_monitor_warns_with_step_metrics_too(caplog):
    stopping = EarlyStopping("los")
    quiet_trainer(max_steps=3, log_every=50, callbacks=stopping).fit(Blind(), loader())
    assert "Logged so far: loss. Did you mean 'loss'?" in caplog.text


class Stream(IterableDataset[Any]):
    def __len__(self) -> int:
        return 10

    def __iter__(self) -> Any:
        yield from torch.zeros(5, 1)


def test_claimed_length_of_a_stream_is_not_trusted(caplog):
    """It has five batches: the run comes to its epoch, and to the validation."""
    trainer = quiet_trainer(max_steps=6)
    trainer.fit(Net(), DataLoader(Stream(), batch_size=1), loader(1))
    assert trainer.validations == 1
    assert messages(caplog) == []


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("every", [0.1, 0.3, 0.5, 0.7, 1.0, 1.3, 2.0])
def test_a_part_of_an_epoch_takes_the_updates_that_the_loop_takes(world, every):
    """As counted in batches of all processes, of which an update has `world` times three."""
    epoch_iterator = EpochIterator(loader(10), DataShard(world_size=world))
    interval = Interval(every, "epochs")
    updates, batches = 0, 0.0
    while batches / 10 + 1e-9 < every:
        whole = 10 * (int(batches) // 10 + 1)
        batches, updates = min(batches + 3 * world, whole), updates + 1
    for steps in range(1, 12):
        asked = can_be_due(
            interval,
            Length(max_steps=steps),
            updates=steps,
            epoch_iterator=epoch_iterator,
            accumulation=lambda _: 3,
        )
        assert asked == (steps >= updates), steps


def test_a_misspelt_monitor_warns_at_the_end_of_a_run_without_epochs(caplog):
    class Endless:
        def __iter__(self):
            return itertools.cycle(loader())

    savers = (
        ModelCheckpoint(monitor="vall", every=2),
        EarlyStopping("vall"),
        SpikeDetection("vall"),
    )
    trainer = quiet_trainer(max_steps=4, val_every=2, callbacks=savers)
    trainer.fit(Net(), Endless(), loader(1))
    expected = "The monitored metric 'vall' was never logged. Logged so far: "
    messages = [each.getMessage() for each in caplog.records if expected in each.getMessage()]
    assert [text.split(expected)[0] for text in messages] == [
        "EarlyStopping saw no value of 'vall' in this run. ",
        "SpikeDetection saw no value of 'vall' in this run. ",
        "No checkpoint was ranked by 'vall'. ",
    ]
    assert all("Did you mean 'val'?" in text for text in messages)


def test_a_metric_of_a_validation_that_did_not_run_is_not_called_misspelt(caplog):
    saver = ModelCheckpoint(monitor="val", every=2)
    quiet_trainer(max_steps=2, val_every=3, callbacks=[saver]).fit(Net(), loader(), loader(1))
    (messages,) = [each.getMessage() for each in caplog.records if "ranked" in each.getMessage()]
    assert "No validation has run." in messages


@pytest.mark.parametrize(
    ("which", "options", "messages"),
    [
        ("train", {"max_epochs": 2}, "reads it 2 times"),
        ("train", {"max_epochs": 1}, None),
        ("train", {"max_epochs": 2, "max_steps": 2}, None),  # an epoch may be as long as that
        ("train", {"max_epochs": 2, "limit_train_batches": 3}, None),
        ("val", {"max_epochs": 1}, "reads it 2 times"),
        ("val", {"max_epochs": 1, "num_sanity_val_steps": 0}, None),
    ],
)
@pytest.mark.parametrize(
    "of",
    [
        iter,
        lambda batches: (batch for batch in batches),
        lambda batches: iter(DataLoader(batches, batch_size=None)),
    ],
)
def test_one_pass_loader_read_twice_raises_before_the_first_step(which, options, messages, of):
    batches = [torch.zeros(1, 1)] * 6
    sources = {"train": batches, "val": batches} | {which: of(batches)}
    module = Net()
    trainer = quiet_trainer(**{"num_sanity_val_steps": 2, **options})
    if messages is None:
        trainer.fit(module, sources["train"], sources["val"])
        assert trainer.global_step == options.get("max_steps", 6)
        return
    with pytest.raises(ValueError, match=f"{messages}.*such as a DataLoader or a list"):
        trainer.fit(module, sources["train"], sources["val"])
    assert trainer.global_step == 0
    assert len(list(sources[which])) == 6


def test_layers_and_parameters_that_nothing_trains_are_named(caplog):
    class Forgetful(Line):
        def __init__(self):
            super().__init__()
            self.blocks = [torch.nn.Linear(2, 2)]
            self.known = [self.layer]
            self.first = torch.nn.Linear(2, 2)

        def training_step(self, batch, batch_idx):
            return self.layer(self.first(self.blocks[0](batch[0]))).square().mean()

        def configure_optimizers(self):
            return torch.optim.SGD(self.layer.parameters(), lr=0.1)

    Trainer(max_epochs=1, progress_bar=False, checkpointing=False).fit(Forgetful(), line_loader())
    _, layers, parameters = (record.getMessage() for record in caplog.records)
    assert layers.startswith("blocks: layers in a list are neither trained")
    assert parameters.startswith("No optimizer has first.weight, first.bias: pass them")


def test_parameters_unfrozen_later_that_no_optimizer_has_are_named_once(caplog):
    class Unfrozen(Line):
        def __init__(self):
            super().__init__()
            self.first = torch.nn.Linear(2, 2).requires_grad_(False)

        def training_step(self, batch, batch_idx):
            return self.layer(self.first(batch[0])).square().mean()

        def on_train_epoch_start(self):
            self.first.requires_grad_(self.trainer.current_epoch >= 1)

        def configure_optimizers(self):
            return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.1)

    trainer = Trainer(max_epochs=3, progress_bar=False, checkpointing=False)
    trainer.fit(Unfrozen(), line_loader())
    told = [m for r in caplog.records if (m := r.getMessage()).startswith("No optimizer has")]
    assert len(told) == 1
    assert told[0].startswith("No optimizer has first.weight, first.bias: pass them")
