import math

import pytest

from callbacks import EarlyStopping, ModelCheckpoint, Monitor, SpikeDetection
from tests.helpers.stand_in import TrainerStandIn


@pytest.mark.parametrize(
    ("mode", "value", "than", "min_delta", "better"),
    [
        ("min", 1.0, 2.0, 0.0, True),
        ("max", 1.0, 2.0, 0.0, False),
        ("min", 1.0, 1.0, 0.0, False),
        ("min", 1.0, 1.5, 0.5, False),
        ("min", 0.75, 1.5, 0.5, True),
        ("max", 1.5, 1.0, 0.5, False),
        ("max", 1.75, 1.0, 0.5, True),
        ("min", math.nan, math.inf, 0.0, False),
        ("max", 0.0, math.nan, 0.0, True),
        ("min", -math.inf, 0.0, 0.0, True),
    ],
)
def test_is_better(mode, value, than, min_delta, better):
    assert Monitor("loss", mode).is_better(value, than, min_delta) is better


@pytest.mark.parametrize(("name", "mode"), [("loss", "minimum"), ("loss", ""), ("", "min")])
def test_wrong_arguments_are_refused(name, mode):
    with pytest.raises(ValueError, match="must"):
        Monitor(name, mode)


@pytest.mark.parametrize("watcher", [EarlyStopping, SpikeDetection])
def test_watchers_of_different_metrics_have_different_keys(watcher):
    watched = [("loss", "min"), ("loss", "max"), ("accuracy", "max")]
    assert len({watcher(name, mode=mode).state_key for name, mode in watched}) == 3


@pytest.mark.parametrize("watcher", [ModelCheckpoint, EarlyStopping, SpikeDetection])
def test_a_monitor_that_is_no_name_is_refused(watcher):
    with pytest.raises(ValueError, match="monitor is 3; it must be the name of a logged metric"):
        watcher(monitor=3)


def test_only_a_fresh_value_is_read():
    trainer, monitor = TrainerStandIn(), Monitor("loss", "min")
    trainer.update(other=1.0)
    assert monitor.read(trainer) is None
    trainer.update(loss=0.5)
    assert monitor.read(trainer) == 0.5
    trainer.update(other=2.0)
    assert monitor.read(trainer) is None


def test_a_metric_that_was_never_logged_is_an_error_once_it_had_its_chance():
    trainer, monitor = TrainerStandIn(steps_per_epoch=2), Monitor("val/los", "min")
    trainer.update(**{"val/loss": 1.0, "accuracy": 0.5})
    assert monitor.read(trainer) is None  # the epoch may still log it
    trainer.update()
    with pytest.raises(ValueError, match=r"'val/los'.*accuracy, val/loss.*mean 'val/loss'"):
        monitor.read(trainer)


def test_a_metric_may_wait_for_the_first_validation():
    trainer = TrainerStandIn(steps_per_epoch=1, has_validation=True)
    trainer.update()
    assert Monitor("val/loss", "min").read(trainer) is None
    trainer.validations = 1
    with pytest.raises(ValueError, match="Logged so far: nothing"):
        Monitor("val/loss", "min").read(trainer)


def test_a_name_with_a_step_and_an_epoch_value_is_answered_with_the_epochs():
    trainer, monitor = TrainerStandIn(steps_per_epoch=1), Monitor("loss", "min")
    trainer.update(loss_step=1.0, loss_epoch=2.0)
    with pytest.raises(ValueError, match=r"Did you mean 'loss_epoch'"):
        monitor.read(trainer)


def test_an_epoch_value_that_was_not_asked_for_is_answered_with_how_to_log_it():
    trainer, monitor = TrainerStandIn(steps_per_epoch=1), Monitor("loss_epoch", "min")
    trainer.update(loss=1.0)
    with pytest.raises(ValueError, match=r"mean 'loss'\? The suffix _epoch needs.*on_epoch=True"):
        monitor.read(trainer)
