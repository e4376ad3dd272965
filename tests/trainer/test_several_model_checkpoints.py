"""Several ModelCheckpoints in one run: each goes on deciding as if nothing had been cut short."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from callbacks import Callback, ModelCheckpoint
from trainer import Trainer, TrainModule
from trainer.errors import Preempted


class Killed(BaseException):
    """Stands for a SIGKILL: nothing saves on it."""


class Net(TrainModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.net = torch.nn.Linear(3, 1)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return torch.dropout(self.net(batch[0]), 0.2, True).square().mean()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("score", -abs(self.trainer.global_step - 6.0))  # the best at update 6

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.05)


class Draw(Callback):
    """Draws from the generator of the training at every boundary, behind the first save.

    And when an epoch begins, or what is left of it: that must not count a second time.
    """

    runs_last = True

    def on_train_epoch_start(self, trainer: Any, module: Any) -> None:
        torch.rand(1)

    def on_boundary(self, trainer: Any, module: Any) -> None:
        torch.rand(1)


class DrawBefore(Draw):
    """Likewise before all saves, so that a resumed run must not call it at their boundary."""

    runs_last = False


class At(Callback):
    """Does something at an update; its place among the callbacks says when."""

    runs_last = True

    def __init__(self, step: int, act: Any) -> None:
        self.step, self.act = step, act

    def on_boundary(self, trainer: Any, module: Any) -> None:
        if trainer.global_step == self.step:
            self.act()


def die() -> None:
    raise Killed


def savers(**options: Any) -> tuple[ModelCheckpoint, ModelCheckpoint]:
    newest = ModelCheckpoint(every=2, dirpath="newest", background=False)
    best = ModelCheckpoint(
        monitor="score", mode="max", every=2, dirpath="best", **{"background": False} | options
    )
    return newest, best


def loader(batches: int) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(1)
    data = TensorDataset(torch.randn(4 * batches, 3, generator=generator))
    return DataLoader(data, batch_size=4, shuffle=True)


def fit(*callbacks: Callback, ckpt_path: str | None = None) -> None:
    trainer = Trainer(
        max_epochs=2,
        val_every=2,
        seed=3,
        progress_bar=False,
        project_dir="run",
        callbacks=list(callbacks),
        cpu=True,
    )
    trainer.fit(Net(), loader(5), loader(1), ckpt_path=ckpt_path)


def outcome(newest: ModelCheckpoint, best: ModelCheckpoint) -> Any:
    """The decisions, and the files of all checkpoints but for what the clock is in."""
    files = {
        file.as_posix(): file.read_bytes()
        for folder in ("newest", "best")
        for file in Path(folder).rglob("*")
        if file.suffix == ".safetensors" or file.name.startswith("rank-")
    }
    here = Path.cwd()
    ranked = [
        {path.relative_to(here): score for path, score in saver.best_k_models.items()}
        for saver in (newest, best)
    ]
    return ranked, files


@pytest.mark.parametrize("step", [2, 6, 8, 10])
@pytest.mark.parametrize("place", ["between the saves", "behind both"])
def test_a_kill_at_a_boundary_costs_no_saver_its_decision(step, place, tmp_path, monkeypatch):
    for name in ("whole", "killed"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / "whole")
    newest, best = savers()
    fit(DrawBefore(), newest, Draw(), best)
    whole = outcome(newest, best)
    assert list(best.best_k_models.values()) == [0.0]

    monkeypatch.chdir(tmp_path / "killed")
    newest, best = savers()
    kill = At(step, die)
    last = [kill, best] if place == "between the saves" else [best, kill]
    with pytest.raises(Killed):
        fit(DrawBefore(), newest, Draw(), *last)
    newest, best = savers()
    fit(DrawBefore(), newest, Draw(), best, ckpt_path="auto")
    assert outcome(newest, best) == whole


def test_checkpoints_saved_on_a_signal_are_removed_later(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    newest, best = savers()
    with pytest.raises(Preempted):
        fit(newest, best, At(4, lambda: os.kill(os.getpid(), signal.SIGTERM)))
    assert Path("newest/step-00000005").is_dir()
    assert Path("best/step-00000005").is_dir()
    newest, best = savers()
    fit(newest, best, ckpt_path="auto")
    assert sorted(path.name for path in Path("best").glob("step-*")) == [
        "step-00000006",
        "step-00000010",
    ]


@pytest.mark.parametrize("first", ["the one that fails", "the other"])
def test_a_save_that_fails_is_not_taken_for_that_of_another(first, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    newest, best = savers(background=True, on_save_error="warn")

    def spoil() -> None:
        assert best.directory is not None
        best.directory = Path("occupied/best")  # no folder can be made there

    Path("occupied").touch()
    order = [best, newest] if first == "the one that fails" else [newest, best]
    fit(At(4, spoil), *order)
    assert [path.name for path in newest.best_k_models] == ["step-00000010"]
    assert [path.name for path in Path("newest").glob("step-*")] == ["step-00000010"]
    assert [path.name for path in best.best_k_models] == ["step-00000002"]
    assert [path.name for path in Path("best").glob("step-*")] == ["step-00000002"]
