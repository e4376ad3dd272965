"""What `configure_optimizers` may return, and what it is told when it returns something else."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch.optim.lr_scheduler import ReduceLROnPlateau, StepLR

from trainer.optim.configure import (
    OptimizerEntry,
    SchedulerEntry,
    names_of,
    read_optimizers,
)


def read(returned):
    """The optimizers without what is their own, and the schedulers."""
    entries, schedulers = read_optimizers(returned)
    return [entry.optimizer for entry in entries], schedulers


@pytest.fixture
def sgd():
    return torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1.0)


@pytest.fixture
def other():
    return torch.optim.Adam([torch.nn.Parameter(torch.ones(1))])


@pytest.fixture
def steps(sgd):
    return StepLR(sgd, 1, gamma=0.5)


STEPWISE = {"interval": "step"}
ACCEPTED = {  # what is returned, the optimizers, and the fields of the schedule if there is one
    "an optimizer": lambda sgd, other, steps: (sgd, [sgd], None),
    "a list": lambda sgd, other, steps: ([sgd, other], [sgd, other], None),
    "a dict": lambda sgd, other, steps: ({"optimizer": sgd}, [sgd], None),
    "a pair": lambda sgd, other, steps: ((sgd, steps), [sgd], {}),
    "a pair with options": lambda sgd, other, steps: (
        (sgd, {"scheduler": steps, **STEPWISE}),
        [sgd],
        STEPWISE,
    ),
    "a dict with options": lambda sgd, other, steps: (
        {"optimizer": sgd, "scheduler": steps, "frequency": 3, "monitor": "x", **STEPWISE},
        [sgd],
        {"frequency": 3, "monitor": "x", **STEPWISE},
    ),
    "a list of dicts": lambda sgd, other, steps: (
        [{"optimizer": sgd, "scheduler": steps}, other],
        [sgd, other],
        {},
    ),
    "Lightning's dict": lambda sgd, other, steps: (
        {"optimizer": sgd, "lr_scheduler": steps},
        [sgd],
        {},
    ),
    "Lightning's nested dict": lambda sgd, other, steps: (
        {"optimizer": sgd, "lr_scheduler": {"scheduler": steps, **STEPWISE}, "monitor": "x"},
        [sgd],
        {"monitor": "x", **STEPWISE},
    ),
    "Lightning's two lists": lambda sgd, other, steps: (
        ([sgd, other], [{"scheduler": steps, **STEPWISE}]),
        [sgd, other],
        STEPWISE,
    ),
    "two lists in a list": lambda sgd, other, steps: ([[sgd], [steps]], [sgd], {}),
    "no schedule in the second": lambda sgd, other, steps: (([sgd], []), [sgd], None),
    "Lightning's tuple of dicts": lambda sgd, other, steps: (
        ({"optimizer": sgd, "lr_scheduler": {"scheduler": steps}}, {"optimizer": other}),
        [sgd, other],
        {},
    ),
    "a tuple of one dict": lambda sgd, other, steps: (({"optimizer": sgd},), [sgd], None),
}


@pytest.mark.parametrize("name", ACCEPTED)
def test_what_may_be_returned(sgd, other, steps, name):
    returned, optimizers, schedule = ACCEPTED[name](sgd, other, steps)
    expected = [] if schedule is None else [SchedulerEntry(scheduler=steps, **schedule)]
    assert read(returned) == (optimizers, expected)


def test_a_schedule_ticks_each_epoch_by_default(steps):
    entry = SchedulerEntry(scheduler=steps)
    assert (entry.interval, entry.frequency, entry.monitor) == ("epoch", 1, None)


@pytest.mark.parametrize("returned", [None, 3, [], [None], ([], [])])
def test_no_optimizer_is_refused_with_what_may_be_returned(returned):
    with pytest.raises(TypeError, match=r"configure_optimizers returned .* Return an optimizer, "):
        read_optimizers(returned)


def test_a_scheduler_in_an_optimizers_place_is_named(steps):
    with pytest.raises(TypeError, match="a scheduler, StepLR, where an optimizer belongs"):
        read_optimizers(steps)
    with pytest.raises(TypeError, match="a scheduler, StepLR, where an optimizer belongs"):
        read_optimizers({"optimizer": steps})


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"shceduler": 1}, r"'shceduler'.* Did you mean 'scheduler'\?"),
        ({"intervall": "step"}, r"'intervall'.* Did you mean 'interval'\?"),
        ({"interval": "step"}, "'interval' but no 'scheduler'"),
        ({"lr_scheduler": {"interval": "step"}}, "'interval' but no 'scheduler'"),
        ({"lr_scheduler": {}}, "a dict but no 'scheduler'"),
        ({"scheduler": 1, "lr_scheduler": 1}, "not both"),
        ({"lr_scheduler": {"scheduler": 1, "optimizer": 1}}, "'optimizer'; it must be one of"),
        ({"max_grad_nrom": 1.0}, r"'max_grad_nrom'.* Did you mean 'max_grad_norm'\?"),
    ],
)
def test_wrong_keys_are_named_with_the_nearest(sgd, wrong, message):
    with pytest.raises(ValueError, match=message):
        read_optimizers({"optimizer": sgd, **wrong})


def test_a_dict_without_its_optimizer_is_refused(steps):
    with pytest.raises(ValueError, match="a dict without 'optimizer'"):
        read_optimizers({"scheduler": steps})


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"interval": "steps"}, ValueError, r"interval is 'steps'.* Did you mean 'step'\?"),
        ({"frequency": 0}, ValueError, "frequency is 0; it must be a whole number of at least 1"),
        ({"frequency": 1.5}, ValueError, "frequency is 1.5; it must be a whole number"),
        ({"scheduler": "cosine"}, TypeError, "scheduler 'cosine' of type str"),
    ],
)
def test_invalid_options_of_a_schedule_are_refused(steps, options, error, message):
    with pytest.raises(error, match=message):
        SchedulerEntry(**{"scheduler": steps, **options})


def test_a_plateau_without_a_metric_is_refused(sgd):
    with pytest.raises(ValueError, match="ReduceLROnPlateau needs a metric to monitor"):
        read_optimizers((sgd, ReduceLROnPlateau(sgd)))


def test_a_tick_advances_once_without_a_warning(sgd, steps):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        SchedulerEntry(scheduler=steps).step({})  # the first update may have been skipped
    assert sgd.param_groups[0]["lr"] == 0.5


def test_a_plateau_is_given_its_metric(sgd):
    plateau = ReduceLROnPlateau(sgd, factor=0.1, patience=0)
    entry = SchedulerEntry(scheduler=plateau, monitor="val/loss")
    for loss in (1.0, 2.0):
        entry.step({"val/loss": loss})
    assert sgd.param_groups[0]["lr"] == pytest.approx(0.1)


def test_a_metric_that_was_not_logged_is_named_with_those_that_were(sgd):
    entry = SchedulerEntry(scheduler=ReduceLROnPlateau(sgd), monitor="val/lss")
    with pytest.raises(
        ValueError, match=r"'val/lss'.* mean 'val/loss'\?.* 'train/loss', 'val/loss'"
    ):
        entry.step({"val/loss": 1.0, "train/loss": 2.0})


def test_options_of_one_optimizer(sgd, steps):
    own = {"name": "body", "max_grad_norm": 1.0, "max_grad_value": 0.5}
    (entry,), (schedule,) = read_optimizers({"optimizer": sgd, "scheduler": steps, **own})
    assert entry == OptimizerEntry(optimizer=sgd, **own)
    assert schedule == SchedulerEntry(scheduler=steps)  # the name is not the schedule's
    named = {"scheduler": steps, "name": "rate"}
    (entry,), (schedule,) = read_optimizers({"optimizer": sgd, "lr_scheduler": named, **own})
    assert (entry.name, schedule.name) == ("body", "rate")


@pytest.mark.parametrize(
    ("own", "error", "message"),
    [
        ({"max_grad_norm": 0}, ValueError, "max_grad_norm is 0; it must be above 0"),
        ({"max_grad_value": "1"}, TypeError, "max_grad_value is '1'; it must be a number"),
    ],
)
def test_options_of_one_optimizer_are_checked(sgd, own, error, message):
    with pytest.raises(error, match=message):
        read_optimizers({"optimizer": sgd, **own})


def test_names_are_those_given_or_the_classes_numbered(sgd, other):
    def names(*given):
        entries = zip((sgd, other, sgd, sgd), given, strict=True)
        return names_of([OptimizerEntry(optimizer=each, name=name) for each, name in entries])

    assert names(None, None, None, None) == ["SGD", "Adam", "SGD-1", "SGD-2"]
    assert names("a", None, "b", None) == ["a", "Adam", "b", "SGD"]
    assert names(None, "SGD", None, "SGD-2") == ["SGD-1", "SGD", "SGD-3", "SGD-2"]
    with pytest.raises(ValueError, match="two optimizers with the name 'a'"):
        names("a", None, "a", None)
