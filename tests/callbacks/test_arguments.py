"""Wrong arguments of callbacks and of the Trainer's methods: the error says which are right."""

import inspect
import re
from pathlib import Path

import pytest
import torch

import callbacks
from callbacks import (
    BackboneFinetuning,
    EarlyStopping,
    GarbageCollection,
    GradientNormMonitor,
    LearningRateMonitor,
    MemorySnapshot,
    ModelCheckpoint,
    ModelPruning,
    ModelSummary,
    OnExceptionCheckpoint,
    PredictionWriter,
    Profiler,
    ProgressBar,
    RichProgressBar,
    SlowRankDetector,
    SpikeDetection,
    StochasticWeightAveraging,
    ThroughputMonitor,
    WeightAveraging,
)
from trainer import Accelerator, Trainer
from trainer.configuration import (
    DataLoaderConfiguration,
    DistributedDataParallelKwargs,
    ProjectConfiguration,
    TorchDynamoPlugin,
)

NAN, INFINITY = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("call", "given", "message"),
    [
        (ModelCheckpoint, {"every_n_epochs": 1}, "'every_n_epochs'; use every=\"2 epochs\"."),
        (PredictionWriter, {"output_dir": "x"}, "'output_dir'; use dirpath."),
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
        (
            Trainer(barebones=True).test,
            {"ckpt": "best"},
            "Trainer.test has no argument 'ckpt'. Did you mean 'ckpt_path'?",
        ),
        (
            Trainer(barebones=True).fit,
            {"s": 1},
            "Trainer.fit has no argument 's'; it has module, train_dataloaders, val_dataloaders, "
            "datamodule, ckpt_path, model.",
        ),
        (
            Trainer(barebones=True).fit,
            {"ckpt": "auto", "val_dataloader": 1, "dataloaders": 1, "epochs": 3},
            "Trainer.fit has no argument 'ckpt'. Did you mean 'ckpt_path'?\n"
            "Trainer.fit has no argument 'val_dataloader'. Did you mean 'val_dataloaders'?\n"
            "Trainer.fit has no argument 'dataloaders'; use train_dataloaders.\n"
            "Trainer.fit has no argument 'epochs'; it has module, train_dataloaders, "
            "val_dataloaders, datamodule, ckpt_path, model.",
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
            WeightAveraging,
            {"avg_fn": max},
            "WeightAveraging has no argument 'avg_fn'; leave it out: the average is decay *",
        ),
        (ThroughputMonitor, {"batch_size_fn": len}, "leave it out: samples are counted"),
        (RichProgressBar, {"leave": True}, "has no argument 'leave'; leave it out: the"),
        (TorchDynamoPlugin, {"backnd": "eager"}, "no argument 'backnd'. Did you mean 'backend'?"),
    ],
)
def test_unknown_arguments_name_the_right_one(call, given, message):
    with pytest.raises(TypeError) as caught:
        call(**given)
    assert message in str(caught.value)


def test_a_subclass_names_the_class_that_has_the_argument():
    class Patient(EarlyStopping):
        def __init__(self, **kwargs):
            super().__init__("x", **kwargs)

    assert Patient(patience=7).patience == 7
    with pytest.raises(TypeError, match=r"EarlyStopping has no argument .patient.\. Did you mean"):
        Patient(patient=7)


def required_by(kind):
    """Values of the arguments that have no default."""
    values = {"monitor": "loss", "swa_lrs": 0.1, "scheduling": {0: 1}}
    values |= {"pruning_fn": "l1_unstructured"}
    parameters = inspect.signature(kind).parameters.values()
    return {p.name: values[p.name] for p in parameters if p.name in values and p.default is p.empty}


def arguments_of_type(*types):
    """All callbacks' arguments that may be of one of the types."""
    for name in callbacks.__all__:
        kind = getattr(callbacks, name)
        if issubclass(kind, callbacks.Callback):
            for each in inspect.signature(kind).parameters.values():
                if str(each.annotation).removesuffix(" | None") in types:
                    yield pytest.param(kind, each.name, id=f"{name}-{each.name}")


@pytest.mark.parametrize(("kind", "name"), [*arguments_of_type("int", "float", "int | float")])
def test_number_arguments_refuse_strings(kind, name):
    with pytest.raises((TypeError, ValueError), match=f"{name}.*'3'.*must be|{name} must be.*'3'"):
        kind(**(required_by(kind) | {name: "3"}))


# What each constructor refuses, whatever else is right.
REFUSED = [
    (BackboneFinetuning, "unfreeze_backbone_at_epoch", -1),
    (BackboneFinetuning, "unfreeze_backbone_at_epoch", 1.5),
    (BackboneFinetuning, "backbone_initial_ratio_lr", 0.0),
    (BackboneFinetuning, "backbone_initial_ratio_lr", None),
    (BackboneFinetuning, "backbone_initial_lr", NAN),
    (BackboneFinetuning, "lambda_func", 2.0),
    (EarlyStopping, "mode", "auto"),
    (EarlyStopping, "patience", -1),
    (EarlyStopping, "patience", INFINITY),
    (EarlyStopping, "min_delta", -1),
    (EarlyStopping, "stopping_threshold", NAN),
    (GarbageCollection, "generation", 3),
    (GarbageCollection, "every", "5 stpes"),
    (GradientNormMonitor, "per", "layer"),
    (GradientNormMonitor, "depth", 0),
    (GradientNormMonitor, "norm_type", 0),
    (MemorySnapshot, "skip_steps", -1),
    (MemorySnapshot, "steps", 0),
    (MemorySnapshot, "max_entries", 0),
    (ModelCheckpoint, "every", "five"),
    (ModelCheckpoint, "mode", "auto"),
    (ModelCheckpoint, "save_top_k", -2),
    (ModelCheckpoint, "save_top_k", 0.5),
    (ModelCheckpoint, "save_top_k", "2"),
    (ModelCheckpoint, "save_last", -1),
    (ModelCheckpoint, "save_last", NAN),
    (ModelCheckpoint, "on_save_error", "ignore"),
    (ModelPruning, "pruning_fn", "l2"),
    (ModelPruning, "verbose", -1),
    (ModelSummary, "max_depth", -2),
    (PredictionWriter, "write_interval", "step"),
    (Profiler, "wait", -1),
    (Profiler, "warmup", 0),
    (Profiler, "active", 0),
    (Profiler, "repeat", 0),
    (Profiler, "top_operators", 0),
    (ProgressBar, "refresh_rate", -1),
    (RichProgressBar, "refresh_rate", -1),
    (SlowRankDetector, "threshold", 0.5),
    (SlowRankDetector, "min_share", 1.5),
    (SlowRankDetector, "patience", 0),
    (SpikeDetection, "mode", "auto"),
    (SpikeDetection, "window", 0),
    (SpikeDetection, "warmup", 51),
    (SpikeDetection, "patience", 0),
    (SpikeDetection, "deviations", -1),
    (SpikeDetection, "rtol", NAN),
    (SpikeDetection, "action", "raise"),
    (StochasticWeightAveraging, "swa_lrs", 0.0),
    (StochasticWeightAveraging, "swa_epoch_start", 0),
    (StochasticWeightAveraging, "swa_epoch_start", 1.5),
    (StochasticWeightAveraging, "annealing_epochs", -1),
    (StochasticWeightAveraging, "annealing_strategy", "exp"),
    (ThroughputMonitor, "window_size", 0),
    (ThroughputMonitor, "flops_per_batch", -1),
    (ThroughputMonitor, "peak_flops", 0),
    (WeightAveraging, "decay", 1.5),
    (WeightAveraging, "update_every_n_steps", 0),
    (WeightAveraging, "update_starting_at_step", -1),
    (WeightAveraging, "update_starting_at_epoch", 0.5),
    (WeightAveraging, "final_weights", "both"),
]


@pytest.mark.parametrize(("kind", "name", "value"), REFUSED)
def test_invalid_values_are_refused_by_the_constructor(kind, name, value):
    with pytest.raises((TypeError, ValueError), match=f"{name}.*{re.escape(repr(value))}"):
        kind(**(required_by(kind) | {name: value}))


@pytest.mark.parametrize(
    "kind",
    [ModelCheckpoint, OnExceptionCheckpoint, MemorySnapshot, PredictionWriter, Profiler],
)
def test_folders_expand_the_home_directory(kind, monkeypatch):
    monkeypatch.setenv("HOME", "/somewhere")
    assert kind(dirpath="~/x").dirpath == Path("/somewhere/x")


def test_invalid_combinations_and_lists_are_refused():
    with pytest.raises(ValueError, match="checkpointing=False"):
        ModelCheckpoint(save_top_k=0, save_last=False)
    with pytest.raises(ValueError, match="at least one"):
        SpikeDetection("loss", deviations=0, rtol=0)
    with pytest.raises(ValueError, match="needs pruning_dim"):
        ModelPruning("random_structured", use_global_unstructured=False)
    with pytest.raises(ValueError, match="parameter_names is 'w'; it must be"):
        ModelPruning("l1_unstructured", parameter_names=["w"])
    with pytest.raises(ValueError, match="is structured"):
        ModelPruning(torch.nn.utils.prune.RandomStructured)
    with pytest.raises(ValueError, match="swa_lrs is -1; it must be"):
        StochasticWeightAveraging([0.1, -1])


def test_the_order_of_a_norm_may_be_written_as_text():
    assert callbacks.GradientNormMonitor(norm_type="inf").norm_type == float("inf")


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda a, p: a.clip_grad_norm_(p, None), TypeError, "max_norm is None; it must be a num"),
        (lambda a, p: a.clip_grad_norm_(p, NAN), ValueError, "max_norm is nan; it must be a num"),
        (lambda a, p: a.clip_grad_norm_(p, 1, "two"), TypeError, "norm_type is 'two'; it must be"),
        (lambda a, p: a.clip_grad_value_(p, -1.0), ValueError, "clip_value is -1.0; it must be 0"),
    ],
)
def test_clipping_refuses_invalid_limits(call, error, message):
    parameter = torch.nn.Parameter(torch.ones(2))
    parameter.grad = torch.full((2,), 3.0)
    with pytest.raises(error, match=re.escape(message)):
        call(Accelerator(cpu=True), [parameter])
    assert parameter.grad.tolist() == [3.0, 3.0]


@pytest.mark.parametrize("steps", [0, "2", True])
def test_errors_name_gradient_accumulation_steps(steps):
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
    with pytest.raises(TypeError, match=r"callbacks contains 'E'|kwargs_handlers is 'five'"):
        call()


def test_load_state_refuses_a_file(tmp_path):
    (tmp_path / "state").write_text("")
    with pytest.raises(ValueError, match="is a file; give the path of a folder"):
        Accelerator(cpu=True).load_state(tmp_path / "state")
