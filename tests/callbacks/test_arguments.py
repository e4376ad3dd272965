"""Wrong arguments of callbacks and of the Trainer's methods: the error says which are right."""

import inspect
import re

import pytest
import torch

import callbacks
from callbacks import EarlyStopping, LearningRateMonitor, ModelCheckpoint
from trainer import Accelerator, Trainer
from trainer.configuration import (
    DataLoaderConfiguration,
    DistributedDataParallelKwargs,
    ProjectConfiguration,
)
from trainer.plugins import TorchDynamoPlugin


@pytest.mark.parametrize(
    ("call", "given", "message"),
    [
        (ModelCheckpoint, {"every_n_epochs": 1}, "'every_n_epochs'; use every=\"2 epochs\"."),
        (
            ModelCheckpoint,
            {"save_topk": 1, "save_on_train_epoch_end": True},
            "ModelCheckpoint has no argument 'save_topk'. Did you mean 'save_top_k'?\n"
            "ModelCheckpoint has no argument 'save_on_train_epoch_end'; leave it out: saves follow "
            "validation.",
        ),
        (EarlyStopping, {"monitor": "x", "strict": True}, "leave it out: a metric that is never"),
        (LearningRateMonitor, {"logging_interval": "step"}, "as often as the Trainer's log_every."),
        (
            LearningRateMonitor,
            {"nothing": 1},
            "no argument 'nothing'; it has log_momentum, log_weight_decay.",
        ),
        (
            Trainer(barebones=True).test,
            {"val_loader": 1},
            "Trainer.test has no argument 'val_loader'; use dataloaders.",
        ),
        (Accelerator, {"fp16": True}, "Accelerator has no argument 'fp16'; use mixed_precision="),
        (Accelerator, {"gradient_acumulation_steps": 2}, "mean 'gradient_accumulation_steps'?"),
        (
            DataLoaderConfiguration,
            {"split_batch": True},
            "DataLoaderConfiguration has no argument 'split_batch'. Did you mean 'split_batches'?",
        ),
        (DistributedDataParallelKwargs, {"comm_hok": "fp16"}, "Did you mean 'comm_hook'?"),
        (ProjectConfiguration, {"folder": "runs"}, "it has project_dir, logging_dir, automatic_"),
        (
            callbacks.WeightAveraging,
            {"avg_fn": max},
            "WeightAveraging has no argument 'avg_fn'; leave it out: the average is decay *",
        ),
        (callbacks.ThroughputMonitor, {"batch_size_fn": len}, "leave it out: samples are counted"),
        (callbacks.RichProgressBar, {"leave": True}, "has no argument 'leave'; leave it out: the"),
        (TorchDynamoPlugin, {"backnd": "eager"}, "no argument 'backnd'. Did you mean 'backend'?"),
    ],
)
def test_the_error_says_what_to_write(call, given, message):
    with pytest.raises(TypeError) as caught:
        call(**given)
    assert message in str(caught.value)


def test_a_class_of_the_users_own_is_told_of_its_base():
    class Patient(EarlyStopping):
        def __init__(self, **kwargs):
            super().__init__("x", **kwargs)

    assert Patient(patience=7).patience == 7
    with pytest.raises(TypeError, match=r"EarlyStopping has no argument .patient.\. Did you mean"):
        Patient(patient=7)


def test_signatures_stay():
    assert [*inspect.signature(Trainer.fit).parameters][:2] == ["self", "module"]
    assert inspect.signature(EarlyStopping).parameters["patience"].default == 3


def arguments_of_type(*types):
    """All callbacks' arguments that may be of one of the types, with what the class requires."""
    required = {"monitor": "loss", "swa_lrs": 0.1, "scheduling": {0: 1}}
    for name in callbacks.__all__:
        kind = getattr(callbacks, name)
        if not issubclass(kind, callbacks.Callback):
            continue
        parameters = inspect.signature(kind).parameters.values()
        needed = {each.name: required[each.name] for each in parameters if each.name in required}
        needed.pop("monitor", None) if kind is ModelCheckpoint else None
        for each in parameters:
            if str(each.annotation).removesuffix(" | None") in types:
                yield pytest.param(kind, each.name, needed, id=f"{name}-{each.name}")


@pytest.mark.parametrize(
    ("kind", "name", "needed"), [*arguments_of_type("int", "float", "int | float")]
)
def test_number_arguments_refuse_strings(kind, name, needed):
    with pytest.raises((TypeError, ValueError), match=f"{name}.*'3'.*must be|{name} must be.*'3'"):
        kind(**needed, **{name: "3"})


NAN = float("nan")


@pytest.mark.parametrize(
    ("kind", "given", "error", "message"),
    [
        (EarlyStopping, {"monitor": "x", "stopping_threshold": NAN}, ValueError, "is nan; it must"),
        (ModelCheckpoint, {"every": "five"}, ValueError, "every: An interval is a number and"),
        (ModelCheckpoint, {"save_top_k": "2"}, TypeError, "save_top_k is '2'; it must be a whole"),
        (callbacks.GarbageCollection, {"every": "five"}, ValueError, "every: An interval is"),
        (callbacks.ModelSummary, {"max_depth": -2}, ValueError, "max_depth is -2; it must be a"),
        (callbacks.PredictionWriter, {"output_dir": "x"}, TypeError, "'output_dir'; use dirpath."),
        (
            callbacks.BackboneFinetuning,
            {"backbone_initial_ratio_lr": None},
            TypeError,
            "backbone_initial_ratio_lr is None; it must be a number above 0.",
        ),
    ],
)
def test_invalid_values_are_refused_by_the_constructor(kind, given, error, message):
    with pytest.raises(error, match=re.escape(message)):
        kind(**given)


def test_the_order_of_a_norm_may_be_written_as_text():
    assert callbacks.GradientNormMonitor(norm_type="inf").norm_type == float("inf")


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda a, p: a.clip_grad_norm_(p, None), TypeError, "max_norm is None; it must be a num"),
        (lambda a, p: a.clip_grad_norm_(p, -1.0), ValueError, "max_norm is -1.0; it must be 0 or"),
        (lambda a, p: a.clip_grad_norm_(p, NAN), ValueError, "max_norm is nan; it must be a num"),
        (lambda a, p: a.clip_grad_norm_(p, "1"), TypeError, "max_norm is '1'; it must be a number"),
        (lambda a, p: a.clip_grad_norm_(p, 1, "two"), TypeError, "norm_type is 'two'; it must be"),
        (lambda a, p: a.clip_grad_value_(p, -1.0), ValueError, "clip_value is -1.0; it must be 0"),
        (lambda a, p: a.clip_grad_value_(p, None), TypeError, "clip_value is None; it must be a"),
    ],
)
def test_what_gradients_cannot_be_clipped_to_is_refused(call, error, message):
    parameter = torch.nn.Parameter(torch.ones(2))
    parameter.grad = torch.full((2,), 3.0)
    with pytest.raises(error, match=re.escape(message)):
        call(Accelerator(cpu=True), [parameter])
    assert parameter.grad.tolist() == [3.0, 3.0]


def test_gradients_are_clipped_by_the_largest():
    parameter = torch.nn.Parameter(torch.ones(2))
    parameter.grad = torch.tensor([3.0, 4.0])
    assert Accelerator(cpu=True).clip_grad_norm_([parameter], 2, "inf") == 4.0
    assert parameter.grad.tolist() == pytest.approx([1.5, 2.0])


@pytest.mark.parametrize("steps", [0, "2", True])
def test_micro_batches_are_refused_under_the_name_that_was_written(steps):
    with pytest.raises((TypeError, ValueError), match=r"^gradient_accumulation_steps is"):
        Accelerator(cpu=True, gradient_accumulation_steps=steps)


@pytest.mark.parametrize(
    "call",
    [
        lambda: Trainer(callbacks="EarlyStopping"),
        lambda: Accelerator(cpu=True, kwargs_handlers="five"),
    ],
)
def test_a_string_is_not_taken_for_a_list(call):
    with pytest.raises(TypeError, match=r"callbacks holds 'E'|kwargs_handlers is 'five'"):
        call()


def test_a_file_is_no_folder_to_load(tmp_path):
    (tmp_path / "state").write_text("")
    with pytest.raises(ValueError, match="is a file; give the path of a folder"):
        Accelerator(cpu=True).load_state(tmp_path / "state")
