"""Against MLflow itself and its local database: what is claimed is read back from there."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml

from tests.helpers.services import mlflow_runs, mlflow_store
from trackers import BackgroundTracker, MLflowTracker, resolve_trackers

mlflow = pytest.importorskip("mlflow")
Image = pytest.importorskip("PIL.Image")


@pytest.fixture
def make(tmp_path):
    uri = mlflow_store(tmp_path)
    made = []

    def make(**options):
        made.append(MLflowTracker("project", str(tmp_path), tracking_uri=uri, **options))
        return made[-1]

    yield make
    for tracker in made:
        tracker.finish()


@pytest.fixture
def tracker(make):
    tracker = make(run_name="first", description="what it is", tags={"seed": 3})
    tracker.start()
    return tracker


def written(tracker, tmp_path, status="finished"):
    tracker.status = status
    tracker.finish()
    return mlflow_runs(tmp_path)[-1]


def test_values_configuration_and_the_end(tracker, tmp_path):
    configuration = {"lr": 0.1, "model": {"dtype": torch.float32, "text": "x" * 7000}}
    tracker.store_init_configuration(configuration)
    tracker.log({"loss": torch.tensor([0.5]), "note": "a text"}, 5)
    tracker.log({"val": np.float64(2.0), "parts": {"a@1": 1}, "nan": math.nan}, 5)
    tracker.log({"slow": 3.0}, 4)
    tracker.log({"end/": 1, "two//b": 2, "/root": 3, "./dot/../c": 4, "n" * 300: 5, "/": 6}, 4)
    with pytest.raises(TypeError, match=r"bad \(Tensor\)"):
        tracker.log({"bad": torch.zeros(2), "loss": 0.25}, 10)
    run = written(tracker, tmp_path, "preempted")
    assert (run.experiment, run.name, run.status) == ("project", "first", "KILLED")
    assert run.metrics["loss"] == [(5, 0.5), (10, 0.25)]
    assert run.metrics["parts/a_1"] == [(5, 1.0)]
    assert run.metrics["slow"] == [(4, 3.0)]
    names = ["end", "two/b", "root", "dot/c", "n" * 250, "_"]
    assert [run.metrics[name] for name in names] == [[(4, k)] for k in range(1, 7)]
    assert math.isnan(run.metrics["nan"][0][1])
    assert (run.params["lr"], run.params["model/dtype"]) == ("0.1", "torch.float32")
    assert run.tags["note"] == "a text"
    assert (run.tags["seed"], run.tags["mlflow.note.content"]) == ("3", "what it is")
    stored = yaml.safe_load((run.files / "configuration.yaml").read_text())
    assert stored["model"] == {"dtype": "torch.float32", "text": "x" * 7000}


def test_a_run_that_resumes_goes_on_in_the_same_run_with_another_configuration(make, tmp_path):
    first = make()
    first.start()
    first.store_init_configuration({"max_steps": 3})
    for step in (1, 2, 3, 4):  # it is killed; its last checkpoint is that of update 2
        first.log({"loss": float(step)}, step)
    first.log({"late": 1.0}, 4)
    second = make()
    second.resume(first.run_id, 2)
    second.start()
    second.store_init_configuration({"max_steps": 9, "new": 1})
    for step in (3, 4, 5):
        second.log({"loss": float(step), "late": 1.0}, step)
    run = written(second, tmp_path)
    assert (run.id, second.run_id, run.status) == (first.run_id, first.run_id, "FINISHED")
    assert run.metrics["loss"] == [(step, float(step)) for step in range(1, 6)]
    assert run.metrics["late"] == [(3, 1.0), (4, 1.0), (5, 1.0)]
    assert (run.params["max_steps"], run.params["new"]) == ("3", "1")
    assert yaml.safe_load((run.files / "configuration.yaml").read_text())["max_steps"] == 9


def test_a_run_that_is_gone_begins_again_unless_the_user_names_it(make, tmp_path, caplog):
    tracker = make()
    tracker.resume("0" * 32, 2)
    tracker.start()
    assert tracker.run_id != "0" * 32
    assert "MLflow has no run 000" in caplog.text
    with pytest.raises(mlflow.exceptions.MlflowException, match="not found"):
        make(run_id="0" * 32).start()


def test_the_environment_takes_precedence_and_a_nested_run_has_its_parent(make, monkeypatch):
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "elsewhere")
    monkeypatch.setenv("MLFLOW_TAGS", '{"a": "b"}')
    monkeypatch.setenv("MLFLOW_NESTED_RUN", "true")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", make().tracking_uri)
    with mlflow.start_run() as users:
        tracker = make(tags={"c": "d"}, nested_run=False)
        tracker.start()
        assert mlflow.active_run().info.run_id == users.info.run_id
    run = tracker.client.get_run(tracker.run_id)
    assert run.data.tags["mlflow.parentRunId"] == users.info.run_id
    assert (run.data.tags["a"], run.data.tags.get("c")) == ("b", None)
    assert tracker.client.get_experiment(run.info.experiment_id).name == "elsewhere"


def test_without_an_address_the_run_is_in_the_folder_of_the_logs(tmp_path):
    mlflow_store(tmp_path / "logs")
    (tracker,) = resolve_trackers(
        "mlflow", project_name="p", run_name="r", logging_dir=tmp_path / "logs"
    )
    tracker.start()
    tracker.log_text({"a/b": "hello"}, 3)
    tracker.finish()
    (run,) = mlflow_runs(tmp_path / "logs")
    assert (run.experiment, run.name) == ("p", "r")
    assert (tmp_path / "logs" / "mlartifacts") in run.files.parents
    assert (run.files / "texts/a/b-3.txt").read_text() == "hello"
    assert not Path("mlruns").exists()


def test_images_tables_figures_and_files(tracker, tmp_path):
    from matplotlib.figure import Figure

    colours = np.arange(2 * 3 * 5 * 7, dtype=np.uint8).reshape(2, 3, 5, 7)
    tracker.log_images({"batch": torch.as_tensor(colours)}, 3)
    tracker.log_figure({"figure": Figure(figsize=(2, 1), dpi=50)}, 3)
    tracker.log_table("named", columns=["a", "b"], data=[["x", torch.tensor(1)]], step=1)
    folder = tmp_path / "step-00000100"
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(b"weights")
    tracker.log_model(folder, step=100)
    tracker.log_artifact(folder / "model.safetensors")
    run = written(tracker, tmp_path)
    pictures = {path.name.partition("+")[0]: path for path in (run.files / "images").glob("*.png")}
    assert sorted(pictures) == ["batch~0", "batch~1", "figure"]
    for number in range(2):
        found = np.asarray(Image.open(pictures[f"batch~{number}"]))
        assert np.array_equal(found, np.moveaxis(colours[number], 0, -1))
    with Image.open(pictures["figure"]) as figure:
        assert figure.size == (100, 50)
    assert (run.files / "tables/named-1.csv").read_bytes() == b"a,b\r\nx,1\r\n"
    for path in ("model/step-100/model.safetensors", "model.safetensors"):
        assert (run.files / path).read_bytes() == b"weights"


def test_figures_and_files_by_the_arguments_of_mlflow(make, tmp_path):
    from matplotlib.figure import Figure

    background = BackgroundTracker(make())
    background.start()
    figure = Figure(figsize=(2, 1), dpi=50)
    background.log_figure(figure, "plots/a.png")
    background.log_figure(figure=figure, artifact_file="plots/b.png")
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "note.txt").write_text("note")
    background.log_artifact(local_path=str(folder / "note.txt"), artifact_path="notes")
    background.log_artifacts(str(folder))
    background.log_artifacts(local_dir=str(folder), artifact_path="inside")
    background.finish()
    run = mlflow_runs(tmp_path)[-1]
    for path in ("plots/a.png", "plots/b.png"):
        with Image.open(run.files / path) as read:
            assert read.size == (100, 50)
    for path in ("notes/note.txt", "note.txt", "inside/note.txt"):
        assert (run.files / path).read_text() == "note"


@pytest.mark.parametrize("named", [False, True])
def test_a_run_that_the_script_has_open_is_joined_and_stays_open(tmp_path, monkeypatch, named):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", mlflow_store(tmp_path))
    mlflow.create_experiment("mine", artifact_location=str(tmp_path))
    with mlflow.start_run(experiment_id=mlflow.get_experiment_by_name("mine").experiment_id) as own:
        tracker = MLflowTracker("project", run_id=own.info.run_id if named else None)
        tracker.service_dir = str(tmp_path / "logs")
        tracker.start()
        tracker.log({"loss": 1.0}, 1)
        tracker.status = "finished"
        tracker.finish()
        assert tracker.client.get_run(own.info.run_id).info.status == "RUNNING"
        mlflow.log_metric("final", 2.0, step=2)
    [run] = mlflow_runs(tmp_path)
    assert (run.experiment, run.status) == ("mine", "FINISHED")
    assert (run.metrics["loss"], run.metrics["final"]) == ([(1, 1.0)], [(2, 2.0)])
