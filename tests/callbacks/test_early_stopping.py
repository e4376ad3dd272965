import json
import math

import pytest

from callbacks import EarlyStopping
from tests.helpers.stand_in import TrainerStandIn


def stopped_after(values, **arguments):
    """How many of the values it takes to stop, and the callback; None if they do not suffice."""
    callback = EarlyStopping("loss", **arguments)
    trainer = TrainerStandIn(callbacks=[callback])
    trainer.start()
    for count, value in enumerate(values, 1):
        trainer.updates([value])
        if trainer.should_stop:
            return count, callback
    return None, callback


@pytest.mark.parametrize(
    ("values", "arguments", "count"),
    [
        ([5, 4, 3, 2, 1], {"patience": 1}, None),
        ([5, 5], {"patience": 1}, 2),
        ([5, 5], {"patience": 0}, 2),
        ([5, 6, 7, 8], {"patience": 3}, 4),
        ([5, 6, 7, 4, 5, 6, 4], {"patience": 3}, 7),
        ([5, None, None, 6, None, 7], {"patience": 2}, 6),
        ([1, 2, 3, 2, 1], {"patience": 2, "mode": "max"}, 5),
        ([5, 4.5, 4.4], {"patience": 2, "min_delta": 1}, 3),
        ([5, 3.5, 2], {"patience": 1, "min_delta": 1}, None),
        ([5, math.nan], {"patience": 9}, 2),
        ([-math.inf], {}, 1),
        ([math.nan, 5, math.nan, math.nan], {"patience": 2, "check_finite": False}, 4),
        ([math.nan, math.nan], {"patience": 2, "check_finite": False}, 2),
        ([5, 4, 3], {"stopping_threshold": 4}, 2),
        ([5, 4, 3], {"stopping_threshold": 4, "mode": "max"}, 1),
        ([5, 9, 9.1], {"divergence_threshold": 9, "patience": 9}, 3),
        ([5, 1, 0.9], {"divergence_threshold": 1, "mode": "max", "patience": 9}, 3),
    ],
)
def test_stops_after(values, arguments, count):
    assert stopped_after(values, **arguments)[0] == count


def test_step_and_reason_of_the_stop():
    _, callback = stopped_after([3.0, None, 2.0, *[None] * 9, 2.5], patience=1)
    assert (callback.stopped_step, callback.stopped_epoch) == (13, 1)
    assert (callback.best_score, callback.wait_count) == (2.0, 1)
    assert callback.reason == (
        "loss has not fallen below its best value, 2, for 1 value; the latest is 2.5"
    )
    _, callback = stopped_after([2.123456, *[7 / 3] * 3])
    assert callback.reason == (
        "loss has not fallen below its best value, 2.123, for 3 values; the latest is 2.333"
    )
    _, callback = stopped_after([0.5, 0.4], patience=1, mode="max")
    assert callback.reason == (
        "loss has not risen above its best value, 0.5, for 1 value; the latest is 0.4"
    )
    _, callback = stopped_after([0.5, 0.6], patience=1, mode="max", min_delta=0.2)
    assert callback.reason == (
        "loss has not risen by more than min_delta=0.2 above its best value, 0.5, for 1 value; "
        "the latest is 0.6"
    )
    _, callback = stopped_after([math.nan])
    assert callback.reason == "loss = nan is not finite"
    assert (callback.best_score, callback.wait_count) == (None, 0)


def test_running_callback_has_no_reason():
    count, callback = stopped_after([3.0, 2.0, 2.0])
    assert count is callback.stopped_step is callback.stopped_epoch is callback.reason is None


@pytest.mark.parametrize("cut", range(1, 8))
def test_resumed_decisions_equal_uninterrupted_ones(cut):
    values = [5, 6, 4, 5, 6, 3.9, 7, 8]
    whole = EarlyStopping("loss", patience=3, min_delta=0.5)
    TrainerStandIn(callbacks=[whole]).updates(values)
    first = EarlyStopping("loss", patience=3, min_delta=0.5)
    TrainerStandIn(callbacks=[first]).updates(values[:cut])
    second = EarlyStopping("loss", patience=3, min_delta=0.5)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    trainer = TrainerStandIn(callbacks=[second], global_step=cut)
    trainer.start()
    trainer.updates(values[cut:])
    assert second.state_dict() == whole.state_dict()
    assert whole.stopped_step == 8


def test_a_new_run_resets_the_state():
    _, callback = stopped_after([1.0, 2.0], patience=1)
    trainer = TrainerStandIn(callbacks=[callback])
    trainer.start()
    trainer.updates([3.0])
    assert not trainer.should_stop
    assert callback.best_score == 3.0


@pytest.mark.parametrize("verbose", [False, True])
def test_prints_why_it_stops_and_improvements_if_asked(verbose):
    callback = EarlyStopping("loss", patience=1, verbose=verbose)
    trainer = TrainerStandIn(callbacks=[callback])
    trainer.updates([3.0, None, 2.5, 2.75, 3.25])  # as with min_steps=5
    improvements = ["Step 1: loss improved to 3.", "Step 3: loss improved to 2.5."]
    *before, last = trainer.accelerator.printed
    assert before == (improvements if verbose else [])
    assert last.startswith(
        "Step 4: EarlyStopping asks to stop: loss has not fallen below its best value, 2.5"
    )
