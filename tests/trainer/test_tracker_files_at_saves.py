"""What a checkpoint covers is in the files of the trackers: a run that was killed has no holes."""

import csv
import shutil
import threading

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.utils.data import DataLoader, TensorDataset

from callbacks import Callback, ModelCheckpoint
from tests.numerics.running import quiet_trainer
from trackers import BackgroundTracker, CSVTracker, JsonlTracker
from trainer import TrainModule
from trainer.loops import recorder as record
from trainer.loops.recorder import Recorder

FOR_EVER = 60.0  # seconds: a test that waits so long fails, for a save that gave up tells it


class Line(TrainModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(3, 1)

    def training_step(self, batch, batch_idx):
        loss = self.net(batch[0]).square().mean()
        self.log("loss", loss)
        if batch_idx % 3 == 0:
            self.log("now and then", loss)  # a column that comes later
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Gated(CSVTracker):
    """A disk that takes nothing until the gate is opened."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.gate = threading.Event()

    def log(self, values, step=None, **kwargs):
        assert self.gate.wait(FOR_EVER)
        super().log(values, step, **kwargs)


class Service(Gated):
    """One that is no file on this machine."""

    name = "service"
    requires_logging_directory = False


class Copies(Callback):
    """Keeps what the disk has as each save is committed, which is what a kill would leave."""

    def __init__(self, folder):
        self.folder = folder

    def on_boundary(self, trainer, module):
        if trainer.global_step in (3, 6):
            # run.json is written at any time, by way of such a file
            passing = shutil.ignore_patterns(".cadence-*")
            shutil.copytree(
                self.folder, f"{self.folder}-killed-{trainer.global_step}", ignore=passing
            )

    @property
    def runs_last(self):
        return True


def fit(folder, log_with, *, background=False):
    values = torch.randn(40, 3, generator=torch.Generator().manual_seed(0))
    trainer = quiet_trainer(
        max_steps=8,
        seed=5,
        log_with=log_with,
        run_name="run",
        project_dir=folder,
        callbacks=[
            # a save that waits for nothing, just before the one that the copies are of
            ModelCheckpoint(every=3, save_weights_only=True, dirpath=folder / "weights"),
            ModelCheckpoint(every=3, save_last=3, background=background),
            Copies(folder),
        ],
    )
    trainer.fit(Line(), DataLoader(TensorDataset(values), batch_size=4), ckpt_path="auto")
    return trainer


def table(folder):
    with open(folder / "logs/run/metrics.csv", newline="") as file:
        return list(csv.DictReader(file))


def scalars(folder):
    events = EventAccumulator(str(folder / "logs/run"))
    events.Reload()
    names = events.Tags()["scalars"]
    # Sorted: files that begin in the same second are read in the order of their names.
    return {
        name: sorted((each.step, each.value) for each in events.Scalars(name)) for name in names
    }


def test_curves_have_no_holes_after_a_kill(tmp_path, monkeypatch):
    monkeypatch.setattr(record, "_PATIENCE_FOR_CURVES", FOR_EVER)
    whole = tmp_path / "whole"
    fit(whole, ["csv", "tensorboard"])
    rows, curves = table(whole), scalars(whole)
    assert [row["step"] for row in rows] == [str(step) for step in range(1, 9)]
    assert {name: len(points) for name, points in curves.items()} == {"loss": 8, "now and then": 3}
    for step in (3, 6):
        killed = tmp_path / f"whole-killed-{step}"
        assert [row["loss"] for row in table(killed)] == [row["loss"] for row in rows[:step]]
        assert len(scalars(killed)["loss"]) == step
        fit(killed, ["csv", "tensorboard"])
        assert table(killed) == rows
        assert scalars(killed) == curves


@pytest.fixture
def recorder(tmp_path):
    """Makes a record with trackers, which are let go in the end."""
    made = []

    def make(*trackers):
        recorder = Recorder(
            BackgroundTracker(JsonlTracker(tmp_path / "metrics.jsonl")),
            [BackgroundTracker(tracker) for tracker in trackers],
        )
        made.append((recorder, trackers))
        recorder.start({})
        return recorder

    yield make
    for recorder, trackers in made:
        for tracker in trackers:
            tracker.gate.set()
        recorder.finish()


def log(recorder, step):
    recorder.record({"loss": 1.0}, step=step, epoch=0)


def steps(tracker):
    return [row["step"] for row in csv.DictReader(tracker.path.read_text().splitlines())]


def test_sync_returns_at_once_and_the_save_waits_for_the_file(
    tmp_path, recorder, monkeypatch, caplog
):
    monkeypatch.setattr(record, "_PATIENCE_FOR_CURVES", FOR_EVER)
    tracker = Gated("run", tmp_path)
    kept = recorder(tracker)
    log(kept, 1)
    length = kept.sync()  # on the training's thread: comes back though the gate is closed
    log(kept, 2)
    found = []
    saving = threading.Thread(target=lambda: found.append((length(), steps(tracker))))
    saving.start()
    tracker.gate.set()
    saving.join()
    ((offset, written),) = found
    assert offset == len((tmp_path / "metrics.jsonl").read_bytes().splitlines(keepends=True)[0])
    assert "1" in written
    assert caplog.text == ""


def test_a_tracker_that_hangs_is_waited_for_once(tmp_path, recorder, monkeypatch, caplog):
    monkeypatch.setattr(record, "_PATIENCE_FOR_CURVES", 0.01)
    hanging, sound = Gated("hangs", tmp_path), CSVTracker("sound", tmp_path)
    sound.gate = threading.Event()
    kept = recorder(hanging, sound)
    log(kept, 1)
    first = kept.sync()
    kept.trackers[1].submit(lambda tracker: None).result(FOR_EVER)  # that one has come so far
    assert first() > 0
    assert "A save waited 0.01 seconds for csv to write" in caplog.text
    assert len(caplog.records) == 1
    monkeypatch.setattr(record, "_PATIENCE_FOR_CURVES", FOR_EVER)
    log(kept, 2)
    assert kept.sync()() > 0  # it does not wait for that one any more, but for the other
    assert steps(sound) == ["1", "2"]
    assert len(caplog.records) == 1
    hanging.gate.set()
    kept.trackers[0].drain(FOR_EVER)
    log(kept, 3)
    kept.sync()()  # now it is one like the others again
    assert steps(hanging) == ["1", "2", "3"]


def test_a_service_is_not_waited_for(tmp_path, recorder, monkeypatch, caplog):
    monkeypatch.setattr(record, "_PATIENCE_FOR_CURVES", FOR_EVER)
    kept = recorder(Service("run", tmp_path))
    log(kept, 1)
    assert kept.sync()() > 0
    assert caplog.text == ""


def test_a_background_save_does_not_block_the_training(tmp_path, monkeypatch, caplog):
    """The gate is opened by the training itself, which would wait for ever if the save held it."""
    monkeypatch.setattr(record, "_PATIENCE_FOR_CURVES", FOR_EVER)
    tracker = Gated("run", tmp_path / "run" / "logs")
    values = TensorDataset(torch.ones(40, 3))

    class Opens(Callback):
        def on_train_step_start(self, trainer, module):
            if trainer.global_step == 4:
                assert trainer._fit.saving.writer._thread.is_alive()
                tracker.gate.set()

    trainer = quiet_trainer(
        max_steps=5,
        log_with=tracker,
        project_dir=tmp_path / "run",
        callbacks=[ModelCheckpoint(every=3), Opens()],
    )
    trainer.fit(Line(), DataLoader(values, batch_size=4))
    assert steps(tracker) == ["1", "2", "3", "4", "5"]
    assert caplog.text == ""


class Opens(Callback):
    """Lets a tracker go on, behind the saves of the last update."""

    runs_last = True

    def __init__(self, tracker):
        self.tracker = tracker

    def on_boundary(self, trainer, module):
        if trainer.global_step == trainer.max_steps:
            self.tracker.gate.set()


@pytest.mark.parametrize("weights_only", [True, False])
@pytest.mark.parametrize("background", [True, False])
def test_of_two_saves_close_behind_each_other_one_waits(
    tmp_path, monkeypatch, caplog, weights_only, background
):
    """The first that needs the curves; the tracker takes nothing before all is saved."""
    monkeypatch.setattr(record, "_PATIENCE_FOR_CURVES", 0.01)
    tracker = Gated("run", tmp_path / "logs")
    options = {"every": 2, "save_top_k": -1, "background": background}
    first = ModelCheckpoint(**options, save_weights_only=weights_only, dirpath=tmp_path / "first")
    second = ModelCheckpoint(**options)
    trainer = quiet_trainer(
        max_steps=4,
        log_with=tracker,
        project_dir=tmp_path,
        callbacks=[first, second, Opens(tracker)],
    )
    values = TensorDataset(torch.ones(40, 3))
    trainer.fit(Line(), DataLoader(values, batch_size=4))
    (messages,) = caplog.records
    assert "A save waited 0.01 seconds for csv to write" in messages.getMessage()
    for callback in (first, second):
        assert sorted(path.name for path in callback.best_k_models) == [
            "step-00000002",
            "step-00000004",
        ]
    assert steps(tracker) == ["1", "2", "3", "4"]


def test_a_save_of_weights_alone_asks_for_nothing(tmp_path, monkeypatch):
    synced, sync = [], JsonlTracker.sync
    monkeypatch.setattr(JsonlTracker, "sync", lambda self: synced.append(1) or sync(self))

    def syncs(**kwargs):
        synced.clear()
        trainer = quiet_trainer(max_steps=4, project_dir=tmp_path / str(len(kwargs)), **kwargs)
        trainer.fit(Line(), DataLoader(TensorDataset(torch.ones(40, 3)), batch_size=4))
        return len(synced)

    weights = ModelCheckpoint(every=1, save_weights_only=True)
    assert syncs(callbacks=[weights]) == syncs(checkpointing=False, callbacks=[]) > 0
