"""Nested containers keep their types, their order and their leaves."""

from __future__ import annotations

import collections
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
import torch
from torch.nn.utils.rnn import pack_sequence

from trainer import tree


class Pair(NamedTuple):
    left: Any
    right: Any


class Encoding(collections.UserDict):
    """As tokenizers return it: a mapping that is no dict and is made from one."""


class Movable:
    def __init__(self):
        self.device = None

    def to(self, device, non_blocking=False):
        moved = Movable()
        moved.device = device
        return moved


def nested(one: Any, two: Any, three: Any) -> Any:
    return {"a": [one, Pair(two, "text")], "b": Encoding(c=(three,))}


def test_map_keeps_every_container():
    doubled = tree.map_tree(lambda leaf: leaf * 2, nested(1, 2, 3))
    assert doubled == {"a": [2, Pair(4, "texttext")], "b": {"c": (6,)}}
    assert type(doubled["a"][1]) is Pair
    assert type(doubled["b"]) is Encoding
    assert type(doubled["b"]["c"]) is tuple


def test_map_leaves_its_input_alone():
    before = nested(1, 2, 3)
    tree.map_tree(lambda leaf: 0, before)
    assert before == nested(1, 2, 3)


def test_map_knows_dictionaries_with_constructors_of_their_own():
    ordered = tree.map_tree(str, collections.OrderedDict(b=1, a=2))
    assert type(ordered) is collections.OrderedDict
    assert list(ordered.items()) == [("b", "1"), ("a", "2")]
    default = tree.map_tree(str, collections.defaultdict(list, a=1))
    assert default == {"a": "1"}
    assert default["other"] == []


def test_map_knows_the_named_results_of_torch():
    result = tree.map_tree(lambda leaf: leaf + 1, torch.max(torch.zeros(2, 3), 0))
    assert result.values.tolist() == [1.0, 1.0, 1.0]


def test_leaves_come_in_order():
    assert list(tree.leaves(nested(1, 2, 3))) == [1, 2, "text", 3]
    assert list(tree.leaves(7)) == [7]
    assert list(tree.leaves([])) == []


def test_to_device_moves_everything_that_can_move():
    target = torch.device("meta")
    moved = tree.to_device(nested(torch.ones(2), Movable(), 5), target)
    assert moved["a"][0].device == target
    assert moved["a"][1].left.device == target
    assert moved["a"][1].right == "text"
    assert moved["b"]["c"] == (5,)


def test_packed_sequences_move_as_a_whole():
    packed = pack_sequence([torch.ones(3), torch.ones(1), torch.ones(2)], enforce_sorted=False)
    moved = tree.to_device([packed], torch.device("meta"))[0]
    assert type(moved) is type(packed)
    assert moved.data.device == torch.device("meta")
    assert moved.batch_sizes.device == torch.device("cpu")  # torch wants them there
    assert moved.unsorted_indices.device == torch.device("meta")


def test_detach_cuts_the_graph_and_shares_the_values():
    leaf = torch.ones(2, requires_grad=True)
    result = leaf * 3
    cut = tree.detach((result, "text"))
    assert not cut[0].requires_grad
    assert cut[0].data_ptr() == result.data_ptr()
    assert cut[1] == "text"


def test_to_host_detaches():
    host = tree.to_host({"a": torch.ones(2, requires_grad=True) * 3, "b": 1})
    assert host["a"].device == torch.device("cpu")
    assert not host["a"].requires_grad
    assert host["b"] == 1


@pytest.mark.parametrize(
    ("batch", "size"),
    [
        (torch.zeros(3, 5), 3),
        ({"scale": torch.tensor(1.0), "x": [torch.zeros(4)], "y": torch.zeros(9)}, 4),
        ((Pair("name", torch.zeros(0, 2)),), 0),
        (torch.tensor(1.0), None),
        (["a", 3], None),
        (pack_sequence([torch.ones(3), torch.ones(2)]), 2),
    ],
)
def test_batch_size_is_the_length_of_the_first_tensor_that_has_one(batch, size):
    assert tree.find_batch_size(batch) == size


def test_a_read_only_mapping_is_made_anew():
    result = tree.map_tree(str, MappingProxyType({"a": 1}))
    assert type(result) is MappingProxyType
    assert result["a"] == "1"
