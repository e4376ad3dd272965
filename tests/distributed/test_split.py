"""The part of some inputs that each process takes."""

from __future__ import annotations

import array
from collections import OrderedDict, UserDict
from types import MappingProxyType

import numpy as np
import pytest
import torch

from trainer import Accelerator
from trainer.distributed.process_control import split
from trainer.state import PartialState


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
@pytest.mark.parametrize("length", [0, 1, 4, 7])
def test_parts_are_in_order_and_differ_by_at_most_one_item(length, world_size):
    inputs = list(range(length))
    found = parts(inputs, world_size)
    assert [item for part in found for item in part] == inputs
    sizes = [len(part) for part in found]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] - sizes[-1] <= 1


@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize("length", [1, 4, 7])
def test_padding_repeats_the_last_item(length, world_size):
    inputs = list(range(length))
    plain, padded = parts(inputs, world_size), parts(inputs, world_size, padding=True)
    size = -(-length // world_size)
    for short, full in zip(plain, padded, strict=True):
        assert full == short + [length - 1] * (size - len(short))


def test_nested_dictionaries_are_split():
    inputs = {
        "a": [1, 2, 3],
        "b": {"c": (4, 5, 6), "d": torch.tensor([7, 8, 9])},
        "name": "x",
        "n": 2,
    }
    first, second = parts(inputs, 2)
    assert (first["a"], first["b"]["c"], first["b"]["d"].tolist()) == ([1, 2], (4, 5), [7, 8])
    assert (second["a"], second["b"]["c"], second["b"]["d"].tolist()) == ([3], (6,), [9])
    assert (first["name"], second["name"], second["n"]) == ("x", "x", 2)
    assert inputs["a"] == [1, 2, 3]  # the caller's data are as they were


@pytest.mark.parametrize("kind", [OrderedDict, UserDict, MappingProxyType])
def test_mappings_keep_their_types(kind):
    first, second = parts(kind({"a": [1, 2]}), 2)
    assert type(first) is type(second) is kind
    assert (first["a"], second["a"]) == ([1], [2])


@pytest.mark.parametrize("whole", [{"a": "prompt", "b": b"x", "c": 3, "d": None, "e": object}, {}])
def test_values_without_items_go_to_every_process_whole(whole):
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
        (list(range(5)), list),
        (tuple(range(5)), tuple),
        (torch.arange(5), torch.Tensor),
        (Dataset(list(range(5))), Dataset),
        (range(5), range),
        (array.array("i", range(5)), torch.utils.data.Subset),
        (np.arange(5), np.ndarray),
        (Frame(list(range(5))), Frame),
        (Squares(), torch.utils.data.Subset),
        (torch.utils.data.TensorDataset(torch.arange(5)), torch.utils.data.Subset),
    ],
)
def test_every_sequence_is_split_like_a_list(inputs, kind, padding):
    def plain(items: object) -> list:
        items = getattr(items, "rows", items)
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


class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        return iter(range(5))

    def __len__(self) -> int:
        return 5


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("inputs", ["prompt", b"x", 3, None, {1, 2}, iter([1]), Stream()])
def test_inputs_without_an_index_raise(inputs, world_size):
    text = f"inputs is a {type(inputs).__name__}, which cannot be split .*Pass a list"
    with pytest.raises(TypeError, match=text):
        parts(inputs, world_size)


@pytest.mark.parametrize("world_size", [1, 2])
def test_values_of_unequal_lengths_raise(world_size):
    with pytest.raises(
        ValueError, match=r"same length .* are: inputs\['a'\] 2, inputs\['b'\]\['c'\] 3\."
    ):
        parts({"a": [1, 2], "b": {"c": (1, 2, 3)}}, world_size)


def test_a_tensor_without_dimensions_raises():
    with pytest.raises(ValueError, match=r"inputs\['t'\] is a tensor without dimensions"):
        parts({"t": torch.tensor(1.0)}, 2)


def test_only_padded_tensors_move_to_the_device():
    meta = torch.device("meta")
    rows = torch.zeros(3)
    assert [part.device.type for part in parts(rows, 2, device=meta)] == ["cpu", "cpu"]
    padded = parts(rows, 2, device=meta, padding=True)
    assert [part.device.type for part in padded] == ["meta", "meta"]


@pytest.mark.parametrize("kind", [PartialState, Accelerator])
def test_split_between_processes(ranks3, kind):
    def run() -> tuple[list, list[int], list]:
        state = kind(cpu=True)
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
