"""Every promise on every engine, against a plain loop on whole batches, or an uninterrupted run."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.helpers import isolation
from tests.helpers.promises import (
    BATCH,
    ENGINES,
    GPT_ON_ONE,
    ONE,
    TOKENS,
    EngineCase,
    Net,
    Outcome,
    fit,
    loader,
    losses,
    plain,
    plain_module,
    trainer_and_module,
)
from tests.helpers.ranks import RankError
from trainer import Accelerator, Preempted
from trainer.checkpoint.weights import load_weights

TOLERANCE = 2e-6  # of sums in another order, in float32


@pytest.fixture(scope="module", autouse=True)
def ranks_end_with_this_file(ranks):
    """megatron-core never frees its groups, whose threads would slow all later tests."""
    yield
    for size in (1, 2):
        ranks(size).kill()


@pytest.fixture(params=ENGINES)
def name(request):
    return request.param


@pytest.fixture
def case(name):
    return ENGINES[name]


@pytest.fixture
def run(ranks, case):
    """Runs a function on the processes of the engine; returns one value for each."""
    return lambda function: on_processes(ranks, case, function)


@pytest.fixture
def reference(ranks, case):
    """Runs a function on one process, which has no engine but may have megatron-core."""
    one = GPT_ON_ONE if case.is_gpt else ONE
    return lambda function: on_processes(ranks, one, function)[0]


def on_processes(ranks: Any, case: EngineCase, function: Callable[[], Any]) -> list[Any]:
    def body() -> Any:
        with case.around():
            return function()

    if case.processes == 1 and not case.is_gpt:
        isolation.reset_trainer_state()
        return [body()]
    return ranks(case.processes)(body)  # type: ignore[no-any-return]


def assert_equal(
    found: list[Outcome], expected: Outcome, tolerance: float = TOLERANCE, **exact: Any
) -> None:
    """Assert that the ranks agree to the last bit, and rank 0 with a plain loop."""
    first = found[0]
    for other in found[1:]:
        for name in ("copies", "gradients", "rates", "metrics", "counters"):
            bits = {"rtol": 0, "atol": 0}
            torch.testing.assert_close(getattr(other, name), getattr(first, name), **bits)
    trained = {name: first.weights[name] for name in expected.weights}
    torch.testing.assert_close(trained, expected.weights, rtol=0, atol=tolerance)
    assert first.metrics == pytest.approx(expected.metrics, abs=tolerance)
    counters = {name: first.counters[name] for name in expected.counters}
    assert counters == expected.counters
    assert first.rates == pytest.approx(expected.rates, rel=1e-12)
    if first.gradients and not exact.get("gradients_differ"):
        torch.testing.assert_close(first.gradients, expected.gradients, rtol=0, atol=tolerance)


# -- the gradient is that of the whole batch (P4), an update is one tick (P6) ----------------------


class NoItemsOnRank1(Net):
    """The batches of rank 1 have no items, from the first one on."""

    def kept(self, batch: Any) -> Tensor:
        return super().kept(batch) & (batch[1] % 8 < 4)[:, None]


class Grouped(Net):
    """Two groups and a schedule of steps; one parameter is never trained."""

    def made(self) -> None:
        next(self.model.parameters()).requires_grad_(False)

    def configure_optimizers(self) -> Any:
        biases = [p for p in self.parameters() if p.ndim == 1]
        others = [p for p in self.parameters() if p.ndim > 1]
        groups = [{"params": others}, {"params": biases, "weight_decay": 0.3, "lr": 0.1}]
        optimizer = torch.optim.SGD(groups, lr=0.3, momentum=0.9)
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=6)
        return {"optimizer": optimizer, "scheduler": schedule, "interval": "step"}


PLANS: dict[str, tuple[type[Net], int, dict[str, Any]]] = {
    "uneven data": (Net, 44, {}),
    "accumulated, clipped by norm": (
        Net,
        44,
        {"gradient_accumulation_steps": 2, "max_grad_norm": 0.5},
    ),
    "short last window, clipped by value": (
        Net,
        44,
        {"gradient_accumulation_steps": 4, "max_grad_value": 0.02},
    ),
    "no items on one rank": (NoItemsOnRank1, 44, {"gradient_accumulation_steps": 2}),
    "no batch on one rank": (Net, 4, {}),
    "groups and a schedule": (Grouped, 44, {"max_grad_norm": 0.5}),
}


@pytest.mark.parametrize("plan", PLANS)
def test_training_is_that_of_one_process_on_whole_batches(run, reference, case, plan, tmp_path):
    kind, samples, options = PLANS[plan]
    expected = reference(lambda: plain(case, kind, samples, **options))
    found = run(lambda: fit(case, tmp_path, kind, samples, **options))
    assert_equal(found, expected)
