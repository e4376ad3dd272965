"""Configurations validate themselves; enumerations are their values."""

from __future__ import annotations

import inspect
from datetime import timedelta

import pytest
import torch

from trainer.configuration import (
    AutocastKwargs,
    DataLoaderConfiguration,
    DistributedDataParallelKwargs,
    DistributedType,
    GradientAccumulationPlugin,
    GradScalerKwargs,
    InitProcessGroupKwargs,
    PrecisionType,
    SchedulerTick,
)
from trainer.errors import choose

HANDLERS = [
    AutocastKwargs,
    DistributedDataParallelKwargs,
    GradScalerKwargs,
    InitProcessGroupKwargs,
]
CONFIGURATIONS = [
    *HANDLERS,
    DataLoaderConfiguration,
    GradientAccumulationPlugin,
]


def test_choices_compare_and_print_as_their_values():
    assert PrecisionType.BF16 == "bf16"
    assert f"{DistributedType.MULTI_CPU}" == "MULTI_CPU"
    assert PrecisionType.list() == ["no", "fp16", "bf16"]
    assert {PrecisionType.NO: 1}["no"] == 1


def test_choices_are_parsed_from_values_and_members():
    assert SchedulerTick.parse("update", "tick") == "update"
    assert SchedulerTick.parse(SchedulerTick.PROCESS, "tick") == "process"


@pytest.mark.parametrize("value", ["updates", None, 1])
def test_a_value_outside_its_choices_gives_them(value):
    with pytest.raises(ValueError, match=rf"tick is {value!r}; .* 'process', 'update'"):
        SchedulerTick.parse(value, "tick")


def test_a_near_miss_is_named_and_a_far_one_is_not():
    assert choose("x", "stpe", ["step", "epoch"]).endswith("Did you mean 'step'?")
    assert choose("x", "zzz", ["step", "epoch"]) == "x is 'zzz'; it must be one of 'epoch', 'step'."


@pytest.mark.parametrize("kind", CONFIGURATIONS)
def test_configurations_take_keywords_only(kind):
    kinds = {parameter.kind for parameter in inspect.signature(kind).parameters.values()}
    assert kinds == {inspect.Parameter.KEYWORD_ONLY}


def test_loaders_are_shared_out_evenly_by_default():
    assert DataLoaderConfiguration() == DataLoaderConfiguration(
        even_batches=True, non_blocking=False
    )


@pytest.mark.parametrize("steps", [0, -3])
def test_a_window_without_a_batch_is_refused(steps):
    with pytest.raises(ValueError, match=f"num_steps is {steps}; it must be at least 1"):
        GradientAccumulationPlugin(num_steps=steps)


@pytest.mark.parametrize("steps", [2.0, "2", True, None])
def test_a_window_that_is_no_number_is_refused(steps):
    with pytest.raises(TypeError, match=r"num_steps is .*; it must be an int"):
        GradientAccumulationPlugin(num_steps=steps)


@pytest.mark.parametrize("kind", HANDLERS)
def test_handlers_pass_nothing_on_by_default(kind):
    assert kind().to_kwargs() == {}


def test_handlers_pass_on_what_differs_from_the_defaults():
    assert AutocastKwargs(enabled=False).to_kwargs() == {"enabled": False}
    assert GradScalerKwargs(init_scale=8.0, growth_factor=2.0).to_kwargs() == {"init_scale": 8.0}
    limit = timedelta(seconds=5)
    assert InitProcessGroupKwargs(timeout=limit).to_kwargs() == {"timeout": limit}


@pytest.mark.parametrize(
    ("kind", "target"),
    [
        (AutocastKwargs, torch.autocast),
        (GradScalerKwargs, torch.amp.GradScaler),
    ],
)
def test_defaults_left_out_are_those_of_torch(kind, target):
    # What equals its default is not passed on, so the two defaults must agree.
    theirs = inspect.signature(target.__init__).parameters
    for name, parameter in inspect.signature(kind).parameters.items():
        assert parameter.default == theirs[name].default, name
