"""Folders that accelerate wrote; `fixtures/README.md` says how."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

from trainer.big_models import load_checkpoint_in_model
from trainer.checkpoint.accelerator_state import PreparedObjects, load_state, save_state
from trainer.checkpoint.accelerator_state import load_state as load_project
from trainer.configuration import ProjectConfiguration
from trainer.errors import CheckpointError

FIXTURES = Path(__file__).parent / "fixtures"
ONE, TWO = FIXTURES / "accelerate-0.31.0", FIXTURES / "accelerate-1.15.0"


class Counter:
    def __init__(self):
        self.count, self.mean = 0, torch.zeros(2)

    def state_dict(self):
        return {"count": self.count, "mean": self.mean}

    def load_state_dict(self, state):
        self.count, self.mean = state["count"], state["mean"]


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(2, 2)
        self.second = nn.Linear(2, 2)
        self.second.weight = self.first.weight


def make() -> PreparedObjects:
    models = [nn.Linear(2, 1), Tied()]
    optimizer = torch.optim.AdamW([p for model in models for p in model.parameters()])
    return PreparedObjects(
        models=models,
        optimizers=[optimizer],
        schedulers=[torch.optim.lr_scheduler.StepLR(optimizer, 7)],
        custom_objects=[Counter()],
        scaler=torch.amp.GradScaler("cpu"),
    )


def processes(rank: int, size: int) -> SimpleNamespace:
    return SimpleNamespace(
        is_main_process=True,  # each alone here
        is_local_main_process=True,
        num_processes=1,
        process_index=rank,
        local_process_index=0,
    )


@pytest.fixture
def copy(tmp_path) -> Path:
    return Path(shutil.copytree(TWO, tmp_path / "copy"))


@pytest.mark.parametrize(("folder", "rank", "step"), [(ONE, 0, 0), (TWO, 0, 6), (TWO, 1, 6)])
def test_load_state_of_accelerate(folder, rank, step):
    expected = json.loads((folder / f"expected_{rank}.json").read_text())
    prepared = make()
    before = sorted(os.listdir(folder))
    assert load_state(folder, prepared, processes(rank, 2)) == step
    assert [random.random(), numpy.random.rand(), torch.rand(1).item()] == expected["after"]
    first, second = prepared.models
    weights = {
        **{f"first.{k}": v.tolist() for k, v in first.state_dict().items()},
        **{f"second.{k}": v.tolist() for k, v in second.state_dict().items()},
    }
    assert weights == expected["weights"]
    assert second.first.weight is second.second.weight
    [optimizer], [scheduler], [counter] = (
        prepared.optimizers,
        prepared.schedulers,
        prepared.custom_objects,
    )
    assert scheduler.get_last_lr() == expected["lr"]
    assert (scheduler.step_size, scheduler.gamma) == (2, 0.5)
    assert optimizer.param_groups[0]["lr"] == expected["lr"][0]
    states = [optimizer.state[p] for p in optimizer.param_groups[0]["params"]]
    assert [state["step"].item() for state in states] == [
        6.0 if step == 0 else states[0]["step"].item()
    ] * 5
    assert all(state["exp_avg_sq"].sum() > 0 for state in states)
    assert counter.count == 3
    assert counter.mean.tolist() == [0.5, 0.25]
    assert prepared.scaler.get_scale() == 1024.0
    assert sorted(os.listdir(folder)) == before


def test_a_further_process_starts_with_derived_random_states(caplog):
    load_state(TWO, make(), processes(2, 3))
    assert "rank 2 starts with random states derived" in caplog.text


def test_load_weights_of_accelerate():
    for folder, name in ((ONE, "pytorch_model.bin"), (TWO, "model.safetensors")):
        model = nn.Linear(2, 1)
        load_checkpoint_in_model(model, folder, strict=True)
        expected = json.loads((folder / "expected_0.json").read_text())["weights"]
        assert model.weight.tolist() == expected["first.weight"]
        assert (folder / name).exists()


def test_save_state_into_a_folder_of_accelerate(copy):
    prepared = make()
    load_state(copy, prepared, processes(0, 1))
    prepared.step = 9
    save_state(copy, prepared, processes(0, 1))
    assert (copy / "optimizer.bin").exists()
    assert load_state(copy, make(), processes(0, 1)) == 9


def test_automatic_naming_with_folders_of_accelerate(copy):
    root = copy.parent / "checkpoints"
    root.mkdir()
    os.rename(copy, root / "checkpoint_4")
    project = ProjectConfiguration(project_dir=root.parent, automatic_checkpoint_naming=True)
    assert load_project(None, make(), processes(0, 1), project) == 6
    assert project.iteration == 5


@pytest.mark.parametrize(
    "name",
    ["optimizer.bin", "scaler.pt", "random_states_0.pkl", "custom_checkpoint_0.pkl"],
)
def test_a_pickle_with_code_raises(copy, name):
    class Bomb:
        def __reduce__(self):
            return os.mkdir, ("exploded",)

    torch.save({"state": Bomb()}, copy / name)
    with pytest.raises(CheckpointError, match=rf"{name} is not read: .*run any code"):
        load_state(copy, make(), processes(0, 1))
    assert not Path("exploded").exists()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("optimizer.bin", "holds the state of 0 optimizers, but 1"),
        ("model.safetensors", "holds the state of 0 models, but 2"),
        ("custom_checkpoint_0.pkl", "holds the state of 0 custom objects, but 1"),
        ("scaler.pt", "no state of a gradient scaler"),
        ("random_states_0.pkl", r"random_states_0\.pkl is missing"),
    ],
)
def test_a_missing_file_raises(copy, name, message):
    (copy / name).unlink()
    with pytest.raises(CheckpointError, match=message):
        load_state(copy, make(), processes(0, 1))


def test_without_random_states(copy):
    for rank in (0, 1):
        (copy / f"random_states_{rank}.pkl").unlink()
    with pytest.raises(CheckpointError, match=r"holds no random states.*strict=False"):
        load_state(copy, make(), processes(0, 1))
    state = torch.get_rng_state()
    prepared = make()
    torch.set_rng_state(state)
    assert load_state(copy, prepared, processes(0, 1), strict=False) == 0
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("name", ["sampler.bin", "sampler_1.bin", "dl_state_dict.bin"])
def test_sampler_and_loader_states_warn(copy, name, caplog):
    torch.save({"x": 1}, copy / name)
    load_state(copy, make(), processes(0, 1))
    assert f"{name} holds the state of a sampler or loader, which cannot be loaded" in caplog.text
    assert "skip_first_batches" in caplog.text


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # as asked
def test_fsdp_shards_raise_with_the_command_to_convert_them(copy):
    model = torch.nn.Linear(3, 2)
    folder = copy / "pytorch_model_fsdp_0"
    dcp.save({"model": model.state_dict()}, checkpoint_id=folder, no_dist=True)  # accelerate's form
    with pytest.raises(CheckpointError, match=r"is a pickle.*load them before prepare") as caught:
        load_state(copy, make(), processes(0, 1))
    command = re.search(r"(python -m .* weights\.bin)", str(caught.value))[1].split()
    subprocess.run([sys.executable, *command[1:]], check=True, capture_output=True)
    other = torch.nn.Linear(3, 2)
    load_checkpoint_in_model(other, "weights.bin")
    assert torch.equal(other.weight, model.weight)
    assert torch.equal(other.bias, model.bias)
