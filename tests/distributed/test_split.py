"""The part of some inputs that each process takes."""

from __future__ import annotations

import array
import copy
from collections import OrderedDict, UserDict, defaultdict, namedtuple
from types import MappingProxyType

import numpy as np
import pytest
import torch

from trainer.distributed.process_control import split
from trainer.state import PartialState

Pair = namedtuple("Pair", "left right")


class Dataset:
    """What the library `datasets` offers of it."""

    def __init__(self, rows: list[int]) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def select(self, indices: object) -> Dataset:
        return Dataset([self.rows[index] for index in indices])


def parts(inputs: object, world_size: int, **kwargs: object) -> list:
    return [split(inputs, rank=rank, world_size=world_size, **kwargs) for rank in range(world_size)]


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("length", range(10))
def test_parts_are_the_inputs_in_order_and_differ_by_one_at_most(length, world_size):
    inputs = list(range(length))
    found = parts(inputs, world_size)
    assert [item for part in found for item in part] == inputs
    sizes = [len(part) for part in found]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] - sizes[-1] <= 1


@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize("length", range(1, 10))
def test_padding_repeats_the_last_item_until_all_parts_are_alike(length, world_size):
    inputs = list(range(length))
    plain, padded = parts(inputs, world_size), parts(inputs, world_size, padding=True)
    size = -(-length // world_size)
    for short, full in zip(plain, padded, strict=True):
        assert full == short + [length - 1] * (size - len(short))


def test_the_documented_cases():
    assert parts(["A", "B", "C"], 2) == [["A", "B"], ["C"]]
    assert parts(["A", "B", "C"], 2, padding=True) == [["A", "B"], ["C", "C"]]
    assert parts(["A"], 3) == [["A"], [], []]
    assert parts(["A"], 3, padding=True) == [["A"], ["A"], ["A"]]


@pytest.mark.parametrize("padding", [False, True])
def test_every_kind_of_input_is_split_like_a_list(padding):
    rows = list(range(5))
    expected = parts(rows, 3, padding=padding)
    assert parts(tuple(rows), 3, padding=padding) == [tuple(part) for part in expected]
    tensors = parts(torch.arange(10).reshape(5, 2), 3, padding=padding)
    assert [tensor[:, 0].tolist() for tensor in tensors] == [
        [2 * row for row in part] for part in expected
    ]
    assert all(tensor.shape[1] == 2 for tensor in tensors)
    assert [part.rows for part in parts(Dataset(rows), 3, padding=padding)] == expected
    assert [part["a"] for part in parts({"a": rows}, 3, padding=padding)] == expected


def test_dictionaries_are_split_however_deep():
    inputs = {
        "a": [1, 2, 3],
        "b": {"c": (4, 5, 6), "d": torch.tensor([7, 8, 9])},
        "name": "x",
        "n": 2,
    }
    kept = copy.deepcopy(inputs)
    first, second = parts(inputs, 2)
    assert (first["a"], first["b"]["c"], first["b"]["d"].tolist()) == ([1, 2], (4, 5), [7, 8])
    assert (second["a"], second["b"]["c"], second["b"]["d"].tolist()) == ([3], (6,), [9])
    assert (first["name"], second["name"], second["n"]) == ("x", "x", 2)
    assert inputs["b"].pop("d").equal(kept["b"].pop("d"))
    assert inputs == kept  # the caller's data are as they were


def test_mappings_keep_their_types():
    for inputs in (OrderedDict(a=[1, 2]), UserDict(a=[1, 2])):
        first, second = parts(inputs, 2)
        assert (type(first), first["a"], second["a"]) == (type(inputs), [1], [2])
        assert inputs["a"] == [1, 2]
    counted = defaultdict(list, a=[1, 2])
    assert parts(counted, 2)[1].default_factory is list
    assert parts(MappingProxyType({"a": [1, 2]}), 2) == [{"a": [1]}, {"a": [2]}]


def test_a_named_tuple_is_split_as_a_tuple():
    assert parts(Pair(1, 2), 2, padding=True) == [(1,), (2,)]


def test_lists_are_never_changed():
    inputs = [[1], [2], [3]]
    split(inputs, rank=1, world_size=2, padding=True).append(4)
    assert inputs == [[1], [2], [3]]


@pytest.mark.parametrize("whole", [{"a": "prompt", "b": b"x", "c": 3, "d": None, "e": object}, {}])
def test_what_has_no_items_goes_to_every_process_whole(whole):
    assert parts(whole, 2) == [whole, whole]
    assert parts(whole, 2, padding=True) == [whole, whole]


class Squares(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 5

    def __getitem__(self, index: int) -> int:
        return range(5)[index] ** 2


class Frame:
    """What a data frame offers of it; its index and `select` are for columns."""

    def __init__(self, rows: list[int]) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, column: str) -> list[int]:
        return {"rows": self.rows}[column]

    def __iter__(self):
        return iter(self.rows)

    def select(self, columns: list[str]) -> dict[str, list[int]]:
        return {column: self[column] for column in columns}

    @property
    def iloc(self) -> dict:
        frame = self

        class Rows:
            def __getitem__(self, indices: object) -> Frame:
                return Frame([frame.rows[index] for index in indices])

        return Rows()


@pytest.mark.parametrize("padding", [False, True])
@pytest.mark.parametrize(
    ("inputs", "kind"),
    [
        (range(5), range),
        (array.array("i", range(5)), torch.utils.data.Subset),
        (np.arange(5), np.ndarray),
        (Frame(list(range(5))), Frame),
        (Squares(), torch.utils.data.Subset),
        (torch.utils.data.TensorDataset(torch.arange(5)), torch.utils.data.Subset),
    ],
)
def test_what_has_a_length_and_an_index_is_split(inputs, kind, padding):
    def plain(items: object) -> list:
        return [int(item[0] if isinstance(item, tuple) else item) for item in items]

    expected = parts(plain(inputs), 3, padding=padding)
    for found in (
        parts(inputs, 3, padding=padding),
        [part["x"] for part in parts({"y": ["a"] * 5, "x": inputs}, 3, padding=padding)],
    ):
        assert [plain(part) for part in found] == expected
        assert {type(part) for part in found} <= ({kind, list} if kind is range else {kind})
    with pytest.raises(ValueError, match=r"inputs\['x'\] 5, inputs\['y'\] 4"):
        parts({"x": inputs, "y": [0] * 4}, 3, padding=padding)


def test_rows_of_an_array_are_not_copied():
    rows = np.zeros((5, 3))
    assert all(np.shares_memory(part, rows) for part in parts(rows, 2))
    assert [part.shape for part in parts(rows, 2, padding=True)] == [(3, 3)] * 2


class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        return iter(range(5))

    def __len__(self) -> int:
        return 5


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("inputs", ["prompt", b"x", 3, None, {1, 2}, iter([1]), Stream()])
def test_anything_else_is_refused(inputs, world_size):
    text = f"inputs is a {type(inputs).__name__}, which cannot be split .*Pass a list"
    with pytest.raises(TypeError, match=text):
        parts(inputs, world_size)


@pytest.mark.parametrize("value", [{1, 2}, iter([1]), Stream()])
def test_a_dictionary_with_items_that_have_no_index_is_refused(value):
    with pytest.raises(TypeError, match=r"inputs\['b'\] is a "):
        parts({"a": [1, 2], "b": value}, 2)


@pytest.mark.parametrize("padding", [False, True])
def test_of_nothing_every_process_has_none(padding):
    assert parts([], 2, padding=padding) == [[], []]
    assert parts((), 2, padding=padding) == [(), ()]
    assert [part.shape for part in parts(torch.zeros(0, 3), 2, padding=padding)] == [(0, 3)] * 2


@pytest.mark.parametrize("world_size", [1, 2])
def test_unequal_values_are_refused_on_any_number_of_processes(world_size):
    with pytest.raises(
        ValueError, match=r"same length .* are: inputs\['a'\] 2, inputs\['b'\]\['c'\] 3\."
    ):
        parts({"a": [1, 2], "b": {"c": (1, 2, 3)}}, world_size)


@pytest.mark.parametrize("value", [torch.tensor(1.0), np.array(1.0)])
def test_a_tensor_without_dimensions_is_refused(value):
    for inputs, name in ((value, "inputs"), ({"t": value}, r"inputs\['t'\]")):
        with pytest.raises(ValueError, match=rf"{name} is an? \w+ without dimensions"):
            parts(inputs, 2)


def test_one_process_gets_the_inputs_themselves():
    inputs = {"a": [1]}
    assert split(inputs, rank=0, world_size=1, padding=True) is inputs


def test_only_padded_tensors_change_their_device():
    meta = torch.device("meta")
    rows = torch.zeros(3)
    assert [part.device.type for part in parts(rows, 2, device=meta)] == ["cpu", "cpu"]
    padded = parts(rows, 2, device=meta, padding=True)
    assert [part.device.type for part in padded] == ["meta", "meta"]


def test_each_process_takes_its_part(ranks3):
    def run() -> tuple[list, list[int], list]:
        state = PartialState()
        with state.split_between_processes(["a", "b", "c", "d"]) as own:
            plain = list(own)
        with state.split_between_processes(torch.arange(4), apply_padding=True) as own:
            padded = own.tolist()
        try:
            with state.split_between_processes({"a": [1], "b": [1, 2]}):
                refused = []
        except ValueError as error:
            refused = [str(error)[:10]]
        return plain, padded, refused

    assert ranks3(run) == [
        (["a", "b"], [0, 1], ["All values"]),
        (["c"], [2, 3], ["All values"]),
        (["d"], [3, 3], ["All values"]),
    ]
