"""Few gradients, which the processes send to each other, against those that are reduced."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from tests.helpers.engines import started
from tests.helpers.reducing import reducing
from trainer import DistributedDataParallelKwargs, Trainer, TrainModule
from trainer.distributed.step_sync import StepStats, StepSync
from trainer.engines import exchange
from trainer.engines.ddp import DataParallel
from trainer.state import PartialState


class Net(TrainModule):
    """Gradients of all magnitudes, and zeros of both signs."""

    def __init__(self, dtype: torch.dtype = torch.float32, width: int = 33) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        self.first, self.last = nn.Linear(7, width), nn.Linear(width, 5)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator))
        self.to(dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.first(x).relu()).exp().mean()

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self(batch[0])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=0.01)


def rows(rank: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(6, 7, generator=torch.Generator().manual_seed(rank)).to(dtype)


def engine(module: nn.Module, **kwargs: Any) -> DataParallel:
    step_sync = StepSync(torch.device("cpu"), whole_items=True)
    return started(DataParallel, module, step_sync, DistributedDataParallelKwargs(**kwargs))


def exchanges(own: DataParallel) -> bool:
    return bool(own._ddp._comm_hooks)


def averaged(dtype: torch.dtype, kwargs: dict[str, Any]) -> tuple[bool, list[torch.Tensor]]:
    """The gradients of one window, by an engine."""
    module = Net(dtype)
    own = engine(module, **kwargs)
    own.begin_micro_batch(sync=True)
    loss = own.forward("training_step", [rows(dist.get_rank(), dtype)], 0)
    own.backward(loss, StepStats(6.0, 0.0, 0.0, 0.0, 0.0))
    return exchanges(own), [p.grad.clone() for p in module.parameters()]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("kwargs", [{}, {"find_unused_parameters": True}])
def test_two_ranks_average_bit_identically_to_ddp(ranks2, dtype, kwargs):
    def by_torch() -> list[torch.Tensor]:
        model = DistributedDataParallel(Net(dtype))
        model(rows(dist.get_rank(), dtype)).backward()
        return [p.grad.clone() for p in model.parameters()]

    bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
    for expected, (exchanged, found) in zip(
        ranks2(by_torch), ranks2(averaged, dtype, kwargs), strict=True
    ):
        assert exchanged
        for one, other in zip(expected, found, strict=True):
            assert torch.equal(one.view(bits), other.view(bits))  # zeros have signs, too


# In float32 the sync vector lies beside the gradients, otherwise in a bucket of its own.
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "kwargs", [{}, {"find_unused_parameters": True}, {"gradient_as_bucket_view": True}]
)
@pytest.mark.parametrize("size", [3, 4])
def test_more_ranks_sum_in_rank_order(ranks, size, kwargs, dtype):
    expected = [torch.zeros(parameter.shape) for parameter in Net().parameters()]
    for rank in range(size):
        module = Net(dtype)
        module(rows(rank, dtype)).backward()
        for total, parameter in zip(expected, module.parameters(), strict=True):
            total += parameter.grad / size  # in float32, even of bfloat16
    for exchanged, found in ranks(size)(averaged, dtype, kwargs):
        assert exchanged
        for one, other in zip(expected, found, strict=True):
            assert torch.equal(one.to(dtype), other)


class Halves(nn.Module):
    """Two layers, whose gradients need two buckets if their dtypes differ."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(2, 2), nn.Linear(2, 2).to(dtype)


def stepping_in_backward() -> nn.Module:
    module = nn.Linear(1, 1)
    for parameter in module.parameters():
        parameter._in_backward_optimizers = []  # as torch's _apply_optimizer_in_backward does
    return module


EDGE = exchange._FEW // 2 // 4  # as many float32 parameters as two processes exchange


def edge(beyond: int = 0) -> nn.Module:
    return nn.Linear(EDGE + beyond, 1, bias=False)


@pytest.mark.parametrize(
    ("make", "kwargs", "exchanged"),
    [
        (edge, {}, True),
        (edge, {"find_unused_parameters": True}, True),
        (lambda: edge(1), {}, False),
        (lambda: nn.EmbeddingBag(3, 2, sparse=True), {}, False),
        (lambda: Halves(torch.float32), {}, True),
        (lambda: Halves(torch.bfloat16), {}, False),
        (stepping_in_backward, {}, False),
    ],
)
def test_which_models_exchange_their_gradients(ranks2, make, kwargs, exchanged):
    def found() -> bool:
        return exchanges(engine(make(), **kwargs))

    assert ranks2(found) == [exchanged] * 2
    assert reducing(ranks2)(found) == [False] * 2


def test_a_comm_hook_replaces_the_exchange(ranks2):
    def hooks() -> list[str]:
        hooks = engine(nn.Linear(1, 1), comm_hook="fp16")._ddp._comm_hooks
        return [hook.__name__ for hook, _ in hooks]

    assert ranks2(hooks) == [["fp16_compress_hook"]] * 2


@pytest.mark.parametrize("local", [[1, 1], [1, 2]])
def test_processes_on_several_machines_reduce(ranks2, local):
    def one_machine() -> bool:
        PartialState()._local_world_size = local[dist.get_rank()]
        return exchanges(engine(nn.Linear(1, 1)))

    assert ranks2(one_machine) == [False] * 2


@pytest.mark.parametrize(("kind", "reductions"), [("cpu", 1), ("cuda", 0)])
def test_on_an_accelerator_nothing_is_reduced_on_the_host(ranks2, kind, reductions):
    """Its process group may have no backend for the host."""

    def reduced() -> tuple[int, int]:
        model, calls = DistributedDataParallel(nn.Linear(1, 1)), []
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(PartialState().__dict__, "device", torch.device(kind))
            patch.setattr(dist, "all_reduce", lambda *given: calls.append(given))
            exchange.exchange_if_few(model, model.module)
        return len(calls), len(model._comm_hooks)

    assert ranks2(reduced) == [(reductions, reductions)] * 2


def fit(module: Net, steps: int, **settings: Any) -> list[torch.Tensor]:
    data = DataLoader(TensorDataset(torch.cat([rows(n) for n in range(7)])), 4, shuffle=True)
    trainer = Trainer(
        max_steps=steps,
        gradient_accumulation_steps=2,
        max_grad_norm=0.5,
        seed=1,
        cpu=True,
        progress_bar=False,
        **settings,
    )
    trainer.fit(module, data, ckpt_path="auto")
    return [parameter.detach().clone() for parameter in module.parameters()]


@pytest.mark.parametrize("exchanged", [True, False])
@pytest.mark.parametrize("searches", [True, False])
def test_resume_on_three_ranks_is_bit_identical(ranks3, tmp_path, exchanged, searches):
    pool = ranks3 if exchanged else reducing(ranks3)
    handler = DistributedDataParallelKwargs(find_unused_parameters=searches)

    def train(steps: int, name: str) -> list[torch.Tensor]:
        return fit(Net(), steps, project_dir=tmp_path / name, kwargs_handlers=[handler])

    whole = pool(train, 9, "whole")
    pool(train, 5, "parts")
    resumed = pool(train, 9, "parts")
    for one, other in zip(whole, resumed, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
        assert all(torch.equal(a, b) for a, b in zip(one, whole[0], strict=True))
