"""Nested containers by the names that scripts have for them."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from typing import NamedTuple

import pytest
import torch

from trainer import PartialState, utils
from trainer.utils import (
    convert_outputs_to_fp32,
    find_device,
    get_data_structure,
    honor_type,
    initialize_tensors,
    listify,
    merge_dicts,
    pad_input_tensors,
    recursively_apply,
)


class Pair(NamedTuple):
    left: object
    right: object


def test_a_function_is_applied_to_tensors_wherever_they_are():
    data = OrderedDict(a=[torch.ones(1), "x"], b=Pair(torch.zeros(1), (torch.ones(1),)))
    seen = recursively_apply(lambda tensor, add, times=1: (tensor + add) * times, data, 2, times=3)
    assert type(seen) is OrderedDict
    assert type(seen["b"]) is Pair
    assert listify(seen) == {"a": [[9.0], "x"], "b": ([6.0], ([9.0],))}
    assert listify(data)["a"] == [[1.0], "x"]
    lists = recursively_apply(torch.neg, defaultdict(list, a=torch.ones(1)))
    assert (lists["a"].item(), lists["b"]) == (-1.0, [])


def test_what_the_function_is_applied_to_can_be_chosen():
    def is_text(value):
        return isinstance(value, str)

    assert recursively_apply(str.upper, ["a", 1], test_type=is_text) == ["A", 1]
    with pytest.raises(TypeError, match="upper found a int, which is_text does not accept"):
        recursively_apply(str.upper, [["a", 1]], test_type=is_text, error_on_other_type=True)


def test_containers_are_made_again_in_their_type():
    assert honor_type(Pair(1, 2), iter("ab")) == Pair("a", "b")
    assert honor_type((1, 2), iter("ab")) == ("a", "b")
    assert honor_type([], iter("ab")) == ["a", "b"]


def test_the_device_of_what_is_nested():
    assert find_device({"a": "x", "b": [torch.empty(1, device="meta")]}) == torch.device("meta")
    assert find_device([1, "x"]) is None


def test_tensors_as_numbers():
    assert listify({"a": torch.tensor(1.5, dtype=torch.bfloat16), "b": torch.eye(2)}) == {
        "a": 1.5,
        "b": [[1, 0], [0, 1]],
    }


def test_a_structure_is_taken_and_made_again():
    data = {"a": torch.zeros(2, 3, dtype=torch.int16), "b": [torch.ones(()), "x"]}
    again = initialize_tensors(get_data_structure(data))
    assert (again["a"].shape, again["a"].dtype) == ((2, 3), torch.int16)
    assert (again["b"][0].shape, again["b"][0].dtype, again["b"][1]) == ((), torch.float32, "x")


@pytest.mark.parametrize(("size", "processes", "padded"), [(3, 4, 4), (5, 2, 6), (4, 2, 4)])
def test_padding_for_an_even_share(size, processes, padded):
    tensor = torch.ones(size, 2)
    (result,) = pad_input_tensors([tensor], size, processes)
    assert result.tolist() == [[1, 1]] * size + [[0, 0]] * (padded - size)
    assert pad_input_tensors(tensor.t(), size, processes, dim=1).tolist() == result.t().tolist()
    with pytest.raises(TypeError, match="found a str"):
        pad_input_tensors(["x"], size, processes)


def test_outputs_become_float32():
    def forward(x, *, times):
        "It computes."
        return {"y": x * times}

    wrapped = convert_outputs_to_fp32(forward)
    assert wrapped(torch.ones(1, dtype=torch.bfloat16), times=2)["y"].dtype == torch.float32
    assert wrapped.__doc__ == "It computes."


def test_dicts_are_merged_dict_by_dict():
    into = {"a": {"x": 1, "y": 2}, "b": 3}
    assert merge_dicts({"a": {"y": 5}, "c": {"z": 4}}, into) is into
    assert into == {"a": {"x": 1, "y": 5}, "b": 3, "c": {"z": 4}}


def test_kinds_of_values():
    info = get_data_structure(torch.zeros(2))
    for value, tensor, information, named in (
        (torch.zeros(2), True, False, False),
        (info, False, True, False),
        (Pair(1, 2), False, False, True),
        ((1, 2), False, False, False),
    ):
        assert utils.is_torch_tensor(value) is tensor
        assert utils.is_tensor_information(value) is information
        assert utils.is_namedtuple(value) is named
    assert info == utils.TensorInformation(torch.Size([2]), torch.float32)
    assert utils.ignorant_find_batch_size(["x"]) is None
    assert utils.ignorant_find_batch_size([torch.zeros(3, 2)]) == 3


def test_a_tensor_of_one_process_is_copied_to_all(ranks2):
    def body():
        rank = PartialState(cpu=True).process_index
        own = torch.arange(3.0, dtype=torch.float64) if rank == 1 else None
        copied = utils.copy_tensor_to_devices(own)
        with pytest.raises(ValueError, match=r"on the processes \[0, 1\]; it must be one"):
            utils.copy_tensor_to_devices(copied)
        return copied.tolist(), copied.dtype

    assert ranks2(body) == [([0.0, 1.0, 2.0], torch.float64)] * 2
