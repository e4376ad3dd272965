"""The commands on checkpoints of engines whose library makes the updates."""

from __future__ import annotations

import json
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch

from callbacks import Callback, ModelCheckpoint
from tests.helpers.promises import ENGINES, EngineCase, Net, loader, trainer_and_module
from trainer import Trainer, TrainModule
from trainer.checkpoint.weights import load_weights
from trainer.cli import main


@pytest.fixture(scope="module", autouse=True)
def ranks_end_with_this_file(ranks):
    """megatron-core never frees its groups, whose threads would slow all later tests."""
    yield
    ranks(2).kill()


class Export(Callback):
    """Saves the model at the end of a fit, and keeps its whole weights."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.weights = folder, dict[str, Any]()

    def on_fit_end(self, trainer: Trainer, module: TrainModule) -> None:
        trainer.accelerator.save_model(module, self.folder, max_shard_size=2000)
        self.weights = deepcopy(dict(trainer.accelerator.get_state_dict(module)))


def train(case: EngineCase, folder: Path, steps: int) -> dict[str, Any]:
    """Train with a checkpoint of each update; return the whole weights at the end."""
    with case.around():
        export = Export(folder / "model")
        callbacks = [ModelCheckpoint(every=1, save_last=3), export]
        options: dict[str, Any] = {
            "callbacks": callbacks,
            "max_epochs": None,
            "max_steps": steps,
            "checkpointing": True,
        }
        trainer, module = trainer_and_module(case, folder, Net, **options)
        trainer.fit(module, loader(case), ckpt_path="auto")
        return export.weights


def command(capsys: Any, *words: object) -> tuple[int, Any]:
    """Run a command; return its exit code and what it printed, read as JSON."""
    code = main([*map(str, words), "--json"])
    return code, json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("engine", ["zero0", "zero1", "zero2", "zero3", "megatron"])
def test_checkpoints_are_listed_verified_pruned_and_merged(ranks2, engine, tmp_path, capsys):
    weights = ranks2(train, ENGINES[engine], tmp_path / "run", 4)[0]
    root = tmp_path / "run" / "checkpoints"
    code, listed = command(capsys, "checkpoints", tmp_path / "run", "--verify")
    steps = [f"step-{step:08}" for step in (2, 3, 4)]
    found = {each["name"]: each for each in listed["checkpoints"]}
    assert (code, sorted(found)) == (0, steps)
    for name, each in found.items():
        sizes = [file.stat().st_size for file in (root / name).iterdir()]
        assert (each["state"], each["processes"], each["size"]) == ("sound", 2, sum(sizes))

    newest = root / steps[-1]
    sources = [newest, tmp_path / "run" / "model"]
    sources += (
        [] if engine == "zero0" else [newest / "shards.json", newest / "shard-00000.safetensors"]
    )
    for number, source in enumerate(sources):
        merged = tmp_path / f"{number}.safetensors"
        code, report = command(capsys, "merge-weights", source, merged)
        assert (code, report["tensors"]) == (0, len(weights))
        torch.testing.assert_close(load_weights(merged), weights, rtol=0, atol=0)

    prune = "checkpoints", root, "--prune", "--keep-last", "1", "--yes"
    assert command(capsys, *prune)[0] == 0
    assert [path.name for path in root.glob("step-*")] == steps[-1:]
    again = ranks2(train, ENGINES[engine], tmp_path / "run", 6)[0]
    whole = ranks2(train, ENGINES[engine], tmp_path / "whole", 6)[0]
    torch.testing.assert_close(again, whole, rtol=0, atol=0)

    newest = root / "step-00000006"
    (damaged,) = newest.glob(
        "shard-00000.safetensors" if engine != "zero0" else "model.safetensors"
    )
    content = bytearray(damaged.read_bytes())
    content[-1] ^= 1
    damaged.write_bytes(content)
    code, listed = command(capsys, "checkpoints", newest, "--verify")
    assert (code, listed["checkpoints"][0]["state"]) == (1, "damaged")
    assert damaged.name in listed["checkpoints"][0]["note"]
    assert main(["merge-weights", str(newest), str(tmp_path / "no.safetensors")]) == 1
    assert f"{damaged.name} is damaged" in capsys.readouterr().err
