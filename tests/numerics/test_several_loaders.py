"""Several training loaders: joint batches, on any number of processes, resumed exactly."""

from __future__ import annotations

import multiprocessing
import os
import signal
from itertools import cycle, islice, product
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    WeightedRandomSampler,
    get_worker_info,
)

from tests.numerics.running import copy_of, on_processes, quiet_trainer
from trainer import CombinedLoader, TrainModule

MODES = ["min_size", "max_size_cycle", "max_size", "sequential"]


class Numbers(Dataset[Tensor]):
    """Numbers, perhaps with noise that the dataset draws."""

    def __init__(self, first: int, length: int, noise: float = 0.0) -> None:
        self.first, self.length, self.noise = first, length, noise

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor([self.first + index + self.noise * torch.rand(()).item()])


class Stream(IterableDataset[Tensor]):
    def __iter__(self) -> Any:
        return iter(Numbers(500, 7, 0.5)[index] for index in range(7))


class Stateful(IterableDataset[Tensor]):
    """Goes on where it stands, with a set_epoch that draws."""

    def __init__(self) -> None:
        self.at, self.drawn = 0, 0.0

    def set_epoch(self, epoch: int) -> None:
        self.drawn = torch.rand(()).item()

    def __iter__(self) -> Any:
        while self.at < 7:
            self.at += 1
            yield torch.tensor([500 + self.at + self.drawn])
        self.at = 0

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]


class Adds(TrainModule):
    """Keeps what the batches hold, and trains on it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Linear(1, 1)
        self.seen: list[Any] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        batch = dict(enumerate(batch)) if isinstance(batch, list) else batch
        parts = batch if isinstance(batch, dict) else {"one": batch}
        held = {name: None if x is None else x.flatten().tolist() for name, x in parts.items()}
        self.seen.append((self.trainer.current_epoch, held))
        losses = [self.net(x / 100).square().mean() for x in parts.values() if x is not None]
        return sum(losses)  # type: ignore[return-value]

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), 0.01)


def joint(mode: str) -> list[Any]:
    """The joint batches of loaders of 3 batches and 5 batches, the last one of them short."""
    a = [[0, 1], [2, 3], [4, 5]]
    b = [[100, 101, 102], [103, 104, 105], [106, 107, 108], [109, 110, 111], [112]]
    if mode == "sequential":
        return [{"one": each} for each in a + b]
    lengths = {"min_size": 3}.get(mode, 5)
    short = cycle(a) if mode == "max_size_cycle" else iter([*a, None, None])
    return [{"a": x, "b": y} for x, y in islice(zip(short, b, strict=False), lengths)]


def fit(combined: Any, **kwargs: Any) -> Any:
    module, ckpt = Adds(), kwargs.pop("ckpt_path", None)
    trainer = quiet_trainer(**{"seed": 3} | kwargs)
    trainer.fit(module, combined, ckpt_path=ckpt)
    return module.seen, copy_of(module), trainer.num_training_batches


@pytest.mark.parametrize("world", [1, 2])
def test_joint_batches_are_those_of_the_mode_on_any_number_of_processes(ranks, world):
    def run() -> Any:
        loaders = {"a": DataLoader(Numbers(0, 6), 2), "b": DataLoader(Numbers(100, 13), 3)}
        found = {mode: fit(CombinedLoader(loaders, mode), max_epochs=1) for mode in MODES}
        assert fit(loaders, max_epochs=1)[0] == found["max_size_cycle"][0]  # the default
        [(_, first)], _, number = fit([*loaders.values()], max_epochs=1, limit_train_batches=world)
        assert (number, list(first)) == (1, [0, 1])
        return {mode: [batch for _, batch in seen] for mode, (seen, _, _) in found.items()}

    for rank, found in enumerate(on_processes(ranks, world, run)):
        for mode in MODES:
            assert found[mode] == joint(mode)[rank::world]


def noisy(kind: str) -> Any:
    shuffled = {"shuffle": True, "num_workers": int(kind == "workers")}
    loaders: dict[str, Any] = {
        "a": DataLoader(Numbers(0, 6, 0.5), 2, **shuffled),
        "b": DataLoader(Numbers(100, 17, 0.5), 2, **shuffled),
    }
    if kind == "stream":
        loaders["c"] = DataLoader(Stream(), 2)
    if kind == "stateful":
        loaders["c"] = DataLoader(Stateful(), 2)
    if kind == "persistent":
        loaders["c"] = DataLoader(Stream(), 2)
        loaders["d"] = DataLoader(Numbers(0, 6, 0.5), 2, num_workers=1, persistent_workers=True)
    if kind == "sampler":
        weights = WeightedRandomSampler([1.0] * 30, 12)
        loaders["c"] = DataLoader(Numbers(200, 30), batch_size=None, sampler=weights)
    return loaders


STREAMS = ["stream", "stateful", "persistent"]


@pytest.mark.parametrize(
    ("kind", "saved_at"),
    [
        *product(["plain", "workers", "stream", "sampler"], [2, 5]),
        *[("stateful", 9), ("stateful", 11), ("persistent", 9)],
    ],
)
def test_a_run_resumes_inside_an_epoch_of_several_loaders(tmp_path, kind, saved_at):
    loaders = noisy(kind)
    whole, weights, _ = fit(loaders, max_epochs=2, project_dir=tmp_path / "whole")
    numbers = [round(x // 1) for _, batch in whole[:9] for x in batch["a"]]
    passes = [numbers[:6], numbers[6:12], numbers[12:18]]
    assert all(sorted(each) == list(range(6)) for each in passes)
    assert kind in STREAMS or len({tuple(each) for each in passes}) == 3  # each in its own order
    folder = {"project_dir": tmp_path / "parts", "checkpointing": True}
    first, _, _ = fit(noisy(kind), max_steps=saved_at, **folder)
    rest, found, _ = fit(noisy(kind), max_epochs=2, ckpt_path="auto", **folder)
    assert first + rest == whole
    torch.testing.assert_close(found, weights, rtol=0, atol=0)


def test_the_rest_of_an_epoch_is_dealt_to_another_number_of_processes(ranks, tmp_path):
    whole, _, _ = fit(noisy("plain"), max_epochs=2, project_dir=tmp_path / "whole")
    folder = {"project_dir": tmp_path / "parts", "checkpointing": True}
    fit(noisy("plain"), max_steps=4, **folder)

    def rest() -> Any:
        return fit(noisy("plain"), max_epochs=2, ckpt_path="auto", **folder)[0]

    for rank, found in enumerate(on_processes(ranks, 2, rest)):
        assert found == whole[4 + rank : 9 : 2] + whole[9 + rank :: 2]


def test_a_draw_of_set_epoch_depends_on_the_seed_and_the_loader():
    found = []
    for seed in (3, 4, 3):
        loaders = {name: DataLoader(Stateful(), 2) for name in "ab"}
        found.append(fit(loaders, max_steps=1, seed=seed)[0])
    assert found[0] == found[2] != found[1]
    [(_, batch)] = found[0]
    assert batch["a"] != batch["b"]


def test_datasets_without_a_length_are_saved_too(tmp_path):
    class Endless(Dataset[Tensor]):
        def __getitem__(self, index: int) -> Tensor:
            return torch.tensor([float(index)])

    loaders = {name: DataLoader(Endless(), sampler=[7, 8, 9]) for name in "ab"}
    folder = {"project_dir": tmp_path, "checkpointing": True}
    fit(loaders, max_steps=2, **folder)
    rest, _, _ = fit(loaders, max_epochs=1, ckpt_path="auto", **folder)
    assert rest == [(0, {"a": [9.0], "b": [9.0]})]


def add_thousand(worker: int) -> None:
    get_worker_info().dataset.first += 1000  # type: ignore[union-attr]  # it is a worker


@pytest.mark.parametrize("kind", ["map-style", "stream"])
def test_workers_are_set_up_each_with_its_own_dataset_and_outlive_a_signal(kind):
    class Signals(Adds):
        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            workers = set(multiprocessing.active_children()) - before if batch_idx == 1 else ()
            for child in workers:
                os.kill(child.pid, signal.SIGTERM)  # type: ignore[arg-type]  # it has begun

    before = set(multiprocessing.active_children())
    init = {"num_workers": 1, "worker_init_fn": add_thousand}
    loaders = {"a": DataLoader(Numbers(0, 6), **init), "b": DataLoader(Numbers(100, 6), **init)}
    if kind == "stream":
        loaders["c"] = DataLoader(Stream())
    module = Signals()
    quiet_trainer(max_steps=6, limit_train_batches=6).fit(module, loaders)
    seen = [(batch["a"], batch["b"]) for _, batch in module.seen]
    assert seen == [([1000.0 + k], [1100.0 + k]) for k in range(6)]


def test_validation_reads_combined_loaders_too():
    class Validates(Adds):
        def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
            self.seen.append((dataloader_idx, batch))

    one, two = DataLoader(Numbers(0, 2)), DataLoader(Numbers(10, 1))
    for given, expected in (
        ({"one": one, "two": two}, [(0, 0), (0, 1), (1, 10)]),
        (CombinedLoader([one, two], "sequential"), [(0, 0), (0, 1), (1, 10)]),
        (CombinedLoader([one, two], "min_size"), [(0, [[[0]], [[10]]])]),
    ):
        module = Validates()
        quiet_trainer().validate(module, given)
        found = [
            (number, [each.tolist() for each in batch] if isinstance(batch, list) else batch.item())
            for number, batch in module.seen
        ]
        assert found == expected


def test_a_combined_loader_can_be_read_by_itself():
    combined = CombinedLoader([range(2), {"x": range(3)}], "max_size")
    assert len(combined) == 3
    assert list(combined)[1:] == [([1, {"x": 1}], 1, 0), ([None, {"x": 2}], 2, 0)]
    assert list(CombinedLoader([range(2), range(5, 6)], "sequential")) == [
        (0, 0, 0),
        (1, 1, 0),
        (5, 0, 1),
    ]
    with pytest.raises(ValueError, match=r"'max' .*'min_size', 'max_size_cycle'|mode.*'max'"):
        CombinedLoader([range(2)], "max")
