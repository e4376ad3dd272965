"""Single objects in files that are whole or not there."""

from __future__ import annotations

import io
import os
from collections import OrderedDict
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from trainer.checkpoint.objects import load, save
from trainer.errors import CheckpointError
from trainer.state import PartialState


def test_save_and_load():
    value = {"a": [1, 2.5, "x", None], "b": torch.arange(3), "c": (True,), "d": np.arange(3.0)}
    save(value, "thing.bin")
    loaded = load("thing.bin")
    assert torch.equal(loaded.pop("b"), value.pop("b"))
    assert loaded.pop("d").tolist() == value.pop("d").tolist()
    assert loaded == value
    assert os.listdir() == ["thing.bin"]
    assert torch.load("thing.bin", weights_only=False)["a"] == value["a"]


@pytest.mark.parametrize("name", ["w.safetensors", "w.bin"])
def test_tensors_as_safetensors_under_any_name(name):
    tensor = torch.rand(3)
    save(OrderedDict(a=tensor, b=tensor, c=tensor[:2]), name, safe_serialization=True)
    assert load_file(name).keys() == {"a", "c"}
    loaded = load(Path(name))
    assert {k: v.tolist() for k, v in loaded.items()} == {
        "a": tensor.tolist(),
        "b": tensor.tolist(),
        "c": tensor[:2].tolist(),
    }
    assert load(name, map_location="meta")["a"].is_meta


@pytest.mark.parametrize("value", [[torch.ones(1)], {1: torch.ones(1)}, {"a": 1}])
def test_safe_serialization_of_other_objects_raises(value):
    with pytest.raises(TypeError):
        save(value, "w.safetensors", safe_serialization=True)
    assert os.listdir() == []


def test_a_failed_save_keeps_the_earlier_file():
    save([1], "a.bin")
    with pytest.raises(Exception, match="local object"):
        save([lambda: 1], "a.bin")
    assert load("a.bin") == [1]
    assert os.listdir() == ["a.bin"]


def test_the_main_process_writes_or_one_on_each_node():
    here = PartialState().__dict__
    here.update(process_index=1, num_processes=2)
    for each in (False, True):
        for rank in (0, 1):
            here.update(local_process_index=rank)
            name = f"{each}-{rank}.bin"
            save([1], name, each)
    assert os.listdir() == ["True-0.bin"]
    save({"a": torch.ones(1)}, "w.bin", save_on_each_node=True)
    assert not Path("w.bin").exists()
    here.update(process_index=0)
    save([1], "main.bin")
    assert load("main.bin") == [1]


def test_save_to_an_open_file():
    stream = io.BytesIO()
    save([1], stream)
    assert torch.load(io.BytesIO(stream.getvalue()), weights_only=True) == [1]
    with pytest.raises(TypeError, match="must be a path"):
        save({}, stream, safe_serialization=True)


def test_loading_never_runs_code():
    class Bomb:
        def __reduce__(self):
            return os.mkdir, ("exploded",)

    torch.save([Bomb()], "bomb.bin")
    with pytest.raises(CheckpointError, match=r"bomb\.bin is not read: .*mkdir") as caught:
        load("bomb.bin")
    assert "add_safe_globals" not in str(caught.value)
    assert not Path("exploded").exists()


def test_missing_and_damaged_files_are_named():
    for name in ("none.bin", "none.safetensors"):
        with pytest.raises(CheckpointError, match=rf"{name}"):
            load(name)
    for content in (b"", b"PK\x03\x04", b"\x80\x02rubbish", b"12345678{"):
        Path("bad.bin").write_bytes(content)
        with pytest.raises(CheckpointError, match=r"bad\.bin"):
            load("bad.bin")
