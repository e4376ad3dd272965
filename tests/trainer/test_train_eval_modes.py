"""The train and eval mode that the user gave to a part is kept through a fit."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from callbacks import Callback
from tests.numerics.running import quiet_trainer
from trainer import TrainModule


class Frozen(TrainModule):
    """A backbone in eval mode, as somebody left it that trains only the head."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.BatchNorm1d(1), nn.Sequential(nn.Dropout(0.5)))
        self.head = nn.Linear(1, 1)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.head(self.backbone(batch)).square().mean()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        assert not any(part.training for part in self.modules())

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.head.parameters(), lr=0.1)


class Modes(Callback):
    def __init__(self) -> None:
        self.seen: list[dict[str, bool]] = []

    def look(self, trainer: Any, module: Any, *_: Any) -> None:
        self.seen.append({name: part.training for name, part in module.named_modules()})

    on_train_start = on_train_batch_start = on_boundary = on_train_end = look


@pytest.mark.parametrize("sanity", [0, 1])
@pytest.mark.parametrize("when", ["before", "setup", "on_fit_start"])
def test_a_part_in_eval_mode_stays_there(when, sanity):
    class Late(Frozen):
        pass

    def freeze(module: Any, *_: Any) -> None:
        module.backbone.eval()

    modes = Modes()
    if when != "before":
        setattr(Late, when, freeze)
    module = Late()
    if when == "before":
        freeze(module)
    mean = module.backbone[0].running_mean.clone()
    trainer = quiet_trainer(max_epochs=2, val_every=2, callbacks=modes, num_sanity_val_steps=sanity)
    trainer.fit(
        module,
        DataLoader(torch.ones(6, 1), batch_size=2),
        DataLoader(torch.ones(2, 1), batch_size=2),
    )
    expected = {name: not name.startswith("backbone") for name, _ in module.named_modules()}
    assert len(modes.seen) == 2 + 2 * 6
    assert modes.seen == [expected] * len(modes.seen)
    assert torch.equal(module.backbone[0].running_mean, mean)


def test_a_module_in_eval_mode_as_a_whole_is_trained():
    module, modes = Frozen(), Modes()
    module.eval()
    quiet_trainer(max_steps=1, callbacks=modes).fit(
        module, DataLoader(torch.ones(2, 1), batch_size=2)
    )
    assert all(modes.seen[0].values())


class Together(Callback):
    """Two runs go on when both have begun."""

    def __init__(self) -> None:
        self.begun = threading.Barrier(2, timeout=60)

    def on_train_start(self, trainer: Any, module: Any) -> None:
        self.begun.wait()


def fit_in_threads(folder: Path, callbacks: Callback | None) -> None:
    def fit(name: str) -> None:
        quiet_trainer(max_steps=1, project_dir=folder / name, callbacks=callbacks).fit(
            Frozen(), DataLoader(torch.ones(2, 1), batch_size=2)
        )

    with ThreadPoolExecutor(2 if callbacks else 1) as pool:
        list(pool.map(fit, ["one", "other"]))


def test_two_threads_that_run_a_trainer_at_the_same_time_are_warned(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    fit_in_threads(tmp_path / "after", None)
    assert "Another thread" not in caplog.text
    fit_in_threads(tmp_path / "beside", Together())
    assert "Another thread of this process runs a Trainer too" in caplog.text
