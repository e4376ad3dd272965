"""What the trackers of W&B, Comet and MLflow share, read back from what the SDKs write to disk."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from tests.helpers.services import (
    QUIET_COMET,
    QUIET_WANDB,
    comet_runs,
    mlflow_runs,
    mlflow_store,
    wandb_runs,
)
from trackers import (
    BackgroundTracker,
    CometMLTracker,
    MLflowTracker,
    WandBTracker,
    resolve_trackers,
)

OWN_ID = "a1" * 16  # as Comet's keys are


class Run(NamedTuple):
    id: str
    project: str
    name: str | None
    loss: list[tuple[int, float]]


class Service(NamedTuple):
    name: str
    kind: Callable[..., Any]
    options: dict[str, Any]
    id: str  # the option with the id of a run
    runs: Callable[[], list[Run]]

    def make(self, **more: Any) -> Any:
        return self.kind("project", **self.options, **more)


@pytest.fixture(params=["wandb", "comet_ml", "mlflow"])
def service(request: pytest.FixtureRequest, tmp_path: Path) -> Service:
    pytest.importorskip(request.param)
    folder = str(tmp_path)
    if request.param == "wandb":
        return Service(
            "wandb",
            WandBTracker,
            {"dir": folder, **QUIET_WANDB},
            "id",
            lambda: [
                Run(one.run.run_id, one.run.project, one.run.display_name, one.series("loss"))
                for one in wandb_runs(tmp_path)
            ],
        )
    if request.param == "mlflow":
        options = {"tracking_uri": mlflow_store(tmp_path / "db"), "logging_dir": folder}
        return Service(
            "mlflow",
            MLflowTracker,
            options,
            "run_id",
            lambda: [
                Run(one.id, one.experiment, one.name, one.metrics.get("loss", []))
                for one in mlflow_runs(tmp_path / "db")
            ],
        )
    return Service(
        "comet_ml",
        CometMLTracker,
        {"offline_directory": folder, **QUIET_COMET},
        "experiment_key",
        lambda: [
            Run(
                one.key,
                one.experiment["project_name"],
                one.others.get("Name"),
                one.metrics.get("loss", []),
            )
            for one in comet_runs(tmp_path)
        ],
    )


def test_by_name_with_a_project_and_a_name_of_the_run(service):
    (tracker,) = resolve_trackers(
        service.name,
        project_name="p",
        run_name="r",
        init_kwargs={service.name: service.options},
    )
    background = BackgroundTracker(tracker)
    background.start()
    background.log({"loss": 1.0}, 1)
    background.finish()
    assert (background.failures, background.dropped) == (0, 0)
    assert service.runs() == [Run(background.run_id, "p", "r", [(1, 1.0)])]


def test_a_run_id_of_the_user_is_kept(service):
    own = OWN_ID
    if service.name == "mlflow":  # which names its runs itself
        first = service.make()
        first.start()
        own = first.run_id
    tracker = service.make(**{service.id: own})
    tracker.resume("another", 1)
    tracker.start()
    tracker.finish()
    assert [run.id for run in service.runs()] == [tracker.run_id] == [own]


def test_a_tracker_that_is_not_started_is_an_error(service, tmp_path):
    tracker, before = service.make(), list(tmp_path.rglob("*"))
    tracker.finish()
    with pytest.raises(RuntimeError, match="call `start` first"):
        tracker.log({"loss": 1.0}, 1)
    assert list(tmp_path.rglob("*")) == before


def test_random_generators_are_unchanged_and_missing_uploads_an_error(service):
    def states() -> tuple[object, ...]:
        return random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()

    tracker, before = service.make(), states()
    tracker.start()
    tracker.log({"loss": 1.0}, 1)
    tracker.log_images({"x": np.zeros((4, 5))}, 1)
    tracker.log_text({"t": "x"}, 1)
    for log in (tracker.log_model, tracker.log_artifact):
        with pytest.raises(FileNotFoundError, match="nowhere"):
            log("nowhere")
    tracker.finish()
    assert states() == before
