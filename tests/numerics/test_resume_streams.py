"""A run on a stream, interrupted after any update and resumed, is one that was not (P1)."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from callbacks import Callback, ModelCheckpoint
from tests.numerics.running import (
    Watch,
    assert_same,
    copy_of,
    cut_back,
    on_processes,
    quiet_trainer,
)
from trackers import read_metrics
from trainer import TrainModule
from trainer.errors import CheckpointError

# Three workers are more than a small machine has cores.
pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")
CLASSES, FEATURES, SAMPLES = 3, 5, 26


class Augmented(IterableDataset):
    """Noisy samples in an order of its own, with noise from all three generators."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(8)
        self.values = torch.randn(SAMPLES, FEATURES, generator=generator)
        self.labels = torch.randint(CLASSES, (SAMPLES,), generator=generator)
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def sample(self, index: int) -> tuple[Tensor, Tensor]:
        noise = torch.randn(FEATURES) * (1 + random.random()) + float(numpy.random.rand())
        return self.values[index] + 0.3 * noise, self.labels[index]

    def order(self) -> list[int]:
        order = torch.Generator().manual_seed(self.epoch)
        whole: list[int] = torch.randperm(SAMPLES, generator=order).tolist()
        info = get_worker_info()
        return whole if info is None else whole[info.id :: info.num_workers]

    def __iter__(self) -> Iterator[Any]:
        return map(self.sample, self.order())


class Keeping(Augmented):
    """Order and noise come from a generator of its own, of which no checkpoint knows."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = numpy.random.default_rng(4)

    def order(self) -> list[int]:
        whole: list[int] = self.generator.permutation(SAMPLES).tolist()
        info = get_worker_info()
        return whole if info is None else whole[info.id :: info.num_workers]

    def sample(self, index: int) -> tuple[Tensor, Tensor]:
        value, label = super().sample(index)
        return value + self.generator.random(dtype=numpy.float32), label


class Resumable(Augmented):
    """The same with a state: where it is, and a generator whose draws go on from pass to pass."""

    def __init__(self) -> None:
        super().__init__()
        self.at = 0
        self.generator = torch.Generator().manual_seed(4)

    def __iter__(self) -> Iterator[Any]:
        order = self.order()
        while self.at < len(order):
            self.at += 1
            value, label = self.sample(order[self.at - 1])
            yield value + torch.rand(FEATURES, generator=self.generator), label
        self.at = 0

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at, "generator": self.generator.get_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]
        self.generator.set_state(state["generator"])


class Anew(Resumable):
    """Each pass begins anew, unless a state was loaded just before."""

    loaded = False

    def __iter__(self) -> Iterator[Any]:
        if not self.loaded:
            self.at = 0
        self.loaded = False
        order = self.order()
        while self.at < len(order):
            self.at += 1
            value, label = self.sample(order[self.at - 1])
            yield value + torch.rand(FEATURES, generator=self.generator), label

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.loaded = True


class Tensors(Resumable):
    """A source of ready batches with a state."""

    def __iter__(self) -> Iterator[Any]:
        for value, label in super().__iter__():
            yield value.expand(2, FEATURES), label.expand(2)


class Noisy(TrainModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(FEATURES, 8), nn.Dropout(0.4), nn.Linear(8, CLASSES))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = cross_entropy(self.net(batch[0]), batch[1])
        self.log("loss", loss)
        self.log("epoch/loss", loss, on_step=False, on_epoch=True)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


class Short(Noisy):
    """Leaves out the rest of each epoch, while the stream is read ahead."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        return -1 if batch_idx == 3 else None


class End(Callback):
    def on_train_end(self, trainer: Any, module: Any) -> None:
        self.optimizer = copy.deepcopy(trainer.optimizers[0].state_dict())


def data(name: str, workers: int) -> Any:
    if name == "source":
        iterable = Tensors()
        return type("Source", (), {  # a DataLoader would read a dataset
            "__iter__": lambda self: iter(iterable),
            "set_epoch": lambda self, epoch: iterable.set_epoch(epoch),
            "state_dict": lambda self: iterable.state_dict(),
            "load_state_dict": lambda self, state: iterable.load_state_dict(state),
        })()  # fmt: skip  # laid out as a class
    if name.startswith("anew"):
        return DataLoader(Anew(), batch_size=int(name.split()[1]), num_workers=workers)
    kind = {"resumable": Resumable, "keeping": Keeping, "plain": Augmented}[name]
    return DataLoader(kind(), batch_size=4, num_workers=workers)


def stream_fit(folder: str, begin: int, name: str, workers: int, options: dict[str, Any]) -> Any:
    """Train on this process, or go on; `begin` seeds what a resumed run must not depend on."""
    random.seed(begin)
    numpy.random.seed(begin)
    torch.manual_seed(begin)
    watch, end = Watch(), End()
    trainer = quiet_trainer(
        project_dir=folder,
        callbacks=[watch, end, ModelCheckpoint(every=1, save_last=100)],
        **{"max_epochs": 3, **options},
    )
    module = Short() if name.startswith("left ") else Noisy()
    trainer.fit(module, data(name.removeprefix("left "), workers), ckpt_path="auto")
    return {
        "weights": copy_of(module),
        "optimizer": end.optimizer,
        "counters": (trainer.global_step, trainer.current_epoch, trainer.samples_seen),
        "drawn": (torch.rand(3), random.random(), numpy.random.rand()),
        "losses": watch.losses,
        "gradients": watch.gradients,
    }


def record_of(folder: Path) -> list[dict[str, Any]]:
    records = read_metrics(folder / "metrics.jsonl")
    return [{name: value for name, value in each.items() if name != "time"} for each in records]


def assert_resumed(whole: Any, resumed: Any, step: int) -> None:
    for name in ("losses", "gradients"):
        assert_same(resumed[name], whole[name][step:])
    for name in ("weights", "optimizer", "counters", "drawn"):
        assert_same(resumed[name], whole[name])


@pytest.mark.parametrize(
    ("name", "world", "workers", "options", "every"),
    [
        ("resumable", 1, 0, {}, 2),  # each place in an epoch of 7 updates is met
        ("resumable", 1, 0, {"gradient_accumulation_steps": 2, "limit_train_batches": 5}, 2),
        ("resumable", 1, 3, {"gradient_accumulation_steps": 2}, 3),
        ("resumable", 2, 0, {}, 3),
        ("resumable", 2, 3, {"max_epochs": 2}, 3),
        ("anew 4", 1, 0, {}, 3),
        (f"anew {SAMPLES}", 1, 0, {}, 1),  # one batch an epoch, at whose end nobody knows of it
        (f"anew {SAMPLES // 2}", 2, 0, {"limit_train_batches": 2}, 1),
        (f"anew {SAMPLES}", 1, 1, {}, 1),
        ("source", 1, 0, {"limit_train_batches": 7, "max_epochs": 2}, 3),
        ("source", 2, 0, {"max_epochs": 2}, 5),
        ("plain", 1, 3, {"max_epochs": 2}, 5),
        ("plain", 2, 0, {"max_epochs": 2}, 3),
        ("keeping", 1, 2, {"max_epochs": 2}, 5),
        ("keeping", 2, 0, {"max_epochs": 2}, 3),
        ("left resumable", 1, 0, {"gradient_accumulation_steps": 2}, 1),
        ("left anew 4", 1, 0, {"gradient_accumulation_steps": 2}, 1),
        ("left source", 1, 0, {"gradient_accumulation_steps": 2, "max_epochs": 2}, 1),
    ],
)
def test_resume_after_every_update(ranks, tmp_path, name, world, workers, options, every):
    def run(folder: Path, begin: int) -> list[Any]:
        return on_processes(ranks, world, stream_fit, str(folder), begin, name, workers, options)

    whole = run(tmp_path / "whole", 1)
    steps = whole[0]["counters"][0]
    for step in range(1, steps, every):
        folder = tmp_path / f"from-{step}"
        cut_back(tmp_path / "whole", folder, step)
        for one, other in zip(whole, run(folder, 99), strict=True):
            assert_resumed(one, other, step)
        assert record_of(folder) == record_of(tmp_path / "whole")


@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2)])
def test_resume_on_another_number_of_ranks_sees_the_same_samples(ranks, tmp_path, before, after):
    """The first epoch's samples do not depend on where in it the number changed."""

    def run(world: int, folder: str, begin: int, **options: Any) -> list[Any]:
        options = {"max_epochs": 2, **options}
        return on_processes(
            ranks, world, stream_fit, str(tmp_path / folder), begin, "resumable", 0, options
        )

    (whole,) = run(1, "whole", 1)
    run(before, "parts", 1, max_steps=2)
    for part in run(after, "parts", 99):
        assert part["counters"][1:] == whole["counters"][1:]  # epochs and samples
        assert part["counters"][2] == 2 * SAMPLES


def test_resume_with_another_number_of_workers_raises(tmp_path):
    stream_fit(str(tmp_path), 1, "resumable", 2, {"max_steps": 2})
    with pytest.raises(CheckpointError, match="2 workers read, but this loader has 0"):
        stream_fit(str(tmp_path), 1, "resumable", 0, {})


class Unsaveable(Resumable):
    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at, "buffer": {"source": Path("here")}}


def test_a_stream_state_that_cannot_be_saved_raises(tmp_path):
    trainer = quiet_trainer(
        project_dir=str(tmp_path), max_epochs=1, callbacks=[ModelCheckpoint(every=1)]
    )
    with pytest.raises(CheckpointError, match=r"stream.*Unsaveable.*buffer.*source"):
        trainer.fit(Noisy(), DataLoader(Unsaveable(), batch_size=4))
