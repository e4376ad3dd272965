"""An optimizer's state comes back in the precision that it was saved in."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from tests.numerics.running import assert_same
from trainer.optim.state import load_state, place_state

BF16 = torch.bfloat16


class Careful(torch.optim.Optimizer):
    """Keeps its state in float32 (and some of it in lists, or as integers) beside any weights."""

    def __init__(self, parameters: Any, lr: float = 0.1) -> None:
        super().__init__(parameters, {"lr": lr})

    def step(self, closure: Any = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            if not state:
                state["mean"] = torch.zeros_like(parameter, dtype=torch.float32)
                state["past"] = {"all": [], "pair": (torch.zeros(3), 2)}
                state["code"] = torch.zeros(2, dtype=torch.uint8)
                state["count"] = 0
            state["mean"].lerp_(parameter.grad.float(), 0.1)
            state["past"]["all"].append(parameter.grad.float() / 3)
            state["code"] += 1
            state["count"] += 1
            with torch.no_grad():
                parameter.sub_(self.param_groups[0]["lr"] * state["mean"].to(parameter.dtype))


OPTIMIZERS = {
    "careful": Careful,
    "NAdam": lambda parameters: torch.optim.NAdam(parameters, lr=0.1),
    "ASGD": lambda parameters: torch.optim.ASGD(parameters, lr=0.1, t0=1),
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=0.1),
    "fused": lambda parameters: torch.optim.AdamW(parameters, lr=0.1, fused=True),
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
}


def step(optimizer: Any, parameter: nn.Parameter, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    parameter.grad = torch.randn(3, generator=generator).to(parameter.dtype)
    optimizer.step()


@pytest.mark.parametrize("dtype", [torch.float32, BF16, torch.float64])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_loading_restores_the_exact_state(name, dtype):
    one = nn.Parameter(torch.tensor([1.0, -2.0, 3.0], dtype=dtype))
    whole = OPTIMIZERS[name]([one])
    for seed in range(4):
        step(whole, one, seed)
    saved = copy.deepcopy(whole.state_dict())
    other = nn.Parameter(one.detach().clone())
    resumed = OPTIMIZERS[name]([other])
    load_state(resumed, copy.deepcopy(saved))
    assert_same(resumed.state_dict(), saved)  # types too
    for seed in range(4, 8):
        step(whole, one, seed)
        step(resumed, other, seed)
    assert_same(other, one)
    assert_same(resumed.state_dict(), whole.state_dict())


def test_torch_alone_would_round_it():
    """What all this is for; if torch ever keeps it, `load_state` may go."""
    parameter = nn.Parameter(torch.ones(3, dtype=BF16))
    optimizer = Careful([parameter])
    step(optimizer, parameter, 0)
    saved = copy.deepcopy(optimizer.state_dict())
    optimizer.load_state_dict(saved)
    assert optimizer.state[parameter]["mean"].dtype == BF16


@pytest.mark.parametrize(("before", "now"), [(torch.float32, BF16), (BF16, torch.float32)])
@pytest.mark.parametrize("name", ["AdamW", "fused", "SGD"])
def test_state_of_the_weights_own_type_follows_them_to_another(name, before, now):
    one = nn.Parameter(torch.ones(3, dtype=before))
    optimizer = OPTIMIZERS[name]([one])
    step(optimizer, one, 0)
    other = nn.Parameter(one.detach().to(now))
    resumed = OPTIMIZERS[name]([other])
    load_state(resumed, copy.deepcopy(optimizer.state_dict()), {id(other): before})
    types = {key: value.dtype for key, value in resumed.state[other].items()}
    assert types.pop("step", torch.float32) == torch.float32
    assert set(types.values()) == {now}
    step(resumed, other, 1)  # torch's own need one type for all


def test_a_count_of_steps_that_lives_on_the_device_is_placed_as_torch_places_it():
    parameter = nn.Parameter(torch.ones(3, dtype=BF16))
    optimizer = torch.optim.Adam([parameter], capturable=True)
    state = {"step": torch.tensor(5.0), "exp_avg": torch.ones(3), "exp_avg_sq": torch.ones(3)}
    groups = optimizer.state_dict()["param_groups"]
    load_state(optimizer, {"state": {0: state}, "param_groups": groups})
    found = optimizer.state[parameter]
    assert found["step"].item() == 5.0
    assert {value.dtype for value in found.values()} == {torch.float32}
    assert {value.device for value in found.values()} == {parameter.device}


def test_state_is_placed_in_its_own_precision():
    parameter = nn.Parameter(torch.ones(3, dtype=BF16, device="meta"))
    optimizer = Careful([parameter])
    optimizer.state[parameter] = {"mean": torch.ones(3), "rounded": torch.ones(3, dtype=BF16)}
    place_state(optimizer)
    found = {
        key: (value.device.type, value.dtype) for key, value in optimizer.state[parameter].items()
    }
    assert found == {"mean": ("meta", torch.float32), "rounded": ("meta", BF16)}


def test_other_optimizers_get_their_state():
    class Odd:
        def load_state_dict(self, state: Any) -> None:
            self.state = state

    odd = Odd()
    load_state(odd, [1, 2])
    assert odd.state == [1, 2]
