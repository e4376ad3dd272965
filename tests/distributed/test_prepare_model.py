"""A model prepared among several processes, against one process with all their batches."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tests.helpers.engines import no_sync, options, prepare, trigger_sync
from tests.helpers.ranks import RankError
from trainer.configuration import DistributedDataParallelKwargs, TorchDynamoPlugin
from trainer.engines.choose import choose_engine
from trainer.engines.model import prepare_model, unwrap_model
from trainer.names import bare_state_dict
from trainer.precision import Precision
from trainer.state import PartialState

CPU = torch.device("cpu")
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated")


class Net(nn.Module):
    """Two branches, of which a forward pass may leave one out."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        self.left, self.right = nn.Linear(3, 2).double(), nn.Linear(3, 2).double()
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator))

    def forward(self, x: torch.Tensor, both: bool = True) -> torch.Tensor:
        out = self.left(x).tanh()
        return (out + self.right(x).sin() if both else out).sum(1)


def rows(rank: int, number: int) -> torch.Tensor:
    """What this rank has in its micro-batch of that number; shape [4, 3]."""
    generator = torch.Generator().manual_seed(100 * rank + number)
    return torch.randn(4, 3, generator=generator, dtype=torch.float64)


def reference(pairs: list[tuple[int, int]], world_size: int, **kwargs: Any) -> list[torch.Tensor]:
    """The gradients of these (rank, micro-batch), summed and divided by the number of ranks."""
    model = Net()
    for rank, number in pairs:
        (model(rows(rank, number), **kwargs).square().mean() / world_size).backward()
    return [None if p.grad is None else p.grad for p in model.parameters()]


def own_gradients(model: nn.Module) -> list[torch.Tensor]:
    return [None if p.grad is None else p.grad.clone() for p in unwrap_model(model).parameters()]


def assert_each(found: list[Any], expected: list[list[torch.Tensor]]) -> None:
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-14)


KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "compiled": {"dynamo_plugin": TorchDynamoPlugin(backend="aot_eager")},
    "searching": {"ddp_kwargs": DistributedDataParallelKwargs(find_unused_parameters=True)},
    "views": {"ddp_kwargs": DistributedDataParallelKwargs(gradient_as_bucket_view=True)},
}
# DDP itself says once that it searched for nothing.
searches_in_vain = pytest.mark.filterwarnings("ignore:.*find_unused_parameters=True was specified")


@searches_in_vain
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_averaged_except_under_no_sync(ranks2, kind):
    def run() -> list[Any]:
        rank, model = dist.get_rank(), prepare(Net(), **KINDS[kind])
        with no_sync(model):
            model(rows(rank, 0)).square().mean().backward()
        apart = own_gradients(model)
        model(rows(rank, 1)).square().mean().backward()
        return [apart, own_gradients(model)]

    together = reference([(r, n) for r in (0, 1) for n in (0, 1)], 2)
    for rank, (apart, joint) in enumerate(ranks2(run)):
        assert_each([apart, joint], [reference([(rank, 0)], 1), together])


@searches_in_vain
@pytest.mark.parametrize("kind", KINDS)
def test_trigger_sync_averages_after_several_forward_passes(ranks2, kind):
    def run() -> list[Any]:
        rank, model = dist.get_rank(), prepare(Net(), **KINDS[kind])
        found = []
        for _ in range(2):  # DDP lays its buckets out anew after the first
            model.zero_grad()
            with no_sync(model):
                first = model(rows(rank, 0)).square().mean()
                second = model(rows(rank, 1)).square().mean()
            first.backward()
            found.append(own_gradients(model))
            with trigger_sync(model):
                second.backward()
            found.append(own_gradients(model))
        # The engine is as it was: an ordinary pass averages, and one under no_sync does not.
        model.zero_grad()
        model(rows(rank, 0)).square().mean().backward()
        found.append(own_gradients(model))
        model.zero_grad()
        with no_sync(model):
            model(rows(rank, 0)).square().mean().backward()
        found.append(own_gradients(model))
        return found

    joint = reference([(r, n) for r in (0, 1) for n in (0, 1)], 2)
    ordinary = reference([(0, 0), (1, 0)], 2)
    for rank, found in enumerate(ranks2(run)):
        own = reference([(rank, 0)], 1)
        assert_each(found, [own, joint, own, joint, ordinary, own])


def test_trigger_sync_with_a_branch_that_one_rank_left_out(ranks2):
    def run() -> list[Any]:
        rank = dist.get_rank()
        model = prepare(Net(), **KINDS["searching"])
        with no_sync(model):
            loss = model(rows(rank, 0), both=rank == 0).square().mean()
        with trigger_sync(model):
            loss.backward()
        return own_gradients(model)

    model = Net()
    for rank in (0, 1):
        (model(rows(rank, 0), both=rank == 0).square().mean() / 2).backward()
    assert_each(ranks2(run), [own_gradients(model)] * 2)


def test_static_graph_averages(ranks2):
    def run() -> list[Any]:
        kwargs = DistributedDataParallelKwargs(static_graph=True, gradient_as_bucket_view=True)
        rank, model = dist.get_rank(), prepare(Net(), ddp_kwargs=kwargs)
        found = [model.static_graph]
        for update in range(3):  # DDP learns the graph from the first, which it must average
            model.zero_grad()
            with no_sync(model):
                model(rows(rank, 0)).square().mean().backward()
            local = own_gradients(model)
            model(rows(rank, 1)).square().mean().backward()
            found += [local, own_gradients(model)] if update else [own_gradients(model)]
        return found

    double = reference([(r, n) for r in (0, 1) for n in (0, 1)], 2)
    for rank, (known, *found) in enumerate(ranks2(run)):
        assert known
        local = reference([(rank, 0)], 1)
        assert_each(found, [double, local, double, local, double])


def test_frozen_and_evaluated_models_are_not_wrapped(ranks2):
    def run() -> list[Any]:
        frozen = Net().requires_grad_(False)
        part = Net()
        part.left.requires_grad_(False)
        one = prepare(part)
        return [
            prepare(frozen) is frozen,
            type(prepare(nn.Tanh())),
            type(prepare(Net(), evaluation_mode=True)).__name__,
            isinstance(one, DistributedDataParallel),
            prepare(one) is one,
            unwrap_model(one) is part,
            one.device_ids,
        ]

    assert ranks2(run) == [[True, nn.Tanh, "Net", True, True, True, None]] * 2


def test_arguments_reach_ddp(ranks2):
    def run() -> list[Any]:
        kwargs = DistributedDataParallelKwargs(
            broadcast_buffers=False, gradient_as_bucket_view=True, bucket_cap_mb=3
        )
        model = prepare(Net(), ddp_kwargs=kwargs)
        return [model.gradient_as_bucket_view, model.bucket_bytes_cap >> 20]

    assert ranks2(run) == [[True, 3]] * 2


@pytest.mark.parametrize("mode", ["no", "bf16"])
@pytest.mark.parametrize("backend", ["no", "eager"])
def test_state_dict_names_are_bare_whatever_wraps_the_model(ranks2, mode, backend):
    def run() -> list[Any]:
        plugin = TorchDynamoPlugin(backend=backend)
        model = prepare(Net().float(), mode, dynamo_plugin=plugin)
        model(torch.ones(1, 3)).sum().backward()
        inner = unwrap_model(model, keep_fp32_wrapper=False)
        return [
            list(bare_state_dict(model)),
            next(iter(model.state_dict())),
            type(inner).__name__,
            "forward" in vars(inner),
            model._compiled_call_impl is None,
        ]

    names = list(Net().state_dict())
    expected = [names, "module.left.weight", "Net", False, backend == "no"]
    assert ranks2(run) == [expected] * 2


def test_a_model_spread_by_a_device_map_is_refused(ranks2):
    def run() -> None:
        model = Net()
        model.hf_device_map = {"left": 0, "right": "cpu"}
        prepare(model)

    with pytest.raises(RankError, match=r"ValueError: Net was loaded .*2 processes.*one process"):
        ranks2(run)

    def bypass() -> bool:
        import os

        os.environ["ACCELERATE_BYPASS_DEVICE_MAP"] = "true"
        model = Net()
        model.hf_device_map = {"left": 0, "right": "cpu"}
        return isinstance(prepare(model), DistributedDataParallel)

    assert ranks2(bypass) == [True, True]

    def evaluated_on_one_device() -> str:
        model = Net()
        model.hf_device_map = {"": "cpu"}
        return type(prepare(model)).__name__

    assert ranks2(evaluated_on_one_device) == ["DistributedDataParallel"] * 2


def test_a_model_on_another_kind_of_device_is_refused(ranks2):
    def run() -> None:
        PartialState()
        prepare_model(Net().to("meta"), choose_engine(options()), precision=Precision("no", CPU))

    with pytest.raises(RankError, match=r"ValueError: Net has parameters on meta, .*on cpu"):
        ranks2(run)


def test_sparse_gradients_are_averaged(ranks2):
    def run() -> list[Any]:
        model = nn.Embedding(4, 2, sparse=True)
        nn.init.ones_(model.weight)
        prepared = prepare(model)
        prepared(torch.tensor([dist.get_rank()])).sum().backward()
        return [model.weight.grad.is_sparse, model.weight.grad.to_dense().tolist()]

    half, zero = [0.5, 0.5], [0.0, 0.0]
    assert ranks2(run) == [[True, [half, half, zero, zero]]] * 2


@pytest.mark.parametrize("dtype", [torch.int16, torch.uint16, torch.float8_e4m3fn])
def test_buffers_of_dtypes_that_gloo_cannot_send_are_broadcast(ranks2, dtype):
    def run() -> tuple[Any, ...]:
        rank, model = dist.get_rank(), Net()
        model.register_buffer("odd", (torch.arange(6) + 2 * rank).to(dtype).view(2, 3).t())
        model.register_buffer("one", torch.tensor(4 + rank).to(dtype))
        model.register_buffer("usual", torch.tensor(float(rank)))
        wrapped = prepare(model)
        wrapped(rows(rank, 0)).square().mean().backward()
        values = [b.float().tolist() for b in model.buffers()]
        return values, set(bare_state_dict(wrapped)), own_gradients(wrapped)

    for values, names, joint in ranks2(run):
        assert values == [[[0, 3], [1, 4], [2, 5]], 4, 0]
        assert names == {*Net().state_dict(), "odd", "one", "usual"}
        assert_each([joint], [reference([(0, 0), (1, 0)], 2)])


def test_params_and_buffers_ignored_by_ddp_are_not_broadcast(ranks2):
    def run() -> list[Any]:
        model = Net()
        model.register_buffer("own", torch.tensor(dist.get_rank(), dtype=torch.int16))
        model.register_buffer("odd", torch.tensor(dist.get_rank(), dtype=torch.int16))
        model.register_buffer("also", torch.tensor(float(dist.get_rank())))
        model._ddp_params_and_buffers_to_ignore = ["own", "also"]
        prepare(model)
        return [model.own.item(), model.odd.item(), model.also.item()]

    assert ranks2(run) == [[0, 0, 0.0], [1, 0, 1.0]]


@pytest.mark.parametrize("views", [False, True])
def test_preparing_calls_no_user_hooks_and_keeps_gradients(ranks2, views):
    """A hook may be an update, which a gradient of zero would decay by its momentum."""

    def run() -> tuple[list[str], list[str], bool, list[str]]:
        called: list[str] = []
        model = Net()
        handle = model.left.weight.register_hook(lambda gradient: called.append("gradient"))
        model.left.bias.register_post_accumulate_grad_hook(lambda weight: called.append("done"))
        model.right.weight.grad = torch.ones_like(model.right.weight)
        kwargs = DistributedDataParallelKwargs(comm_hook="power_sgd", gradient_as_bucket_view=views)
        prepared = prepare(model, ddp_kwargs=kwargs)
        before = [*called]
        same = model.left.weight.grad is None and bool((model.right.weight.grad == 1).all())
        prepared(rows(dist.get_rank(), 0)).sum().backward()
        during = sorted(called)
        handle.remove()
        called.clear()
        prepared(rows(dist.get_rank(), 0)).sum().backward()
        return before, during, same, called

    assert ranks2(run) == [([], ["done", "gradient"], True, ["done"])] * 2


def test_weights_are_broadcast_from_rank_0(ranks2):
    def run() -> float:
        model = Net()
        with torch.no_grad():
            model.left.bias += dist.get_rank()
        return unwrap_model(prepare(copy.deepcopy(model))).left.bias[0].item()

    assert ranks2(run) == [Net().left.bias[0].item()] * 2
