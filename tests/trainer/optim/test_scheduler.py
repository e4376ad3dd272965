"""The prepared scheduler follows updates, not calls."""

from __future__ import annotations

import pytest
import torch
from torch.optim.lr_scheduler import OneCycleLR, ReduceLROnPlateau, StepLR

from trainer.optim.optimizer import AcceleratedOptimizer
from trainer.optim.scheduler import AcceleratedScheduler
from trainer.precision import Precision
from trainer.state import GradientState, PartialState


@pytest.fixture
def inner():
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1.0)
    optimizer.step()  # a schedule that ticks before any update is torch's warning
    return optimizer


@pytest.fixture
def optimizer(inner):
    return AcceleratedOptimizer(inner, precision=Precision("no", torch.device("cpu")))


def halving(inner, optimizer, **kwargs) -> AcceleratedScheduler:
    return AcceleratedScheduler(StepLR(inner, 1, gamma=0.5), [optimizer], **kwargs)


def pretend(num_processes: int) -> None:
    PartialState(cpu=True).__dict__["num_processes"] = num_processes


def stepped(inner, scheduler) -> AcceleratedScheduler:
    inner.step()
    scheduler.step()
    return scheduler


def test_one_update_on_one_process_is_one_tick(inner, optimizer):
    scheduler = stepped(inner, halving(inner, optimizer))
    assert scheduler.get_last_lr() == [0.5]
    assert inner.param_groups[0]["lr"] == 0.5


@pytest.mark.parametrize(("tick", "rate"), [("process", 1 / 8), ("update", 1 / 2)])
def test_several_processes_tick_as_asked(inner, optimizer, tick, rate):
    pretend(3)
    assert stepped(inner, halving(inner, optimizer, tick=tick)).get_last_lr() == [rate]


def test_an_open_window_is_no_tick(inner, optimizer):
    scheduler = halving(inner, optimizer)
    GradientState().sync_gradients = False
    assert stepped(inner, scheduler).get_last_lr() == [1.0]
    GradientState().sync_gradients = True
    assert stepped(inner, scheduler).get_last_lr() == [0.5]


def test_a_skipped_update_is_no_tick(inner, optimizer):
    other = AcceleratedOptimizer(inner, precision=Precision("no", torch.device("cpu")))
    scheduler = AcceleratedScheduler(StepLR(inner, 1, gamma=0.5), [optimizer, other])
    other.step_was_skipped = True
    assert stepped(inner, scheduler).get_last_lr() == [1.0]


def test_a_scheduler_on_its_own_ticks_at_every_call(inner, optimizer):
    pretend(3)
    GradientState().sync_gradients = False
    optimizer.step_was_skipped = True
    scheduler = halving(inner, optimizer, step_with_optimizer=False)
    assert stepped(inner, scheduler).get_last_lr() == [0.5]


def test_a_schedule_with_an_end_stays_there(inner, optimizer):
    pretend(4)
    reference = OneCycleLR(torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1.0), 2.0, 10)
    for _ in range(9):
        reference.optimizer.step()
        reference.step()
    scheduler = AcceleratedScheduler(OneCycleLR(inner, 2.0, 10), [optimizer])
    for _ in range(5):
        stepped(inner, scheduler)
    assert scheduler.get_last_lr() == reference.get_last_lr()


def test_a_plateau_scheduler_is_given_its_metric(inner, optimizer):
    scheduler = AcceleratedScheduler(ReduceLROnPlateau(inner, factor=0.1, patience=0), [optimizer])
    for loss in (1.0, 2.0):
        scheduler.step(loss)
    assert scheduler.get_last_lr() == [0.1]


def test_a_state_dict_goes_through(inner, optimizer):
    scheduler = stepped(inner, halving(inner, optimizer))
    state = scheduler.state_dict()
    assert state == scheduler.scheduler.state_dict()
    fresh = halving(torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1.0), optimizer)
    fresh.load_state_dict(state)
    assert fresh.get_last_lr() == [0.5]
    assert fresh.scheduler.last_epoch == 1
