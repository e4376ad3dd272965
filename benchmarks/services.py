"""Log the same numbers to four services: by direct calls in the loop, and through Cadence."""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch

from trackers import (
    BackgroundTracker,
    CometMLTracker,
    CSVTracker,
    GeneralTracker,
    JsonlTracker,
    TensorBoardTracker,
    WandBTracker,
)
from trainer.loops.recorder import Recorder
from trainer.tracking import RunTrackers

VALUES = {"train/loss": 0.5, "train/accuracy": 0.75, "grad_norm": 1.5, "lr": 1e-3}
Call = Callable[[int], None]

_COMET = {
    "log_code": False,
    "log_env_details": False,
    "log_git_metadata": False,
    "auto_output_logging": False,
    "display_summary_level": 0,
}
_WANDB = {"mode": "offline", "settings": {"console": "off", "silent": True}}


@contextmanager
def sdks(folder: Path) -> Iterator[Call]:
    """Yield what a loop without trackers would call; the table is flushed as Cadence's is."""
    import comet_ml
    import wandb
    from torch.utils.tensorboard import SummaryWriter

    with ExitStack() as stack:
        writer = stack.enter_context(SummaryWriter(str(folder / "tensorboard")))
        run = wandb.init(project="benchmark", dir=str(folder), **_WANDB)
        stack.callback(run.finish)
        experiment = comet_ml.start(
            project_name="benchmark",
            online=False,
            experiment_config=comet_ml.ExperimentConfig(
                offline_directory=str(folder / "comet"), auto_metric_logging=False, **_COMET
            ),
        )
        stack.callback(experiment.end)
        table = stack.enter_context(open(folder / "table.csv", "w", newline=""))
        rows = csv.writer(table)

        def call(step: int) -> None:
            for name, value in VALUES.items():
                writer.add_scalar(name, value, step)
            run.log(VALUES, step=step)
            experiment.log_metrics(VALUES, step=step)
            rows.writerow([step, *VALUES.values()])
            table.flush()

        yield call


def _trackers(folder: Path) -> list[GeneralTracker]:
    return [
        CSVTracker("run", folder),
        TensorBoardTracker("run", folder),
        WandBTracker("benchmark", dir=str(folder), **_WANDB),
        CometMLTracker(
            "benchmark", online=False, offline_directory=str(folder / "comet"), **_COMET
        ),
    ]


@contextmanager
def accelerator_log(folder: Path) -> Iterator[Call]:
    """Yield a call that does what `Accelerator.log` does."""
    tracking = RunTrackers(_trackers(folder), folder)
    tracking.init_trackers("benchmark")
    for tracker in tracking.trackers:
        tracker.tracker  # noqa: B018  # waits until it has started
    try:
        yield lambda step: tracking.log(VALUES, step)
    finally:
        tracking.end_training()


@contextmanager
def trainer_record(folder: Path) -> Iterator[Call]:
    """Yield a call that records reduced values as the `Trainer` does, with the local record."""
    background = [BackgroundTracker(tracker) for tracker in _trackers(folder)]
    recorder = Recorder(BackgroundTracker(JsonlTracker(folder / "metrics.jsonl")), background)
    values = {name: torch.tensor(value) for name, value in VALUES.items()}
    recorder.start({})
    for tracker in background:
        tracker.tracker  # noqa: B018  # likewise

    def call(step: int) -> None:
        recorder.record(values, step=step, epoch=0)

    try:
        yield call
    finally:
        recorder.finish()
