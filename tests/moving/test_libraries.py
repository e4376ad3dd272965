"""Callbacks, data modules and models of libraries that inherit Lightning's classes."""

from __future__ import annotations

import inspect
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from trainer.lightning.pytorch.core.mixins import HyperparametersMixin
from trainer.lightning.pytorch.utilities.parsing import get_init_args

import trainer.lightning as L
from tests.helpers.terminal import without_gloo
from trainer.lightning.pytorch.callbacks import BasePredictionWriter

# Written for Lightning; nothing in it knows of us.
SWEEP = """
import json
import sys

import optuna
import torch
from optuna_integration import PyTorchLightningPruningCallback
from torch.utils.data import DataLoader

import lightning as L

X = torch.randn(32, 4, generator=torch.Generator().manual_seed(0))


class Line(L.LightningModule):
    def __init__(self, lr):
        super().__init__()
        torch.manual_seed(0)
        self.net, self.lr = torch.nn.Linear(4, 1), lr

    def training_step(self, batch, batch_idx):
        return (self.net(batch) - batch.sum(1, keepdim=True)).square().mean()

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.training_step(batch, batch_idx), sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), self.lr)


def objective(trial, lr=None):
    prune = PyTorchLightningPruningCallback(trial, monitor="val_loss")
    trainer = L.Trainer(
        max_epochs=4,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[prune],
    )
    module = Line(lr or trial.suggest_float("lr", 0, 1))
    trainer.fit(module, DataLoader(X, 8), DataLoader(X, 8))
    prune.check_pruned()
    return trainer.callback_metrics["val_loss"].item()


study = optuna.create_study(
    study_name="sweep",
    storage="sqlite:///sweep.db",
    pruner=optuna.pruners.MedianPruner(n_startup_trials=1, n_warmup_steps=1),
    load_if_exists=True,
)
if len(sys.argv) > 1:
    try:
        objective(optuna.trial.Trial(study, int(sys.argv[1])), lr=1e-5)
    except optuna.TrialPruned as pruned:
        print(pruned, flush=True)
else:
    study.enqueue_trial({"lr": 0.1})
    study.enqueue_trial({"lr": 1e-5})
    study.optimize(objective, n_trials=2)
    trials = [[t.state.name, list(t.intermediate_values.values())] for t in study.trials]
    print(json.dumps([trials, study.ask()._trial_id]))
"""
GRAPHS = """
import sys

import lightning.pytorch as pl
import torch
from torch_geometric.data import Data
from torch_geometric.data.lightning import LightningDataset, LightningNodeData

draw = torch.Generator().manual_seed(0)


def graph(nodes):
    x = torch.randn(nodes, 3, generator=draw)
    edges = torch.randint(nodes, (2, 2 * nodes), generator=draw)
    return Data(x=x, edge_index=edges, y=x.sum(1))


class Net(pl.LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net = torch.nn.Linear(3, 1)

    def training_step(self, batch, batch_idx):
        source, target = batch.edge_index
        seen = batch.x.index_add(0, target, batch.x[source])
        return (self.net(seen)[:, 0] - batch.y).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.01)


class InOrder(LightningDataset):  # the library's own shuffles
    def train_dataloader(self):
        return self.dataloader(self.train_dataset, shuffle=False, **self.kwargs)


def train(data):
    module = Net()
    trainer = pl.Trainer(
        max_epochs=3,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, datamodule=data)
    return module


def reference(batches):
    module = Net()
    optimizer = module.configure_optimizers()
    for _ in range(3):
        for batch in batches:
            module.training_step(batch, 0).backward()
            optimizer.step()
            optimizer.zero_grad()
    return module


def same(one, other):
    return all(map(torch.equal, one.parameters(), other.parameters()))


graphs, large = [graph(4 + number % 3) for number in range(12)], graph(30)
data = InOrder(graphs, batch_size=4, pin_memory=False)
assert same(train(data), reference(list(data.train_dataloader())))
large.train_mask = torch.arange(30) < 20
data = LightningNodeData(large, loader="full", input_train_nodes=large.train_mask)
assert same(train(data), reference([large]))
print(pl.__name__)
"""


def run(folder: Path, *words: str, path: str = "") -> str:
    """Run a command of Python in a folder; return what it has printed."""
    paths = [path, os.environ.get("PYTHONPATH", ""), str(Path(__file__).parents[2])]
    ended = subprocess.run(
        [sys.executable, *words],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def as_lightning(folder: Path, *words: str, processes: int = 1) -> str:
    options = ["--cpu", "--as_lightning", "--num_processes", str(processes)]
    return run(folder, "-m", "trainer", "launch", *options, *words)


def plain(lr: float, epochs: int) -> list[float]:
    """Return the validation losses of `SWEEP`, by a loop."""
    x = torch.randn(32, 4, generator=torch.Generator().manual_seed(0))
    torch.manual_seed(0)
    net, losses = nn.Linear(4, 1), []
    optimizer = torch.optim.SGD(net.parameters(), lr)
    for _ in range(epochs):
        for batch in x.split(8):
            optimizer.zero_grad()
            (net(batch) - batch.sum(1, keepdim=True)).square().mean().backward()
            optimizer.step()
        losses.append((net(x) - x.sum(1, keepdim=True)).square().mean().item())
    return losses


def test_optuna_prunes_a_program_that_stays_as_it_is(tmp_path):
    (tmp_path / "sweep.py").write_text(SWEEP)
    trials, asked = json.loads(as_lightning(tmp_path, "sweep.py"))
    assert trials[0] == ["COMPLETE", pytest.approx(plain(0.1, 4), rel=1e-5)]
    assert trials[1] == ["PRUNED", pytest.approx(plain(1e-5, 2), rel=1e-5)]
    both = as_lightning(tmp_path, "sweep.py", str(asked), processes=2)
    assert without_gloo(both).splitlines() == ["Trial was pruned at epoch 1."] * 2


def test_data_modules_of_torch_geometric_train_as_a_loop_does(tmp_path):
    entering = 'import trainer.lightning\n\ntrainer.lightning.enter_as("lightning")\n'
    (tmp_path / "graphs.py").write_text(entering + GRAPHS)
    assert run(tmp_path, "graphs.py") == "trainer.lightning.pytorch\n"


# Stands for Lightning itself, for a library, and for a program with spawned workers.
INSTALLED = 'raise AssertionError("Lightning itself was imported")'
LIBRARY = """
import lightning.pytorch as pl
from lightning_fabric.utilities.seed import seed_everything
from pytorch_lightning.callbacks.early_stopping import EarlyStopping

class Numbers(list):
    place = pl.__name__
    def __getitem__(self, index):
        return type(self).place
"""
WORKERS = """
import importlib.metadata
import importlib.util
import sys

import library
import lightning
import pytorch_lightning
import trainer.lightning
from torch.utils.data import DataLoader

if __name__ == "__main__":
    assert lightning is trainer.lightning
    assert pytorch_lightning is trainer.lightning.pytorch
    assert lightning.__spec__.name == "trainer.lightning"
    assert library.EarlyStopping is trainer.lightning.pytorch.callbacks.EarlyStopping
    for name in ("lightning", "pytorch_lightning", "lightning-fabric"):
        assert importlib.metadata.version(name) == lightning.__version__
    assert importlib.util.find_spec("lightning.nothing") is None
    try:
        import lightning.pytorch.plugins.io
    except ModuleNotFoundError as error:
        assert error.name == "lightning.pytorch.plugins"
        assert "pass precision=" in str(error)
    trainer.lightning.enter_as("lightning")  # nothing is left to do
    loader = DataLoader(library.Numbers([0]), num_workers=1, multiprocessing_context="spawn")
    print(*next(iter(loader)))
"""


def test_lightning_is_found_here_before_an_installed_one_and_in_spawned_workers(tmp_path):
    (tmp_path / "installed" / "lightning").mkdir(parents=True)
    (tmp_path / "installed" / "lightning" / "__init__.py").write_text(INSTALLED)
    for name, text in (("library", LIBRARY), ("workers", WORKERS)):
        (tmp_path / f"{name}.py").write_text(text)
    words = ("-m", "trainer", "launch", "--cpu", "--as_lightning", "workers.py")
    found = run(tmp_path, *words, path=str(tmp_path / "installed"))
    assert found == "trainer.lightning.pytorch\n"


def test_lightning_itself_cannot_be_there_when_ours_enters(tmp_path):
    (tmp_path / "pytorch_lightning.py").touch()
    program = """
import pytorch_lightning, trainer.lightning
try:
    trainer.lightning.enter_as("lightning")
except ImportError as error:
    print(error)
"""
    said = run(tmp_path, "-c", program)
    assert f"pytorch_lightning is imported already, from {tmp_path}" in said
    assert "trainer launch --as_lightning" in said
    with pytest.raises(ValueError, match="'pl'; the name must be 'lightning'"):
        L.enter_as("pl")


def test_an_object_of_lightnings_own_classes_is_refused_with_what_to_do():
    own: Any = type("Callback", (), {"__module__": "lightning.pytorch.callbacks.callback"})
    pruning = type("Pruning", (own,), {})()
    with pytest.raises(TypeError, match="trainer launch --as_lightning"):
        L.Trainer(callbacks=[pruning])


class Base(L.LightningModule):
    """As the models of pytorch-forecasting begin."""

    def __init__(self, loss: Any, **more: Any) -> None:
        super().__init__()
        given = get_init_args(inspect.currentframe())
        self.save_hyperparameters({n: v for n, v in given.items() if n not in self.hparams})
        del self._hparams["loss"], self._hparams_initial["loss"]
        self.ends = 0

    def on_epoch_end(self) -> None:
        self.ends += 1

    def on_train_epoch_end(self) -> None:
        self.on_epoch_end()


class Model(Base):
    def __init__(self, width: int, **more: Any) -> None:
        self.save_hyperparameters()
        super().__init__(**more)
        self.net = nn.Linear(width, 1)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.net(batch).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1)


class Part(nn.Module, HyperparametersMixin):
    def __init__(self, depth: int) -> None:
        super().__init__()
        self.save_hyperparameters()


def test_what_models_of_libraries_ask_of_a_module_is_there(tmp_path, caplog):
    model = Model(2, loss=nn.MSELoss(), rate=0.1)
    assert model.hparams == model.hparams_initial == {"width": 2, "rate": 0.1}
    assert Part(3).hparams.depth == 3
    assert BasePredictionWriter("epoch").interval.on_epoch
    trainer = L.Trainer(max_epochs=2, accelerator="cpu", default_root_dir=tmp_path)
    trainer.fit(model, torch.ones(4, 2).split(2))
    assert model.ends == 2  # its own code calls the hook of Lightning 1
    assert "Model defines on_epoch_end, which is never called here" in caplog.text
