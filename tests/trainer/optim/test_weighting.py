"""The factors of the loss and of the gradients; tests/numerics compares whole updates."""

from __future__ import annotations

import torch

from trainer.optim.weighting import LossWeighting, scale_


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
