"""`trainer merge-weights`: shards become one file, bit for bit, in little memory."""

from __future__ import annotations

import hashlib
import json
import pickle
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, load_model, save_file

from tests.helpers.line import Line, loader
from tests.numerics.running import quiet_trainer
from trainer.checkpoint import shards as shards_module
from trainer.checkpoint.weights import load_weights, save_model
from trainer.cli import main

MEGABYTE = 1 << 20


class Mixed(torch.nn.Module):
    """Tensors of many types and shapes, a tied one among them."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(30, 30)
        self.half = torch.nn.Linear(20, 20).half()
        self.double = torch.nn.Linear(10, 10).double()
        self.brain = torch.nn.Linear(10, 10).bfloat16()
        self.norm = torch.nn.BatchNorm1d(7)
        self.last = self.first
        self.register_buffer("flags", torch.tensor([True, False, True]))
        self.register_buffer("nothing", torch.empty(0, 3))
        self.register_buffer("scalar", torch.tensor(3.5))
        self.register_buffer("größe", torch.arange(5, dtype=torch.int8))


@pytest.fixture
def shards() -> Path:
    """A folder of shards, with their index."""
    save_model(Mixed(), "shards", max_shard_size="1KB")
    assert len(list(Path("shards").glob("*.safetensors"))) > 4
    return Path("shards")


def merge(*arguments: object) -> int:
    return main(["merge-weights", *map(str, arguments)])


@pytest.mark.parametrize("size", ["1KB", "10GB"])
def test_the_merged_file_has_every_tensor_bit_for_bit(size):
    model = Mixed()
    save_model(model, "saved", max_shard_size=size)
    assert merge("saved", "new/merged.safetensors") == 0
    expected = model.state_dict()
    merged = load_weights("new/merged.safetensors")
    assert merged.keys() == expected.keys()
    for name, value in expected.items():
        assert merged[name].dtype == value.dtype
        assert torch.equal(merged[name], value), name
    other = Mixed()
    load_model(other, "new/merged.safetensors")  # safetensors' own, strict about tied names
    assert torch.equal(other.first.weight, model.first.weight)
    assert [path.name for path in Path("new").iterdir()] == ["merged.safetensors"]


def test_an_index_is_a_checkpoint_too(shards):
    assert merge(shards / "model.safetensors.index.json", "merged.safetensors") == 0
    assert len(load_file("merged.safetensors")) == len(Mixed().state_dict()) - 2


def test_each_tensor_lies_where_its_type_may_be_read(shards):
    merge(shards, "merged.safetensors")
    raw = Path("merged.safetensors").read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])
    assert length % 8 == 0
    assert header.pop("__metadata__")["format"] == "pt"
    with safe_open("merged.safetensors", framework="pt") as opened:
        for name, entry in header.items():
            width = opened.get_tensor(name).element_size()
            assert entry["data_offsets"][0] % width == 0, name


def test_the_weights_of_a_step_folder(capsys):
    module = Line()
    quiet_trainer(max_steps=2, checkpointing=True).fit(module, loader())
    step = Path("run/checkpoints/step-00000002")
    assert merge(step, "merged.safetensors", "--json") == 0
    assert {name: value.tolist() for name, value in load_file("merged.safetensors").items()} == {
        name: value.tolist() for name, value in module.state_dict().items()
    }
    report = json.loads(capsys.readouterr().out)
    data = Path("merged.safetensors").read_bytes()
    assert report["sha256"] == hashlib.sha256(data).hexdigest()
    assert (report["tensors"], report["tied"], report["size"]) == (2, 0, len(data))

    for folder in ("run", "run/checkpoints"):
        assert merge(folder, "other.safetensors") == 1
        assert capsys.readouterr().err.endswith(f" Did you mean {step}?\n")

    weights = step / "model.safetensors"
    torn = bytearray(weights.read_bytes())
    torn[-1] ^= 1
    weights.write_bytes(torn)
    assert merge(step, "other.safetensors") == 1
    assert "is damaged: its SHA-256 is not the manifest's" in capsys.readouterr().err
    assert not Path("other.safetensors").exists()


def test_shards_are_not_read_into_memory(monkeypatch):
    each, count = 6 * MEGABYTE, 12
    model = torch.nn.ParameterList(
        torch.nn.Parameter(torch.full((each // 4,), float(number))) for number in range(count)
    )
    save_model(model, "saved", max_shard_size=each)
    assert len(list(Path("saved").glob("*.safetensors"))) == count
    del model
    before, during = _resident("RssAnon"), []  # without the pages of mapped files
    write = shards_module.write_tensors

    def measured(*args, **kwargs):
        write(*args, **kwargs)
        during.append(_resident("RssAnon"))

    monkeypatch.setattr(shards_module, "write_tensors", measured)
    assert merge("saved", "merged.safetensors") == 0
    assert during[0] - before < 2 * each
    merged = load_file("merged.safetensors")
    assert [merged[str(number)].unique().item() for number in range(count)] == list(range(count))


def _resident(which: str) -> int:
    """Bytes of this process in memory; 0 where the system does not say."""
    status = Path("/proc/self/status")
    lines = status.read_text().splitlines() if status.exists() else []
    return sum(int(line.split()[1]) << 10 for line in lines if line.startswith(which))


def test_a_file_is_replaced_only_by_force_and_only_by_a_whole_one(shards, capsys):
    Path("merged.safetensors").write_text("precious")
    assert merge(shards, "merged.safetensors") == 1
    assert "pass --force to replace it" in capsys.readouterr().err
    assert Path("merged.safetensors").read_text() == "precious"
    victim = sorted(shards.glob("*.safetensors"))[-1]
    whole = victim.read_bytes()
    victim.write_bytes(whole[:-1])
    assert merge(shards, "merged.safetensors", "--force") == 1
    assert str(victim) in capsys.readouterr().err
    assert Path("merged.safetensors").read_text() == "precious"
    victim.write_bytes(whole)
    assert merge(shards, "merged.safetensors", "--force") == 0
    assert "scalar" in load_file("merged.safetensors")
    assert sorted(path.name for path in Path().iterdir()) == ["merged.safetensors", "shards"]


class _Trap:
    """Touches a file when it is unpickled."""

    def __reduce__(self):
        return (Path.touch, (Path("unpickled"),))


def test_pickles_are_refused_and_not_read(capsys):
    Path("sharded").mkdir()
    Path("sharded/.metadata").write_bytes(pickle.dumps(_Trap()))
    Path("sharded/__0_0.distcp").write_bytes(b"")
    assert merge("sharded", "merged.safetensors") == 1
    assert "is a pickle: reading it can run any code" in capsys.readouterr().err
    Path("old").mkdir()
    Path("old/pytorch_model.bin").write_bytes(pickle.dumps(_Trap()))
    assert merge("old", "merged.safetensors") == 1
    assert "safe_serialization=True" in capsys.readouterr().err
    assert not Path("unpickled").exists()
    assert not Path("merged.safetensors").exists()


def test_shards_that_contradict_each_other_are_refused(shards, capsys):
    index = shards / "model.safetensors.index.json"
    document = json.loads(index.read_text())
    files = sorted(set(document["weight_map"].values()))
    other = {**document["weight_map"], "scalar": files[0], "absent": files[1]}
    index.write_text(json.dumps({"weight_map": other}))
    assert merge(shards, "merged.safetensors") == 1
    assert "which does not contain it" in capsys.readouterr().err
    index.write_text(json.dumps(document))
    save_file(load_file(shards / files[0]), shards / files[1])
    assert merge(shards, "merged.safetensors") == 1
    assert f"{files[0]} and in" in capsys.readouterr().err
    (shards / files[2]).unlink()
    assert merge(shards, "merged.safetensors") == 1
    assert f"lists files that are missing: {files[2]}" in capsys.readouterr().err


def test_an_index_of_one_file_is_compared_with_it(capsys):
    folder = Path("one")
    folder.mkdir()
    save_file({"a": torch.ones(2)}, folder / "all.safetensors", {"a": "author", "b": "a", "c": "x"})
    save_file({"a": torch.ones(2)}, "other.safetensors")
    index = folder / "all.safetensors.index.json"
    for places, text in (
        ({"a": "all.safetensors", "gone": "all.safetensors"}, "lists 'gone' in all.safetensors"),
        ({}, "lists no file"),
        ({"a": "../other.safetensors"}, "files outside its folder: ../other.safetensors"),
    ):
        index.write_text(json.dumps({"weight_map": places}))
        assert merge(index, "merged.safetensors") == 1
        assert text in capsys.readouterr().err
        assert not Path("merged.safetensors").exists()
    index.write_text(json.dumps({"weight_map": {"a": "all.safetensors"}}))
    assert merge(index, "merged.safetensors") == 0
    assert "1 tensors (and 1 more names for them) from 1 file" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("checkpoint", "output", "text"),
    [
        ("shards", "merged.bin", "must end in '.safetensors'"),
        ("nowhere", "merged.safetensors", "must be a file of weights"),
        ("shards/model-00001-of-00011.safetensors", "folder.safetensors", "is a folder"),
        ("first.safetensors", "first.safetensors", "one of the files to merge"),
    ],
)
def test_wrong_usage_is_refused(shards, capsys, checkpoint, output, text):
    Path("folder.safetensors").mkdir()
    first = sorted(shards.glob("*.safetensors"))[0]
    Path("first.safetensors").write_bytes(first.read_bytes())
    source = first if "00001" in checkpoint else checkpoint
    assert merge(source, output, "--force") == 1
    assert text in capsys.readouterr().err
