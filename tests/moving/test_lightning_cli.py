"""LightningCLI creates and runs what options and files describe."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import trainer.lightning as L
from tests.moving.running import real
from tests.numerics.running import copy_of

pytest.importorskip("jsonargparse")
ours = import_module("trainer.lightning.pytorch.cli")

QUIET = {
    "accelerator": "cpu",
    "devices": 1,
    "max_epochs": 2,
    "logger": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}


def make_program(library: Any, cli: Any) -> tuple[Any, Any, Any]:
    """Return the module, the data and the CLI of a program, of this library or of the other."""

    class Net(library.LightningModule):  # type: ignore[misc]
        def __init__(self, width: int = 4, lr: float = 0.1, classes: int = 2) -> None:
            super().__init__()
            self.save_hyperparameters()
            self.net = nn.Sequential(nn.Linear(3, width), nn.ReLU(), nn.Linear(width, classes))

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("val_loss", self.training_step(batch, batch_idx))

        test_step = validation_step

        def predict_step(self, batch: Any, batch_idx: int) -> Any:
            return self.net(batch[0])

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), self.hparams.lr)

    class Data(library.LightningDataModule):  # type: ignore[misc]
        def __init__(self, batch_size: int = 4) -> None:
            super().__init__()
            self.batch_size, self.classes = batch_size, 3

        def loader(self) -> Any:
            own = torch.Generator().manual_seed(0)
            x, y = torch.randn(32, 3, generator=own), torch.randint(0, 2, (32,), generator=own)
            return DataLoader(TensorDataset(x, y), self.batch_size)

        train_dataloader = val_dataloader = test_dataloader = predict_dataloader = loader

    class Program(cli.LightningCLI):  # type: ignore[misc]
        called: tuple[str, ...] = ()

        def add_arguments_to_parser(self, parser: Any) -> None:
            parser.add_argument("--note", default="none")
            parser.link_arguments("data.classes", "model.classes", apply_on="instantiate")

        def before_fit(self) -> None:
            self.called += ("before", self.config.fit.note)

        def after_fit(self) -> None:
            self.called += ("after",)

    return Net, Data, Program


def run(words: Any, library: Any = L, cli: Any = ours, **options: Any) -> Any:
    net, data, program = make_program(library, cli)
    return program(
        net, data, seed_everything_default=7, trainer_defaults=QUIET, args=words, **options
    )


RUNS = [
    ["fit", "--model.width=5", "--data.batch_size=8"],
    [
        # By its path: bitsandbytes, once imported, has an AdamW too.
        *("fit", "--optimizer=torch.optim.AdamW", "--optimizer.lr=0.05", "--trainer.max_steps=9"),
        *("--lr_scheduler=StepLR", "--lr_scheduler.step_size=1", "--note=yes"),
    ],
]


@pytest.mark.parametrize("words", RUNS, ids=["own", "named"])
def test_a_program_trains_as_without_the_cli(words, tmp_path):
    made = run(words)
    assert made.called == ("before", "yes" if "--note=yes" in words else "none", "after")
    assert made.model.net[2].out_features == made.datamodule.classes == 3
    net, data, _ = make_program(L, ours)
    L.seed_everything(7)
    if made.model.hparams.width == 5:
        loader, steps = data(8).loader(), 8
        plain = net(width=5, classes=3)
        optimizer = plain.configure_optimizers()
        schedule = None
    else:
        loader, steps = data().loader(), 9
        plain = net(classes=3)
        optimizer = torch.optim.AdamW(plain.parameters(), lr=0.05)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1)
    assert made.trainer.global_step == steps
    batches = [*loader, *loader]
    for number, batch in enumerate(batches[:steps]):
        optimizer.zero_grad()
        plain.training_step(batch, 0).backward()
        optimizer.step()
        if schedule is not None and number == len(loader) - 1:
            schedule.step()
    torch.testing.assert_close(copy_of(made.model), copy_of(plain), rtol=0, atol=0)


@pytest.mark.filterwarnings("ignore")  # Lightning's own
@pytest.mark.parametrize("words", RUNS, ids=["own", "named"])
def test_a_program_trains_as_under_lightning(words, tmp_path, monkeypatch):
    for variable in ("PL_GLOBAL_SEED", "PL_SEED_WORKERS"):  # Lightning sets them
        monkeypatch.setenv(variable, "1")
    theirs = real("lightning")
    from lightning.pytorch import cli

    made, expected = run(words), run(words, theirs, cli)
    torch.testing.assert_close(copy_of(made.model), copy_of(expected.model), rtol=0, atol=0)
    for section in ("model", "data", "optimizer", "lr_scheduler", "seed_everything", "note"):
        assert made.config.fit[section] == expected.config.fit[section]


@pytest.mark.parametrize("top", ["trainer.lightning.pytorch", "lightning.pytorch"])
def test_files_and_options_describe_the_run_and_are_saved_with_it(tmp_path, top):
    file = tmp_path / "run.yaml"
    callback = {
        "class_path": f"{top}.callbacks.EarlyStopping",
        "init_args": {"monitor": "val_loss", "patience": 7},
    }
    logger = {
        "class_path": f"{top}.loggers.CSVLogger",
        "init_args": {"save_dir": "logs"},
    }
    settings = {"trainer": {"callbacks": [callback], "logger": logger}, "model": {"width": 6}}
    file.write_text(yaml.safe_dump(settings))
    made = run(["fit", "--config", str(file), "--model.lr=0.2"])
    assert (made.model.hparams.width, made.model.hparams.lr) == (6, 0.2)
    assert made.trainer.early_stopping_callback.patience == 7
    folder = Path(made.trainer.log_dir)
    assert folder == tmp_path / "logs" / "lightning_logs" / "version_0"
    again = run(["fit", "--config", str(folder / "config.yaml")])
    assert again.config_dump["model"] == made.config_dump["model"]
    torch.testing.assert_close(copy_of(again.model), copy_of(made.model), rtol=0, atol=0)


def test_the_last_checkpoint_is_that_of_the_latest_version():
    words = ["fit", "--trainer.logger=pytorch_lightning.loggers.CSVLogger"]
    words += ["--trainer.logger.save_dir=logs"]
    first, other = run(words), run([*words, "--trainer.max_steps=1"])
    assert (first.trainer.global_step, other.trainer.global_step) == (16, 1)
    made = run([*words, "--ckpt_path=last"])
    whole = first.model.state_dict()
    assert made.trainer.global_step == 16
    torch.testing.assert_close(made.model.state_dict(), whole, rtol=0, atol=0)
    assert Path(made.trainer.log_dir).name == "version_2"


def test_subcommands_that_evaluate_and_a_cli_that_creates_only(tmp_path, capsys):
    made = run(["fit", "--trainer.default_root_dir=fit"])
    saved = made.trainer.checkpoint_callback.best_model_path
    found = run(["validate", f"--ckpt_path={saved}", "--trainer.default_root_dir=val"])
    torch.testing.assert_close(copy_of(found.model), copy_of(made.model), rtol=0, atol=0)
    assert "val_loss" in capsys.readouterr().out
    only = run(["--model.width=9", "--trainer.max_steps=3"], run=False)
    assert (only.subcommand, only.trainer.global_step) == (None, 0)
    only.trainer.fit(only.model, only.datamodule)
    assert only.trainer.global_step == 3
    with pytest.raises(SystemExit):
        run(["fit", "--print_config"])
    assert yaml.safe_load(capsys.readouterr().out)["model"] == {"width": 4, "lr": 0.1}


def test_wrong_options_and_what_is_not_carried_are_errors(tmp_path, capsys):
    with pytest.raises(SystemExit):
        run(["fit", "--model.witdh=5"])
    assert "model.witdh" in capsys.readouterr().err
    with pytest.raises(ValueError, match="multifile=True"):
        run(["fit"], save_config_kwargs={"multifile": True})

    class Two(ours.LightningCLI):
        def add_arguments_to_parser(self, parser: Any) -> None:
            parser.add_optimizer_args(torch.optim.SGD, "first")
            parser.add_optimizer_args(torch.optim.SGD, "second")

    net, data, _ = make_program(L, ours)
    words = ["--first.lr=1", "--second.lr=1"]
    with pytest.raises(
        ValueError, match="first and second are both optimizers or schedulers of the module"
    ):
        Two(net, data, args=words, run=False, trainer_defaults=QUIET)
    with pytest.raises(ValueError, match="has no arguments to add"):
        ours.LightningArgumentParser().add_lightning_class_args(int, "number")


def test_a_callback_that_saves_the_configuration_elsewhere_has_the_loggers(tmp_path):
    class Saves(ours.SaveConfigCallback):
        def save_config(self, trainer: Any, pl_module: Any, stage: str) -> None:
            width = self.config["model"]["width"]
            trainer.logger.log_hyperparams({"stage": stage, "width": width})

    logger = ["--trainer.logger=TensorBoardLogger", "--trainer.logger.save_dir=logs"]
    made = run(["fit", *logger], save_config_callback=Saves)
    events = b"".join(path.read_bytes() for path in Path(made.trainer.log_dir).glob("events*"))
    assert b"width: 4" in events


def test_optimizers_and_callbacks_may_be_linked_to_arguments_of_the_module(tmp_path):
    net, data, _ = make_program(L, ours)

    class Described(net):  # type: ignore[misc, valid-type]
        def __init__(self, optimizer: dict[str, Any]) -> None:
            super().__init__()
            self.described = optimizer

        def configure_optimizers(self) -> Any:
            return ours.instantiate_class(self.parameters(), self.described)

    class Program(ours.LightningCLI):
        def add_arguments_to_parser(self, parser: Any) -> None:
            parser.add_lightning_class_args(L.pytorch.callbacks.EarlyStopping, "early")
            parser.set_defaults({"early.monitor": "val_loss"})
            parser.add_optimizer_args(torch.optim.SGD, "own", link_to="model.optimizer")

    options = {"early": {"patience": 5}, "own": {"lr": 0.3}}
    made = Program(
        Described, data, trainer_defaults=QUIET, args={"subcommand": "fit", "fit": options}
    )
    assert made.trainer.early_stopping_callback.patience == 5
    assert made.trainer.optimizers[0].param_groups[0]["lr"] == 0.3
    assert made.model.described["class_path"] == "torch.optim.sgd.SGD"


def test_a_schedule_that_waits_for_a_metric_is_given_by_name(tmp_path):
    words = ["--optimizer=torch.optim.SGD", "--optimizer.lr=0.1", "--trainer.max_epochs=4"]
    plateau = ["ReduceLROnPlateau", "monitor=val_loss", "factor=0.5", "patience=0", "threshold=10"]
    first, *rest = plateau
    words += [f"--lr_scheduler={first}", *(f"--lr_scheduler.{each}" for each in rest)]
    made = run(["fit", *words])
    assert made.trainer.optimizers[0].param_groups[0]["lr"] == pytest.approx(0.1 * 0.5**4)
