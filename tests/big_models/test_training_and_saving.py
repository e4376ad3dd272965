"""The Accelerator leaves a model that is spread where it is, and saves all of it."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from trainer import Accelerator, load_checkpoint_in_model
from trainer.big_models import cpu_offload, disk_offload, dispatch_model
from trainer.checkpoint.weights import load_weights

PLACES = {"0": "cpu", "1": "disk", "2": "cpu"}


def make():
    torch.manual_seed(1)
    net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 3)).eval()
    net[2].weight = nn.Parameter(net[0].weight.detach().T.contiguous())
    return net


WAYS = {
    "spread": lambda: dispatch_model(make(), PLACES, offload_dir="off"),
    "disk": lambda: dispatch_model(make(), {"": "disk"}, offload_dir="off"),
    "disk_offload": lambda: disk_offload(make(), "off", offload_buffers=True),
    "cpu_offload": lambda: cpu_offload(make()),
}


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_an_offloaded_model_is_prepared_and_saved_whole(way):
    accelerator = Accelerator(cpu=True)
    expected = make().state_dict()
    model = accelerator.prepare(way())
    x = torch.ones(2, 3)
    assert torch.equal(model(x), make()(x))
    state = accelerator.get_state_dict(model)
    assert state.keys() == expected.keys()
    assert all(torch.equal(state[name], expected[name]) for name in expected)
    for size, safe in (("10GB", True), (60, True), ("10GB", False)):
        accelerator.save_model(model, "saved", max_shard_size=size, safe_serialization=safe)
        again = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 3)).eval()
        load_checkpoint_in_model(again, "saved", strict=True)
        assert torch.equal(again(x), make()(x))
    accelerator.save_state("state")
    saved = load_weights("state")
    assert all(torch.equal(saved[name], expected[name]) for name in expected)


def test_a_model_offloaded_by_accelerate_is_saved_whole():
    import accelerate

    model = accelerate.dispatch_model(make(), PLACES, offload_dir="off")
    accelerator = Accelerator(cpu=True)
    accelerator.save_model(accelerator.prepare(model), "saved")
    saved, expected = load_file("saved/model.safetensors"), make().state_dict()
    assert saved.keys() == expected.keys()
    assert all(torch.equal(saved[name], expected[name]) for name in expected)
    state = accelerator.get_state_dict(model)
    assert all(torch.equal(state[name], expected[name]) for name in expected)


def test_several_processes_refuse_what_is_spread(ranks2, tmp_path):
    def body():
        accelerator = Accelerator(cpu=True)
        folder = tmp_path / str(accelerator.process_index)
        spread = dispatch_model(make(), PLACES, offload_dir=folder)
        assert accelerator.verify_device_map(spread)
        whole = dispatch_model(make(), {"": "disk"}, offload_dir=folder / "whole")
        for model in (spread, whole):
            with pytest.raises(ValueError, match=r"device map.* 2 processes"):
                accelerator.prepare(model)
        return accelerator.verify_device_map(whole)

    assert ranks2(body) == [False, False]
