"""Autocast, the gradient scaler, and the float32 that a prepared model returns."""

from __future__ import annotations

import copy
import functools
import pickle
from typing import NamedTuple

import pytest
import torch

from trainer.configuration import AutocastKwargs, GradScalerKwargs
from trainer.optim.optimizer import AcceleratedOptimizer
from trainer.precision import Precision, unwrap_forward

CPU = torch.device("cpu")


def fp16(**kwargs: float) -> Precision:
    return Precision("fp16", CPU, scaler=GradScalerKwargs(**kwargs))


def sgd(value: float = 1.0, lr: float = 0.5) -> torch.optim.SGD:
    return torch.optim.SGD([torch.nn.Parameter(torch.tensor([value]))], lr=lr)


def weight(optimizer: torch.optim.Optimizer) -> torch.nn.Parameter:
    return optimizer.param_groups[0]["params"][0]


def test_unscaling_happens_once_an_update():
    precision, optimizer = fp16(init_scale=1024.0), sgd()
    for _ in range(2):
        optimizer.zero_grad()
        precision.scale(weight(optimizer).sum() * 3).backward()
        precision.unscale(optimizer)
        precision.unscale(optimizer)
        assert weight(optimizer).grad.item() == 3
        assert precision.step(optimizer)
    assert weight(optimizer).item() == 1 - 2 * 0.5 * 3


@pytest.mark.parametrize("clip", [False, True])
def test_two_optimizers_of_one_loss_share_one_scale(clip):
    # The scale grows at every update: it must not do so between the two optimizers.
    precision = fp16(init_scale=4.0, growth_interval=1)
    first, second = sgd(), sgd()
    for expected in (0.5, 0.0):
        first.zero_grad()
        second.zero_grad()
        precision.scale(weight(first).sum() + weight(second).sum()).backward()
        if clip:
            precision.unscale(first)
            precision.unscale(second)
            assert (weight(first).grad.item(), weight(second).grad.item()) == (1, 1)
        assert precision.step(first)
        assert precision.step(second)
        assert (weight(first).item(), weight(second).item()) == (expected, expected)
    assert precision.scale(torch.ones(())).item() == 16


def test_two_optimizers_that_take_turns_are_unscaled_together():
    # As in a GAN where the gradients of both are unscaled before either is clipped.
    precision = fp16(init_scale=4.0)
    first, second = sgd(), sgd()
    for _ in range(2):
        for own in (first, second):
            first.zero_grad()
            second.zero_grad()
            precision.scale(weight(first).sum() + weight(second).sum()).backward()
            precision.unscale(first)
            precision.unscale(second)
            assert weight(own).grad.item() == 1
            assert precision.step(own)
    assert (weight(first).item(), weight(second).item()) == (0, 0)


@pytest.mark.parametrize("unscaled", [False, True])
def test_gradients_that_wait_follow_the_scale(unscaled):
    # The second steps once for two updates of the first, between which the scale changes.
    precision = fp16(init_scale=4.0, growth_factor=4.0, growth_interval=1)
    first, second = sgd(), sgd()
    precision.watch(first)
    precision.watch(second)
    for turn in range(2):
        first.zero_grad()
        precision.scale(weight(first).sum() + weight(second).sum()).backward()
        if unscaled and turn == 0:
            precision.unscale(second)
        assert precision.step(first)
    assert precision.step(second)
    assert (weight(first).item(), weight(second).item()) == (0, 1 - 0.5 * 2)


def test_one_optimizer_may_step_twice_after_one_backward():
    precision, optimizer = fp16(init_scale=4.0), sgd()
    precision.scale(weight(optimizer).sum()).backward()
    precision.unscale(optimizer)
    precision.step(optimizer)
    weight(optimizer).grad.fill_(4.0 * 2)
    precision.step(optimizer)
    assert weight(optimizer).item() == 1 - 0.5 - 0.5 * 2


def test_a_closure_needs_another_precision():
    with pytest.raises(ValueError, match=r"closure .*mixed_precision='fp16'; use 'bf16'"):
        fp16().step(sgd(), lambda: None)


class Output(NamedTuple):
    logits: torch.Tensor
    ids: torch.Tensor


class Model(torch.nn.Linear):
    def forward(self, x, *, extra=0):
        logits = super().forward(x) + extra
        self.seen = logits.dtype
        return {"out": Output(logits, torch.arange(2)), "name": "m"}


def test_a_wrapped_model_computes_narrow_and_returns_float32():
    model = Model(2, 2)
    Precision("bf16", CPU).wrap_forward(model)
    output = model(torch.ones(1, 2), extra=1)
    assert model.seen == torch.bfloat16
    assert output["out"].logits.dtype == torch.float32
    assert output["out"].ids.dtype == torch.int64
    assert output["name"] == "m"
    output["out"].logits.sum().backward()
    assert model.weight.grad.dtype == torch.float32


def test_a_copy_of_a_wrapped_model_computes_with_its_own_weights():
    model = Model(2, 2)
    Precision("bf16", CPU).wrap_forward(model)
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.weight.zero_()
        other.bias.zero_()
    assert other(torch.ones(1, 2))["out"].logits.count_nonzero() == 0
    assert other.seen == torch.bfloat16
    assert model(torch.ones(1, 2))["out"].logits.count_nonzero() > 0


def test_a_pickled_model_computes_in_full_precision():
    model = torch.nn.Linear(2, 2)
    Precision("bf16", CPU).wrap_forward(model)
    x = torch.ones(1, 2)
    plain = torch.nn.functional.linear(x, model.weight, model.bias)
    assert not torch.equal(model(x), plain)
    assert torch.equal(pickle.loads(pickle.dumps(model))(x), plain)


@pytest.mark.parametrize("again", ["no", "fp16"])
def test_wrapping_again_replaces_the_wrapper(again):
    model = Model(2, 2)
    Precision("bf16", CPU).wrap_forward(model)
    Precision(again, CPU).wrap_forward(model)
    model(torch.ones(1, 2))
    assert model.seen == {"no": torch.float32, "fp16": torch.float16}[again]
    unwrap_forward(model)
    model(torch.ones(1, 2))
    assert model.seen == torch.float32
    assert not {"forward", "_original_forward"} & vars(model).keys()
    unwrap_forward(model)  # nothing is left to unwrap


class Static(torch.nn.Linear):
    @staticmethod
    def forward(x, k=2):
        return x.to(torch.bfloat16) * k


class WithTheForwardOfAnother(torch.nn.Linear):
    def __init__(self, other):
        super().__init__(2, 2)
        self.other = other
        self.forward = other.forward


def with_a_forward(make):
    model = torch.nn.Linear(2, 2)
    model.forward = make(model)
    return model


MODELS = {
    "own": lambda: torch.nn.Linear(2, 2),
    "of another": lambda: WithTheForwardOfAnother(torch.nn.Sequential(torch.nn.Linear(2, 2))),
    "function": lambda: with_a_forward(lambda model: lambda x, *, k=3: x.to(torch.bfloat16) * k),
    "builtin": lambda: with_a_forward(lambda model: torch.relu),
    "partial": lambda: with_a_forward(lambda model: functools.partial(type(model).forward, model)),
    "static": lambda: Static(2, 2),
    "script": lambda: torch.jit.script(torch.nn.Linear(2, 2)),
}


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*is deprecated")
@pytest.mark.parametrize("kind", MODELS)
def test_any_forward_is_wrapped_and_restored(kind):
    precision, model, x = Precision("bf16", CPU), MODELS[kind](), torch.randn(3, 2)
    with precision.autocast():
        expected = model(x).float()
    before = vars(model).get("forward")
    precision.wrap_forward(model)
    output = model(x)
    assert output.dtype == torch.float32
    assert torch.equal(output, expected)
    unwrap_forward(model)
    assert vars(model).get("forward") is before
    assert "_original_forward" not in vars(model)


@pytest.mark.parametrize(("mode", "other"), [("fp16", "'bf16' or 'no'"), ("bf16", "'no'")])
def test_a_device_that_cannot_compute_in_the_mode_is_refused(mode, other):
    with pytest.raises(ValueError, match=f"mixed_precision='{mode}' cannot be used on meta: .*"):
        Precision(mode, torch.device("meta"))
    with pytest.raises(ValueError, match=f"Use {other} there"):
        Precision(mode, torch.device("meta"))
    assert Precision("no", torch.device("meta")).scaler is None


def test_full_precision_can_be_asked_for_within_anothers_autocast():
    x = torch.ones(2, 2)
    precision = Precision("no", CPU)
    with torch.autocast("cpu", torch.bfloat16):
        with precision.autocast():
            assert (x @ x).dtype == torch.bfloat16
        with precision.autocast(AutocastKwargs(enabled=False)):
            assert (x @ x).dtype == torch.float32
        assert (x @ x).dtype == torch.bfloat16
    with Precision("no", torch.device("meta")).autocast(AutocastKwargs(enabled=False)):
        assert (x @ x).dtype == torch.float32


def test_a_scaler_that_is_off_scales_nothing_and_takes_a_closure():
    precision, optimizer = fp16(enabled=False), sgd()
    assert precision.scale(torch.ones(())).item() == 1

    def closure():
        optimizer.zero_grad()
        precision.scale(weight(optimizer).sum() * 3).backward()

    assert not precision.scales
    AcceleratedOptimizer(optimizer, precision=precision).step(closure)
    precision.unscale(optimizer)
    assert weight(optimizer).grad.item() == 3
    assert weight(optimizer).item() == 1 - 0.5 * 3
    assert precision.state_dict() == {}
    precision.load_state_dict({"scale": 4.0})
