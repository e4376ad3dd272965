"""What becomes of a logged value: names, reductions, records, trackers, what callbacks see."""

import json
from dataclasses import dataclass, field
from typing import Any

import numpy
import pytest
import torch
import torchmetrics
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import DataLoader

from callbacks import Callback, EarlyStopping, ModelCheckpoint
from trackers import GeneralTracker, read_metrics, register_tracker
from trainer import Trainer, TrainModule


class Net(TrainModule):
    """Its batches are the numbers 1, 2, 3, …, a given number of them at a time."""

    def __init__(self, log=None, val_log=None):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.log_train, self.log_val = log, val_log

    def training_step(self, batch, batch_idx):
        if self.log_train is not None:
            self.log_train(self, batch, batch_idx)
        return self.layer(batch).mean()

    def validation_step(self, batch, batch_idx):
        self.log_val(self, batch, batch_idx)

    test_step = validation_step

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def loader(samples, batch_size=1):
    numbers = torch.arange(1.0, samples + 1).reshape(-1, 1)
    return DataLoader(numbers, batch_size=batch_size)


def make(**arguments):
    arguments = {"max_epochs": 1, "num_sanity_val_steps": 0, "log_every": 1} | arguments
    return Trainer(progress_bar=False, checkpointing=False, project_dir="run", **arguments)


def records(trainer):
    """What was recorded, without the time."""
    lines = read_metrics(trainer.metrics_path)
    for line in lines:
        del line["time"]
    return lines


def fit_records(log, train, val_log=None, val=None, **arguments):
    trainer = make(**arguments)
    trainer.fit(Net(log, val_log), train, val)
    return records(trainer)


# -- names, places, reductions ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "steps", "epoch"),
    [
        ({}, ["x"], []),
        ({"on_step": True}, ["x"], []),
        ({"on_step": False}, [], ["x"]),
        ({"on_epoch": True}, ["x_step"], ["x_epoch"]),
        ({"on_step": True, "on_epoch": True}, ["x_step"], ["x_epoch"]),
        ({"on_step": False, "on_epoch": True}, [], ["x"]),
    ],
)
def test_a_name_says_step_or_epoch_only_where_there_are_both(flags, steps, epoch):
    lines = fit_records(lambda m, b, i: m.log("x", b.mean(), **flags), loader(2))
    values = [(line["step"], name, line[name]) for line in lines for name in line if "x" in name]
    assert values == [
        *[(step, name, float(step)) for step in (1, 2) for name in steps],
        *[(2, name, 1.5) for name in epoch],
    ]


def test_evaluation_logs_its_epoch_under_the_update_it_belongs_to():
    lines = fit_records(
        None, loader(2), lambda m, b, i: m.log("val", b.mean()), loader(3), val_every=1
    )
    assert lines == [{"step": step, "epoch": 0, "val": 2.0} for step in (1, 2)]


REDUCED = {"mean": (1 * 1 + 2 * 2 + 4 * 3) / 7, "sum": 6.0, "min": 1.0, "max": 3.0}


@pytest.mark.parametrize("kind", REDUCED)
@pytest.mark.parametrize("as_tensor", [True, False])
def test_an_epoch_reduces_by_kind_and_a_mean_weighs_by_items(kind, as_tensor):
    """Batches log 1, 2, 3 with 1, 2 and 4 samples."""
    batches = [torch.zeros(size, 1) for size in (1, 2, 4)]

    def log(module, batch, batch_idx):
        value = batch_idx + 1.0
        value = torch.tensor(value) if as_tensor else value
        module.log("x", value, on_step=False, on_epoch=True, reduce=kind)

    (line,) = fit_records(log, batches)
    assert line["x"] == pytest.approx(REDUCED[kind], rel=1e-12)


def test_batch_size_and_count_items_are_the_weights():
    def log(module, batch, batch_idx):
        flags = {"on_step": False, "on_epoch": True}
        module.log("samples", float(batch_idx), **flags)
        module.log("given", float(batch_idx), batch_size=1 + 2 * batch_idx, **flags)

    batches = [torch.zeros(3, 1), torch.zeros(1, 1)]
    (line,) = fit_records(log, batches)
    assert line["samples"] == 0.25
    assert line["given"] == 0.75

    class Tokens(Net):
        def count_items(self, batch):
            return batch.sum()

    trainer = make()
    trainer.fit(Tokens(log), [torch.ones(3, 1), torch.full((1, 1), 9.0)])
    assert trainer.callback_metrics["samples"] == 0.75


@pytest.mark.parametrize(
    "hook", ["on_before_optimizer_step", "on_train_step_end", "on_before_zero_grad"]
)
def test_a_value_of_an_update_has_the_weight_of_its_window(hook):
    """Of windows of 5 and of 2 samples; a value of the last micro-batch has its own weight."""

    class Hooked(Net):
        def on_train_batch_end(self, outputs, batch, batch_idx):
            if batch_idx % 2:
                self.log("batch", float(batch_idx), on_epoch=True, on_step=False)

    def of_update(self, *_):
        self.log("update", float(self.trainer.batches_seen), on_epoch=True, on_step=False)

    setattr(Hooked, hook, of_update)
    trainer = make(gradient_accumulation_steps=2)
    trainer.fit(Hooked(lambda *_: None), [torch.zeros(n, 1) for n in (4, 1, 1, 1)])
    assert trainer.callback_metrics["update"] == pytest.approx((2 * 5 + 4 * 2) / 7)
    assert trainer.callback_metrics["batch"] == pytest.approx((1 * 1 + 3 * 1) / 2)


@pytest.mark.parametrize(
    "value",
    [2, 2.0, True, numpy.float32(2), torch.tensor(2), torch.tensor([[2.0]], requires_grad=True)],
)
def test_every_kind_of_number_can_be_logged(value):
    (line,) = fit_records(lambda m, b, i: m.log("x", value), loader(1))
    assert line["x"] == torch.as_tensor(value).item()
    assert type(line["x"]) is float


def test_a_logged_tensor_may_be_changed_in_place_afterwards():
    running = torch.zeros(())

    def log(module, batch, batch_idx):
        running.add_(1.0)
        module.log("sum", running, on_step=False, on_epoch=True, reduce="sum")

    (line,) = fit_records(log, loader(3))
    assert line["sum"] == 6.0


def test_a_long_epoch_keeps_the_digits_of_its_sum():
    def log(module, batch, batch_idx):
        value = torch.tensor(2.0**24 if batch_idx == 0 else 1.0)
        module.log("sum", value, on_step=False, on_epoch=True, reduce="sum")

    (line,) = fit_records(log, loader(5))
    assert line["sum"] == 2.0**24 + 4  # float32 would stay at 2 ** 24


def test_log_dict_logs_each_with_the_same_options():
    def log(module, batch, batch_idx):
        module.log_dict({"a": batch.mean(), "b": 2.0}, on_epoch=True, reduce="max")

    first, second, epoch = fit_records(log, loader(2))
    assert first == {"step": 1, "epoch": 0, "a_step": 1.0, "b_step": 2.0}
    assert second == {"step": 2, "epoch": 0, "a_step": 2.0, "b_step": 2.0}
    assert epoch == {"step": 2, "epoch": 0, "a_epoch": 2.0, "b_epoch": 2.0}


def test_hooks_of_the_module_and_of_callbacks_log_into_their_epoch():
    class Hooks(Net):
        def on_train_epoch_start(self):
            self.log("start", 1.0)

        def on_train_epoch_end(self):
            self.log("end", float("nan"))

        def on_validation_epoch_end(self):
            self.log("val end", 4.0)

    class Speaks(Callback):
        def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
            module.log("batch", float(batch_idx))

    trainer = make(val_every="1 epoch", callbacks=Speaks())
    trainer.fit(Hooks(None, lambda m, b, i: None), loader(2), loader(1))
    assert str(records(trainer)) == str(
        [
            {"step": 1, "epoch": 0, "batch": 0.0},
            {"step": 2, "epoch": 0, "batch": 1.0},
            {"step": 2, "epoch": 0, "val end": 4.0},
            {"step": 2, "epoch": 0, "start": 1.0, "end": float("nan")},
        ]
    )


def test_the_same_name_in_training_and_validation_stays_apart():
    trainer = make(val_every=1)
    log = lambda m, b, i: m.log("x", b.mean(), on_step=False, on_epoch=True)
    trainer.fit(Net(log, log), loader(2), loader(4))
    assert [line["x"] for line in records(trainer)] == [2.5, 2.5, 1.5]


# -- metric objects --------------------------------------------------------------------------------


@dataclass
class Largest:
    """The least that a metric object needs."""

    value: float = 0.0
    resets: int = 0

    def update(self, value):
        self.value = max(self.value, value)

    def compute(self):
        return torch.tensor(self.value)

    def reset(self):
        self.value, self.resets = 0.0, self.resets + 1


def test_a_metric_object_is_computed_and_reset_once_an_epoch():
    largest = Largest()

    def log(module, batch, batch_idx):
        largest.update(batch.max().item() - module.current_epoch)
        module.log("largest", largest)

    lines = fit_records(log, loader(3), max_epochs=2)
    assert [line["largest"] for line in lines] == [3.0, 2.0]
    assert largest.resets == 2


class Judged(Net):
    """Logs the accuracies of its steps, whose labels are all right but those of one batch."""

    def __init__(self, log):
        super().__init__(log)
        self.accuracy = torchmetrics.classification.BinaryAccuracy()


def test_a_metric_object_logged_on_the_step_is_the_value_of_the_batch_alone():
    def log(module, batch, batch_idx):
        module.accuracy(batch.flatten(), (batch.flatten() > 0.5) == (batch_idx != 1))
        module.log("alone", module.accuracy, on_step=True, on_epoch=False)
        module.log("both", module.accuracy, on_step=True, on_epoch=True, prog_bar=True)

    trainer = make(max_epochs=2, log_every=1)
    trainer.fit(Judged(log), loader(6, batch_size=2))
    lines = records(trainer)
    assert [line["alone"] for line in lines if "alone" in line] == [1.0, 0.0, 1.0] * 2
    assert [line["both_step"] for line in lines if "both_step" in line] == [1.0, 0.0, 1.0] * 2
    epochs = [line["both_epoch"] for line in lines if "both_epoch" in line]
    assert epochs == [pytest.approx(2 / 3)] * 2


def test_a_step_is_the_mean_of_what_a_metric_object_returned_in_its_window():
    counts = []

    class Watch(Callback):
        def on_train_epoch_start(self, trainer, module):
            counts.append(module.accuracy.update_count)

    def log(module, batch, batch_idx):
        module.accuracy(batch.flatten(), (batch.flatten() > 0.5) == (batch_idx != 1))
        module.log("alone", module.accuracy, on_step=True)

    trainer = make(callbacks=Watch(), max_epochs=2, gradient_accumulation_steps=2)
    trainer.fit(Judged(log), loader(5, batch_size=3))
    assert [line["alone"] for line in records(trainer)] == [pytest.approx(3 / 5)] * 2
    assert counts == [0, 0]  # each epoch starts anew, though none is logged


def test_metric_objects_without_a_batch_value_log_their_running_value_on_steps():
    """What is only updated, what torchmetrics keeps no value of a call for, and any other class."""
    largest, running, mean = Largest(), torchmetrics.RunningMean(2), torchmetrics.MeanMetric()

    def log(module, batch, batch_idx):
        value = 4.0 - batch.mean()
        largest.update(value.item())
        running(value)
        mean.update(value)
        module.log("largest", largest, on_step=True)
        module.log("running", running, on_step=True)
        module.log("mean", mean, on_step=True, on_epoch=True)

    lines = fit_records(log, loader(3), max_epochs=2, log_every=1)
    assert [line["largest"] for line in lines if "largest" in line] == [3.0, 3.0, 3.0] * 2
    assert [line["running"] for line in lines if "running" in line] == [3.0, 2.5, 1.5] * 2
    assert [line["mean_step"] for line in lines if "mean_step" in line] == [3.0, 2.5, 2.0] * 2
    assert [line["mean_epoch"] for line in lines if "mean_epoch" in line] == [2.0, 2.0]


def test_a_runs_last_update_has_an_objects_value_from_before_the_epochs_end_reset_it():
    alone, both = torchmetrics.MeanMetric(), torchmetrics.MeanMetric()

    def log(module, batch, batch_idx):
        alone.update(batch.mean())
        both.update(batch.mean())
        module.log("alone", alone, on_step=True)
        module.log("both", both, on_step=True, on_epoch=True)

    lines = fit_records(log, loader(5), log_every=2)  # the fifth update is the epoch's last
    assert [line["both_step"] for line in lines if "both_step" in line] == [1.5, 2.5, 3.0]
    assert [line["both_epoch"] for line in lines if "both_epoch" in line] == [3.0]
    assert [line["alone"] for line in lines if "alone" in line] == [1.5, 2.5, 3.0]


def test_a_metric_object_that_computes_a_dict_is_refused_on_the_step_too():
    metric = torchmetrics.MinMaxMetric(torchmetrics.MeanMetric())

    def log(module, batch, batch_idx):
        metric(batch)
        module.log("several", metric, on_step=True)

    with pytest.raises(ValueError, match=r"'several' computes a dict.*self\.log_dict\("):
        make(log_every=1).fit(Net(log), loader(1))


def test_the_bar_shows_a_metric_object_of_the_latest_epoch():
    shown = []

    class Watch(Callback):
        def on_boundary(self, trainer, module):
            if trainer.epoch_complete:
                shown.append(trainer.progress_values())

    largest, hidden = Largest(), Largest()

    def log(module, batch, batch_idx):
        largest.update(batch.max().item() - module.current_epoch)
        module.log("largest", largest, prog_bar=True)
        module.log("hidden", hidden)

    trainer = make(callbacks=Watch(), max_epochs=2)
    trainer.fit(Net(log), loader(3))
    assert shown == [{"largest": 3.0}, {"largest": 2.0}]
    assert trainer.progress_bar_metrics == {"largest": 2.0}  # also when the fit is over


# -- what callbacks and users see ------------------------------------------------------------------


def test_callback_metrics_hold_the_latest_value_of_every_name():
    seen = []

    class Watch(Callback):
        def on_boundary(self, trainer, module):
            seen.append((dict(trainer.callback_metrics), dict(trainer.metric_updates)))

    trainer = make(callbacks=Watch(), log_every=2)
    log = lambda m, b, i: m.log("x", b.mean(), on_epoch=True)
    trainer.fit(Net(log, lambda m, b, i: m.log("val", 7.0)), loader(3), loader(1))
    assert seen == [
        ({"x_step": 1.0, "x_epoch": 1.0}, {}),  # of this process: nothing was due
        ({"x_step": 2.0, "x_epoch": 1.5}, {"x_step": 2}),
        (
            {"x_step": 3.0, "val": 7.0, "x_epoch": 2.0},
            {"x_step": 3, "val": 3, "x_epoch": 3},
        ),
    ]
    assert trainer.callback_metrics == seen[-1][0]


class Plateau(Net):
    """Its schedule judges a metric every few updates."""

    def __init__(self, monitor, frequency, *logs):
        super().__init__(*logs)
        self.monitor, self.frequency, self.judged = monitor, frequency, []

    def configure_optimizers(self):
        judged = self.judged

        class Judging(ReduceLROnPlateau):
            def step(self, metrics):
                judged.append(metrics)
                super().step(metrics)

        optimizer = super().configure_optimizers()
        when = {"interval": "step", "frequency": self.frequency, "monitor": self.monitor}
        return {"optimizer": optimizer, "scheduler": Judging(optimizer), **when}


def decisions(module, **arguments):
    """What each decides by: the schedule, and the checkpoint that is due every two updates."""
    saves = ModelCheckpoint(monitor=module.monitor, every=2, save_top_k=-1)
    callbacks = [*arguments.pop("callbacks", ()), saves]
    trainer = make(callbacks=callbacks, **arguments)
    trainer.fit(module, loader(5), loader(1) if module.log_val else None)
    return module.judged, [score for _, score in sorted(saves.best_k_models.items())]


@pytest.mark.parametrize("log_every", [1, 2, 3, 50])
def test_monitors_judge_their_own_update_whatever_log_every_is(log_every):
    ends = []

    class Watch(Callback):
        def on_train_epoch_end(self, trainer, module):
            ends.append(trainer.callback_metrics["x"])

    module = Plateau("x", 2, lambda m, b, i: m.log("x", b.mean() + m.current_epoch))
    found = decisions(module, max_epochs=2, log_every=log_every, callbacks=[Watch()])
    values = [2.0, 4.0, 2.0, 4.0, 6.0]  # of the updates 2, 4, 6, 8, 10
    assert found == (values, values)
    assert ends == [5.0, 6.0]


@pytest.mark.parametrize(
    ("options", "batches", "best", "stopped"),
    [
        ({"log_every": 50, "max_epochs": 9}, 3, 3.0, 9),  # of each epoch, though none is recorded
        ({"val_every": 2}, 9, 2.0, 4),  # from the first validation on, which may log its name
    ],
)
def test_early_stopping_by_a_value_of_training(options, batches, best, stopped):
    stopping = EarlyStopping("x", patience=2)
    trainer = make(callbacks=stopping, **options)
    net = Net(lambda m, b, i: m.log("x", b.mean()), lambda m, b, i: None)
    trainer.fit(net, loader(batches), loader(1) if "val_every" in options else None)
    assert (stopping.best_score, stopping.stopped_step) == (best, stopped)


@pytest.mark.parametrize("sanity", [0, 1])
@pytest.mark.parametrize("log_every", [1, 3, 50])
@pytest.mark.parametrize("on_epoch", [False, True])
def test_a_monitor_of_both_phases_judges_the_validations_alone(log_every, sanity, on_epoch, caplog):
    """Training logs lower values than validation, which it would be taken for an improvement."""
    stopping = EarlyStopping("loss", patience=9)
    module = Plateau(
        "loss",
        4,
        lambda m, b, i: m.log("loss", -b.mean(), on_step=not on_epoch, on_epoch=on_epoch),
        lambda m, b, i: m.log("loss", 100.0 - m.global_step),
    )
    found = decisions(
        module,
        max_epochs=2,
        val_every="4 steps",
        log_every=log_every,
        num_sanity_val_steps=sanity,
        callbacks=[stopping],
    )
    assert found == ([96.0, 92.0], [96.0, 92.0])
    assert stopping.best_score == 92.0
    assert caplog.text.count("training and validation both log") == 1


def test_the_bar_shows_an_epochs_value_once_the_epoch_has_ended():
    seen = []

    class Watch(Callback):
        def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
            seen.append(trainer.progress_values())

        on_validation_batch_end = on_train_batch_end

    def log(module, batch, batch_idx):
        value = module.current_epoch + batch.mean()
        module.log("both", value, prog_bar=True, on_step=True, on_epoch=True)
        module.log("whole", value, prog_bar=True, on_step=False, on_epoch=True)

    trainer, net = make(callbacks=Watch(), max_epochs=3, max_steps=5), Net(log, log)
    trainer.fit(net, loader(2))
    before, after = {"both_epoch": 1.5, "whole": 1.5}, {"both_epoch": 2.5, "whole": 2.5}
    assert seen == [
        {"both_step": 1.0},
        {"both_step": 2.0},
        {"both_step": 2.0, **before},
        {"both_step": 3.0, **before},
        {"both_step": 3.0, **after},
    ]
    assert trainer.progress_values() == seen[-1]  # the third epoch did not end
    seen.clear()
    trainer.validate(net, loader(2))
    assert seen == [{}, {}]


# -- the local record ------------------------------------------------------------------------------


def test_a_record_is_one_json_object_a_line_with_step_epoch_and_time(monkeypatch):
    monkeypatch.setattr("time.time", lambda: 1234.5)
    trainer = make(max_epochs=2)
    log = lambda m, b, i: m.log("train/loss", b.mean(), on_epoch=True)
    trainer.fit(Net(log, lambda m, b, i: m.log("val", 7.0)), loader(1), loader(1))
    lines = trainer.metrics_path.read_text().splitlines()
    now = pytest.approx(1234.5)
    assert [json.loads(line) for line in lines] == [
        {"step": 1, "epoch": 0, "time": now, "train/loss_step": 1.0},
        {"step": 1, "epoch": 0, "time": now, "val": 7.0},
        {"step": 1, "epoch": 0, "time": now, "train/loss_epoch": 1.0},
        {"step": 2, "epoch": 1, "time": now, "train/loss_step": 1.0},
        {"step": 2, "epoch": 1, "time": now, "val": 7.0},
        {"step": 2, "epoch": 1, "time": now, "train/loss_epoch": 1.0},
    ]
    assert len({json.loads(line)["time"] for line in lines}) == 6  # they are told apart by it
    assert list(json.loads(lines[0]))[:3] == ["step", "epoch", "time"]


def test_a_new_run_in_the_same_folder_keeps_the_old_record_as_metrics_1(tmp_path):
    log = lambda m, b, i: m.log("x", b.mean())
    first = fit_records(log, loader(1))
    second = fit_records(log, loader(2))
    assert len(second) == 2
    assert [line["x"] for line in read_metrics("run/metrics.1.jsonl")] == [first[0]["x"]]


def test_evaluations_after_a_fit_are_recorded_under_its_last_update():
    trainer = make()
    module = Net(None, lambda m, b, i: m.log("seen", b.mean()))
    trainer.fit(module, loader(3))
    trainer.test(module, loader(3))
    assert records(trainer) == []
    (record,) = read_metrics("run/evaluations.jsonl")
    assert {**record, "time": None} == {"step": 3, "epoch": 0, "time": None, "seen": 2.0}


# -- trackers --------------------------------------------------------------------------------------


def scalars(folder):
    events = EventAccumulator(str(folder))
    events.Reload()
    return {
        name: [(event.step, event.value) for event in events.Scalars(name)]
        for name in events.Tags()["scalars"]
    }


def test_tensorboard_holds_what_was_logged():
    trainer = make(log_with="tensorboard", project_name="project", run_name="first")
    log = lambda m, b, i: m.log("x", b.mean(), on_epoch=True)
    trainer.fit(Net(log, lambda m, b, i: m.log("val/y", 0.5)), loader(2), loader(1))
    assert scalars("run/logs/first") == {
        "x_step": [(1, 1.0), (2, 2.0)],
        "x_epoch": [(2, 1.5)],
        "val/y": [(2, 0.5)],
    }


def test_the_name_of_a_project_stays_without_a_folder_of_ones_own():
    log = lambda m, b, i: m.log("x", b.mean())
    for name in ("digits", None):
        arguments = {"max_epochs": 1, "log_every": 1, "progress_bar": False}
        trainer = Trainer(project_name=name, log_with="tensorboard", **arguments)
        trainer.fit(Net(log), loader(2))
        folder = trainer.project_dir / "logs" / (name or trainer.project_dir.name)
        assert scalars(folder)["x"] == [(1, 1.0), (2, 2.0)]


@dataclass(eq=False)
class Remembers(GeneralTracker):
    """A tracker that keeps all calls."""

    run_name: str = "given"
    calls: list[Any] = field(default_factory=list)

    name = "remembers"
    requires_logging_directory = False
    made = []

    def __post_init__(self):
        self.made.append(self)

    @property
    def tracker(self):
        return self.calls

    def start(self):
        self.calls.append("start")

    def store_init_configuration(self, values):
        self.calls.append(("configuration", values))

    def log(self, values, step, **kwargs):
        self.calls.append((values, step))

    def finish(self):
        self.calls.append("finish")


@pytest.mark.parametrize("form", ["class", "instance", "name", "list"])
def test_a_tracker_of_ones_own(form, monkeypatch):
    monkeypatch.setattr(Remembers, "made", [])
    register_tracker(Remembers)
    given = {"class": Remembers, "name": "remembers", "list": [Remembers]}.get(form) or Remembers()
    trainer = make(log_with=given, run_name="mine", seed=3)
    trainer.fit(Net(lambda m, b, i: m.log("x", b.mean())), loader(2))
    (tracker,) = Remembers.made
    start, (_, configuration), *rest = tracker.calls
    assert start == "start"
    assert (configuration["max_epochs"], configuration["seed"]) == (1, 3)
    assert rest == [({"x": 1.0}, 1), ({"x": 2.0}, 2), "finish"]
    assert tracker.run_name == ("given" if form == "instance" else "mine")


# -- several processes -----------------------------------------------------------------------------


def test_two_ranks_record_what_one_does(ranks2):
    def run():
        torch.manual_seed(0)
        trainer = make(max_epochs=2, log_with="tensorboard")

        def log(module, batch, batch_idx):
            flags = {"on_step": False, "on_epoch": True}
            module.log("mean", batch.mean(), **flags)
            module.log("sum", batch.sum(), reduce="sum", **flags)
            module.log("max", batch.max(), reduce="max", **flags)

        module = Net(log, lambda m, b, i: m.log("val", b.mean()))
        trainer.fit(module, loader(7, batch_size=2), loader(5))
        return dict(trainer.callback_metrics)

    expected = {"mean": 4.0, "sum": 28.0, "max": 7.0, "val": 3.0}
    assert ranks2(run) == [expected, expected]
    # one process wrote each
    assert [line["step"] for line in read_metrics("run/metrics.jsonl")] == [2, 2, 4, 4]
    assert scalars("run/logs/run")["val"] == [(2, 3.0), (4, 3.0)]


def test_a_rank_without_a_batch_in_the_last_update_may_validate_after_it(ranks2):
    def run():
        trainer = make(log_every=100)  # the last update is recorded as the last, not as due
        module = Net(lambda m, b, i: m.log("x", b.mean()), lambda m, b, i: m.log("val", b.mean()))
        trainer.fit(module, loader(3), loader(4))
        return dict(trainer.callback_metrics)

    assert ranks2(run) == [{"x": 3.0, "val": 2.5}] * 2


def test_on_step_in_validation_records_the_value_of_the_epoch():
    def both(module, batch, batch_idx):
        module.log("alone", batch.mean(), on_step=True)
        module.log("both", batch.mean(), on_step=True, on_epoch=True)

    trainer = make()
    trainer.fit(Net(val_log=both), loader(2), loader(4))
    assert trainer.callback_metrics == {"alone_epoch": 2.5, "both_epoch": 2.5}

    def lost(module, batch, batch_idx):
        module.log("lost", batch.mean(), on_step=True, on_epoch=False)

    with pytest.raises(ValueError, match=r"log\('lost', .* in validation, where only"):
        make().fit(Net(val_log=lost), loader(2), loader(4))


def test_a_value_of_the_epochs_end_counts_as_one_item():
    class Ending(Net):
        def on_train_epoch_end(self):
            self.log("x", 1.0)

    def log(module, batch, batch_idx):
        module.log("x", 0.0, on_step=False, on_epoch=True)

    trainer = make()
    trainer.fit(Ending(log), loader(4, batch_size=2))
    assert records(trainer)[-1]["x"] == 1 / 5


def test_a_sum_is_recorded_whatever_it_weighs():
    def log(module, batch, batch_idx):
        module.log("n", 3.0, on_step=False, on_epoch=True, reduce="sum", batch_size=0)

    assert fit_records(log, loader(2))[-1]["n"] == 6.0


def test_logger_false_keeps_values_of_each_loader_from_trackers():
    def log(module, batch, batch_idx, dataloader_idx=0):
        module.log("x", 1.0, logger=False)

    class Two(Net):
        validation_step = log

    trainer = make()
    trainer.fit(Two(), loader(1), [loader(1), loader(1)])
    kept = {"x/dataloader_idx_0", "x/dataloader_idx_1"}
    assert kept <= trainer.callback_metrics.keys()
    assert not kept & trainer.logged_metrics.keys()


def test_a_value_that_was_refused_does_not_count_as_logged():
    def log(module, batch, batch_idx):
        with pytest.raises(ValueError, match="of shape"):
            module.log("refused", torch.ones(3))
        with pytest.raises(ValueError, match="batch_size"):
            module.log("refused", 1.0, batch_size=-1)
        module.log("taken", 1.0)
        assert module.trainer.logged_names == {"taken"}  # there are none after the run

    make().fit(Net(log), loader(1))


def test_names_logged_by_the_sanity_check_are_forgotten():
    """The sanity check logs too, and what it logged is forgotten."""

    class Asking(Net):
        def on_train_end(self):
            seen.append(set(self.trainer.logged_names))

    seen = []

    def log(module, batch, batch_idx):
        module.log("v", 1.0)

    make(num_sanity_val_steps=2).fit(Asking(lambda *_: None, log), loader(1), loader(1))
    assert seen == [{"v"}]


@pytest.mark.parametrize("options", [{}, {"add_dataloader_idx": False}])
@pytest.mark.parametrize("names", [("mean", "mean"), ("clean", "noisy")])
def test_an_object_that_would_hold_the_data_of_several_loaders_is_refused(names, options):
    class Shared(Net):
        def __init__(self, objects):
            super().__init__()
            self.means = torch.nn.ModuleList(torchmetrics.MeanMetric() for _ in range(objects))

        def validation_step(self, batch, batch_idx, dataloader_idx=0):
            mean = self.means[dataloader_idx % len(self.means)]
            mean.update(float(dataloader_idx))
            self.log(names[dataloader_idx], mean, **options)

    loaders = [loader(2), loader(2)]
    messages = rf"'{names[1]}' is logged for several loaders.*dataloader_idx"
    with pytest.raises(ValueError, match=messages):
        make().validate(Shared(1), loaders)
    if names[0] != names[1] or not options:
        first, second = make().validate(Shared(2), loaders)
        assert [*first.values(), *second.values()] == [0.0, 1.0]


class OneMeter(Net):
    """Its only metric object takes in zeros in training and tens in validation."""

    def __init__(self, meter, logged_in="step", **options):
        super().__init__()
        self.meter, self.logged_in, self.options = meter, logged_in, options

    def training_step(self, batch, batch_idx):
        self.meter.update(0.0)
        if self.logged_in == "step":
            self.log("train", self.meter, **self.options)
        return super().training_step(batch, batch_idx)

    def on_train_epoch_end(self):
        if self.logged_in == "epoch":
            self.log("train", self.meter)

    def validation_step(self, batch, batch_idx):
        self.meter.update(10.0)
        self.log("val", self.meter)


@pytest.mark.parametrize("options", [{}, {"on_step": True, "on_epoch": True}])
def test_one_metric_object_serves_both_phases(options):
    trainer = make(max_epochs=2, val_every=2, num_sanity_val_steps=1)
    module = OneMeter(torchmetrics.MeanMetric(), **options)
    trainer.fit(module, loader(3), loader(2))
    found = {(line["step"], name): line[name] for line in records(trainer) for name in line}
    assert {value for (_, name), value in found.items() if name.startswith("train")} == {0.0}
    assert {value for (_, name), value in found.items() if name == "val"} == {10.0}
    assert (6, "val") in found  # also at the end of an epoch, before training's is reduced
    assert (6, "train_epoch" if options else "train") in found


@pytest.mark.parametrize(
    ("meter", "logged_in"), [(Largest(), "step"), (torchmetrics.MeanMetric(), "epoch")]
)
def test_an_object_that_cannot_serve_both_phases_is_refused(meter, logged_in):
    with pytest.raises(ValueError, match=r"'val' holds values of the training.*each phase"):
        make().fit(OneMeter(meter, logged_in), loader(3), loader(2))


def test_an_object_that_only_training_updates_may_be_logged_in_a_validation():
    total = torchmetrics.SumMetric()

    def update(module, batch, batch_idx):
        total.update(batch.sum())

    found = fit_records(
        update, loader(4), lambda m, b, i: m.log("since", total), loader(2), val_every=2
    )
    assert [line["since"] for line in found] == [3.0, 7.0]
