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
from trainer.configuration import DistributedDataParallelKwargs
from trainer.engines.choose import choose_engine
from trainer.engines.ddp import find_ddp
from trainer.engines.model import prepare_model, unwrap_model
from trainer.names import bare_state_dict
from trainer.plugins import TorchDynamoPlugin
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


class Choice(nn.Module):
    """Calls one of its parts."""

    def __init__(self, parts: nn.ModuleList) -> None:
        super().__init__()
        self.parts = parts

    def forward(self, x: torch.Tensor, which: int) -> torch.Tensor:
        return self.parts[which](x)


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
    "compiled": {"dynamo_plugin": TorchDynamoPlugin(backend="eager")},
    "aot": {"dynamo_plugin": TorchDynamoPlugin(backend="aot_eager")},
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
def test_a_sync_may_be_triggered_after_several_forward_passes(ranks2, kind):
    def run() -> list[Any]:
        rank, model = dist.get_rank(), prepare(Net(), **KINDS[kind])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        found = []
        for update in range(3):
            with no_sync(model):
                first = model(rows(rank, 2 * update)).square().mean()
                second = model(rows(rank, 2 * update + 1)).square().mean()
            first.backward()
            found.append(own_gradients(model))
            with trigger_sync(model):
                second.backward()
            found.append(own_gradients(model))
            optimizer.step()
            optimizer.zero_grad()
        # The engine is as it was: an ordinary pass averages, and one under no_sync does not.
        model(rows(rank, 0)).square().mean().backward()
        found.append(own_gradients(model))
        optimizer.zero_grad()
        with no_sync(model):
            model(rows(rank, 0)).square().mean().backward()
        found.append(own_gradients(model))
        return found

    expected: list[list[Any]] = [[], []]
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def all_of(pairs: list[tuple[int, int]], size: int) -> list[torch.Tensor]:
        optimizer.zero_grad()
        for rank, number in pairs:
            (model(rows(rank, number)).square().mean() / size).backward()
        return own_gradients(model)

    for update in range(3):
        for rank in (0, 1):
            expected[rank].append(all_of([(rank, 2 * update)], 1))
        joint = all_of([(r, 2 * update + n) for r in (0, 1) for n in (0, 1)], 2)
        optimizer.step()
        for rank in (0, 1):
            expected[rank].append(joint)
    joint = all_of([(0, 0), (1, 0)], 2)
    for rank in (0, 1):
        expected[rank] += [joint, all_of([(rank, 0)], 1)]
    for found, wanted in zip(ranks2(run), expected, strict=True):
        assert_each(found, wanted)


def test_a_triggered_sync_knows_of_branches_that_one_process_left_out(ranks2):
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


def test_a_static_graph_averages_too(ranks2):
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


def test_a_sync_triggered_in_an_update_that_failed_leaves_the_engine_as_it_was(ranks2):
    def run() -> list[bool]:
        model = prepare(Net())
        seen = []
        with no_sync(model):
            try:
                with trigger_sync(model):
                    seen.append(model.require_backward_grad_sync)
                    raise KeyError("the user's")
            except KeyError:
                seen.append(model.require_backward_grad_sync)
        return [*seen, model.require_backward_grad_sync]

    assert ranks2(run) == [[True, False, True]] * 2


def test_what_trains_nothing_or_is_only_evaluated_is_not_wrapped(ranks2):
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
def test_names_are_bare_whatever_wraps_the_model(ranks2, mode, backend):
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


def test_a_prepared_model_that_the_user_compiles_is_still_found(ranks2):
    def run() -> list[Any]:
        inner = Net()
        model = torch.compile(prepare(inner), backend="eager")
        with no_sync(model):
            model(rows(dist.get_rank(), 0)).square().mean().backward()
        return [find_ddp(model) is not None, unwrap_model(model) is inner, own_gradients(model)]

    for rank, (found, same, apart) in enumerate(ranks2(run)):
        assert found
        assert same
        assert_each([apart], [reference([(rank, 0)], 1)])


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


def test_a_model_left_on_another_kind_of_device_is_refused(ranks2):
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


@searches_in_vain
def test_sparse_gradients_are_averaged_by_a_triggered_sync_too(ranks2):
    def run() -> list[Any]:
        tables = nn.ModuleList(nn.Embedding(2, 1, sparse=True) for _ in range(3))
        handler = DistributedDataParallelKwargs(find_unused_parameters=True)
        model = prepare(Choice(tables), ddp_kwargs=handler)
        with no_sync(model):
            loss = model(torch.tensor([1]), dist.get_rank()).sum()
        with trigger_sync(model):
            loss.backward()
        return [
            None if t.weight.grad is None else t.weight.grad.to_dense().tolist() for t in tables
        ]

    assert ranks2(run) == [[[[0.0], [0.5]], [[0.0], [0.5]], None]] * 2


@pytest.mark.parametrize("dtype", [torch.int16, torch.uint16, torch.float8_e4m3fn])
def test_buffers_that_a_backend_cannot_send_start_as_those_of_the_first(ranks2, dtype):
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


def test_what_the_user_keeps_from_ddp_stays_apart(ranks2):
    def run() -> list[Any]:
        model = Net()
        model.register_buffer("own", torch.tensor(dist.get_rank(), dtype=torch.int16))
        model.register_buffer("odd", torch.tensor(dist.get_rank(), dtype=torch.int16))
        model.register_buffer("also", torch.tensor(float(dist.get_rank())))
        model._ddp_params_and_buffers_to_ignore = ["own", "also"]
        prepare(model)
        return [model.own.item(), model.odd.item(), model.also.item()]

    assert ranks2(run) == [[0, 0, 0.0], [1, 0, 1.0]]


def train_on(model: nn.Module, first: int, last: int) -> list[torch.Tensor]:
    for number in range(first, last):
        model(rows(dist.get_rank(), number).float()).square().mean().backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.sub_(parameter.grad, alpha=0.1)
                parameter.grad = None
    return [parameter.detach().clone() for parameter in model.parameters()]


def test_a_model_prepared_anew_half_way_goes_on_to_the_last_bit(ranks2):
    """Of two, there is one sum only, in whatever order DDP arranges gradients."""

    def make() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(*(nn.Linear(3 + 7 * n, 10 + 7 * n) for n in range(6)))

    def run() -> bool:
        whole = train_on(prepare(make()), 0, 6)
        half = make()
        train_on(prepare(half), 0, 3)
        resumed = train_on(prepare(copy.deepcopy(half)), 3, 6)
        return all(torch.equal(a, b) for a, b in zip(whole, resumed, strict=True))

    assert ranks2(run) == [True] * 2


def test_what_is_prepared_is_left_to_ddp(ranks2):
    """It finds the order of the backward pass itself, and may yet be told of a static graph."""

    def run() -> list[int]:
        called: list[int] = []
        model = Net()
        weight = model.left.weight
        node = weight.expand_as(weight).grad_fn.next_functions[0][0]
        node.register_hook(lambda *_: called.append(1))
        prepared = prepare(model)
        prepared._set_static_graph()
        prepared(rows(dist.get_rank(), 0)).sum().backward()
        return called

    assert ranks2(run) == [[1]] * 2


@pytest.mark.parametrize("views", [False, True])
def test_preparing_calls_no_hooks_of_the_users_and_leaves_gradients(ranks2, views):
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


def test_four_processes_average_too(ranks4):
    def run() -> list[Any]:
        rank, model = dist.get_rank(), prepare(Net())
        with no_sync(model):
            losses = [model(rows(rank, n)).square().mean() for n in (0, 1)]
        losses[0].backward()
        with trigger_sync(model):
            losses[1].backward()
        return own_gradients(model)

    assert_each(ranks4(run), [reference([(r, n) for r in range(4) for n in (0, 1)], 4)] * 4)


def test_the_weights_are_those_of_the_first(ranks2):
    def run() -> float:
        model = Net()
        with torch.no_grad():
            model.left.bias += dist.get_rank()
        return unwrap_model(prepare(copy.deepcopy(model))).left.bias[0].item()

    assert ranks2(run) == [Net().left.bias[0].item()] * 2
