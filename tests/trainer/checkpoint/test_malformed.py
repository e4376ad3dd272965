"""Checkpoints made by somebody else: every hash is right, and what the files hold is not."""

from __future__ import annotations

import copy
import hashlib
import itertools
import json
import os
import shutil
import stat
import sys
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from callbacks import EarlyStopping, ModelCheckpoint
from trainer import Trainer, TrainModule
from trainer.big_models import load_checkpoint_in_model
from trainer.checkpoint import storage as folder_module
from trainer.checkpoint.accelerator_state import PreparedObjects, load_state, save_state
from trainer.checkpoint.serialization import load_tree
from trainer.checkpoint.shards import merge_weights
from trainer.checkpoint.storage import (
    commit,
    committed,
    is_portable,
    open_staging,
    read_manifest,
    remove,
    step_of,
    verify,
)
from trainer.cli import main
from trainer.errors import CheckpointError

ALONE = SimpleNamespace(
    is_main_process=True,
    is_local_main_process=True,
    num_processes=1,
    process_index=0,
    local_process_index=0,
)
needs_pipes = pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="os.mkfifo is needed")


class Net(TrainModule):
    def __init__(self, width: int = 2) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Linear(2, width)

    def training_step(self, batch, batch_idx):
        loss = self.net(batch[0]).square().mean()
        self.log("loss", loss, on_epoch=True)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val", self.net(batch[0]).square().mean())

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.01)


def fit(folder: Path, steps: int = 3) -> Trainer:
    trainer = Trainer(
        max_steps=steps,
        cpu=True,
        project_dir=folder,
        progress_bar=False,
        val_every=1,
        num_sanity_val_steps=0,
        seed=1,
        callbacks=[ModelCheckpoint(monitor="val", every=1, save_top_k=9), EarlyStopping("val")],
    )
    data = TensorDataset(torch.arange(16.0).reshape(8, 2))
    trainer.fit(Net(), DataLoader(data, 2), DataLoader(data, 4), ckpt_path="auto")
    return trainer


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """A run with checkpoints of its updates 1 to 3."""
    folder = tmp_path_factory.mktemp("run")
    fit(folder)
    return folder


def prepared(seed: int = 0, step: int = 0) -> PreparedObjects:
    torch.manual_seed(seed)
    model = nn.Linear(2, 1)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    return PreparedObjects(
        models=[model], optimizers=[optimizer], schedulers=[scheduler], window_open=True, step=step
    )


def changed(document: Any, at: tuple[Any, ...], value: Any) -> Any:
    if not at:
        return value
    document = copy.deepcopy(document)
    inner = document
    for key in at[:-1]:
        inner = inner[key]
    inner[at[-1]] = value
    return document


def seal(folder: Path, manifest: Any) -> None:
    """Write a manifest with the right hash."""
    if isinstance(manifest, dict):
        manifest = {key: value for key, value in manifest.items() if key != "sha256"}
        digest = hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()
        manifest["sha256"] = digest
    (folder / "manifest.json").write_text(json.dumps(manifest))


def described(file: Path) -> dict[str, Any]:
    data = file.read_bytes()
    return {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}


def write(folder: Path, name: str, document: Any) -> None:
    """Replace a file of JSON, with right hashes."""
    if name == "manifest.json":
        return seal(folder, document)
    (folder / name).write_text(json.dumps(document))
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["files"][name] = described(folder / name)
    return seal(folder, manifest)


def state_of(folder: Path) -> dict[str, Any]:
    """What would show that something was written, moved, removed or renamed."""
    found = ((path, path.lstat()) for path in sorted(folder.rglob("*")))
    return {str(p): (s.st_mode, s.st_ino, s.st_size, s.st_mtime_ns) for p, s in found}


def test_a_callback_state_with_a_foreign_path_raises(run, tmp_path):
    shutil.copytree(run, tmp_path / "copy")
    newest = committed(tmp_path / "copy" / "checkpoints")[-1]
    document = json.loads((newest / "trainer.json").read_text())
    victim = open_staging(tmp_path / "victim")
    commit(victim, tmp_path / "victim", {})  # it could be removed as a checkpoint
    at = ("tree", "callbacks", "ModelCheckpoint(val, min)", "displaced")
    write(newest, "trainer.json", changed(document, at, ["../../victim"]))
    with pytest.raises(CheckpointError, match=r"ModelCheckpoint.*cannot be restored.*victim"):
        fit(tmp_path / "copy", steps=4)
    assert verify(tmp_path / "victim") is not None


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("metrics", [1]), ("step", {}), ("step", 10**400), ("epoch", True), ("run_id", 3)),
        *(("world_size", "2"), ("hyper_parameters", []), ("files", {"model.safetensors": 4})),
    ],
)
def test_a_field_of_another_type_makes_a_checkpoint_damaged(run, tmp_path, caplog, field, value):
    shutil.copytree(run, tmp_path / "copy")
    *_, older, newest = committed(tmp_path / "copy" / "checkpoints")
    seal(newest, json.loads((newest / "manifest.json").read_text()) | {field: value})
    with pytest.raises(CheckpointError, match=r"manifest\.json"):
        read_manifest(newest)
    with pytest.raises(CheckpointError):
        Net.load_from_checkpoint(newest)
    assert main(["checkpoints", str(tmp_path / "copy")]) == 1
    trainer = fit(tmp_path / "copy", steps=3)
    assert f"{newest} is not used" in caplog.text
    assert (trainer.global_step, step_of(older)) == (3, 2)


# -- names and file types --------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["", "..", "../a", "a/../b", "/etc/a", "a//b", "a\\b", "C:a", "a\0", "\ud800"]
)
def test_file_names_outside_the_folder_raise(tmp_path, name):
    assert not is_portable(name)
    seal(tmp_path, {"format_version": 1, "files": {name: {"size": 0, "sha256": ""}}})
    with pytest.raises(CheckpointError, match="which is not a valid name of a checkpoint file"):
        read_manifest(tmp_path)


def plant(kind: str, path: Path, victim: Path) -> None:
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    else:
        path.symlink_to(victim if kind == "link" else path.with_name("nowhere"))


@needs_pipes
@pytest.mark.parametrize("kind", ["link", "dangling", "pipe", "folder"])
@pytest.mark.parametrize("name", ["manifest.json", "model.safetensors", "optimizer.json"])
def test_only_regular_files_are_read(tmp_path, kind, name):
    save_state("out", prepared(step=3), ALONE)
    (Path("out") / name).rename(tmp_path / "victim")
    plant(kind, Path("out") / name, tmp_path / "victim")
    with pytest.raises(CheckpointError, match=name.replace(".", r"\.")):
        load_state("out", prepared(), ALONE)


@needs_pipes
@pytest.mark.parametrize(
    "file", ["optimizer.bin", "model.safetensors", "pytorch_model.bin", "model.bin.index.json"]
)
def test_pipes_in_place_of_files_raise(file):
    Path("out").mkdir()
    torch.save({}, "out/scheduler.bin")  # as accelerate saves
    os.mkfifo(Path("out") / file)
    with pytest.raises(CheckpointError):
        load_state("out", prepared(), ALONE)
    with pytest.raises((CheckpointError, ValueError)):
        load_checkpoint_in_model(nn.Linear(2, 1), "out")


def test_a_link_in_place_of_a_folder_raises(tmp_path):
    staging = open_staging(tmp_path / "out")
    (staging / "sub").mkdir()
    (staging / "sub" / "a").write_text("x")
    path = commit(staging, tmp_path / "out", {})
    (path / "sub").rename(tmp_path / "elsewhere")
    (path / "sub").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(CheckpointError, match="is not a real folder"):
        verify(path)


def test_links_are_not_saved(tmp_path):
    staging = open_staging(tmp_path / "out")
    (staging / "a").symlink_to(tmp_path)
    with pytest.raises(CheckpointError, match=r"a cannot be saved.*It is a link"):
        commit(staging, tmp_path / "out", {})


@needs_pipes
@pytest.mark.parametrize("kind", ["link", "dangling", "pipe", "folder", "replaced"])
def test_checkpoints_with_other_files_are_not_removed(run, tmp_path, capsys, kind):
    shutil.copytree(run, tmp_path / "copy")
    root = tmp_path / "copy" / "checkpoints"
    first = committed(root)[0]
    if kind == "replaced":  # the user has moved a file to another disk
        (first / "model.safetensors").rename(tmp_path / "moved")
        (first / "model.safetensors").symlink_to(tmp_path / "moved")
    else:
        plant(kind, first / "mine", tmp_path)
    with pytest.raises(CheckpointError, match="holds files that are not the checkpoint's"):
        remove(first)
    with pytest.raises(SystemExit):
        sys.exit(main(["checkpoints", str(root), "--prune", "--keep-last", "1", "--yes"]))
    left = [path.name for path in root.iterdir() if path.is_dir()]
    assert sorted(left) == ["step-00000001", "step-00000003"]


def test_a_link_to_a_checkpoint_is_not_removed(run, tmp_path):
    shutil.copytree(committed(run / "checkpoints")[0], tmp_path / "elsewhere")
    link = tmp_path / "step-00000001"
    link.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(CheckpointError, match="is a link, so it is not deleted"):
        remove(link)
    assert verify(link)


# -- the staging folder of somebody else -----------------------------------------------------------


@pytest.fixture
def victim(tmp_path) -> Path:
    file = tmp_path / "victim"
    file.write_text("precious")
    return file


@pytest.mark.parametrize("name", ["../victim", "{victim}", "a/../../victim", "sub/victim"])
@pytest.mark.parametrize("where", ["staging", "old"])
def test_a_planted_staging_folder_changes_nothing_outside(tmp_path, victim, name, where):
    save_state("out", prepared(step=3), ALONE)
    (Path("out") / "notes.txt").write_text("mine")
    (Path("out") / "sub").symlink_to(tmp_path)
    staging = Path("out") / ".cadence-staging"
    staging.mkdir()
    name = name.format(victim=victim)
    seal(staging, {"format_version": 1, "files": {name: described(victim)}})
    if where == "old":  # files that a save removes
        (staging / "manifest.json").rename("out/manifest.json")
    before = state_of(tmp_path)
    if where == "staging":
        assert load_state("out", prepared(), ALONE) == 3
    else:
        with pytest.raises(CheckpointError):
            load_state("out", prepared(), ALONE)
    assert state_of(tmp_path) == before
    save_state("out", prepared(step=4), ALONE)
    assert load_state("out", prepared(), ALONE) == 4
    assert victim.read_text() == "precious"
    assert (Path("out") / "notes.txt").read_text() == "mine"


@needs_pipes
@pytest.mark.parametrize("kind", ["link", "pipe", "dangling"])
@pytest.mark.parametrize("staging", ["out/.cadence-staging", ".cadence-staging-out"])
def test_a_link_or_pipe_in_place_of_the_staging_folder(tmp_path, kind, staging):
    other = save_state("other", prepared(step=5), ALONE)
    save_state("out", prepared(step=3), ALONE)
    plant(kind, Path(staging), tmp_path / other)
    assert load_state("out", prepared(), ALONE) == 3
    with pytest.raises(CheckpointError, match=f"{staging} is not a real folder"):
        save_state("out", prepared(step=4), ALONE)
    assert load_state("out", prepared(), ALONE) == 3
    assert load_state("other", prepared(), ALONE) == 5


@pytest.mark.parametrize("renames", range(8))
@pytest.mark.parametrize("linked", [True, False])
def test_a_save_killed_at_any_rename_can_be_loaded(tmp_path, monkeypatch, renames, linked):
    Path("out").mkdir()
    (Path("out") / "notes.txt").write_text("mine")
    save_state("out", prepared(step=3), ALONE)
    left = itertools.count()
    real = os.replace

    def killed(source, goal):
        if next(left) == renames:
            raise KeyboardInterrupt
        real(source, goal)

    def refused(*_, **__):
        raise PermissionError("no hard links here")

    monkeypatch.setattr(folder_module.os, "replace", killed)
    if not linked:
        monkeypatch.setattr(folder_module.os, "link", refused)
    with suppress(KeyboardInterrupt):
        save_state("out", prepared(step=4), ALONE)
    monkeypatch.undo()
    before = state_of(tmp_path)
    assert load_state("out", prepared(), ALONE) == 4
    assert state_of(tmp_path) == before
    save_state("out", prepared(step=5), ALONE)
    assert load_state("out", prepared(), ALONE) == 5
    assert not (Path("out") / ".cadence-staging").exists()
    assert all(stat.S_ISREG(path.stat().st_mode) for path in Path("out").iterdir())


# -- trees -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "tree",
    [
        {"$": "tensor", "name": "a", "strides": [10**12]},
        {"$": "tensor", "name": "a", "strides": [0]},
        {"$": "tensor", "name": "a", "strides": ["x"]},
        {"$": "ndarray", "dtype": "O", "shape": [1], "data": {"$": "tensor", "name": "a"}},
        {"$": "scalar", "dtype": "O", "hex": "00" * 8},
        {"$": "namedtuple", "name": "x y", "fields": ["a"], "items": [1]},
        {"$": "set", "items": [[]]},
        [[]],  # nested more deeply than Python's stack
    ],
)
def test_malformed_trees_raise(tmp_path, tree):
    from safetensors.torch import save_file

    save_file({"a": torch.ones(8, dtype=torch.uint8)}, tmp_path / "t.safetensors")
    text = json.dumps({"tensors": "t.safetensors", "tree": tree})
    (tmp_path / "t.json").write_text(text.replace("[[]]", "[" * 10**5 + "]" * 10**5))
    with pytest.raises(CheckpointError, match=r"t\.json"):
        load_tree(tmp_path, "t")


@pytest.mark.parametrize(
    "index", ["[]", '{"weight_map": {"a": null}}', '{"weight_map": [1]}', "[" * 10**5]
)
def test_malformed_indexes_raise(tmp_path, index):
    (tmp_path / "model.safetensors.index.json").write_text(index)
    with pytest.raises(CheckpointError, match=r"is not an index of weights"):
        merge_weights(tmp_path, tmp_path / "merged.safetensors")
