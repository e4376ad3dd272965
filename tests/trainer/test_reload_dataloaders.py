"""Loaders that are asked for again every few epochs."""

from __future__ import annotations

import multiprocessing
import random
import shutil
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset, random_split

from callbacks import Callback, ModelCheckpoint
from tests.numerics.running import assert_same, copy_of, on_processes, quiet_trainer
from trackers import read_metrics
from trainer import DataModule, TrainModule

CALLS = [(0, 0), (2, 6), (4, 14)]  # the epochs and the updates at which a new loader is asked for


class Net(TrainModule):
    """Its data are others every other epoch: drawn, shuffled, and more of them."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.calls: list[tuple[int, int]] = []
        self.seen: list[list[float]] = []
        self.validated: list[list[float]] = []
        self.draws: list[Any] = []

    def samples(self) -> Any:
        return torch.arange(12.0 + 2 * self.trainer.current_epoch).reshape(-1, 1)

    def train_dataloader(self) -> Any:
        self.calls.append((self.trainer.current_epoch, self.trainer.global_step))
        kept, _ = random_split(TensorDataset(self.samples()), [0.5, 0.5])
        # both generators: a resumed run must draw what the uninterrupted one drew
        data = [
            (kept[number][0] + random.random() + float(numpy.random.rand()),)
            for number in range(len(kept))
        ]
        return DataLoader(data, batch_size=2, shuffle=True)

    def val_dataloader(self) -> Any:
        return DataLoader(TensorDataset(self.samples()[:: self.trainer.current_epoch + 1]))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.seen.append(batch[0].flatten().tolist())
        self.draws.append((torch.rand(()).item(), random.random(), numpy.random.rand()))
        return torch.dropout(self.layer(batch[0]), 0.5, True).square().mean()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.validated.append(batch[0].flatten().tolist())
        self.log("val", self.layer(batch[0]).mean())

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


def reload_fit(folder: str, begin: int = 0, seed: int | None = None) -> dict[str, Any]:
    """Train six epochs, or go on with them, in a process that begins with any generators."""
    for begin_with in (random.seed, numpy.random.seed, torch.manual_seed):
        begin_with(begin)
    module = Net()
    trainer = quiet_trainer(
        project_dir=folder,
        callbacks=ModelCheckpoint(every=1, save_top_k=-1),
        reload_dataloaders_every_n_epochs=2,
        max_epochs=6,
        seed=seed,
    )
    trainer.fit(module, ckpt_path="auto")
    return {
        "calls": module.calls,
        "seen": module.seen,
        "validated": module.validated,
        "draws": module.draws,
        "weights": copy_of(module),
        "step": trainer.global_step,
        "records": [
            {key: value for key, value in record.items() if key != "time"}
            for record in read_metrics(trainer.metrics_path)
        ],
    }


def test_the_hooks_are_called_again_every_n_epochs():
    run = reload_fit("run")
    assert run["calls"] == CALLS
    assert run["step"] == len(run["seen"]) == 3 + 3 + 4 + 4 + 5 + 5
    epochs = [[x for batch in run["seen"][i : i + 3] for x in batch] for i in (0, 3)]
    assert sorted(epochs[0]) == sorted(epochs[1]) != epochs[0] != epochs[1]
    # every sample, every third and every fifth, twice each
    assert len(run["validated"]) == 12 + 12 + 6 + 6 + 4 + 4


def after(whole: Path, folder: Path, step: int) -> str:
    """A copy of a run that was killed after the checkpoint of this update."""
    shutil.copytree(whole, folder)
    for path in (folder / "checkpoints").glob("step-*"):
        if int(path.name.removeprefix("step-")) > step:
            shutil.rmtree(path)
    return str(folder)


@pytest.mark.parametrize("seed", [None, 5])
@pytest.mark.parametrize("world", [1, 2])
def test_resumed_run_with_reloaded_loaders_equals_the_uninterrupted_one(
    ranks, tmp_path, world, seed
):
    """Before, at, and after the end of an epoch that brings other loaders."""
    whole = on_processes(ranks, world, reload_fit, str(tmp_path / "whole"), 1, seed)
    for step in range(2 if seed else 1, whole[0]["step"], 4 if world == 1 else 6):
        folder = after(tmp_path / "whole", tmp_path / f"from-{step}", step)
        resumed = on_processes(ranks, world, reload_fit, folder, 99, seed)
        assert resumed[0]["seen"]
        for one, other in zip(whole, resumed, strict=True):
            assert_same(other["weights"], one["weights"])
            for name in ("seen", "draws", "validated"):
                before = len(one[name]) - len(other[name])
                assert other[name] == one[name][before:], name
            made = max(call for call in one["calls"] if call[1] < step or call == (0, 0))
            assert other["calls"] == one["calls"][one["calls"].index(made) :]
            assert other["records"] == one["records"]


def test_resume_recreates_the_current_loader(tmp_path):
    """Neither with the epoch at hand nor with that of another n."""
    reload_fit("whole")
    inside = after(Path("whole"), Path("inside"), 9)  # in epoch 2: its loader is from update 6
    assert reload_fit(inside)["calls"][0] == (2, 6)
    end = after(Path("whole"), Path("end"), 14)  # the end of epoch 3
    module = Net()
    trainer = quiet_trainer(project_dir=end, max_epochs=6, reload_dataloaders_every_n_epochs=5)
    trainer.fit(module, ckpt_path="auto")
    assert module.calls == [(2, 6), (5, 18)]


def test_loader_hooks_are_called_once_by_default():
    module = Net()
    quiet_trainer(max_epochs=3).fit(module)
    assert module.calls == [(0, 0)]
    trainer = quiet_trainer(max_epochs=1, project_dir="other")
    trainer.fit(module)
    trainer.fit(module)  # not as the run before has left the counters
    assert module.calls == [(0, 0)] * 3


def test_a_datamodule_is_asked_with_its_trainer_and_the_limits_hold():
    class Data(DataModule):
        epochs: list[int] = []

        def train_dataloader(self) -> Any:
            self.epochs.append(self.trainer.current_epoch)
            return DataLoader(torch.zeros(4 * (1 + len(self.epochs)), 1, 1))

    class Counts(Callback):
        batches: list[Any] = []

        def on_train_epoch_start(self, trainer: Any, module: Any) -> None:
            known = trainer.num_training_batches, trainer.estimated_stepping_batches
            self.batches.append(known)

    class Plain(Net):
        train_dataloader = val_dataloader = TrainModule.train_dataloader

    trainer = quiet_trainer(
        max_epochs=3,
        reload_dataloaders_every_n_epochs=1,
        limit_train_batches=0.5,
        callbacks=Counts(),
    )
    trainer.fit(Plain(), datamodule=Data())
    assert Data.epochs == [0, 1, 2]
    assert Counts.batches == [(4, 12), (6, 18), (8, 24)]
    assert trainer.global_step == 4 + 6 + 8


@pytest.mark.parametrize("argument", ["train_dataloaders", "val_dataloaders"])
def test_passed_loaders_cannot_be_reloaded(argument):
    hook = argument[:-1]
    fix = rf"n_epochs is 2, but fit got {argument}.*Define {hook} .* at 0"
    with pytest.raises(ValueError, match=fix):
        quiet_trainer(max_epochs=1, reload_dataloaders_every_n_epochs=2).fit(
            Net(), **{argument: DataLoader(torch.zeros(2, 1))}
        )


@pytest.mark.parametrize(
    ("value", "error"), [(-1, ValueError), (True, TypeError), (1.5, ValueError)]
)
def test_invalid_reload_interval_raises(value, error):
    with pytest.raises(error, match=rf"reload_dataloaders_every_n_epochs is {value}; "):
        quiet_trainer(reload_dataloaders_every_n_epochs=value)


class Later(Net):
    """Its second loaders are not like the first."""

    def __init__(self, later: Any = None, val: Any = None, rank: int | None = None) -> None:
        super().__init__()
        self.later, self.val, self.rank = later, val, rank

    def train_dataloader(self) -> Any:
        first = self.trainer.current_epoch == 0
        if not first and self.rank == self.trainer.global_rank:
            raise ZeroDivisionError("no disk")
        return super().train_dataloader() if first or self.later is None else self.later

    def val_dataloader(self) -> Any:
        first = self.trainer.current_epoch == 0
        return super().val_dataloader() if first or self.val is None else self.val()


class Endless(IterableDataset[Any]):
    def __iter__(self) -> Any:
        yield torch.zeros(1)


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (lambda: Later([]), "train_dataloader of Later returned no loader"),
        (lambda: Later(DataLoader([])), "train loader is empty"),
        (lambda: Later(DataLoader(Endless())), r"val_every is 0\.5 epochs.*with a length"),
        (lambda: Later(val=lambda: None), "val_dataloader returned nothing in epoch 2"),
        (lambda: Later(val=list), "val_dataloader returned nothing in epoch 2"),
        (lambda: Later(val=lambda: DataLoader([])), "validate loader is empty"),
    ],
)
def test_loaders_that_cannot_be_used_are_refused_in_every_epoch(module, message):
    trainer = quiet_trainer(
        max_epochs=3, reload_dataloaders_every_n_epochs=1, val_every="0.5 epochs"
    )
    with pytest.raises(ValueError, match=message):
        trainer.fit(module())
    assert trainer.global_step == 3


class NoDisk(Net):
    def train_dataloader(self) -> Any:
        if self.trainer.global_rank == 1:
            raise ZeroDivisionError("no disk")
        return super().train_dataloader()

    test_step, test_dataloader = Net.validation_step, train_dataloader


@pytest.mark.parametrize(
    ("entry", "make"), [("fit", NoDisk), ("test", NoDisk), ("fit", lambda: Later(rank=1))]
)
def test_loader_hook_failing_on_one_rank_fails_on_all(ranks2, entry, make):
    def failing() -> str:
        trainer = quiet_trainer(max_epochs=3, reload_dataloaders_every_n_epochs=1)
        try:
            getattr(trainer, entry)(make())
        except (ZeroDivisionError, RuntimeError) as error:
            return f"{type(error).__name__}: {error}"
        return "nothing"

    other, failed = ranks2(failing, timeout=30)
    assert failed == "ZeroDivisionError: no disk"
    assert "Rank 1 failed" in other
    assert "no disk" in other


def test_the_workers_of_the_old_loader_end():
    alive: list[int] = []

    class Workers(Net):
        val_dataloader = TrainModule.val_dataloader

        def train_dataloader(self) -> Any:
            alive.append(len(multiprocessing.active_children()))
            data = TensorDataset(self.samples())
            return DataLoader(data, batch_size=4, num_workers=1, persistent_workers=True)

    class Working(Callback):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            assert len(multiprocessing.active_children()) == 1

    trainer = quiet_trainer(max_epochs=3, reload_dataloaders_every_n_epochs=1, callbacks=Working())
    trainer.fit(Workers())
    assert alive == [0, 0, 0]
    assert multiprocessing.active_children() == []
