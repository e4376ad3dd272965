"""The engines of several processes, against one process that does the whole."""

from __future__ import annotations

import copy
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.utils.checkpoint import checkpoint

from tests.helpers.engines import options, started
from tests.helpers.ranks import RankError
from tests.helpers.reducing import reducing
from trainer.configuration import DistributedDataParallelKwargs
from trainer.distributed.step_sync import StepStats, StepSync
from trainer.engines import ddp
from trainer.engines.averaging import average_gradients, sparse_weights
from trainer.engines.choose import choose_engine
from trainer.engines.ddp import DataParallel, Replicas, StaticDataParallel
from trainer.engines.single import SingleDevice
from trainer.state import PartialState

CPU = torch.device("cpu")


@pytest.fixture(params=["exchanged", "reduced"])
def sent(request):
    return request.param


@pytest.fixture
def ranks(sent, ranks):
    """Pools that exchange the gradients of small models, and pools where gloo reduces them."""
    return ranks if sent == "exchanged" else lambda size: reducing(ranks(size))


@pytest.fixture
def ranks2(ranks):
    return ranks(2)


@pytest.fixture
def ranks3(ranks):
    return ranks(3)


class Model(nn.Module):
    """Two layers and a running count; `training_step` is what the loop would call."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.first = nn.Linear(3, 4).double()
        self.last = nn.Linear(4, 1).double()
        self.register_buffer("seen", torch.zeros(()))
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator))

    def training_step(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        return self.last(self.first(x).tanh()).square().mean()


class Single(Model):
    """In float32, as most models are."""

    def __init__(self) -> None:
        super().__init__()
        self.float()


def stats(items: float, *, stop: bool, seconds: float) -> StepStats:
    """What this rank says of its window."""
    return StepStats(items, float(stop), 0.0, seconds, ended=0.0)


def data(rows: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(5)
    return torch.randn(rows, 3, generator=generator, dtype=torch.float64)


def engine(
    module: nn.Module, *, whole: bool = False, **kwargs: Any
) -> tuple[DataParallel, StepSync]:
    step_sync = StepSync(CPU, whole_items=whole)
    handler = DistributedDataParallelKwargs(**kwargs)
    kind = StaticDataParallel if handler.static_graph else DataParallel
    return started(kind, module, step_sync, handler), step_sync


def gradients(module: nn.Module) -> dict[str, torch.Tensor | None]:
    return {name: p.grad for name, p in module.named_parameters()}


def window(
    own: DataParallel, batches: list[Any], *, items: float = 1.0, stop: bool = False
) -> float | torch.Tensor:
    """One window of these micro-batches; None is a micro-batch of which this rank has nothing."""
    for index, batch in enumerate(batches):
        last = index == len(batches) - 1
        own.begin_micro_batch(sync=last)
        loss = None if batch is None else own.forward("training_step", batch)
        if last:
            return own.backward(loss, stats(items, stop=stop, seconds=float(dist.get_rank())))
        if loss is not None:
            own.backward(loss)
    raise AssertionError


def assert_same(found: list[dict[str, Any]], expected: dict[str, torch.Tensor | None]) -> None:
    for own in found:
        for name, gradient in expected.items():
            torch.testing.assert_close(own[name], gradient, rtol=1e-13, atol=1e-15)


def mean_gradients(losses: Callable[[Model], list[torch.Tensor]], ranks: int) -> dict[str, Any]:
    """The gradients of the sum of all losses, divided by the number of ranks."""
    model = Model()
    (sum(losses(model)) / ranks).backward()
    return gradients(model)


# -- the numbers that ride along ---------------------------------------------------------------


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("kwargs", [{}, {"gradient_as_bucket_view": True}])
def test_step_stats_are_summed_exactly_beside_float32_gradients(ranks, size, kwargs):
    numbers = [0, 1, 255, 1023, 2**20 - 1, 2**46 + 2**30 + 1]

    def sums() -> tuple[Any, ...]:
        rank = dist.get_rank()
        own, step_sync = engine(Single(), whole=True, **kwargs)
        buckets = own._ddp._get_ddp_logging_data()["bucket_sizes"]
        found = []
        for n, number in enumerate(numbers):
            mine = None if n == rank else data(2).float() + rank
            total = window(own, [mine], items=number + rank, stop=rank == 1)
            found.append((total, step_sync.latest))
        return buckets, found, step_sync.items_seen, gradients(own.module)

    found = ranks(size)(sums)
    expected = [sum(number + rank for rank in range(size)) for number in numbers]
    clock = float(sum(range(size)))
    for buckets, sums_of_rank, seen, own_gradients in found:
        assert len(buckets.split(",")) == 1  # no reduction but that of the gradients
        assert [total for total, _ in sums_of_rank] == expected
        # The numbers are not clocks, of which rank 0 alone has one: theirs is summed too.
        seconds = [stats.seconds for _, stats in sums_of_rank]
        assert seconds == pytest.approx([clock] * len(numbers), rel=1e-6)
        for total, (_, stats) in zip(expected, sums_of_rank, strict=True):
            assert stats._replace(seconds=0.0) == StepStats(total, 1.0, 0.0, 0.0, 0.0)
        assert seen == sum(expected)
        assert own_gradients.keys() == found[0][3].keys()
        assert all(torch.equal(g, found[0][3][name]) for name, g in own_gradients.items())


def test_the_sync_vector_leaves_no_trace_in_the_module(ranks2):
    def names() -> tuple[list[str], bool]:
        model = Model()
        own, _ = engine(model)
        window(own, [data(2)], items=3.0)
        window(own, [None], items=3.0)
        return sorted(model.state_dict()), own._vector.grad is None

    assert ranks2(names) == [(sorted(Model().state_dict()), True)] * 2


# -- gradients ---------------------------------------------------------------------------------


def test_ranks_start_with_the_weights_of_rank_0(ranks2):
    def weights() -> dict[str, Any]:
        model = Model(seed=dist.get_rank())
        engine(model)
        return model.state_dict()

    for found in ranks2(weights):
        for name, value in Model(seed=0).state_dict().items():
            assert torch.equal(found[name], value)


class Forked(Model):
    """Ranks go different ways, so that some parameters have no gradient on some of them."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Linear(4, 1).double()
        self.right = nn.Linear(4, 1).double()
        self.never = nn.Linear(4, 1).double()
        with torch.no_grad():
            for module in (self.left, self.right):
                module.weight.fill_(0.5)
                module.bias.fill_(0.25)

    def training_step(self, x: torch.Tensor) -> torch.Tensor:
        branch = self.left if PartialState().process_index == 0 else self.right
        return branch(self.first(x).tanh()).square().mean()


def test_find_unused_parameters(ranks2):
    def own_gradients() -> dict[str, Any]:
        model = Forked()
        own, _ = engine(model, find_unused_parameters=True)
        for _ in range(2):
            model.zero_grad()
            window(own, [data(4)[:2], data(4)[2:]])
        return gradients(model)

    left, right = (found for found in ranks2(own_gradients))
    for name, gradient in left.items():
        if name.startswith(("never", "last")):
            assert gradient is None
            assert right[name] is None
        else:
            assert gradient.abs().sum() > 0
            assert torch.equal(gradient, right[name])


# -- a graph that is the same in every update -----------------------------------------------------


class Partly(Model):
    """Shares a layer among parts that are checkpointed, and leaves another out."""

    def __init__(self, *, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.never = nn.Linear(3, 3).double()

    def training_step(self, x: torch.Tensor) -> torch.Tensor:
        x = x.requires_grad_()
        halves = x.tensor_split(2)
        parts = [checkpoint(self.first, half, use_reentrant=self.reentrant) for half in halves]
        return self.last(torch.cat(parts).tanh()).square().mean()


def train_partly(
    windows: list[list[list[Any]]],
    *,
    reentrant: bool = False,
    rebuild_at: int | None = None,
    **kwargs: Any,
) -> dict[str, Any]:
    """Windows of micro-batches by rank, with an optimizer that moves whatever has a gradient."""
    rank = dist.get_rank()
    model = Partly(reentrant=reentrant)
    torch.nn.init.ones_(model.never.weight)
    torch.nn.init.ones_(model.never.bias)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5)
    own, _ = engine(model, **kwargs)
    totals = []
    for update, batches in enumerate(windows):
        if update == rebuild_at:
            graph = own.graph
            own, _ = engine(model, **kwargs)
            own.graph = graph
            own.begin_epoch()
        optimizer.zero_grad()
        items = sum(batch is not None for batch in batches[rank])
        totals.append(window(own, batches[rank], items=items))
        optimizer.step()
    return {"totals": totals, **model.state_dict()}


ROUNDS = [
    [[data(3)], [data(6)[3:]]],
    [[data(2), data(3)], [data(5)[2:], data(4)]],
    [[data(4)], [None]],
    [[None], [data(3)]],
    [[data(1), None], [data(2), data(3)]],
    [[data(4)], [data(4)]],
]


@pytest.mark.parametrize("first", [0, 1, 2, 4], ids=["even", "accumulated", "without", "within"])
@pytest.mark.parametrize(
    "kwargs", [{}, {"gradient_as_bucket_view": True}, {"reentrant": True}], ids=["", "view", "re"]
)
def test_a_static_graph_trains_like_a_searched_one(ranks2, first, kwargs):
    windows = ROUNDS[first:] + ROUNDS[:first]
    searched = ranks2(lambda: train_partly(windows, find_unused_parameters=True))
    static = ranks2(lambda: train_partly(windows, static_graph=True, **kwargs))
    tolerance = 1e-13 if "reentrant" in kwargs else 0.0  # which adds up in another order
    for one, other in zip(searched, static, strict=True):
        assert one.pop("totals") == other.pop("totals")
        assert one.keys() == other.keys()
        for name, value in one.items():
            torch.testing.assert_close(other[name], value, rtol=tolerance, atol=tolerance)
        assert torch.equal(other["never.weight"], torch.ones(3, 3).double())  # not even decayed


def test_a_resumed_static_graph_is_bit_identical(ranks3):
    settings = {"static_graph": True, "reentrant": True}
    rounds = [[*batches, [data(9)[2:]]] for batches in ROUNDS]
    whole = ranks3(lambda: train_partly(rounds, **settings))
    resumed = ranks3(lambda: train_partly(rounds, rebuild_at=3, **settings))
    for one, other in zip(whole, resumed, strict=True):
        assert one.pop("totals") == other.pop("totals")
        for name, value in one.items():
            assert torch.equal(other[name], value), name


class Scaling(Model):
    """Keeps in a buffer what it computes from its batch, and uses it."""

    def training_step(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.seen.mul_(0.5).add_(x.abs().amax())
        return self.last((self.first(x) * self.seen).tanh()).square().mean()


@pytest.mark.parametrize("sends", [True, False])
def test_buffers_with_a_static_graph(ranks2, sends):
    def train(**kwargs: Any) -> list[torch.Tensor]:
        model = Scaling()
        own, _ = engine(model, broadcast_buffers=sends, **kwargs)
        for batches in ROUNDS:
            window(own, batches[dist.get_rank()])
        return [*(p.grad for p in model.parameters()), model.seen]

    expected = ranks2(train)
    for kwargs in ({}, {"find_unused_parameters": True}):  # of which it has no need
        found = ranks2(lambda: train(static_graph=True, **kwargs))  # noqa: B023 - called at once
        for one, other in zip(expected, found, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_a_static_graph_with_a_window_without_items(ranks2):
    rounds = [*ROUNDS[:2], [[None], [None]], *ROUNDS[2:]]
    searched = ranks2(lambda: train_partly(rounds, find_unused_parameters=True))
    static = ranks2(lambda: train_partly(rounds, static_graph=True))
    for one, other in zip(searched, static, strict=True):
        assert one.pop("totals") == other.pop("totals")
        for name, value in one.items():
            assert torch.equal(other[name], value), name


def test_another_graph_than_before_the_resume_raises(ranks2):
    def train() -> None:
        model = Partly(reentrant=True)
        own, _ = engine(model, static_graph=True)
        own.graph = dict.fromkeys(gradients(model), 1) | {"never.weight": 0, "never.bias": 0}
        own.begin_epoch()
        window(own, [data(3)])

    with pytest.raises(RankError, match=r"It accumulated 2 times into first\.weight, but 1 times"):
        ranks2(train)


class Changing(Model):
    """Leaves a layer out of what it is called with when that is negative."""

    def training_step(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(x.sum() + self.first(x).tanh() if x.sum() > 0 else x.new_ones(4)).mean()


@pytest.mark.parametrize(
    ("signs", "message"),
    [((1, -1), "This loss depends on fewer"), ((-1, 1), "training graph has changed")],
)
def test_a_graph_that_changes_raises(ranks2, signs, message):
    def train() -> None:
        own, _ = engine(Changing(), static_graph=True)
        for sign in signs:
            window(own, [sign * torch.ones(2, 3, dtype=torch.float64)])

    with pytest.raises(RankError, match=message):
        ranks2(train)


def test_sparse_gradients_with_a_static_graph_are_refused(ranks2):
    with pytest.raises(RankError, match=r"static_graph=True cannot be used with an embedding"):
        ranks2(lambda: engine(nn.Embedding(2, 2, sparse=True), static_graph=True))


# -- the layout of buckets ---------------------------------------------------------------------


class Wide(nn.Module):
    """Enough parameters for several buckets of a megabyte, in float32 where order shows."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        widths = [37, 401, 503, 307, 5]
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise(widths))
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.05)

    def training_step(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
        return x.square().mean()


def train_wide(rebuild_at: int | None, **kwargs: Any) -> list[torch.Tensor]:
    rank = dist.get_rank()
    model = Wide()
    own, _ = engine(model, bucket_cap_mb=1, **kwargs)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    for update in range(4):
        if update == rebuild_at:
            own, _ = engine(model, bucket_cap_mb=1, **kwargs)
        generator = torch.Generator().manual_seed(100 * update + rank)
        optimizer.zero_grad()
        window(own, [torch.randn(7, 37, generator=generator)])
        optimizer.step()
    return [parameter.detach().clone() for parameter in model.parameters()]


@pytest.mark.parametrize("kwargs", [{}, {"find_unused_parameters": True}])
def test_a_run_with_a_rebuilt_engine_is_bit_identical(ranks3, kwargs):
    whole = ranks3(lambda: train_wide(None, **kwargs))
    resumed = ranks3(lambda: train_wide(2, **kwargs))
    for one, other in zip(whole, resumed, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_buckets_follow_the_order_of_backward(ranks2, dtype):
    def order() -> list[list[str]]:
        model = Wide().to(dtype)
        own, _ = engine(model, whole=True, bucket_cap_mb=1)
        names = {id(p): name for name, p in model.named_parameters()}
        buckets: dict[int, list[str]] = {}

        def look(_, bucket):  # torch looks at annotations itself, and not at those in quotes
            found = [names[id(p)] for p in bucket.parameters() if id(p) in names]
            buckets[bucket.index()] = found
            return allreduce_hook(None, bucket)

        own._ddp.register_comm_hook(None, look)
        window(own, [torch.zeros(7, 37, dtype=dtype)], items=7)
        return [buckets[index] for index in sorted(buckets)]

    for buckets in ranks2(order):
        assert len([bucket for bucket in buckets if bucket]) >= 2
        names = [name for name, _ in Wide().named_parameters()]
        assert [name for bucket in buckets for name in bucket] == names[::-1]


@pytest.mark.parametrize("kwargs", [{}, {"gradient_as_bucket_view": True}, {"comm_hook": "fp16"}])
def test_a_loss_that_leaves_out_parameters_raises(ranks2, kwargs):
    def leave_out() -> str:
        model = Single()
        model.other = nn.Linear(1, 1)
        own, _ = engine(model, whole=True, **kwargs)
        with pytest.raises(RuntimeError, match="does not depend on") as caught:
            window(own, [data(2).float()])
        return str(caught.value)

    for text in ranks2(leave_out):
        assert "on other.weight, other.bias, so" in text


# -- buffers, frozen parts, settings -----------------------------------------------------------


@pytest.mark.parametrize("kind", ["engine", "replicas"])
def test_broadcast_buffers(ranks2, kind):
    def buffers() -> float:
        model = Model()
        own = engine(model)[0] if kind == "engine" else started(Replicas, model, StepSync(CPU))
        model.seen.fill_(dist.get_rank() + 3.0)
        own.broadcast_buffers()
        return model.seen.item()

    assert ranks2(buffers) == [3.0, 3.0]


def test_default_ddp_arguments_are_those_of_torch(ranks2):
    def settings() -> list[list[Any]]:
        PartialState()
        plain, ours = (
            nn.parallel.DistributedDataParallel(nn.Linear(1, 1)),
            ddp.wrap(nn.Linear(1, 1)),
        )
        handler = DistributedDataParallelKwargs()
        names = [
            "broadcast_buffers",
            "find_unused_parameters",
            "gradient_as_bucket_view",
            "static_graph",
        ]
        found = [
            [*(getattr(each, name) for name in names), each.bucket_bytes_cap / 2**20]
            for each in (plain, ours)
        ]
        return [*found, [*(getattr(handler, name) for name in names), handler.bucket_cap_mb]]

    for plain, ours, handler in ranks2(settings):
        assert plain == ours == handler


@pytest.mark.parametrize("handler", [None, DistributedDataParallelKwargs()])
def test_gradients_are_bucket_views_unless_ddp_arguments_are_given(ranks2, handler):
    def memory() -> tuple[int, list[int]]:
        model, step_sync = Single(), StepSync(CPU, whole_items=True)
        own = started(DataParallel, model, step_sync, handler)
        own.begin_epoch()
        found = set()
        for _ in range(2):
            own.begin_micro_batch(sync=True)
            loss = own.forward("training_step", data(2).float())
            assert own.backward(loss, stats(2, stop=False, seconds=0.0)) == 4
            found = {p.grad.untyped_storage().data_ptr() for p in model.parameters()}
            offsets = [p.grad.storage_offset() * 4 for p in model.parameters()]
            model.zero_grad()
        return len(found), offsets

    for storages, offsets in ranks2(memory):
        assert storages == (1 if handler is None else 4)
        # Behind the ballot, in the order of backward: as aligned as without it.
        assert offsets == ([100, 84, 68, 64] if handler is None else [0] * 4)


# -- manual optimisation -----------------------------------------------------------------------


def test_manual_optimisation_averages_when_an_optimizer_steps(ranks3):
    def own_gradients() -> tuple[dict[str, Any], Any, dict[str, Any]]:
        rank = dist.get_rank()
        model = Model(seed=rank)
        own = started(Replicas, model, StepSync(CPU))
        start = copy.deepcopy(model.state_dict())
        own.begin_micro_batch(sync=True)
        own.backward(own.forward("training_step", data(6)[rank::3]))
        alone = model.last.bias.grad.clone()
        average_gradients(torch.optim.SGD(model.parameters(), lr=0.1))
        return gradients(model), alone, start

    found = ranks3(own_gradients)
    expected = mean_gradients(lambda m: [m.training_step(data(6)[r::3]) for r in range(3)], 3)
    assert_same([averaged for averaged, _, _ in found], expected)
    assert not torch.equal(found[0][1], found[1][1])
    for _, _, start in found:
        assert all(torch.equal(start[name], v) for name, v in Model(seed=0).state_dict().items())


def test_averaging_gradients_that_only_some_ranks_have(ranks2):
    def averaged() -> list[Any]:
        rank = dist.get_rank()
        optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(2)) for _ in range(4)], lr=1.0)
        both, one, none, half = optimizer.param_groups[0]["params"]
        both.grad = torch.tensor([1.0, 2.0]) + rank
        if rank == 1:
            one.grad = torch.tensor([4.0, 6.0])
        half.data = half.data.half()
        half.grad = torch.tensor([1.0, 3.0]).half() * (rank + 1)
        average_gradients(optimizer)
        return [p.grad if p.grad is None else p.grad.tolist() for p in (both, one, none, half)]

    assert ranks2(averaged) == [[[1.5, 2.5], [2.0, 3.0], None, [1.5, 4.5]]] * 2


TABLE_GRADIENTS: dict[str, Callable[[nn.Embedding], torch.Tensor]] = {
    "rows": lambda table: table(torch.tensor([1])).sum(),
    "all rows": lambda table: nn.functional.linear(torch.ones(1, 2), table.weight).sum(),
    "no rows": lambda table: table(torch.tensor([], dtype=torch.int64)).sum(),
}


@pytest.mark.parametrize(
    ("used", "is_sparse"),
    [
        (["rows", None], True),
        (["no rows", None], True),
        (["all rows", None], False),  # as where a weight is tied by its use alone
        (["all rows", "rows"], False),
        ([None, None], None),
    ],
)
def test_averaging_sparse_and_dense_gradients_of_an_embedding(ranks2, used, is_sparse):
    def averaged(sparse: bool) -> tuple[Any, Any]:
        table = nn.Embedding(3, 2, sparse=sparse)
        if (own := used[dist.get_rank()]) is not None:
            TABLE_GRADIENTS[own](table).backward()
        optimizer = torch.optim.SGD(table.parameters(), lr=1.0)
        average_gradients(optimizer, sparse_weights(table))
        gradient = table.weight.grad
        if gradient is None:
            return None, None
        return gradient.is_sparse, gradient.to_dense().tolist()

    expected = ranks2(averaged, False)[0][1]
    assert ranks2(averaged, True) == [(is_sparse, expected)] * 2


# -- which engine ------------------------------------------------------------------------------


def test_the_engine_of_one_process():
    model, step_sync = Model(), StepSync(CPU)
    own = choose_engine(options(), automatic=True)
    assert type(own) is SingleDevice
    own.start(model, step_sync)
    own.begin_micro_batch(sync=False)
    own.backward(own.forward("training_step", data(2)))
    loss = own.forward("training_step", data(4))
    assert own.backward(loss, StepStats(3.0, 1.0, 0.0, 2.0, 0.0)) == 3.0
    assert step_sync.latest == StepStats(3.0, 1.0, 0.0, 2.0, 0.0)
    own.backward(None, StepStats(2.0, 0.0, 0.0, 3.0, 1.0))
    assert step_sync.items_seen == 5.0
    own.broadcast_buffers()
    expected = mean_gradients(lambda m: [m.training_step(data(2)), m.training_step(data(4))], 1)
    assert_same([gradients(model)], expected)


def test_choose_engine_on_several_processes(ranks2):
    def chosen() -> list[str]:
        return [
            type(choose_engine(options(), automatic=automatic)).__name__
            for automatic in (True, False)
        ]

    assert ranks2(chosen) == [["DataParallel", "Replicas"]] * 2
