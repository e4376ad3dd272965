"""Collectives over trees and objects, against what each rank put in."""

from __future__ import annotations

import collections
import dataclasses
import difflib
import re
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch.nn.utils.rnn import pack_sequence

from tests.helpers import layouts
from tests.helpers.ranks import RankError
from trainer.distributed import collectives, guards, transport
from trainer.distributed.objects import (
    all_gather_object,
    broadcast_object,
    broadcast_object_list,
    gather_object,
)
from trainer.state import PartialState


class Pair(NamedTuple):
    left: Any
    right: Any


@dataclasses.dataclass
class Sample:
    x: Any
    y: Any


def lists(tree: Any) -> Any:
    """The tree with its tensors as lists: values that travel."""
    return collectives.map_tree(
        lambda leaf: leaf.tolist() if isinstance(leaf, torch.Tensor) else leaf, tree
    )


def test_gather_concatenates_every_tensor_of_a_tree(ranks3):
    def gather() -> tuple[Any, str]:
        rank = dist.get_rank()
        tree = {
            "scalar": torch.tensor(float(rank)),
            "pair": Pair(torch.full((1, 2), rank), [torch.tensor([True, rank == 1])]),
            "turned": torch.tensor([[rank, 10], [rank, 20]]).t(),
        }
        gathered = collectives.gather(tree)
        return lists(gathered), type(gathered["pair"]).__name__

    expected = {
        "scalar": [0.0, 1.0, 2.0],
        "pair": ([[0, 0], [1, 1], [2, 2]], [[True, False, True, True, True, False]]),
        "turned": [[0, 0], [10, 20], [1, 1], [10, 20], [2, 2], [10, 20]],
    }
    assert ranks3(gather) == [(expected, "Pair")] * 3


@pytest.mark.parametrize("operation", ["gather", "reduce"])
def test_a_leaf_that_is_no_tensor_raises(ranks2, operation):
    with pytest.raises(RankError, match=rf"TypeError: {operation} takes tensors.* it got int"):
        ranks2(lambda: getattr(collectives, operation)({"a": [torch.ones(1), 3]}))
    assert ranks2(dist.get_rank) == [0, 1]


def test_reduce_sums_averages_scales_and_leaves_its_input(ranks3):
    def reduce() -> tuple[Any, ...]:
        tensor = torch.tensor([1.0, 2.0]) * (dist.get_rank() + 1)
        tree = {"a": (tensor,)}
        return (
            lists(collectives.reduce(tree)),
            lists(collectives.reduce(tree, "mean")),
            lists(collectives.reduce(tree, "sum", scale=0.5)),
            lists(collectives.reduce(tree, "none")),
            lists(collectives.reduce(torch.tensor(dist.get_rank()))),
            tensor.tolist(),
        )

    for rank, found in enumerate(ranks3(reduce), start=1):
        assert found == (
            {"a": ([6.0, 12.0],)},
            {"a": ([2.0, 4.0],)},
            {"a": ([3.0, 6.0],)},
            {"a": ([1.0 * rank, 2.0 * rank],)},
            3,
            [1.0 * rank, 2.0 * rank],
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int64])
@pytest.mark.parametrize("length", [1, 2, 1001])
def test_numbers_are_summed_in_rank_order(ranks3, dtype, length):
    def total() -> torch.Tensor:
        large = 2**24 if dtype == torch.float32 else 2**53
        vector = torch.arange(length).to(dtype)
        vector[-1] = (large, 1, -large)[dist.get_rank()]
        transport.sum_numbers(vector)
        return vector

    expected = torch.arange(length).to(dtype) * 3
    expected[-1] = 1 if dtype == torch.int64 else 0  # rounded away, wherever it stands
    assert all(torch.equal(found, expected) for found in ranks3(total))


def test_unknown_reductions_raise(ranks2):
    with pytest.raises(RankError, match=r"ValueError: reduction is 'avg'; it must be one of"):
        ranks2(lambda: collectives.reduce(torch.ones(1), "avg"))
    with pytest.raises(RankError, match=r"TypeError: The mean of torch.int64 .*\.float\(\)"):
        ranks2(lambda: collectives.reduce(torch.ones(1, dtype=torch.int64), "mean"))


@pytest.mark.parametrize("source", [0, 1])
def test_broadcast_changes_tensors_in_place(ranks2, source):
    def broadcast() -> tuple[Any, bool]:
        tensor = torch.full((2,), float(dist.get_rank()))
        tree = collections.OrderedDict(a=tensor, b="text", c=[torch.tensor(dist.get_rank())])
        result = collectives.broadcast(tree, from_process=source)
        return lists(result), result["a"] is tensor

    expected = {"a": [float(source)] * 2, "b": "text", "c": [source]}
    assert ranks2(broadcast) == [(expected, True)] * 2


def test_objects_are_gathered_in_rank_order(ranks3):
    def gather() -> tuple[Any, Any]:
        rank = dist.get_rank()
        return (
            gather_object(["a"] * rank + [{"rank": rank}]),
            all_gather_object((rank, None)),
        )

    expected = (
        [{"rank": 0}, "a", {"rank": 1}, "a", "a", {"rank": 2}],
        [(0, None), (1, None), (2, None)],
    )
    assert ranks3(gather) == [expected] * 3


@pytest.mark.parametrize("source", [0, 2])
def test_an_object_is_broadcast(ranks3, source):
    def broadcast() -> Any:
        return broadcast_object({"from": dist.get_rank()}, from_process=source)

    assert ranks3(broadcast) == [{"from": source}] * 3


KINDS = [
    *(torch.bool, torch.uint8, torch.int16, torch.int64, torch.uint16, torch.uint64),
    *(torch.float16, torch.bfloat16, torch.float64, torch.float8_e4m3fn),
    *(torch.complex32, torch.complex64),
]


def of_rank(rank: int, kind: torch.dtype) -> torch.Tensor:
    """Small whole numbers, exact in every type."""
    return torch.tensor([[rank, 1, 2 * rank], [3, rank % 2, 0]], dtype=torch.float32).to(kind)


SMALL = (torch.uint8, torch.int8, torch.int16)


def shown(tensor: torch.Tensor) -> tuple[str, Any]:
    wide = torch.complex128 if tensor.is_complex() else torch.float64
    return str(tensor.dtype), tensor.to(wide).tolist()


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_every_dtype_is_sent(ranks3, kind):
    def travel() -> list[Any]:
        own = of_rank(dist.get_rank(), kind)
        sent = own.clone()
        assert collectives.broadcast(sent, from_process=2) is sent
        longer = own[:1] if dist.get_rank() else own
        padded = collectives.pad_across_processes(longer, pad_index=1)
        results = [collectives.gather(own), collectives.reduce(own), sent, padded]
        return [shown(each) for each in (*results, own)]

    every = [of_rank(rank, kind) for rank in range(3)]
    exact = [each.to(torch.complex128 if kind.is_complex else torch.float64) for each in every]
    for rank, found in enumerate(ranks3(travel)):
        padded = exact[rank].clone()
        if rank:
            padded[1:] = 1
        # Booleans are counted, and small integers added up without wrapping, as torch.sum does.
        total = sum(exact).to(torch.int64 if kind in (torch.bool, torch.uint16, *SMALL) else kind)
        results = (torch.cat(exact).to(kind), total, every[2], padded.to(kind), every[rank])
        assert found == [shown(each) for each in results]


def test_results_have_no_autograd_graph(ranks2):
    def travel() -> list[Any]:
        weight = torch.ones(2, requires_grad=True)
        output = weight * (dist.get_rank() + 2.0)
        collectives.broadcast(weight, from_process=1)  # a leaf, changed in place
        results = [collectives.gather(output), collectives.reduce(output, "mean")]
        return [[each.requires_grad, each.tolist()] for each in (*results, weight)]

    expected = [[False, [2.0, 2.0, 3.0, 3.0]], [False, [2.5, 2.5]], [True, [1.0, 1.0]]]
    assert ranks2(travel) == [expected] * 2


def test_dataclasses_are_sent(ranks2):
    def travel() -> list[Any]:
        own = Sample(torch.tensor([dist.get_rank()]), torch.tensor(1.0))
        gathered, reduced = collectives.gather(own), collectives.reduce(own)
        return [type(gathered).__name__, lists(vars(gathered)), lists(vars(reduced))]

    expected = ["Sample", {"x": [0, 1], "y": [1.0, 1.0]}, {"x": [1], "y": 2.0}]
    assert ranks2(travel) == [expected] * 2


def test_scaled_integers_become_floats_as_in_torch(ranks2):
    def reduce() -> list[Any]:
        small = torch.tensor([2, 3], dtype=torch.int16)
        results = [collectives.reduce(small, scale=each) for each in (2, 0.5)]
        results.append(collectives.reduce(small, "none", scale=2))
        return [shown(each) for each in results]

    expected = [("torch.int64", [8, 12]), ("torch.float32", [2, 3]), ("torch.int16", [4, 6])]
    assert ranks2(reduce) == [expected] * 2


def test_reduction_none_sends_nothing(ranks2):
    def reduce() -> Any:
        # The shapes do not fit, and one rank does not even call it.
        own = torch.arange(dist.get_rank() + 1)
        result = collectives.reduce(own, "none") if dist.get_rank() else own
        return result.tolist(), result is own

    assert ranks2(reduce) == [([0], True), ([0, 1], False)]


# -- memory layouts

WAYS: dict[str, Any] = {  # what arrives, and how many rows of rank 1 it holds
    "gather": (collectives.gather, None),
    "gather_uneven": (
        lambda own: collectives.gather_uneven(without_last_row(own, dist.get_rank())),
        -1,
    ),
    "pad_across_processes": (
        lambda own: collectives.gather(
            collectives.pad_across_processes(without_last_row(own, dist.get_rank()))
        ),
        0,
    ),
    "all_gather_object": (lambda own: joined(all_gather_object(own)), None),
}


def without_last_row(tensors: dict[str, torch.Tensor], rank: int) -> dict[str, torch.Tensor]:
    return {name: t[: len(t) - rank] if t.ndim else t for name, t in tensors.items()}


def joined(parts: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    return {name: torch.cat([torch.atleast_1d(part[name]) for part in parts]) for name in parts[0]}


@pytest.mark.parametrize("way", WAYS)
def test_tensors_of_any_memory_layout_are_gathered(ranks2, way):
    def gather() -> list[Any]:
        function, changed = WAYS[way]
        wrong = []
        for layout in layouts.LAYOUTS:
            found = function(layouts.tensors(layout, dist.get_rank()))
            first, second = layouts.bits(layout, 0), layouts.bits(layout, 1)
            for name, tensor in found.items():
                parts = [first[name], second[name]]
                if parts[0].ndim == 1:  # scalars have no rows
                    parts = [each[None] for each in parts]
                elif changed == 0 and len(parts[1]):
                    parts[1][-1] = 0
                elif changed == -1:
                    parts[1] = parts[1][: len(parts[1]) - 1]
                if not torch.equal(layouts.bits_of(tensor), torch.cat(parts)):
                    wrong.append((layout, name))
        return wrong

    assert ranks2(gather) == [[], []]


@pytest.mark.parametrize("source", [0, 1])
def test_tensors_of_any_memory_layout_are_broadcast_into(ranks2, source):
    def broadcast() -> list[Any]:
        wrong = []
        for layout in layouts.LAYOUTS:
            if layout.startswith("expanded"):
                continue  # torch's own error says to clone it
            own = layouts.tensors(layout, dist.get_rank())
            apart = layouts.tensors(layout, dist.get_rank())  # they share memory with another one
            own |= {"conjugated": apart["conjugated"], "negated": apart["negated"].clone()}
            assert collectives.broadcast(own, source) is own
            expected = layouts.bits(layout, source)
            wrong += [
                (layout, name)
                for name, tensor in own.items()
                if not torch.equal(layouts.bits_of(tensor), expected[name])
            ]
        return wrong

    assert ranks2(broadcast) == [[], []]


@pytest.mark.parametrize("reduction", ["sum", "mean", "none"])
def test_tensors_of_any_memory_layout_are_reduced(ranks2, reduction):
    def reduce() -> list[Any]:
        wrong = []
        for layout, view in layouts.LAYOUTS.items():
            tables = [torch.randn(4, 6, dtype=torch.complex128) for _ in range(2)]
            values = [view(table).conj() for table in tables]
            own = values[dist.get_rank()]
            found = collectives.reduce([own, own.imag], reduction)
            total = {"sum": sum(values), "mean": sum(values) / 2, "none": own}[reduction]
            if found[0].tolist() != total.tolist() or found[1].tolist() != total.imag.tolist():
                wrong.append(layout)
        return wrong

    assert ranks2(reduce) == [[], []]


# -- padding


@pytest.mark.parametrize(
    ("dim", "first", "expected"),
    [
        (0, False, [[[1, 1], [9, 9], [9, 9]], [[1, 1], [1, 1], [9, 9]], [[1, 1]] * 3]),
        (-2, True, [[[9, 9], [9, 9], [1, 1]], [[9, 9], [1, 1], [1, 1]], [[1, 1]] * 3]),
    ],
)
def test_padding_makes_sizes_equal(ranks3, dim, first, expected):
    def pad() -> Any:
        rows = torch.ones(dist.get_rank() + 1, 2, dtype=torch.int64)
        tree = {"a": [rows], "scalar": torch.tensor(5), "b": Pair(rows.float(), rows.t())}
        padded = collectives.pad_across_processes(
            {"a": [rows], "scalar": torch.tensor(5)}, dim, pad_index=9, pad_first=first
        )
        turned = collectives.pad_across_processes(tree["b"].right, -1 - dim % 2, 9, first)
        gathered = collectives.gather(padded["a"][0])
        assert padded["scalar"].item() == 5
        assert turned.t().tolist() == padded["a"][0].tolist()
        return padded["a"][0].tolist(), gathered.shape[0]

    assert ranks3(pad) == [(each, 9) for each in expected]


@pytest.mark.parametrize("dim", [2, -3])
def test_a_missing_dimension_is_not_padded(ranks2, dim):
    def pad() -> bool:
        own = torch.ones(2, 2)
        return collectives.pad_across_processes(own, dim) is own

    assert ranks2(pad) == [True] * 2


def test_a_nested_tensor_warns_and_is_not_padded(ranks2):
    def pad() -> Any:
        rows = [torch.ones(dist.get_rank() + 1), torch.ones(3)]
        own = torch.nested.nested_tensor(rows, layout=torch.jagged)
        with pytest.warns(collectives.CannotPadNestedTensorWarning, match="to_padded_tensor"):
            return collectives.pad_across_processes([own])[0] is own

    assert ranks2(pad) == [True] * 2


# -- calls that do not fit together


def failures(pool: Any, function: Any) -> list[str]:
    """What each rank raised."""

    def call() -> str:
        try:
            function()
        except Exception as error:  # noqa: BLE001 - whatever it is, the test looks at it
            return f"{type(error).__name__}: {error}"
        return "nothing"

    found = pool(call)
    assert pool(dist.get_rank) == list(range(pool.size))  # they are still in step
    return found


@pytest.mark.parametrize(
    ("name", "plans"),
    [
        ("shape", ["gather (float32[2, 3])", "gather (float32[2, 4])"]),
        ("dtype", ["gather (int64[2])", "gather (float64[2])"]),
        ("keys", ["gather (dict{'a': int64[]})", "gather (dict{'b': int64[]})"]),
        ("operation", ["gather (int64[2])", "reduce sum (int64[2])"]),
        ("reduction", ["reduce mean (float32[])", "reduce sum (float32[])"]),
        ("source", ["broadcast from 0 (int64[2])", "broadcast from 1 (int64[2])"]),
        ("objects", ["gather_object", "gather (int64[2])"]),
        ("box", ["broadcast_object from 0", "all_gather_object"]),
        ("pad", ["pad_across_processes along dimension 1 (float32[*, *])", "(float32[*])"]),
    ],
)
def test_mismatched_calls_raise_on_every_rank(ranks2, name, plans):
    def call() -> None:
        rank = dist.get_rank()
        two = torch.arange(2)
        {
            "shape": lambda: collectives.gather(torch.ones(2, 3 + rank)),
            "dtype": lambda: collectives.gather(two.double() if rank else two),
            "keys": lambda: collectives.gather({"b" if rank else "a": torch.tensor(1)}),
            "operation": lambda: (collectives.reduce if rank else collectives.gather)(two),
            "reduction": lambda: collectives.reduce(torch.tensor(1.0), "sum" if rank else "mean"),
            "source": lambda: collectives.broadcast(two, from_process=rank),
            "objects": lambda: (collectives.gather if rank else gather_object)(two),
            "box": lambda: all_gather_object(1) if rank else broadcast_object(1),
            "pad": lambda: collectives.pad_across_processes(
                torch.ones((2,) if rank else (2, 2)), 1
            ),
        }[name]()

    found = failures(ranks2, call)
    assert found[0] == found[1]
    assert found[0].startswith("DistributedOperationException: ")
    for rank, plan in enumerate(plans):
        assert f"rank {rank}: " in found[0]
        assert plan in found[0].partition(f"rank {rank}: ")[2].splitlines()[0]


def test_an_error_of_one_rank_raises_on_all(ranks3):
    def gather() -> None:
        collectives.gather(["text"] if dist.get_rank() == 1 else [torch.ones(1)])

    found = failures(ranks3, gather)
    assert found[1].startswith("TypeError: gather takes tensors")
    assert found[0] == found[2]
    assert "rank 1: gather fails with TypeError: gather takes tensors" in found[0]


def test_calls_on_an_accelerator_are_compared_in_debug_mode_only(monkeypatch):
    monkeypatch.setattr(guards, "side_device", lambda: torch.device("cuda"))
    assert not collectives.is_checked()
    PartialState._reset_state()
    monkeypatch.setenv("ACCELERATE_DEBUG_MODE", "true")
    assert collectives.is_checked()


def test_collectives_without_the_check(ranks2):
    def travel() -> list[Any]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(collectives, "is_checked", lambda: False)
            patch.setattr(collectives, "check_collective", None)
            rank = dist.get_rank()
            own = torch.arange(1 + rank)
            results = [
                collectives.gather(own[:1] + rank),
                collectives.gather_uneven(own),
                collectives.reduce(own[:1] + rank),
                collectives.broadcast(own[:1] + rank, 1),
                collectives.pad_across_processes(own, pad_index=5)[:2],
            ]
            with pytest.raises(TypeError, match="gather takes tensors"):
                collectives.gather(3)
        return [each.tolist() for each in results]

    shared = [[0, 1], [0, 0, 1], [1], [1]]
    assert ranks2(travel) == [[*shared, [0, 5]], [*shared, [0, 1]]]


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: torch.ones(2, device="meta"), "ValueError: gather got a tensor on meta.* on cpu"),
        (lambda: torch.ones(2).to_sparse(), r"TypeError: gather takes dense tensors.*to_dense"),
        (lambda: pack_sequence([torch.ones(2)]), "TypeError: gather takes .* got PackedSequence"),
        (
            lambda: torch.nested.nested_tensor([torch.ones(1)], layout=torch.jagged),
            "TypeError: gather takes dense tensors.*nested",
        ),
    ],
)
def test_tensors_that_cannot_be_sent_raise(ranks2, make, text):
    for each in failures(ranks2, lambda: collectives.gather(make())):
        assert re.match(text, each)


@pytest.mark.parametrize("source", [-1, 2])
def test_an_unknown_from_process_raises(ranks2, source):
    for function in (
        lambda: collectives.broadcast(torch.ones(1), source),
        lambda: broadcast_object_list([1], source),
    ):
        for each in failures(ranks2, function):
            assert each.startswith(f"ValueError: from_process is {source}; it must be a rank from")


# -- objects


def test_gather_object_concatenates_sequences(ranks2):
    def gather() -> list[Any]:
        rank = dist.get_rank()
        objects = [
            ("a", rank),
            {rank},
            range(rank, 2),
            torch.tensor([[rank, 2]]),
            [],
            # and what is none
            "ab",
            {"rank": rank},
            difflib.Match(rank, 1, 1),  # a named tuple
            torch.tensor(rank),
        ]
        found = [gather_object(each) for each in objects]
        return [[item.tolist() if hasattr(item, "tolist") else item for item in x] for x in found]

    expected = [
        ["a", 0, "a", 1],
        [0, 1],
        [0, 1, 1],
        [[0, 2], [1, 2]],
        [],
        ["ab", "ab"],
        [{"rank": 0}, {"rank": 1}],
        [(0, 1, 1), (1, 1, 1)],
        [0, 1],
    ]
    assert ranks2(gather) == [expected] * 2


def test_objects_of_unequal_sizes_are_sent(ranks3):
    def gather() -> list[Any]:
        rank = dist.get_rank()
        parts = all_gather_object("x" * (100_000 * rank))
        text = broadcast_object("y" * (100_000 * rank), from_process=2)
        return [[len(part) for part in parts], len(text)]

    assert ranks3(gather) == [[[0, 100_000, 200_000], 200_000]] * 3


def test_only_the_values_of_a_view_are_sent():
    table = torch.arange(1000.0).reshape(10, 100)
    payload, _ = transport.dump([table[0], table[:, 0]])
    assert len(payload) < 2 * table[0].nbytes + 2000
    assert [each.tolist() for each in transport.load(payload)] == [
        list(range(100)),
        list(range(0, 1000, 100)),
    ]


@pytest.mark.parametrize("source", [0, 1])
def test_a_list_of_objects_is_broadcast_in_place(ranks2, source):
    def broadcast() -> tuple[Any, bool]:
        rank = dist.get_rank()
        own = [rank, {"from": rank}] + ["more"] * rank
        result = broadcast_object_list(own, source)
        return own, result is own

    assert ranks2(broadcast) == [([source, {"from": source}] + ["more"] * source, True)] * 2


UNFIT = "local object"  # Python's words for a lambda that cannot be pickled


@pytest.mark.parametrize("number", [0, 1])
def test_an_object_that_cannot_be_pickled_raises_on_all(ranks3, number):
    def send() -> None:
        value = (lambda: 0) if dist.get_rank() == 1 else 0
        if number:
            gather_object([value])
        else:
            broadcast_object_list([value], from_process=1)

    found = failures(ranks3, send)
    assert "RuntimeError" not in found[1]
    assert UNFIT in found[1]
    assert found[0] == found[2]
    assert found[0].startswith("RuntimeError: Rank 1 could not send its object: ")
    assert UNFIT in found[0]


@pytest.mark.gpu
def test_tensors_of_an_accelerator_are_sent_through_the_host():
    value = {"deep": [torch.ones(2, device="cuda", requires_grad=True)], "host": torch.ones(1)}
    payload, error = transport.dump(value)
    assert error is None
    arrived = transport.load(payload)
    assert arrived["deep"][0].device == PartialState().device
    assert arrived["deep"][0].tolist() == [1.0, 1.0]
    assert arrived["host"].device.type == "cpu"


def test_collectives_on_one_process():
    tensor = torch.tensor([1.0])
    assert collectives.gather(tensor) is tensor
    assert collectives.broadcast([tensor])[0] is tensor
    assert gather_object([1, 2]) == [1, 2]
    assert gather_object((1, 2)) == [1, 2]
    assert gather_object("ab") == ["ab"]
    assert collectives.gather(["any", 1]) == ["any", 1]
    assert collectives.pad_across_processes([tensor])[0] is tensor
    objects = [1, "a"]
    assert broadcast_object_list(objects) is objects
    assert all_gather_object(3) == [3]
    assert broadcast_object("x") == "x"
    assert collectives.reduce(tensor, "mean", 2.0).tolist() == [2.0]
    assert collectives.reduce(tensor, "none") is not tensor
    flags = collectives.reduce(torch.tensor([True, False]))
    assert (flags.dtype, flags.tolist()) == (torch.int64, [1, 0])
    for refuses in (collectives.reduce, collectives.pad_across_processes):
        with pytest.raises(TypeError, match=f"{refuses.__name__} takes tensors"):
            refuses([1.0])
    with pytest.raises(ValueError, match="from_process is 1; it must be a rank from 0 to 0"):
        collectives.broadcast(tensor, 1)
