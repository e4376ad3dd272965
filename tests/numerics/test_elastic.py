"""A run goes on with another number of processes or workers: every sample once, in order (P2)."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset
from torchmetrics import CatMetric, MaxMetric, MeanMetric, Metric, PearsonCorrCoef

from callbacks import Callback, ModelCheckpoint
from tests.numerics.running import on_processes, quiet_trainer
from trackers import read_metrics
from trainer import TrainModule
from trainer.errors import CheckpointError

SAMPLES, BATCH, EPOCHS = 30, 3, 2


class Numbers(Dataset[Any]):
    """Each sample is its index, with noise; it counts what is read."""

    reads = 0

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[int, Any]:
        Numbers.reads += 1
        return index, torch.rand(())


class Total(Metric):
    """As guides write it: full_state_update is not set, so that it has no merge_state."""

    def __init__(self) -> None:
        super().__init__()
        self.add_state("total", torch.tensor(0), dist_reduce_fx="sum")

    def update(self, values: Any) -> None:
        self.total += values.sum()

    def compute(self) -> Any:
        return self.total


class Count(CatMetric):
    def compute(self) -> Any:
        return super().compute().numel()


class Line(TrainModule):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(()))
        kinds = {"total": Total, "most": MaxMetric, "mean": MeanMetric, "count": Count}
        self.objects = torch.nn.ModuleDict({name: kind() for name, kind in kinds.items()})

    def on_train_epoch_start(self) -> None:
        self.log("once", self.trainer.current_epoch)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        index, noise = batch
        for name, each in self.objects.items():
            each.update(index)
            self.log(f"object/{name}", each)
        self.log("sum", index.double().sum(), on_step=False, on_epoch=True, reduce="sum")
        self.log("mean", index.double().mean(), on_step=False, on_epoch=True)
        self.log("most", index.double().max(), on_step=False, on_epoch=True, reduce="max")
        return self.weight * noise.mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Seen(Callback):
    def __init__(self) -> None:
        self.batches: list[Any] = []

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        self.batches.append(
            [trainer.current_epoch, batch_idx, batch[0].tolist(), batch[1].tolist()]
        )


class Correlated(Line):
    def __init__(self) -> None:
        super().__init__()
        self.objects["correlation"] = PearsonCorrCoef()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.objects["correlation"].update(batch[1], batch[1])
        return self.weight


def part(folder: str, max_steps: int | None, workers: int, kind: type[Line] = Line) -> Any:
    """Train to an update, or to the end; say which batches this process saw."""
    seen, Numbers.reads = Seen(), 0
    trainer = quiet_trainer(
        project_dir=folder,
        max_epochs=EPOCHS,
        max_steps=max_steps,
        seed=11,
        gradient_accumulation_steps=2,
        callbacks=[seen, ModelCheckpoint()],
    )
    loader = DataLoader(Numbers(), batch_size=BATCH, shuffle=True, num_workers=workers)
    trainer.fit(kind(), loader, ckpt_path="auto")
    return seen.batches, trainer.samples_seen, Numbers.reads


def in_order(parts: list[Any]) -> list[Any]:
    """The batches of several processes as one process would have seen them."""
    batches = [
        [epoch, number, rank, *batch]
        for rank, (seen, _, _) in enumerate(parts)
        for epoch, number, *batch in seen
    ]
    return [[epoch, *batch] for epoch, _, _, *batch in sorted(batches)]


@pytest.mark.parametrize(
    ("worlds", "updates", "workers"),
    [
        ((2, 1), (1, None), (0, 0)),
        ((1, 2), (1, None), (0, 2)),  # after 2 batches
        ((3, 2), (1, None), (0, 0)),  # after 6 of 10
        ((1, 3), (2, None), (1, 0)),  # after 4 of 10, which are no whole rounds of three
        ((2, 1, 2, 1), (1, 2, 4, None), (0, 2, 0, 0)),
        ((1, 2), (7, None), (0, 0)),  # in the second epoch
        ((4, 2), (1, None), (0, 0)),  # after 8 of 10
        ((1, 1), (2, None), (2, 1)),
    ],
)
def test_every_sample_is_seen_once_in_the_same_order(ranks, tmp_path, worlds, updates, workers):
    (whole,) = on_processes(ranks, 1, part, str(tmp_path / "whole"), None, 0)
    found, folder = [], str(tmp_path / "parts")
    for world, until, number in zip(worlds, updates, workers, strict=True):
        parts = on_processes(ranks, world, part, folder, until, number)
        found += in_order(parts)
        if number == 0:  # what was seen before is not read again, and nothing is read twice
            assert sum(reads for _, _, reads in parts) <= BATCH * (len(in_order(parts)) + world)
    expected = in_order([whole])
    assert found == expected
    assert {samples for _, samples, _ in parts} == {whole[1]} == {EPOCHS * SAMPLES}
    # The epoch's metrics took in each sample once, wherever it was trained on.
    both = [
        [record for record in read_metrics(tmp_path / run / "metrics.jsonl") if "sum" in record]
        for run in ("whole", "parts")
    ]
    objects = ("object/total", "object/most", "object/mean", "object/count")
    names = ("epoch", "once", "sum", "mean", "most", *objects)
    assert [[each[name] for name in names] for each in both[1]] == [
        [each[name] for name in names] for each in both[0]
    ]
    assert [each["sum"] for each in both[0]] == [SAMPLES * (SAMPLES - 1) / 2] * EPOCHS


def warnings_of(folder: str) -> list[str]:
    found: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: found.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("trainer.loops.fit_state")
    logger.addHandler(handler)
    try:
        part(folder, None, 0)
    finally:
        logger.removeHandler(handler)
    return found


@pytest.mark.parametrize(("updates", "warned"), [(1, True), (None, False)])
def test_new_generators_are_told_only_if_the_run_goes_on(ranks, tmp_path, updates, warned):
    folder = str(tmp_path)
    on_processes(ranks, 1, part, folder, updates, 0)
    first, second = on_processes(ranks, 2, warnings_of, folder)
    assert first == []
    assert ["rank 1 starts with freshly seeded" in text for text in second] == [True] * warned


def test_a_metric_object_that_cannot_be_merged_raises_on_all_ranks(ranks, tmp_path):
    on_processes(ranks, 2, part, str(tmp_path), 1, 0, Correlated)
    on_processes(ranks, 2, part, str(tmp_path), 2, 0, Correlated)
    with pytest.raises(
        CheckpointError, match=r"'objects\.correlation', a PearsonCorrCoef.*'mean_x'"
    ):
        on_processes(ranks, 1, part, str(tmp_path), 3, 0, Correlated)
