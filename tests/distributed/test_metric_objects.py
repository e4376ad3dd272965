"""Metric objects with lists, of which the processes hold unequal numbers of unequal types."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MetricCollection
from torchmetrics.classification import BinaryAUROC, BinaryAveragePrecision, MulticlassAUROC
from torchmetrics.retrieval import RetrievalMAP

from trainer import Trainer, TrainModule
from trainer.metrics.computing import computing

pytestmark = pytest.mark.filterwarnings("ignore:The ``compute`` method of metric")

BATCH = 6


def rows(batches: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    scores = torch.rand(batches * BATCH, 3, generator=generator).softmax(-1)
    labels = torch.randint(0, 3, (batches * BATCH,), generator=generator)
    labels[::BATCH], labels[1::BATCH], labels[2::BATCH] = 0, 1, 2  # AUROC wants some of each
    return TensorDataset(scores, labels)


def take(metric: Any, scores: torch.Tensor, labels: torch.Tensor) -> None:
    if isinstance(metric, MulticlassAUROC):
        metric.update(scores, labels)
    elif isinstance(metric, RetrievalMAP):
        metric.update(scores[:, 0], labels > 0, indexes=labels.new_tensor([0, 1] * (BATCH // 2)))
    else:
        metric.update(scores[:, 0], labels.gt(0).long())


MAKERS: dict[str, Callable[[], Any]] = {
    "integers and numbers": lambda: BinaryAUROC(thresholds=None),
    "two dimensions": lambda: MulticlassAUROC(3, thresholds=None),
    "one element each": RetrievalMAP,
}


class Judged(TrainModule):
    def __init__(self, metric: Any, *, by_hand: bool) -> None:
        super().__init__()
        self.metric, self.by_hand = metric, by_hand

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        take(self.metric, *batch)
        if not self.by_hand:
            self.log("metric", self.metric)

    def on_validation_epoch_end(self) -> None:
        if self.by_hand:
            self.log("metric", self.metric.compute())
            self.metric.reset()


@pytest.mark.parametrize("by_hand", [False, True], ids=["logged", "computed in a hook"])
@pytest.mark.parametrize("batches", [1, 3, 4])
@pytest.mark.parametrize("kind", MAKERS)
def test_lists_of_any_lengths_are_computed_over_all_processes(ranks2, kind, batches, by_hand):
    def body() -> list[float]:
        module = Judged(MAKERS[kind](), by_hand=by_hand)
        loader = DataLoader(rows(batches), BATCH)
        trainer = Trainer(cpu=True, barebones=True)
        return [trainer.validate(module, loader)[0]["metric"] for _ in range(2)]

    whole = MAKERS[kind]()
    for batch in DataLoader(rows(batches), BATCH):
        take(whole, *batch)
    assert ranks2(body) == [[pytest.approx(whole.compute().item(), rel=1e-6)] * 2] * 2


def test_metrics_that_share_their_lists_are_computed_over_all_processes(ranks2):
    """torchmetrics lets metrics of a collection share one state after the first update."""

    class Both(Judged):
        def on_validation_epoch_end(self) -> None:
            self.log_dict(self.metric.compute())
            self.metric.reset()

    def make() -> MetricCollection:
        return MetricCollection([BinaryAUROC(), BinaryAveragePrecision()])

    def body() -> list[dict[str, float]]:
        module, loader = Both(make(), by_hand=True), DataLoader(rows(3), BATCH)
        trainer = Trainer(cpu=True, barebones=True)
        return [trainer.validate(module, loader)[0] for _ in range(2)]

    whole = make()
    for batch in DataLoader(rows(3), BATCH):
        take(whole, *batch)
    values = {
        name: pytest.approx(value.item(), rel=1e-6) for name, value in whole.compute().items()
    }
    assert ranks2(body) == [[values] * 2] * 2


def test_the_objects_are_afterwards_as_before_even_if_the_hook_fails(ranks2):
    def body() -> list[Any]:
        metric, rank = RetrievalMAP(), torch.distributed.get_rank()
        for batch in list(DataLoader(rows(3), BATCH))[rank::2]:
            take(metric, *batch)
        kept, filled = [*metric.indexes], []

        def hook() -> None:
            metric.compute()
            filled.append(len(metric.indexes))
            raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError), computing([("some", nn.ModuleList([metric]))]):
            hook()
        alike = [bool((a == b).all()) for a, b in zip(metric.indexes, kept, strict=True)]
        return [*filled, alike, metric.dist_sync_fn]

    assert ranks2(body) == [[2, [True] * 2, None], [2, [True], None]]
