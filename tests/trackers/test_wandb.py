"""Against the real SDK in its offline mode: what is claimed is read back from its files."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.helpers.services import QUIET_WANDB as QUIET
from tests.helpers.services import wandb_runs
from trackers import BackgroundTracker, WandBTracker
from trackers.wandb import Rows

matplotlib = pytest.importorskip("matplotlib")
wandb = pytest.importorskip("wandb")
Image = pytest.importorskip("PIL.Image")


@pytest.fixture
def tracker(tmp_path):
    tracker = WandBTracker("project", dir=str(tmp_path), **QUIET)
    tracker.start()
    yield tracker
    tracker.finish()


def written(tracker, tmp_path, status="finished"):
    tracker.status = status
    tracker.finish()
    return wandb_runs(tmp_path)[-1]


def test_values_configuration_and_the_end(tracker, tmp_path):
    tracker.store_init_configuration(
        {"lr": 0.1, "model": {"shape": (3, 4), "path": Path("x")}, "dtype": torch.float32}
    )
    tracker.log({"loss": torch.tensor([0.5]), "note": "a text"}, 5)
    tracker.log({"val": np.float64(2.0)}, 5)
    tracker.log({"loss": 0.25, "parts": {"a": 1}}, 10)
    run = written(tracker, tmp_path)
    assert run.run.project == "project"
    assert run.series("loss") == [(5, 0.5), (10, 0.25)]
    assert run.series("val") == [(5, 2.0)]
    assert run.series("note") == [(5, "a text")]
    assert run.series("parts") == [(10, {"a": 1})]
    assert [row["_step"] for row in run.rows] == [5, 10]
    assert run.config["lr"] == 0.1
    assert run.config["model"] == {"shape": [3, 4], "path": "x"}
    assert run.config["dtype"] == "torch.float32"
    assert run.summary["loss"] == 0.25
    assert run.summary["status"] == "finished"
    assert run.exit_code == 0
    axes = {one.glob_name or one.name: one.step_metric for one in run.metrics}
    assert axes["*"] == "global_step"


@pytest.mark.parametrize(
    ("status", "exit_code", "recorded"),
    [("failed", 1, "failed"), ("preempted", 1, "preempted"), ("running", 0, None)],
)
def test_status_of_the_run(tracker, tmp_path, status, exit_code, recorded):
    run = written(tracker, tmp_path, status)
    assert (run.exit_code, run.preempting) == (exit_code, status == "preempted")
    assert run.summary.get("status") == recorded


def test_a_large_configuration_is_there_when_the_run_is_handed_out(tmp_path):
    background = BackgroundTracker(WandBTracker("project", dir=str(tmp_path), **QUIET))
    background.start()
    background.store_init_configuration({f"option_{n}": n for n in range(3000)} | {"lr": 0.1})
    assert background.run.config["lr"] == 0.1
    background.finish()


def test_values_that_arrive_late_are_kept_under_their_own_step(tracker, tmp_path):
    tracker.log({"loss": 1.0}, 10)
    tracker.log({"slow": 2.0}, 4)
    tracker.log({"slow": 3.0})
    tracker.log({"loss": 4.0}, 11)
    tracker.log({"loss": 5.0}, 20)
    run = written(tracker, tmp_path)
    assert run.series("loss") == [(10, 1.0), (11, 4.0), (20, 5.0)]
    assert [row["slow"] for row in run.rows if "slow" in row] == [2.0, 3.0]
    assert (4, 2.0) in run.series("slow")
    assert [row["_step"] for row in run.rows] == [10, 11, 12, 13, 20]


def test_rows_of_a_run_that_goes_on():
    """W&B had rows up to 19 when the run was killed, the last of them not yet whole."""
    rows = Rows(20, 15)
    assert [rows.row_of(step) for step in (16, 18)] == [None, None]
    assert [rows.row_of(step) for step in (19, 19, 20, 30)] == [20, 20, 21, 30]
    assert rows.row_of(12) == 31  # it was not told before: it belongs to before the checkpoint
    rows = Rows(21, 20)  # it was saved at its end
    assert [rows.row_of(step) for step in (21, 22)] == [21, 22]
    rows = Rows(21, None)  # an evaluation behind it
    assert rows.row_of(20) == 21
    rows = Rows(21, 20)  # a validation that was still due
    assert [rows.row_of(step) for step in (20, 21)] == [21, 22]
    assert [Rows().row_of(None), Rows().row_of(0)] == [0, 0]


def test_late_rows_take_no_step_from_a_run_that_goes_on():
    """Rows run ahead of the steps by one for each late value; W&B says which step it has last."""
    rows, begun = Rows(), 0
    for step in range(1, 13):
        begun = rows.row_of(step) + 1
        if step % 3 == 0:
            begun = rows.row_of(step - 2) + 1
    assert begun == 17
    again = Rows(begun, 8, 12)
    placed = {step: again.row_of(step) for step in range(9, 16)}
    assert [step for step, row in placed.items() if row is None] == [9, 10, 11]
    assert [placed[step] for step in range(12, 16)] == [17, 18, 19, 20]


def test_rows_that_the_program_logs_itself_drop_no_value(tracker, tmp_path):
    for step in (1, 2, 3):
        tracker.tracker.log({"own": 1.0})
        tracker.tracker.log({"own": 2.0})
        tracker.log({"loss": step / 2}, step)
    assert written(tracker, tmp_path).series("loss") == [(1, 0.5), (2, 1.0), (3, 1.5)]


def test_a_run_that_resumes_goes_on_in_the_same_run(tmp_path):
    first = WandBTracker("project", dir=str(tmp_path), **QUIET)
    assert first.run_id is None
    first.start()
    first.log({"loss": 1.0}, 1)
    first.finish()
    second = WandBTracker("project", dir=str(tmp_path), **QUIET)
    second.resume(first.run_id, 1)
    second.start()
    second.log({"loss": 2.0}, 2)
    second.finish()
    one, two = wandb_runs(tmp_path)
    assert one.run.run_id == two.run.run_id == first.run_id == second.run_id
    assert two.run.resume
    assert not one.run.resume
    assert one.series("loss") + two.series("loss") == [(1, 1.0), (2, 2.0)]


@pytest.mark.parametrize("previous", ["earlier", None])
def test_a_failed_start_is_retried_under_the_same_id(tmp_path, monkeypatch, refusing, previous):
    monkeypatch.setenv("WANDB_BASE_URL", refusing)
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    away = {**QUIET, "mode": "online"}
    tracker = WandBTracker("project", dir=str(tmp_path), **away)
    for _ in range(2):
        tracker.resume(previous, 1)
        with pytest.raises(wandb.Error, match="400"):
            tracker.start()
    tried = tracker.run_id
    assert tried == (previous or tried)
    tracker.init_kwargs |= QUIET  # now it can
    tracker.resume(previous, 1)
    tracker.start()
    tracker.log({"loss": 1.0}, 2)
    tracker.finish()
    run = wandb_runs(tmp_path)[-1]
    assert run.run.run_id == tracker.run_id == tried
    assert run.series("loss") == [(2, 1.0)]


def test_a_retried_start_leaves_the_users_own_run_alone(tmp_path, monkeypatch, refusing):
    monkeypatch.setenv("WANDB_BASE_URL", refusing)
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    users = wandb.init(dir=str(tmp_path), **QUIET)
    options = {**QUIET, "mode": "online", "reinit": "create_new"}
    tracker = WandBTracker("project", dir=str(tmp_path), **options)
    with pytest.raises(wandb.Error, match="400"):
        tracker.start()
    tracker.init_kwargs |= QUIET
    tracker.start()
    users.log({"own": 1.0})
    tracker.log({"loss": 1.0}, 2)
    tracker.finish()
    users.finish()
    runs = {run.run.run_id: run for run in wandb_runs(tmp_path)}
    assert [row["own"] for row in runs[users.id].rows] == [1.0]
    assert runs[tracker.run_id].series("loss") == [(2, 1.0)]


def pictures(run, row, name):
    entry = row[name]
    names = entry.get("filenames") or [entry["path"]]
    return [np.asarray(Image.open(run.files / each)) for each in names]


@pytest.mark.parametrize("kind", [np.asarray, torch.as_tensor])
def test_images_of_every_shape(tracker, tmp_path, kind):
    colours = np.arange(2 * 3 * 5 * 7, dtype=np.uint8).reshape(2, 3, 5, 7)
    tracker.log_images(
        {
            "batch": kind(colours),
            "last": kind(np.moveaxis(colours[0], 0, -1).copy()),
            "gray": kind(colours[0, 0] / np.float32(255)),
            "list": [kind(colours[1]), wandb.Image(np.zeros((5, 7), np.uint8))],
        },
        3,
    )
    run = written(tracker, tmp_path)
    (row,) = run.rows
    assert row["global_step"] == 3
    expected = np.moveaxis(colours, 1, -1)
    assert np.array_equal(pictures(run, row, "batch"), expected)
    assert np.array_equal(pictures(run, row, "last")[0], expected[0])
    assert np.array_equal(pictures(run, row, "gray")[0], colours[0, 0])
    assert np.array_equal(pictures(run, row, "list")[0], expected[1])
    assert len(row["list"]["filenames"]) == 2


def test_tables_histograms_figures_and_texts(tracker, tmp_path, caplog):
    from matplotlib.figure import Figure

    figure = Figure(figsize=(2, 1), dpi=50)
    canvas = figure.canvas
    tracker.log_table("named", columns=["a", "b"], data=[["x", torch.tensor(1)]], step=1)
    tracker.log_histogram({"h": torch.tensor([[0.0, 1.0], [1.0, float("nan")]])}, 2)
    tracker.log_figure({"f": figure}, 3)
    tracker.log_text({"t": "a < b"}, 4)
    run = written(tracker, tmp_path)
    by_step = {row["global_step"]: row for row in run.rows}
    table = json.loads((run.files / by_step[1]["named"]["path"]).read_text())
    assert (table["columns"], table["data"]) == (["a", "b"], [["x", 1]])
    assert sum(by_step[2]["h"]["values"]) == 3
    assert "1 of 4 values" in caplog.text
    assert (by_step[3]["f"]["width"], by_step[3]["f"]["height"]) == (100, 50)
    assert figure.canvas is canvas
    assert "<pre>a &lt; b</pre>" in (run.files / by_step[4]["t"]["path"]).read_text()
    assert matplotlib.get_backend()  # drawing chose no other


def test_a_table_may_have_anything_in_it(tracker, tmp_path):
    """Also numbers and texts in one column, which W&B gives one type."""
    rows = [[1, Path("x"), None], ["y", torch.float32, [1, "z"]], [2.5, np.zeros(2), {"k": b"v"}]]
    tracker.log_table("t", columns=["a", "b", "c"], data=rows, step=1)
    run = written(tracker, tmp_path)
    table = json.loads((run.files / run.rows[0]["t"]["path"]).read_text())
    assert table["data"] == [
        [1, "x", None],
        ["y", "torch.float32", [1, "z"]],
        [2.5, [0.0, 0.0], {"k": "b'v'"}],
    ]


def test_a_checkpoint_is_a_model_with_its_step(tracker, tmp_path):
    folder = tmp_path / "step-00000100"
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(b"weights")
    tracker.log_model(folder, step=100)
    tracker.log_artifact(folder / "model.safetensors", "data", "dataset")
    named = tmp_path / "Bär 1 (neu).txt"  # W&B takes no such name
    named.write_text("x")
    tracker.log_artifact(named)
    shutil.rmtree(folder)  # a later checkpoint takes its place
    run = written(tracker, tmp_path)
    model, data, renamed = run.artifacts
    assert renamed.name == "B-r-1-neu-.txt"
    assert [entry.path for entry in renamed.manifest.contents] == [named.name]
    assert (model.type, model.name) == ("model", f"model-{run.run.run_id}")
    assert set(model.aliases) == {"latest", "step-100"}
    (entry,) = model.manifest.contents
    assert entry.path == "model.safetensors"
    assert Path(entry.local_path).read_bytes() == b"weights"
    assert (data.type, data.name, list(data.aliases)) == ("dataset", "data", ["latest"])


FORGETFUL = """
from trainer import Accelerator
accelerator = Accelerator(cpu=True, log_with="wandb", project_dir="run")
accelerator.init_trackers("project", init_kwargs={"wandb": {"mode": "offline"}})
run = accelerator.get_tracker("wandb", unwrap=True)
accelerator.log({"loss": 1.0}, step=0)
"""


def test_a_script_without_end_training_loses_nothing(tmp_path):
    """W&B's own exit hook closes its connection, so ours must come first."""
    (tmp_path / "script.py").write_text(FORGETFUL)
    root = str(Path(__file__).resolve().parents[2])
    done = subprocess.run(
        [sys.executable, "script.py"],
        env={**os.environ, "PYTHONPATH": root, "WANDB_SILENT": "true"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (done.returncode, done.stderr) == (0, "")
    (run,) = wandb_runs(tmp_path / "run")
    assert [row["loss"] for row in run.rows] == [1.0]


def test_a_run_that_the_script_has_opened_is_joined_and_stays_open(tmp_path):
    with wandb.init(project="mine", dir=str(tmp_path), **QUIET) as run:
        run.log({"own": 0.5})
        for _ in range(2):  # a fit, and another one
            tracker = WandBTracker("project", dir=str(tmp_path))
            tracker.start()
            assert tracker.run_id == run.id
            tracker.log({"loss": 1.0}, 1)
            tracker.log({"loss": 2.0}, 2)
            tracker.status = "finished"
            tracker.finish()
        wandb.log({"final": 3.0})
    [found] = wandb_runs(tmp_path)
    assert (found.run.project, found.exit_code) == ("mine", 0)
    assert found.series("loss") == [(1, 1.0), (2, 2.0)] * 2
    assert (found.rows[0]["own"], found.rows[-1]["final"]) == (0.5, 3.0)


def test_a_fit_that_resumes_in_a_new_run_of_the_script_logs_every_step(tmp_path):
    with wandb.init(project="mine", dir=str(tmp_path), **QUIET) as run:
        for number in range(20):
            run.log({"own": number})
        resumed = WandBTracker("project", dir=str(tmp_path))
        resumed.resume("a run of before", 8)
        resumed.start()
        for step in (9, 10, 11):
            resumed.log({"loss": step / 2}, step)
        resumed.finish()
    [found] = wandb_runs(tmp_path)
    assert found.series("loss") == [(9, 4.5), (10, 5.0), (11, 5.5)]


def test_a_separate_run_is_closed_although_the_script_has_one_open(tmp_path):
    with wandb.init(project="mine", dir=str(tmp_path), **QUIET) as run:
        tracker = WandBTracker("other", dir=str(tmp_path), reinit="create_new", **QUIET)
        tracker.start()
        assert tracker.run_id != run.id
        tracker.finish()
        run.log({"final": 3.0})
    assert {one.run.project: one.exit_code for one in wandb_runs(tmp_path)} == {
        "mine": 0,
        "other": 0,
    }
