"""An update makes the collectives of a loop by hand and no other: agreement rides along."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile
from torch.utils.data import DataLoader, TensorDataset

from callbacks import EMA, Callback, EarlyStopping, ModelCheckpoint, Monitor, Timer
from tests.helpers.reducing import reducing
from trainer import Trainer, TrainModule

FIRST, LAST = 5, 15  # updates that are looked at


class Look:
    """Counts the collectives of a stretch, those that torch calls in backward too."""

    def __init__(self) -> None:
        self.found: Counter[str] = Counter()
        self._profile = profile(activities=[ProfilerActivity.CPU])

    def boundary(self, step: int) -> None:
        if step == FIRST:
            self._profile.start()
        elif step == LAST:
            self._profile.stop()
            names = (event.name for event in self._profile.events())
            self.found = Counter(name for name in names if name.startswith("c10d::"))


class Looking(Callback):
    def __init__(self) -> None:
        self.look = Look()

    def on_boundary(self, trainer: Trainer, module: TrainModule) -> None:
        self.look.boundary(trainer.global_step)


class Net(TrainModule):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, width), nn.ReLU(), nn.Linear(width, 2))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x, y = batch
        loss = nn.functional.cross_entropy(self.net(x), y)
        self.log("loss", loss, prog_bar=True, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", self.net(batch[0]).sum())

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        return optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 5)


def data() -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.ones(80, 4), torch.ones(80).long()), 2)


class Judge(Callback):
    """Judges a metric of steps once within the stretch; one process reads what there is."""

    monitor = "loss_step"
    metric = Monitor(monitor, "min")

    def monitor_due(self, trainer: Trainer) -> bool:
        return trainer.global_step in (3, 10)  # the names are exchanged the first time

    def on_boundary(self, trainer: Trainer, module: TrainModule) -> None:
        assert not self.monitor_due(trainer) or self.metric.read(trainer) is not None

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        if trainer.accelerator.is_main_process:
            assert {"loss_step", "loss_epoch"} <= trainer.callback_metrics.keys()


def by_trainer(width: int, folder: Path, *callbacks: Callback) -> Counter[str]:
    looking = Looking()
    trainer = Trainer(
        max_epochs=1,
        cpu=True,
        project_dir=folder,
        max_grad_norm=1.0,
        max_time="1 hour",
        log_every=1000,
        callbacks=[
            EMA(),
            EarlyStopping("val"),
            ModelCheckpoint(monitor="val"),
            Timer("1 hour"),
            *callbacks,
            looking,
        ],
    )
    trainer.fit(Net(width), data(), data())
    return looking.look.found


def by_hand(width: int) -> Counter[str]:
    look, module = Look(), Net(width).net
    model = DistributedDataParallel(module)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step, (x, y) in enumerate(data()):
        look.boundary(step)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    return look.found


@pytest.mark.parametrize("width", [8, 200_000])  # of one bucket, and of two
def test_an_update_makes_only_the_collectives_of_ddp(ranks2, tmp_path, width):
    expected = ranks2(by_hand, width)
    (buckets,) = {found["c10d::allreduce_"] / (LAST - FIRST) for found in expected}
    assert buckets == (1 if width == 8 else 2)
    assert reducing(ranks2)(by_trainer, width, tmp_path / "reduced") == expected


def test_an_update_of_a_small_model_makes_one_all_to_all(ranks2, tmp_path):
    found = ranks2(by_trainer, 8, tmp_path)
    assert found == [Counter({"c10d::alltoall_base_": LAST - FIRST})] * 2


def test_reading_a_monitored_metric_adds_one_collective(ranks2, tmp_path):
    found = ranks2(by_trainer, 8, tmp_path, Judge())
    assert [each.total() for each in found] == [LAST - FIRST + 1] * 2
