import copy

import pytest

from trackers import NullTracker
from trackers.null import NullObject


def test_null_tracker_takes_everything():
    tracker = NullTracker()
    tracker.start()
    tracker.store_init_configuration({"a": 1})
    tracker.log({"a": 1}, 1, key="value")
    tracker.log({"a": 1})
    tracker.log_images({"a": 1}, 1)
    tracker.log_table("a", columns=[], data=[], step=1)
    for log in (tracker.log_histogram, tracker.log_figure, tracker.log_text):
        log({"a": 1}, 1)
    for log in (tracker.log_artifact, tracker.log_model):
        log("a path", "a name", step=1)
    tracker.resume("an id", 1)
    tracker.begin_anew()
    assert tracker.run_id is None
    tracker.finish()
    assert tracker.name == "none"
    assert NullTracker("wandb").name == "wandb"


def test_calls_of_an_sdk_do_nothing():
    for thing in (NullTracker("wandb"), NullTracker("wandb").tracker):
        assert not thing.run.summary["best"].anything
        thing.run.summary["best"] = 1
        thing.run.config.update({"lr": 1}, allow_val_change=True)
        thing.run.note = "x"
        assert not thing.run.note
        assert list(thing.run.files()) == []
        with thing.run.session() as session:
            session.write(1)
        with pytest.raises(KeyError), thing.run.session():
            raise KeyError  # it goes through
    assert NullTracker("wandb").tracker.id is not None


def test_pythons_own_protocols_do_not_take_it_for_something():
    assert type(copy.deepcopy(NullObject())) is NullObject
    assert not hasattr(NullObject(), "__array__")
    assert not hasattr(NullTracker(), "__len__")
    assert "no tracker" in repr(NullObject())
