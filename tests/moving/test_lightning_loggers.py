"""Loggers of one's own class, and what Lightning's loggers and messages do beside the metrics."""

from __future__ import annotations

import csv
import io
import logging
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import nn
from torch.utils.data import DataLoader

import trainer.lightning as L
from callbacks import Callback
from tests.helpers.services import mlflow_runs, mlflow_store, wandb_runs
from tests.moving.running import real
from trainer.lightning.pytorch.callbacks import LearningRateMonitor
from trainer.lightning.pytorch.loggers import (
    CSVLogger,
    MLFlowLogger,
    TensorBoardLogger,
    WandbLogger,
)
from trainer.lightning.pytorch.utilities import rank_zero

wandb = pytest.importorskip("wandb")

QUIET = {"accelerator": "cpu", "enable_progress_bar": False, "enable_model_summary": False}
LOADER = DataLoader(torch.randn(8, 4, generator=torch.Generator().manual_seed(0)), 2)


def make_logger(library: Any) -> Any:
    """Return a logger as a user of Lightning writes it, of this library or of the other."""
    module = import_module(f"{library.__name__}.pytorch.loggers.logger")
    only = import_module(f"{library.__name__}.pytorch.utilities").rank_zero_only

    class Own(module.Logger):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.metrics: list[tuple[int, str, float]] = []
            self.calls: list[Any] = []

        @property
        def name(self) -> str:
            return "own"

        @property
        def version(self) -> int:
            return 7

        @property
        @module.rank_zero_experiment
        def experiment(self) -> list[tuple[int, str, float]]:
            return self.metrics

        @only
        def log_metrics(self, metrics: dict[str, float], step: int) -> None:
            self.metrics += [(step, name, value) for name, value in metrics.items()]

        @only
        def log_hyperparams(self, params: dict[str, Any]) -> None:
            self.calls.append(dict(params))

        @only
        def save(self) -> None:
            self.saved = len(self.metrics)

        @only
        def finalize(self, status: str) -> None:
            self.calls.append(status)

    return Own()


def make_net(library: Any, fails: bool = False) -> Any:
    class Net(library.LightningModule):  # type: ignore[misc]
        def __init__(self, lr: float = 0.1) -> None:
            super().__init__()
            self.save_hyperparameters()
            self.net, self.losses, self.stages = nn.Linear(4, 1), [], []

        def on_train_start(self) -> None:
            self.logger.experiment.append((-1, "mine", 0.5))

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.stages.append(self.trainer.state.stage.value)
            if fails and batch_idx == 1:
                raise ArithmeticError
            loss = self.net(batch).square().mean()
            self.losses.append(loss.item())
            self.log("loss", loss)
            return loss

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.stages.append(self.trainer.state.stage.value)
            self.log("val", self.net(batch).mean())

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), self.hparams.lr)
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)]

    return Net()


def fit(module: Any, folder: Path, library: Any = L, **options: Any) -> Any:
    trainer = library.Trainer(
        **{**QUIET, "max_epochs": 1, "log_every_n_steps": 2, "default_root_dir": folder, **options}
    )
    trainer.fit(module, LOADER, LOADER)
    return trainer


@pytest.mark.filterwarnings("ignore")  # Lightning's own
@pytest.mark.parametrize("library", ["trainer.lightning", "lightning"])
def test_a_logger_of_ones_own_is_called_as_under_lightning(library, tmp_path):
    used = L if library == "trainer.lightning" else real("lightning")
    logger, module = make_logger(used), make_net(used)
    csv_logger = used.pytorch.loggers.CSVLogger(tmp_path)
    trainer = fit(module, tmp_path, used, logger=[logger, csv_logger])
    assert (trainer.logger, trainer.state.fn, trainer.state.finished) == (logger, "fit", True)
    trainer.validate(module, LOADER, verbose=False)
    found = {(step, name): value for step, name, value in logger.metrics if name != "epoch"}
    after = found.pop((4, "val"))
    assert found == pytest.approx(
        {
            (-1, "mine"): 0.5,
            (1, "loss"): module.losses[1],
            (3, "loss"): module.losses[3],
            (3, "val"): after,
        }
    )
    assert (3, "epoch", 0) in logger.metrics
    assert logger.calls[:2] == [{"lr": 0.1}, "success"]
    assert logger.saved == len(logger.metrics)
    order = ["sanity_check", "train", "validate"]
    assert list(dict.fromkeys(module.stages)) == order


def test_a_logger_of_ones_own_is_called_on_rank_0_and_hears_of_a_failure(ranks2, tmp_path):
    def run() -> Any:
        logger = make_logger(L)
        with pytest.raises(ArithmeticError):
            fit(make_net(L, fails=True), tmp_path, devices=2, logger=logger, log_every_n_steps=1)
        return logger.calls, [name for _, name, _ in logger.metrics]

    metrics = ["mine", "epoch", "loss"]
    assert ranks2(run) == [([{"lr": 0.1}, "failed"], metrics), ([], [])]


def test_values_go_through_log_metrics_of_a_subclass_once(tmp_path):
    class Prefixed(CSVLogger):
        def log_metrics(self, metrics: Any, step: int | None = None) -> None:
            named = {f"a/{name}": value for name, value in metrics.items() if name != "epoch"}
            super().log_metrics(named, step)

    class Logs(type(make_net(L))):  # type: ignore[misc]
        def on_train_start(self) -> None:
            self.logger.log_metrics({"mine": 0.5}, 0)

    logger = Prefixed(tmp_path)
    logger.log_metrics({"early": 1.0}, 0)
    fit(Logs(), tmp_path, logger=logger)
    rows = csv.DictReader(Path(logger.log_dir, "metrics.csv").read_text().splitlines())
    assert rows.fieldnames == ["step", "a/early", "a/mine", "a/loss", "a/val"]


def test_in_a_trial_run_calls_of_loggers_do_nothing(tmp_path):
    class Logs(type(make_net(L))):  # type: ignore[misc]
        def on_train_end(self) -> None:
            self.logger.log_image("key", [1])
            self.logger.log_hyperparams({"a": 1})

    logger = make_logger(L)
    trainer = fit(Logs(), tmp_path, logger=logger, fast_dev_run=True)
    assert (trainer.logger.name, logger.metrics) == ("lightning_logs", [])


def test_a_logger_that_another_library_wrote_for_lightning_is_called_too(tmp_path):
    class Other:
        def __init__(self) -> None:
            self.calls: list[Any] = []

        def log_metrics(self, metrics: dict[str, float], step: int) -> None:
            self.calls += [(step, name) for name in metrics if name != "epoch"]

        def log_hyperparams(self, params: dict[str, Any]) -> None:
            self.calls.append(params)

        def save(self) -> None:
            pass

        def finalize(self, status: str) -> None:
            self.calls.append(status)

    class Silent(type(make_net(L))):  # type: ignore[misc]
        def on_train_start(self) -> None:
            assert self.logger is other

    other = Other()
    fit(Silent(), tmp_path, logger=other)
    assert other.calls == [{"lr": 0.1}, (1, "loss"), (3, "loss"), (3, "val"), "success"]


def test_what_no_logger_can_be_or_do_is_an_error():
    class Uploads(CSVLogger):
        def after_save_checkpoint(self, checkpoint_callback: Any) -> None:
            pass

    name = {"__module__": "lightning.pytorch.callbacks"}  # an import line that was left
    left = type("Timer", (Callback,), name)()
    with pytest.raises(TypeError, match=r"Timer is of lightning.* import that from trainer.light"):
        L.Trainer(callbacks=[left])
    with pytest.raises(TypeError, match="logger is 'csv'; it must be a bool, a logger"):
        L.Trainer(logger="csv")
    with pytest.raises(TypeError, match="Uploads defines after_save_checkpoint, which is never"):
        L.Trainer(logger=[Uploads("logs")])


def test_a_wandb_logger_has_the_methods_of_lightnings(tmp_path):
    class Logs(type(make_net(L))):  # type: ignore[misc]
        def on_train_start(self) -> None:
            self.logger.log_image("picture", [np.zeros((2, 2))], step=1, caption=["dark"])
            self.logger.log_table(key="table", columns=["a"], data=[[1]], step=1)
            self.logger.log_text("texts", ["in", "out"], [["a", "b"]], step=1)
            for tracker in self.trainer.trackers:  # as any tracker is called
                tracker.log_text({"page": "text"}, 1)

    settings = {"console": "off", "silent": True}
    logger = WandbLogger(save_dir=tmp_path, offline=True, project="own", settings=settings)
    fit(Logs(), tmp_path, logger=logger)
    wandb.finish()
    [run] = wandb_runs(tmp_path)
    assert (run.run.project, run.config["lr"]) == ("own", 0.1)
    [(step, picture)] = run.series("picture")
    assert (step, picture["captions"]) == (1, ["dark"])
    assert [step for step, _ in run.series("table")] == [1]
    [(step, texts)] = run.series("texts")
    assert (step, texts["ncols"], texts["nrows"]) == (1, 2, 1)
    assert [step for step, _ in run.series("page")] == [1]
    assert [step for step, _ in run.series("loss")] == [2, 4]


def test_a_graph_is_drawn_from_the_modules_example(tmp_path):
    class Draws(type(make_net(L))):  # type: ignore[misc]
        example_input_array = torch.ones(1, 4)

        def forward(self, x: Any) -> Any:
            return self.net(x)

        def on_train_start(self) -> None:
            self.logger.log_graph(self)
            self.example_input_array = None
            with pytest.raises(ValueError, match="log_graph needs an example"):
                self.logger.log_graph(self)

    logger = TensorBoardLogger(tmp_path)
    fit(Draws(), tmp_path, logger=logger)
    events = EventAccumulator(str(logger.log_dir)).Reload()
    assert "Linear" in str(events.Graph())


@pytest.mark.parametrize(("interval", "rates"), [("epoch", [0.1, 0.05]), ("step", [0.1, 0.05] * 2)])
def test_learning_rates_are_logged_once_an_epoch_if_asked_for(interval, rates, tmp_path):
    class Silent(type(make_net(L))):  # type: ignore[misc]
        def on_train_start(self) -> None:
            return

    logger = CSVLogger(tmp_path)
    fit(Silent(), tmp_path, logger=logger, max_epochs=2, callbacks=[LearningRateMonitor(interval)])
    rows = csv.DictReader(Path(logger.log_dir, "metrics.csv").read_text().splitlines())
    found = [float(row["lr-SGD"]) for row in rows if row["lr-SGD"]]
    assert sorted(found) == sorted(rates)


def test_messages_of_rank_zero_info_are_shown_once(monkeypatch, capsys):
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    shown = io.StringIO()
    monkeypatch.setattr(rank_zero._shown, "stream", shown)
    rank_zero.rank_zero_info("as under %s", "Lightning")
    assert shown.getvalue() == "as under Lightning\n"
    own = io.StringIO()
    monkeypatch.setattr(logging.getLogger(), "handlers", [logging.StreamHandler(own)])
    rank_zero.rank_zero_info("once")
    assert (shown.getvalue().count("\n"), own.getvalue()) == (1, "once\n")


def test_a_tensorboard_logger_writes_before_between_and_after_fits(tmp_path):
    class Silent(type(make_net(L))):  # type: ignore[misc]
        def on_train_start(self) -> None:
            return

    logger = TensorBoardLogger(tmp_path, "runs", version=0)
    logger.experiment.add_scalar("before", 1.0, 0)
    for place in ("between", "after"):
        fit(Silent(), tmp_path, logger=logger, enable_checkpointing=False)
        logger.experiment.add_scalar(place, 1.0, 0)
        logger.log_metrics({f"{place}_metric": 2.0}, 3)
    logger.experiment.close()
    events = EventAccumulator(str(tmp_path / "runs" / "version_0"))
    events.Reload()
    found = {*events.Tags()["scalars"]}
    assert found >= {"before", "between", "after", "between_metric", "after_metric", "loss"}


def test_a_csv_logger_records_after_a_fit(tmp_path):
    class Silent(type(make_net(L))):  # type: ignore[misc]
        def on_train_start(self) -> None:
            return

    logger = CSVLogger(tmp_path)
    logger.log_metrics({"before": 0.5}, 0)
    fit(Silent(), tmp_path, logger=logger)
    logger.log_metrics({"after": 2.0}, 9)
    rows = list(csv.DictReader(Path(logger.log_dir, "metrics.csv").read_text().splitlines()))
    assert (rows[0]["before"], rows[-1]["after"], rows[-1]["step"]) == ("0.5", "2.0", "9")
    assert any(row["loss"] for row in rows)


class Silent(type(make_net(L))):  # type: ignore[misc]
    """It does not use its logger itself."""

    def on_train_start(self) -> None:
        return


def test_two_fits_are_one_run_at_mlflow(tmp_path):
    uri = mlflow_store(tmp_path)
    logger = MLFlowLogger("project", tracking_uri=uri, artifact_location=str(tmp_path))
    logger.experiment.log_param(logger.run_id, "before", 1)
    for place in ("between", "after"):
        fit(Silent(), tmp_path, logger=logger)
        logger.experiment.log_metric(logger.run_id, place, 1.0, step=0)
    [run] = mlflow_runs(tmp_path)
    assert (run.status, run.params["before"]) == ("FINISHED", "1")
    assert {*run.metrics} >= {"between", "after", "loss"}


def test_the_run_that_the_script_has_open_stays_its_own_at_mlflow(tmp_path, monkeypatch):
    import mlflow

    uri = mlflow_store(tmp_path)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    mlflow.set_tracking_uri(uri)
    try:
        with mlflow.start_run() as opened:
            logger = MLFlowLogger("project", artifact_location=str(tmp_path))
            fit(Silent(), tmp_path, logger=logger)
            status = mlflow.MlflowClient(uri).get_run(opened.info.run_id).info.status
    finally:
        mlflow.set_tracking_uri(None)
    assert logger.version != opened.info.run_id
    assert status == "RUNNING"


def test_a_logger_that_no_fit_has_used_records_at_the_end_of_the_program(tmp_path):
    program = (
        "from trainer.lightning.pytorch.loggers import CSVLogger\n"
        f"CSVLogger({str(tmp_path)!r}, version=0).log_metrics({{'a': 1.5}}, 3)\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, cwd=tmp_path)
    table = tmp_path / "lightning_logs" / "version_0" / "metrics.csv"
    assert [*csv.DictReader(table.read_text().splitlines())] == [{"step": "3", "a": "1.5"}]
