"""The prepared scheduler follows updates, not calls."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch.optim.lr_scheduler import OneCycleLR, ReduceLROnPlateau, StepLR

from trainer.configuration import GradientAccumulationPlugin
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


def overflowing() -> tuple[torch.optim.Optimizer, AcceleratedOptimizer]:
    """A new optimizer and the prepared one, whose first update is left out."""
    inner = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1.0)
    precision = Precision("fp16", torch.device("cpu"))
    optimizer = AcceleratedOptimizer(inner, precision=precision)
    precision.scale(inner.param_groups[0]["params"][0].sum() * float("inf")).backward()
    return inner, optimizer


def test_a_skipped_update_is_no_tick(inner, optimizer):
    _, other = overflowing()
    scheduler = AcceleratedScheduler(StepLR(inner, 1, gamma=0.5), [optimizer, other])
    other.step()
    assert stepped(inner, scheduler).get_last_lr() == [1.0]
    other.param_groups[0]["params"][0].grad.fill_(1.0)
    other.step()
    assert stepped(inner, scheduler).get_last_lr() == [0.5]


def test_a_scheduler_on_its_own_ticks_at_every_call(inner, optimizer):
    pretend(3)
    GradientState().sync_gradients = False
    scheduler = halving(inner, optimizer, step_with_optimizer=False)
    assert stepped(inner, scheduler).get_last_lr() == [0.5]


@pytest.mark.parametrize("open_window", [False, True])
def test_a_tick_after_a_skipped_update_does_not_warn(open_window):
    # Torch warns, which is an error here, where its optimizer was not stepped before.
    inner, optimizer = overflowing()
    scheduler = halving(inner, optimizer, step_with_optimizer=False)
    GradientState().sync_gradients = not open_window
    optimizer.step()
    scheduler.step()
    assert optimizer.step_was_skipped is not open_window
    assert scheduler.get_last_lr() == [0.5]


def test_a_schedule_made_from_the_prepared_optimizer_follows_it_too():
    inner, optimizer = overflowing()
    scheduler = AcceleratedScheduler(StepLR(optimizer, 1, gamma=0.5), optimizer)
    optimizer.step()
    scheduler.step()
    assert scheduler.get_last_lr() == [1.0]
    inner.param_groups[0]["params"][0].grad.fill_(1.0)
    optimizer.step()
    scheduler.step()
    assert inner.param_groups[0]["lr"] == 0.5


def test_processes_that_divide_one_batch_tick_once(inner, optimizer):
    pretend(3)
    scheduler = AcceleratedScheduler(StepLR(inner, 1, gamma=0.5), optimizer, True, True)
    assert stepped(inner, scheduler).get_last_lr() == [0.5]


@pytest.mark.parametrize(("adjust", "counted"), [(True, 3), (False, 1)])
def test_calls_that_wait_are_counted_where_asked(inner, optimizer, adjust, counted):
    GradientState(GradientAccumulationPlugin(num_steps=3, adjust_scheduler=adjust))
    scheduler = halving(inner, optimizer)
    GradientState().sync_gradients = False
    for _ in range(2):
        scheduler.step()
    assert scheduler.scheduler._step_count == counted
    assert scheduler.scheduler.last_epoch == 0


class Counter:
    """A scheduler that is not torch's, and does not count."""

    calls = 0

    def step(self):
        self.calls += 1


def test_a_scheduler_that_does_not_count_waits_all_the_same(inner, optimizer):
    scheduler = AcceleratedScheduler(Counter(), optimizer)
    GradientState().sync_gradients = False
    scheduler.step()
    assert scheduler.calls == 0
    GradientState().sync_gradients = True
    scheduler.step()
    assert scheduler.calls == 1


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


def test_a_plateau_scheduler_gets_its_metric_once_on_any_number_of_processes(inner, optimizer):
    pretend(4)
    scheduler = AcceleratedScheduler(ReduceLROnPlateau(inner, factor=0.1, patience=1), [optimizer])
    for loss, bad, rate in ((1.0, 0, 1.0), (2.0, 1, 1.0), (3.0, 0, 0.1)):
        scheduler.step(metrics=loss)
        assert scheduler.num_bad_epochs == bad
        assert scheduler.get_last_lr() == [rate]


def test_other_attributes_are_the_wrapped_ones(inner, optimizer):
    scheduler = halving(inner, optimizer)
    assert scheduler.base_lrs == [1.0]
    with pytest.raises(AttributeError, match="'StepLR' object has no attribute 'nothing'"):
        scheduler.nothing
    with pytest.warns(UserWarning, match="get_last_lr"):  # torch's own advice, from torch itself
        assert scheduler.get_lr() == scheduler.scheduler.get_last_lr()


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda o: pickle.loads(pickle.dumps(o))])
def test_a_copy_ticks_on_its_own(inner, optimizer, duplicate):
    scheduler = AcceleratedScheduler(StepLR(inner, 1, gamma=0.5), optimizer)
    other = duplicate(scheduler)
    GradientState().sync_gradients = False
    other.step()
    assert other.get_last_lr() == [1.0]  # it reads the process's own window
    GradientState().sync_gradients = True
    other.optimizers[0].step()
    other.step()
    assert other.get_last_lr() == [0.5]
    assert other.optimizers[0].param_groups[0]["lr"] == 0.5
    assert scheduler.get_last_lr() == [1.0]


def test_a_state_dict_goes_through(inner, optimizer):
    scheduler = stepped(inner, halving(inner, optimizer))
    state = scheduler.state_dict()
    assert state == scheduler.scheduler.state_dict()
    fresh = halving(torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1.0), optimizer)
    fresh.load_state_dict(state)
    assert fresh.get_last_lr() == [0.5]
    assert fresh.scheduler.last_epoch == 1
