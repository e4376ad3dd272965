"""A run that goes on with another length, or with other intervals, is the run that had them."""

from __future__ import annotations

import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import dropout, mse_loss
from torch.utils.data import DataLoader, Dataset, TensorDataset

from callbacks import Callback, EarlyStopping, GradientAccumulationScheduler, ModelCheckpoint
from tests.numerics.running import assert_same, copy_of, on_processes, quiet_trainer
from trackers import read_metrics
from trainer import TrainModule

EPOCH = 6  # batches


class Net(TrainModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(3, 1)
        self.seen: list[list[float]] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        self.seen.append(y.flatten().tolist())
        loss = mse_loss(self.layer(dropout(x, 0.3)), y)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", mse_loss(self.layer(batch[0]), batch[1]))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        return {"optimizer": optimizer, "scheduler": schedule, "interval": "step"}


class When(Callback):
    """At which updates a validation ended; with the run, since a checkpoint holds them."""

    def __init__(self) -> None:
        self.at: list[int] = []

    def on_validation_end(self, trainer: Any, module: Any) -> None:
        self.at.append(trainer.global_step)

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = list(state["at"])


def trained(folder: str, **options: Any) -> dict[str, Any]:
    """A fit that goes on with what is in the folder."""
    generator = torch.Generator().manual_seed(1)
    data = TensorDataset(*(torch.randn(2 * EPOCH, n, generator=generator) for n in (3, 1)))
    module, when = Net(), When()
    saves = ModelCheckpoint(
        monitor="val", every=options.pop("every", "1 epoch"), save_top_k=2, save_last=2
    )
    more = options.pop("more", [])
    trainer = quiet_trainer(seed=4, project_dir=folder, callbacks=[when, saves, *more], **options)
    trainer.fit(
        module,
        DataLoader(data, batch_size=2, shuffle=True),
        DataLoader(data, batch_size=4),
        ckpt_path="auto",
    )
    records = read_metrics(trainer.metrics_path)
    return {
        "weights": copy_of(module),
        "seen": module.seen,
        "place": (trainer.global_step, trainer.current_epoch, trainer.samples_seen),
        "validated": when.at,
        "logged": [record["step"] for record in records if "loss" in record],
        "on disk": sorted(path.name for path in (Path(folder) / "checkpoints").iterdir()),
        "ranked": [path.name for path in saves.best_k_models],
    }


def in_two(folder: str, first: dict[str, Any], then: dict[str, Any]) -> list[dict[str, Any]]:
    """Each part of a run that is interrupted where its first length ends."""
    return [trained(folder, **options) for options in (first, then)]


# What the run began with, with what it goes on, and the updates that it has in the end.
LONGER = {
    "epochs": ({"max_epochs": 2}, {"max_epochs": 4}, 24),
    "steps": ({"max_steps": 8}, {"max_steps": 15}, 15),
    "epochs, then steps": ({"max_epochs": 2}, {"max_steps": 15}, 15),
    "steps, then epochs": ({"max_steps": 8}, {"max_epochs": 4}, 24),
    "steps and epochs": ({"max_epochs": 9, "max_steps": 8}, {"max_epochs": 3, "max_steps": 99}, 18),
    "a minimum": ({"max_epochs": 2}, {"max_epochs": 4, "min_steps": 20, "min_epochs": 4}, 24),
}


@pytest.mark.parametrize(
    ("world", "change"),
    [*((1, change) for change in LONGER), (2, "epochs"), (2, "steps, then epochs")],
)
def test_a_lengthened_run_equals_one_of_that_length(ranks, tmp_path, world, change):
    first, then, updates = LONGER[change]
    whole = on_processes(ranks, world, lambda: trained(str(tmp_path / "whole"), **then))
    parts = on_processes(ranks, world, in_two, str(tmp_path / "parts"), first, then)
    for one, (before, after) in zip(whole, parts, strict=True):
        assert before["place"][0] < one["place"][0]
        assert world > 1 or one["place"][0] == updates
        assert_same(after["weights"], one["weights"])
        assert before["seen"] + after["seen"] == one["seen"]
        for name in ("place", "validated", "logged", "ranked"):
            assert after[name] == one[name], name


@pytest.mark.parametrize(
    "shorter",
    [{"max_epochs": 1}, {"max_steps": 5}, {"max_epochs": 2}, {"max_steps": 12}, {"max_epochs": 0}],
)
def test_a_shortened_run_ends_at_once_with_a_message(capsys, shorter):
    before, after = in_two("run", {"max_epochs": 2}, shorter)
    assert after["seen"] == []
    said = capsys.readouterr().out
    [limit] = shorter
    assert f"(epoch 2, update 12).\nNothing is left to do: the Trainer's {limit} is reached" in said
    assert_same(after["weights"], before["weights"])
    for name in before.keys() - {"seen", "weights"}:
        assert after[name] == before[name], name


def test_a_stopped_run_goes_on_to_a_raised_minimum(capsys):
    """The run had decided to stop; with a minimum above it goes on to that."""
    stop = {"max_epochs": 9, "more": [EarlyStopping("val", stopping_threshold=1e9)]}
    assert trained("run", **stop)["place"][0] == EPOCH
    assert trained("run", **stop)["place"][0] == EPOCH
    assert "Nothing is left to do: the run stopped there." in capsys.readouterr().out
    stop["more"] = [EarlyStopping("val", stopping_threshold=1e9)]
    assert trained("run", **stop, min_epochs=3)["place"][0] == 3 * EPOCH
    assert "Nothing is left to do" not in capsys.readouterr().out
    whole = trained("whole", **(stop | {"more": []}), max_steps=3 * EPOCH)
    assert_same(trained("run", **(stop | {"more": []}), max_steps=1)["weights"], whole["weights"])


# Intervals before and after update 8, and when validations or records then are made.
OTHER = {
    "shorter": (4, 3, [4, 8, 9, 12, 15, 18]),
    "longer": (2, 5, [2, 4, 6, 8, 10, 15]),
    "steps to epochs": (3, "1 epoch", [3, 6, 12, 18]),
    "epochs to steps": ("0.5 epochs", 4, [3, 6, 12, 16]),
    "steps to items": (4, "10 items", [4, 8, 10, 15]),
    "clock to steps": ("1 hour", 4, [12, 16]),  # not at once for those that nobody asked about
    "longer than the run": (3, 99, [3, 6]),
}


@pytest.mark.parametrize("change", OTHER)
def test_validations_and_records_follow_the_changed_interval(change):
    before, after, expected = OTHER[change]
    plain = trained("plain", max_steps=18)
    first = {"max_steps": 8, "val_every": before, "log_every": before}
    _, run = in_two("run", first, {"max_steps": 18, "val_every": after, "log_every": after})
    assert run["validated"] == expected
    assert run["logged"] == sorted({*expected, 6, 12, 18})  # the last of each epoch is recorded too
    assert_same(run["weights"], plain["weights"])  # however often it is validated


@pytest.mark.parametrize(
    ("before", "after"), [("1 epoch", "2 epochs"), ("2 epochs", "1 epoch"), (6, "1 epoch")]
)
def test_checkpoints_after_a_changed_interval(before, after):
    """The best are still ranked, and what is not wanted any more is removed."""
    parts = in_two("run", {"max_epochs": 2, "every": before}, {"max_epochs": 6, "every": after})
    run = parts[1]
    size = 1 if after == "1 epoch" else 2
    saved = set(parts[0]["on disk"])
    saved |= {f"step-{EPOCH * epoch:08d}" for epoch in range(3, 7) if epoch % size == 0}
    whole = trained("whole", max_epochs=6, every="1 epoch")
    assert_same(run["weights"], whole["weights"])
    assert set(run["on disk"]) <= saved
    assert len(run["ranked"]) == 2
    assert set(run["ranked"]) < set(run["on disk"])
    newest = sorted(saved)[-2:]
    assert set(run["on disk"]) == {*run["ranked"], *newest}


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize(("before", "after"), [(1, 2), (3, 1), (2, 4)])
def test_changed_accumulation_equals_a_scheduled_change(ranks, tmp_path, world, before, after):
    def changing() -> dict[str, Any]:
        windows = GradientAccumulationScheduler({0: before, 1: after})
        return trained(str(tmp_path / "whole"), max_epochs=3, more=[windows])

    options = [
        {"max_epochs": 1, "gradient_accumulation_steps": before},
        {"max_epochs": 3, "gradient_accumulation_steps": after},
    ]
    whole = on_processes(ranks, world, changing)
    parts = on_processes(ranks, world, in_two, str(tmp_path / "parts"), *options)
    for one, (_, run) in zip(whole, parts, strict=True):
        assert run["place"] == one["place"]
        assert_same(run["weights"], one["weights"])


def test_changed_accumulation_inside_an_epoch():
    before, after = in_two(
        "run",
        {"max_steps": 2, "gradient_accumulation_steps": 2},
        {"max_epochs": 1, "gradient_accumulation_steps": 5},
    )
    whole = trained("whole", max_epochs=1)
    assert before["seen"] + after["seen"] == whole["seen"]
    assert after["place"] == (3, 0, 2 * EPOCH)  # two of two, and what is left in one


class Pool(Dataset[Any]):
    def __init__(self, size: int) -> None:
        self.values = list(range(size))

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, index: int) -> Any:
        return torch.tensor([float(self.values[index])])


class Collects(Callback):
    """Adds a sample at each update and drops some at the end of an epoch, as a replay buffer does.

    Attributes:
        began: The samples at the beginning of each epoch.
    """

    def __init__(self, pool: Pool) -> None:
        self.pool = pool
        self.began: dict[int, list[int]] = {}

    def on_train_epoch_start(self, trainer: Any, module: Any) -> None:
        self.began.setdefault(trainer.current_epoch, list(self.pool.values))

    def on_train_step_end(self, trainer: Any, module: Any) -> None:
        self.pool.values.append(100 + trainer.global_step)

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        self.pool.values = self.pool.values[10 * (trainer.current_epoch == 1) :]

    def state_dict(self) -> dict[str, Any]:
        return {"values": self.pool.values, "began": sorted(self.began.items())}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.pool.values = list(state["values"])
        self.began = {epoch: list(values) for epoch, values in state["began"]}


class Sees(TrainModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1)
        self.seen: list[tuple[int, list[float]]] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.seen.append((self.trainer.current_epoch, batch.flatten().tolist()))
        return self.layer(batch / 100).mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def collecting(folder: str, shuffle: bool, limit: float) -> dict[str, Any]:
    pool, module = Pool(10), Sees()
    collects = Collects(pool)
    trainer = quiet_trainer(
        seed=4,
        max_epochs=4,
        project_dir=folder,
        callbacks=[collects, ModelCheckpoint(every=1, save_last=99)],
        limit_train_batches=limit,
    )
    trainer.fit(module, DataLoader(pool, batch_size=2, shuffle=shuffle), ckpt_path="auto")
    return {"seen": module.seen, "began": collects.began, "weights": copy_of(module)}


@pytest.mark.parametrize(
    ("world", "limit", "shuffle"),
    [(1, 1.0, True), (1, 0.5, False), (2, 1.0, False), (2, 0.7, True)],
)
def test_resume_with_a_growing_dataset(ranks, tmp_path, world, limit, shuffle):
    whole = on_processes(ranks, world, collecting, str(tmp_path / "whole"), shuffle, limit)
    lengths = []
    for epoch, began in whole[0]["began"].items():
        batches = [batch for one in whole for at, batch in one["seen"] if at == epoch]
        lengths.append(len(began))
        assert len(batches) == math.floor(round(math.ceil(len(began) / 2) * limit, 6))
        seen = sorted(sample for batch in batches for sample in batch)
        assert seen == sorted(began) if limit == 1.0 else set(seen) < set(began)
    assert lengths[0] < lengths[1] > lengths[2] < lengths[3]
    steps = sorted((tmp_path / "whole" / "checkpoints").iterdir())
    for kept in (2, len(steps) // 2, len(steps) - 2):  # inside the first, another, the last epoch
        folder = tmp_path / f"{kept}"
        shutil.copytree(tmp_path / "whole", folder)
        for path in steps[kept:]:
            shutil.rmtree(folder / "checkpoints" / path.name)
        resumed = on_processes(ranks, world, collecting, str(folder), shuffle, limit)
        for one, rest in zip(whole, resumed, strict=True):
            assert 0 < len(rest["seen"]) < len(one["seen"])
            assert one["seen"][-len(rest["seen"]) :] == rest["seen"]
            assert_same(rest["weights"], one["weights"])
