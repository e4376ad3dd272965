"""The `Accelerator` of several processes, in a loop of the user's own, against one process."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from tests.helpers.ranks import RankError
from trainer import Accelerator
from trainer.configuration import (
    DataLoaderConfiguration,
    DistributedDataParallelKwargs,
    GradScalerKwargs,
)


def network() -> nn.Module:
    generator = torch.Generator().manual_seed(3)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return model


def rows(count: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(4)
    x = torch.randn(count, 4, generator=generator, dtype=torch.float64)
    return TensorDataset(x, x.prod(1, keepdim=True))


def train(
    batch_size: int, *, steps: int = 1, precision: str = "no", clip: float | None = None, **kwargs
) -> dict[str, Any]:
    """Two epochs of a loop such as users write; the same on any number of processes."""
    accelerator = Accelerator(
        gradient_accumulation_steps=steps, mixed_precision=precision, cpu=True, **kwargs
    )
    model = network()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = StepLR(sgd, 2, gamma=0.5)
    loader = DataLoader(rows(16), batch_size)
    model, optimizer, loader, scheduler = accelerator.prepare(model, sgd, loader, scheduler)
    losses, norms = [], []
    for _ in range(2):
        for x, y in loader:
            with accelerator.accumulate(model):
                loss = nn.functional.mse_loss(model(x), y)
                accelerator.backward(loss)
                if clip is not None and accelerator.sync_gradients:
                    norms.append(accelerator.clip_grad_norm_(model.parameters(), clip).item())
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            losses.append(accelerator.gather(loss.detach()).mean().item())
    return {
        "weights": [p.detach().clone() for p in model.parameters()],
        "losses": losses,
        "norms": norms,
        "updates": optimizer.steps,
        "rate": scheduler.get_last_lr(),
    }


def test_two_processes_train_like_one_with_the_big_batch(ranks2):
    alone = train(8, clip=0.5, scheduler_tick="update")
    for found in ranks2(lambda: train(4, clip=0.5, scheduler_tick="update")):
        assert found["updates"] == alone["updates"] == 4
        assert found["rate"] == alone["rate"] == [0.1 / 4]
        assert found["losses"] == pytest.approx(alone["losses"], rel=1e-12)
        assert found["norms"] == pytest.approx(alone["norms"], rel=1e-12)
        torch.testing.assert_close(found["weights"], alone["weights"], rtol=1e-12, atol=1e-14)


def test_accumulation_on_two_processes_trains_like_one_with_the_big_batch(ranks2):
    alone = train(8, scheduler_tick="update")
    for found in ranks2(lambda: train(2, steps=2, scheduler_tick="update")):
        assert found["updates"] == alone["updates"]
        torch.testing.assert_close(found["weights"], alone["weights"], rtol=1e-12, atol=1e-14)


def test_scaled_gradients_are_averaged_like_any_other(ranks2):
    # Autocast leaves float64 alone, so that only the scaling is at work here.
    arguments = {
        "precision": "fp16",
        "clip": 0.5,
        "scheduler_tick": "update",
        "kwargs_handlers": [GradScalerKwargs(init_scale=1024.0)],
    }
    alone = train(8, clip=0.5, scheduler_tick="update")
    for found in ranks2(lambda: train(4, **arguments)):
        assert found["norms"] == pytest.approx(alone["norms"], rel=1e-12)
        torch.testing.assert_close(found["weights"], alone["weights"], rtol=1e-12, atol=1e-14)


def test_a_schedule_ticks_once_a_process_by_default(ranks2):
    def rate(tick: str) -> list[float]:
        accelerator = Accelerator(scheduler_tick=tick)
        sgd = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
        optimizer, scheduler = accelerator.prepare(sgd, StepLR(sgd, 1, gamma=0.5))
        optimizer.step()
        scheduler.step()
        return scheduler.get_last_lr()

    assert ranks2(rate, "process") == [[0.25], [0.25]]
    assert ranks2(rate, "update") == [[0.5], [0.5]]


def test_gradients_are_averaged_only_at_the_end_of_a_window(ranks2):
    def own_gradients() -> list[float]:
        accelerator = Accelerator(gradient_accumulation_steps=2)
        model = accelerator.prepare(nn.Linear(1, 1, bias=False))
        found = []
        for _ in range(2):
            with accelerator.accumulate(model):
                accelerator.backward(model(torch.ones(1, 1)).sum() * 4 * accelerator.process_index)
                found.append(model.module.weight.grad.item())
        return found

    # Halved by the window: 0 and 2 in the first micro-batch, then 0 and 4 averaged.
    assert ranks2(own_gradients) == [[0.0, 2.0], [2.0, 2.0]]


def test_no_sync_keeps_gradients_apart(ranks2):
    def own_gradients() -> tuple[float, float]:
        accelerator = Accelerator()
        model = accelerator.prepare(nn.Linear(1, 1, bias=False))
        factor = 1.0 + 2 * accelerator.process_index
        with accelerator.no_sync(model):
            accelerator.backward(model(torch.ones(1, 1)).sum() * factor)
            apart = model.module.weight.grad.item()
        model.zero_grad()
        accelerator.backward(model(torch.ones(1, 1)).sum() * factor)
        return apart, model.module.weight.grad.item()

    assert ranks2(own_gradients) == [(1.0, 2.0), (3.0, 2.0)]


def test_models_are_wrapped_where_they_train_together(ranks2):
    def wrapped() -> list[bool]:
        accelerator = Accelerator(
            kwargs_handlers=[DistributedDataParallelKwargs(find_unused_parameters=True)]
        )
        frozen = nn.Linear(1, 1).requires_grad_(False)
        model = nn.Linear(1, 1)
        prepared = accelerator.prepare(model)
        return [
            isinstance(prepared, DistributedDataParallel),
            prepared.find_unused_parameters,
            accelerator.prepare(frozen) is frozen,
            accelerator.prepare(model) is prepared,
            accelerator.prepare(prepared) is prepared,
            type(accelerator.prepare_model(nn.Linear(1, 1), evaluation_mode=True)) is nn.Linear,
        ]

    assert ranks2(wrapped) == [[True] * 6] * 2


def test_each_process_reads_its_part_of_an_order_that_all_share(ranks3):
    def read() -> list[list[int]]:
        accelerator = Accelerator()
        torch.manual_seed(accelerator.process_index)  # seeded differently, shuffled alike
        data = TensorDataset(torch.arange(12))
        loader = accelerator.prepare(DataLoader(data, 2, shuffle=True))
        return [[i for batch in loader for i in batch[0].tolist()] for _ in range(2)]

    found = ranks3(read)
    for epoch in (0, 1):
        assert sorted(i for own in found for i in own[epoch]) == list(range(12))
    assert found[0][0] != found[0][1]


@pytest.mark.parametrize("even", [True, False])
def test_the_last_batches_are_shared_out_as_configured(ranks2, even):
    def read() -> tuple[int, list[list[int]]]:
        accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(even_batches=even))
        loader = accelerator.prepare(DataLoader(TensorDataset(torch.arange(9)), 2))
        return len(loader), [batch[0].tolist() for batch in loader]

    expected = {
        True: [(3, [[0, 1], [4, 5], [8, 0]]), (3, [[2, 3], [6, 7], [1, 2]])],
        False: [(3, [[0, 1], [4, 5], [8]]), (2, [[2, 3], [6, 7]])],
    }
    assert ranks2(read) == expected[even]


class Stream(IterableDataset):
    def __iter__(self):
        yield from torch.ones(5, 1)


def test_a_stream_that_does_not_divide_hangs_nobody(ranks2):
    def updates() -> int:
        accelerator = Accelerator()
        model = nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(Stream(), 1))
        for batch in loader:
            accelerator.backward(model(batch).sum())
            optimizer.step()
            optimizer.zero_grad()
        return optimizer.steps

    assert ranks2(updates) == [3, 3]


def test_values_are_gathered_and_reduced(ranks2):
    def values() -> tuple[Any, ...]:
        accelerator = Accelerator()
        own = torch.tensor([accelerator.process_index + 1.0])
        return (
            accelerator.gather({"a": own})["a"].tolist(),
            accelerator.reduce(own).item(),
            accelerator.reduce(own, "mean", 10.0).item(),
            own.item(),
        )

    assert ranks2(values) == [([1.0, 2.0], 3.0, 15.0, 1.0), ([1.0, 2.0], 3.0, 15.0, 2.0)]


def test_a_value_that_cannot_be_gathered_is_named(ranks2):
    with pytest.raises(RankError, match=r"TypeError: gather takes tensors.* it got str"):
        ranks2(lambda: Accelerator().gather(["text"]))


def test_everybody_waits_for_everyone(ranks2):
    def check_collective() -> bool:
        import os

        accelerator = Accelerator()
        open(f"here-{accelerator.process_index}", "w").close()
        accelerator.wait_for_everyone()
        return {"here-0", "here-1"} <= set(os.listdir())

    assert ranks2(check_collective) == [True, True]


def test_buffers_and_weights_start_as_those_of_the_first(ranks2):
    def start() -> tuple[float, float]:
        accelerator = Accelerator()
        model = nn.BatchNorm1d(1)
        nn.init.constant_(model.weight, dist.get_rank() + 1.0)
        model.running_mean.fill_(dist.get_rank() + 5.0)
        own = accelerator.prepare(copy.deepcopy(model)).module
        return own.weight.item(), own.running_mean.item()

    assert ranks2(start) == [(1.0, 5.0)] * 2


def test_what_is_unfrozen_after_prepare_is_refused_since_nobody_would_average_it(ranks2):
    def body():
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
        frozen, half = nn.Linear(1, 1), nn.Linear(1, 1)
        frozen.requires_grad_(False)
        half.bias.requires_grad_(False)
        frozen, half = accelerator.prepare(frozen, half)
        judged = accelerator.prepare_model(nn.Linear(1, 1).requires_grad_(False), None, True)
        judged.requires_grad_(True)  # evaluated only, so it may
        accelerator.backward(half(torch.ones(1, 1)).sum())
        messages = []
        for parameters in (frozen.parameters(), [half.module.bias]):
            for parameter in parameters:
                parameter.requires_grad_(True)
            with accelerator.accumulate(frozen, half):
                accelerator.backward(frozen(torch.ones(1, 1)).sum() + half(torch.ones(1, 1)).sum())
            try:
                with accelerator.accumulate(frozen, half):
                    loss = frozen(torch.ones(1, 1)).sum() + half(torch.ones(1, 1)).sum()
                    accelerator.backward(loss)
            except RuntimeError as error:
                messages.append(str(error).partition(" that ")[0])
            for parameter in (*frozen.parameters(), half.module.bias):
                parameter.requires_grad_(False)
        accelerator.free_memory()
        frozen.requires_grad_(True)
        accelerator.backward(frozen(torch.ones(1, 1)).sum())
        return messages

    assert ranks2(body) == [["2 parameter(s)", "1 parameter(s)"]] * 2
