"""The trackers of an Accelerator, and how a tracker learns of the end of a run."""

import gc
import logging
import os
import signal
import subprocess
import sys
import threading
import weakref
from argparse import Namespace
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.utils.tensorboard import SummaryWriter

from trackers import (
    BackgroundTracker,
    GeneralTracker,
    JsonlTracker,
    NullTracker,
    TensorBoardTracker,
    register_tracker,
)
from trackers.registry import _REGISTRY
from trainer import Preempted, Trainer, TrainModule
from trainer.loops.recorder import Recorder
from trainer.tracking import RunTrackers, on_main_process


class Listed(GeneralTracker):
    """As a user of the documented API writes one: its constructor begins the run."""

    name = "listed"
    requires_logging_directory = False

    def __init__(self, run_name: str, note: str = ""):
        super().__init__()
        self.run_name, self.note, self.seen = run_name, note, ["begun"]

    @property
    def tracker(self):
        return self.seen

    def store_init_configuration(self, values: dict):
        self.seen.append(("config", values))

    def log(self, values: dict, step=None, color=None):
        self.seen.append(("log", values, step, color))

    def of_its_own(self):
        return self.note


class Images(Listed):
    """One that takes everything, and tells how it ended."""

    name = "images"

    def log_images(self, values, step, **kwargs):
        self.seen.append(("images", values, step, kwargs))

    def log_table(self, table_name, columns=None, data=None, dataframe=None, step=None, **kwargs):
        self.seen.append(("table", table_name, columns, data, dataframe, step, kwargs))

    def finish(self):
        self.seen.append(self.status)


class Files(Listed):
    name = "files"
    requires_logging_directory = True

    def __init__(self, run_name, logging_dir, **options):
        super().__init__(run_name)
        self.place, self.options = logging_dir, options


class Failing(Listed):
    name = "failing"

    def __init__(self, run_name):
        raise ConnectionError("no server")


def read(folder):
    events = EventAccumulator(str(folder))
    events.Reload()
    return events


def text(events, name):
    (event,) = events.Tensors(f"{name}/text_summary")
    return event.tensor_proto.string_val[0].decode()


# -- from the constructor to init_trackers ---------------------------------------------------------


def test_log_with_is_checked_at_once():
    with pytest.raises(
        ValueError,
        match=r"log_with is 'tensorbord'. Did you mean 'tensorboard'\? It must be one of 'aim'",
    ):
        RunTrackers("tensorbord", "logs")
    with pytest.raises(ValueError, match=r"'tensorboard' writes files.*project_dir"):
        RunTrackers("tensorboard", None)
    with pytest.raises(TypeError, match="log_with takes"):
        RunTrackers(3, "logs")


def test_all_takes_what_is_installed_and_warns_where_that_is_nothing():
    _REGISTRY.clear()  # put back after the test
    with pytest.warns(UserWarning, match=r"log_with='all' was passed, but no supported tracker"):
        tracking = RunTrackers("all", "logs")
    assert tracking.log_with == []
    register_tracker(Listed)
    assert RunTrackers("all", None).log_with == [Listed]


@pytest.mark.parametrize("log_with", [None, []])
def test_without_log_with_everything_is_allowed_and_nothing_happens(log_with):
    tracking = RunTrackers(log_with, None)
    tracking.log({"x": 1}, step=1)  # as scripts do whose tracking is switched off
    tracking.init_trackers("project", {"lr": 1})
    for _ in range(2):
        tracking.log({"x": 1})
        tracking.log({"x": 1}, method="log_images")
        tracker = tracking.get_tracker("wandb")
        assert (type(tracker), tracker.name) == (NullTracker, "wandb")
        tracker.log({"x": 1}, step=1)
        tracking.get_tracker("wandb", unwrap=True).summary["best"] = 1
        tracking.record("log_table", "t", data=[])
        tracking.end_training()
    assert tracking.trackers == []


def test_classes_get_the_run_name_the_directory_and_their_options(tmp_path):
    tracking = RunTrackers([Listed, Files], tmp_path / "logs" / "deep")
    tracking.init_trackers(
        "project",
        init_kwargs={"listed": {"note": "red"}, "files": {"mode": "x"}, "not in use": {"y": 1}},
    )
    listed, files = tracking.trackers
    assert (listed.run_name, listed.of_its_own()) == ("project", "red")
    assert (files.run_name, files.place, files.options) == (
        "project",
        tmp_path / "logs" / "deep",
        {"mode": "x"},
    )
    assert (tmp_path / "logs" / "deep").is_dir()
    tracking.end_training()
    assert listed.wrapped.seen == ["begun"]  # no configuration was given


def test_init_kwargs_for_a_misspelt_tracker_are_warned_of(caplog):
    tracking = RunTrackers([Listed], None)
    tracking.init_trackers("project", init_kwargs={"lsited": {}, "wandb": {}})
    tracking.end_training()
    (message,) = caplog.messages  # the other name is that of a tracker of another start
    assert message.startswith("init_kwargs has options for 'lsited'")
    assert message.endswith("Did you mean 'listed'?")


@pytest.mark.parametrize(
    ("name", "error"), [(3, TypeError), ("../out", ValueError), ("/tmp/out", ValueError)]
)
def test_a_name_that_is_none_or_leads_out_of_the_folder_is_refused(name, error):
    with pytest.raises(error, match=f"project_name is {name!r}"):
        RunTrackers([Listed, Files], "logs").init_trackers(name)
    for argument in ("project_name", "run_name"):
        with pytest.raises(error, match=f"{argument} is {name!r}"):
            Trainer(max_epochs=1, cpu=True, log_with=["csv", Listed], **{argument: name})


def test_trackers_without_a_folder_take_any_name():
    for name in ("/users/ada/experiment", "a/../b"):
        tracking = RunTrackers([Listed], None)
        tracking.init_trackers(name)
        (tracker,) = tracking.trackers
        assert tracker.run_name == name
        tracking.end_training()
        Trainer(max_epochs=1, cpu=True, log_with=[Listed], project_name=name, run_name=name)
    tracking = RunTrackers([TensorBoardTracker("mine", "logs")], None)
    tracking.init_trackers("../not used")  # an instance has its name and its folder
    tracking.end_training()


def test_a_directory_that_cannot_be_made_is_an_error_and_not_a_run_without_record(tmp_path):
    (tmp_path / "file").touch()
    tracking = RunTrackers([Images, Files], tmp_path / "file")
    with pytest.raises(FileExistsError, match="file"):
        tracking.init_trackers("project")


@pytest.mark.parametrize("kind", [str, Path])
def test_a_logging_dir_in_the_home(monkeypatch, kind):
    monkeypatch.setenv("HOME", os.getcwd())
    trackers = RunTrackers(["csv", Files], kind("~/logs"))
    trackers.init_trackers("run")
    assert trackers.trackers[1].wrapped.place == kind(os.path.abspath("logs"))
    trackers.end_training()
    assert (os.listdir(), os.listdir("logs")) == (["logs"], ["run"])


def test_a_constructor_that_fails_is_raised_and_those_made_before_are_ended_as_failed():
    first = Images("one")
    tracking = RunTrackers([first, Failing], None)
    with pytest.raises(ConnectionError, match="no server"):
        tracking.init_trackers("project")
    assert first.seen == ["begun", "failed"]
    assert tracking.trackers == []


def test_beginning_twice_needs_an_end_between():
    tracker = Images("one")
    tracking = RunTrackers([tracker], None)
    tracking.init_trackers("first")
    with pytest.raises(RuntimeError, match=r"Call end_training\(\) first"):
        tracking.init_trackers("second")
    tracking.log({"x": 1})
    tracking.end_training()
    tracking.init_trackers("second")
    tracking.log({"x": 2})
    tracking.end_training()
    assert tracker.seen == [
        "begun",
        ("log", {"x": 1}, None, None),
        "finished",
        ("log", {"x": 2}, None, None),
        "finished",
    ]


@pytest.mark.parametrize(
    ("arguments", "message"), [((3,), "project_name is 3"), (("p", ["lr"]), r"config is \['lr'\]")]
)
def test_wrong_arguments_of_init_trackers(arguments, message):
    with pytest.raises(TypeError, match=message):
        RunTrackers([Listed], None).init_trackers(*arguments)


@dataclass
class Options:
    lr: float = 0.1
    model: Namespace = field(default_factory=lambda: Namespace(layers=2))


@pytest.mark.parametrize(
    "config", [Options(), Namespace(**vars(Options())), SimpleNamespace(**vars(Options()))]
)
def test_the_configuration_may_be_a_namespace_or_a_dataclass(config, tmp_path):
    tracking = RunTrackers([Listed, "tensorboard"], tmp_path)
    tracking.init_trackers("project", config)
    tracking.end_training()
    assert tracking.trackers[0].seen == ["begun", ("config", vars(Options()))]
    shown = text(read(tmp_path / "project"), "configuration")
    assert "model:\n  layers: 2" in shown


def test_none_among_values_is_left_out(tmp_path, caplog):
    tracking = RunTrackers([Listed, "tensorboard", "csv"], tmp_path)
    tracking.init_trackers("project")
    tracking.log({"loss": 1.0, "val": None, "parts": {"a": None, "b": 2.0}}, 1)
    tracking.end_training()
    assert tracking.trackers[0].seen[1:] == [("log", {"loss": 1.0, "parts": {"b": 2.0}}, 1, None)]
    assert read(tmp_path / "project").Tags()["scalars"] == ["loss", "parts/b"]
    assert (tmp_path / "project/metrics.csv").read_text() == "step,loss,parts/b\n1,1.0,2.0\n"
    assert not caplog.records


# -- recording -------------------------------------------------------------------------------------


def test_a_tracker_written_for_the_documented_api_runs_unchanged():
    class Decorated(Listed):
        name = "decorated"
        log = on_main_process(Listed.log)
        __init__ = on_main_process(Listed.__init__)
        store_init_configuration = on_main_process(Listed.store_init_configuration)

    tracker = Decorated("mine")
    assert Decorated.log.__name__ == "log"
    tracking = RunTrackers([tracker, Listed], None)
    config = {"lr": 0.1, "model": {"layers": 2}}
    tracking.init_trackers("project", config)
    config["model"]["layers"] = 3
    loss = torch.tensor(0.5, requires_grad=True)
    tracking.log({"loss": loss, "parts": {"a": np.float32(2)}}, step=1, log_kwargs=None)
    tracking.log({"x": 1}, 2, {"decorated": {"color": "red"}})
    with torch.no_grad():
        loss += 1
    tracking.end_training()
    begun = [
        "begun",
        ("config", {"lr": 0.1, "model": {"layers": 2}}),
        ("log", {"loss": torch.tensor(0.5), "parts": {"a": 2.0}}, 1, None),
    ]
    assert tracker.seen == [*begun, ("log", {"x": 1}, 2, "red")]
    assert tracking.trackers[1].seen == [*begun, ("log", {"x": 1}, 2, None)]


def test_images_and_tables_go_to_those_that_take_them(caplog):
    tracking = RunTrackers([Images, Listed], None)
    tracking.init_trackers("project")
    options = {"images": {"fps": 3}, "listed": {"color": "red"}}
    for step in (1, 2):
        tracking.log({"x": [step]}, step, options, method="log_images")
        table = {"columns": ["a"], "data": [[step]], "step": step}
        tracking.record("log_table", "t", **table, log_kwargs=options)
    tracking.end_training()
    images, listed = tracking.trackers
    assert images.seen == [
        "begun",
        ("images", {"x": [1]}, 1, {"fps": 3}),
        ("table", "t", ["a"], [[1]], None, 1, {"fps": 3}),
        ("images", {"x": [2]}, 2, {"fps": 3}),
        ("table", "t", ["a"], [[2]], None, 2, {"fps": 3}),
        "finished",
    ]
    assert listed.seen == ["begun"]
    messages = [record.getMessage().partition(".")[0] for record in caplog.records]
    methods = ("log_images", "log_table")
    assert messages == [  # once
        f"The tracker 'listed' does not implement {method}; it does not record these values"
        for method in methods
    ]


def test_a_tracker_that_raises_is_reported_once(caplog):
    class Broken(Listed):
        def log(self, values, step):
            super().log(values, step)
            raise ValueError("no number")

    tracking = RunTrackers([Broken, Listed], None)
    tracking.init_trackers("project")
    for step in range(3):
        tracking.log({"x": step}, step)
    tracking.end_training()
    assert [len(tracker.seen) for tracker in tracking.trackers] == [4, 4]
    assert len(caplog.records) == 2  # the failure, and at the end the count
    assert "no number" in caplog.records[0].getMessage()


def test_no_call_waits_for_a_tracker():
    class Hanging(Images):
        release = threading.Event()

        def start(self):
            self.release.wait(20)

    tracking = RunTrackers([Hanging], None)
    tracking.init_trackers("project", {"lr": 1})
    tracking.log({"x": 1})
    tracking.log({"x": 1}, method="log_images")
    tracking.record("log_table", "t", data=[])
    seen = tracking.trackers[0].wrapped.seen
    assert seen == ["begun"]
    Hanging.release.set()
    tracking.end_training()
    assert len(seen) == 6


def test_recording_before_the_beginning_is_an_error():
    tracking = RunTrackers([Images], None)
    for call in (
        lambda: tracking.log({"x": 1}),
        lambda: tracking.log({"x": 1}, method="log_images"),
        lambda: tracking.record("log_table", "t", data=[]),
        lambda: tracking.get_tracker("images"),
    ):
        with pytest.raises(RuntimeError, match=r"needs trackers: call init_trackers"):
            call()
    tracking.end_training()  # as in the script whose tracking is off


def test_log_after_end_training_warns_once(caplog):
    tracking = RunTrackers([Images], None)
    tracking.init_trackers("project")
    tracking.end_training()
    tracking.end_training()
    assert not caplog.records
    for _ in range(2):
        tracking.log({"x": 1})
        tracking.log({"x": 1}, method="log_images")
    (record,) = caplog.records
    assert record.getMessage().startswith("log was called after end_training")
    tracking.init_trackers("project")
    tracking.end_training()
    tracking.record("log_table", "t", data=[])
    assert len(caplog.records) == 2  # once for each run
    assert [one.seen for one in tracking.trackers] == [["begun", "finished"]]


# -- the tracker itself ----------------------------------------------------------------------------


def test_a_tracker_is_found_by_name_and_unwrapped_to_the_object_of_its_sdk(tmp_path):
    mine = Listed("mine", note="hello")
    tracking = RunTrackers([mine, "tensorboard"], tmp_path)
    tracking.init_trackers("project")
    assert tracking.get_tracker("listed", unwrap=True) is mine.seen
    assert tracking.get_tracker("listed").of_its_own() == "hello"
    assert tracking.get_tracker("listed") is tracking.trackers[0]
    writer = tracking.get_tracker("tensorboard", unwrap=True)
    assert isinstance(writer, SummaryWriter)
    assert tracking.get_tracker("tensorboard").writer is writer
    with pytest.raises(
        ValueError, match=r"no tracker 'wandb'; the trackers are \['listed', 'tensorboard'"
    ):
        tracking.get_tracker("wandb")
    tracking.end_training()


def test_the_unwrapped_object_has_what_was_recorded_before():
    tracking = RunTrackers([Images], None)
    tracking.init_trackers("project", {"lr": 0.1})
    tracking.log({"x": 1}, 1)
    tracking.log({"x": [1]}, 1, method="log_images")
    seen = list(tracking.get_tracker("images", unwrap=True))
    assert [call[0] for call in seen[1:]] == ["config", "log", "images"]
    tracking.log({"x": 2}, 2)
    assert tracking.get_tracker("images").seen[-1] == ("log", {"x": 2}, 2, None)
    tracking.end_training()


def test_tensorboard_reads_what_was_recorded(tmp_path):
    tracking = RunTrackers("tensorboard", tmp_path)
    tracking.init_trackers("project", {"lr": 0.1}, {"tensorboard": {"filename_suffix": ".mine"}})
    for step in range(3):
        tracking.log(
            {"loss": torch.tensor([step / 2]), "note": f"step {step}", "parts": {"a": step}},
            step=step,
            log_kwargs={"tensorboard": {"walltime": 12.0}},
        )
    tracking.log({"image": torch.zeros(3, 4, 5)}, step=2, method="log_images")
    tracking.record("log_table", "table", ["a"], [[1]], step=2)
    tracking.end_training()
    (file,) = (tmp_path / "project").iterdir()
    assert file.name.endswith(".mine")
    events = read(tmp_path / "project")
    scalars = [(one.step, one.value, one.wall_time) for one in events.Scalars("loss")]
    assert scalars == [(0, 0.0, 12.0), (1, 0.5, 12.0), (2, 1.0, 12.0)]
    assert [one.value for one in events.Scalars("parts/a")] == [0, 1, 2]
    assert [one.step for one in events.Tensors("note/text_summary")] == [0, 1, 2]
    assert events.Images("image")[0].step == 2
    assert "| 1 |" in text(events, "table")
    assert "lr: 0.1" in text(events, "configuration")
    assert text(events, "status") == "finished"


# -- an end that nobody asked for ------------------------------------------------------------------


def test_trackers_are_finished_when_their_owner_is_deleted(monkeypatch):
    monkeypatch.delattr(sys, "last_value", raising=False)
    tracking = RunTrackers([Images], None)
    tracking.init_trackers("project")
    tracking.log({"x": 1})
    seen, thread = tracking.trackers[0].seen, tracking.trackers[0]._worker.thread
    gone = weakref.ref(tracking)
    del tracking
    gc.collect()
    assert gone() is None
    assert seen[-1] == "finished"
    assert not thread.is_alive()


SCRIPT = """
import sys
from trainer.tracking import RunTrackers
from trackers import GeneralTracker

class Printer(GeneralTracker):
    name = "printer"
    requires_logging_directory = False
    tracker = None
    def log(self, values, step):
        print(step, flush=True)
    def finish(self):
        print(self.status, flush=True)

tracking = RunTrackers([Printer(), "tensorboard"], "logs")
tracking.init_trackers("project")
for step in range(100):
    tracking.log({"x": step}, step)
tracking.get_tracker("tensorboard", unwrap=True)
"""
ENDS = {
    "": ("finished", 0),
    "raise KeyError": ("failed", 1),
    "raise KeyboardInterrupt": ("failed", -2),
    "tracking.end_training(); raise KeyError": ("finished", 1),
}


@pytest.mark.parametrize("end", ENDS)
def test_a_script_that_forgets_the_end_loses_nothing_and_does_not_hang(tmp_path, end):
    script = SCRIPT + end
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={
            **os.environ,
            "PYTHONPATH": os.path.dirname(os.path.dirname(os.path.dirname(__file__))),
        },
        capture_output=True,
        text=True,
        timeout=120,
    )
    status, code = ENDS[end]
    assert done.stdout.split() == [*map(str, range(100)), status], done.stderr
    assert done.returncode == code
    events = read(tmp_path / "logs" / "project")
    assert [one.value for one in events.Scalars("x")] == list(range(100))
    assert text(events, "status") == status


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_process_leaves_the_trackers_of_its_parent_alone():
    tracking = RunTrackers([Images], None)
    tracking.init_trackers("project")
    end, tracker = tracking._end, tracking.trackers[0]
    held, release = threading.Event(), threading.Event()

    def hold():  # as the tracker's thread may at the fork: whoever waits for it there waits on
        with tracker._worker.pending._changed:
            held.set()
            release.wait(20)

    holder = threading.Thread(target=hold)
    holder.start()
    held.wait()
    child = os.fork()
    if child == 0:
        signal.alarm(20)  # ends it where it hangs
        end()
        os._exit(7)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    release.set()
    holder.join()
    assert code == 7
    tracking.log({"x": 1})
    tracking.end_training()
    assert tracker.seen == ["begun", ("log", {"x": 1}, None, None), "finished"]


# -- the Trainer -----------------------------------------------------------------------------------


class Net(TrainModule):
    def __init__(self, error=None, where="training_step"):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.error, self.where = error, where

    def _maybe(self, place):
        if self.error is not None and self.where == place:
            raise self.error

    def training_step(self, batch, batch_idx):
        self._maybe("training_step")
        return self.layer(batch).mean()

    def test_step(self, batch, batch_idx):
        self._maybe("test_step")
        self.log("x", 1.0)

    def teardown(self, stage):
        self._maybe("teardown")

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def outcome(module, entry="fit"):
    tracker = Images("run")
    trainer = Trainer(
        max_epochs=1, progress_bar=False, checkpointing=False, log_with=tracker, project_dir="run"
    )
    expected = nullcontext() if module.error is None else pytest.raises(type(module.error))
    with expected:
        getattr(trainer, entry)(module, [torch.ones(2, 1)] * 3)
    return tracker.seen[-1]


@pytest.mark.parametrize(
    ("error", "where", "entry"),
    [
        *[(each, "training_step", "fit") for each in (ValueError(), KeyboardInterrupt())],
        *[(SystemExit(1), "training_step", "fit"), (ValueError(), "teardown", "fit")],
        *[(ValueError(), "test_step", "test"), (None, "", "fit"), (None, "", "test")],
    ],
)
def test_trackers_get_the_status_of_the_run(error, where, entry):
    try:
        raise KeyError  # being handled, it is not the run's
    except KeyError:
        assert outcome(Net(error, where), entry) == ("failed" if error else "finished")


def test_a_run_that_a_signal_ends_is_preempted():
    class Told(Net):
        def training_step(self, batch, batch_idx):
            signal.raise_signal(signal.SIGTERM)
            return super().training_step(batch, batch_idx)

    tracker = Images("run")
    trainer = Trainer(max_epochs=1, progress_bar=False, log_with=tracker, project_dir="run")
    with pytest.raises(Preempted) as raised:
        trainer.fit(Told(), [torch.ones(2, 1)] * 3)
    assert raised.value.code == 143
    assert trainer.global_step == 1
    assert tracker.seen[-1] == "preempted"


def test_trackers_are_finished_where_the_loop_cannot_be_closed(monkeypatch, caplog):
    """A device in trouble may fail whatever is still asked of it."""

    def read_pending(self):
        raise RuntimeError("device lost")

    error = ValueError("bad")
    monkeypatch.setattr("trainer.distributed.step_sync.StepSync.read_pending", read_pending)
    with caplog.at_level(logging.ERROR):
        assert outcome(Net(error)) == "failed"
    assert "device lost" in caplog.text


def test_trackers_are_finished_where_the_last_values_cannot_be_read(monkeypatch, caplog):
    def flush(self, **_):
        raise RuntimeError("device lost")

    class Breaking(Net):
        def training_step(self, batch, batch_idx):
            monkeypatch.setattr("trainer.loops.recorder.Recorder.flush", flush)
            return super().training_step(batch, batch_idx)

    assert outcome(Breaking(ValueError("bad"))) == "failed"
    assert "device lost" in caplog.text


def test_a_record_that_cannot_be_begun_ends_the_trackers_as_failed(tmp_path):
    (tmp_path / "metrics.jsonl").write_text("{}\n")
    tracker = Images("run")
    record = BackgroundTracker(JsonlTracker(tmp_path / "metrics.jsonl"))
    recorder = Recorder(record, [BackgroundTracker(tracker)])
    with pytest.raises(ValueError, match="no record that ends at byte 2"):
        recorder.start({"lr": 1}, cut_at=2)
    assert tracker.seen == ["begun", ("config", {"lr": 1}), "failed"]
