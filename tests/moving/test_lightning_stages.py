"""What programs read of Lightning's Trainer in each stage, and loggers of services."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import prune
from torch.utils.data import DataLoader, TensorDataset

import trainer.lightning as L
from tests.helpers.services import comet_runs, wandb_runs
from tests.moving.running import real
from tests.moving.test_lightning_callbacks import PRUNING, X, Y, fit, make_net
from tests.numerics.running import copy_of
from trainer.lightning.pytorch.callbacks import ModelCheckpoint, ModelPruning, RichProgressBar
from trainer.lightning.pytorch.loggers import CometLogger, WandbLogger

wandb = pytest.importorskip("wandb")

FLAGS = ("training", "validating", "testing", "predicting", "sanity_checking", "evaluating")


def flags_of(library: Any, folder: Path) -> Any:
    """Return which flags are set in each batch, and what the trainer has at the end."""
    seen: list[Any] = []

    class Watch(library.Callback):  # type: ignore[misc]
        def on_train_batch_start(self, trainer: Any, module: Any, *_: Any) -> None:
            last = ["last"] if trainer.is_last_batch else []
            seen.append([name for name in FLAGS if getattr(trainer, name)] + last)

        def on_validation_batch_start(self, trainer: Any, module: Any, *_: Any) -> None:
            seen.append([name for name in FLAGS if getattr(trainer, name)])

        on_test_batch_start = on_predict_batch_start = on_validation_batch_start

    class Net(make_net(library)):  # type: ignore[misc]
        def test_step(self, batch: Any, batch_idx: int) -> None:
            self.validation_step(batch, batch_idx)

        def predict_step(self, batch: Any, batch_idx: int) -> Any:
            return self.net(batch[0])

    trainer = fit([Watch()], Net, library, default_root_dir=folder, max_epochs=1,
                  limit_train_batches=3, limit_val_batches=1)  # fmt: skip
    assert trainer.lr_scheduler_configs == []
    loader = DataLoader(TensorDataset(X, Y), 32)
    trainer.validate(trainer.model, loader, verbose=False)
    trainer.test(trainer.model, loader, verbose=False)
    assert trainer.test_dataloaders.dataset is loader.dataset
    trainer.predict(trainer.model, loader)
    assert trainer.predict_dataloaders.dataset is loader.dataset
    return seen


@pytest.mark.filterwarnings("ignore")  # Lightning's own
@pytest.mark.parametrize("library", ["trainer.lightning", "lightning"])
def test_each_stage_has_its_flags(library, tmp_path, monkeypatch):
    for variable in ("PL_GLOBAL_SEED", "PL_SEED_WORKERS"):  # Lightning sets them
        monkeypatch.setenv(variable, "1")
    assert flags_of(real(library), tmp_path) == [
        ["sanity_checking", "evaluating"],
        ["training"],
        ["training"],
        ["training", "last"],
        ["validating", "evaluating"],
        ["validating", "evaluating"],
        *[["testing", "evaluating"]] * 2,
        *[["predicting"]] * 2,
    ]


def test_arguments_that_are_times_and_objects(tmp_path):
    save = ModelCheckpoint(train_time_interval=timedelta(seconds=90), save_last=True)
    assert str(save.every) == "90 seconds"
    bar = RichProgressBar(refresh_rate=0)
    trainer = L.Trainer(
        accelerator="cpu",
        default_root_dir=tmp_path,
        callbacks=[bar, save],
        val_check_interval="00:00:01:30",
        accumulate_grad_batches={0: 2, 4: 1},
        profiler="simple",
        benchmark=False,
    )
    assert trainer.progress_bar_callback is bar
    assert trainer.accumulate_grad_batches == 1
    trainer.strategy.barrier()
    assert trainer.strategy.reduce(torch.tensor(3.0)) == 3
    assert not trainer.is_last_batch
    with pytest.raises(AttributeError, match=r"min_epochs cannot be set after"):
        trainer.min_epochs = 3
    with pytest.raises(TypeError, match="No model was passed"):
        trainer.test()
    with pytest.raises(ValueError, match="profiler is 'fast'"):
        L.Trainer(accelerator="cpu", profiler="fast")
    with pytest.raises(ValueError, match="storage_options is"):
        trainer.save_checkpoint(tmp_path / "a", storage_options={"a": 1})


def test_a_logger_of_wandb_is_its_run(tmp_path):
    logger = WandbLogger(
        name="run", save_dir=tmp_path, project="project", offline=True,
        settings={"console": "off", "silent": True},
    )  # fmt: skip

    class Logs(make_net()):  # type: ignore[misc]
        def on_train_start(self) -> None:
            self.logger.experiment.config.update({"own": 1})

    fit([], Logs, logger=logger, log_every_n_steps=4, default_root_dir=tmp_path)
    logger.experiment.log({"final": 1})
    wandb.log({"also": 2})  # the functions of the module see it too
    wandb.finish()
    [run] = wandb_runs(tmp_path)
    assert [run.rows[-2]["final"], run.rows[-1]["also"]] == [1, 2]
    assert (run.run.project, run.run.display_name, run.config["own"]) == ("project", "run", 1)
    assert [step for step, _ in run.series("loss")] == [4, 8, 12, 16]
    assert run.config["batch_size"] == 8
    with pytest.raises(ValueError, match="log_model='all'; leave it out"):
        WandbLogger(log_model="all")
    with pytest.raises(NotImplementedError, match="GradientNormMonitor"):
        logger.watch(nn.Linear(1, 1))


def test_a_logger_of_comet_is_its_experiment(tmp_path):
    quiet = {"log_code": False, "log_env_details": False, "auto_output_logging": False}
    logger = CometLogger(
        project="project", online=False, offline_directory=str(tmp_path),
        log_git_metadata=False, display_summary_level=0, **quiet,
    )  # fmt: skip
    logger.experiment.log_other("before", "fit")
    fit([], logger=logger, log_every_n_steps=8, default_root_dir=tmp_path)
    logger.experiment.log_metric("after", 1.0, step=17)
    logger.experiment.end()
    [run] = comet_runs(tmp_path)
    assert run.experiment["project_name"] == "project"
    assert [step for step, _ in run.metrics["loss"]] == [8, 16]
    assert (run.others["before"], run.metrics["after"]) == ("fit", [(17, 1.0)])


@pytest.mark.parametrize("lottery", [False, True])
def test_pruning_is_that_of_a_loop_by_hand(lottery, tmp_path, caplog):
    structured = PRUNING[2]
    options: Any = {"pruning_fn": "l1_unstructured", "amount": 0.3} if lottery else structured
    caplog.set_level("INFO")
    pruning = ModelPruning(**options | {"parameter_names": ["weight"], "verbose": 2})
    trained = fit([pruning], default_root_dir=tmp_path).model
    L.seed_everything(3)
    plain = make_net()()
    parts = [(plain.net[0], "weight"), (plain.net[2], "weight")]
    first = [part.weight.detach().clone() for part, _ in parts]
    for part, name in parts:
        prune.identity(part, name)
    optimizer = plain.configure_optimizers()
    for _ in range(2):
        for x, y in plain.train_dataloader():
            optimizer.zero_grad()
            nn.functional.cross_entropy(plain.net(x), y).backward()
            optimizer.step()
        if lottery:
            prune.global_unstructured(parts, prune.L1Unstructured, amount=0.3)
        else:
            for part, name in parts:
                prune.ln_structured(part, name, amount=1, n=1, dim=0)
        if lottery:
            for (part, _), weight in zip(parts, first, strict=True):
                part.weight_orig.data = weight.clone()
    for part, name in parts:
        prune.remove(part, name)
    torch.testing.assert_close(copy_of(trained), copy_of(plain), rtol=0, atol=0)
    zeros = sum(int((part.weight == 0).sum()) for part, _ in parts)
    assert f"Pruned {zeros} of 160 parameters." in caplog.messages
