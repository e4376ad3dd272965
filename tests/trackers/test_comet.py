"""Against the real SDK in its offline mode: what is claimed is read back from its archives."""

import csv
import io
import random
import shutil

import numpy as np
import pytest
import torch

from tests.helpers.services import QUIET_COMET as QUIET
from tests.helpers.services import comet_runs
from trackers import CometMLTracker

comet_ml = pytest.importorskip("comet_ml")
Image = pytest.importorskip("PIL.Image")


def make(tmp_path, **options):
    return CometMLTracker("project", offline_directory=str(tmp_path), **{**QUIET, **options})


@pytest.fixture
def tracker(tmp_path):
    tracker = make(tmp_path)
    tracker.start()
    yield tracker
    tracker.finish()


def written(tracker, tmp_path, status="finished"):
    tracker.status = status
    tracker.finish()
    return comet_runs(tmp_path)[-1]


def test_values_configuration_and_the_end(tracker, tmp_path):
    tracker.store_init_configuration({"lr": 0.1, "model": {"dtype": torch.float32}})
    tracker.log({"loss": torch.tensor([0.5]), "note": "a text"}, 5)
    tracker.log({"val": np.float64(2.0), "parts": {"a": 1}}, 5)
    tracker.log({"slow": 3.0}, 4)
    with pytest.raises(TypeError, match=r"bad \(Tensor\)"):
        tracker.log({"bad": torch.zeros(2), "loss": 0.25}, 10)
    run = written(tracker, tmp_path, "preempted")
    assert run.experiment["project_name"] == "project"
    assert run.metrics["loss"] == [(5, 0.5), (10, 0.25)]
    assert run.metrics["val"] == [(5, 2.0)]
    assert run.metrics["parts/a"] == [(5, 1)]
    assert run.metrics["slow"] == [(4, 3.0)]
    assert run.parameters["lr"] == 0.1
    assert run.parameters["model|dtype"] == "torch.float32"
    assert run.others["note"] == "a text"
    assert run.others["status"] == "preempted"


def test_an_experiment_that_comet_does_not_begin_is_an_outage(tmp_path, monkeypatch, refusing):
    monkeypatch.setenv("COMET_URL_OVERRIDE", f"{refusing}/clientlib/")
    tracker = make(tmp_path, online=True, api_key="0" * 25)
    with pytest.raises(ConnectionError, match="did not start the experiment"):
        tracker.start()
    tracker.init_kwargs["online"] = False  # what takes everything
    tracker.start()
    tracker.log({"loss": 0.5}, 5)
    assert written(tracker, tmp_path).metrics["loss"] == [(5, 0.5)]


def test_disabled_comet_is_no_outage(tmp_path):
    tracker = make(tmp_path, disabled=True)
    tracker.start()
    tracker.log({"loss": 0.5}, 5)
    tracker.finish()
    assert not list(tmp_path.iterdir())


def test_without_a_status_none_is_recorded(tracker, tmp_path):
    assert "status" not in written(tracker, tmp_path, "running").others


def test_a_run_that_resumes_goes_on_in_the_same_experiment(tmp_path, monkeypatch):
    monkeypatch.setenv("COMET_START_MODE", "create")  # what the first is, and no later one
    first = make(tmp_path / "a")
    assert first.run_id is None
    first.start()
    first.log({"loss": 1.0}, 1)
    first.finish()
    second = make(tmp_path / "b")
    second.resume(first.run_id, 1)
    second.start()
    second.log({"loss": 2.0}, 2)
    second.finish()
    (one,), (two,) = comet_runs(tmp_path / "a"), comet_runs(tmp_path / "b")
    assert one.key == two.key == first.run_id == second.run_id
    assert two.experiment["resume_strategy"] == "get_or_create"
    assert one.metrics["loss"] + two.metrics["loss"] == [(1, 1.0), (2, 2.0)]


def uploads(run, kind):
    return [one for one in run.uploads if one["upload_type"] == kind]


def name_of(upload):
    about = upload["additional_params"]
    return about["figName"] if upload["upload_type"] == "visualization" else about["fileName"]


def picture(run, upload):
    return np.asarray(Image.open(io.BytesIO(run.content(upload))).convert("RGB"))


def test_images_and_figures(tracker, tmp_path):
    from matplotlib.figure import Figure

    colours = np.arange(2 * 3 * 5 * 7, dtype=np.uint8).reshape(2, 3, 5, 7)
    tracker.log_images({"batch": colours, "one": torch.as_tensor(colours[1])}, 3)
    tracker.log_figure({"f": Figure(figsize=(2, 1), dpi=50)}, 4)
    run = written(tracker, tmp_path)
    found = {name_of(one): one for one in uploads(run, "visualization")}
    assert found.keys() == {"batch/0", "batch/1", "one", "f"}
    expected = np.moveaxis(colours, 1, -1)
    for name, image in {"batch/0": expected[0], "batch/1": expected[1], "one": expected[1]}.items():
        assert np.array_equal(picture(run, found[name]), image)
        assert found[name]["additional_params"]["step"] == 3
    assert picture(run, found["f"]).shape == (50, 100, 3)


def test_tables_histograms_and_texts(tracker, tmp_path):
    tracker.log_table("t", columns=["a", "b"], data=[["x", torch.tensor(1)]], step=2)
    tracker.log_table("none", columns=["a", 1], data=[])
    tracker.log_histogram({"h": torch.tensor([0.0, 1.0, float("inf")])}, 3)
    tracker.log_text({"sample": "once upon"}, 4)
    run = written(tracker, tmp_path)
    (table,) = (one for one in run.uploads if name_of(one) == "t.csv")
    assert run.content(table).decode().split() == ["a,b", "x,1"]
    assert table["additional_params"]["step"] == 2
    (empty,) = (one for one in run.uploads if name_of(one) == "none.csv")
    assert run.content(empty).decode().split() == ["a,1"]
    (histogram,) = uploads(run, "histogram3d")
    assert (name_of(histogram), histogram["additional_params"]["step"]) == ("h", 3)
    (text,) = uploads(run, "text-sample")
    assert run.content(text) == b"once upon"
    assert text["metadata"] == {"name": "sample"}


def test_a_table_is_not_read_from_a_file_of_its_name(tracker, tmp_path, monkeypatch):
    """Not a file of its name in the working folder; a list is one cell."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "t.csv").write_text("of the user's own")
    tracker.log_table("t", columns=["a", "b"], data=[[[1, 2], None], ["x", 'say "y"']], step=2)
    (table,) = (one for one in written(tracker, tmp_path).uploads if name_of(one) == "t.csv")
    (run,) = comet_runs(tmp_path)
    rows = list(csv.reader(io.StringIO(run.content(table).decode(), newline="")))
    assert rows == [["a", "b"], ["[1, 2]", ""], ["x", 'say "y"']]


def test_a_checkpoint_is_a_model(tracker, tmp_path):
    folder = tmp_path / "step-00000100"
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(b"weights")
    tracker.log_model(folder, step=100)
    tracker.log_artifact(folder, "data", "dataset")
    tracker.log_artifact(folder / "model.safetensors")
    shutil.rmtree(folder)  # a later checkpoint takes its place
    run = written(tracker, tmp_path)
    (model,) = uploads(run, "model-element")
    assert model["metadata"] == {"step": 100}
    names = [name_of(one) for one in run.uploads]
    assert "data/model.safetensors" in names
    assert "model.safetensors" in names
    assert all(run.content(one) == b"weights" for one in run.uploads)


def test_offline_files_lie_in_a_folder_that_need_not_exist(tmp_path):
    tracker = CometMLTracker("project", **QUIET)
    tracker.service_dir = str(tmp_path / "run" / "logs")
    tracker.start()
    tracker.finish()
    assert len(comet_runs(tmp_path / "run" / "logs" / ".cometml-runs")) == 1


def test_archives_of_runs_with_one_seed_do_not_replace_each_other(tmp_path):
    key = comet_ml.generate_guid()
    for step in (1, 2):
        random.seed(5)
        tracker = make(tmp_path)
        tracker.resume(key, step - 1)
        tracker.start()
        tracker.log({"loss": 1.0}, step)
        tracker.finish()
    assert [run.metrics["loss"] for run in comet_runs(tmp_path)] == [[(1, 1.0)], [(2, 1.0)]]


def test_an_experiment_that_the_script_has_begun_is_joined_and_goes_on(tmp_path):
    quiet = {name: value for name, value in QUIET.items() if name != "online"}
    experiment = comet_ml.start(
        online=False,
        experiment_config=comet_ml.ExperimentConfig(offline_directory=str(tmp_path), **quiet),
    )
    tracker = make(tmp_path)
    tracker.start()
    tracker.log({"loss": 1.0}, 1)
    tracker.finish()
    experiment.log_metric("final", 2.0, step=2)
    experiment.end()
    [run] = comet_runs(tmp_path)
    assert (run.metrics["loss"], run.metrics["final"]) == ([(1, 1.0)], [(2, 2.0)])
