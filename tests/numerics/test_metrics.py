"""Evaluation is exact: the same metrics on any number of processes (P5).

The references are computed from the whole dataset at once.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset
from torchmetrics import MeanMetric
from torchmetrics.classification import MulticlassAccuracy

from callbacks import Callback, EarlyStopping
from tests.numerics.running import on_processes, quiet_trainer
from trackers import read_metrics
from trainer import Trainer, TrainModule
from trainer.metrics import TRAIN_STEP, MetricStore

CLASSES = 3
WORLDS = (1, 2, 3)
every_world = pytest.mark.parametrize("world", WORLDS)


def numbers(samples: int, seed: int = 0) -> TensorDataset:
    """Values far enough apart that a mean of means is another number, and their classes."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(samples, CLASSES, generator=generator, dtype=torch.float64).exp() * 10
    return TensorDataset(values, torch.randint(CLASSES, (samples,), generator=generator))


class Measuring(TrainModule):
    """Logs in all ways what the samples themselves say; there is nothing to learn."""

    def __init__(self, objects: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros((), dtype=torch.float64))
        self.objects = objects
        self.accuracy = MulticlassAccuracy(CLASSES, average="micro")
        self.average = MeanMetric()

    def measure(self, batch: Any) -> None:
        values, labels = batch
        self.log("mean", values[:, 0].mean())
        self.log("sum", values[:, 0].sum(), reduce="sum")
        self.log("min", values.min(), reduce="min")
        self.log("max", values.max(), reduce="max")
        self.log("number", float(len(labels)))
        self.log("classes", (labels == 0).sum(), reduce="sum")
        present = labels == 1
        self.log("of_class", values[present, 0].mean(), batch_size=int(present.sum()))
        if self.objects:
            self.accuracy.update(values, labels)
            self.average.update(values[:, 0])
            self.log("accuracy", self.accuracy)
            self.log_dict({"average": self.average})

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.measure(batch)

    def test_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.measure(batch)

    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Tensor:
        return batch[0][:, 0]

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return (self.weight * batch[0]).mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def expected(data: TensorDataset, batch_size: int, *, objects: bool = False) -> dict[str, float]:
    """What `Measuring.measure` is worth on the whole dataset."""
    values, labels = data.tensors
    sizes = [len(part) for part in values.split(batch_size)]
    metrics = {
        "mean": values[:, 0].mean(),
        "sum": values[:, 0].sum(),
        "min": values.min(),
        "max": values.max(),
        "number": sum(size * size for size in sizes) / len(labels),
        "classes": (labels == 0).sum(),
    }
    if (labels == 1).any():  # a mean over nothing has no value
        metrics["of_class"] = values[labels == 1, 0].mean()
    if objects:
        metrics["accuracy"] = (values.argmax(-1) == labels).double().mean()
        metrics["average"] = values[:, 0].mean()
    return {name: float(value) for name, value in metrics.items()}


def assert_metrics(actual: dict[str, float], wanted: dict[str, float]) -> None:
    assert actual.keys() == wanted.keys()
    objects = {"accuracy", "average"} & wanted.keys()  # torchmetrics computes in float32
    for names, tolerance in ((wanted.keys() - objects, 1e-12), (objects, 1e-6)):
        part = {name: wanted[name] for name in names}
        assert {name: actual[name] for name in names} == pytest.approx(part, rel=tolerance)


def evaluations(stage: str, cases: list[tuple[int, int]], objects: bool) -> list[Any]:
    """The metrics of datasets of (samples, batch size), evaluated on this process."""
    evaluate = getattr(quiet_trainer(), stage)
    return [
        evaluate(Measuring(objects), DataLoader(numbers(samples), batch_size=size))
        for samples, size in cases
    ]


@every_world
@pytest.mark.parametrize("stage", ["validate", "test"])
@pytest.mark.parametrize("objects", [False, True], ids=["values", "torchmetrics"])
def test_evaluation_of_any_dataset_size(ranks, world, stage, objects):
    # Among them are fewer batches than processes.
    sizes = [1, 2, 5] if stage == "validate" else [2]
    cases = [(samples, size) for samples in range(1, 14) for size in sizes]
    for results in on_processes(ranks, world, evaluations, stage, cases, objects):
        for (samples, size), result in zip(cases, results, strict=True):
            assert len(result) == 1
            assert_metrics(result[0], expected(numbers(samples), size, objects=objects))


def fitted_with_objects(samples: int) -> dict[str, float]:
    class Averaging(TrainModule):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(()))
            self.average, self.loss = MeanMetric(), MeanMetric()

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            self.average.update(batch[0].sum(-1))
            self.log("average", self.average, on_step=True, on_epoch=True)
            loss = (self.weight * batch[0]).mean()
            self.loss(loss, weight=len(batch[0]))  # which keeps the graph
            self.log("loss", self.loss, on_step=False, on_epoch=True)
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.0)

    trainer = quiet_trainer(max_epochs=1, log_every=1)
    trainer.fit(Averaging(), DataLoader(numbers(samples), batch_size=2))
    return dict(trainer.callback_metrics)


@every_world
@pytest.mark.parametrize("samples", [2, 13])
def test_metric_objects_in_training_where_a_rank_has_no_last_batch_or_none(ranks, world, samples):
    """torchmetrics keeps what it computed for the step until the next update."""
    values = numbers(samples).tensors[0]
    mean = values.sum(-1).mean().item()
    wanted = {"average_step": mean, "average_epoch": mean, "loss": values.mean().item()}
    for actual in on_processes(ranks, world, fitted_with_objects, samples):
        assert actual == pytest.approx(wanted, rel=1e-6)


def several_loaders() -> list[dict[str, float]]:
    loaders = [
        DataLoader(numbers(samples, samples), batch_size=size)
        for samples, size in [(7, 2), (1, 5), (13, 3)]
    ]
    return quiet_trainer().validate(Measuring(), loaders)


@every_world
def test_each_of_several_loaders_has_its_own_metrics(ranks, world):
    for results in on_processes(ranks, world, several_loaders):
        assert len(results) == 3
        for index, (samples, size) in enumerate([(7, 2), (1, 5), (13, 3)]):
            wanted = expected(numbers(samples, samples), size)
            suffixed = {f"{name}/dataloader_idx_{index}": wanted[name] for name in wanted}
            assert_metrics(results[index], suffixed)


def repeated_evaluations() -> list[dict[str, float]]:
    """In a fit, after every epoch, with metric objects that are used again and again."""

    class Keeping(Measuring):
        def on_validation_end(self) -> None:
            if not self.trainer.sanity_checking:
                kept.append(dict(self.trainer.callback_metrics))

    kept: list[dict[str, float]] = []
    quiet_trainer(max_epochs=3, num_sanity_val_steps=2).fit(
        Keeping(objects=True),
        DataLoader(numbers(5), batch_size=2),
        DataLoader(numbers(7), batch_size=4),
    )
    return kept


@every_world
def test_each_validation_of_a_fit_starts_anew(ranks, world):
    # 7 samples are 2 batches: with 3 processes one never sees a metric object.
    for kept in on_processes(ranks, world, repeated_evaluations):
        assert len(kept) == 3
        for metrics in kept:
            assert_metrics(metrics, expected(numbers(7), 4, objects=True))


class LoggingAround(Measuring):
    """Logs before and behind the batches of a validation; a batch of one sample has no items."""

    def count_items(self, batch: Any) -> int:
        return len(batch[0]) - 1

    def on_validation_start(self) -> None:
        self.log("start", self.global_rank + 1.0)

    def on_validation_epoch_start(self) -> None:
        self.log("epoch_start", self.global_rank + 1.0)

    def on_validation_epoch_end(self) -> None:
        self.log("epoch_end", self.global_rank + 1.0)


def logged_around() -> dict[str, float]:
    trainer, loader = quiet_trainer(max_epochs=1), DataLoader(numbers(7), batch_size=3)
    trainer.fit(LoggingAround(), loader, loader)
    return trainer.callback_metrics


@every_world
def test_values_logged_around_a_validation_have_equal_weights(ranks, world):
    # The last batch of the training is one sample, on one process of several.
    for metrics in on_processes(ranks, world, logged_around):
        for name in ("start", "epoch_start", "epoch_end"):
            assert metrics[name] == pytest.approx((world + 1) / 2)


class LoggingTraining(Measuring):
    """Logs the same values on the step, on the epoch, and on both."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        values = batch[0]
        self.log("step_mean", values[:, 0].mean())
        self.log("step_sum", values[:, 0].sum(), reduce="sum")
        self.log("step_max", values.max(), reduce="max")
        self.log("epoch_mean", values[:, 0].mean(), on_step=False, on_epoch=True)
        self.log("epoch_min", values.min(), on_epoch=True, on_step=False, reduce="min")
        self.log("both", values[:, 0].mean(), on_step=True, on_epoch=True)
        self.accuracy.update(*batch)
        self.log("accuracy", self.accuracy)
        return super().training_step(batch, batch_idx)

    def on_train_epoch_end(self) -> None:
        self.log("epochs", float(self.trainer.current_epoch))


def training_records(samples: int, accumulation: int, project_dir: str) -> None:
    quiet_trainer(
        max_epochs=2, gradient_accumulation_steps=accumulation, project_dir=project_dir
    ).fit(LoggingTraining(), DataLoader(numbers(samples), batch_size=2))


@every_world
@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("samples", [3, 13])
def test_training_metrics_over_the_window_and_the_epoch(
    ranks, tmp_path, world, accumulation, samples
):
    on_processes(ranks, world, training_records, samples, accumulation, str(tmp_path / "run"))
    values, labels = numbers(samples).tensors
    windows = values.split(2 * accumulation * world)
    wanted = [
        {
            "step": 1 + epoch * len(windows) + number,
            "epoch": epoch,
            "step_mean": window[:, 0].mean().item(),
            "step_sum": window[:, 0].sum().item(),
            "step_max": window.max().item(),
            "both_step": window[:, 0].mean().item(),
        }
        for epoch in range(2)
        for number, window in enumerate(windows)
    ]
    ends = [
        {
            "step": len(windows) * (1 + epoch),
            "epoch": epoch,
            "epoch_mean": values[:, 0].mean().item(),
            "epoch_min": values.min().item(),
            "both_epoch": values[:, 0].mean().item(),
            "accuracy": (values.argmax(-1) == labels).float().mean().item(),
            "epochs": float(epoch),
        }
        for epoch in range(2)
    ]
    records = read_metrics(tmp_path / "run" / "metrics.jsonl")
    for record in records:
        del record["time"]
    for actual, kind in ((steps_of(records), wanted), (epochs_of(records), ends)):
        assert len(actual) == len(kind)
        for one, other in zip(actual, kind, strict=True):
            assert one == pytest.approx(other, rel=1e-6 if "accuracy" in other else 1e-12)


def steps_of(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [record for record in records if "step_mean" in record]


def epochs_of(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [record for record in records if "epoch_mean" in record]


def predictions(samples: int, size: int) -> Any:
    return quiet_trainer().predict(
        Measuring(), DataLoader(numbers(samples), batch_size=size, shuffle=False)
    )


@every_world
@pytest.mark.parametrize(("samples", "size"), [(1, 2), (4, 2), (7, 2), (13, 1), (13, 5)])
def test_predictions_keep_the_order_without_duplicates(ranks, world, samples, size):
    first, *others = on_processes(ranks, world, predictions, samples, size)
    wanted = numbers(samples).tensors[0][:, 0]
    assert torch.equal(torch.cat(first), wanted)
    assert [len(batch) for batch in first] == [len(batch) for batch in wanted.split(size)]
    assert others == [None] * (world - 1)


class Spread(Callback):
    """Logs at the ends of epochs what it makes of its own process's samples and of the epoch."""

    def __init__(self) -> None:
        self.rows: list[Tensor] = []
        self.seen: list[float] = []

    def on_validation_batch_end(self, trainer: Any, module: Any, outputs: Any, *batch: Any) -> None:
        self.rows.append(batch[0][0])

    def on_validation_epoch_end(self, trainer: Any, module: Any) -> None:
        self.seen.append(trainer.callback_metrics["mean"])
        rows = torch.cat(self.rows) if self.rows else torch.empty(0, CLASSES)
        module.log("rows", float(len(rows)), reduce="sum")
        module.log("largest", rows.max() if len(rows) else -math.inf, reduce="max")
        module.log("error", 1.0 - float(module.accuracy.compute()))
        self.rows.clear()

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        module.log("epochs", trainer.current_epoch + 1.0)


def logged_by_callbacks(samples: int) -> list[Any]:
    """What is read after each epoch, recorded, returned and monitored."""
    spread, data = Spread(), DataLoader(numbers(samples), batch_size=2)
    stop = EarlyStopping("epochs", mode="min", patience=2)
    trainer = quiet_trainer(callbacks=[spread, stop], max_epochs=9)
    trainer.fit(Measuring(objects=True), data, data)
    names = ("rows", "largest", "error", "epochs")
    latest = {name: trainer.callback_metrics[name] for name in names}
    recorded = [
        (record["epoch"], name, record[name])
        for record in (read_metrics("run/metrics.jsonl") if trainer.global_rank == 0 else ())
        for name in latest
        if name in record
    ]
    (returned,) = trainer.validate(Measuring(objects=True), data)
    return [trainer.current_epoch, latest, recorded, spread.seen, returned]


@every_world
def test_what_callbacks_log_at_the_end_of_an_epoch(ranks, world):
    values, labels = numbers(5).tensors
    wrong = pytest.approx(float((values.argmax(-1) != labels).double().mean()))
    of_epoch = {"rows": 5.0, "largest": float(values.max()), "error": wrong}
    results = on_processes(ranks, world, logged_by_callbacks, 5)
    for rank, (epoch, latest, recorded, seen, returned) in enumerate(results):
        assert epoch == 2  # the third value was not better than the first: stopped
        assert latest == {**of_epoch, "epochs": 3.0}
        assert seen == pytest.approx([float(values[:, 0].mean())] * 4)
        assert {name: returned[name] for name in of_epoch} == of_epoch
        expected = [
            (number, name, value)
            for number in range(3)
            for name, value in {**of_epoch, "epochs": number + 1.0}.items()
        ]
        assert recorded == (expected if rank == 0 else [])


def wide_total() -> float:
    store = MetricStore(torch.device("cpu"), world_size=dist.get_world_size())
    store.scope = TRAIN_STEP
    store.begin_batch(1)
    store.log("n", 2.0**24 + 1, on_step=False, on_epoch=True, reduce="sum")
    return float(store.reduce_epoch(TRAIN_STEP)["n"])


def test_totals_are_summed_in_float64(ranks2):
    assert ranks2(wide_total) == [2.0**25 + 2] * 2


class Statistic(nn.Module):
    """As of normalisation: each process has another one."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("value", torch.zeros(()))


class Buffered(TrainModule):
    def __init__(self) -> None:
        super().__init__()
        self.net, self.statistic = nn.Linear(1, 1), Statistic()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.statistic.value += 1 + dist.get_rank()
        return self.net(batch[0]).mean()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("statistic", self.statistic.value)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def statistic_seen() -> float:
    data = DataLoader(TensorDataset(torch.ones(8, 1)), batch_size=2)
    trainer = quiet_trainer(max_epochs=1)
    trainer.fit(Buffered(), data, data)
    return trainer.callback_metrics["statistic"]


def test_validation_uses_the_buffers_of_rank_0(ranks2):
    assert ranks2(statistic_seen) == [2.0, 2.0]


class Images(Dataset):
    """Sample i is an image of 3 channels with the value i, and i boxes."""

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> Any:
        return torch.full((3, 2, 2), float(index)), {"boxes": torch.zeros(index, 4)}


class OfImages(TrainModule):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(1))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return (self.weight * torch.stack([image[0, 0, 0] for image in batch[0]])).mean()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("mean", self.training_step(batch, batch_idx))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 1.0)


def of_images() -> list[float]:
    data = DataLoader(Images(), 4, collate_fn=lambda samples: tuple(zip(*samples, strict=True)))
    module, options = OfImages(), {"progress_bar": False, "checkpointing": False, "cpu": True}
    before = Trainer(**options).validate(module, data)[0]["mean"]
    Trainer(max_epochs=1, gradient_accumulation_steps=3, **options).fit(module, data)
    return [before, 1 - module.weight.item()]


def test_batches_of_lists_are_weighted_by_their_samples(ranks2, caplog):
    """The usual collate_fn of detection: the mean of 0 to 9, whose batches are of 4, 4 and 2."""
    for found in (of_images(), *ranks2(of_images)):
        assert found == pytest.approx([4.5, 4.5])
    assert not [text for text in caplog.messages if "count_items" in text]


def test_a_batch_of_unsure_size_is_named_once(caplog):
    class Plain(OfImages):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            return (self.weight * batch).mean()

    data = DataLoader(torch.arange(8.0), 4, collate_fn=lambda rows: torch.stack(rows)[None])
    Trainer(max_epochs=2, progress_bar=False, checkpointing=False, cpu=True).fit(Plain(), data)
    (text,) = [text for text in caplog.messages if "count_items" in text]
    assert text.startswith(
        "A batch of 4 samples is counted as 1, the first dimension of its tensors"
    )
