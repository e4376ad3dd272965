"""Weights under the module's own names, tied ones included, for us and for other tools."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, load_model, save_model
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from trainer.big_models import load_checkpoint_in_model
from trainer.checkpoint import weights as weights_module
from trainer.checkpoint.loading import load_into
from trainer.checkpoint.parts import tree_part, weights_part
from trainer.checkpoint.weights import load_weights, save_weights
from trainer.errors import CheckpointError


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(5, 3)
        self.norm = nn.BatchNorm1d(3)
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.embed.weight


class Untied(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2))
        self.low = nn.Parameter(torch.randn(2, 3).bfloat16())
        self.register_buffer("count", torch.tensor(3))


def same(a: nn.Module, b: nn.Module) -> bool:
    ours, theirs = a.state_dict(), b.state_dict()
    return list(ours) == list(theirs) and all(torch.equal(ours[n], theirs[n]) for n in ours)


def test_plain_pytorch_loads_saved_weights():
    module, by_hand, by_us = Untied(), Untied(), Untied()
    file = save_weights(module.state_dict(), Path.cwd())
    assert file == Path.cwd() / "model.safetensors"
    by_hand.load_state_dict(load_file(file))
    by_us.load_state_dict(load_weights(Path.cwd()))
    assert same(by_hand, module)
    assert same(by_us, module)
    assert not same(Untied(), module)
    assert {name: t.dtype for name, t in load_weights(file).items()} == {
        name: t.dtype for name, t in module.state_dict().items()
    }


def test_tied_weights_are_stored_once():
    module, again, theirs = Tied(), Tied(), Tied()
    file = save_weights(module.state_dict(), "tied.safetensors")
    assert "head.weight" not in load_file(file)
    weights = load_weights(file)
    assert set(weights) == set(module.state_dict())
    assert weights["head.weight"] is weights["embed.weight"]
    load_into(again, weights, where=file)
    assert same(again, module)
    load_model(theirs, file)  # the library's own loader agrees
    assert same(theirs, module)


def test_files_of_safetensors_save_model():
    module, again = Tied(), Tied()
    save_model(module, "theirs.safetensors")
    load_into(again, load_weights("theirs.safetensors"), where="theirs.safetensors")
    assert same(again, module)


def test_views_of_one_memory_are_stored_apart():
    base = torch.arange(16.0).reshape(4, 4)
    views = {
        "all": base,
        "rows": base[1:],
        "start": base[:1],
        "columns": base[:, 1:3],
        "transposed": base.t(),
        "bits": base.view(torch.int32),
        "none": base[:0],
        "nothing": base[:0],
    }
    file = save_weights(views, Path.cwd())
    loaded = load_weights(file)
    assert set(loaded) == set(load_file(file)) == set(views)
    assert all(torch.equal(loaded[name], view) for name, view in views.items())
    loaded["all"].zero_()
    assert torch.equal(loaded["rows"], base[1:])


class WithExtra(nn.Linear):
    extra: object = None

    def get_extra_state(self):
        return self.extra

    def set_extra_state(self, state):
        self.extra = state


@pytest.mark.parametrize("safe", [True, False])
def test_plain_extra_state_comes_back(safe):
    module, loaded = (nn.Sequential(WithExtra(1, 1), WithExtra(1, 1)) for _ in range(2))
    module[0].extra = {"calls": 3, "shape": (1, 2), "scale": torch.arange(3.0), 4: None}
    module[1].extra = torch.tensor([1, 2], dtype=torch.uint8)
    weights_module.save_model(module, Path.cwd(), safe_serialization=safe)
    load_checkpoint_in_model(loaded, Path.cwd())
    scale = loaded[0].extra.pop("scale")
    assert torch.equal(scale, module[0].extra.pop("scale"))
    assert loaded[0].extra == module[0].extra
    assert loaded[1].extra.tolist() == [1, 2]
    if safe:
        assert load_weights(Path.cwd())["0._extra_state"]["calls"] == 3


def test_an_extra_state_of_none_may_be_missing_and_another_one_may_not():
    module = nn.Sequential(WithExtra(1, 1))
    weights = nn.Sequential(nn.Linear(1, 1)).state_dict()
    load_into(module, weights, where="a file")
    torch.testing.assert_close(dict(module.named_parameters()), dict(weights))
    module[0].extra = 3
    with pytest.raises(CheckpointError, match=r"missing from the file \(1\): 0\._extra_state"):
        load_into(module, weights, where="a file")


def test_extra_state_that_is_no_plain_data_raises():
    module = nn.Sequential(WithExtra(1, 1))
    module[0].extra = {"calls": object()}
    with pytest.raises(TypeError, match=r"0\._extra_state\['calls'\] is a builtins.object"):
        save_weights(module.state_dict(), Path.cwd())
    assert list(Path.cwd().iterdir()) == []


def test_meta_weights_raise():
    with torch.device("meta"):
        module = nn.Linear(2, 2)
    with pytest.raises(TypeError, match=r"The weight 'weight' cannot be saved.*meta"):
        save_weights(module.state_dict(), Path.cwd())


def test_an_error_names_every_weight_that_does_not_fit():
    file = save_weights(nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1)).state_dict(), Path.cwd())
    other = nn.ModuleDict({"0": nn.Linear(4, 3), "extra": nn.Linear(1, 1)})
    with pytest.raises(CheckpointError) as caught:
        load_into(other, load_weights(file), where=file)
    text = str(caught.value)
    for part in (str(file), "extra.weight", "extra.bias", "1.weight", "1.bias", "0.weight"):
        assert part in text
    assert "[3, 2]" in text
    assert "[3, 4]" in text


@pytest.mark.parametrize("size", [None, 0, 50, -1])
def test_a_missing_or_truncated_file_raises(size):
    file = save_weights(nn.Linear(20, 20).state_dict(), Path.cwd())
    data = file.read_bytes()
    file.unlink()
    if size is not None:
        file.write_bytes(data[:size])
    with pytest.raises(CheckpointError, match=r"model\.safetensors cannot be read"):
        load_weights(Path.cwd())


def test_dtensors_raise(ranks2):
    def body():
        mesh = init_device_mesh("cpu", (2,))
        weights = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)).state_dict()
        sharded = {key: distribute_tensor(w, mesh, [Shard(0)]) for key, w in weights.items()}
        for save in (
            weights_part,
            partial(save_weights, path="w.safetensors"),
            partial(tree_part, stem="optimizer"),
        ):
            with pytest.raises(TypeError, match=r"weight'.* is a DTensor .* its full_tensor\(\)"):
                save(sharded)
        whole = weights_part({key: value.full_tensor() for key, value in sharded.items()})
        return Path("w.safetensors").exists(), len(whole.tensors)

    assert ranks2(body) == [(False, 4)] * 2
