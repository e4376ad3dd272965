"""Offloaded weights lie on disk as safetensors; those that accelerate wrote are read too."""

from __future__ import annotations

from pathlib import Path

import accelerate.utils
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from trainer.big_models import (
    OffloadedWeightsLoader,
    PrefixedDataset,
    load_offloaded_weight,
    load_offloaded_weights,
    offload_state_dict,
    offload_weight,
    save_offload_index,
)
from trainer.errors import CheckpointError

STATE = {
    "a.weight": torch.linspace(0, 1, 6).reshape(2, 3),
    "a.half": torch.linspace(0, 1, 5).bfloat16(),
    "a.small": torch.linspace(0, 1, 4).to(torch.float8_e4m3fn),
    "b.scalar": torch.tensor(3.0),
    "b.flags": torch.tensor([True, False]),
    "b.none": torch.empty(0, 2),
    "b.count/with slash": torch.tensor(7),
}


def same(one, other):
    return (
        one.dtype == other.dtype
        and one.shape == other.shape
        and torch.equal(one.flatten().view(torch.uint8), other.flatten().view(torch.uint8))
    )


def test_a_state_dict_comes_back_from_the_disk():
    offload_state_dict("off", STATE)
    offload_state_dict("off", {"later": torch.ones(1)})  # added
    weights = OffloadedWeightsLoader(save_folder="off")
    assert list(weights) == [*STATE, "later"]
    assert len(weights) == len(STATE) + 1
    assert all(same(weights[name], STATE[name]) for name in STATE)
    assert load_file("off/offload-a.weight.safetensors").keys() == {"a.weight"}
    below = PrefixedDataset(weights, "a.")
    assert {name: below[name].shape for name in below} == {
        name.removeprefix("a."): STATE[name].shape for name in STATE if name.startswith("a.")
    }
    assert len(below) == 3
    assert "weight" in below
    assert "scalar" not in below


def test_weights_of_accelerate_are_read():
    theirs = {name: tensor for name, tensor in STATE.items() if tensor.numel() and "/" not in name}
    accelerate.utils.offload_state_dict("off", theirs)
    weights = OffloadedWeightsLoader({"a.weight": STATE["a.half"]}, "off")
    assert weights["a.weight"] is STATE["a.half"]  # memory comes first
    assert all(same(weights[name], theirs[name]) for name in [*theirs][1:])
    info = {"dtype": "float32", "shape": [2, 3]}
    assert same(load_offloaded_weight("off/a.weight.dat", info), STATE["a.weight"])
    with pytest.raises(CheckpointError, match=r"has 24 bytes; torch.float32 of shape \[5\] has 20"):
        load_offloaded_weight("off/a.weight.dat", {"dtype": "float32", "shape": [5]})


def test_weights_in_use_are_shared_and_aligned():
    offload_state_dict("off", {"w": STATE["a.weight"], "tied": STATE["a.weight"]})
    weights = OffloadedWeightsLoader(save_folder="off")
    first = weights["w"]
    assert weights["tied"] is first
    assert first.data_ptr() % 64 == 0
    first.zero_()  # of this process alone
    del first
    assert same(weights["w"], STATE["a.weight"])


def test_weights_go_back_into_a_model():
    net = nn.Linear(3, 2)
    assert offload_weight(STATE["a.weight"], "weight", ".") is None
    index = offload_weight(STATE["a.weight"], "weight", ".", {})
    save_offload_index(index, ".")
    save_offload_index({}, "nowhere")
    load_offloaded_weights(net, index, ".")
    load_offloaded_weights(net, {}, "nowhere")
    assert same(net.weight.detach(), STATE["a.weight"])


def test_what_is_not_there_is_named():
    with pytest.raises(ValueError, match="Need either a `state_dict`, a `save_folder`"):
        OffloadedWeightsLoader()
    with pytest.raises(CheckpointError, match=r"index\.json cannot be read"):
        OffloadedWeightsLoader(save_folder=".")
    Path("index.json").write_text("[1]")
    with pytest.raises(CheckpointError, match=r"index\.json cannot be read"):
        OffloadedWeightsLoader(save_folder=".")
    with pytest.raises(TypeError, match="The weight 'w' cannot be saved"):
        offload_weight(torch.empty(2, device="meta"), "w", ".")
    assert list(Path().iterdir()) == [Path("index.json")]
