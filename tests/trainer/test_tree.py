"""Nested containers keep their types, their order and their leaves."""

from __future__ import annotations

import collections
import dataclasses
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
import torch
from torch.nn.utils.rnn import pack_sequence

from trainer import tree
from trainer.utils import find_batch_size


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


def test_map_keeps_every_container_and_its_input():
    before = nested(1, 2, 3)
    doubled = tree.map_tree(lambda leaf: leaf * 2, before)
    assert doubled == {"a": [2, Pair(4, "texttext")], "b": {"c": (6,)}}
    assert type(doubled["a"][1]) is Pair
    assert type(doubled["b"]) is Encoding
    assert type(doubled["b"]["c"]) is tuple
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


def test_find_batch_size_without_a_size_raises():
    assert find_batch_size(data=[{"x": torch.zeros(3, 2)}]) == 3
    assert find_batch_size((torch.zeros(0, 2),)) == 0
    for empty in ([], {}, ({}, [])):
        with pytest.raises(ValueError, match=f"from an empty {type(empty).__name__}"):
            find_batch_size(empty)
    with pytest.raises(TypeError, match="find_batch_size needs a tensor, but found only int, str"):
        find_batch_size(["a", 3])
    with pytest.raises(ValueError, match="no tensor has a dimension"):
        find_batch_size(torch.tensor(1.0))


def test_a_read_only_mapping_is_made_anew():
    result = tree.map_tree(str, MappingProxyType({"a": 1}))
    assert type(result) is MappingProxyType
    assert result["a"] == "1"


# Containers with attributes, whose constructors take other arguments


class Named:
    """Sets an attribute, which the constructor requires."""

    __slots__ = ()

    def __init__(self, *items: Any, name: str) -> None:
        super().__init__(*items)
        self.name = name


class NamedDict(Named, dict):
    pass


class NamedDefaultDict(Named, collections.defaultdict):
    pass


class NamedUserDict(Named, collections.UserDict):
    pass


class SlottedList(list):
    __slots__ = ("name",)

    def __init__(self, name: str) -> None:
        self.name = name


class NamedTuple_(tuple):
    def __new__(cls, items: Any, name: str):
        made = super().__new__(cls, items)
        made.name = name
        return made


class ReadOnly(collections.abc.Mapping):
    def __init__(self, name: str, items: dict[str, Any]) -> None:
        self.name, self.units, self._items = name, dict.fromkeys(items, "m"), items

    def __getitem__(self, key):
        return self._items[key]

    def __iter__(self):
        return iter(self._items)

    def __len__(self):
        return len(self._items)


class AttributeDict(dict):
    """Its items are its attributes, as in many configurations."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.__dict__ = self


class GetAttributeDict(dict):
    """It has an attribute for each key, and a KeyError for every other."""

    def __getattr__(self, key):
        return self[key]


def containers() -> list[Any]:
    table = {"a": torch.ones(1), "b": torch.ones(2)}
    pair = list(table.values())
    slotted = SlottedList("given")
    slotted.extend(pair)
    return [
        *(NamedDict(table, name="given"), NamedDefaultDict(list, table, name="given")),
        *(NamedUserDict(table, name="given"), ReadOnly("given", table)),
        *(slotted, NamedTuple_(pair, "given")),
    ]


@pytest.mark.parametrize("before", containers(), ids=lambda each: type(each).__name__)
def test_a_copy_has_the_class_and_the_attributes(before):
    before.name = "changed since"
    if hasattr(before, "__dict__"):
        before.later = [1]
    values = [value for _, value in tree.children(before)]
    after = tree.map_tree(lambda leaf: leaf + 1, before)
    assert type(after) is type(before)
    assert after.name == "changed since"
    assert not hasattr(before, "__dict__") or after.later is before.later
    assert [value.tolist() for _, value in tree.children(after)] == [[2], [2, 2]]
    assert [key for key, _ in tree.children(after)] == [key for key, _ in tree.children(before)]
    assert all(old is new for old, (_, new) in zip(values, tree.children(before), strict=True))
    if isinstance(before, NamedDefaultDict):
        assert after["other"] == []
    if isinstance(before, ReadOnly):
        assert after.units == {"a": "m", "b": "m"}
    moved = tree.send_to_device(before, "meta")
    assert (type(moved), moved.name) == (type(before), "changed since")
    assert {leaf.device.type for leaf in tree.leaves(moved)} == {"meta"}


def test_items_that_are_attributes_stay_so():
    for kind in (AttributeDict, GetAttributeDict):
        moved = tree.send_to_device(kind(x=torch.ones(1), y=kind(z=torch.ones(1))), "meta")
        assert type(moved) is type(moved.y) is kind
        assert moved.x is moved["x"]
        assert moved.x.device.type == moved.y.z.device.type == "meta"
        moved.x = 3
        assert kind is GetAttributeDict or moved["x"] == 3


def test_a_mapping_that_takes_no_other_values_is_made_from_its_items():
    class Sized(collections.UserDict):  # as a TensorDict, whose tensors have the same rows
        def __init__(self, items):
            self.rows = len(next(iter(items.values())))
            super().__init__(items)

        def __setitem__(self, key, value):
            if len(value) != self.rows:
                raise RuntimeError("batch dimension mismatch")
            super().__setitem__(key, value)

    before = Sized({"x": torch.arange(3), "y": torch.arange(3)})
    after = tree.slice_tensors(before, slice(2))
    assert type(after) is Sized
    assert (after.rows, before.rows, after["y"].tolist()) == (2, 3, [0, 1])


# Dataclasses


@dataclasses.dataclass
class Batch:
    x: Any
    note: Any = "text"
    derived: Any = dataclasses.field(init=False, default=None)

    def __post_init__(self):
        if not isinstance(self.x, torch.Tensor):
            raise TypeError("only tensors")  # what a map puts here must not pass this way
        self.derived = len(self.x)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Frozen:
    left: Any
    right: Any


@dataclasses.dataclass(frozen=True, slots=True)
class Slotted:
    one: Any
    two: Any = dataclasses.field(init=False)


@dataclasses.dataclass
class DeviceTransfer:
    x: torch.Tensor
    moved_to: Any = None

    def to(self, device):
        return DeviceTransfer(self.x.to(device), moved_to=device)


def test_a_dataclass_is_a_container_that_is_not_made_anew():
    batch = Batch(torch.ones(2), ["a", "b"])
    batch.extra = "kept"
    result = tree.map_tree(lambda leaf: str(leaf).upper(), batch)
    assert type(result) is Batch
    assert (result.x, result.note, result.derived) == ("TENSOR([1., 1.])", ["A", "B"], "2")
    assert result.extra == "kept"
    assert batch.note == ["a", "b"]
    assert batch.x.tolist() == [1.0, 1.0]


def test_frozen_dataclasses_are_mapped_and_stay_frozen():
    before = Frozen(left=1, right=(2,))
    assert tree.map_tree(lambda leaf: leaf + 1, before) == Frozen(left=2, right=(3,))
    assert before == Frozen(left=1, right=(2,))
    with pytest.raises(dataclasses.FrozenInstanceError):
        tree.map_tree(str, before).left = 3


def test_a_field_that_was_never_set_is_left_out():
    result = tree.map_tree(str, Slotted(1))
    assert result.one == "1"
    assert not hasattr(result, "two")
    assert list(tree.leaves(Slotted(1))) == [1]


def test_dataclasses_move():
    moved = tree.send_to_device(Frozen(left=torch.ones(1), right=[torch.ones(1)]), "meta")
    assert moved.left.device == moved.right[0].device == torch.device("meta")
    assert tree.find_batch_size(Frozen(left="a", right=torch.zeros(3, 2))) == 3


@pytest.mark.parametrize("non_blocking", [False, True])
def test_a_container_that_can_move_moves_by_itself(non_blocking):
    moved = tree.send_to_device([DeviceTransfer(torch.ones(1))], "meta", non_blocking)[0]
    assert moved.x.device == torch.device("meta")
    assert moved.moved_to == "meta"  # its own `.to` has been called, without what it cannot take


def test_non_blocking_is_passed_to_methods_that_take_it():
    heard = []

    class Listener:
        def to(self, device, **kwargs):
            heard.append(kwargs)  # in place: nothing is returned

    listener = Listener()
    assert tree.send_to_device({"a": listener}, "meta", non_blocking=True) == {"a": listener}
    tree.send_to_device(listener, "meta")
    assert heard == [{"non_blocking": True}, {}]


@pytest.mark.parametrize("skip_keys", ["keep", ["keep", "absent"]])
def test_skipped_keys_stay_at_every_depth(skip_keys):
    @dataclasses.dataclass
    class Record:
        keep: torch.Tensor
        go: torch.Tensor

        def to(self, device):
            raise AssertionError("this would move what is to be kept")

    def one() -> torch.Tensor:
        return torch.ones(1)

    moved = tree.send_to_device(
        {"keep": [one()], "go": one(), "in": ({"keep": one()}, Record(one(), one()))},
        torch.device("meta"),
        skip_keys=skip_keys,
    )
    kept = [moved["keep"][0], moved["in"][0]["keep"], moved["in"][1].keep]
    assert [each.device.type for each in kept] == ["cpu"] * 3
    assert moved["go"].device.type == moved["in"][1].go.device.type == "meta"


# What is made of trees


def test_convert_to_fp32_changes_half_precision_alone():
    kinds = [torch.float16, torch.bfloat16, torch.float64, torch.int8]
    result = tree.convert_to_fp32({"a": [torch.ones(1, dtype=kind) for kind in kinds], "b": "text"})
    assert [each.dtype for each in result["a"]] == [torch.float32, torch.float32, *kinds[2:]]
    assert result["b"] == "text"


def test_slices_are_taken_of_every_tensor_that_has_a_first_dimension():
    data = {"x": torch.arange(6).reshape(3, 2), "y": Pair(torch.arange(3), torch.tensor(7))}
    result = tree.slice_tensors({**data, "z": "text"}, slice(1, 3))
    assert result["x"].tolist() == [[2, 3], [4, 5]]
    assert result["y"].left.tolist() == [1, 2]
    assert result["y"].right.item() == 7
    assert result["z"] == "text"


def test_concatenate_joins_what_slices_had_parted():
    data = {"x": torch.arange(12).reshape(4, 3), "y": Pair([torch.arange(4)], ())}
    parts = [tree.slice_tensors(data, slice(i, i + 2)) for i in (0, 2)]
    joined = tree.concatenate(parts)
    assert joined["x"].tolist() == data["x"].tolist()
    assert joined["y"].left[0].tolist() == [0, 1, 2, 3]
    assert type(joined["y"]) is Pair
    turned = tree.concatenate([Frozen(left=each["x"], right=()) for each in parts], dim=1)
    assert turned.left.tolist() == [[0, 1, 2, 6, 7, 8], [3, 4, 5, 9, 10, 11]]


@pytest.mark.parametrize(
    ("data", "error", "text"),
    [
        ([[torch.ones(1), 3]] * 2, TypeError, "it found int"),
        ([torch.ones(1), [torch.ones(1)]], TypeError, "it found Tensor, list"),
        ([{"a": torch.ones(1)}, {"b": torch.ones(1)}], ValueError, r"\['a'\] and \['b'\]"),
        ([[torch.ones(1)], [torch.ones(1)] * 2], ValueError, r"\[0\] and \[0, 1\]"),
    ],
)
def test_concatenate_refuses_what_does_not_fit(data, error, text):
    with pytest.raises(error, match=text):
        tree.concatenate(data)


class Rows(collections.UserDict):
    """Iterates over rows, as a TensorDict does, not over its keys."""

    def __iter__(self):
        return iter(torch.zeros(2, 3))

    def keys(self):
        return self.data.keys()

    def items(self):
        return self.data.items()


def test_a_mapping_that_iterates_over_something_else_keeps_its_keys():
    doubled = tree.map_tree(lambda leaf: 2 * leaf, Rows(x=torch.ones(2)))
    assert type(doubled) is Rows
    assert torch.equal(doubled.data["x"], torch.full((2,), 2.0))


def z(*shape: int, **kwargs: Any) -> torch.Tensor:
    return torch.zeros(*shape, **kwargs)


DETECTION = tuple(zip(*[(z(3, 4, 4), {"boxes": z(i, 4)}) for i in range(4)], strict=True))


@pytest.mark.parametrize(
    ("batch", "fetched", "samples"),
    [
        ([z(4, 2), z(4)], 4, 4),
        ([z(3, 2), z(3)], 4, 3),  # collate_fn has left out one
        ([z(1, 2), z(1)], 2, 1),  # as many fields as were fetched
        (DETECTION, 4, 4),  # the images have 3 channels
        (DETECTION, 5, 4),
        (DETECTION, None, 4),
        ([z(i + 1, 2) for i in range(4)], 4, 4),  # ragged samples
        ([z(i + 1, 2) for i in range(4)], None, 4),
        ([z(3, 5, i + 5) for i in range(4)], 4, 4),  # images of several sizes
        ([z(3, 2, 2) for _ in range(4)], 4, 4),
        ([{"image": z(3, 2, 2), "boxes": z(i, 4)} for i in range(4)], 4, 4),
        ({"x": z(50, 3), "edges": z(2, 99), "y": z(4)}, 4, 4),  # concatenated graphs
        (z(50, 3), 4, 4),
        ({"a": [z(4, 2), z(4)], "b": [z(8, 2), z(8)]}, None, 4),  # of several loaders
        ([{"x": z(4, 2)}, {"x": z(8, 2)}], None, 4),
        ((z(50, 3), z(2, 99), z(4)), None, 50),
        (["a", "b"], None, None),
    ],
)
def test_samples_of_a_batch(batch, fetched, samples):
    assert tree.count_samples(batch, fetched) == samples


@pytest.mark.parametrize("shape", [(), (7,), (3, 4), (1, 5), (2, 3, 4), (2, 1, 3, 2), (3, 0)])
def test_any_range_of_a_flattened_tensor_is_a_few_blocks_of_it(shape):
    whole = torch.arange(1.0, 1 + torch.Size(shape).numel()).view(shape)
    for start in range(whole.numel() + 1):
        for stop in range(start, whole.numel() + 1):
            values = whole.flatten()[start:stop]
            blocks = tree.shards_of_range(shape, values, start)
            assert len(blocks) <= max(2 * len(shape) - 1, 1)
            found = torch.zeros(shape)
            for offsets, block in blocks:
                assert block.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()
                tree.region_of(found, offsets, block.shape).copy_(block)
            expected = torch.zeros(whole.numel())
            expected[start:stop] = values
            assert torch.equal(found, expected.view(shape))
