"""Wrong input fails where it enters, with the value, the choices and the fix in the text."""

import copy
import pickle
from collections import UserDict
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.optim.lr_scheduler import ReduceLROnPlateau, StepLR
from torch.utils.data import (
    DataLoader,
    DistributedSampler,
    IterableDataset,
    TensorDataset,
    WeightedRandomSampler,
)

from callbacks import Callback, EarlyStopping, ModelCheckpoint
from tests.helpers.line import Line
from trackers import JsonlTracker
from trainer import (
    Accelerator,
    DataLoaderConfiguration,
    DataModule,
    GradientAccumulationPlugin,
    ProjectConfiguration,
    Trainer,
    TrainModule,
)
from trainer.errors import CheckpointError, MetricError


class Net(Line):
    def training_step(self, batch, batch_idx):
        loss = self.layer(batch[0]).square().mean()
        self.log("train/loss", loss, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val/loss", self.layer(batch[0]).square().mean())

    def test_step(self, batch, batch_idx):
        self.log("test/loss", self.layer(batch[0]).square().mean())


def net(**methods):
    """A module of which some methods are replaced."""
    return type("MyNet", (Net,), methods)()


def loader(samples=4, **options):
    return DataLoader(TensorDataset(torch.ones(samples, 2)), batch_size=2, **options)


def make(**arguments):
    return Trainer(**{"max_epochs": 1, "progress_bar": False, "project_dir": "run"} | arguments)


def fails(call, kind, *parts):
    """The call raises `kind`; its text has every part."""
    with pytest.raises(kind) as raised:
        call()
    assert type(raised.value) is kind
    text = str(raised.value)
    missing = [part for part in parts if part not in text]
    assert not missing, f"{missing} not in: {text}"
    return text


def fit_fails(module, kind, *parts, train=None, val=None, ckpt_path=None, **arguments):
    data = loader() if train is None else train
    fit = lambda: make(**arguments).fit(module, data, val, ckpt_path=ckpt_path)
    return fails(fit, kind, *parts)


# -- the Trainer's arguments -----------------------------------------------------------------------

ARGUMENTS = [
    ({"val_every": "1 epohc"}, ValueError, ["'epohc'", "steps, epochs, items", "'epochs'"]),
    ({"val_every": 0}, ValueError, ["0", "above zero"]),
    ({"log_every": "3 stpes"}, ValueError, ["'stpes'", "'steps'"]),
    ({"max_epochs": -1}, ValueError, ["max_epochs is -1", "None for no limit"]),
    ({"max_epochs": 1.5}, ValueError, ["max_epochs is 1.5", "a whole number"]),
    ({"max_steps": True}, TypeError, ["max_steps is True", "a whole number"]),
    ({"max_epochs": 1, "min_epochs": 2}, ValueError, ["min_epochs is 2", "max_epochs, 1"]),
    ({"max_steps": 3, "min_steps": 4}, ValueError, ["min_steps is 4", "max_steps, 3"]),
    ({"max_time": "soon"}, ValueError, ["max_time is 'soon'", "'30 minutes'", "timedelta"]),
    ({"max_time": "1:2:x:4"}, ValueError, ["max_time is '1:2:x:4'", "'00:12:00:00'"]),
    ({"max_time": {"hour": 1}}, ValueError, ["{'hour': 1}", "{'hours': 12}"]),
    ({"max_time": 30}, TypeError, ["max_time is 30", "int", "'30 minutes'"]),
    ({"limit_train_batches": 1.5}, ValueError, ["limit_train_batches is 1.5", "fraction", "int"]),
    ({"limit_val_batches": -1}, ValueError, ["limit_val_batches is -1", "at least 0"]),
    ({"limit_test_batches": "2"}, TypeError, ["limit_test_batches is '2'", "whole", "float"]),
    ({"limit_predict_batches": True}, TypeError, ["limit_predict_batches is True"]),
    ({"overfit_batches": 2.0}, ValueError, ["overfit_batches is 2.0", "fraction"]),
    ({"num_sanity_val_steps": -2}, ValueError, ["num_sanity_val_steps is -2", "-1 for all"]),
    ({"max_grad_norm": 0}, ValueError, ["max_grad_norm is 0", "above 0", "None"]),
    ({"max_grad_value": -1.0}, ValueError, ["max_grad_value is -1.0", "above 0"]),
    (
        {"mixed_precision": "fp61"},
        ValueError,
        ["'fp61'", "'bf16', 'fp16', 'fp8', 'no'", "mean 'fp16'"],
    ),
    ({"log_with": "tensorbord"}, ValueError, ["'tensorbord'", "'tensorboard'", "register_tracker"]),
    ({"log_with": 3}, TypeError, ["3", "GeneralTracker"]),
    ({"callbacks": [EarlyStopping]}, TypeError, ["EarlyStopping", "instance of", "Callback"]),
    ({"gradient_accumulation_steps": 1.5}, ValueError, ["is 1.5", "a whole number"]),
    (
        {"dataloader_config": DataLoaderConfiguration(split_batches=True)},
        ValueError,
        ["split_batches=True", "whole batches", "divide"],
    ),
    (
        {"dataloader_config": DataLoaderConfiguration(dispatch_batches=True)},
        ValueError,
        ["dispatch_batches=True", "Leave it out"],
    ),
    ({"dynamo_backend": "eeger"}, ValueError, ["'eeger'", "Did you mean 'eager'?"]),
    ({"fsdp_plugin": 3}, TypeError, ["fsdp_plugin is 3", "FullyShardedDataParallelPlugin"]),
    ({"project_config": "runs"}, TypeError, ["'runs'", "ProjectConfiguration"]),
    *[
        ({name: "no"}, TypeError, [f"{name} is 'no'", "True or False"])
        for name in (
            "barebones",
            "checkpointing",
            "cpu",
            "detect_anomaly",
            "progress_bar",
            "slurm_requeue",
        )
    ],
    ({"log_with": JsonlTracker}, TypeError, ["the class JsonlTracker; pass an instance"]),
    (
        {"project_config": ProjectConfiguration(total_limit=2)},
        ValueError,
        ["total_limit=2", "save_last"],
    ),
]


@pytest.mark.parametrize(
    ("arguments", "kind", "parts"), ARGUMENTS, ids=[str(case[0]) for case in ARGUMENTS]
)
def test_a_wrong_argument_is_refused_when_the_trainer_is_made(arguments, kind, parts):
    fails(lambda: make(**arguments), kind, *parts)


class Empty(TrainModule):
    """Defines nothing."""


def accelerator_twice():
    make(accelerator=Accelerator(cpu=True), mixed_precision="bf16")


CALLS = [
    (accelerator_twice, ValueError, ["accelerator", "mixed_precision", "not both"]),
    (
        lambda: make(callbacks=[EarlyStopping("val/loss"), EarlyStopping("val/loss", patience=9)]),
        ValueError,
        ["EarlyStopping", "state_key"],
    ),
    (
        lambda: make().fit(Net()),
        ValueError,
        ["train_dataloaders", "datamodule", "train_dataloader"],
    ),
    (lambda: make().test(Net()), ValueError, ["dataloaders", "from test_dataloader"]),
    (
        lambda: make().fit(Net(), loader(), datamodule=DataModule()),
        ValueError,
        ["train_dataloaders or datamodule", "not both"],
    ),
    (lambda: make().test(net(), datamodule=DataModule), TypeError, ["is the class DataModule"]),
    (  # Lightning's third argument is the checkpoint
        lambda: make().test(net(), loader(), "best"),
        TypeError,
        ["datamodule is 'best' of type str", "ckpt_path="],
    ),
    (lambda: make().test(net(), datamodule=net()), ValueError, ["test has no data"]),
    *[
        (
            lambda method=method: getattr(make(), method)(Empty(), loader()),
            TypeError,
            [f"Empty does not define {missing}", f"def {missing}(self, batch, batch_idx)"],
        )
        for method, missing in (
            ("fit", "training_step"),
            ("validate", "validation_step"),
            ("test", "test_step"),
        )
    ],
    *[
        (
            lambda word=word: make(project_dir=None).fit(Net(), loader(), ckpt_path=word),
            ValueError,
            [f"ckpt_path='{word}'", "project_dir"],
        )
        for word in ("auto", "last", "best")
    ],
    *[
        (
            lambda entry=entry: getattr(make(), entry)(Net(), loader(), ckpt_path=3),
            TypeError,
            ["ckpt_path is 3 of type int", "'auto'"],
        )
        for entry in ("fit", "validate", "predict")
    ],
    (
        lambda: Net().log("x", 1.0),
        RuntimeError,
        ["no trainer", "fit, validate, test or predict"],
    ),
    (
        lambda: make().save_checkpoint("x"),
        RuntimeError,
        ["save_checkpoint", "before the first fit"],
    ),
]


@pytest.mark.parametrize(("call", "kind", "parts"), CALLS)
def test_a_wrong_call_is_refused(call, kind, parts):
    fails(call, kind, *parts)


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        ({"log_with": "tensorboard", "project_dir": "there"}, ("log_with to the Trainer",)),
        ({"device_placement": False}, ("device_placement=False", "Leave it out")),
        ({"split_batches": True}, ("split_batches=True",)),
        ({"step_scheduler_with_optimizer": False}, ("step_scheduler_with_optimizer=False",)),
        ({"rng_types": ["torch"]}, ("rng_types=[", "torch")),
        (
            {
                "gradient_accumulation_plugin": GradientAccumulationPlugin(
                    sync_with_dataloader=False
                )
            },
            ("sync_with_dataloader=False",),
        ),
        (
            {"gradient_accumulation_plugin": GradientAccumulationPlugin(adjust_scheduler=False)},
            ("adjust_scheduler=False",),
        ),
        (
            {"project_config": ProjectConfiguration(project_dir="there", total_limit=2)},
            ("total_limit=2",),
        ),
        (
            {"project_config": ProjectConfiguration(project_dir="there", logging_dir="q")},
            ("logging_dir=",),
        ),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_settings_of_a_ready_accelerator_that_the_trainer_ignores_are_refused(options, parts):
    fails(lambda: make(accelerator=Accelerator(cpu=True, **options)), ValueError, *parts)


def test_a_ready_accelerator_or_its_configuration_says_where_and_how_many_micro_batches(
    monkeypatch,
):
    config = ProjectConfiguration(project_dir="there", save_on_each_node=True)
    assert make(project_dir=None, project_config=config).project_dir.name == "there"
    assert make(project_dir="here", project_config=config).project_dir.name == "here"
    ready = Accelerator(cpu=True, gradient_accumulation_steps=3, project_config=config)
    trainer = make(project_dir=None, accelerator=ready)
    assert (trainer.project_dir.name, trainer.gradient_accumulation_steps) == ("there", 3)
    assert trainer._context.project.on_each_node
    assert make(accelerator=ready, gradient_accumulation_steps=1).gradient_accumulation_steps == 1
    monkeypatch.setenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "4")
    assert make().gradient_accumulation_steps == 4
    assert make(gradient_accumulation_steps=2).gradient_accumulation_steps == 2


# -- what is refused as a fit begins, or in its first step -----------------------------------------


def step_of(body):
    """A `training_step` that does `body` beside its work."""

    def training_step(self, batch, batch_idx):
        body(self)
        return self.layer(batch[0]).mean()

    return {"training_step": training_step}


def log_twice(module):
    module.log("x", 1.0)
    module.log("x", 1.0, reduce="sum")


class Endless(IterableDataset):
    def __iter__(self):
        while True:
            yield (torch.ones(2),)


class LogsAtTheEnd(Callback):
    def on_train_end(self, trainer, module):
        module.log("late", 1.0)


FOUR = TensorDataset(torch.ones(4, 2))
FITS = {
    "no end": ({}, {"max_epochs": None}, ValueError, ["max_epochs", "max_steps", "max_time"]),
    "two checkpoints in a folder": (
        {},
        {"callbacks": [ModelCheckpoint(), ModelCheckpoint(monitor="val/loss")]},
        ValueError,
        ["dirpath", "Two ModelCheckpoints", "run/checkpoints"],
    ),
    "no configure_optimizers": (
        {"configure_optimizers": TrainModule.configure_optimizers},
        {},
        TypeError,
        ["MyNet does not define configure_optimizers", "(self)"],
    ),
    "no validation_step": (
        {"validation_step": TrainModule.validation_step},
        {"val": loader()},
        TypeError,
        ["MyNet", "validation_step(self"],
    ),
    "optimizer of another model": (
        {"configure_optimizers": lambda self: torch.optim.Adam(torch.nn.Linear(2, 2).parameters())},
        {},
        ValueError,
        ["Adam", "none of the parameters of MyNet", "self.parameters()"],
    ),
    "negative items": (
        {"count_items": lambda self, batch: -1},
        {},
        ValueError,
        ["count_items returned -1", "0 or more"],
    ),
    "no count": (
        {"count_items": lambda self, batch: None},
        {},
        TypeError,
        ["count_items returned None;"],
    ),
    "count of a shape": (
        {"count_items": lambda self, batch: torch.ones(2, 3)},
        {},
        ValueError,
        ["count_items returned a tensor of shape (2, 3)"],
    ),
    "manual accumulation": (
        {"automatic_optimization": False},
        {"gradient_accumulation_steps": 2},
        ValueError,
        ["gradient_accumulation_steps is 2", "manual", "pass gradient_accumulation_steps=1"],
    ),
    "manual_backward": (
        step_of(lambda self: self.manual_backward(self.layer.weight.sum())),
        {},
        RuntimeError,
        ["manual_backward", "automatic_optimization = False"],
    ),
    "no room in the limit": (
        {},
        {"limit_train_batches": 0},
        ValueError,
        ["empty: limit_train_batches is 0"],
    ),
    "fraction without a batch": (
        {},
        {"limit_train_batches": 0.1},
        ValueError,
        ["limit_train_batches is 0.1", "2 batches", "0.5"],
    ),
    "two reductions": (step_of(log_twice), {}, ValueError, ["'x'", "'mean'", "'sum'", "the same"]),
    "step value outside a step": (
        {"on_train_epoch_end": lambda self: self.log("x", 1.0, on_step=True)},
        {},
        ValueError,
        ["log('x', on_step=True)", "on_epoch=True"],
    ),
    "log at the end of no update": (
        {},
        {"callbacks": LogsAtTheEnd(), "max_epochs": 0},
        MetricError,
        ["log('late')"],
    ),
    "monitor of a similar name": (
        {},
        {"callbacks": ModelCheckpoint(monitor="train/loss")},
        ValueError,
        ["'train/loss'", "Did you mean 'train/loss_"],
    ),
    "clipping in manual optimisation": (
        {"automatic_optimization": False},
        {"max_grad_norm": 1.0},
        ValueError,
        ["max_grad_norm is set.", "self.clip_gradients"],
    ),
    "LBFGS": (
        {"configure_optimizers": lambda self: torch.optim.LBFGS(self.parameters())},
        {},
        ValueError,
        ["LBFGS, which evaluates the loss several times"],
    ),
    "fraction of an unknown epoch": (
        {},
        {"val_every": "0.25 epochs", "val": loader(), "train": DataLoader(Endless(), 2)},
        ValueError,
        ["val_every is 0.25 epochs, but a fraction of an epoch needs a loader with a length"],
    ),
    "text": ({}, {"train": "data/train"}, TypeError, ["train_dataloaders is a str"]),
    "dataset": ({}, {"train": FOUR}, TypeError, ["TensorDataset", "as in DataLoader(dataset"]),
    "a dict of tensors": (
        {},
        {"train": {"x": torch.ones(4)}},
        TypeError,
        ["is a dict", "list or dict of them"],
    ),
    "number": ({}, {"train": 3}, TypeError, ["int", "DataLoader", "iterable of batches"]),
    "None in a list": ({}, {"train": [None, loader()]}, TypeError, ["is a list with None in it"]),
    "class": ({}, {"train": DataModule}, TypeError, ["is the class DataModule", "DataModule()"]),
    "tensor": (
        {},
        {"train": torch.ones(8, 3)},
        TypeError,
        ["is a Tensor of shape (8, 3)", "DataLoader(TensorDataset(x, y), "],
    ),
    "array": ({}, {"train": np.ones(8)}, TypeError, ["is a ndarray of shape (8,)", "list(...)"]),
    "distributed sampler": (
        {},
        {"train": DataLoader(FOUR, sampler=DistributedSampler(FOUR, num_replicas=2, rank=0))},
        ValueError,
        ["DistributedSampler", "Remove it"],
    ),
    "overfit a random sampler": (
        {},
        {
            "train": DataLoader(FOUR, 2, sampler=WeightedRandomSampler([1.0] * 4, 4)),
            "overfit_batches": 1,
        },
        ValueError,
        ["WeightedRandomSampler", "overfit_batches", "shuffle=False"],
    ),
}


@pytest.mark.parametrize("case", FITS)
def test_a_fit_that_cannot_work_is_refused(case):
    methods, arguments, kind, parts = FITS[case]
    fit_fails(net(**methods), kind, *parts, **arguments)


# -- the module ------------------------------------------------------------------------------------


def test_predict_needs_a_step_or_a_forward():
    def predicts(**methods):
        return make().predict(type("Bare", (TrainModule,), methods)(), loader())

    fails(predicts, NotImplementedError, "Bare", 'missing the required "forward" function')
    assert predicts(forward=lambda self, batch: 1) == [1, 1]
    assert predicts(predict_step=lambda self, batch, batch_idx: batch_idx) == [0, 1]


def test_other_modules_are_refused():
    for method in ("fit", "validate", "test", "predict"):
        for wrong in (torch.nn.Linear(2, 1), Net, None):
            fails(
                lambda m=method, w=wrong: getattr(make(), m)(w, loader()),
                TypeError,
                method,
                "the class Net" if wrong is Net else type(wrong).__name__,
                "instance of a subclass of trainer.TrainModule",
            )


# -- configure_optimizers --------------------------------------------------------------------------


def sgd(module):
    return torch.optim.SGD(module.parameters(), lr=0.1)


def step_lr(optimizer):
    return StepLR(optimizer, 1)


RETURNED = [
    (lambda o, s: None, TypeError, ["no optimizer", "Return an optimizer", "'scheduler'"]),
    (lambda o, s: "sgd", TypeError, ["'sgd'", "str", "Return an optimizer"]),
    (lambda o, s: torch.optim.SGD, TypeError, ["SGD", "type", "Return an optimizer"]),
    (lambda o, s: [o, s], TypeError, ["a scheduler, StepLR", "a pair (optimizer, scheduler)"]),
    (lambda o, s: (o, 3), TypeError, ["the scheduler 3 of type int", "step method"]),
    (lambda o, s: {"scheduler": s}, ValueError, ["without 'optimizer'", "'scheduler'"]),
    (
        lambda o, s: {"optimizer": o, "schedular": s},
        ValueError,
        ["'schedular'", "'frequency', 'interval'", "Did you mean 'scheduler'"],
    ),
    (
        lambda o, s: {"optimizer": o, "lr_scheduler": {"scheduler": s, "frequenzy": 2}},
        ValueError,
        ["'frequenzy'", "Did you mean 'frequency'"],
    ),
    (
        lambda o, s: {"optimizer": o, "scheduler": s, "interval": "steps"},
        ValueError,
        ["interval is 'steps'", "'epoch', 'step'", "Did you mean 'step'"],
    ),
    (
        lambda o, s: {"optimizer": o, "scheduler": s, "frequency": 0},
        ValueError,
        ["frequency is 0", "at least 1"],
    ),
    (lambda o, s: {"optimizer": o, "interval": "step"}, ValueError, ["'interval'", "'scheduler'"]),
    (
        lambda o, s: {"optimizer": o, "scheduler": s, "lr_scheduler": s},
        ValueError,
        ["'scheduler'", "'lr_scheduler'", "not both"],
    ),
    (lambda o, s: (o, ReduceLROnPlateau(o)), ValueError, ["ReduceLROnPlateau", "'monitor'"]),
]


@pytest.mark.parametrize(("returned", "kind", "parts"), RETURNED)
def test_wrong_returns_of_configure_optimizers_are_refused(returned, kind, parts):
    def configure_optimizers(self):
        optimizer = sgd(self)
        return returned(optimizer, step_lr(optimizer))

    fit_fails(net(configure_optimizers=configure_optimizers), kind, *parts)


def test_the_metric_of_a_plateau_scheduler_must_be_logged():
    def configure_optimizers(self):
        optimizer = sgd(self)
        plateau = ReduceLROnPlateau(optimizer)
        return {"optimizer": optimizer, "scheduler": plateau, "monitor": "val/los"}

    module = net(configure_optimizers=configure_optimizers)
    text = fit_fails(module, ValueError, "'val/los'", "Did you mean 'val/loss'", val=loader())
    assert "'train/loss_epoch'" in text

    def training_step(self, batch, batch_idx):
        return self.layer(batch[0]).mean()

    silent = net(configure_optimizers=configure_optimizers, training_step=training_step)
    fit_fails(silent, ValueError, "'val/los'", "nothing was recorded", "Log it before")


@pytest.mark.parametrize("logs", [False, True])
@pytest.mark.parametrize(
    ("interval", "multiple"), [("epoch", "val_every"), ("step", "log_every or val_every")]
)
def test_a_plateau_that_ticks_between_validations_is_told_its_frequency(interval, multiple, logs):
    def configure_optimizers(self):
        optimizer = sgd(self)
        plateau = {"scheduler": ReduceLROnPlateau(optimizer), "interval": interval}
        return {"optimizer": optimizer, **plateau, "monitor": "val/loss", "frequency": frequency}

    def training_step(self, batch, batch_idx):
        return self.layer(batch[0]).mean()

    steps = {} if logs else {"training_step": training_step}
    module = net(configure_optimizers=configure_optimizers, **steps)
    options, frequency = {"max_epochs": 2, "val_every": "2 epochs"}, 1
    text = fit_fails(module, ValueError, "'val/loss'", val=loader(), **options)
    assert f"with interval={interval!r}, make its frequency a multiple of {multiple}." in text
    frequency = 2 if interval == "epoch" else 2 * len(loader())
    make(**options).fit(module, loader(), loader())


def test_a_trainer_that_is_pickled_says_what_to_pickle():
    for copies in (pickle.dumps, copy.copy, copy.deepcopy):
        fails(lambda: copies(make()), TypeError, "Pickle the module", "save_checkpoint")  # noqa: B023


def test_a_monitor_beside_a_scheduler_that_takes_no_metric_is_no_error():
    def configure_optimizers(self):
        optimizer = sgd(self)
        return {"optimizer": optimizer, "scheduler": step_lr(optimizer), "monitor": "val/loss"}

    trainer = make(max_epochs=2)
    trainer.fit(net(configure_optimizers=configure_optimizers), loader())
    assert trainer.optimizers[0].param_groups[0]["lr"] == pytest.approx(0.001)


# -- training_step ---------------------------------------------------------------------------------

LOSSES = [
    (lambda self, x: 0.5, TypeError, ["0.5", "float", "automatic_optimization = False"]),
    (lambda self, x: self.layer(x).mean().item(), TypeError, ["float"]),
    (lambda self, x: {"los": self.layer(x).mean()}, TypeError, ["without 'loss'", "['los']"]),
    (lambda self, x: {"loss": 1}, TypeError, ["1 of type int", "under 'loss'"]),
    (lambda self, x: self.layer(x), ValueError, ["(2, 1)", "loss.mean()"]),
    (lambda self, x: self.layer(x).mean().detach(), ValueError, ["without a graph", "detached"]),
    (lambda self, x: torch.zeros(()), ValueError, ["without a graph", "frozen"]),
    (lambda self, x: self.layer(x).mean() * 1j, ValueError, ["torch.complex64", ".real"]),
]


@pytest.mark.parametrize(("loss", "kind", "parts"), LOSSES)
def test_wrong_returns_of_training_step_are_refused(loss, kind, parts):
    def training_step(self, batch, batch_idx):
        return loss(self, batch[0])

    fit_fails(net(training_step=training_step), kind, "training_step returned", *parts)


def test_a_loss_of_one_element_in_any_shape_is_fine():
    def training_step(self, batch, batch_idx):
        return {"loss": self.layer(batch[0]).mean().reshape(1, 1), "more": "text"}

    trainer = make()
    trainer.fit(net(training_step=training_step), loader())
    assert trainer.global_step == 2


# -- data ------------------------------------------------------------------------------------------


class NoSamples(IterableDataset):
    def __iter__(self):
        yield from ()


EMPTY = [[], DataLoader([]), DataLoader(TensorDataset(torch.ones(1, 2)), 2, drop_last=True)]


@pytest.mark.parametrize("empty", EMPTY, ids=["list", "loader", "drop_last"])
def test_an_empty_loader_is_named_before_anything_runs(empty):
    fit_fails(Net(), ValueError, "train loader is empty", "drop_last", train=empty)
    fit_fails(Net(), ValueError, "is empty", "dataset", "drop_last", val=empty)
    both = [loader(), empty]
    fit_fails(Net(), ValueError, "loader number 1 is empty", val=both)
    for method in ("validate", "test", "predict"):
        fails(lambda m=method: getattr(make(), m)(Net(), empty), ValueError, method, "is empty")


def test_a_stream_that_gives_nothing_is_refused_once_it_was_read():
    stream = DataLoader(NoSamples(), batch_size=2)
    text = fit_fails(Net(), ValueError, "training loader gave no batch in epoch 1", train=stream)
    assert "limit_train_batches" not in text  # which was not given
    fit_fails(Net(), ValueError, "gave no batch", "fast_dev_run", train=stream, fast_dev_run=True)
    fit_fails(Net(), ValueError, "validation loader number 0 gave no batch", val=stream)
    for method, name in (("validate", "validation"), ("test", "test"), ("predict", "predict")):
        fails(
            lambda m=method: getattr(make(), m)(Net(), stream),
            ValueError,
            f"The {name} loader number 0 gave no batch",
        )


def test_an_iterator_cannot_be_read_a_second_time():
    once = iter([[torch.ones(2, 2)]])
    options = {"train": once, "max_epochs": 2, "limit_train_batches": 1}
    fit_fails(Net(), ValueError, "read only once", "in epoch 2", "iterated again", **options)


# -- log -------------------------------------------------------------------------------------------

LOGGED = [
    (("x", torch.ones(3)), {}, ValueError, ["'x'", "shape (3,)", ".mean()"]),
    (("x", "high"), {}, TypeError, ["'x'", "'high'", "str", "log_dict"]),
    (("x", {"a": 1}), {}, TypeError, ["'x'", "dict", "log_dict"]),
    (("x", None), {}, TypeError, ["'x'", "None", "number"]),
    (("x", 1.0), {"reduce": "avg"}, ValueError, ["'x'", "'avg'", "'max', 'mean', 'min', 'sum'"]),
    (("x", 1.0), {"reduce": "maxx"}, ValueError, ["Did you mean 'max'"]),
    (("step", 1.0), {}, ValueError, ["'step'", "field with that name"]),
    (("epoch", 1.0), {}, ValueError, ["'epoch'"]),
    (("time", 1.0), {}, ValueError, ["'time'"]),
]


@pytest.mark.parametrize(("args", "kwargs", "kind", "parts"), LOGGED)
def test_values_that_cannot_be_logged_are_refused(args, kwargs, kind, parts):
    def training_step(self, batch, batch_idx):
        self.log(*args, **kwargs)

    fit_fails(net(training_step=training_step), kind, *parts)


OUTSIDE = [
    "setup",
    "configure_optimizers",
    "on_fit_start",
    "on_fit_end",
    "on_train_end",
    "on_validation_end",
    "on_predict_start",
    "on_save_checkpoint",
]


@pytest.mark.parametrize("hook", OUTSIDE)
def test_log_where_nothing_can_be_recorded(hook):
    def method(self, *args):
        self.log("lost", 1.0)

    module = net(**{hook: method})

    def run():
        trainer = make()
        trainer.fit(module, loader(), loader())
        trainer.predict(module, loader())

    if hook == "on_predict_start":
        module.predict_step = lambda batch, batch_idx: None
    fails(run, MetricError, "log('lost')", "inside a step")


@pytest.mark.parametrize("hook", ["on_boundary", "on_validation_end", "on_train_end"])
def test_a_callback_cannot_log_after_the_last_reduction(hook):
    """It would be taken for a value of the next epoch, or lost."""

    class Late(Callback):
        pass

    setattr(Late, hook, lambda self, trainer, module: module.log("late", 1.0))
    fit_fails(Net(), MetricError, "log('late')", val=loader(), callbacks=Late())


def test_a_metric_object_that_computes_a_dict():
    class Dict:
        def update(self):
            pass

        def compute(self):
            return {"a": 1.0}

        def reset(self):
            pass

    def validation_step(self, batch, batch_idx):
        self.log("both", Dict())

    fit_fails(net(validation_step=validation_step), ValueError, "'both'", "log_dict", val=loader())


# -- monitors --------------------------------------------------------------------------------------


@pytest.mark.parametrize("watcher", [ModelCheckpoint, EarlyStopping])
def test_a_monitored_metric_that_was_never_logged(watcher):
    parts = ["'val/accuracy' was never logged", "train/loss_epoch, ", "val/loss"]
    fit_fails(Net(), ValueError, *parts, val=loader(), callbacks=watcher(monitor="val/accuracy"))


# -- checkpoints -----------------------------------------------------------------------------------


def test_a_fresh_run_does_not_mix_with_the_checkpoints_of_another():
    make().fit(Net(), loader())
    fit_fails(
        Net(), ValueError, "run/checkpoints", "another run", "ckpt_path='auto'", "project_dir"
    )
    make(project_dir="another").fit(Net(), loader())
    make(max_epochs=2).fit(Net(), loader(), ckpt_path="auto")


def test_best_needs_a_monitor():
    make().fit(Net(), loader())
    fails(
        lambda: make().fit(Net(), loader(), ckpt_path="best"),
        ValueError,
        "ckpt_path='best'",
        "ModelCheckpoint",
        "monitor",
    )
    fails(
        lambda: make(callbacks=ModelCheckpoint(monitor="val/x")).test(
            Net(), loader(), ckpt_path="best"
        ),
        CheckpointError,
        "'best'",
        "'val/x'",
    )


def test_last_needs_a_checkpoint_and_auto_does_not():
    fails(
        lambda: make().fit(Net(), loader(), ckpt_path="last"),
        CheckpointError,
        "ckpt_path='last'",
        "run/checkpoints",
    )
    make().fit(Net(), loader(), ckpt_path="auto")


def test_a_path_without_a_checkpoint_or_a_misspelt_word():
    def begins_with(path):
        return lambda: make().fit(Net(), loader(), ckpt_path=path)

    choices = ["lst", "'auto', 'best', 'last'", "Did you mean 'last'"]
    fails(begins_with("lst"), CheckpointError, *choices)
    path = Path("run/checkpoints/step-1")
    text = fails(begins_with(path), CheckpointError, f"no checkpoint at {path.absolute()}")
    assert "Did you mean" not in text


def test_a_file_in_place_of_a_checkpoint(tmp_path):
    def begins_with(path):
        make(max_epochs=2).fit(Net(), loader(), ckpt_path=path)

    (tmp_path / "old.ckpt").write_bytes(b"a pickle")
    text = fails(lambda: begins_with("old.ckpt"), CheckpointError, "old.ckpt", "pickles")
    assert "give its folder" not in text
    make().fit(Net(), loader())
    folder = Path("run/checkpoints/step-00000002").absolute()
    fails(lambda: begins_with(f"{folder}/model.safetensors"), CheckpointError, f"folder, {folder}.")


def test_a_checkpoint_of_another_model_or_of_other_optimizers_names_what_differs():
    make().fit(Net(), loader())

    class Other(Net):
        def __init__(self):
            super().__init__()
            self.head = torch.nn.Linear(1, 1)

    def configure_optimizers(self):
        return tuple(torch.optim.SGD([part], lr=0.1) for part in self.layer.parameters())

    two = net(configure_optimizers=configure_optimizers)
    for module, parts in ((Other(), ["head.weight"]), (two, ["1 optimizers", "returned 2"])):
        fit_fails(module, CheckpointError, *parts, ckpt_path="last")


def test_batches_of_a_mapping_are_batches():
    """A list of mappings is one loader of ready batches, whatever kind of mapping they are."""
    batches = [UserDict(x=torch.ones(2, 2))] * 3

    def training_step(self, batch, batch_idx):
        return self.layer(batch["x"]).mean()

    trainer = make()
    trainer.fit(net(training_step=training_step), batches)
    assert trainer.global_step == 3


def test_a_schedule_of_an_optimizer_that_was_not_returned_is_refused():
    class Wraps(torch.optim.Optimizer):
        def __init__(self, inner):
            self.inner, self.param_groups = inner, inner.param_groups
            self.state, self.defaults = inner.state, inner.defaults

        def step(self, closure=None):
            self.inner.step()

    def twin(self):
        return [sgd(self)], [step_lr(sgd(self))]

    def other(self):
        return [sgd(self)], [step_lr(sgd(torch.nn.Linear(2, 2)))]

    def wrapped(self):
        inner = sgd(self)
        return Wraps(inner), step_lr(inner)

    for configure in (other, twin):
        text = "a StepLR for a SGD"
        fit_fails(net(configure_optimizers=configure), ValueError, text, "did not return")
    make(checkpointing=False).fit(net(configure_optimizers=wrapped), loader())


def tracked(path):
    return Accelerator(log_with="csv", cpu=True, project_dir=path)


PATHS = {
    "dirpath": lambda path: ModelCheckpoint(dirpath=path),
    "project_dir": lambda path: make(project_dir=path),
    "ckpt_path": lambda path: make().validate(net(), loader(), ckpt_path=path),
    "path": TrainModule.load_from_checkpoint,
    "output_dir": lambda path: Accelerator(cpu=True).save_state(path),
    "input_dir": lambda path: Accelerator(cpu=True).load_state(path),
    "save_directory": lambda path: Accelerator(cpu=True).save_model(net(), path),
    "logging_dir": lambda path: tracked(path).init_trackers("a"),
}


@pytest.mark.parametrize("name", PATHS)
def test_a_path_in_an_unknown_home_is_refused(name):
    given = "~nobody-of-this-name/runs"
    text = f"{name} is {given!r}, but that home folder is unknown"
    fails(lambda: PATHS[name](given), ValueError, text)


def test_a_relative_folder_may_begin_with_a_tilde(tmp_path):
    Accelerator(cpu=True).save_state("./~nobody-of-this-name")
    assert [each.name for each in tmp_path.iterdir()] == ["~nobody-of-this-name"]
    tracked("./~nobody-of-this-name").init_trackers("a")
    assert (tmp_path / "~nobody-of-this-name" / "a").is_dir()
    callback = ModelCheckpoint(dirpath="./~")
    assert callback.dirpath == tmp_path / "~"


@pytest.mark.parametrize("owner", ["module", "datamodule"])
@pytest.mark.parametrize(
    ("stage", "hook", "nothing"),
    [
        ("fit", "train_dataloader", None),
        ("validate", "val_dataloader", []),
        ("validate", "val_dataloader", None),
        ("test", "test_dataloader", []),
    ],
)
def test_a_hook_that_returned_no_loader_is_named(stage, hook, nothing, owner):
    module, data = net(), DataModule()
    holder = module if owner == "module" else data
    setattr(holder, hook, lambda: nothing)
    warned = f"{hook} of {type(holder).__name__} returned no loader. Return a loader"
    fails(lambda: getattr(make(), stage)(module, datamodule=data), ValueError, warned)


@pytest.mark.parametrize("steps_at", [None, 0])
def test_a_manual_fit_that_never_steps_is_warned_of(caplog, steps_at):
    def step(self, batch, batch_idx):
        self.manual_backward(self.layer(batch[0]).square().mean())
        if batch_idx == steps_at:
            self.optimizers().step()

    manual = net(training_step=step, automatic_optimization=False)
    make(checkpointing=False, max_epochs=2).fit(manual, loader())
    warned = [text for text in caplog.messages if "made no update in the first epoch" in text]
    assert len(warned) == (1 if steps_at is None else 0)


def test_an_epoch_without_a_loss_is_an_error():
    forgets = net(training_step=lambda self, batch, batch_idx: None)
    with pytest.raises(ValueError, match=r"No batch of epoch 1 had a loss.*Return the loss"):
        make(max_epochs=2).fit(forgets, loader())
    with pytest.raises(ValueError, match="No batch of epoch 1 had a loss"):
        make(max_steps=1, project_dir="short").fit(forgets, loader(8))


def test_a_url_is_no_local_folder():
    with pytest.raises(
        ValueError, match=r"project_dir is 's3://bucket/run'.*local folder.*mirror="
    ):
        make(project_dir="s3://bucket/run")


@pytest.mark.filterwarnings("ignore:.*torch.jit.*is deprecated")
def test_a_module_that_torch_cannot_script_says_what_to_use():
    with pytest.raises(
        NotImplementedError, match=r"^Use torch\.export\.export.* such as Line, only"
    ):
        torch.jit.script(Line())
