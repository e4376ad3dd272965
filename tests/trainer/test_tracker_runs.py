"""A run that goes on does so in the same run of each service, and tells no step twice."""

import csv
import os
from pathlib import Path

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.utils.data import DataLoader, TensorDataset

from callbacks import Callback, ModelCheckpoint
from tests.helpers.services import QUIET_COMET as COMET
from tests.helpers.services import comet_runs, mlflow_runs, mlflow_store, wandb_runs
from tests.numerics.running import quiet_trainer
from trackers import (
    CometMLTracker,
    CSVTracker,
    GeneralTracker,
    MLflowTracker,
    TensorBoardTracker,
    WandBTracker,
)
from trainer import Accelerator, TrainModule
from trainer.rng import isolated_rng

wandb = pytest.importorskip("wandb")

WANDB = {"mode": "offline", "settings": wandb.Settings(console="off", silent=True)}


class Line(TrainModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(3, 1)

    def training_step(self, batch, batch_idx):
        loss = self.net(batch[0]).square().mean()
        self.log("loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val", self.net(batch[0]).abs().mean())

    test_step = validation_step

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Service(GeneralTracker):
    """A service in memory, which gives its runs their names; it has them all."""

    name = "service"
    requires_logging_directory = False
    tracker = None
    runs: dict = {}

    def __init__(self, run_name="run"):
        self.previous = None

    def resume(self, run_id, step):
        self.previous = (run_id, step)

    def start(self):
        previous, self.previous = self.previous, None
        self.run_id = (previous and previous[0]) or f"run {len(Service.runs)}"
        Service.runs.setdefault(self.run_id, []).append(previous)

    def log(self, values, step, **kwargs):
        Service.runs[self.run_id].append(step)


class Begun(Callback):
    """Waits for the services: these runs are shorter than their answers take."""

    def on_train_start(self, trainer, module):
        for tracker in trainer.trackers:
            tracker.tracker


@pytest.fixture(autouse=True)
def no_runs():
    Service.runs = {}


def data():
    values = torch.randn(24, 3, generator=torch.Generator().manual_seed(0))
    return DataLoader(TensorDataset(values), batch_size=4)


def fit(folder, trackers, steps, ckpt_path="auto", module=None):
    trainer = quiet_trainer(
        max_steps=steps,
        log_every=1,
        val_every=2,
        seed=5,
        log_with=trackers,
        project_dir=folder,
        callbacks=[ModelCheckpoint(every=3, save_last=5, background=False), Begun()],
    )
    trainer.fit(module or Line(), data(), data(), ckpt_path=ckpt_path)
    return trainer


def services(folder):
    return [
        MLflowTracker("p"),
        WandBTracker("p", dir=str(folder), **WANDB),
        CometMLTracker("p", offline_directory=str(folder / "comet"), **COMET),
    ]


def test_files_of_services_lie_in_the_folder_of_the_run(tmp_path):
    trackers = [WandBTracker("p", **WANDB), CometMLTracker("p", **COMET)]
    fit("run", trackers, 1)
    own = Accelerator(log_with="wandb", project_dir="own", cpu=True)
    own.init_trackers("p", init_kwargs={"wandb": WANDB})
    own.end_training()
    assert sorted(os.listdir()) == ["own", "run"]
    assert len(wandb_runs(Path("run"))) == len(wandb_runs(Path("own"))) == 1
    assert len(comet_runs(Path("run/logs/.cometml-runs"))) == 1


def test_a_resumed_run_continues_in_each_service(tmp_path):
    parts, whole = tmp_path / "parts", tmp_path / "whole"
    for folder in (parts, whole):
        mlflow_store(folder / "run" / "logs")
    fit(whole / "run", services(whole), 8)
    for steps in (3, 8):
        fit(parts / "run", services(parts), steps)
    (expected,), halves = wandb_runs(whole), wandb_runs(parts)
    assert len({run.run.run_id for run in halves}) == 1
    for name in ("loss", "val"):
        found = [point for run in halves for point in run.series(name)]
        assert found == expected.series(name)
        assert len(found) == {"loss": 8, "val": 4}[name]
    (expected,), halves = comet_runs(whole / "comet"), comet_runs(parts / "comet")
    assert len(halves) == 2
    assert len({run.key for run in halves}) == 1
    for name in ("loss", "val"):
        assert [point for run in halves for point in run.metrics[name]] == expected.metrics[name]
    assert expected.parameters["max_steps"] == 8  # the resolved configuration
    (expected,), (found,) = (mlflow_runs(folder / "run" / "logs") for folder in (whole, parts))
    assert (found.metrics, found.status) == (expected.metrics, "FINISHED")
    assert [step for step, _ in found.metrics["loss"]] == list(range(1, 9))
    assert [run.summary["status"] for run in wandb_runs(parts)] == ["finished", "finished"]


def test_resume_gets_the_run_id_and_the_step(tmp_path):
    fit(tmp_path, Service(), 3)
    fit(tmp_path, Service(), 6)
    assert Service.runs.keys() == {"run 0"}
    first, *steps = Service.runs["run 0"]
    second = steps.index(("run 0", 3))
    assert first is None
    assert max(steps[:second]) == 3
    assert min(steps[second + 1 :]) == 4


def test_two_trackers_of_one_name_resume_their_own_runs(tmp_path):
    for steps in (3, 6):
        fit(tmp_path, [Service(), Service()], steps)
    assert Service.runs.keys() == {"run 0", "run 1"}
    for name, messages in Service.runs.items():
        assert (name, 3) in messages


def test_resuming_an_earlier_checkpoint_begins_another_run(tmp_path):
    fit(tmp_path, Service(), 6)
    fit(tmp_path, Service(), 6, ckpt_path=tmp_path / "checkpoints" / "step-00000003")
    assert Service.runs.keys() == {"run 0", "run 1"}
    assert Service.runs["run 1"][0] == (None, 3)
    assert min(step for step in Service.runs["run 1"][1:]) == 4


def test_resuming_the_newest_checkpoint_by_path_keeps_the_run(tmp_path):
    fit(tmp_path, Service(), 3)
    fit(tmp_path, Service(), 6, ckpt_path=tmp_path / "checkpoints" / "step-00000003")
    assert Service.runs.keys() == {"run 0"}


def test_a_test_after_a_fit_belongs_to_its_run(tmp_path):
    trainer = fit(tmp_path, [service := Service()], 3)
    trainer.test(Line(), data())
    assert Service.runs.keys() == {"run 0"}
    assert Service.runs["run 0"][-2:] == [("run 0", None), 3]
    assert service.status == "finished"


def test_another_fit_is_another_run(tmp_path):
    service = Service()
    fit(tmp_path / "a", service, 3)
    fit(tmp_path / "b", service, 3)
    assert Service.runs.keys() == {"run 0", "run 1"}
    assert Service.runs["run 1"][0] is None


def test_tensorboard_shows_no_step_of_a_run_that_ended_before_its_first_checkpoint(tmp_path):
    class Ends(Line):
        def training_step(self, batch, batch_idx):
            if batch_idx == 2:
                raise RuntimeError("it ends here")
            return super().training_step(batch, batch_idx)

    def names(of):
        return {path.name for path in tmp_path.glob(f"run/logs/run/*.{of}.*")}

    with pytest.raises(RuntimeError, match="it ends here"):
        fit(tmp_path / "run", "tensorboard", 6, module=Ends())
    ended = names("tfevents")
    aside = {name.replace("tfevents", "earlier") for name in ended}
    assert len(ended) == 1
    fit(tmp_path / "run", "tensorboard", 5)
    assert names("earlier") == aside
    events = EventAccumulator(str(tmp_path / "run/logs/run"))
    events.Reload()
    assert [event.step for event in events.Scalars("loss")] == [1, 2, 3, 4, 5]
    assert [event.step for event in events.Scalars("val")] == [2, 4]
    # What goes on, or evaluates behind it, adds to what is there.
    fit(tmp_path / "run", "tensorboard", 6).test(Line(), data())
    assert names("earlier") == aside
    assert len(names("tfevents")) == 3


def test_a_test_in_the_folder_of_a_fit_leaves_its_curves_there(tmp_path):
    def tracker():
        return TensorBoardTracker("run", tmp_path / "logs")

    fit(tmp_path / "run", tracker(), 3)
    curves = set((tmp_path / "logs/run").iterdir())
    quiet_trainer(log_with=tracker(), project_dir=tmp_path / "run").test(Line(), data())
    assert curves < set((tmp_path / "logs/run").iterdir())


def table(path):
    with open(path, newline="") as text:
        return list(csv.DictReader(text))


def test_an_evaluation_appends_to_the_csv_of_a_fit(tmp_path):
    class Tested(Line):
        def test_step(self, batch, batch_idx):
            self.log("tested", self.net(batch[0]).abs().mean())

    class Beside(Line):
        def on_train_step_start(self):
            if self.trainer.global_step == 4:
                for tracker in self.trainer.trackers:
                    tracker.drain(60)  # the rows of the update before are whole
                evaluate()

    def evaluate():
        tracker = CSVTracker("run", tmp_path / "logs")  # as in a process of its own
        other = quiet_trainer(log_with=tracker, project_dir=tmp_path / "run")
        with isolated_rng():
            other.test(Tested(), data(), ckpt_path="last")

    def fit_twice(folder, logs, kind, between):
        for steps in (3, 6):
            torch.manual_seed(0)
            fit(tmp_path / folder, CSVTracker("run", tmp_path / logs), steps, module=kind())
            if steps == 3:
                between()

    fit_twice("whole", "expected", Line, lambda: None)
    fit_twice("run", "logs", Beside, evaluate)
    rows = table(tmp_path / "logs/run/metrics.csv")
    assert [row["step"] for row in rows if row["tested"]] == ["3", "3"]
    of_fit = [row for row in rows if not row.pop("tested")]
    assert of_fit == table(tmp_path / "expected/run/metrics.csv")
    fit(tmp_path / "other", CSVTracker("run", tmp_path / "logs"), 2)  # it begins anew
    assert [row["step"] for row in table(tmp_path / "logs/run/metrics.csv")] == ["1", "2"]
    assert len(table(tmp_path / "logs/run/metrics.1.csv")) == len(rows)


def test_an_evaluation_alone_resumes_no_run(tmp_path):
    quiet_trainer(log_with=Service(), project_dir=tmp_path).test(Line(), data())
    (messages, *_) = Service.runs["run 0"]
    assert messages == (None, None)


def test_the_trackers_are_at_hand_for_what_log_cannot_take(tmp_path):
    class Samples(Line):
        def on_train_epoch_end(self):
            for tracker in self.trainer.trackers:
                tracker.log_images({"samples": torch.zeros(3, 4, 5)}, self.trainer.global_step)

    trainer = quiet_trainer(
        max_epochs=1,
        log_with=WandBTracker("p", dir=str(tmp_path), **WANDB),
        project_dir=tmp_path / "run",
    )
    assert trainer.trackers == []
    trainer.fit(Samples(), data())
    (run,) = wandb_runs(tmp_path)
    ((step, images),) = run.series("samples")
    assert (step, images["width"], images["height"]) == (6, 5, 4)


def test_the_best_checkpoint_is_a_model_in_each_service_when_the_training_ends(tmp_path):
    """The second update of three is the best; each service has its weights, byte for byte."""

    class Scored(Line):
        def on_train_step_end(self, *_):
            self.log("score", {1: 2.0, 2: 1.0, 3: 3.0}[self.trainer.global_step], on_step=True)

    mlflow_store(tmp_path / "mlflow")
    uri = f"sqlite:///{tmp_path / 'mlflow' / 'mlflow.db'}"
    keeping = ModelCheckpoint(monitor="score", every=1, log_model=True)
    trainer = quiet_trainer(
        max_steps=3,
        log_every=1,
        project_dir=tmp_path / "run",
        callbacks=[keeping],
        log_with=[
            WandBTracker("p", dir=str(tmp_path), **WANDB),
            CometMLTracker("p", offline_directory=str(tmp_path / "comet"), **COMET),
            MLflowTracker("p", str(tmp_path / "mlflow"), tracking_uri=uri),
        ],
    )
    trainer.fit(Scored(), DataLoader(TensorDataset(torch.randn(12, 3)), batch_size=4))
    best = keeping.best_model_path
    assert best.name == "step-00000002"
    weights = (best / "model.safetensors").read_bytes()

    [experiment] = comet_runs(tmp_path / "comet")
    models = [one for one in experiment.uploads if one["upload_type"] == "model-element"]
    assert {one["metadata"]["step"] for one in models} == {2}
    assert weights in [experiment.content(one) for one in models]
    [run] = mlflow_runs(tmp_path / "mlflow")
    assert (run.files / "model/step-2/model.safetensors").read_bytes() == weights
    [run] = wandb_runs(tmp_path)
    [artifact] = run.artifacts
    assert (artifact.type, sorted(artifact.aliases)) == ("model", ["latest", "step-2"])
    sizes = {entry.path: entry.size for entry in artifact.manifest.contents}
    assert sizes["model.safetensors"] == len(weights)
