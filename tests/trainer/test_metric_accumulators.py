"""What an epoch's metrics have taken in goes through a checkpoint, whole or from several ranks."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import nn
from torchmetrics import CatMetric, MeanMetric, SumMetric

from trainer.checkpoint.serialization import load_tree, save_tree
from trainer.metrics import TRAIN_STEP, MetricStore
from trainer.metrics.accumulators import MetricAccumulators, metric_states, put_metrics_back

CPU = torch.device("cpu")
KINDS = ("mean", "sum", "min", "max")


class Module(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.total = SumMetric()
        self.mean = MeanMetric()


def log(store: MetricStore, module: Module, values: list[float]) -> None:
    """Batches of 1, 2, 3 … items, each logging one value."""
    store.scope = TRAIN_STEP
    for items, value in enumerate(values, 1):
        store.begin_batch(items)
        for kind in KINDS:
            store.log(kind, torch.tensor(value), on_step=False, on_epoch=True, reduce=kind)
        module.total.update(value)
        module.mean.update(value, weight=items)
        store.log("object/total", module.total)
        store.log("object/mean", module.mean)


def saved(values: list[float], folder: Any) -> dict[str, Any]:
    """What a process that has logged these values writes, read back."""
    store, module = MetricStore(CPU), Module()
    log(store, module, values)
    save_tree(MetricAccumulators(store, module).state_dict(), folder, "part")
    return load_tree(folder, "part")


def reduced(store: MetricStore) -> dict[str, float]:
    values = {name: float(value) for name, value in store.reduce_epoch(TRAIN_STEP).items()}
    store.reset_objects()
    return values


def test_accumulators_of_one_rank_continue_after_a_resume(tmp_path):
    before, after = [0.5, -1.0, 4.0], [2.0, 8.0]
    whole, module = MetricStore(CPU), Module()
    log(whole, module, before)
    log(whole, module, after)

    resumed, fresh = MetricStore(CPU), Module()
    MetricAccumulators(resumed, fresh).load_state_dicts([saved(before, tmp_path)])
    log(resumed, fresh, after)
    assert reduced(resumed) == reduced(whole)
    assert fresh.total.update_count == 0  # the value was taken, and a new epoch begins


def test_accumulators_of_several_ranks_are_merged_on_one(tmp_path):
    first, second = [0.5, -1.0, 4.0], [3.0, -7.0]
    combined, module = MetricStore(CPU), Module()
    log(combined, module, first)
    log(combined, module, second)

    merged, fresh = MetricStore(CPU), Module()
    MetricAccumulators(merged, fresh).load_state_dicts(
        [saved(first, tmp_path), saved(second, tmp_path)]
    )
    assert (fresh.total.update_count, fresh.mean.update_count) == (5, 5)
    found, expected = reduced(merged), reduced(combined)
    assert found.pop("object/mean") == pytest.approx(expected.pop("object/mean"))
    assert found == expected


@pytest.mark.parametrize("ranks", [1, 2])
def test_an_object_logged_on_steps_alone_is_reset_after_a_resume_too(tmp_path, ranks):
    store, module = MetricStore(CPU), Module()
    store.scope = TRAIN_STEP
    for name in ("total", "mean"):  # the first is not of the last update
        store.begin_window()
        store.begin_batch(1)
        getattr(module, name).update(2.0)
        store.log(name, getattr(module, name), on_step=True, on_epoch=False)
    save_tree(MetricAccumulators(store, module).state_dict(), tmp_path, "part")
    parts = [load_tree(tmp_path, "part") for _ in range(ranks)]

    resumed, fresh = MetricStore(CPU), Module()
    MetricAccumulators(resumed, fresh).load_state_dicts(parts)
    assert [fresh.total.update_count, fresh.mean.update_count] == [ranks, ranks]
    reduced(resumed)
    assert [fresh.total.update_count, fresh.mean.update_count] == [0, 0]
    for part in parts:
        del part["stepwise"]  # as in a checkpoint of an earlier release
    MetricAccumulators(MetricStore(CPU), fresh).load_state_dicts(parts)
    assert fresh.total.update_count == ranks


def test_a_metric_object_outside_the_module_is_warned_of(caplog):
    store = MetricStore(CPU)
    store.scope = TRAIN_STEP
    store.begin_batch(1)
    stranger = SumMetric()
    stranger.update(1.0)
    store.log("stranger", stranger)
    with caplog.at_level(logging.WARNING):
        part = MetricAccumulators(store, Module()).state_dict()
    assert "stranger" in caplog.text
    assert part["epochs"]["train"]["objects"] == {}


def test_put_metrics_back_restores_the_earlier_states():
    class Composed(Module):
        def __init__(self) -> None:
            super().__init__()
            self.values = CatMetric()
            self.doubled = self.total + self.total  # resets what it consists of

    module = Composed()
    weight = torch.ones((), requires_grad=True)
    module.total.update(2.0)
    module.values.update(3.0 * weight)  # which keeps the graph
    before = metric_states(module)
    module.total.update(4.0)
    module.values.update(5.0)
    put_metrics_back(before)
    assert (module.total.compute(), module.total.update_count) == (2.0, 1)
    assert (module.values.compute().item(), module.values.update_count) == (3.0, 1)
    module.values.update(7.0)
    put_metrics_back(before)  # not changed since by what came after it
    assert module.values.compute().item() == 3.0
