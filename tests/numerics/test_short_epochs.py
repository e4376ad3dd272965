"""Epochs that are shorter than a window, and streams whose length is not what they claim."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from callbacks import Callback
from tests.numerics.running import copy_of, on_processes, quiet_trainer
from trainer import TrainModule

SIZE = 2  # samples of a batch


def samples(batches: int) -> Tensor:
    return torch.linspace(-1.0, 1.0, SIZE * batches - 1).reshape(-1, 1)  # the last one is short


class Claims(IterableDataset[Any]):
    """A stream of some batches that claims to have others."""

    def __init__(self, batches: int, claimed: int) -> None:
        self.values, self.claimed = samples(batches), SIZE * claimed

    def __len__(self) -> int:
        return self.claimed

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self.values)


class Line(TrainModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = torch.nn.Linear(1, 1)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        (x,) = batch if isinstance(batch, (list, tuple)) else (batch,)
        self.log("mean", x.mean(), on_step=False, on_epoch=True)
        return (self.layer(x) - x.sin()).square().mean()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", batch[0].mean())

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class When(Callback):
    def __init__(self) -> None:
        self.validations: list[int] = []

    def on_validation_start(self, trainer: Any, module: Any) -> None:
        self.validations.append(trainer.global_step)


def fitted(data: Any, **options: Any) -> dict[str, Any]:
    module, when = Line(), When()
    trainer = quiet_trainer(max_epochs=3, callbacks=when, **options)
    trainer.fit(module, data, DataLoader(TensorDataset(samples(3)), batch_size=SIZE))
    return {
        "weights": copy_of(module),
        "updates": trainer.global_step,
        "samples": trainer.samples_seen,
        "items": trainer.items_seen,
        "mean": trainer.callback_metrics["mean"],
        "validations": when.validations,
    }


def plain(batches: int, window: int) -> tuple[dict[str, Tensor], list[int]]:
    """Three epochs of a loop whose update is that of all samples of a window.

    Returns:
        The weights, and the number of updates at the end of each epoch.
    """
    module, ends, updates = Line(), [], 0
    optimizer = module.configure_optimizers()
    for _ in range(3):
        for part in samples(batches).split(SIZE * window):
            optimizer.zero_grad()
            (module.layer(part) - part.sin()).square().mean().backward()
            optimizer.step()
            updates += 1
        ends.append(updates)
    return copy_of(module), ends


def assert_is_plain(run: dict[str, Any], batches: int, window: int) -> list[int]:
    weights, ends = plain(batches, window)
    torch.testing.assert_close(run["weights"], weights, rtol=1e-5, atol=1e-6)
    assert run["updates"] == ends[-1]
    assert run["samples"] == run["items"] == 3 * len(samples(batches))
    assert run["mean"] == pytest.approx(samples(batches).mean().item(), abs=1e-7)
    return ends


every_world = pytest.mark.parametrize("world", [1, 2])


@every_world
@pytest.mark.parametrize("batches", [1, 2, 3, 5])
@pytest.mark.parametrize("accumulation", [4, 7])
def test_an_epoch_shorter_than_the_accumulation_window(ranks, world, batches, accumulation):
    def run() -> dict[str, Any]:
        data = DataLoader(TensorDataset(samples(batches)), batch_size=SIZE)
        return fitted(data, gradient_accumulation_steps=accumulation)

    for one in on_processes(ranks, world, run):
        assert one["validations"] == assert_is_plain(one, batches, accumulation * world)


# The batches that a stream has, and those that it claims to have.
STREAMS = [(5, 5), (3, 6), (6, 3), (1, 4), (4, 1)]


@pytest.mark.filterwarnings("ignore:Length of IterableDataset")
@every_world
@pytest.mark.parametrize(("batches", "claimed"), STREAMS)
@pytest.mark.parametrize("accumulation", [1, 3])
def test_a_stream_with_a_wrong_length(ranks, world, batches, claimed, accumulation):
    def run() -> dict[str, Any]:
        data = DataLoader(Claims(batches, claimed), batch_size=SIZE)
        return fitted(data, gradient_accumulation_steps=accumulation)

    for one in on_processes(ranks, world, run):
        assert one["validations"] == assert_is_plain(one, batches, accumulation * world)


@pytest.mark.filterwarnings("ignore:Length of IterableDataset")
@every_world
@pytest.mark.parametrize(
    ("batches", "claimed", "every", "expected"),
    [
        # in batches of all processes; what a shorter one has missed is due at its end
        (4, 8, "0.5 epochs", {1: [4, 8, 12], 2: [2, 4, 6]}),
        (3, 8, "0.5 epochs", {1: [3, 6, 9], 2: [2, 4, 6]}),
        (8, 4, "0.5 epochs", {1: [2, 8, 10, 16, 18, 24], 2: [1, 4, 5, 8, 9, 12]}),
        (8, 4, "2 epochs", {1: [16], 2: [8]}),
        (4, 8, "5 steps", {1: [5, 10], 2: [5]}),
    ],
)
def test_val_every_in_a_stream_of_a_wrong_length(ranks, world, batches, claimed, every, expected):
    """Each half is due once, at the latest where the epoch really ends."""

    def run() -> dict[str, Any]:
        return fitted(DataLoader(Claims(batches, claimed), batch_size=SIZE), val_every=every)

    for one in on_processes(ranks, world, run):
        assert one["validations"] == expected[world]
        assert_is_plain(one, batches, world)


def collated(batch: list[Any]) -> Tensor:
    """By a function of the user's, so that a process cannot tell what the others' batches hold."""
    return torch.stack([x for (x,) in batch])


def first_alone(batch: list[Any]) -> Tensor:
    """The others are left out."""
    return collated(batch[:1])


@pytest.mark.parametrize("collate_fn", [collated, first_alone])
def test_every_rank_counts_the_samples_and_batches_of_all(ranks3, collate_fn):
    """In a last round that not every process has a batch in, too."""

    def counted() -> tuple[int, int, float]:
        data = DataLoader(TensorDataset(samples(5)), batch_size=SIZE, collate_fn=collate_fn)
        trainer = quiet_trainer(max_epochs=2)
        trainer.fit(Line(), data)
        return trainer.samples_seen, trainer.batches_seen, trainer.items_seen

    alone = counted()
    items = 10 if collate_fn is first_alone else 2 * len(samples(5))
    assert alone == (2 * len(samples(5)), 10, items)
    assert ranks3(counted) == [alone] * 3


def test_samples_of_ready_made_batches_are_estimated(ranks2):
    """Each process knows its own batch, and how many of them have one."""

    def counted() -> int:
        trainer = quiet_trainer(max_epochs=1)
        trainer.fit(Line(), DataLoader([samples(2)] * 3, batch_size=None))
        return trainer.samples_seen

    assert ranks2(counted)[0] == counted() == 3 * len(samples(2))
