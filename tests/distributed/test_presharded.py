"""Streams that the user has split by process: each sample once, whatever each process has."""

from __future__ import annotations

import json
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel
from torch.utils.data import DataLoader, IterableDataset

from callbacks import ModelCheckpoint
from tests.helpers.datasets import HuggingFaceStream, hugging_face
from tests.helpers.ranks import RankError
from trainer import (
    Accelerator,
    DataLoaderConfiguration,
    ParallelismConfig,
    Trainer,
    TrainModule,
)

SIZES = (11, 4, 0)  # samples of each process


class Part(IterableDataset):
    """A process's own samples, read from where a state says."""

    def __init__(self, rank: int) -> None:
        self.samples = [100 * rank + number for number in range(SIZES[rank])]
        self.begin = self.at = 0

    def __iter__(self) -> Any:
        begin, self.begin = self.begin, 0
        for number, sample in enumerate(self.samples[begin:], begin + 1):
            self.at = number
            yield sample

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.begin = state["at"]


class Plain(Part):
    """Has no state."""

    state_dict = load_state_dict = None

    def __iter__(self) -> Any:
        return iter(self.samples)


class Net(TrainModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = torch.nn.Linear(1, 1)
        self.seen: list[Any] = []

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return batch, torch.rand(()).item()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        batch, noise = batch
        self.seen.append((self.trainer.current_epoch, batch.tolist(), noise))
        return self.layer(batch[:, None].float() / 100 + noise).pow(2).mean()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val/mean", batch[0].float().mean())
        self.log("val/samples", len(batch[0]), reduce="sum")

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return batch[0]

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Wide(Net):
    """Has a layer that can be split over two processes."""

    tp_plan = {"layer": ColwiseParallel(output_layouts=Replicate())}

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 2)


def stream_of(kind: str) -> Any:
    rank, world = dist.get_rank(), dist.get_world_size()
    if kind == "split by datasets":
        return HuggingFaceStream(13, 4, split=(rank, world))
    return Part(rank) if kind == "with a state" else Plain(rank)


def fit(kind: str, folder: Path, steps: int | None = None) -> Any:
    config = DataLoaderConfiguration(presharded=kind != "split by datasets")
    with pytest.MonkeyPatch.context() as patch:
        hugging_face(patch)
        trainer = Trainer(
            cpu=True,
            seed=3,
            progress_bar=False,
            project_dir=folder,
            val_every="2 steps",
            max_epochs=2,
            max_steps=steps,
            dataloader_config=config,
            callbacks=[ModelCheckpoint(every="1 steps")],
        )
        module = Net()
        train, val = (DataLoader(stream_of(kind), 2) for _ in range(2))
        trainer.fit(module, train, val, ckpt_path="auto")
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    counts = [line["val/samples"] for line in lines if "val/samples" in line]
    return module.seen, counts, module.layer.weight.item(), metrics, trainer.samples_seen


@pytest.mark.parametrize("kind", ["with a state", "without a state", "split by datasets"])
def test_each_sample_is_trained_once_and_a_resume_is_exact(ranks3, kind, tmp_path):
    whole = ranks3(fit, kind, tmp_path / "whole")
    if kind == "split by datasets":
        expected = [list(range(13))[rank::3] for rank in range(3)]
    else:
        expected = [Plain(rank).samples for rank in range(3)]
    for (seen, counts, weight, metrics, samples), own in zip(whole, expected, strict=True):
        for epoch in (0, 1):
            assert sorted(chain(*(x for e, x, _ in seen if e == epoch))) == own
        every = [*chain(*expected)]
        assert metrics["val/mean"] == pytest.approx(sum(every) / len(every))
        assert set(counts) == {len(every)}  # also of the validation after the sanity check
        assert (weight, samples) == (whole[0][2], 2 * len(every))
    noises = [noise for seen, *_ in whole for _, _, noise in seen]
    assert len(set(noises)) == len(noises)
    # Process 1 is at the end of its stream; and inside it, and beyond.
    for steps in (3,) if kind != "with a state" else (1, 3, 5):
        folder = tmp_path / str(steps)
        first = ranks3(fit, kind, folder, steps)
        rest = ranks3(fit, kind, folder)
        for begun, ended, once in zip(first, rest, whole, strict=True):
            assert (begun[0] + ended[0], *ended[1:]) == once


def test_predictions_and_limits_count_all_processes(ranks2, tmp_path):
    def predict() -> Any:
        config = DataLoaderConfiguration(presharded=True)
        options = {"cpu": True, "progress_bar": False, "dataloader_config": config}
        trainer = Trainer(project_dir=tmp_path, **options, limit_predict_batches=3)
        found = trainer.predict(Net(), DataLoader(Part(dist.get_rank()), 2))
        return found and [each.tolist() for each in found]

    assert ranks2(predict) == [[[0, 1], [100, 101], [2, 3]], None]


def own_loop(folder: Path, kind: str, stop: int | None = None, resumes: bool = False) -> list[Any]:
    """The batches of an own loop of two passes, gathered; it saves and stops after some."""
    with pytest.MonkeyPatch.context() as patch:
        hugging_face(patch)
        split = kind == "split by datasets"
        config = DataLoaderConfiguration(presharded=not split, use_stateful_dataloader=True)
        accelerator = Accelerator(cpu=True, dataloader_config=config)
        stream = HuggingFaceStream(16, 4, (dist.get_rank(), 2)) if split else stream_of(kind)
        loader = accelerator.prepare(DataLoader(stream, 2))
        if resumes:
            accelerator.load_state(folder)
        seen: list[Any] = []
        while loader.iteration < 2:
            for batch in loader:
                seen.append(
                    accelerator.gather_for_metrics(batch).tolist() if split else batch.tolist()
                )
                if len(seen) == stop:
                    accelerator.save_state(folder)
                    return seen
    return seen


@pytest.mark.parametrize("kind", ["with a state", "without a state", "split by datasets"])
def test_an_own_loop_reads_all_of_its_part_and_resumes(ranks2, kind, tmp_path):
    whole = ranks2(own_loop, tmp_path, kind)
    if kind == "split by datasets":
        assert sorted(chain(*whole[0][:4])) == list(range(16))  # nothing gathered is padding
    else:
        for rank, seen in enumerate(whole):
            assert [*chain(*seen)] == 2 * Plain(rank).samples
    stop = 3 if kind == "split by datasets" else 1
    begun = ranks2(own_loop, tmp_path / "cut", kind, stop)
    rest = ranks2(own_loop, tmp_path / "cut", kind, None, True)
    for first, second, once in zip(begun, rest, whole, strict=True):
        assert first + second == once


def test_parts_that_do_not_make_up_the_data_are_refused(ranks2, tmp_path):
    def refused(make: Any, split: Any, **options: Any) -> str:
        with pytest.MonkeyPatch.context() as patch:
            hugging_face(patch)
            loader = DataLoader(HuggingFaceStream(12, split=split), 2)
            with pytest.raises(ValueError) as error:  # noqa: PT011 - its text is returned
                make(loader, **options)
        return str(error.value)

    def trains(loader: Any, **options: Any) -> None:
        options |= {"cpu": True, "progress_bar": False, "project_dir": tmp_path}
        Trainer(**options, max_epochs=1).fit(Wide(), loader)

    def prepares(loader: Any, **options: Any) -> None:
        config = DataLoaderConfiguration(**options)
        Accelerator(cpu=True, dataloader_config=config).prepare(loader)

    for text in ranks2(lambda: refused(trains, (0, 2))):
        assert "are not 2 parts of the data: rank 0 reads part 0 of 2, rank 1 reads part 0" in text
    for text in ranks2(lambda: refused(trains, (dist.get_rank(), 3))):
        assert "rank 1 reads part 1 of 3" in text

    def trains_both(loader: Any) -> None:
        trains([loader, DataLoader(Plain(0))])

    def splits_layers(loader: Any) -> None:
        trains(loader, parallelism_config=ParallelismConfig(tp_size=2))

    for text in ranks2(lambda: refused(trains_both, (dist.get_rank(), 2))):
        assert "Split all streams or none" in text
    for text in ranks2(lambda: refused(splits_layers, (dist.get_rank(), 2))):
        assert "are not 1 parts of the data" in text
    for text in ranks2(lambda: refused(prepares, (dist.get_rank(), 4))):
        assert "of 4 of the data, but must be part" in text
    own = ranks2(lambda: refused(prepares, (dist.get_rank(), 2), split_batches=True))
    assert all("split_batches=True divides batches among the processes" in text for text in own)


def test_a_checkpoint_inside_an_epoch_is_for_as_many_processes(ranks2, ranks3, tmp_path):
    ranks3(fit, "with a state", tmp_path, 3)
    with pytest.raises(RankError, match="streams that were split over 3 processes"):
        ranks2(fit, "with a state", tmp_path)
