"""Metric objects with lists, of which the processes hold unequal numbers of unequal types."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MeanMetric, Metric, MetricCollection, SumMetric
from torchmetrics.classification import BinaryAUROC, BinaryAveragePrecision, MulticlassAUROC
from torchmetrics.retrieval import RetrievalMAP
from torchmetrics.utilities.distributed import gather_all_tensors

from trackers import read_metrics
from trainer import Trainer, TrainModule
from trainer.distributed.objects import all_gather_object
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
            self.log("again", self.metric)  # one object may have several names

    def on_validation_epoch_end(self) -> None:
        if self.by_hand:
            value = self.metric.compute()
            self.log_dict({"metric": value, "again": value})
            self.metric.reset()


@pytest.mark.parametrize("by_hand", [False, True], ids=["logged", "computed in a hook"])
@pytest.mark.parametrize("batches", [1, 3])
@pytest.mark.parametrize("kind", MAKERS)
def test_list_states_of_any_lengths_are_computed_over_all_ranks(ranks2, kind, batches, by_hand):
    def body() -> list[dict[str, float]]:
        module = Judged(MAKERS[kind](), by_hand=by_hand)
        loader = DataLoader(rows(batches), BATCH)
        trainer = Trainer(cpu=True, barebones=True)
        return [trainer.validate(module, loader)[0] for _ in range(2)]

    whole = MAKERS[kind]()
    for batch in DataLoader(rows(batches), BATCH):
        take(whole, *batch)
    value = pytest.approx(whole.compute().item(), rel=1e-6)
    assert ranks2(body) == [[{"metric": value, "again": value}] * 2] * 2


def test_metrics_of_a_collection_that_share_a_state(ranks2):
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


class Texts(Metric):
    """Has a list of what is not tensors, which torchmetrics leaves as it is."""

    def __init__(self) -> None:
        super().__init__()
        self.add_state("texts", [], dist_reduce_fx=None)
        self.add_state("number", torch.tensor(0.0), dist_reduce_fx="sum")

    def update(self, text: str) -> None:
        self.texts.append(text)
        self.number += 1

    def compute(self) -> torch.Tensor:
        return self.number


def test_list_states_of_other_types_are_left_to_torchmetrics(ranks2):
    def body() -> float:
        metric, rank = Texts(), torch.distributed.get_rank()
        for _ in range(2 - rank):
            metric.update("a")
        with computing(metric):
            return metric.compute().item()

    assert ranks2(body) == [3.0, 3.0]


def test_metrics_are_restored_even_if_the_hook_fails(ranks2):
    def body() -> list[Any]:
        metric, rank = RetrievalMAP(), torch.distributed.get_rank()
        for batch in list(DataLoader(rows(3), BATCH))[rank::2]:
            take(metric, *batch)
        kept, filled = [*metric.indexes], []

        def hook() -> None:
            metric.compute()
            filled.append(len(metric.indexes))
            raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError), computing(nn.ModuleList([metric])):
            hook()
        alike = [bool((a == b).all()) for a, b in zip(metric.indexes, kept, strict=True)]
        return [*filled, alike, "_sync_dist" in vars(type(metric))]

    assert ranks2(body) == [[2, [True] * 2, False], [1, [True], False]]


class Pieces(Metric):
    """Computes to its states as they are after the processes' were combined."""

    def __init__(self) -> None:
        super().__init__()
        self.add_state("apart", [], dist_reduce_fx=None)
        self.add_state("joined", [], dist_reduce_fx="cat")
        self.add_state("number", torch.tensor(0.0), dist_reduce_fx="sum")

    def update(self, *pieces: torch.Tensor) -> None:
        self.apart += pieces
        self.joined += [piece.flatten().float() for piece in pieces]
        self.number += len(pieces)

    def compute(self) -> Any:
        return self.apart, self.joined, self.number


@pytest.mark.parametrize("holders", [[0, 1, 2], [1, 2], [2]])
def test_list_states_of_any_dtype_are_combined_in_order_by_one_exchange(ranks3, holders):
    def make(rank: int) -> list[torch.Tensor]:
        wide = torch.full((2, 3), 0.1 + rank, dtype=torch.float64, requires_grad=True)
        kinds = [torch.tensor(rank), wide, wide, torch.empty(0, 4), torch.tensor([True, False])]
        return kinds[rank:] + kinds[: 2 * rank] if rank in holders else []

    def body() -> Any:
        rank, calls = torch.distributed.get_rank(), []

        def count(value: Any) -> Any:
            calls.append(value)
            return all_gather_object(value)

        metric, pieces = Pieces(), make(rank)
        metric.update(*pieces)
        with pytest.MonkeyPatch.context() as patch, computing(metric):
            patch.setattr("trainer.metrics.computing.all_gather_object", count)
            apart, joined, number = metric.compute()
        graphs = sum(piece.requires_grad for piece in apart)
        assert graphs == sum(piece.requires_grad for piece in pieces)  # its own, as torchmetrics
        return [piece.detach() for piece in apart], joined.detach(), number, len(calls)

    each = [make(rank) for rank in range(3)]
    rows = [row for rows in itertools.zip_longest(*each) for row in rows if row is not None]
    values = torch.cat([piece.flatten().float() for pieces in each for piece in pieces])
    for apart, joined, number, calls in ranks3(body):
        assert [piece.dtype for piece in apart] == [row.dtype for row in rows]
        assert all(map(torch.equal, apart, rows))
        assert len(apart) == len(rows) == number
        assert torch.equal(joined, values)
        assert calls == 1


def halves(piece: torch.Tensor, group: Any = None) -> list[torch.Tensor]:
    return [each / 2 for each in gather_all_tensors(piece, group)]


class Half(SumMetric):
    """Counts half of each process, by position."""

    def _sync_dist(self, dist_sync_fn: Any = None, process_group: Any = None) -> None:
        super()._sync_dist(halves, process_group)


class Plain(SumMetric):
    def _sync_dist(self, dist_sync_fn: Any = None, process_group: Any = None) -> None:
        super()._sync_dist()


class InGroup(SumMetric):
    """Is reduced among some processes."""

    def _sync_dist(self, dist_sync_fn: Any = None, process_group: Any = None) -> None:
        super()._sync_dist(dist_sync_fn, process_group=self.alone)


@pytest.mark.parametrize(
    ("kind", "value"),
    [(Half, 1.5), (Plain, 3.0), (InGroup, (1.0, 2.0))],
)
@pytest.mark.parametrize("beside", [[], [SumMetric]])
def test_a_class_with_its_own_sync_keeps_its_value(ranks2, kind, value, beside):
    def body() -> float:
        groups = [torch.distributed.new_group([rank]) for rank in range(2)]
        metrics = nn.ModuleList([kind(), *(each() for each in beside)])
        object.__setattr__(metrics[0], "alone", groups[torch.distributed.get_rank()])
        metrics[0].update(1.0 + torch.distributed.get_rank())
        with computing(metrics):
            return metrics[0].compute().item()

    assert ranks2(body) == (list(value) if isinstance(value, tuple) else [value] * 2)


def test_a_compiled_metric_is_computed_over_all_ranks(ranks2):
    def body() -> float:
        metric = torch.compile(SumMetric())  # a wrapper with the attributes of the metric
        metric.update(1.0)
        with computing(nn.ModuleList([metric])):
            return metric.compute().item()

    assert ranks2(body) == [2.0, 2.0]


class OneMeter(TrainModule):
    """Its only metric object takes in zeros in training and tens in validation."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.meter = nn.Linear(1, 1), MeanMetric()

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.meter.update(0.0)
        self.log("train", self.meter)
        return self.net(batch[0]).mean()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.meter.update(10.0)
        self.log("val", self.meter)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def of_both_phases(folder: str, max_steps: int) -> list[tuple[int, str, float]]:
    train, held_out = (DataLoader(TensorDataset(torch.ones(size, 1))) for size in (5, 3))
    trainer = Trainer(
        cpu=True,
        max_steps=max_steps,
        progress_bar=False,
        val_every="1 steps",
        num_sanity_val_steps=0,
        project_dir=folder,
    )
    trainer.fit(OneMeter(), train, held_out, ckpt_path="auto")
    records = read_metrics(trainer.metrics_path)
    return [(r["step"], name, r[name]) for r in records for name in ("val", "train") if name in r]


def test_one_metric_object_in_training_and_validation(ranks2, tmp_path):
    expected = [*((step, "val", 10.0) for step in (1, 2, 3)), (3, "train", 0.0)]
    assert ranks2(of_both_phases, str(tmp_path / "whole"), 3) == [expected] * 2
    ranks2(of_both_phases, str(tmp_path / "parts"), 2)
    assert ranks2(of_both_phases, str(tmp_path / "parts"), 3) == [expected] * 2


def test_a_rank_without_any_batch_needs_no_hooks_of_a_metric_object(ranks2):
    """They are functions that cannot be sent to it, such as those of DeepSpeed."""

    class Hooked(OneMeter):
        def __init__(self) -> None:
            super().__init__()
            self.meter.register_forward_hook(lambda *_: None)
            self.meter.register_state_dict_post_hook(lambda *_: None)

    def body() -> float:
        trainer = Trainer(cpu=True, progress_bar=False, checkpointing=False)
        (values,) = trainer.validate(Hooked(), DataLoader(TensorDataset(torch.ones(1, 1))))
        return values["val"]

    assert ranks2(body) == [10.0, 10.0]
