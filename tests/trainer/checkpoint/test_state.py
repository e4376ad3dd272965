"""Saving and loading everything that is prepared, on one process."""

from __future__ import annotations

import logging
import os
import random
from collections import OrderedDict
from pathlib import Path
from types import SimpleNamespace

import numpy
import pytest
import torch
from torch import nn

from trainer.checkpoint import accelerator_state as state
from trainer.checkpoint.accelerator_state import PreparedObjects, load_state, save_state
from trainer.checkpoint.save import SaveRequest, save_checkpoint
from trainer.checkpoint.storage import verify
from trainer.errors import CheckpointError

ALONE = SimpleNamespace(
    is_main_process=True,
    is_local_main_process=True,
    num_processes=1,
    process_index=0,
    local_process_index=0,
)
OUT = Path("out")


class Custom:
    def __init__(self, value=0):
        self.value = value

    def state_dict(self):
        return {"value": self.value}

    def load_state_dict(self, state):
        self.value = state["value"]


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(2, 2), nn.Linear(2, 2)
        self.b.weight = self.a.weight


class Extra(nn.Module):
    def get_extra_state(self):
        return {"a": object()}

    def set_extra_state(self, state):
        pass


def make(seed: int, *, train: int = 0, **changes) -> PreparedObjects:
    """Objects as a script would make them, trained for a few steps."""
    torch.manual_seed(seed)
    models = [nn.Sequential(nn.Linear(2, 3), nn.Dropout(0.5), nn.BatchNorm1d(3)), Tied()]
    optimizers = [
        torch.optim.AdamW(models[0].parameters(), lr=0.1),
        torch.optim.SGD(models[1].parameters(), lr=0.5, momentum=0.9),
    ]
    schedulers = [torch.optim.lr_scheduler.StepLR(o, 2, gamma=0.5) for o in optimizers]
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**seed)
    prepared = PreparedObjects(
        models=models,
        optimizers=optimizers,
        schedulers=schedulers,
        dataloaders=[Custom(), Custom(seed)],
        custom_objects=[Custom(torch.tensor([seed])), Custom("text")],
        scaler=scaler,
        step=seed,
    )
    step(prepared, train)
    for name, value in changes.items():
        setattr(prepared, name, value)
    return prepared


def step(prepared: PreparedObjects, count: int) -> list[list[float]]:
    """Train on random data; what comes out depends on every piece of state."""
    seen = []
    for _ in range(count):
        x = torch.rand(4, 2) + random.random() + numpy.random.rand()
        for model, optimizer, scheduler in zip(
            prepared.models, prepared.optimizers, prepared.schedulers, strict=True
        ):
            y = model(x) if isinstance(model, nn.Sequential) else model.b(model.a(x))
            loss = y.square().mean() + y.sum() * 0.01
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            seen.append([loss.item(), *scheduler.get_last_lr()])
    return seen


@pytest.mark.parametrize("safe", [True, False])
def test_load_state_resumes_training(safe):
    first = make(3, train=3)
    first.dataloaders[0].value = 5
    assert save_state(OUT, first, ALONE, safe_serialization=safe) == OUT
    expected = step(first, 3)
    second = make(4, train=1)
    assert load_state(str(OUT), second, ALONE) == 3
    assert step(second, 3) == expected
    assert [loader.value for loader in second.dataloaders] == [5, 3]
    assert second.custom_objects[0].value == torch.tensor([3])
    assert second.scaler.get_scale() == 8.0
    assert second.models[1].a.weight is second.models[1].b.weight


@pytest.mark.parametrize("safe", [True, False])
def test_file_names_of_a_state(safe):
    save_state(OUT, make(1, train=1), ALONE, safe_serialization=safe)
    weights = ["model.safetensors", "model_1.safetensors"]
    if not safe:
        weights = ["pytorch_model.bin", "pytorch_model_1.bin"]
    assert sorted(os.listdir(OUT)) == sorted(
        [
            *weights,
            *(f"optimizer{n}.{end}" for n in ("", "_1") for end in ("json", "safetensors")),
            *("scheduler.json", "scheduler_1.json", "sampler.json", "scaler.json"),
            *("custom_checkpoint_0.json", "custom_checkpoint_0.safetensors"),
            *("custom_checkpoint_1.json", "manifest.json"),
            *("random_states_0.json", "random_states_0.safetensors"),
        ]
    )
    manifest = verify(OUT)
    assert manifest["models"] == 2
    assert manifest["world_size"] == 1


def test_a_state_of_an_earlier_release_is_loaded(monkeypatch, caplog):
    since = "gradients", "communication"
    own_state = state._own_state
    with monkeypatch.context() as patch:
        patch.setattr(
            state,
            "_own_state",
            lambda it: {k: v for k, v in own_state(it).items() if k not in since},
        )
        save_state(OUT, make(1), ALONE)
    assert load_state(OUT, make(2, communication=[Custom()]), ALONE) == 1
    assert "the state of 0 communication hooks, but 1 are registered" in caplog.text


def test_a_failed_save_keeps_the_earlier_state():
    save_state(OUT, make(1), ALONE)
    bad = make(2, custom_objects=[Custom(1), Custom(object())])
    message = (
        r"custom_checkpoint_1 \(Custom\) cannot be saved\. .*\['value'\] is a builtins\.object"
    )
    with pytest.raises(CheckpointError, match=message):
        save_state(OUT, bad, ALONE)
    bad = make(2)
    bad.models[0].get_extra_state = lambda: {"a": 1}
    bad.models[0].register_buffer("sparse", torch.ones(2).to_sparse())
    with pytest.raises(CheckpointError, match=r"Model 0 cannot be saved\. .*'sparse'"):
        save_state(OUT, bad, ALONE)
    bad = make(2)
    bad.models[1] = Extra()
    with pytest.raises(CheckpointError, match=r"Model 1 cannot be saved\. _extra_state\['a'\]"):
        save_state(OUT, bad, ALONE)
    assert os.listdir() == ["out"]
    assert load_state(OUT, make(3), ALONE) == 1


@pytest.mark.filterwarnings("ignore:Lazy modules are a new feature")
def test_unused_lazy_layers():
    def models() -> list[nn.Module]:
        return [nn.ModuleList([nn.Linear(2, 2), nn.LazyLinear(2), nn.LazyBatchNorm1d()])]

    saved, loaded = PreparedObjects(models=models()), PreparedObjects(models=models())
    saved.models[0][1](torch.ones(1, 3))
    save_state(OUT, saved, ALONE)
    load_state(OUT, loaded, ALONE)
    for number in (0, 1):
        torch.testing.assert_close(
            loaded.models[0][number].state_dict(), saved.models[0][number].state_dict()
        )
    assert isinstance(loaded.models[0][2].weight, nn.UninitializedParameter)


def test_state_hooks():
    prepared = make(1)
    seen = []

    def hook(models, weights, output_dir):
        seen.append(models)
        assert [w.keys() for w in weights] == [m.state_dict().keys() for m in models]
        assert isinstance(output_dir, str)
        assert os.listdir(output_dir) == []  # before anything is written
        with open(os.path.join(output_dir, "mine.txt"), "w") as stream:
            stream.write("hello")
        os.makedirs(os.path.join(output_dir, "unet"))
        torch.save({}, os.path.join(output_dir, "unet", "x.bin"))
        weights.pop()
        models.clear()  # of no consequence for the Accelerator's own list

    hooks = OrderedDict({0: hook})
    save_state(OUT, prepared, ALONE, hooks=hooks.values())
    assert len(prepared.models) == 2
    assert (OUT / "mine.txt").read_text() == "hello"
    assert {"mine.txt", "unet/x.bin", "model.safetensors"} < verify(OUT)["files"].keys()
    assert not (OUT / "model_1.safetensors").exists()
    with pytest.raises(CheckpointError, match=r"the state of 1 models, but 2 are prepared"):
        load_state(OUT, make(2), ALONE)
    other = make(2)
    kept = other.models[1].a.weight.clone()

    def load_hook(models, input_dir):
        assert Path(input_dir, "mine.txt").read_text() == "hello"
        assert models == list(other.models)
        models.pop()

    load_state(OUT, other, ALONE, hooks=[load_hook])
    assert torch.equal(other.models[0][0].weight, prepared.models[0][0].weight)
    assert torch.equal(other.models[1].a.weight, kept)


@pytest.mark.parametrize("where", ["cuda", "disk", torch.device("cpu"), 0])
def test_a_wrong_map_location_raises(where):
    with pytest.raises(TypeError, match=r"map_location is .*None, 'cpu' and 'on_device'"):
        load_state(OUT, PreparedObjects(), ALONE, map_location=where)


@pytest.mark.parametrize("where", [None, "cpu", "on_device"])
def test_map_locations(where):
    saved, other = make(1), make(2)
    save_state(OUT, saved, ALONE)
    load_state(OUT, other, ALONE, map_location=where)
    assert torch.equal(other.models[0][0].weight, saved.models[0][0].weight)


def test_a_folder_without_a_state_raises():
    with pytest.raises(ValueError, match="There is no folder 'nothing'"):
        load_state("nothing", PreparedObjects(), ALONE)
    OUT.mkdir()
    with pytest.raises(CheckpointError, match=r"manifest\.json is missing"):
        load_state(OUT, PreparedObjects(), ALONE)
    save_checkpoint(SaveRequest(target=Path("step-00000001")), print, manifest=dict, state=ALONE)
    with pytest.raises(CheckpointError, match=r"Trainer's checkpoint is resumed with"):
        load_state("step-00000001", PreparedObjects(), ALONE)


@pytest.mark.parametrize("safe", [True, False])
def test_a_state_without_its_manifest_raises(safe):
    save_state(OUT, make(1), ALONE, safe_serialization=safe)
    (OUT / "manifest.json").unlink()
    with pytest.raises(CheckpointError, match=r"manifest\.json is missing: .* incomplete copy"):
        load_state(OUT, make(2), ALONE)


def snapshot(prepared: PreparedObjects) -> str:
    torch.set_printoptions(profile="full")
    things = [
        *prepared.models,
        *prepared.optimizers,
        *prepared.schedulers,
        *prepared.custom_objects,
    ]
    return str([thing.state_dict() for thing in things] + [torch.get_rng_state().sum()])


FEWER = {
    "models": r"holds the state of 2 models, but 3 are prepared",
    "optimizers": r"holds the state of 2 optimizers, but 3 are prepared",
    "schedulers": r"holds the state of 2 schedulers, but 3 are prepared",
    "custom_objects": r"holds the state of 2 custom objects, but 3 are registered",
}


@pytest.mark.parametrize("what", FEWER)
@pytest.mark.parametrize("strict", [True, False])
def test_missing_state_raises_before_anything_is_changed(what, strict):
    save_state(OUT, make(1, train=1), ALONE)
    prepared = make(2, train=1)
    objects = getattr(prepared, what)
    setattr(prepared, what, [*objects, objects[0]])
    before = snapshot(prepared)
    with pytest.raises(CheckpointError, match=FEWER[what]):
        load_state(OUT, prepared, ALONE, strict=strict)
    assert snapshot(prepared) == before


def test_state_of_unprepared_objects_warns(caplog):
    first = make(1, train=1)
    save_state(OUT, first, ALONE)
    only = make(2)
    only.models, only.optimizers, only.schedulers = only.models[:1], [], only.schedulers[:1]
    only.scaler, only.dataloaders = None, only.dataloaders[:1]
    load_state(OUT, only, ALONE)
    assert torch.equal(only.models[0][0].weight, first.models[0][0].weight)
    assert all(record.levelno == logging.WARNING for record in caplog.records)
    for text in (
        "last 1 of 2 models",
        "last 2 of 2 optimizers",
        "last 1 of 2 schedulers",
        "scaler's state is not loaded",
        "2 loaders, but 1",
    ):
        assert text in caplog.text
    only = make(2, custom_objects=[Custom()])
    with pytest.raises(CheckpointError, match=r"2 custom objects, but 1 are registered"):
        load_state(OUT, only, ALONE)


def test_missing_scaler_state():
    save_state(OUT, make(1, scaler=None), ALONE)
    with pytest.raises(CheckpointError, match=r"no state of a gradient scaler.*strict=False"):
        load_state(OUT, make(2), ALONE)
    prepared = make(2)
    load_state(OUT, prepared, ALONE, strict=False)
    assert prepared.scaler.get_scale() == 4.0


def damage_content(prepared):
    file = OUT / "optimizer.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"x")


def remove_a_file(prepared):
    (OUT / "random_states_0.json").unlink()


def another_shape(prepared):
    prepared.models[1].a.bias = nn.Parameter(torch.ones(3))


def another_name(prepared):
    prepared.models[1].c = nn.Linear(1, 1)


def other_groups(prepared):
    prepared.optimizers[1].add_param_group({"params": [nn.Parameter(torch.ones(1))]})


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (damage_content, r"optimizer\.safetensors is damaged"),
        (remove_a_file, r"random_states_0\.json is missing"),
        (another_shape, r"(?s)Model 1 .* a\.bias \(\[2\] in the file, \[3\] in the module\)"),
        (another_name, r"(?s)Model 1 .* missing from the file \(2\): c\.weight, c\.bias"),
        (other_groups, r"Optimizer 1 .* has groups of \[3\] parameters, .* \[3, 1\]"),
    ],
)
def test_state_that_does_not_fit_raises_before_anything_is_changed(spoil, message):
    save_state(OUT, make(1, train=1), ALONE)
    prepared = make(2, train=1)
    spoil(prepared)
    before = snapshot(prepared)
    with pytest.raises(CheckpointError, match=message):
        load_state(OUT, prepared, ALONE)
    assert snapshot(prepared) == before


def test_strict_false():
    first = make(1)
    save_state(OUT, first, ALONE)
    prepared = make(2)
    another_name(prepared)
    load_state(OUT, prepared, ALONE, strict=False)
    assert torch.equal(prepared.models[1].a.bias, first.models[1].a.bias)
    another_shape(prepared)
    with pytest.raises(CheckpointError, match=r"a\.bias"):
        load_state(OUT, prepared, ALONE, strict=False)


def test_load_model_func_kwargs():
    save_state(OUT, make(1), ALONE)
    prepared = make(2)
    weight = prepared.models[0][0].weight
    load_state(OUT, prepared, ALONE, assign=True)
    assert prepared.models[0][0].weight is not weight
    before = snapshot(prepared)
    with pytest.raises(CheckpointError, match=r"Loading out failed: TypeError.*'foo'"):
        load_state(OUT, prepared, ALONE, foo=1)
    assert snapshot(prepared) == before


def test_a_custom_object_that_fails_to_load_raises():
    save_state(OUT, make(1), ALONE)
    prepared = make(2)
    prepared.custom_objects[1].load_state_dict = lambda state: 1 / 0
    with pytest.raises(
        CheckpointError,
        match=r"which is partly done, failed: the state of custom_checkpoint_1 .*Zero",
    ):
        load_state(OUT, prepared, ALONE)
