"""Learning rates that are changed together with their schedules."""

import torch
from torch.optim.lr_scheduler import ConstantLR, SequentialLR, StepLR

from trainer.optim.groups import scale_group


def test_a_list_that_schedules_share_is_scaled_once():
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    parts = [ConstantLR(optimizer, 1.0), StepLR(optimizer, 1, 0.9)]
    schedule = SequentialLR(optimizer, parts, [2])
    assert schedule._last_lr is parts[0]._last_lr  # as torch makes them
    scale_group(optimizer, 0, 0.5, schedulers=[schedule])
    assert optimizer.param_groups[0]["lr"] == 0.05
    assert schedule.get_last_lr() == [0.05]
    assert parts[1].base_lrs == [0.05]
