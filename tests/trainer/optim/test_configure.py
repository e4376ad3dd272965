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


def test_an_optimizer_alone(sgd):
    assert read(sgd) == ([sgd], [])


def test_a_list_of_optimizers(sgd, other):
    assert read([sgd, other]) == ([sgd, other], [])


def test_a_pair(sgd, steps):
    optimizers, (entry,) = read((sgd, steps))
    assert optimizers == [sgd]
    assert entry == SchedulerEntry(scheduler=steps)
    assert (entry.interval, entry.frequency, entry.monitor) == ("epoch", 1, None)


def test_a_pair_whose_scheduler_has_options(sgd, steps):
    _, entries = read((sgd, {"scheduler": steps, "interval": "step"}))
    assert entries == [SchedulerEntry(scheduler=steps, interval="step")]


def test_a_dict(sgd, steps):
    returned = {
        "optimizer": sgd,
        "scheduler": steps,
        "interval": "step",
        "frequency": 3,
        "monitor": "val/loss",
    }
    expected = SchedulerEntry(scheduler=steps, interval="step", frequency=3, monitor="val/loss")
    assert read(returned) == ([sgd], [expected])
    assert read({"optimizer": sgd}) == ([sgd], [])


def test_lightnings_dict_with_a_scheduler_or_its_options(sgd, steps):
    assert read({"optimizer": sgd, "lr_scheduler": steps}) == (
        [sgd],
        [SchedulerEntry(scheduler=steps)],
    )
    nested = {"scheduler": steps, "interval": "step"}
    assert read({"optimizer": sgd, "lr_scheduler": nested, "monitor": "x"}) == (
        [sgd],
        [SchedulerEntry(scheduler=steps, interval="step", monitor="x")],
    )


def test_lightnings_two_lists(sgd, other, steps):
    expected = ([sgd, other], [SchedulerEntry(scheduler=steps, interval="step")])
    options = {"scheduler": steps, "interval": "step"}
    assert read(([sgd, other], [options])) == expected
    assert read([[sgd, other], [options]]) == expected
    assert read(([sgd], [])) == ([sgd], [])


def test_lightnings_tuple_of_dicts(sgd, other, steps):
    optimizers, schedulers = read_optimizers(
        ({"optimizer": sgd, "lr_scheduler": {"scheduler": steps}}, {"optimizer": other})
    )
    assert [entry.optimizer for entry in optimizers] == [sgd, other]
    assert [entry.scheduler for entry in schedulers] == [steps]
    assert len(read_optimizers(({"optimizer": sgd},))[0]) == 1


def test_a_list_of_pairs_and_dicts(sgd, other, steps):
    optimizers, entries = read([{"optimizer": sgd, "scheduler": steps}, other])
    assert optimizers == [sgd, other]
    assert entries == [SchedulerEntry(scheduler=steps)]


@pytest.mark.parametrize("returned", [None, 3, [], "adam", [None], ([], []), ([None], [])])
def test_no_optimizer_is_told_with_what_may_be_returned(returned):
    with pytest.raises(TypeError, match=r"configure_optimizers returned .* Return an optimizer, "):
        read_optimizers(returned)


def test_none_is_called_no_optimizer():
    with pytest.raises(TypeError, match="returned no optimizer"):
        read_optimizers(None)


def test_a_scheduler_in_an_optimizers_place_is_named(steps):
    with pytest.raises(TypeError, match="a scheduler, StepLR, where an optimizer belongs"):
        read_optimizers(steps)
    with pytest.raises(TypeError, match="a scheduler, StepLR, where an optimizer belongs"):
        read_optimizers({"optimizer": steps})


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"shceduler": 1}, r"'shceduler'; .*Did you mean 'scheduler'\?"),
        ({"intervall": "step"}, r"'intervall'; .*Did you mean 'interval'\?"),
        ({"interval": "step"}, "'interval' but no 'scheduler'"),
        ({"lr_scheduler": {"interval": "step"}}, "'interval' but no 'scheduler'"),
        ({"lr_scheduler": {}}, "a dict but no 'scheduler'"),
    ],
)
def test_wrong_keys_are_named_with_the_nearest(sgd, wrong, message):
    with pytest.raises(ValueError, match=message):
        read_optimizers({"optimizer": sgd, **wrong})


def test_a_wrong_key_among_a_schedulers_options_is_named(sgd, steps):
    wrong = {"scheduler": steps, "optimizer": sgd}
    with pytest.raises(ValueError, match="'optimizer'; it must be one of 'frequency'"):
        read_optimizers({"optimizer": sgd, "lr_scheduler": wrong})


def test_a_dict_without_its_optimizer_is_refused(steps):
    with pytest.raises(ValueError, match="a dict without 'optimizer'"):
        read_optimizers({"scheduler": steps})


def test_a_scheduler_given_twice_is_refused(sgd, steps):
    with pytest.raises(ValueError, match="not as both"):
        read_optimizers({"optimizer": sgd, "scheduler": steps, "lr_scheduler": steps})


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"interval": "steps"}, ValueError, r"interval is 'steps'; .*Did you mean 'step'\?"),
        ({"frequency": 0}, ValueError, "frequency is 0; it must be an int, 1 or more"),
        ({"frequency": 1.5}, ValueError, "frequency is 1.5; it must be an int"),
        ({"scheduler": "cosine"}, TypeError, "scheduler 'cosine' of type str"),
    ],
)
def test_options_that_could_never_tick_are_refused(steps, options, error, message):
    with pytest.raises(error, match=message):
        SchedulerEntry(**{"scheduler": steps, **options})


def test_a_plateau_without_a_metric_is_refused(sgd):
    with pytest.raises(ValueError, match="ReduceLROnPlateau needs a metric to monitor"):
        read_optimizers((sgd, ReduceLROnPlateau(sgd)))


def test_a_tick_advances_once_without_a_warning(sgd, steps):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        SchedulerEntry(scheduler=steps).tick({})  # the first update may have been skipped
    assert sgd.param_groups[0]["lr"] == 0.5


def test_a_plateau_is_given_its_metric(sgd):
    plateau = ReduceLROnPlateau(sgd, factor=0.1, patience=0)
    entry = SchedulerEntry(scheduler=plateau, monitor="val/loss")
    for loss in (1.0, 2.0):
        entry.tick({"val/loss": loss})
    assert sgd.param_groups[0]["lr"] == pytest.approx(0.1)


def test_a_metric_that_was_not_logged_is_named_with_those_that_were(sgd):
    entry = SchedulerEntry(scheduler=ReduceLROnPlateau(sgd), monitor="val/lss")
    with pytest.raises(ValueError, match=r"'val/lss'; .*'train/loss', 'val/loss'.*'val/loss'\?"):
        entry.tick({"val/loss": 1.0, "train/loss": 2.0})


def test_what_is_an_optimizers_own(sgd, steps):
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
        ({"max_grad_nrom": 1.0}, ValueError, r"'max_grad_nrom'; .*Did you mean 'max_grad_norm'\?"),
        ({"max_grad_norm": 0}, ValueError, "max_grad_norm is 0; it must be above 0"),
        ({"max_grad_value": "1"}, TypeError, "max_grad_value is '1'; it must be a number"),
    ],
)
def test_an_optimizers_own_is_checked(sgd, own, error, message):
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
