"""The two factors make the update that of the whole batch, whatever it was split into."""

from __future__ import annotations

import pytest
import torch

from trainer.optim.weighting import LossWeighting, scale_


def windowed_gradient(split: list[list[list[float]]], reference: float, *, micro: int) -> float:
    """The gradient of the mean of ``w × x`` at w = 1 for values split as [process][micro-batch]."""
    weighting = LossWeighting(micro_batches=micro, world_size=len(split), reference=reference)
    own = []
    for process in split:
        weight = torch.ones((), dtype=torch.float64, requires_grad=True)
        for values in process:
            if values:
                loss = (weight * torch.tensor(values, dtype=torch.float64)).mean()
                weighting.weigh(loss, len(values)).backward()
        own.append(weight.grad if weight.grad is not None else torch.zeros_like(weight))
    gradient = sum(own) / len(own)  # the average over processes
    factor = weighting.factor(float(sum(len(v) for process in split for v in process)))
    return gradient.item() * (1.0 if factor is None else factor)


SPLITS = [
    [[[1.0, 2.0], [3.0, 4.0]]],
    [[[1.0, 2.0, 3.0], [4.0]]],
    [[[1.0]]],
    [[[1.0, 2.0]], [[3.0, 4.0]]],
    [[[1.0, 2.0], [5.0]], [[3.0], [4.0, 7.0, 9.0]]],
    [[[1.0, 2.0], [3.0, 4.0]], [[5.0, 6.0]]],
    [[[1.0, 2.0]], [[3.0]], [[]]],
]


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("reference", [1.0, 2.0, 3.0])
def test_any_split_gives_the_gradient_of_the_whole(split, reference):
    values = [value for process in split for micro in process for value in micro]
    expected = sum(values) / len(values)
    for micro in (2, 3):
        gradient = windowed_gradient(split, reference, micro=micro)
        assert gradient == pytest.approx(expected, rel=1e-14)


def test_full_windows_of_single_batches_are_not_touched():
    weighting = LossWeighting(micro_batches=1, world_size=2, reference=8.0)
    loss = torch.tensor(0.1)
    assert weighting.weigh(loss, 8) is loss
    assert weighting.factor(16.0) is None


def test_equal_micro_batches_divide_exactly():
    weighting = LossWeighting(micro_batches=3, world_size=1, reference=7.0)
    loss = torch.tensor(0.1, dtype=torch.float64)
    assert weighting.weigh(loss, 7).item() == loss.item() / 3


def test_a_window_without_items_stays_as_it_is():
    weighting = LossWeighting(micro_batches=2, world_size=1, reference=4.0)
    assert weighting.factor(0.0) is None
    assert weighting.factor(torch.tensor(0.0)) == 1.0


def test_a_total_on_the_device_gives_the_same_as_a_number():
    weighting = LossWeighting(micro_batches=2, world_size=2, reference=4.0)
    one, other = torch.tensor([3.0]), torch.tensor([3.0])
    scale_([one], weighting.factor(12.0))
    scale_([None, other], weighting.factor(torch.tensor(12.0, dtype=torch.float64)))
    assert one.tolist() == other.tolist() == [4.0]
    assert other.dtype == torch.float32
