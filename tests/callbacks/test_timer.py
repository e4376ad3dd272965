from __future__ import annotations

from datetime import timedelta

import pytest

from callbacks import Timer
from tests.helpers.line import Line, loader
from tests.numerics.running import quiet_trainer


class Clock:
    """A clock that the test moves."""

    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr("time.monotonic", clock)
    return clock


class Slow(Line):
    """Each batch takes a second to train, 10 to validate, 100 to test, 1000 to predict."""

    def __init__(self, clock):
        super().__init__()
        self.clock = clock

    def training_step(self, batch, batch_idx):
        self.clock.now += 1.0
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch, batch_idx):
        self.clock.now += 10.0

    def test_step(self, batch, batch_idx):
        self.clock.now += 100.0

    def predict_step(self, batch, batch_idx):
        self.clock.now += 1000.0
        return batch[0]


def test_each_stage_has_its_time(clock):
    timer = Timer()
    trainer = quiet_trainer(max_epochs=2, callbacks=timer, num_sanity_val_steps=1)
    trainer.fit(Slow(clock), loader(6), loader(4))
    assert timer.time_elapsed("validate") == 2 * 2 * 10.0
    assert timer.time_elapsed("sanity_check") == 10.0
    assert timer.time_elapsed() == 10.0 + 2 * (3 * 1.0 + 2 * 10.0)
    trainer.test(Slow(clock), loader(2))
    trainer.predict(Slow(clock), loader(4))
    clock.now += 5.0  # nothing runs
    assert timer.time_elapsed("test") == 100.0
    assert timer.time_elapsed("predict") == 2000.0
    assert timer.time_elapsed("train") == 10.0 + 2 * (3 * 1.0 + 2 * 10.0)
    assert timer.time_remaining() is None


def test_time_goes_on_between_boundaries(clock):
    seen = []

    class Looking(Slow):
        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            seen.append((timer.time_elapsed(), timer.time_remaining()))
            return loss

    timer = Timer("5 seconds", verbose=False)
    quiet_trainer(max_epochs=1, gradient_accumulation_steps=2, callbacks=timer).fit(
        Looking(clock), loader(12)
    )
    assert seen == [(1.0, 4.0), (2.0, 3.0), (3.0, 2.0), (4.0, 1.0), (5.0, 0.0), (6.0, 0.0)]


@pytest.mark.parametrize(
    ("duration", "options", "steps"),
    [
        ("4 seconds", {}, 4),
        ("3.5 seconds", {}, 4),
        (timedelta(seconds=7), {}, 7),
        ({"seconds": 5}, {}, 5),
        ("00:00:00:04", {"interval": "epoch"}, 6),
        ("6 seconds", {"interval": "epoch"}, 6),
        ("1 minute", {}, 12),
    ],
)
def test_the_run_stops_when_the_time_is_over(clock, capsys, duration, options, steps):
    trainer = quiet_trainer(max_epochs=4, callbacks=Timer(duration, **options))
    trainer.fit(Slow(clock), loader(6))
    assert trainer.global_step == steps
    assert capsys.readouterr().out.count("was reached") == (steps < 12)


def test_a_minimum_holds_and_the_message_comes_once(clock, capsys):
    trainer = quiet_trainer(max_epochs=4, min_steps=8, callbacks=Timer("2 seconds"))
    trainer.fit(Slow(clock), loader(6))
    assert trainer.global_step == 8
    assert capsys.readouterr().out.count("Timer: the time limit of 0:00:02 was reached.") == 1


def test_a_resumed_run_has_the_rest_of_the_time(clock):
    options = {"checkpointing": True, "max_epochs": 9}
    quiet_trainer(**options | {"max_steps": 4}, callbacks=Timer("20 seconds")).fit(
        Slow(clock), loader(6), loader(2)
    )
    clock.now += 500.0  # between the two starts
    timer = Timer("17 seconds")
    trainer = quiet_trainer(**options, callbacks=timer)
    trainer.fit(Slow(clock), loader(6), loader(2), ckpt_path="auto")
    # 3 updates, a validation and an update; then 2 updates and the validation that is due.
    assert trainer.global_step == 6
    assert timer.time_elapsed("validate") == 20.0
    assert timer.time_elapsed() == 6 + 20.0


def test_a_new_run_starts_from_zero(clock):
    timer = Timer("4 seconds", verbose=False)
    for number in (1, 2):
        trainer = quiet_trainer(max_epochs=9, callbacks=timer, project_dir=f"run{number}")
        trainer.fit(Slow(clock), loader(6), loader(2))
        assert trainer.global_step == 3
        assert (timer.time_elapsed(), timer.time_elapsed("validate")) == (13.0, 10.0)


def test_an_error_stops_the_clocks(clock):
    class Failing(Slow):
        def validation_step(self, batch, batch_idx):
            super().validation_step(batch, batch_idx)
            raise ZeroDivisionError

    timer = Timer()
    with pytest.raises(ZeroDivisionError):
        quiet_trainer(max_epochs=1, callbacks=timer).fit(Failing(clock), loader(2), loader(2))
    clock.now += 50.0
    assert (timer.time_elapsed("train"), timer.time_elapsed("validate")) == (11.0, 10.0)


def time_out(rank):
    import time

    from trainer import PartialState

    timer = Timer("100 seconds", verbose=False)
    trainer = quiet_trainer(max_epochs=4, callbacks=timer)
    here = PartialState(cpu=True).process_index == rank

    class Jumping(Line):
        def training_step(self, batch, batch_idx):
            if here and self.global_step == 3:
                self.trainer._run.started -= 200.0
                assert time.monotonic() > 0
            return super().training_step(batch, batch_idx)

    trainer.fit(Jumping(), loader(20))
    return trainer.global_step


def test_the_clock_of_rank_0_decides_for_all(ranks2):
    assert ranks2(time_out, 0, timeout=60) == [4, 4]
    assert ranks2(time_out, 1, timeout=60) == [20, 20]


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        (("5 steps",), ValueError, "duration is '5 steps'"),
        (("soon",), ValueError, "duration is 'soon'; give '30 minutes'"),
        ((timedelta(0),), ValueError, "above zero"),
        (({"hours": float("inf")},), ValueError, "duration is {'hours': inf}; give '30 minutes'"),
        ((12,), TypeError, "duration is 12 of type int"),
        (
            ("1 hour", "epochs"),
            ValueError,
            "interval is 'epochs'. .* It must be one of 'epoch', 'step'",
        ),
    ],
)
def test_invalid_arguments_are_refused(arguments, error, text):
    with pytest.raises(error, match=text):
        Timer(*arguments)


def test_an_unknown_stage_is_refused():
    with pytest.raises(ValueError, match=r"stage is 'fit'; it must be one of 'predict'"):
        Timer().time_elapsed("fit")
