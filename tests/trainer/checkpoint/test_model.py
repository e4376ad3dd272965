"""Weights in one file or in shards, as other libraries read them."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, load_model
from torch import nn

from trainer.big_models import load_checkpoint_in_model
from trainer.checkpoint import weights as model_module
from trainer.checkpoint.weights import load_weights, parse_size, save_model

FOLDER = Path("weights")


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(4, 4, bias=False)
        self.middle = nn.Linear(4, 4)
        self.head = nn.Linear(4, 4, bias=False)
        self.head.weight = self.embed.weight


def names() -> list[str]:
    return sorted(os.listdir(FOLDER))


def read(index: str = "model.safetensors.index.json") -> dict[str, torch.Tensor]:
    """What another library sees: each name read from the file that the index gives."""
    document = json.loads((FOLDER / index).read_text())
    files = {file: _read(FOLDER / file) for file in set(document["weight_map"].values())}
    assert sum(map(len, files.values())) == len(document["weight_map"])
    return {name: files[file][name] for name, file in document["weight_map"].items()}


def _read(file: Path) -> dict[str, torch.Tensor]:
    return load_file(file) if file.suffix == ".safetensors" else torch.load(file, weights_only=True)


def equal(left: dict, right: dict) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[key], right[key]) for key in left)


@pytest.mark.parametrize(
    ("text", "count"),
    [
        (7, 7),
        ("5MB", 5_000_000),
        ("2TB", 2 * 10**12),
        ("3GiB", 3 * 2**30),
        ("0.5 kib", 512),
        ("8Gb", 10**9),
    ],
)
def test_parse_size(text, count):
    assert parse_size(text, "x") == count


@pytest.mark.parametrize("text", [0, True, 2.5, "5", "GB", "-5GB", "1XB", "0KB"])
def test_a_wrong_max_shard_size_raises(text):
    with pytest.raises(ValueError, match=r"max_shard_size is .*; it must be .*'5GB'"):
        save_model(nn.Linear(1, 1), FOLDER, max_shard_size=text)
    assert not FOLDER.exists()


def test_save_model_as_one_file():
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    assert save_model(model, FOLDER) is None
    assert names() == ["model.safetensors"]
    assert equal(load_file(FOLDER / "model.safetensors"), model.state_dict())
    with safe_open(FOLDER / "model.safetensors", "pt") as opened:
        assert opened.metadata() == {"format": "pt"}


def test_save_model_as_shards_with_an_index():
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))  # 64 + 16 bytes each
    save_model(model, str(FOLDER), max_shard_size=100)
    shards = [f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)]
    assert names() == [*shards, "model.safetensors.index.json"]
    assert equal(read(), model.state_dict())
    text = (FOLDER / "model.safetensors.index.json").read_text()
    document = json.loads(text)
    assert document["metadata"] == {"total_size": 240}
    assert list(document["weight_map"].items()) == sorted(document["weight_map"].items())
    assert text == json.dumps(document, indent=2, sort_keys=True) + "\n"
    for shard in shards:
        assert load_file(FOLDER / shard).keys() == {
            f"{shards.index(shard)}.weight",
            f"{shards.index(shard)}.bias",
        }
        with safe_open(FOLDER / shard, "pt") as opened:
            assert opened.metadata()["format"] == "pt"


def test_a_tied_weight_is_stored_once():
    model = Tied()
    save_model(model, FOLDER)
    assert load_file(FOLDER / "model.safetensors").keys() == {
        "embed.weight",
        "middle.weight",
        "middle.bias",
    }
    assert equal(load_weights(FOLDER), model.state_dict())
    other = Tied()
    load_model(other, FOLDER / "model.safetensors")  # of safetensors, which knows the record
    assert equal(other.state_dict(), model.state_dict())
    save_model(model, "sharded", max_shard_size=80)  # without the tie it would be more
    index = json.loads(Path("sharded/model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == 144
    assert "head.weight" not in index["weight_map"]
    with safe_open(Path("sharded") / index["weight_map"]["embed.weight"], "pt") as opened:
        assert opened.metadata() == {"format": "pt", "head.weight": "embed.weight"}


@pytest.mark.parametrize("size", ["10GB", 80])
def test_save_model_as_torch_files(size):
    model = Tied()
    save_model(model, FOLDER, max_shard_size=size, safe_serialization=False)
    if size == 80:
        assert names() == [
            "pytorch_model-00001-of-00002.bin",
            "pytorch_model-00002-of-00002.bin",
            "pytorch_model.bin.index.json",
        ]
        assert equal(read("pytorch_model.bin.index.json"), model.state_dict())
    else:
        assert names() == ["pytorch_model.bin"]
        stored = _read(FOLDER / "pytorch_model.bin")
        assert equal(stored, model.state_dict())
        assert stored["head.weight"].data_ptr() == stored["embed.weight"].data_ptr()


def test_files_of_an_earlier_save_are_replaced_and_others_stay():
    FOLDER.mkdir()
    others = [
        "config.json",
        "model-1-of-2.safetensors",
        "model-00001-of-00002.safetensors.bak",
        "my-model-00001-of-00002.safetensors",
        "pytorch_model-1-of-9.bin",
        "model_1.safetensors",
    ]
    for name in others:
        (FOLDER / name).write_text("x")
    big = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))
    save_model(big, FOLDER, max_shard_size=100)
    save_model(big, FOLDER, max_shard_size=200)
    shards = [f"model-0000{i}-of-00002.safetensors" for i in (1, 2)]
    assert names() == sorted([*others, *shards, "model.safetensors.index.json"])
    assert equal(read(), big.state_dict())
    small = nn.Linear(2, 2)
    save_model(small, FOLDER)
    assert names() == sorted([*others, "model.safetensors"])
    save_model(big, FOLDER, max_shard_size=200)
    assert names() == sorted([*others, *shards, "model.safetensors.index.json"])
    assert all((FOLDER / name).read_text() == "x" for name in others)


@pytest.mark.parametrize("later", ["10GB", 100])
@pytest.mark.parametrize("earlier", ["10GB", 100])
@pytest.mark.parametrize("safe", [True, False])
def test_weights_of_the_other_format_are_removed(safe, earlier, later):
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))
    save_model(model, FOLDER, earlier, safe_serialization=not safe)
    with torch.no_grad():
        model[0].weight.zero_()
    save_model(model, FOLDER, later, safe_serialization=safe)
    fresh = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))
    load_checkpoint_in_model(fresh, FOLDER)
    assert equal(fresh.state_dict(), model.state_dict())
    kept = "model" if safe else "pytorch_model"
    assert all(name.startswith((f"{kept}.", f"{kept}-")) for name in names())


@pytest.mark.parametrize("later_size", ["10GB", 100, 200])
@pytest.mark.parametrize("fail_at", [0, 1])
def test_a_failed_save_keeps_the_earlier_weights(monkeypatch, later_size, fail_at):
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))
    save_model(model, FOLDER, max_shard_size=100)
    before, files = {k: v.clone() for k, v in model.state_dict().items()}, names()
    nn.init.zeros_(model[0].weight)
    written = []
    real = model_module.write_temporary

    def failing(file, write):
        written.append(file)
        if len(written) == fail_at + 1 or later_size == "10GB":
            raise OSError("disk full")
        return real(file, write)

    monkeypatch.setattr(model_module, "write_temporary", failing)
    with pytest.raises(OSError, match="disk full"):
        save_model(model, FOLDER, max_shard_size=later_size)
    assert names() == files
    assert equal(read(), before)


def test_a_killed_save_leaves_no_index(monkeypatch):
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))
    save_model(model, FOLDER, max_shard_size=100)
    real, moved = os.replace, []

    def killed(source, target):
        if moved:
            raise KeyboardInterrupt
        moved.append(target)
        real(source, target)

    monkeypatch.setattr(model_module.os, "replace", killed)
    with pytest.raises(KeyboardInterrupt):
        save_model(nn.Sequential(*(nn.Linear(4, 4) for _ in range(3))), FOLDER, max_shard_size=100)
    assert "model.safetensors.index.json" not in names()
    assert not [name for name in names() if name.startswith(".")]


def test_a_file_in_place_of_the_folder_raises():
    FOLDER.write_text("x")
    with pytest.raises(NotADirectoryError, match=r"weights is a file; save_directory must be"):
        save_model(nn.Linear(1, 1), FOLDER)
    assert FOLDER.read_text() == "x"


def test_meta_weights_raise():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta"))
    with pytest.raises(RuntimeError, match=r"1\.weight is on the meta device.*to_empty"):
        save_model(model, FOLDER)
    assert not FOLDER.exists()


def test_file_modes_follow_the_umask():
    mask = os.umask(0o022)
    try:
        save_model(nn.Linear(1, 1), FOLDER)
    finally:
        os.umask(mask)
    assert stat.S_IMODE((FOLDER / "model.safetensors").stat().st_mode) == 0o644
