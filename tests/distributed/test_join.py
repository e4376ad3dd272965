"""Processes with different numbers of batches, against one process that adds up what torch says."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.utils.data import DataLoader

from tests.helpers.engines import no_sync, prepare
from tests.helpers.ranks import RankError
from trainer import Accelerator, GradientAccumulationPlugin
from trainer.configuration import TorchDynamoPlugin
from trainer.data.prepare import prepare_data_loader
from trainer.engines.join import join_uneven_inputs
from trainer.engines.model import unwrap_model
from trainer.optim.optimizer import AcceleratedOptimizer
from trainer.precision import Precision
from trainer.state import AcceleratorState, GradientState

CPU = torch.device("cpu")


def network() -> nn.Module:
    generator = torch.Generator().manual_seed(3)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return model


def rows(rank: int, number: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * rank + number)
    return torch.randn(2, 3, generator=generator, dtype=torch.float64)


def reference(counts: list[int], window: int = 1) -> list[torch.Tensor]:
    """Weights after as many updates as the busiest rank makes.

    A rank without a batch adds nothing, and the sum is divided by the number of all ranks.
    """
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for number in range(max(counts)):
        for rank, count in enumerate(counts):
            if number < count:
                (model(rows(rank, number)).square().mean() / len(counts)).backward()
        if (number + 1) % window == 0:
            optimizer.step()
            optimizer.zero_grad()
    return [p.detach() for p in model.parameters()]


def train(model: nn.Module, optimizer: torch.optim.Optimizer, batches: int, window: int = 1) -> int:
    rank, steps = dist.get_rank(), 0
    for number in range(batches):
        if (number + 1) % window:
            with no_sync(model):
                model(rows(rank, number)).square().mean().backward()
            continue
        model(rows(rank, number)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        steps += 1
    return steps


def weights(model: nn.Module) -> list[torch.Tensor]:
    return [p.detach().clone() for p in unwrap_model(model).parameters()]


def assert_all_have(found: list[list[torch.Tensor]], expected: list[torch.Tensor]) -> None:
    for own in found:
        torch.testing.assert_close(own, expected, rtol=1e-12, atol=1e-14)


class Loader:
    """What the function knows of a prepared loader."""

    def __init__(self, even_batches: bool = True) -> None:
        self.even_batches = even_batches


class Stream:
    """A loader of an iterable dataset."""


@pytest.mark.parametrize(
    ("counts", "window", "even_batches"),
    [
        ([3, 1], 1, None),
        ([1, 3], 1, False),
        ([2, 2], 1, False),
        ([0, 2], 1, None),
        ([4, 2], 2, False),
        ([2, 4, 1, 3], 1, False),
    ],
)
@pytest.mark.parametrize("compiled", [False, True])
def test_ranks_that_ran_out_take_part_in_the_updates_of_the_others(
    ranks, counts, window, even_batches, compiled
):
    backend = "eager" if compiled else "no"

    def run() -> list[torch.Tensor]:
        model = prepare(network(), dynamo_plugin=TorchDynamoPlugin(backend=backend))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        joined = torch.compile(model, backend="eager") if compiled else model
        with join_uneven_inputs([joined], [Loader()], even_batches):
            train(model, optimizer, counts[dist.get_rank()], window)
        return weights(model)

    assert_all_have(ranks(len(counts))(run), reference(counts, window))


@pytest.mark.filterwarnings("ignore:.torch.jit.[a-z]+. is deprecated")
def test_a_joinable_optimizer_joins_as_with_torch_alone(ranks2):
    def run() -> list[list[torch.Tensor]]:
        from torch.distributed.optim import ZeroRedundancyOptimizer

        found = []
        for ours in (True, False):
            model = prepare(network())
            inner = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)
            optimizer = AcceleratedOptimizer(inner, precision=Precision("no", CPU))
            both = join_uneven_inputs([model, optimizer], []) if ours else Join([model, inner])
            with both:
                train(model, optimizer, 3 - 2 * dist.get_rank())
            found.append(weights(model))
        return found

    (ours, torchs), (theirs, _) = ranks2(run)
    assert_all_have([ours, theirs], torchs)


def test_a_rank_works_alone_after_the_block(ranks2):
    def run() -> tuple[int, int]:
        model = prepare(network())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        rank = dist.get_rank()
        with join_uneven_inputs([model], [], False):
            steps = train(model, optimizer, 2 - rank)
        evaluated = 0
        for number in range(2 * rank):  # evaluation on one rank alone waits for nobody
            model.eval()
            with torch.no_grad():
                model(rows(rank, number))
            evaluated += 1
        train(model.train(), optimizer, 2)
        return steps, evaluated

    assert ranks2(run) == [(2, 0), (1, 2)]


def test_even_batches_is_overridden_within_the_block_only(ranks2):
    def run() -> list[Any]:
        model = prepare(network())
        loaders = [Loader(True), Loader(False)]
        seen = []
        for even in (False, True, None):
            with join_uneven_inputs([model], loaders, even):
                seen.append([*(loader.even_batches for loader in loaders)])
                seen[-1].append(model._join_config.enable)
            seen.append([loader.even_batches for loader in loaders])
        return seen

    own = [True, False]
    expected = [[False, False, True], own, [True, True, False], own, [*own, True], own]
    assert ranks2(run) == [expected] * 2


def test_iterable_loaders_warn_once(ranks2):
    def run() -> list[Any]:
        model = prepare(network())
        loader = Loader()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            with join_uneven_inputs([model], [Stream(), loader, Stream()], False):
                messages = loader.even_batches
            with join_uneven_inputs([model], [Stream()]):  # nothing is overridden
                pass
        return [messages, [(w.category.__name__, str(w.message), w.filename[-12:]) for w in caught]]

    text = (
        "Overriding even_batches is only supported for map-style datasets, yet some dataloaders "
        "given were iterable"
    )
    assert ranks2(run) == [[False, [("UserWarning", text, "test_join.py")]]] * 2


def test_a_frozen_model_needs_no_joining(ranks2):
    def run() -> int:
        frozen = prepare(network().requires_grad_(False))
        with join_uneven_inputs([frozen], [], False):
            return len([frozen(rows(0, n)) for n in range(dist.get_rank())])

    assert ranks2(run) == [0, 1]


# -- windows of `accumulate`


def trained(source: Any, steps: int, epochs: int = 2, **options: Any) -> tuple[Any, Any]:
    """Train, and forget the `Accelerator`; return the weights and the position in the window."""
    plugin = GradientAccumulationPlugin(num_steps=steps, **options)
    accelerator = Accelerator(cpu=True, gradient_accumulation_plugin=plugin)
    model = network()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, loader = accelerator.prepare(model, sgd, source)
    for _ in range(epochs):
        with accelerator.join_uneven_inputs([model], even_batches=False):
            for batch in loader:
                with accelerator.accumulate(model):
                    accelerator.backward(model(batch).square().mean())
                    optimizer.step()
                    optimizer.zero_grad()
    position = accelerator.step, accelerator.sync_gradients
    AcceleratorState._reset_state()
    GradientState._reset_state()
    return weights(model), position


def accumulated(
    rounds: list[list[torch.Tensor]], steps: int, world: int, *, ends: bool, epochs: int = 2
) -> list[torch.Tensor]:
    """What one process makes of the rounds; `ends`: the last one ends its window."""
    model = network()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    step = 0
    for _ in range(epochs):
        for number, batches in enumerate(rounds, start=1):
            for batch in batches:
                (model(batch).square().mean() / steps / world).backward()
            step += 1
            if ends and number == len(rounds):
                step = 0
            if step % steps == 0:
                sgd.step()
                sgd.zero_grad()
    return [p.detach() for p in model.parameters()]


def of_all(counts: Sequence[int]) -> list[list[torch.Tensor]]:
    """The rounds of processes that have so many batches."""
    return [
        [rows(rank, number) for rank, count in enumerate(counts) if number < count]
        for number in range(max(counts))
    ]


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("mode", [{}, {"sync_each_batch": True}, {"sync_with_dataloader": False}])
def test_accumulation_windows_end_together_with_a_sharded_loader(ranks, size, mode):
    if size == 3 and "sync_each_batch" in mode:
        mode = {**mode, "sync_with_dataloader": False}
    totals = (1, 2, 5, 8) if size == 2 else (1, 5, 7)

    def run(totals: Sequence[int], mode: dict[str, Any]) -> list[Any]:
        found = []
        for total, steps in product(totals, (1, 2, 3)):
            data = torch.cat([rows(0, number) for number in range(total)])
            found.append(trained(DataLoader(data, 2), steps, **mode))
        return found

    found = ranks(size)(run, totals, mode)
    for number, (total, steps) in enumerate(product(totals, (1, 2, 3))):
        whole = [rows(0, each) for each in range(total)]
        rounds = [whole[start : start + size] for start in range(0, total, size)]
        ends = mode.get("sync_with_dataloader", True)
        assert_all_have(
            [own[number][0] for own in found], accumulated(rounds, steps, size, ends=ends)
        )
        assert len({own[number][1] for own in found}) == 1  # all are in step


@pytest.mark.parametrize("size", [2, 3])
def test_accumulation_windows_stay_in_step_with_own_loaders(ranks, size):
    all_counts = [(1, 1), (1, 4), (5, 2), (3, 4)]
    if size == 3:
        all_counts = [(1, 2, 3), (5, 1, 4), (4, 4, 4)]

    def run(all_counts: Sequence[Sequence[int]]) -> list[Any]:
        found = []
        rank = dist.get_rank()
        for counts, steps in product(all_counts, (1, 2, 3)):
            own = DataLoader(
                torch.cat([rows(rank, number) for number in range(counts[rank])]), batch_size=2
            )
            alone = {"num_processes": 1, "process_index": 0}
            found.append(trained(prepare_data_loader(own, **alone), steps))
        return found

    found = ranks(size)(run, all_counts)
    for number, (counts, steps) in enumerate(product(all_counts, (1, 2, 3))):
        expected = accumulated(of_all(counts), steps, size, ends=False)
        assert_all_have([own[number][0] for own in found], expected)
        assert len({own[number][1] for own in found}) == 1


@pytest.mark.filterwarnings("ignore:.torch.jit.[a-z]+. is deprecated")
def test_a_joinable_optimizer_is_refused_with_accumulation(ranks2):
    def run() -> None:
        from torch.distributed.optim import ZeroRedundancyOptimizer

        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
        model = accelerator.prepare(network())
        inner = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)
        with accelerator.join_uneven_inputs([model, accelerator.prepare(inner)]):
            pass

    with pytest.raises(RankError, match=r"ValueError: .*given a ZeroRedundancyOptimizer, with"):
        ranks2(run)


def test_an_optimizer_that_cannot_join_is_refused(ranks2):
    def run() -> None:
        model = prepare(network())
        sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = AcceleratedOptimizer(sgd, precision=Precision("no", CPU))
        with join_uneven_inputs([model, optimizer], [], False):
            pass

    with pytest.raises(RankError, match=r"TypeError: joinables contains a SGD; .*Joinable"):
        ranks2(run)


def test_one_process_joins_nothing():
    loader = Loader()
    with join_uneven_inputs([object()], [loader, Stream()], False):
        assert loader.even_batches
