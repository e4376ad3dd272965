"""Batches as rows: length, parts, joining, and travel between processes."""

from __future__ import annotations

from collections import namedtuple

import pytest
import torch
from torch.nn.utils.rnn import pack_sequence
from torch.utils.data import default_collate

from trainer.data.batch import (
    concatenate,
    insert_tensors,
    length,
    pad_batch,
    samples_in,
    split_off_tensors,
    take,
)

Pair = namedtuple("Pair", ["x", "y"])


def samples(numbers) -> list:
    return [
        {
            "x": torch.tensor([n, -n]),
            "name": f"n{n}",
            "pair": Pair(n, float(n)),
            "both": (f"a{n}", n),
        }
        for n in numbers
    ]


def batch(*numbers) -> dict:
    return default_collate(samples(numbers)) | {"unit": "metre", "scale": torch.tensor(2.0)}


def same(found, expected) -> None:
    assert repr(found) == repr(expected)


def test_take_concatenate_and_completed():
    whole = batch(0, 1, 2, 3, 4)
    assert length(whole) == 5
    same(take(whole, 1, 3), batch(1, 2))
    same(take(whole, 3, 9), batch(3, 4))
    same(concatenate([batch(0, 1), batch(2), batch(3, 4)]), whole)
    same(pad_batch(batch(7), batch(1, 2), 6), batch(7, 1, 2, 1, 2, 1))
    same(pad_batch(batch(7), batch(1, 2), 3), batch(7, 1, 2))
    same(pad_batch(batch(7, 8), batch(1), 2), batch(7, 8))


def test_columns_without_a_tensor():
    assert length(["a", "b", "c"]) == 3
    assert take(["a", "b", "c"], 1, 2) == ["b"]
    assert concatenate([["a"], ["b", "c"]]) == ["a", "b", "c"]
    records = [{"id": 1}, {"id": 2}]
    assert concatenate([records, records[:1]]) == [*records, {"id": 1}]
    assert take({"id": ("x", "y"), "n": [1, 2]}, 0, 1) == {"id": ("x",), "n": [1]}


def test_lists_of_another_length_stay_whole():
    one = {"x": torch.ones(2), "classes": ["a", "b", "c"]}
    other = one | {"x": torch.zeros(1)}
    assert concatenate([one, other])["classes"] == ["a", "b", "c"]
    assert take(one, 0, 1)["classes"] == ["a", "b", "c"]


@pytest.mark.parametrize(
    "batch_of_one",
    [
        7,
        {},
        torch.tensor(1.0),
        {"x": torch.ones(2), "y": torch.ones(3)},
        pack_sequence([torch.ones(2), torch.ones(1)]),
    ],
)
def test_batches_without_samples_raise(batch_of_one):
    assert samples_in(batch_of_one) is None
    with pytest.raises(ValueError, match="A batch cannot be split into samples"):
        length(batch_of_one)


@pytest.mark.parametrize(
    ("one", "other", "text"),
    [
        ({"x": torch.ones(2, 3)}, {"x": torch.ones(2, 4)}, r"shapes \[\(3,\), \(4,\)\] in \['x'\]"),
        ({"x": torch.ones(2)}, {"y": torch.ones(2)}, "their keys"),
        ([torch.ones(2)], [torch.ones(2), torch.ones(2)], "their numbers of tensors differ"),
        (
            {"x": torch.ones(2), "n": 3},
            {"x": torch.ones(2), "n": 4},
            r"\['n'\] is 3 in one and 4 in another",
        ),
    ],
)
def test_concatenating_batches_that_differ_raises(one, other, text):
    with pytest.raises(ValueError, match=text):
        concatenate([one, other])


def test_packed_and_unpacked():
    whole = batch(0, 1)
    skeleton, sent = split_off_tensors(whole)
    assert not any(isinstance(value, torch.Tensor) for value in skeleton.values())
    made, received = insert_tensors(skeleton, None)
    for empty, full in zip(received, sent, strict=True):
        assert (empty.shape, empty.dtype) == (full.shape, full.dtype)
        empty.copy_(full)
    same(made, whole)
