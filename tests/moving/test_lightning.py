"""Programs of Lightning run after their import line is changed."""

from __future__ import annotations

import csv
import inspect
import json
import os
import subprocess
import sys
from argparse import Namespace
from collections import UserList
from datetime import timedelta
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.fsdp import ShardingStrategy
from torch.distributed.fsdp.wrap import ModuleWrapPolicy, size_based_auto_wrap_policy
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import trainer.lightning as L
from tests.moving.running import real
from tests.numerics.running import copy_of
from trainer import GradScalerKwargs, TrainModule
from trainer.checkpoint.lock import alone_in
from trainer.lightning.pytorch import demos
from trainer.lightning.pytorch.callbacks import (
    BasePredictionWriter,
    EarlyStopping,
    LearningRateMonitor,
    ModelCheckpoint,
)
from trainer.lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from trainer.lightning.pytorch.module import _warn_of_global_step, _warn_of_step
from trainer.lightning.pytorch.strategies import (
    DDPStrategy,
    DeepSpeedStrategy,
    FSDPStrategy,
    ParallelStrategy,
    SingleDeviceStrategy,
    strategy_of,
)
from trainer.lightning.pytorch.trainer import _device_of, _visible
from trainer.lightning.pytorch.utilities.rank_zero import rank_zero_only
from trainer.migration import refusals

X = torch.randn(96, 8, generator=torch.Generator().manual_seed(0))
Y = (X.sum(1) > 0).long()


def loaders(size: int = 8) -> tuple[DataLoader[Any], DataLoader[Any]]:
    train, val = TensorDataset(X[:64], Y[:64]), TensorDataset(X[64:], Y[64:])
    return DataLoader(train, size), DataLoader(val, size)


def make_classifier(library: Any) -> Any:
    """Return the class of a program for Lightning, of this library or of the other."""

    class Classifier(library.LightningModule):  # type: ignore[misc]
        def __init__(self, lr: float = 0.1) -> None:
            super().__init__()
            self.save_hyperparameters()
            self.net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2))

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            loss = cross_entropy(self.net(batch[0]), batch[1])
            self.log("train_loss", loss, prog_bar=True)
            return loss

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            scores = self.net(batch[0])
            self.log("val_loss", cross_entropy(scores, batch[1]))
            self.log("val_acc", (scores.argmax(1) == batch[1]).float().mean())

        def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
            return self.net(batch[0]).argmax(1)

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW(self.parameters(), lr=self.hparams.lr)
            schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=20)
            return {
                "optimizer": optimizer,
                "lr_scheduler": {"scheduler": schedule, "interval": "step"},
            }

    return Classifier


def trained(library: Any, callbacks: Any, logger: Any, folder: Path) -> Any:
    library.seed_everything(1)
    module = make_classifier(library)()
    trainer = library.Trainer(
        max_epochs=3,
        accelerator="cpu",
        devices=1,
        logger=logger,
        log_every_n_steps=1,
        gradient_clip_val=0.5,
        accumulate_grad_batches=2,
        callbacks=callbacks,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
    )
    trainer.fit(module, *loaders())
    return trainer, module


def ours(folder: Path, callbacks: Any = None) -> Any:
    return trained(L, callbacks, CSVLogger(folder), folder)


def test_a_program_is_a_plain_loop_to_the_last_bit(tmp_path):
    trainer, module = ours(tmp_path, [EarlyStopping("val_loss"), LearningRateMonitor("step")])
    L.seed_everything(1)
    plain = make_classifier(L)()
    made = plain.configure_optimizers()
    optimizer, schedule = made["optimizer"], made["lr_scheduler"]["scheduler"]
    for _ in range(3):
        batches = list(loaders()[0])
        for window in zip(batches[::2], batches[1::2], strict=True):
            optimizer.zero_grad()
            for x, y in window:
                (cross_entropy(plain.net(x), y) / 2).backward()
            nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
            optimizer.step()
            schedule.step()
    torch.testing.assert_close(copy_of(module), copy_of(plain), rtol=0, atol=0)
    assert (trainer.global_step, trainer.current_epoch) == (12, 3)


@pytest.mark.filterwarnings("ignore")  # Lightning's own
def test_a_program_trains_as_under_lightning(tmp_path, monkeypatch):
    for variable in ("PL_GLOBAL_SEED", "PL_SEED_WORKERS"):  # Lightning sets them
        monkeypatch.setenv(variable, "1")
    theirs = real("lightning")
    trainer, module = ours(tmp_path)
    logger = theirs.pytorch.loggers.CSVLogger(tmp_path / "theirs")
    other, expected = trained(theirs, [], logger, tmp_path / "theirs")
    torch.testing.assert_close(copy_of(module), copy_of(expected), rtol=0, atol=0)
    for name in ("val_loss", "val_acc"):
        value = trainer.callback_metrics[name].item()
        assert value == pytest.approx(other.callback_metrics[name].item(), abs=1e-6)


@pytest.mark.filterwarnings("ignore")  # Lightning's own
@pytest.mark.parametrize("mode", ["min_size", "max_size_cycle", "max_size", None])
def test_several_loaders_and_short_epochs_are_as_under_lightning(tmp_path, mode):
    lightning = real("lightning")

    def train(library: Any) -> Any:
        class Joint(library.LightningModule):  # type: ignore[misc]
            def __init__(self) -> None:
                super().__init__()
                torch.manual_seed(1)
                self.net = nn.Linear(8, 2)

            def train_dataloader(self) -> Any:
                sizes = {"a": (48, 8), "b": (96, 12)}
                loaders = {
                    n: DataLoader(TensorDataset(X[:k], Y[:k]), b) for n, (k, b) in sizes.items()
                }
                combined = library.pytorch.utilities.CombinedLoader
                return loaders if mode is None else combined(loaders, mode)

            def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
                return -1 if self.trainer.current_epoch == 1 and batch_idx == 2 else None

            def training_step(self, batch: Any, batch_idx: int) -> Tensor:
                parts = batch.values() if isinstance(batch, dict) else [batch]
                return sum(cross_entropy(self.net(part[0]), part[1]) for part in parts if part)

            def configure_optimizers(self) -> Any:
                return torch.optim.AdamW(self.parameters(), 0.1)

        module = Joint()
        trainer = library.Trainer(
            max_epochs=3,
            accelerator="cpu",
            devices=1,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=tmp_path,
        )
        trainer.fit(module)
        return copy_of(module), trainer.global_step

    found, steps = train(L)
    expected, theirs = train(lightning)
    assert steps == theirs
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_what_programs_read_of_the_trainer_is_there(tmp_path):
    checkpoint = ModelCheckpoint(monitor="val_loss", filename="{epoch}-{val_loss:.2f}")
    trainer, module = ours(tmp_path, [checkpoint])
    assert trainer.logger is trainer.loggers[0]
    assert trainer.log_dir == str(tmp_path / "lightning_logs" / "version_0")
    assert trainer.checkpoint_callback is checkpoint
    assert str(checkpoint.dirpath) == f"{trainer.log_dir}/checkpoints"
    assert (trainer.num_devices, trainer.num_nodes, trainer.world_size) == (1, 1, 1)
    assert (trainer.device_ids, trainer.node_rank) == ([0], 0)
    assert trainer.early_stopping_callbacks == []
    logged = trainer.callback_metrics
    assert torch.stack(list(logged.values())).tolist() == [each.item() for each in logged.values()]
    with trainer.profiler.profile("a block"):
        assert L.__version__ == L.pytorch.__version__
    assert (trainer.precision, trainer.accumulate_grad_batches) == ("32-true", 2)
    assert trainer.model is trainer.lightning_module is module
    assert trainer.strategy.broadcast(3) == 3
    best = type(module).load_from_checkpoint(checkpoint_path=checkpoint.best_model_path)
    assert best.hparams.lr == 0.1
    assert (checkpoint.monitor, checkpoint.mode) == ("val_loss", "min")
    assert checkpoint.kth_best_model_path == checkpoint.best_model_path  # of one
    assert checkpoint.kth_value == checkpoint.best_model_score <= checkpoint.current_score
    assert (trainer.max_steps, trainer.min_epochs, trainer.fast_dev_run) == (-1, 0, False)
    assert trainer.num_val_batches == [len(loaders()[1])]
    assert not trainer.interrupted
    rows = (Path(trainer.log_dir) / "metrics.csv").read_text().splitlines()
    assert len(rows) > 12
    trainer.save_checkpoint(filepath=tmp_path / "mine.ckpt")
    loaded = type(module).load_from_checkpoint(tmp_path / "mine.ckpt")
    torch.testing.assert_close(copy_of(loaded), copy_of(module), rtol=0, atol=0)


def test_an_evaluation_without_a_model_is_that_of_the_best_of_the_fit(tmp_path, capsys):
    trainer, module = ours(tmp_path, [ModelCheckpoint(monitor="val_acc", mode="max")])
    val = loaders()[1]
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.zero_()
    [found] = trainer.validate(dataloaders=val)
    assert json.loads(capsys.readouterr().out.strip()) == [found]
    assert found["val_acc"] == pytest.approx(trainer.checkpoint_callback.best_model_score)
    assert len(trainer.predict(dataloaders=val)) == 4


def test_hyperparameters_that_are_no_plain_data_are_kept_and_must_be_given_again(tmp_path):
    class Takes(make_classifier(L)):  # type: ignore[misc]
        def __init__(self, width: int, net: nn.Module | None = None, make: Any = None) -> None:
            super().__init__()
            self.save_hyperparameters()
            self.net = net

        def configure_optimizers(self) -> Any:
            return self.hparams.make(self.parameters())

    net, make = nn.Linear(8, 2), partial(torch.optim.SGD, lr=0.5)
    module = Takes([2], net, make)
    module.hparams.width.append(3)
    assert module.hparams_initial.width == [2]
    assert module.hparams_initial.net is net
    trainer = fit(tmp_path, Takes(3, net, make))
    assert trainer.model.hparams.net is net
    assert trainer.optimizers[0].param_groups[0]["lr"] == 0.5
    path = trainer.checkpoint_callback.best_model_path
    with pytest.raises(TypeError, match=r"does not hold its arguments net, make.*net=…, make=…"):
        Takes.load_from_checkpoint(path)
    again = Takes.load_from_checkpoint(path, net=nn.Linear(8, 2), make=None)
    assert again.hparams.width == 3
    torch.testing.assert_close(copy_of(again), copy_of(trainer.model), rtol=0, atol=0)


def fit(
    folder: Path | None,
    module: Any = None,
    library: Any = L,
    ckpt_path: Any = None,
    **options: Any,
) -> Any:
    module = make_classifier(library)() if module is None else module
    defaults = {"max_epochs": 2, "accelerator": "cpu", "enable_progress_bar": False}
    trainer = library.Trainer(
        **{"default_root_dir": folder, "logger": False, **defaults, **options}
    )
    trainer.fit(module, *loaders(), ckpt_path=ckpt_path)
    return trainer


def test_each_run_has_a_version_of_its_own(tmp_path):
    first, second = (fit(tmp_path, logger=True, max_epochs=1) for _ in range(2))
    assert Path(first.log_dir) == tmp_path / "lightning_logs" / "version_0"
    assert Path(second.log_dir) == tmp_path / "lightning_logs" / "version_1"
    assert isinstance(second.logger, TensorBoardLogger)
    assert list(Path(second.log_dir).glob("events*"))


def test_without_loggers_checkpoints_are_in_the_folder_of_lightning(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = ["epoch=0-step=8.ckpt"]
    for version in ("-v1", "-v2"):
        trainer = fit(None, max_epochs=1)
        assert (trainer.log_dir, trainer.default_root_dir) == (str(tmp_path), str(tmp_path))
        found = [each.name for each in (tmp_path / "checkpoints").glob("*.ckpt")]
        assert sorted(found) == sorted(names)
        assert Path(trainer.checkpoint_callback.best_model_path).name == names[-1]
        names.append(f"epoch=0-step=8{version}.ckpt")
    newest = fit(None, make_classifier(L)(), max_epochs=2, ckpt_path="last")
    assert newest.global_step == 16
    with alone_in(tmp_path / "checkpoints"):  # another run
        trainer = fit(None, max_epochs=1)
    assert Path(os.path.realpath(trainer.checkpoint_callback.best_model_path)).is_relative_to(
        trainer.project_dir
    )


class Fails(make_classifier(L)):  # type: ignore[misc]
    batches = 0
    fails_at = 0

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.batches += 1
        if self.batches == self.fails_at:
            raise RuntimeError("in the middle")
        return super().training_step(batch, batch_idx)


def test_a_second_fit_goes_on_from_the_module_with_new_optimizers(tmp_path, caplog):
    options: dict[str, Any] = {"default_root_dir": tmp_path, "logger": CSVLogger(tmp_path)}
    L.seed_everything(0)
    module = Fails()
    plain = make_classifier(L)()
    plain.load_state_dict(module.state_dict())
    trainer = fit(tmp_path, module, max_epochs=1, **options)
    first = trainer.log_dir
    trainer.fit(module, *loaders())  # nothing is left to do
    assert "trained 1 epochs and 8 updates, and reached its max_epochs" in caplog.text
    assert (trainer.current_epoch, trainer.global_step, trainer.log_dir) == (1, 8, first)
    trainer.fit_loop.max_epochs = 3
    module.fails_at = 8 + 5
    with pytest.raises(RuntimeError, match="in the middle"):
        trainer.fit(module, *loaders())
    trainer.fit(module, *loaders())  # the epoch from its beginning
    assert (trainer.current_epoch, trainer.global_step, trainer.max_epochs) == (3, 28, 3)
    assert Path(trainer.log_dir) == Path(first).parent / "version_2"
    assert Path(trainer.checkpoint_callback.best_model_path).name == "epoch=2-step=28.ckpt"

    for batches in (8, 4, 16):
        made = plain.configure_optimizers()
        optimizer, schedule = made["optimizer"], made["lr_scheduler"]["scheduler"]
        for number in range(batches):
            x, y = list(loaders()[0])[number % 8]
            optimizer.zero_grad()
            cross_entropy(plain.net(x), y).backward()
            optimizer.step()
            schedule.step()
    torch.testing.assert_close(copy_of(module), copy_of(plain), rtol=0, atol=0)
    with pytest.raises(AttributeError, match="no 'done': only max_epochs"):
        trainer.fit_loop.done = True


@pytest.mark.filterwarnings("ignore")  # Lightning's own
@pytest.mark.parametrize("case", ["reached", "steps", "early"])
def test_a_second_fit_is_lightnings(case, tmp_path, monkeypatch):
    for variable in ("PL_GLOBAL_SEED", "PL_SEED_WORKERS"):  # which Lightning sets
        monkeypatch.setenv(variable, "0")

    def run(library: Any, name: str) -> Any:
        library.seed_everything(0)
        options: dict[str, Any] = {"max_epochs": 2}
        if case == "steps":
            options = {"max_steps": 11}
        if case == "early":
            stops = library.pytorch.callbacks.EarlyStopping("val_loss", patience=0, mode="max")
            options = {"max_epochs": 5, "callbacks": [stops]}
        trainer = fit(tmp_path / name, library=library, devices=1, **options)
        if case == "steps":
            trainer.fit_loop.epoch_loop.max_steps = 20
        trainer.fit(trainer.model, *loaders())
        return trainer

    ours, theirs = run(L, "ours"), run(real("lightning"), "theirs")
    torch.testing.assert_close(copy_of(ours.model), copy_of(theirs.model), rtol=0, atol=0)
    assert ours.global_step == theirs.global_step


EMPTY = [DataLoader([]), DataLoader(TensorDataset(X[:3], Y[:3]), 4, drop_last=True)]


@pytest.mark.parametrize("empty", EMPTY, ids=["empty", "drop_last"])
def test_empty_loaders_are_left_out_with_a_warning(empty, tmp_path, caplog):
    options: dict[str, Any] = {"max_epochs": 1, "accelerator": "cpu", "logger": False}
    options["default_root_dir"] = tmp_path
    data, _ = loaders()

    class Tests(make_classifier(L)):  # type: ignore[misc]
        def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
            self.log("val", 1.0)

        def test_step(self, batch: Any, batch_idx: int) -> None:
            self.log("test", 1.0)

    trainer = L.Trainer(**options)
    trainer.fit(Tests(), data, empty)
    assert (trainer.global_step, "val" in trainer.callback_metrics) == (8, False)
    assert "The validate loader is empty: check its dataset" in caplog.text
    trainer = L.Trainer(**options)
    trainer.fit(Tests(), data, [data, empty])
    assert "val/dataloader_idx_0" in trainer.callback_metrics
    trainer = L.Trainer(**options)
    module = Tests()
    before = copy_of(module)
    trainer.fit(module, empty, data)
    assert (trainer.global_step, trainer.current_epoch, trainer.state.finished) == (0, 0, True)
    torch.testing.assert_close(copy_of(module), before, rtol=0, atol=0)
    assert "The train loader is empty: check its dataset" in caplog.text
    assert trainer.test(module, empty) == trainer.validate(module, empty) == []
    assert trainer.predict(module, empty) == []


def test_an_empty_validation_loader_is_left_out_on_all_processes(ranks2, tmp_path):
    def run() -> Any:
        trainer = fit(tmp_path, devices=2, limit_val_batches=0, max_epochs=1)
        again = L.Trainer(
            max_epochs=1, accelerator="cpu", devices=2, default_root_dir=tmp_path, logger=False
        )
        again.fit(make_classifier(L)(), loaders()[0], DataLoader([]))
        return trainer.global_step, again.global_step, again.validate(again.model, EMPTY[0])

    assert ranks2(run) == [(4, 4, [])] * 2


def test_lists_of_configuration_libraries_are_lists(tmp_path):
    first, second = CSVLogger(tmp_path), TensorBoardLogger(tmp_path)
    callbacks: Any = UserList([LearningRateMonitor(), EarlyStopping("val_loss")])
    options: dict[str, Any] = {"accelerator": "cpu", "max_epochs": 1, "devices": UserList([0])}
    trainer = L.Trainer(logger=UserList([first, second]), callbacks=callbacks, **options)
    assert trainer.loggers == [first, second]
    assert set(callbacks) <= set(trainer.callbacks)
    for logger in ((each for each in [first]), (first,)):
        assert L.Trainer(logger=logger, **options).loggers == [first]
    assert L.Trainer(logger=UserList(), **options).loggers == []


def test_values_are_logged_by_position_as_under_lightning(tmp_path):
    class Logs(make_classifier(L)):  # type: ignore[misc]
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            self.log("sum", 1.0, False, False, True, True, torch.sum)
            self.log_dict({"shown": 2.0, "both": 3.0}, True, True, False, True)
            return super().training_step(batch, batch_idx)

    trainer = fit(tmp_path, Logs(), max_epochs=1, logger=CSVLogger(tmp_path))
    found = {name: float(value) for name, value in trainer.callback_metrics.items()}
    assert (found["sum"], found["sum_epoch"], found["sum_step"]) == (8.0, 8.0, 1.0)
    assert {"shown", "both"} <= trainer.progress_bar_metrics.keys()
    assert "sum_epoch" not in Path(trainer.log_dir, "metrics.csv").read_text()
    with pytest.raises(ValueError, match="rank_zero_only=True"):
        fit(tmp_path, type("Refused", (Logs,), {"training_step": refused_log})(), max_epochs=1)


def refused_log(module: Any, batch: Any, batch_idx: int) -> None:
    module.log("x", 1.0, *[False] * 3, None, "mean", False, False, None, True, None, None, True)


def test_small_properties_of_modules_and_trainers_are_there(tmp_path):
    class Reads(make_classifier(L)):  # type: ignore[misc]
        def on_train_start(self) -> None:
            assert (self.on_gpu, self.device_mesh, self.trainer.scaler) == (False, None, None)
            assert self.trainer.enable_validation
            assert self.trainer.distributed_sampler_kwargs is None

    trainer = fit(tmp_path, Reads(), max_epochs=1)
    assert isinstance(trainer.strategy, SingleDeviceStrategy)
    assert not isinstance(trainer.strategy, ParallelStrategy)
    with fit(tmp_path, max_epochs=1, precision="64-true").init_module():
        assert torch.zeros(1).dtype == torch.float64
    assert L.pytorch.cli_lightning_logo() is None


def test_names_of_lightnings_examples_are_there(tmp_path, monkeypatch):
    from trainer.lightning.pytorch.utilities.imports import (
        _RICH_AVAILABLE,
        _TORCH_EQUAL_2_8,
        _TORCH_GREATER_EQUAL_2_6,
    )
    from trainer.lightning.pytorch.utilities.model_helpers import is_overridden

    assert bool(_RICH_AVAILABLE) == (find_spec("rich") is not None)
    assert (True, "2.8." in torch.__version__) == (_TORCH_GREATER_EQUAL_2_6, _TORCH_EQUAL_2_8)
    module = make_classifier(L)()
    assert is_overridden("training_step", module)
    assert not is_overridden("test_step", module)
    with pytest.raises(ValueError, match="pass parent="):
        is_overridden("training_step", nn.Linear(1, 1))


def test_lightnings_demos_are_trained(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    options: dict[str, Any] = {"max_epochs": 1, "accelerator": "cpu", "logger": False}
    for demo in (demos.BoringModel, demos.ManualOptimBoringModel):
        module = demo()
        before = copy_of(module)
        trainer = L.Trainer(**options)
        trainer.fit(module)
        assert trainer.global_step == 64
        assert not torch.equal(module.layer.weight, before["layer.weight"])
        assert len(trainer.predict(module, datamodule=demos.BoringDataModule())) == 64
    with pytest.raises(FileNotFoundError, match=r"wikitext-2.txt is missing, and WikiText2"):
        demos.WikiText2()
    Path("data").mkdir()
    Path("data/wikitext-2.txt").write_text("a b c d\n" * 300)
    data = demos.WikiText2(block_size=5)
    assert (data.vocab_size, len(data)) == (5, 299)
    assert [each.tolist() for each in data[1]] == [[0, 1, 2, 3, 4], [1, 2, 3, 4, 0]]
    for demo in (demos.LightningTransformer, demos.LightningLSTM):
        trainer = L.Trainer(**options, limit_train_batches=1)
        trainer.fit(demo(vocab_size=5))
        assert trainer.global_step == 1


@pytest.mark.filterwarnings("ignore")  # Lightning's own
def test_the_transformer_of_the_demos_is_lightnings():
    real("lightning")
    theirs: Any = import_module("lightning.pytorch.demos").Transformer(7, 4, 2, 4, 1)
    ours = demos.Transformer(7, 4, 2, 4, 1)
    ours.load_state_dict(theirs.state_dict())
    words = torch.arange(6).reshape(2, 3)
    torch.testing.assert_close(ours.eval()(words, words), theirs.eval()(words, words))


def test_errors_name_the_arguments_of_lightning_unless_they_are_the_users_own(tmp_path):
    for options, said in (
        ({"accumulate_grad_batches": 0}, "^accumulate_grad_batches is 0"),
        ({"gradient_clip_val": -1.0}, "^gradient_clip_val is -1.0"),
        ({"checkpoint_callback": False}, "use enable_checkpointing=False"),
    ):
        with pytest.raises((TypeError, ValueError), match=said):
            L.Trainer(**options)
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=r"^default_root_dir is .* cannot be used as a folder"):
        fit(tmp_path / "file")

    class Raises(make_classifier(L)):  # type: ignore[misc]
        def on_train_start(self) -> None:
            raise ValueError("project_dir")

    with pytest.raises(ValueError, match=r"^project_dir\n"):
        fit(tmp_path, Raises())


VALIDATIONS: list[tuple[dict[str, Any], list[int]]] = [
    ({}, [8, 16]),
    ({"val_check_interval": 0.5}, [4, 8, 12, 16]),
    ({"val_check_interval": 0.4}, [3, 6, 11, 14]),
    ({"val_check_interval": 3}, [3, 6, 11, 14]),
    ({"val_check_interval": 0.4, "check_val_every_n_epoch": 2}, [11, 14]),
    ({"val_check_interval": 4, "accumulate_grad_batches": 2}, [2, 4, 6, 8]),
    ({"val_check_interval": 5, "check_val_every_n_epoch": None}, [5, 10, 15]),
    ({"check_val_every_n_epoch": 2}, [16]),
    ({"limit_val_batches": 0}, []),
    ({"max_epochs": -1, "max_steps": 12, "val_check_interval": 6}, [6]),
]


def validations(library: Any, folder: Path, options: dict[str, Any]) -> list[int]:
    """Fit, and return the numbers of updates at which validations began."""

    class Counts(make_classifier(library)):  # type: ignore[misc]
        def on_validation_start(self) -> None:
            seen.append(self.trainer.global_step)

    seen: list[int] = []
    fit(folder, Counts(), library, num_sanity_val_steps=0, **options)
    return seen


@pytest.mark.parametrize(("options", "steps"), VALIDATIONS, ids=str)
def test_validations_come_when_they_are_asked_for(tmp_path, options, steps):
    assert validations(L, tmp_path, options) == steps


@pytest.mark.filterwarnings("ignore")  # Lightning's own
@pytest.mark.parametrize(("options", "steps"), VALIDATIONS, ids=str)
def test_validations_come_when_they_do_under_lightning(tmp_path, options, steps):
    theirs = real("lightning")
    assert validations(theirs, tmp_path, options) == steps


@pytest.mark.parametrize("precision", ["64-true", "bf16-true"])
def test_true_precision_converts_the_module_and_its_batches(tmp_path, precision):
    dtype = torch.float64 if precision.startswith("64") else torch.bfloat16

    class Sees(make_classifier(L)):  # type: ignore[misc]
        def setup(self, stage: str) -> None:
            self.early = nn.Linear(1, 1)

        def configure_model(self) -> None:
            assert torch.get_default_dtype() == dtype
            self.late = nn.Linear(1, 1)

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            self.seen = batch[0].dtype, batch[1].dtype, torch.zeros(1).dtype
            return super().training_step(batch, batch_idx)

    module = Sees()
    trainer = fit(tmp_path, module, precision=precision)
    assert module.seen == (dtype, torch.int64, dtype)
    assert len(list(module.parameters())) == 8
    assert {parameter.dtype for parameter in module.parameters()} == {dtype}
    assert trainer.precision == precision
    assert torch.get_default_dtype() == torch.float32


def test_what_is_logged_before_a_run_is_sent_when_it_starts(tmp_path):
    logger = CSVLogger(tmp_path)
    logger.log_hyperparams(Namespace(depth=2, token="hunter2"), metrics={"first": 0.5})
    fit(tmp_path, logger=logger, max_epochs=1, log_every_n_steps=0)
    logger.save()
    logger.finalize("success")
    hparams = yaml.safe_load((Path(logger.log_dir) / "hparams.yaml").read_text())
    assert (hparams["depth"], hparams["lr"]) == (2, 0.1)
    assert hparams["token"] != "hunter2"
    rows = list(csv.DictReader((Path(logger.log_dir) / "metrics.csv").read_text().splitlines()))
    assert [(row["step"], row["first"], row["epoch"]) for row in rows] == [
        ("0", "0.5", ""),
        ("8", "", "0"),
    ]
    assert (logger.name, logger.kind) == ("lightning_logs", "csv")
    with pytest.raises(NotImplementedError, match="GradientNormMonitor"):
        logger.watch(None)


def test_a_modules_logger_is_the_sdks_object_while_it_trains(tmp_path):
    class Writes(make_classifier(L)):  # type: ignore[misc]
        def on_train_start(self) -> None:
            self.logger.experiment.add_text("note", "hello", 0)
            self.logger.log_hyperparams({"depth": 2})

    trainer = fit(tmp_path, Writes(), logger=TensorBoardLogger(tmp_path, "mine", version="a"))
    assert Path(trainer.log_dir) == tmp_path / "mine" / "a"
    events = b"".join(path.read_bytes() for path in Path(trainer.log_dir).rglob("*tfevents*"))
    assert b"hello" in events


class Written(BasePredictionWriter):
    def __init__(self) -> None:
        super().__init__("batch_and_epoch")
        self.batches: list[list[int]] = []
        self.whole: Any = None

    def write_on_batch_end(self, trainer, pl_module, prediction, indices, batch, batch_idx, loader):
        torch.testing.assert_close(batch[0], X[64:][indices], rtol=0, atol=0)
        self.batches.append(indices)

    def write_on_epoch_end(self, trainer, pl_module, predictions, batch_indices):
        self.whole, self.indices = torch.cat(predictions), batch_indices


class Logs(L.Callback):
    """Logs as callbacks of Lightning do, and reads what there is at once."""

    def __init__(self) -> None:
        self.seen: list[tuple[bool, list[int | None], bool]] = []

    def on_validation_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        self.log("of_callback", float(trainer.callback_metrics["val_loss"]) + 1.0)

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        logged = trainer.callback_metrics
        known = bool(logged["of_callback"] == logged["val_loss"] + 1.0)
        self.seen.append((trainer.sanity_checking, trainer.num_val_batches, known))

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        assert trainer.training

    def on_sanity_check_start(self, trainer: Any, pl_module: Any) -> None:
        assert not trainer.training

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        assert trainer.training
        assert trainer.num_val_batches == [4]
        assert not trainer.callback_metrics


def test_callbacks_log_and_read_what_was_logged_in_the_sanity_check_too(tmp_path):
    logs = Logs()
    trainer, _ = ours(tmp_path, [logs])
    assert logs.seen == [(True, [2], True), *[(False, [4], True)] * trainer.current_epoch]


def test_several_optimizers_by_hand_give_one_warning_about_global_step(tmp_path, caplog):
    _warn_of_global_step.cache_clear()

    class Two(make_classifier(L)):  # type: ignore[misc]
        automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> None:
            for optimizer in self.optimizers():
                optimizer.zero_grad()
                self.manual_backward(self.net(batch[0]).square().mean())
                optimizer.step()

        def configure_optimizers(self) -> Any:
            return [
                torch.optim.SGD(layer.parameters(), 0.1) for layer in (self.net[0], self.net[2])
            ]

    trainer = L.Trainer(max_epochs=1, default_root_dir=tmp_path, accelerator="cpu")
    trainer.fit(Two(), loaders()[0])
    assert trainer.global_step == 8
    assert caplog.text.count("Lightning counts the steps of all optimizers") == 1


def test_a_value_that_would_be_the_x_axis_of_the_others_is_dropped_with_a_warning(tmp_path, caplog):
    _warn_of_step.cache_clear()

    class Module(make_classifier(L)):  # type: ignore[misc]
        def on_train_epoch_end(self) -> None:
            self.log_dict({"step": float(self.current_epoch), "ends": 1.0})

    trainer = L.Trainer(max_epochs=2, default_root_dir=tmp_path, accelerator="cpu")
    trainer.fit(Module(), loaders()[0])
    assert caplog.text.count('log("step", ...) has no effect') == 1
    assert trainer.callback_metrics["ends"] == 1
    assert "step" not in trainer.callback_metrics


def test_modules_may_bring_callbacks_and_data_modules_be_made_of_datasets(tmp_path):
    class Brings(make_classifier(L)):  # type: ignore[misc]
        def configure_callbacks(self) -> Any:
            return [EarlyStopping("val_loss", patience=7)]

    data = L.LightningDataModule.from_datasets(
        TensorDataset(X[:64], Y[:64]),
        TensorDataset(X[64:], Y[64:]),
        predict_dataset=TensorDataset(X[64:], Y[64:]),
        batch_size=8,
    )
    written = Written()
    trainer = L.Trainer(
        max_epochs=1,
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        default_root_dir=tmp_path,
        callbacks=[EarlyStopping("val_loss"), written],
    )
    module = Brings()
    trainer.fit(module, datamodule=data)
    assert trainer.early_stopping_callback.patience == 7
    predicted = torch.cat(trainer.predict(module, datamodule=data))
    assert written.batches == torch.arange(32).view(4, 8).tolist()
    assert written.indices == [written.batches]  # of each loader
    torch.testing.assert_close(written.whole, predicted)


def test_several_callbacks_of_a_module_replace_those_of_their_class_and_its_bases(tmp_path):
    class Brings(make_classifier(L)):  # type: ignore[misc]
        def configure_callbacks(self) -> Any:
            monitors = ("val_loss", "val_acc")
            best = [ModelCheckpoint(tmp_path / name, monitor=name) for name in monitors]
            return [*best, EarlyStopping("val_loss")]

    trainer = fit(tmp_path, Brings())
    assert [each.monitor for each in trainer.checkpoint_callbacks] == ["val_loss", "val_acc"]
    saves = [isinstance(each, ModelCheckpoint) for each in trainer.callbacks]
    assert saves == sorted(saves)  # a checkpoint holds what the others have decided


@pytest.mark.filterwarnings("ignore:`torch.jit.trace")  # a FutureWarning from 2.14 on
def test_a_traced_module_computes_the_same_and_each_submodule_stays_in_its_mode():
    class Calls(make_classifier(L)):  # type: ignore[misc]
        def forward(self, x: Tensor) -> Tensor:
            return self.net(x)

    module = Calls()
    module.net.add_module("drop", nn.Dropout())
    module.net[0].eval()
    before = [part.training for part in module.modules()]
    traced = module.to_torchscript(method="trace", example_inputs=X[:2])
    assert [part.training for part in module.modules()] == before
    torch.testing.assert_close(traced(X), module.net.eval()(X))


@pytest.mark.filterwarnings("ignore:`torch.jit.trace")  # a FutureWarning from 2.14 on
@pytest.mark.parametrize("base", [TrainModule, L.LightningModule])
def test_a_module_can_be_traced_outside_a_run(base):
    class Calls(base):  # type: ignore[misc,valid-type]
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Linear(X.shape[1], 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.net(x)

    class Outer(Calls):
        def __init__(self) -> None:
            super().__init__()
            self.net = Calls()

    module = Outer().eval()
    traced = torch.jit.trace(module, X[:2])
    torch.testing.assert_close(traced(X), module.net.net(X))
    assert "net" in dir(module)
    assert "trainer" not in dir(module)  # such as a completion, which reads what is listed
    assert dict(inspect.getmembers(module)).keys() == set(dir(module))


class Block(torch.nn.Linear):
    pass


class Other(torch.nn.Linear):
    pass


def same(module, recurse, nonwrapped_numel):
    return isinstance(module, Block) and not recurse and nonwrapped_numel == 6


def sharding(plugin):
    """What a plugin of FSDP says, and which submodules it wraps."""
    net = torch.nn.Sequential(Block(2, 2), Other(2, 2))
    wrapped = plugin.auto_wrap_policy
    if callable(wrapped):
        wrapped = [type(module) for module in net if wrapped(module)]
    return plugin.sharding_strategy, wrapped, plugin.activation_checkpointing, plugin.cpu_offload


MINUTE = timedelta(minutes=1)
BLOCKS = ("FULL_SHARD", [Block], False, False)
RECOMPUTED = ("FULL_SHARD", [Block], True, False)
STRATEGIES: list[tuple[Any, dict[str, Any], Any]] = [
    ("auto", {}, None),
    ("ddp_notebook", {}, None),
    ("ddp_find_unused_parameters_false", {}, {"find_unused_parameters": False}),
    ("ddp_find_unused_parameters_true", {}, {"find_unused_parameters": True}),
    ("ddp_notebook_find_unused_parameters_true", {}, {"find_unused_parameters": True}),
    (
        DDPStrategy,
        {"static_graph": True, "gradient_as_bucket_view": True, "start_method": "fork"},
        {"static_graph": True, "gradient_as_bucket_view": True},
    ),
    (
        DDPStrategy,
        {"process_group_backend": "gloo", "timeout": MINUTE},
        {"backend": "gloo", "timeout": MINUTE},
    ),
    (
        DDPStrategy,
        {
            "ddp_comm_hook": powerSGD_hook.powerSGD_hook,
            "ddp_comm_state": powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=2),
            "ddp_comm_wrapper": default_hooks.fp16_compress_wrapper,
        },
        {"comm_hook": "power_sgd", "comm_wrapper": "fp16", "rank": 2},
    ),
    ("fsdp", {}, ("FULL_SHARD", "TRANSFORMER_BASED_WRAP", False, False)),
    ("fsdp_cpu_offload", {}, ("FULL_SHARD", "TRANSFORMER_BASED_WRAP", False, True)),
    (FSDPStrategy, {"auto_wrap_policy": {Block}, "state_dict_type": "full"}, BLOCKS),
    (FSDPStrategy, {"auto_wrap_policy": ModuleWrapPolicy({Block}), "timeout": MINUTE}, BLOCKS),
    (FSDPStrategy, {"auto_wrap_policy": same}, BLOCKS),
    (
        FSDPStrategy,
        {"auto_wrap_policy": partial(size_based_auto_wrap_policy, min_num_params=9)},
        ("FULL_SHARD", "SIZE_BASED_WRAP", False, False),
    ),
    (FSDPStrategy, {"activation_checkpointing_policy": {Block}}, RECOMPUTED),
    (
        FSDPStrategy,
        {"activation_checkpointing": [Block], "auto_wrap_policy": {Block}},
        RECOMPUTED,
    ),
    (
        FSDPStrategy,
        {"sharding_strategy": ShardingStrategy.SHARD_GRAD_OP, "cpu_offload": True},
        ("SHARD_GRAD_OP", "TRANSFORMER_BASED_WRAP", False, True),
    ),
    ("deepspeed", {}, (2, "none", "none")),
    ("deepspeed_stage_1", {}, (1, "none", "none")),
    ("deepspeed_stage_2_offload", {}, (2, "cpu", "none")),
    ("deepspeed_stage_3_offload", {}, (3, "cpu", "cpu")),
    (DeepSpeedStrategy, {"zero_optimization": False}, (0, "none", "none")),
    (
        DeepSpeedStrategy,
        {"stage": 3, "offload_optimizer": True, "pin_memory": False},
        (3, "cpu", "none"),
    ),
    (
        DeepSpeedStrategy,
        {"config": {"zero_optimization": {"stage": 1}}},
        (1, "none", "none"),
    ),
]


@pytest.mark.parametrize(("kind", "arguments", "expected"), STRATEGIES)
def test_what_each_strategy_becomes(kind, arguments, expected):
    found = strategy_of(kind if isinstance(kind, str) else kind(**arguments)).arguments
    handlers = found.get("kwargs_handlers", [])
    if "fsdp_plugin" in found:
        assert sharding(found["fsdp_plugin"]) == expected
        assert [each.timeout for each in handlers] == [MINUTE] * ("timeout" in arguments)
    elif "deepspeed_plugin" in found:
        plugin = found["deepspeed_plugin"]
        devices = plugin.offload_optimizer_device, plugin.offload_param_device
        assert (plugin.stage, *devices) == expected
    elif expected is None:
        assert found == {}
    else:
        (handler,) = handlers
        shown = {name: getattr(handler, name, None) for name in expected}
        if "rank" in expected:
            shown["rank"] = handler.comm_state_option["matrix_approximation_rank"]
        assert shown == expected


def test_keys_of_deepspeed_are_in_its_configuration():
    strategy = DeepSpeedStrategy(
        stage=1, allgather_bucket_size=7, overlap_comm=False, zero_allow_untested_optimizer=False
    )
    found = strategy.arguments["deepspeed_plugin"].deepspeed_config
    zero = found["zero_optimization"]
    assert (zero["stage"], zero["allgather_bucket_size"], zero["overlap_comm"]) == (1, 7, False)
    assert found["zero_allow_untested_optimizer"] is False


@pytest.mark.parametrize(
    ("kind", "arguments", "error", "message"),
    [
        (DDPStrategy, {"model_averaging_period": 4}, ValueError, "LocalSGD"),
        (DDPStrategy, {"ddp_comm_hook": print}, ValueError, "hook is print; it must be one of"),
        (DDPStrategy, {"find_unused": True}, TypeError, "find_unused"),
        (FSDPStrategy, {"device_mesh": (1, 2)}, ValueError, "pass parallelism_config="),
        (FSDPStrategy, {"state_dict_type": "half"}, ValueError, "state_dict_type is 'half'"),
        (FSDPStrategy, {"sharding_strategy": "NO_SHARD"}, ValueError, "leave the FSDP plugin out"),
        (
            FSDPStrategy,
            {"auto_wrap_policy": {Block}, "activation_checkpointing_policy": {Other}},
            ValueError,
            "Give both the same",
        ),
        (DeepSpeedStrategy, {"loss_scale": 2}, ValueError, "the section 'fp16' of config="),
        (DeepSpeedStrategy, {"stages": 2}, TypeError, "has no argument 'stages'"),
        (DeepSpeedStrategy, {"precision_plugin": 1}, ValueError, "pass precision= to the Trainer"),
    ],
)
def test_what_a_strategy_does_not_carry_over_is_refused_by_name(kind, arguments, error, message):
    with pytest.raises(error, match=message):
        kind(**arguments)


def test_arguments_of_loggers_that_would_change_names_are_refused(tmp_path):
    with pytest.raises(ValueError, match="prefix='a'; leave it out, and log under longer names"):
        TensorBoardLogger(tmp_path, prefix="a")
    with pytest.raises(ValueError, match="sub_dir='b'"):
        TensorBoardLogger(tmp_path, sub_dir="b")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"devices": 2, "num_nodes": 2}, "trainer launch --num_processes 4 script.py"),
        ({"strategy": "horovod"}, "strategy is 'horovod'"),
        ({"strategy": "deepspeed_stage_4"}, "strategy is 'deepspeed_stage_4'"),
        ({"gradient_clip_algorithm": "max"}, "gradient_clip_algorithm is 'max'"),
        ({"precision": "8"}, "precision is '8'"),
        ({"accelerator": "tpu"}, "accelerator is 'tpu'"),
        (
            {"use_distributed_sampler": False, "devices": 2},
            r"use_distributed_sampler=False .*DataLoaderConfiguration\(presharded=True\)",
        ),
        ({"val_check_interval": "1:30"}, "a time as DD:HH:MM:SS"),
        ({"val_check_interval": 3, "accumulate_grad_batches": 2}, "no multiple"),
        ({"val_check_interval": 0.5, "check_val_every_n_epoch": None}, "a part of an epoch"),
        ({"check_val_every_n_epoch": None}, "give val_check_interval an int"),
        ({"devices": [0, 0]}, "must name devices, each once"),
        ({"profiler": "advanced"}, "profiler='advanced' is not in Cadence: use profiler='simple'"),
    ],
    ids=str,
)
def test_what_does_not_carry_over_is_refused_by_name(options, message):
    with pytest.raises(ValueError, match=message):
        L.Trainer(accelerator=options.pop("accelerator", "cpu"), logger=False, **options)


def test_all_that_does_not_carry_over_is_in_one_error():
    class Old(L.Callback):
        def on_epoch_start(self, trainer: Any, module: Any) -> None:
            pass

    wrong = {"precision": "8", "strategy": "horovod", "devices": [0, 0], "profiler": object()}
    wrong |= {"max_epochs": -3, "limit_val_batches": -1, "gradient_clip_val": -1.0}
    wrong |= {"accumulate_grad_batches": 0, "log_every_n_steps": "x", "deterministic": "no"}
    with pytest.raises(TypeError) as error:
        L.Trainer(callbacks=[Old()], stochastic_weight_avg=True, logger="csv", **wrong)
    for said in ("no argument 'stochastic_weight_avg'", "Old defines on_epoch_start", *wrong):
        assert said in str(error.value)
    assert "logger is 'csv'" in str(error.value)
    wrong = {"max_epochs": -3, "num_sanity_val_steps": -2}
    with pytest.raises(ValueError, match=r"max_epochs .*\nnum_sanity_val_steps "):
        L.Trainer(accelerator="cpu", **wrong)


def test_every_hook_that_nobody_calls_is_refused_before_a_fit(tmp_path, caplog):
    tables = refusals.UNCALLED
    trainer = L.Trainer(accelerator="cpu", logger=False, default_root_dir=tmp_path)

    def defining(base: type, hooks: Any) -> Any:
        return type("Ported", (base,), dict.fromkeys(hooks, lambda *_: None))()

    of_module = tables["module"].keys() - {"configure_callbacks"}  # which is called
    module = defining(make_classifier(L), of_module)
    trainer.callbacks.append(defining(L.Callback, tables["callback"]))
    with pytest.raises(TypeError) as error:
        trainer.fit(module, *loaders())
    # Of these, a model of a library may have some: Lightning does not call them either.
    of_library = tables["datamodule"].keys()
    lines = str(error.value).splitlines()
    assert len(lines) == len(of_module - of_library) + len(tables["callback"])
    for name in (of_module - of_library) | tables["callback"].keys():
        assert f"Ported defines {name}, which is never called here: " in str(error.value)
    assert all(f"{name}, which is never called here" in caplog.text for name in of_library)


def test_batch_normalisation_of_configure_model_is_that_over_all_processes(ranks2, tmp_path):
    class Makes(make_classifier(L)):  # type: ignore[misc]
        def configure_model(self) -> None:
            self.net = nn.Sequential(nn.Linear(8, 2), nn.Sequential(nn.BatchNorm1d(2)))

    def run() -> Any:
        module = Makes()
        quiet = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False}
        trainer = L.Trainer(
            accelerator="cpu", devices=2, sync_batchnorm=True, default_root_dir=tmp_path, **quiet
        )
        trainer.validate(module, loaders()[1], verbose=False)
        return type(module.net[1][0])

    assert ranks2(run) == [nn.SyncBatchNorm] * 2


def test_two_processes_train_as_one(ranks2, tmp_path):

    def run() -> Any:
        L.seed_everything(4)
        module = make_classifier(L)()
        trainer = L.Trainer(
            max_epochs=2,
            accelerator="cpu",
            devices=2,
            strategy="ddp",
            enable_progress_bar=False,
            default_root_dir=tmp_path / "two",
            seed=4,
        )
        trainer.fit(module, *loaders(4))
        return copy_of(module), trainer.log_dir, rank_zero_only(lambda: "first")()

    L.seed_everything(4)
    expected = fit(tmp_path / "one", make_classifier(L)(), seed=4).model
    found = ranks2(run)
    assert [rank for _, _, rank in found] == ["first", None]
    for weights, folder, _ in found:
        assert folder == str(tmp_path / "two" / "lightning_logs" / "version_0")
        torch.testing.assert_close(weights, copy_of(expected))


PROGRAM = """
import sys
import torch
import trainer.lightning as L

class Line(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(3, 1)

    def training_step(self, batch, batch_idx):
        return self.layer(batch).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)

devices, code = map(int, sys.argv[1:])
del sys.argv[1:]
flags = "-W" * ("ignore::ImportWarning" in sys.warnoptions) + "-X" * ("own" in sys._xoptions)
L.seed_everything(1)
trainer = L.Trainer(
    max_epochs=1, accelerator="cpu", devices=devices, logger=False,
    enable_progress_bar=False,
    enable_model_summary=False, enable_checkpointing=False, default_root_dir="runs",
)
module = Line()
data = torch.arange(24.0).view(8, 3)
trainer.fit(module, torch.utils.data.DataLoader(data, 4 // trainer.world_size))
weight = f"{module.layer.weight.sum().item():.5f}"
print(f"rank {trainer.global_rank} of {trainer.world_size}: {weight} {flags}")
if trainer.is_global_zero:
    sys.exit(code)
"""


def test_a_program_that_asks_for_devices_is_started_again_in_as_many_processes(tmp_path):
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "program.py").write_text(PROGRAM)
    (tmp_path / "trainer.py").write_text("raise SystemExit('it is not what starts processes')")

    def lines(devices: int, code: int) -> list[str]:
        flags = ["-W", "ignore::ImportWarning", "-Xown"]
        command = [sys.executable, *flags, "src/program.py", str(devices), str(code)]
        ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=200)
        assert ended.returncode == code, ended.stderr
        return sorted(line for line in ended.stdout.splitlines() if line.startswith("rank"))

    [alone] = lines(1, 0)
    weight = alone.partition(": ")[2]
    assert weight.endswith(" -W-X")
    assert lines(2, 3) == [f"rank 0 of 2: {weight}", f"rank 1 of 2: {weight}"]


def test_a_list_of_devices_names_those_of_each_process():
    assert _visible([1, 3], None) == ["1", "3"]
    assert _visible([1, 2], "GPU-a, GPU-b,GPU-c") == ["GPU-b", "GPU-c"]
    assert _device_of([3], 0, None, launched=False) == "cuda:3"
    assert _device_of([1], 0, "4,5", launched=False) == "cuda:1"
    assert _device_of([2, 3], 1, "6,7", launched=True) is None  # the launcher chose them
    assert _device_of([2, 3], 1, None, launched=True) == "cuda:3"


def test_handlers_are_added_to_those_of_a_strategy(tmp_path):
    strategy = DDPStrategy(find_unused_parameters=True)
    handlers = [GradScalerKwargs(init_scale=4.0)]
    trainer = L.Trainer(
        accelerator="cpu",
        logger=False,
        strategy=strategy,
        kwargs_handlers=handlers,
        default_root_dir=tmp_path,
        precision="16-mixed",
    )
    assert trainer.accelerator.ddp_handler.find_unused_parameters
    assert trainer.accelerator.scaler.get_scale() == 4.0


def test_the_best_of_a_checkpoint_callback_of_the_module_is_tested(tmp_path):
    class Brings(make_classifier(L)):  # type: ignore[misc]
        def configure_callbacks(self) -> Any:
            return [ModelCheckpoint(monitor="val_acc", mode="max")]

        def test_step(self, batch: Any, batch_idx: int) -> None:
            self.log("test_acc", (self.net(batch[0]).argmax(1) == batch[1]).float().mean())

    trainer = fit(tmp_path, Brings())
    best = trainer.checkpoint_callback
    [found] = trainer.test(dataloaders=loaders()[1], ckpt_path="best")
    assert trainer.checkpoint_callback is best
    assert found["test_acc"] == pytest.approx(best.best_model_score)


def test_a_callback_may_set_the_batches_of_an_update(tmp_path):
    class Doubles(L.Callback):
        def on_train_epoch_start(self, trainer: Any, module: Any) -> None:
            trainer.accumulate_grad_batches = trainer.current_epoch + 1

    assert fit(tmp_path, callbacks=[Doubles()]).global_step == 8 + 4
