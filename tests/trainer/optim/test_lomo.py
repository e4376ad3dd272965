"""LOMO optimizers: what is refused without the package; with it, plain SGD as the reference."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.helpers.engines import prepare
from tests.helpers.ranks import RankError
from trainer.configuration import GradientAccumulationPlugin
from trainer.optim.lomo import is_lomo, lomo_backward
from trainer.optim.optimizer import AcceleratedOptimizer
from trainer.precision import Precision
from trainer.state import GradientState, PartialState

CPU = torch.device("cpu")
needs_lomo = pytest.mark.skipif(
    importlib.util.find_spec("lomo_optim") is None,
    reason="needs lomo-optim: pip install 'cadence-trainer[lomo]'",
)


def network() -> nn.Module:
    generator = torch.Generator().manual_seed(3)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return model


def rows(rank: int, number: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * rank + number)
    return torch.randn(2, 3, generator=generator)


def lomo(model: nn.Module, mode: str = "no", **kwargs: Any) -> AcceleratedOptimizer:
    from lomo_optim import Lomo

    return AcceleratedOptimizer(Lomo(model, **kwargs), precision=Precision(mode, CPU))


def plain() -> AcceleratedOptimizer:
    sgd = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    return AcceleratedOptimizer(sgd, precision=Precision("no", CPU))


def reference(world_size: int, **kwargs: Any) -> list[torch.Tensor]:
    """Plain gradient descent on the batches of all ranks, at a rate of its own each update."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, **kwargs)
    for number in range(3):
        optimizer.param_groups[0]["lr"] = 0.1 / (1 + number)
        optimizer.zero_grad()
        for rank in range(world_size):
            (model(rows(rank, number)).square().mean() / world_size).backward()
        optimizer.step()
    return [p.detach() for p in model.parameters()]


def train(model: nn.Module, optimizer: AcceleratedOptimizer, rank: int = 0) -> None:
    for number in range(3):
        loss = model(rows(rank, number)).square().mean()
        lomo_backward(loss, 0.1 / (1 + number), [plain(), optimizer])
        optimizer.step()
        optimizer.zero_grad()


def test_a_learning_rate_is_asked_for_first():
    with pytest.raises(ValueError, match=r"Pass a learning rate .*learning_rate=1e-3"):
        lomo_backward(torch.ones(()), None, [])


@needs_lomo
def test_an_optimizer_is_known_prepared_or_not():
    from lomo_optim import Lomo

    class Own(Lomo):
        pass

    assert is_lomo(Lomo(network()))
    assert is_lomo(lomo(network()))
    assert is_lomo(Own(network()))
    assert not is_lomo(plain())
    assert not is_lomo(plain().optimizer)


@needs_lomo
def test_its_updates_are_those_of_gradient_descent():
    model = network()
    optimizer = lomo(model)
    train(model, optimizer)
    torch.testing.assert_close(list(model.parameters()), reference(1), rtol=1e-6, atol=1e-7)
    assert all(p.grad is None for p in model.parameters())
    assert optimizer.steps == 3
    assert not optimizer.step_was_skipped


@needs_lomo
def test_options_of_its_own_are_kept():
    model, straight = network(), network()
    optimizer = lomo(model, clip_grad_value=0.01)
    before = [p.detach().clone() for p in model.parameters()]
    lomo_backward(model(rows(0, 0)).square().mean(), 0.1, [optimizer])
    straight(rows(0, 0)).square().mean().backward()
    for old, new, other in zip(before, model.parameters(), straight.parameters(), strict=True):
        expected = old - 0.1 * other.grad.clamp(-0.01, 0.01)
        torch.testing.assert_close(new.detach(), expected)


@needs_lomo
@pytest.mark.parametrize("size", [2, 4])
def test_several_processes_update_with_the_gradient_of_all_batches(ranks, size):
    def run() -> list[Any]:
        PartialState()
        model = network()
        optimizer = lomo(model)
        prepared = prepare(model)
        train(prepared, optimizer, dist.get_rank())
        return [[p.detach() for p in model.parameters()], optimizer.optimizer.model is model]

    for weights, put_back in ranks(size)(run):
        assert put_back
        torch.testing.assert_close(weights, reference(size), rtol=1e-5, atol=1e-6)


@needs_lomo
def test_among_processes_a_norm_of_its_own_is_refused(ranks2):
    def run() -> None:
        PartialState()
        model = network()
        lomo_backward(model(rows(0, 0)).mean(), 0.1, [lomo(model, clip_grad_norm=1.0)])

    with pytest.raises(RankError, match=r"ValueError: LOMO's clip_grad_norm=1.0 .*clip_grad_value"):
        ranks2(run)


@needs_lomo
@pytest.mark.parametrize("number", [0, 2])
def test_it_takes_one_lomo_optimizer(number):
    optimizers = [plain(), *(lomo(network()) for _ in range(number))]
    with pytest.raises(ValueError, match=rf"there are {number} among \['SGD'.*lomo_optim\.Lomo"):
        lomo_backward(torch.ones(()), 0.1, optimizers)


@needs_lomo
def test_accumulation_is_refused():
    GradientState(GradientAccumulationPlugin(num_steps=2))
    with pytest.raises(ValueError, match=r"over 2 micro-batches.*gradient_accumulation_steps=1"):
        lomo_backward(torch.ones(()), 0.1, [lomo(network())])


@needs_lomo
def test_scaled_gradients_are_refused():
    with pytest.raises(ValueError, match="scaled gradients of fp16; use 'bf16'"):
        lomo_backward(torch.ones(()), 0.1, [lomo(network(), "fp16")])
