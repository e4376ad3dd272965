"""Collectives over trees and objects, against what each rank put in."""

from __future__ import annotations

import collections
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist

from tests.helpers.ranks import RankError
from trainer.distributed import collectives


class Pair(NamedTuple):
    left: Any
    right: Any


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


def test_gather_of_nothing_is_nothing(ranks2):
    assert ranks2(lambda: collectives.gather(torch.zeros(0, 3)).shape == (0, 3)) == [True, True]


@pytest.mark.parametrize("operation", ["gather", "reduce"])
def test_a_leaf_that_is_no_tensor_is_named(ranks2, operation):
    with pytest.raises(RankError, match=rf"TypeError: {operation} takes tensors.* it met int"):
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


def test_reduce_takes_tensors_that_are_not_contiguous(ranks2):
    def reduce() -> list[Any]:
        return collectives.reduce(torch.arange(4.0).reshape(2, 2).t() + dist.get_rank()).tolist()

    assert ranks2(reduce) == [[[1.0, 5.0], [3.0, 7.0]]] * 2


def test_wrong_reductions_are_refused_before_anything_is_sent(ranks2):
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


def test_broadcast_takes_tensors_that_are_not_contiguous(ranks2):
    def broadcast() -> tuple[Any, Any]:
        rank = dist.get_rank()
        turned = (torch.arange(6).reshape(2, 3) + 10 * rank).t()
        grid = torch.arange(6).reshape(2, 3) + 10 * rank
        collectives.broadcast([turned, grid[:, :2]])
        return turned.tolist(), grid.tolist()

    turned = [[0, 3], [1, 4], [2, 5]]
    assert ranks2(broadcast) == [
        (turned, [[0, 1, 2], [3, 4, 5]]),
        (turned, [[0, 1, 12], [3, 4, 15]]),
    ]


def test_objects_are_gathered_in_the_order_of_ranks(ranks3):
    def gather() -> tuple[Any, Any]:
        rank = dist.get_rank()
        return (
            collectives.gather_object(["a"] * rank + [{"rank": rank}]),
            collectives.all_gather_object((rank, None)),
        )

    expected = (
        [{"rank": 0}, "a", {"rank": 1}, "a", "a", {"rank": 2}],
        [(0, None), (1, None), (2, None)],
    )
    assert ranks3(gather) == [expected] * 3


@pytest.mark.parametrize("source", [0, 2])
def test_an_object_is_broadcast(ranks3, source):
    def broadcast() -> Any:
        return collectives.broadcast_object({"from": dist.get_rank()}, from_process=source)

    assert ranks3(broadcast) == [{"from": source}] * 3


def test_one_process_answers_at_once():
    tensor = torch.tensor([1.0])
    assert collectives.gather(tensor) is tensor
    assert collectives.broadcast([tensor])[0] is tensor
    assert collectives.gather_object([1, 2]) == [1, 2]
    assert collectives.all_gather_object(3) == [3]
    assert collectives.broadcast_object("x") == "x"
    assert collectives.reduce(tensor, "mean", 2.0).tolist() == [2.0]
    with pytest.raises(TypeError, match="reduce takes tensors"):
        collectives.reduce([1.0])
