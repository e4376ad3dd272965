"""The trackers of Aim, ClearML, DVCLive, SwanLab and Trackio, against the packages themselves.

Each run is in a process of its own, and read back from what the package has written to disk. Those
whose package is not installed are skipped; ``make test-trackers`` installs all.
"""

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

from tests.helpers.service_runs import image

ROOT = Path(__file__).parents[2]
NAMES = ("aim", "clearml", "dvclive", "swanlab", "trackio")
COLOURS = np.moveaxis(image(), 1, -1)
IDENTITY = {"GIT_AUTHOR_NAME": "a", "GIT_AUTHOR_EMAIL": "a@b"}
IDENTITY |= {name.replace("AUTHOR", "COMMITTER"): value for name, value in IDENTITY.items()}


@pytest.fixture(params=NAMES)
def name(request):
    spec = find_spec(request.param)
    if spec is None or spec.origin is None:
        pytest.skip(f"{request.param} is not installed")
    return request.param


def run(what, name, folder):
    folder.mkdir(exist_ok=True)
    environment = {
        **os.environ,
        **IDENTITY,
        "PYTHONPATH": str(ROOT),
        "HOME": str(folder),
        "TRACKIO_DIR": str(folder / "trackio"),
        "CLEARML_CACHE_DIR": str(folder / "clearml"),
        "DVC_NO_ANALYTICS": "1",
    }
    if what != "absent":
        environment["CLEARML_OFFLINE_MODE"] = "1"
    if not (folder / ".git").exists():  # of which DVC makes its own repository
        for command in (["init", "-q"], ["commit", "-q", "--allow-empty", "-m", "first"]):
            subprocess.run(["git", *command], cwd=folder, env=environment, check=True)
    command = [sys.executable, "-m", "tests.helpers.service_runs", what, name, str(folder)]
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=250
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads((folder / f"{what}.json").read_text())


def test_everything_is_recorded_and_a_run_that_resumes_goes_on_in_the_same_run(name, tmp_path):
    first, second = run("record", name, tmp_path), run("resume", name, tmp_path)
    assert first["generators"]
    assert first["excepthook"] or name == "clearml"  # which leaves its own
    for each in (first, second):
        assert (each["failures"], each["dropped"]) == (0, 0)
    runs = second["runs"]
    assert {(one["name"], one["project"]) for one in runs} == {("first", "project")}

    losses = [loss for one in runs for loss in one["loss"]]
    kept = [[1, 1.0], [2, 2.0], *([step, 10.0 * step] for step in (3, 4, 5))]
    killed = [[3, 3.0], [4, 4.0]]  # logged after the last checkpoint
    if name in ("aim", "dvclive"):
        assert losses == kept
    else:
        assert losses == kept[:2] + killed + kept[2:]
    if name == "clearml":  # offline, where a task cannot be continued
        assert runs[1]["tags"] == [f"continues {first['id']}"]
    else:
        assert {first["id"], second["id"]} == {one["id"] for one in runs}

    stored = runs[0]
    if name == "clearml":
        assert stored["config"] == {
            "General/lr": "0.1",
            "model/dtype": "torch.float32",
            "model/none": "",
        }
        assert runs[1]["config"] == {"General/new": "0.2"}
    else:
        merged = {key: value for one in runs for key, value in one["config"].items()}
        assert merged["new"] == 0.2
        if name in ("dvclive", "swanlab"):  # the others keep the latest alone
            assert merged["lr"] == 0.1
            assert merged["model"] == {"dtype": "torch.float32", "none": None}

    images = [np.asarray(picture)[..., :3] for picture in stored["images"]]
    assert len(images) == 2
    for found, expected in zip(images, COLOURS, strict=True):
        if name == "clearml":  # as JPEG
            assert found.shape == expected.shape
        else:
            assert np.array_equal(found, expected)
    rows = [{"a": "x", "b": 1}, {"a": "y", "b": 2}]
    table = {"aim": "a,b\r\nx,1\r\ny,2\r\n", "clearml": [["x", "y"], [1, 2]]}.get(name, rows)
    assert stored["texts"] == [table, "once upon"]
    status = {"clearml": None, "swanlab": "RUN_STATE_FINISHED"}.get(name, "finished")
    assert {one["status"] for one in runs} == {status}
    assert sorted(stored["files"].values()) == ["weights", "weights"]
    for label in ("data", "model"):
        assert any(file.startswith(label) for file in stored["files"])


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    return run("fit", "none", tmp_path_factory.mktemp("none"))["records"]


def test_a_fit_logs_what_the_local_record_has(name, tmp_path, reference):
    found = run("fit", name, tmp_path)
    assert found["records"] == reference
    (stored,) = found["runs"]
    assert stored["loss"] == [[one["step"], one["train/loss"]] for one in reference]


def test_a_service_that_is_not_there_changes_nothing(name, tmp_path, reference):
    assert run("absent", name, tmp_path)["records"] == reference


@pytest.mark.parametrize("name", ["clearml", "swanlab", "trackio"], indirect=True)
def test_a_run_that_the_script_has_opened_is_joined_and_stays_open(name, tmp_path):
    assert run("join", name, tmp_path) == {"joined": True, "failures": 0, "open": True}


OF_DVCLIVE = """
import sys
from trackers import DVCLiveTracker

step, *names = sys.argv[1:]
tracker = DVCLiveTracker(dir="live", dvcyaml=None, save_dvc_exp=False)
if step == "2":
    tracker.resume(None, 1)
tracker.start()
tracker.log(dict.fromkeys(names, 1.0), int(step))
tracker.finish()
"""


def test_names_of_dvclive_are_files_in_its_folder_and_a_torn_row_is_dropped(tmp_path):
    pytest.importorskip("dvclive")
    outside = tmp_path / "outside"

    def log(step):
        names = ["loss", "loss/box", "iou/a", "iou", str(outside), "../../up"]
        subprocess.run(
            [sys.executable, "-c", OF_DVCLIVE, str(step), *names],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            check=True,
            timeout=250,
        )

    log(1)
    metrics = tmp_path / "live" / "plots" / "metrics"
    (metrics / "loss.tsv").write_text((metrics / "loss.tsv").read_text() + "2")  # then killed
    (metrics / "loss.box.tsv").write_text("")
    log(2)
    found = {str(f.relative_to(metrics)): f.read_text() for f in metrics.rglob("*.tsv")}
    inside = f"{outside.relative_to('/')}.tsv"
    names = {"loss.tsv", "loss.box.tsv", "iou/a.tsv", "iou/value.tsv", "up.tsv", inside}
    assert found.keys() == names
    for name, text in found.items():
        steps = [int(row.split("\t")[0]) for row in text.splitlines()[1:]]
        assert steps == ([2] if name == "loss.box.tsv" else [1, 2])
    assert not [*tmp_path.glob("outside*"), *tmp_path.glob("up*")]
