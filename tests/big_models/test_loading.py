"""Weights from files, folders and indexes into models on any device, empty ones too."""

from __future__ import annotations

import json
import logging
import shutil
from fractions import Fraction
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from trainer.big_models import OffloadedWeightsLoader, load_checkpoint_in_model
from trainer.checkpoint.weights import save_model
from trainer.errors import CheckpointError

FOLDER = Path("weights")


class Net(nn.Module):
    def __init__(self, **kwargs):
        super().__init__()
        self.embed = nn.Linear(4, 4, bias=False, **kwargs)
        self.norm = nn.BatchNorm1d(4, **kwargs)
        self.head = nn.Linear(4, 4, bias=False, **kwargs)
        self.head.weight = self.embed.weight


def saved(size="10GB", safe=True, folder=FOLDER) -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    model = Net()
    with torch.no_grad():
        model.norm.running_mean.uniform_()
        model.norm.num_batches_tracked.fill_(7)
    save_model(model, folder, max_shard_size=size, safe_serialization=safe)
    return model.state_dict()


def equal(model: nn.Module, expected: dict) -> bool:
    here = model.state_dict()
    return here.keys() == expected.keys() and all(
        torch.equal(here[k], expected[k]) and here[k].dtype == expected[k].dtype for k in here
    )


@pytest.mark.parametrize("safe", [True, False])
@pytest.mark.parametrize("size", ["10GB", 70])
@pytest.mark.parametrize("empty", [False, True])
def test_every_format_is_loaded(safe, size, empty):
    expected = saved(size, safe)
    stem = "model.safetensors" if safe else "pytorch_model.bin"
    entry = FOLDER / (stem if size == "10GB" else f"{stem}.index.json")
    for checkpoint in (FOLDER, str(FOLDER), entry):
        torch.manual_seed(2)
        model = Net(device="meta") if empty else Net()
        weight = model.embed.weight
        load_checkpoint_in_model(model, checkpoint, strict=True)
        assert equal(model, expected)
        assert model.head.weight is model.embed.weight
        assert empty or model.embed.weight is weight  # an optimizer's, say


@pytest.mark.parametrize("safe", [True, False])
@pytest.mark.parametrize("kwargs", [{"device": "meta"}, {}])
def test_loaded_weights_do_not_depend_on_the_file(safe, kwargs):
    expected = saved(safe=safe)
    model = Net(**kwargs)
    load_checkpoint_in_model(model, FOLDER, strict=True)
    [file] = FOLDER.iterdir()
    with open(file, "r+b") as stream:  # seen through a mapping of the file
        stream.write(b"x" * file.stat().st_size)
    assert equal(model, expected)
    with torch.no_grad():
        model.embed.weight += 1
    assert torch.equal(model.head.weight, expected["embed.weight"] + 1)


def test_ties_of_the_model_are_filled():
    expected = saved()
    del expected["head.weight"]
    save_file(expected, FOLDER / "model.safetensors")  # nothing in its metadata
    model = Net(device="meta")
    load_checkpoint_in_model(model, FOLDER, strict=True)
    assert torch.equal(model.head.weight, expected["embed.weight"])


def test_ties_of_the_file_are_untied_in_the_model():
    expected = saved()
    for kwargs in ({}, {"device": "meta"}):
        model = Net(**kwargs)
        model.head = nn.Linear(4, 4, bias=False, **kwargs)
        load_checkpoint_in_model(model, FOLDER, strict=True)
        assert equal(model, expected)
        assert model.head.weight is not model.embed.weight


@pytest.mark.parametrize("dtype", ["float16", "torch.float16", torch.float16])
def test_dtype_converts_floats_only(dtype):
    expected = saved()
    model = Net()
    model.embed.weight.requires_grad_(False)
    load_checkpoint_in_model(model, FOLDER, dtype=dtype, keep_in_fp32_modules=["norm"])
    assert model.embed.weight.dtype == torch.float16
    assert torch.equal(model.embed.weight, expected["embed.weight"].half())
    assert not model.embed.weight.requires_grad
    assert model.norm.weight.requires_grad
    assert torch.equal(model.norm.running_mean, expected["norm.running_mean"])  # still float32
    assert model.norm.num_batches_tracked == 7
    assert model.norm.num_batches_tracked.dtype == torch.int64


def test_the_dtype_of_the_model_is_kept():
    expected = saved()
    model = Net(dtype=torch.float64)
    load_checkpoint_in_model(model, FOLDER, device_map={"": "cpu"})
    assert torch.equal(model.embed.weight, expected["embed.weight"].double())


def test_device_map_uses_the_longest_name():
    expected = saved()
    model = nn.Sequential(Net(device="meta"))
    Path("deep").mkdir()
    save_file({f"0.{k}": v.clone() for k, v in expected.items()}, "deep/model.safetensors")
    places = {"0": "meta", "0.norm": "cpu", "0.nor": "disk"}
    with pytest.raises(ValueError, match="offload_folder"):
        load_checkpoint_in_model(model, "deep", {**places, "0.norm": "disk"})
    load_checkpoint_in_model(model, "deep", {"0": "disk", "0.norm": torch.device("cpu")}, "off")
    assert model[0].embed.weight.is_meta
    assert torch.equal(model[0].norm.running_mean, expected["norm.running_mean"])


def test_device_map_to_disk():
    expected = saved()
    places = {"embed": "cpu", "head": "cpu", "norm": "disk"}
    model = Net(device="meta")
    load_checkpoint_in_model(model, FOLDER, places, "off", "bfloat16")
    index = json.loads(Path("off/index.json").read_text())
    assert index.keys() == {"norm.weight", "norm.bias"}
    assert (index["norm.weight"]["dtype"], index["norm.weight"]["shape"]) == ("bfloat16", [4])
    assert model.norm.weight.is_meta
    assert model.norm.weight.dtype == torch.bfloat16
    weights = OffloadedWeightsLoader(save_folder="off")
    assert torch.equal(weights["norm.weight"], expected["norm.weight"].bfloat16())
    assert torch.equal(model.norm.running_mean, expected["norm.running_mean"].bfloat16())


@pytest.mark.parametrize("safe", [True, False])
def test_everything_on_disk(safe, monkeypatch):
    expected = saved(safe=safe)
    model = Net()
    load_checkpoint_in_model(model, FOLDER, {"": "disk"}, "off", offload_buffers=True)
    assert all(value.is_meta for value in model.state_dict().values())
    assert len(list(Path("off").iterdir())) == (2 if safe else len(expected))  # linked, or each one

    def refuse(*args):
        raise OSError("another disk")

    monkeypatch.setattr("os.link", refuse)
    load_checkpoint_in_model(Net(), FOLDER, {"": "disk"}, "copied", offload_buffers=True)
    assert len(list(Path("copied").iterdir())) == len(expected)  # tied weights once, and the index
    shutil.rmtree(FOLDER)
    for folder in ("off", "copied"):
        weights = OffloadedWeightsLoader(save_folder=folder)
        assert weights.keys() == expected.keys()
        assert all(torch.equal(weights[name], expected[name]) for name in expected)
        assert weights["head.weight"].data_ptr() == weights["embed.weight"].data_ptr()


def test_device_map_without_a_weight_raises():
    saved()
    with pytest.raises(ValueError, match=r"norm\.weight doesn't have any device set"):
        load_checkpoint_in_model(Net(), FOLDER, {"embed": "cpu", "head": "cpu"})


def test_wrong_arguments_raise():
    saved()
    with pytest.raises(TypeError, match=r"device_map is 'auto'"):
        load_checkpoint_in_model(Net(), FOLDER, "auto")
    for dtype in ("float17", "nn", 3):
        with pytest.raises(ValueError, match="dtype is"):
            load_checkpoint_in_model(Net(), FOLDER, dtype=dtype)
    for name, value in (
        ("offload_8bit_bnb", True),
        ("full_state_dict", False),
        ("broadcast_from_rank0", True),
    ):
        with pytest.raises(ValueError, match=f"{name}={value}"):
            load_checkpoint_in_model(Net(), FOLDER, **{name: value})


def test_wrong_paths_raise():
    with pytest.raises(ValueError, match=r"checkpoint is 'nothing'; it must be"):
        load_checkpoint_in_model(Net(), "nothing")
    FOLDER.mkdir()
    with pytest.raises(
        ValueError, match=r"holds neither model\.safetensors nor pytorch_model\.bin"
    ):
        load_checkpoint_in_model(Net(), FOLDER)
    saved(70)
    shutil.copy(FOLDER / "model.safetensors.index.json", FOLDER / "b.index.json")
    with pytest.raises(ValueError, match=r"2 indexes: b\.index\.json, model\.safetensors\.index"):
        load_checkpoint_in_model(Net(), FOLDER)
    (FOLDER / "b.index.json").unlink()
    next(FOLDER.glob("model-00002*")).unlink()
    with pytest.raises(CheckpointError, match=r"lists files that are missing: model-00002-of"):
        load_checkpoint_in_model(Net(), FOLDER)
    (FOLDER / "model.safetensors.index.json").write_text("[]")
    with pytest.raises(CheckpointError, match="is not an index of weights"):
        load_checkpoint_in_model(Net(), FOLDER)


@pytest.mark.parametrize("kwargs", [{}, {"device_map": {"": "cpu"}}, {"dtype": "float16"}])
def test_another_shape_raises_before_anything_is_loaded(kwargs):
    expected = saved(70)
    expected["norm.weight"] = torch.ones(5)
    save_file(
        expected | {"head.weight": expected["head.weight"].clone()}, FOLDER / "model.safetensors"
    )
    model = Net()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    with pytest.raises(ValueError, match=r"'norm.weight' has shape \(5,\) .* and \(4,\)"):
        load_checkpoint_in_model(model, FOLDER, **kwargs)
    assert equal(model, before)


def test_missing_and_unexpected_names(caplog):
    expected = saved()
    expected["more"] = torch.ones(5)
    del expected["norm.bias"], expected["head.weight"]
    save_file(expected, FOLDER / "model.safetensors")
    model = Net()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    with pytest.raises(
        CheckpointError, match=r"(?s)missing .*norm\.bias.*unexpected .*more\n.*strict"
    ):
        load_checkpoint_in_model(model, FOLDER, strict=True)
    assert equal(model, before)
    load_checkpoint_in_model(model, FOLDER)
    assert torch.equal(model.embed.weight, expected["embed.weight"])
    assert [record.levelno for record in caplog.records] == [logging.WARNING] * 2
    assert "weights that the model does not have: more" in caplog.text
    assert "which keep their values (none on the meta device): norm.bias" in caplog.text


def test_load_state_dict_pre_hooks_rename():
    class Translated(nn.Linear):
        def __init__(self):
            super().__init__(2, 2)
            self.register_load_state_dict_pre_hook(self.translate)

        @staticmethod
        def translate(module, state, prefix, *rest):
            if "old" in state:
                state["weight"] = state.pop("old")

    source = nn.Linear(2, 2)
    FOLDER.mkdir()
    places = {"old": "a.safetensors", "bias": "b.safetensors"}
    (FOLDER / "x.index.json").write_text(json.dumps({"weight_map": places}))
    save_file({"old": source.weight.detach()}, FOLDER / "a.safetensors")
    save_file({"bias": source.bias.detach()}, FOLDER / "b.safetensors")
    for kwargs in ({}, {"dtype": "float32"}):
        model = Translated()
        load_checkpoint_in_model(model, FOLDER, strict=True, **kwargs)
        assert equal(model, source.state_dict())
        with pytest.raises(
            CheckpointError, match=r"(?s)a\.safetensors does not fit .*missing .*bias"
        ):
            load_checkpoint_in_model(model, FOLDER / "a.safetensors", strict=True, **kwargs)


def test_damaged_files_raise():
    FOLDER.mkdir()
    (FOLDER / "model.safetensors").write_bytes(b"xxxx")
    with pytest.raises(CheckpointError, match=r"model\.safetensors cannot be read"):
        load_checkpoint_in_model(Net(), FOLDER)
    torch.save([1], FOLDER / "a.bin")
    with pytest.raises(CheckpointError, match=r"a\.bin is not a file of weights"):
        load_checkpoint_in_model(Net(), FOLDER / "a.bin")
    torch.save(
        {"a": Fraction(1)}, FOLDER / "a.bin"
    )  # other libraries make Path safe for torch.load
    with pytest.raises(CheckpointError, match=r"a\.bin is not read: .*run any code"):
        load_checkpoint_in_model(Net(), FOLDER / "a.bin")
