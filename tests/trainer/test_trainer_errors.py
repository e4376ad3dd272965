"""Wrong input fails where it enters, with the value, the choices and the fix in the text."""

from collections import UserDict
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.optim.lr_scheduler import ReduceLROnPlateau, StepLR
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, TensorDataset

from callbacks import Callback, EarlyStopping, LearningRateMonitor, ModelCheckpoint
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
from trainer.loops import config


class Net(TrainModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)

    def training_step(self, batch, batch_idx):
        loss = self.layer(batch[0]).square().mean()
        self.log("train/loss", loss, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val/loss", self.layer(batch[0]).square().mean())

    def test_step(self, batch, batch_idx):
        self.log("test/loss", self.layer(batch[0]).square().mean())

    def predict_step(self, batch, batch_idx):
        return self.layer(batch[0])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


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


def fit_fails(module, kind, *parts, train=None, val=None, **arguments):
    data = loader() if train is None else train
    return fails(lambda: make(**arguments).fit(module, data, val), kind, *parts)


# -- the Trainer's arguments -----------------------------------------------------------------------

ARGUMENTS = [
    ({"val_every": "1 epohc"}, ValueError, ["'epohc'", "steps, epochs, items", "'epochs'"]),
    ({"val_every": "often"}, ValueError, ["'often'", "'30 minutes'"]),
    ({"precision": "16-mixed"}, TypeError, ["'precision'", "use mixed_precision='fp16'"]),
    ({"use_distributed_sampler": False}, TypeError, ["leave it out", "loaders"]),
    ({"inference_mode": True}, TypeError, ["leave it out", "no gradients"]),
    ({"val_every": 0}, ValueError, ["0", "above zero"]),
    ({"val_every": 1.5}, TypeError, ["1.5", "float", "'1 epoch'"]),
    ({"log_every": "3 stpes"}, ValueError, ["'stpes'", "'steps'"]),
    ({"log_every": "0.5 steps"}, ValueError, ["0.5", "whole number"]),
    ({"max_epochs": -1}, ValueError, ["max_epochs is -1", "None for no such limit"]),
    ({"max_epochs": 1.5}, TypeError, ["max_epochs is 1.5", "int"]),
    ({"max_steps": True}, TypeError, ["max_steps is True", "int"]),
    ({"max_epochs": 1, "min_epochs": 2}, ValueError, ["min_epochs is 2", "max_epochs, 1"]),
    ({"max_steps": 3, "min_steps": 4}, ValueError, ["min_steps is 4", "max_steps, 3"]),
    ({"max_time": "soon"}, ValueError, ["max_time is 'soon'", "'30 minutes'", "timedelta"]),
    ({"max_time": "1:2:x:4"}, ValueError, ["max_time is '1:2:x:4'", "'00:12:00:00'"]),
    ({"max_time": "3 epochs"}, ValueError, ["'3 epochs'", "'30 minutes'"]),
    ({"max_time": {"hour": 1}}, ValueError, ["{'hour': 1}", "{'hours': 12}"]),
    ({"max_time": {"hours": 0}}, ValueError, ["{'hours': 0}", "above zero"]),
    ({"max_time": 30}, TypeError, ["max_time is 30", "int", "'30 minutes'"]),
    ({"limit_train_batches": 1.5}, ValueError, ["limit_train_batches is 1.5", "fraction", "int"]),
    ({"limit_val_batches": -1}, ValueError, ["limit_val_batches is -1", "at least 0"]),
    ({"limit_test_batches": "2"}, TypeError, ["limit_test_batches is '2'", "int", "float"]),
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
    ({"callbacks": [None]}, TypeError, ["None", "NoneType", "Callback"]),
    ({"gradient_accumulation_steps": 0}, ValueError, ["is 0", "at least 1"]),
    ({"gradient_accumulation_steps": 1.5}, TypeError, ["is 1.5", "int"]),
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
    ({"deepspeed_plugin": 3}, TypeError, ["3", "DeepSpeedPlugin"]),
    ({"mixed_precision": "fp8"}, NotImplementedError, ["8-bit", "'bf16'"]),
    ({"project_config": "runs"}, TypeError, ["'runs'", "ProjectConfiguration"]),
    ({"project_config": {}}, TypeError, ["project_config is {}", "a ProjectConfiguration"]),
    (
        {"dataloader_config": {"even_batches": True}},
        TypeError,
        ["dataloader_config is {'even_batches': True}", "a DataLoaderConfiguration"],
    ),
    ({"dynamo_plugin": "eager"}, TypeError, ["TorchDynamoPlugin", "dynamo_backend='eager'"]),
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
    ({"log_with": JsonlTracker}, TypeError, ["JsonlTracker as an instance"]),
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


def test_arguments_are_given_by_name():
    with pytest.raises(TypeError, match="positional"):
        Trainer(10)
    with pytest.raises(TypeError, match="'epochs'"):
        Trainer(epochs=10)


def test_an_accelerator_and_the_arguments_to_make_one_exclude_each_other():
    fails(
        lambda: make(accelerator=Accelerator(cpu=True), mixed_precision="bf16"),
        ValueError,
        "accelerator",
        "mixed_precision",
        "not both",
    )


def test_a_ready_accelerator_is_checked_too():
    ready = Accelerator(cpu=True, split_batches=True)
    fails(lambda: make(accelerator=ready), ValueError, "split_batches=True")


def test_lengths_are_checked_without_assertions():
    """As with ``python -O``, which leaves them out."""
    names = {"__name__": config.__name__}
    source = Path(config.__file__).read_text(encoding="utf-8")
    exec(compile(source, config.__file__, "exec", optimize=1), names)
    with pytest.raises(ValueError, match="max_epochs is -1"):
        names["Settings"](max_epochs=-1)


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        ({"log_with": "tensorboard", "project_dir": "there"}, ("log_with to the Trainer",)),
        ({"device_placement": False}, ("device_placement=False", "Leave it out")),
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
def test_what_a_ready_accelerator_has_for_other_loops_is_refused(options, parts):
    fails(lambda: make(accelerator=Accelerator(cpu=True, **options)), ValueError, *parts)


def test_a_ready_accelerator_says_where_and_how_many_micro_batches(monkeypatch):
    config = ProjectConfiguration(project_dir="there", save_on_each_node=True)
    ready = Accelerator(cpu=True, gradient_accumulation_steps=3, project_config=config)
    trainer = make(project_dir=None, accelerator=ready)
    assert (trainer.project_dir.name, trainer.gradient_accumulation_steps) == ("there", 3)
    assert trainer._context.project.on_each_node
    assert make(accelerator=ready, gradient_accumulation_steps=1).gradient_accumulation_steps == 1
    monkeypatch.setenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "4")
    assert make().gradient_accumulation_steps == 4
    assert make(gradient_accumulation_steps=2).gradient_accumulation_steps == 2


def test_the_project_configuration_says_where():
    config = ProjectConfiguration(project_dir="there", automatic_checkpoint_naming=True)
    assert make(project_dir=None, project_config=config).project_dir.name == "there"
    assert make(project_dir="here", project_config=config).project_dir.name == "here"


def test_two_callbacks_that_a_checkpoint_could_not_tell_apart():
    both = [EarlyStopping("val/loss"), EarlyStopping("val/loss", patience=9)]
    fails(lambda: make(callbacks=both), ValueError, "EarlyStopping", "state_key")
    make(callbacks=[LearningRateMonitor(), LearningRateMonitor()])  # they have nothing to tell


def test_two_checkpoint_callbacks_need_two_folders():
    both = [ModelCheckpoint(), ModelCheckpoint(monitor="val/loss")]
    text = fit_fails(Net(), ValueError, "dirpath", "Two ModelCheckpoints", callbacks=both)
    assert "run/checkpoints" in text


def test_a_run_that_nothing_ends():
    fit_fails(Net(), ValueError, "max_epochs", "max_steps", "max_time", max_epochs=None)


# -- the module ------------------------------------------------------------------------------------


def test_predict_needs_a_step_or_a_forward():
    def predicts(**methods):
        return make().predict(type("Bare", (TrainModule,), methods)(), loader())

    fails(predicts, NotImplementedError, "Bare", 'missing the required "forward" function')
    assert predicts(forward=lambda self, batch: 1) == [1, 1]
    assert predicts(predict_step=lambda self, batch, batch_idx: batch_idx) == [0, 1]


def test_a_dataset_in_place_of_a_loader():
    dataset = TensorDataset(torch.ones(4, 2))
    fit_fails(Net(), TypeError, "TensorDataset", "as in DataLoader(dataset", train=dataset)


def test_what_is_not_a_train_module():
    for method in ("fit", "validate", "test", "predict"):
        for wrong in (torch.nn.Linear(2, 1), Net, None):
            fails(
                lambda m=method, w=wrong: getattr(make(), m)(w, loader()),
                TypeError,
                method,
                type(wrong).__name__,
                "instance of a subclass of trainer.TrainModule",
            )


class Empty(TrainModule):
    """Defines nothing."""


@pytest.mark.parametrize(
    ("method", "missing"),
    [("fit", "training_step"), ("validate", "validation_step"), ("test", "test_step")],
)
def test_a_missing_step_is_named_with_its_signature(method, missing):
    fails(
        lambda: getattr(make(), method)(Empty(), loader()),
        TypeError,
        f"Empty does not define {missing}",
        f"def {missing}(self, batch, batch_idx)",
    )


def test_a_missing_configure_optimizers_is_named():
    class Steps(TrainModule):
        def training_step(self, batch, batch_idx):
            return None

    fit_fails(Steps(), TypeError, "Steps does not define configure_optimizers", "(self)")


def test_validation_data_without_a_validation_step():
    class NoValidation(Net):
        validation_step = TrainModule.validation_step

    fit_fails(NoValidation(), TypeError, "NoValidation", "validation_step(self", val=loader())


# -- configure_optimizers --------------------------------------------------------------------------


def sgd(module):
    return torch.optim.SGD(module.parameters(), lr=0.1)


def step_lr(optimizer):
    return StepLR(optimizer, 1)


RETURNED = [
    (lambda o, s: None, TypeError, ["no optimizer", "Return an optimizer", "'scheduler'"]),
    (lambda o, s: [], TypeError, ["[]", "Return an optimizer"]),
    (lambda o, s: "sgd", TypeError, ["'sgd'", "str", "Return an optimizer"]),
    (lambda o, s: torch.optim.SGD, TypeError, ["SGD", "type", "Return an optimizer"]),
    (lambda o, s: s, TypeError, ["a scheduler, StepLR, where an optimizer belongs"]),
    (lambda o, s: [o, s], TypeError, ["a scheduler, StepLR", "a pair (optimizer, scheduler)"]),
    (lambda o, s: (s, o), TypeError, ["a scheduler, StepLR, where an optimizer belongs"]),
    (lambda o, s: (o, 3), TypeError, ["the scheduler 3 of type int", "step method"]),
    (lambda o, s: {"scheduler": s}, ValueError, ["without 'optimizer'", "'scheduler'"]),
    (lambda o, s: {"optimizer": None, "scheduler": s}, TypeError, ["no optimizer"]),
    (
        lambda o, s: {"optimizer": o, "schedular": s},
        ValueError,
        ["'schedular'", "'frequency', 'interval'", "Did you mean 'scheduler'"],
    ),
    (
        lambda o, s: {"optimizer": o, "scheduler": s, "intervall": "step"},
        ValueError,
        ["'intervall'", "Did you mean 'interval'"],
    ),
    (
        lambda o, s: {"optimizer": o, "lr_scheduler": {"scheduler": s, "frequenzy": 2}},
        ValueError,
        ["'frequenzy'", "Did you mean 'frequency'"],
    ),
    (
        lambda o, s: ([o], [{"scheduler": s, "monitr": "x"}]),
        ValueError,
        ["'monitr'", "Did you mean 'monitor'"],
    ),
    (
        lambda o, s: {"optimizer": o, "scheduler": s, "interval": "steps"},
        ValueError,
        ["interval is 'steps'", "'epoch', 'step'", "Did you mean 'step'"],
    ),
    (
        lambda o, s: {"optimizer": o, "scheduler": s, "frequency": 0},
        ValueError,
        ["frequency is 0", "1 or more"],
    ),
    (
        lambda o, s: {"optimizer": o, "scheduler": s, "frequency": "1"},
        ValueError,
        ["frequency is '1'", "int"],
    ),
    (lambda o, s: {"optimizer": o, "interval": "step"}, ValueError, ["'interval'", "'scheduler'"]),
    (
        lambda o, s: {"optimizer": o, "scheduler": s, "lr_scheduler": s},
        ValueError,
        ["'scheduler'", "'lr_scheduler'", "not as both"],
    ),
    (lambda o, s: (o, ReduceLROnPlateau(o)), ValueError, ["ReduceLROnPlateau", "'monitor'"]),
]


@pytest.mark.parametrize(("returned", "kind", "parts"), RETURNED)
def test_what_configure_optimizers_may_not_return(returned, kind, parts):
    def configure_optimizers(self):
        optimizer = sgd(self)
        return returned(optimizer, step_lr(optimizer))

    fit_fails(net(configure_optimizers=configure_optimizers), kind, *parts)


def test_a_forgotten_return_is_told():
    def configure_optimizers(self):
        sgd(self)

    fit_fails(
        net(configure_optimizers=configure_optimizers),
        TypeError,
        "configure_optimizers returned no optimizer",
    )


def test_an_optimizer_of_another_model_would_train_nothing():
    def configure_optimizers(self):
        return torch.optim.Adam(torch.nn.Linear(2, 2).parameters())

    module = net(configure_optimizers=configure_optimizers)
    fit_fails(module, ValueError, "Adam", "none of the parameters of MyNet", "self.parameters()")


@pytest.mark.parametrize("form", [tuple, list])
def test_several_optimizers_may_come_as_a_tuple_or_a_list(form):
    """Two optimizers are no pair of optimizer and scheduler, though both have a `step`."""
    seen = []

    def configure_optimizers(self):
        parts = (self.layer.weight, self.layer.bias)
        return form(torch.optim.SGD([part], lr=0.1) for part in parts)

    def on_train_start(self):
        seen.append((len(self.optimizers()), self.lr_schedulers()))

    make().fit(
        net(configure_optimizers=configure_optimizers, on_train_start=on_train_start), loader()
    )
    assert seen == [(2, None)]


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
    fit_fails(silent, ValueError, "'val/los'", "nothing was recorded", "log it before")


def test_a_monitor_beside_a_scheduler_that_takes_no_metric_is_no_error():
    rates = []

    def configure_optimizers(self):
        optimizer = sgd(self)
        return {"optimizer": optimizer, "scheduler": step_lr(optimizer), "monitor": "val/loss"}

    def on_train_epoch_start(self):
        rates.append(self.optimizers().param_groups[0]["lr"])

    make(max_epochs=2).fit(
        net(configure_optimizers=configure_optimizers, on_train_epoch_start=on_train_epoch_start),
        loader(),
    )
    assert rates == pytest.approx([0.1, 0.01])


# -- training_step ---------------------------------------------------------------------------------

LOSSES = [
    (lambda self, x: None, TypeError, ["None", "NoneType", "automatic_optimization = False"]),
    (lambda self, x: 0.5, TypeError, ["0.5", "float", "tensor of one element"]),
    (lambda self, x: self.layer(x).mean().item(), TypeError, ["float"]),
    (lambda self, x: {"los": self.layer(x).mean()}, TypeError, ["without 'loss'", "['los']"]),
    (lambda self, x: {"loss": 1}, TypeError, ["1 of type int", "under 'loss'"]),
    (lambda self, x: self.layer(x), ValueError, ["(2, 1)", "loss.mean()"]),
    (lambda self, x: self.layer(x).mean().detach(), ValueError, ["without a graph", "detached"]),
    (lambda self, x: torch.zeros(()), ValueError, ["without a graph", "frozen"]),
    (lambda self, x: self.layer(x).mean() * 1j, ValueError, ["torch.complex64", ".real"]),
]


@pytest.mark.parametrize(("loss", "kind", "parts"), LOSSES)
def test_what_training_step_may_not_return(loss, kind, parts):
    def training_step(self, batch, batch_idx):
        return loss(self, batch[0])

    fit_fails(net(training_step=training_step), kind, "training_step returned", *parts)


def test_a_loss_of_one_element_in_any_shape_is_fine():
    def training_step(self, batch, batch_idx):
        return {"loss": self.layer(batch[0]).mean().reshape(1, 1), "more": "text"}

    trainer = make()
    trainer.fit(net(training_step=training_step), loader())
    assert trainer.global_step == 2


def test_negative_items_are_refused():
    module = net(count_items=lambda self, batch: -1)
    fit_fails(module, ValueError, "count_items returned -1", "0 or more")


def test_manual_optimisation_does_not_accumulate():
    fit_fails(
        net(automatic_optimization=False),
        ValueError,
        "gradient_accumulation_steps is 2",
        "manual",
        "pass gradient_accumulation_steps=1",
        gradient_accumulation_steps=2,
    )


def test_manual_backward_belongs_to_manual_optimisation():
    def training_step(self, batch, batch_idx):
        self.manual_backward(self.layer(batch[0]).mean())

    fit_fails(
        net(training_step=training_step),
        RuntimeError,
        "manual_backward",
        "automatic_optimization = False",
    )


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
    text = fit_fails(Net(), ValueError, "training loader gave no batch in epoch 0", train=stream)
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
    text = fit_fails(Net(), ValueError, "read only once", "in epoch 1", **options)
    assert "iterated again" in text


def test_a_limit_that_leaves_nothing_is_named():
    fit_fails(Net(), ValueError, "empty: limit_train_batches is 0", limit_train_batches=0)
    fit_fails(
        Net(), ValueError, "limit_train_batches is 0.1", "2 batches", "0.5", limit_train_batches=0.1
    )


def test_no_data_at_all():
    fails(
        lambda: make().fit(Net()), ValueError, "train_dataloaders", "datamodule", "train_dataloader"
    )
    fails(lambda: make().test(Net()), ValueError, "dataloaders", "from test_dataloader")


def test_data_given_twice():
    class Data:
        def train_dataloader(self):
            return loader()

    fails(
        lambda: make().fit(Net(), loader(), datamodule=Data()),
        ValueError,
        "train_dataloaders or datamodule",
        "not both",
    )


def test_several_training_loaders():
    fit_fails(Net(), ValueError, "2 training loaders", train=[loader(), loader()])


@pytest.mark.parametrize("wrong", [3, torch.nn.Linear(1, 1)], ids=["int", "module"])
def test_what_is_no_loader(wrong):
    text = fit_fails(Net(), TypeError, "DataLoader", "iterable of batches", train=wrong)
    assert type(wrong).__name__ in text


def test_a_distributed_sampler_shares_out_twice():
    data = TensorDataset(torch.ones(4, 2))
    sampler = DistributedSampler(data, num_replicas=2, rank=0)
    fit_fails(
        Net(),
        ValueError,
        "DistributedSampler",
        "Remove it",
        train=DataLoader(data, sampler=sampler),
    )


def test_an_order_of_its_own_cannot_be_switched_off_for_overfitting():
    data = TensorDataset(torch.ones(4, 2))
    weighted = torch.utils.data.WeightedRandomSampler([1.0] * 4, 4)
    fit_fails(
        Net(),
        ValueError,
        "WeightedRandomSampler",
        "overfit_batches",
        "shuffle=False",
        train=DataLoader(data, sampler=weighted, batch_size=2),
        overfit_batches=1,
    )


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
def test_what_cannot_be_logged(args, kwargs, kind, parts):
    def training_step(self, batch, batch_idx):
        self.log(*args, **kwargs)

    fit_fails(net(training_step=training_step), kind, *parts)


def test_one_name_with_two_reductions():
    def training_step(self, batch, batch_idx):
        self.log("x", 1.0)
        self.log("x", 1.0, reduce="sum")

    fit_fails(net(training_step=training_step), ValueError, "'x'", "'mean'", "'sum'", "the same")


def test_log_outside_a_run():
    fails(lambda: Net().log("x", 1.0), RuntimeError, "no trainer", "fit, validate, test or predict")


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


@pytest.mark.parametrize(
    "hook", ["on_boundary", "on_train_epoch_end", "on_validation_epoch_end", "on_train_end"]
)
def test_a_callback_cannot_log_behind_the_reduction(hook):
    """It would be taken for a value of the next epoch, or lost."""

    class Late(Callback):
        pass

    setattr(Late, hook, lambda self, trainer, module: module.log("late", 1.0))
    fit_fails(Net(), MetricError, "log('late')", val=loader(), callbacks=Late())


def test_a_step_value_outside_a_step():
    def on_train_epoch_end(self):
        self.log("x", 1.0, on_step=True)

    module = net(on_train_epoch_end=on_train_epoch_end)
    fit_fails(module, ValueError, "log('x', on_step=True)", "on_epoch=True")


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
    text = fit_fails(
        Net(),
        ValueError,
        "'val/accuracy' was never logged",
        "train/loss_epoch, ",
        "val/loss",
        val=loader(),
        callbacks=watcher(monitor="val/accuracy"),
    )
    assert "accuracy" in text


def test_the_nearest_logged_name_is_offered():
    fit_fails(
        Net(),
        ValueError,
        "'train/loss'",
        "Did you mean 'train/loss_",
        callbacks=ModelCheckpoint(monitor="train/loss"),
    )


# -- checkpoints -----------------------------------------------------------------------------------


def test_a_fresh_run_does_not_mix_with_the_checkpoints_of_another():
    make().fit(Net(), loader())
    fit_fails(
        Net(), ValueError, "run/checkpoints", "another run", "ckpt_path='auto'", "project_dir"
    )
    make(project_dir="another").fit(Net(), loader())
    make(max_epochs=2).fit(Net(), loader(), ckpt_path="auto")


@pytest.mark.parametrize("word", ["auto", "last", "best"])
def test_a_word_for_a_checkpoint_needs_a_folder_to_look_in(word):
    fails(
        lambda: make(project_dir=None).fit(Net(), loader(), ckpt_path=word),
        ValueError,
        f"ckpt_path='{word}'",
        "project_dir",
    )


@pytest.mark.parametrize("entry", ["fit", "validate", "predict"])
@pytest.mark.parametrize("path", [True, 3])
def test_what_is_no_path_of_a_checkpoint(entry, path):
    fails(
        lambda: getattr(make(), entry)(Net(), loader(), ckpt_path=path),
        TypeError,
        f"ckpt_path is {path!r} of type {type(path).__name__}",
        "'auto'",
    )


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
    fails(
        lambda: make().fit(Net(), loader(), ckpt_path="lst"),
        CheckpointError,
        "lst",
        "'auto', 'best', 'last'",
        "Did you mean 'last'",
    )
    text = fails(
        lambda: make().fit(Net(), loader(), ckpt_path="run/checkpoints/step-1"),
        CheckpointError,
        f"no checkpoint at {Path('run/checkpoints/step-1').absolute()}",
    )
    assert "As a word" not in text


def test_a_file_in_place_of_a_checkpoint(tmp_path):
    def begins_with(path):
        make(max_epochs=2).fit(Net(), loader(), ckpt_path=path)

    (tmp_path / "old.ckpt").write_bytes(b"a pickle")
    text = fails(lambda: begins_with("old.ckpt"), CheckpointError, "old.ckpt", "pickles")
    assert "give its folder" not in text
    make().fit(Net(), loader())
    folder = Path("run/checkpoints/step-00000002").absolute()
    fails(lambda: begins_with(f"{folder}/model.safetensors"), CheckpointError, f"folder, {folder}.")


def test_a_checkpoint_of_another_model_names_what_differs():
    make().fit(Net(), loader())

    class Other(Net):
        def __init__(self):
            super().__init__()
            self.head = torch.nn.Linear(1, 1)

    with pytest.raises(CheckpointError, match=r"head\.weight"):
        make().fit(Other(), loader(), ckpt_path="last")


def test_a_checkpoint_with_other_optimizers_says_how_many():
    make().fit(Net(), loader())

    def configure_optimizers(self):
        return tuple(torch.optim.SGD([part], lr=0.1) for part in self.layer.parameters())

    fails(
        lambda: make().fit(
            net(configure_optimizers=configure_optimizers), loader(), ckpt_path="last"
        ),
        CheckpointError,
        "1 optimizers",
        "returned 2",
    )


def test_saving_needs_a_fit():
    fails(
        lambda: make().save_checkpoint("x"), RuntimeError, "save_checkpoint", "before the first fit"
    )


def test_batches_of_a_mapping_are_batches():
    """A list of mappings is one loader of ready batches, whatever kind of mapping they are."""
    batches = [UserDict(x=torch.ones(2, 2))] * 3

    def training_step(self, batch, batch_idx):
        return self.layer(batch["x"]).mean()

    trainer = make()
    trainer.fit(net(training_step=training_step), batches)
    assert trainer.global_step == 3


def test_a_schedule_of_an_optimizer_whose_parameters_no_other_has_is_refused():
    class Wraps(torch.optim.Optimizer):
        def __init__(self, inner):
            self.inner, self.param_groups = inner, inner.param_groups
            self.state, self.defaults = inner.state, inner.defaults

        def step(self, closure=None):
            self.inner.step()

    class WrapsInGroupsOfItsOwn(Wraps):
        def __init__(self, inner):
            self.inner = inner
            torch.optim.Optimizer.__init__(self, inner.param_groups[0]["params"], {})

    def other(self):
        mine = torch.optim.SGD(self.parameters(), lr=0.1)
        others = torch.optim.SGD(torch.nn.Linear(2, 2).parameters(), lr=0.1)
        return [mine], [StepLR(others, 1)]

    def twin(self):
        mine, others = (torch.optim.SGD(self.parameters(), lr=0.1) for _ in range(2))
        return [mine], [StepLR(others, 1)]

    for configure in (other, twin):
        text = "a StepLR of a SGD"
        fit_fails(net(configure_optimizers=configure), ValueError, text, "did not return")

    for wrapper in (Wraps, WrapsInGroupsOfItsOwn):

        def wrapped(self, wrapper=wrapper):
            inner = torch.optim.SGD(self.parameters(), lr=0.1)
            return wrapper(inner), StepLR(inner, 1)

        make(checkpointing=False).fit(net(configure_optimizers=wrapped), loader())


@pytest.mark.parametrize(
    ("data", "parts"),
    [
        ([None], ["train_dataloaders is a list with None in it"]),
        ([None, loader()], ["train_dataloaders is a list with None in it"]),
        (DataModule, ["train_dataloaders is the class DataModule", "DataModule()"]),
        (
            torch.ones(8, 3),
            ["train_dataloaders is a Tensor of shape (8, 3)", "DataLoader(TensorDataset(x, y), "],
        ),
        (np.ones(8), ["train_dataloaders is a ndarray of shape (8,)", "list(...)"]),
    ],
)
def test_places_without_a_loader_are_refused(data, parts):
    fit_fails(net(), TypeError, *parts, train=data)


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
    text = f"{name} is {given!r}, but this home is not known"
    fails(lambda: PATHS[name](given), ValueError, text)


def test_a_folder_may_have_a_name_like_a_home(tmp_path):
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
    warned = f"{hook} of {type(holder).__name__} returned none. Return a loader"
    fails(lambda: getattr(make(), stage)(module, datamodule=data), ValueError, warned)


def test_what_is_no_datamodule_is_refused():
    test = lambda *given, **named: lambda: make().test(net(), *given, **named)
    fails(test(datamodule=DataModule), TypeError, "datamodule is the class DataModule")
    # Lightning's third argument is the checkpoint
    fails(test(loader(), "best"), TypeError, "datamodule is 'best' of type str", "ckpt_path=")
    fails(test(datamodule=net()), ValueError, "test has no data")


@pytest.mark.parametrize(
    ("count", "kind", "part"),
    [
        (None, TypeError, "count_items returned None;"),
        ("3", TypeError, "count_items returned '3';"),
        (torch.ones(2, 3), ValueError, "count_items returned a tensor of shape (2, 3)"),
    ],
)
def test_a_count_that_is_no_number_is_refused(count, kind, part):
    fit_fails(net(count_items=lambda self, batch: count), kind, part)


@pytest.mark.parametrize("steps_at", [None, 0])
def test_a_manual_fit_that_never_steps_is_told(caplog, steps_at):
    def step(self, batch, batch_idx):
        self.manual_backward(self.layer(batch[0]).square().mean())
        if batch_idx == steps_at:
            self.optimizers().step()

    manual = net(training_step=step, automatic_optimization=False)
    make(checkpointing=False, max_epochs=2).fit(manual, loader())
    warned = [text for text in caplog.messages if "made no update in the first epoch" in text]
    assert len(warned) == (1 if steps_at is None else 0)


def test_a_run_without_an_update_cannot_log_at_its_end():
    class Late(Callback):
        def on_train_end(self, trainer, module):
            module.log("late", 1.0)

    fit_fails(Net(), MetricError, "log('late')", callbacks=Late(), max_epochs=0)
