"""What is kept of logged values: numbers of the host as numbers, with torch's rules."""

import math
from itertools import permutations

import pytest
import torch

from trainer.metrics import TRAIN_STEP, Cell, MetricStore
from trainer.metrics.cells import EMPTY, Scope


@pytest.mark.parametrize("kind", ["min", "max"])
@pytest.mark.parametrize("values", list(permutations([1.0, math.nan, 2.0])))
def test_nan_is_the_min_and_max_of_numbers_and_tensors(kind, values):
    numbers, tensors = Cell(kind, EMPTY[kind]), Cell(kind, EMPTY[kind])
    for value in values:
        numbers.add(value, 1.0)
        tensors.add(torch.tensor(value, dtype=torch.float64), 1.0)
    assert math.isnan(numbers.total)
    assert math.isnan(tensors.total)


def store():
    metrics = MetricStore(torch.device("cpu"))
    metrics.scope = TRAIN_STEP
    return metrics


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.bool]
)
@pytest.mark.parametrize("kind", ["mean", "sum", "min", "max"])
def test_values_on_the_host_add_up_as_tensors_of_float64_do(dtype, kind):
    values = [torch.tensor(value).to(dtype) for value in (0.1, 3.7, -2.3)]
    metrics, cell = store(), Cell(kind, EMPTY[kind])
    for weight, value in enumerate(values, 1):
        metrics.log("value", value, reduce=kind, batch_size=weight)
        cell.add(value.double(), float(weight))
    total = cell.total / cell.weight if kind == "mean" else cell.total
    (found,) = metrics.reduce_step().values()
    assert found == total.item()


def test_a_logged_tensor_may_change_afterwards():
    metrics, value = store(), torch.ones(1, dtype=torch.float64)
    metrics.log("value", value, prog_bar=True)
    value.fill_(7.0)
    assert metrics.reduce_step() == metrics.progress_values() == {"value": 1.0}


def test_a_complex_value_is_refused():
    with pytest.raises(TypeError, match="log a number"):
        store().log("value", torch.tensor(1 + 2j))


def test_metrics_are_logged_again_after_a_forgotten_phase():
    metrics = MetricStore(torch.device("cpu"))
    metrics.scope = Scope("validation", False)
    for value in (1.0, 3.0):
        metrics.begin_batch(1)
        metrics.log("v", value)
        if value == 1.0:
            metrics.forget("validation")
    assert metrics.reduce_epoch(metrics.scope) == {"v": 3.0}
