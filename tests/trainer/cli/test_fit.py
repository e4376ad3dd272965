"""`trainer fit`, `validate`, `test-model`, `predict`: a configuration is the run of a script."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file

from callbacks import EarlyStopping, ModelCheckpoint, PredictionWriter
from trainer import DataLoaderConfiguration, DistributedDataParallelKwargs, Trainer
from trainer.cli import main
from trainer.cli.parsing import import_from_here

pytest.importorskip("jsonargparse")
configured = import_module("trainer.cli.fit.configured")

SCRIPT = '''
"""What a user has beside the configuration."""
from collections.abc import Callable, Iterable

import torch
from torch.utils.data import DataLoader, Dataset
from trainer import DataModule, TrainModule


class Rows(Dataset):
    def __init__(self, count: int = 24, noise: float = 0.0):
        self.x = torch.linspace(-1, 1, count * 4).reshape(count, 4)
        self.noise = noise

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        return self.x[index] + self.noise * torch.randn(4)


def rows_loader(count: int = 8, batch_size: int = 4) -> DataLoader:
    return DataLoader(Rows(count), batch_size)


class RowsData(DataModule):
    def __init__(self, count: int = 24, batch_size: int = 4, noise: float = 0.0):
        self.count, self.batch_size, self.noise = count, batch_size, noise

    def train_dataloader(self):
        return DataLoader(Rows(self.count, self.noise), self.batch_size, shuffle=True)

    def val_dataloader(self):
        return DataLoader(Rows(7), 2)


class Line(TrainModule):
    """A line with dropout.

    Args:
        width: How many outputs there are.
        optimizer: Makes the optimizer of the parameters.
    """

    def __init__(
        self,
        width: int = 3,
        optimizer: Callable[[Iterable], torch.optim.Optimizer] = torch.optim.SGD,
        fails: str | None = None,
    ):
        super().__init__()
        self.save_hyperparameters(ignore="optimizer")
        self.net = torch.nn.Sequential(torch.nn.Linear(4, width), torch.nn.Dropout(0.5))
        self.optimizer, self.fails = optimizer, fails

    def training_step(self, batch, batch_idx):
        if self.fails:
            open(self.fails)
        loss = (self.net(batch) - 1).square().mean()
        self.log("train/loss", loss)
        return loss

    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        self.log("val/loss", (self.net(batch) - 1).square().mean())

    def test_step(self, batch, batch_idx):
        self.log("test/loss", self.net(batch).abs().mean())

    def predict_step(self, batch, batch_idx):
        return self.net(batch)

    def configure_optimizers(self):
        return self.optimizer(self.parameters())
'''

BASE = """
seed: 7
trainer:
  max_epochs: 2
  gradient_accumulation_steps: 2
  max_grad_norm: 1.5
  val_every: 2
  log_every: 1
  progress_bar: false
  project_dir: runs/configured
  callbacks:
  - {class_path: EarlyStopping, init_args: {monitor: val/loss, patience: 50}}
  - class_path: callbacks.ModelCheckpoint
    init_args: {monitor: val/loss, save_top_k: 1}
model:
  class_path: fitted.Line
  init_args:
    width: 5
    optimizer: {class_path: torch.optim.AdamW, init_args: {lr: 0.05, weight_decay: 0.1}}
data: {class_path: fitted.RowsData, init_args: {noise: 0.25}}
"""


@pytest.fixture(autouse=True)
def project(tmp_path, monkeypatch):
    """A folder with a script and a configuration, which is the current one."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    Path("fitted.py").write_text(SCRIPT)
    Path("base.yaml").write_text(BASE)
    yield
    sys.modules.pop("fitted", None)


def files_of(run: str) -> dict[str, bytes]:
    """The tensors of the last checkpoint of a run."""
    last = sorted(Path(run, "checkpoints").iterdir())[-1]
    return {file.name: file.read_bytes() for file in last.glob("*.safetensors")}


def records(run: str) -> list[dict[str, object]]:
    lines = Path(run, "metrics.jsonl").read_text().splitlines()
    return [{k: v for k, v in json.loads(line).items() if k != "time"} for line in lines]


def line_of(stage: str = "fit") -> Any:
    import_from_here()
    return configured.ConfiguredLine(f"trainer {stage}", stage)


def made(*words: str) -> Any:
    line = line_of()
    return line.make(line.parse(words))


def error_of(capsys, *words: str, code: int = 2) -> str:
    assert main([*words]) == code
    return capsys.readouterr().err


def test_a_configured_run_is_that_of_the_script_bit_for_bit():
    assert main(["fit", "base.yaml"]) == 0
    fitted = import_module("fitted")
    trainer = Trainer(
        seed=7,
        max_epochs=2,
        gradient_accumulation_steps=2,
        max_grad_norm=1.5,
        val_every=2,
        log_every=1,
        progress_bar=False,
        project_dir="runs/script",
        callbacks=[
            EarlyStopping("val/loss", patience=50),
            ModelCheckpoint(monitor="val/loss", save_top_k=1),
        ],
    )
    module = fitted.Line(5, lambda p: torch.optim.AdamW(p, lr=0.05, weight_decay=0.1))
    trainer.fit(module, datamodule=fitted.RowsData(noise=0.25))
    expected = files_of("runs/script")
    assert {"model.safetensors", "optimizer_0.safetensors"} & expected.keys()
    assert files_of("runs/configured") == expected
    assert records("runs/configured") == records("runs/script")
    assert len(records("runs/script")) >= trainer.global_step == 6


def test_loaders_that_are_described_are_those_of_the_script():
    Path("loaders.yaml").write_text("""
seed: 1
trainer: {max_steps: 5, progress_bar: false, project_dir: runs/configured, checkpointing: true}
model: fitted.Line
data:
  class_path: Loaders
  init_args:
    train:
      class_path: Loader
      init_args:
        dataset: {class_path: fitted.Rows, init_args: {count: 10, noise: 0.5}}
        batch_size: 3
        shuffle: true
    val: [{class_path: fitted.rows_loader}, {class_path: fitted.rows_loader, init_args: {count: 5}}]
""")
    assert main(["fit", "loaders.yaml"]) == 0
    fitted = import_module("fitted")
    trainer = Trainer(seed=1, max_steps=5, progress_bar=False, project_dir="runs/script")
    train = torch.utils.data.DataLoader(fitted.Rows(10, 0.5), batch_size=3, shuffle=True)
    trainer.fit(fitted.Line(), train, [fitted.rows_loader(), fitted.rows_loader(5)])
    assert files_of("runs/configured") == files_of("runs/script")
    assert records("runs/configured") == records("runs/script")


def test_options_go_over_files_and_later_files_over_earlier_ones():
    Path("quick.yaml").write_text("trainer: {max_epochs: 9, log_every: 4}\n")
    Path("wide.yaml").write_text("model: {init_args: {width: 6}}\ntrainer: {log_every: 5}\n")
    words = ["--trainer.max_epochs", "1", "--config", "quick.yaml", "--config=wide.yaml"]
    line = line_of()
    config = line.parse(["base.yaml", *words, "--data.noise=0.75"])
    assert config.trainer.max_epochs == 1
    assert config.trainer.log_every == 5
    assert config.model.init_args.width == 6
    assert config.model.init_args.optimizer.init_args.weight_decay == 0.1
    assert (config.data.init_args.noise, config.data.init_args.count) == (0.75, 24)


def test_the_content_of_a_file_may_be_given_in_its_place():
    text = "trainer:\n  max_epochs: 7\n  log_every: 3\n"
    config = line_of().parse(["base.yaml", "--config", text, "--config={trainer: {log_every: 8}}"])
    assert (config.trainer.max_epochs, config.trainer.log_every) == (7, 8)


def test_arguments_that_are_no_plain_values_are_read():
    trainer = made(
        *("base.yaml", "--trainer.log_every", "3", "--trainer.max_time", "{minutes: 90}"),
        *("--trainer.limit_train_batches", "0.5", "--trainer.limit_val_batches", "4"),
        *("--trainer.deterministic", "warn", "--trainer.val_every", "{every: 2, unit: epochs}"),
        *("--trainer.log_with", "[tensorboard, csv]", "--trainer.callbacks+=callbacks.EMA"),
        *("--trainer.dataloader_config.non_blocking", "true"),
        "--trainer.kwargs_handlers=[{class_path: trainer.DistributedDataParallelKwargs, "
        "init_args: {bucket_cap_mb: 7}}]",
    ).trainer
    settings = trainer._context.settings
    assert [str(each) for each in (settings.log_every, settings.val_every)] == [
        "3 steps",
        "2 epochs",
    ]
    assert settings.budget == 5400.0
    assert (settings.limit_train_batches, settings.limit_val_batches) == (0.5, 4)
    assert settings.deterministic == "warn"
    assert trainer.accelerator.dataloader_config == DataLoaderConfiguration(non_blocking=True)
    assert trainer.accelerator.ddp_handler == DistributedDataParallelKwargs(bucket_cap_mb=7)
    names = [type(each).__name__ for each in trainer.callbacks]
    assert names[:2] == ["EarlyStopping", "EMA"]


def test_a_tracker_may_be_a_class_path():
    tracker = "{class_path: trackers.CSVTracker, init_args: {run_name: a, logging_dir: b}}"
    trainer = made("base.yaml", f"--trainer.log_with=[{tracker}, tensorboard]").trainer
    (csv, tensorboard) = trainer._context.project._log_with
    assert csv.path.absolute() == Path("b/a/metrics.csv").absolute()
    assert tensorboard.name == "tensorboard"


def test_the_configuration_is_kept_with_the_run():
    assert main(["fit", "base.yaml", "--trainer.max_epochs", "1"]) == 0
    saved = Path("runs/configured/config.yaml")
    first = saved.read_text()
    content = yaml.safe_load(first)
    assert content["trainer"]["max_epochs"] == 1
    assert content["trainer"]["num_sanity_val_steps"] == 2  # a default
    assert content["model"]["init_args"]["optimizer"]["init_args"]["weight_decay"] == 0.1

    # What it says is the run: again elsewhere, the same weights.
    assert main(["fit", str(saved), "--trainer.project_dir", "runs/again"]) == 0
    assert files_of("runs/again") == files_of("runs/configured")

    # Another start with the same configuration changes nothing.
    assert main(["fit", "base.yaml", "--trainer.max_epochs=1", "--ckpt_path", "auto"]) == 0
    assert yaml.safe_load(saved.read_text()) == content | {"ckpt_path": "auto"}
    # One with another keeps both, and a refused one neither.
    assert main(["fit", "base.yaml", "--trainer.max_epochs=2", "--ckpt_path", "auto"]) == 0
    assert yaml.safe_load(saved.read_text())["trainer"]["max_epochs"] == 2
    aside = Path("runs/configured/config.1.yaml")
    assert yaml.safe_load(aside.read_text())["trainer"]["max_epochs"] == 1
    assert main(["fit", "base.yaml", "--trainer.max_epochs=3"]) == 1
    assert yaml.safe_load(saved.read_text())["trainer"]["max_epochs"] == 2
    assert len(list(Path("runs/configured").glob("config*"))) == 2


def test_the_configuration_that_is_kept_has_no_secret(capsys):
    Path("keyed.py").write_text(
        "from fitted import Line\n"
        "class Keyed(Line):\n"
        "    def __init__(self, api_key: str, url: str = ''):\n"
        "        super().__init__()\n"
    )
    words = ["--trainer.max_epochs=1", "--model=keyed.Keyed", "--model.api_key"]
    assert main(["fit", "base.yaml", *words, "pa55w0rd", "--model.url=http://me:pa55w0rd@h"]) == 0
    saved = Path("runs/configured/config.yaml")
    assert "pa55w0rd" not in saved.read_text()
    told = error_of(capsys, "fit", str(saved))
    assert "model.init_args.api_key is redacted" in told
    assert "--model.init_args.api_key ..." in told
    given = made(str(saved), "--model.api_key=again", "--model.url=http://me:again@h")
    assert given.trainer.project_dir == saved.parent.absolute()
    sys.modules.pop("keyed")


def test_a_folder_with_a_run_is_refused_with_the_options_that_help(capsys):
    assert main(["fit", "base.yaml"]) == 0
    shown = error_of(capsys, "fit", "base.yaml", code=1)
    assert "To resume it, pass --ckpt_path auto;" in shown
    assert "another --trainer.project_dir." in shown
    assert "fit(" not in shown
    assert main(["fit", "base.yaml", "--ckpt_path", "auto"]) == 0
    assert main(["fit", "base.yaml", "--trainer.project_dir", "runs/other"]) == 0


@pytest.mark.parametrize("trial", ["--trainer.fast_dev_run=true", "--trainer.barebones=true"])
def test_a_trial_leaves_nothing_behind(trial):
    Path("short.yaml").write_text("model: fitted.Line\ndata: fitted.RowsData\n")
    assert main(["fit", "short.yaml", "--trainer.max_steps=1", trial]) == 0
    assert sorted(p.name for p in Path().iterdir() if p.name != "__pycache__") == [
        "base.yaml",
        "fitted.py",
        "short.yaml",
    ]


def test_validation_test_and_prediction_work_from_the_same_file(capsys):
    assert main(["fit", "base.yaml"]) == 0
    last = ["--ckpt_path", "last"]
    loaders = ["--data=Loaders", "--data.val=fitted.rows_loader", "--data.test=fitted.rows_loader"]
    capsys.readouterr()
    assert main(["validate", "base.yaml", *loaders, *last]) == 0
    validated = capsys.readouterr().out
    assert main(["test-model", "base.yaml", *loaders, *last]) == 0
    tested = capsys.readouterr().out
    words = ["predict", "base.yaml", "--data=Loaders", "--data.predict=fitted.rows_loader", *last]
    assert main(words) == 0
    folder = Path("runs/configured/predictions").absolute()
    assert capsys.readouterr().out == f"The predictions are in {folder}.\n"
    shown = error_of(capsys, *words, code=1)
    (line,) = (each for each in shown.splitlines() if each.startswith("(On the command line: "))
    again = line.partition(": ")[2].partition(", or ")[0].split()
    assert main([*words, *again]) == 0  # what it says can be done

    fitted = import_module("fitted")
    trainer = Trainer(project_dir="runs/configured", progress_bar=False)
    module = fitted.Line(5)
    (expected,) = trainer.validate(module, fitted.rows_loader(), ckpt_path="last")
    assert validated.split() == ["val/loss", f"{expected['val/loss']:.6g}"]
    (expected,) = trainer.test(module, fitted.rows_loader(), ckpt_path="last")
    assert tested.split() == ["test/loss", f"{expected['test/loss']:.6g}"]
    predicted = torch.cat(trainer.predict(module, fitted.rows_loader(), ckpt_path="last"))
    stored = load_file("runs/configured/predictions/predictions.safetensors")
    assert torch.equal(stored["predictions"], predicted)
    assert len(list(Path("runs/configured").glob("config*"))) == 1


LINKED = """
from fitted import Line, RowsData


class Counted(RowsData):
    def __init__(self, count: int = 24, batch_size: int = 4):
        super().__init__(count, batch_size)
        self.classes = 6

    test_dataloader = RowsData.val_dataloader


class Sized(Line):
    def __init__(self, classes: int, batch_size: int, scale: float = 1.0):
        super().__init__(classes)
        self.save_hyperparameters()
        self.given = classes, batch_size, scale
"""


@pytest.fixture
def linked():
    Path("linked.py").write_text(LINKED)
    Path("linked.yaml").write_text("""
trainer: {max_steps: 2, progress_bar: false, project_dir: runs/linked, val_every: 1}
model: linked.Sized
data: {class_path: linked.Counted, init_args: {batch_size: 3}}
links:
  model.init_args.classes: data.classes
  model.init_args.batch_size: data.init_args.batch_size
""")
    yield
    sys.modules.pop("linked", None)


def test_values_are_linked_between_the_data_and_the_module(linked):
    assert made("linked.yaml").module.given == (6, 3, 1.0)
    assert made("linked.yaml", "--data.batch_size=2").module.given == (6, 2, 1.0)
    assert main(["fit", "linked.yaml"]) == 0
    saved = Path("runs/linked/config.yaml")  # has the links, not their values
    assert yaml.safe_load(saved.read_text())["model"]["init_args"] == {"scale": 1.0}
    assert made(str(saved), "--data.batch_size=8").module.given == (6, 8, 1.0)


@pytest.mark.parametrize(
    ("link", "text"),
    [
        (
            "model.init_args.scale: trainer.project_dir",
            "Expected a <class 'float'>. Got value: runs/",
        ),
        ("model.init_args.scael: data.classes", "there is no model.init_args.scael"),
        ("model.init_args.scale: data.sise", "model.init_args.scale: data.sise: 'Counted'"),
        ("model.init_args.scale: 3", "- Expected a <class 'str'>. Got value: 3"),
    ],
)
def test_an_invalid_link_is_refused(capsys, linked, link, text):
    Path("wrong.yaml").write_text(Path("linked.yaml").read_text() + f"  {link}\n")
    shown = error_of(capsys, "fit", "wrong.yaml")
    assert text in shown
    assert not Path("runs").exists()


def test_links_are_no_options(capsys, linked):
    words = ["--model=linked.Sized", "--model.classes=1", "--model.batch_size=1"]
    shown = error_of(capsys, "fit", *words, "--links={model.init_args.scale: seed}")
    assert "links must be in a configuration file" in shown


@pytest.mark.parametrize("ckpt_path", ["last", "runs/linked/checkpoints/step-00000002"])
def test_an_evaluation_takes_the_arguments_that_only_the_checkpoint_has(capsys, linked, ckpt_path):
    assert main(["fit", "linked.yaml", "--model.scale=2.5"]) == 0
    Path("short.yaml").write_text("""
trainer: {progress_bar: false, project_dir: runs/linked}
model: linked.Sized
data: linked.Counted
""")
    line = line_of("test-model")
    module = line.make(line.parse(["short.yaml", "--ckpt_path", ckpt_path])).module
    assert module.given == (6, 3, 2.5)
    words = ["short.yaml", "--ckpt_path", ckpt_path, "--model.scale=1.0"]
    assert line.make(line.parse(words)).module.given == (6, 3, 1.0)
    for stage in ("validate", "test-model"):
        assert main([stage, "short.yaml", "--ckpt_path", ckpt_path]) == 0
    shown = error_of(capsys, "test-model", "short.yaml")
    assert "are required: classes, batch_size.\n" in shown


def test_a_checkpoint_names_no_class_to_an_evaluation(capsys):
    Path("acting.py").write_text("""
from typing import Any

from fitted import Line


class Acting(Line):
    def __init__(self, act: Any = None):
        super().__init__(1)
""")
    base = yaml.safe_load(Path("base.yaml").read_text())
    Path("acting.yaml").write_text(yaml.safe_dump(base | {"model": "acting.Acting"}))
    words = ["acting.yaml", "--trainer.project_dir=runs/acting"]
    assert main(["fit", *words]) == 0
    manifest = next(Path("runs/acting/checkpoints").glob("*/manifest.json"))
    assert main(["validate", *words, "--ckpt_path=last"]) == 0
    fields = json.loads(manifest.read_text())
    fields["hyper_parameters"]["arguments"]["act"] = {
        "class_path": "torch.nn.Linear",
        "init_args": {"in_features": 1, "out_features": 1},
    }
    del fields["sha256"]
    digest = hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()
    manifest.write_text(json.dumps({**fields, "sha256": digest}))
    assert main(["validate", *words, "--ckpt_path=last"]) == 1
    assert "model.init_args.act: the value in" in capsys.readouterr().err


def test_a_given_prediction_writer_replaces_the_default():
    line = line_of("predict")
    config = line.parse(
        ["base.yaml", "--trainer.callbacks+=PredictionWriter", "--trainer.callbacks.dirpath=out"]
    )
    writers = [c for c in line.make(config).trainer.callbacks if isinstance(c, PredictionWriter)]
    assert [writer.dirpath for writer in writers] == [Path("out").absolute()]


def test_what_is_printed_is_a_configuration(capsys):
    with pytest.raises(SystemExit) as caught:
        main(["fit", "base.yaml", "--model.width", "9", "--print_config"])
    assert caught.value.code == 0
    Path("printed.yaml").write_text(capsys.readouterr().out)
    line = line_of()
    printed = line.parse(["printed.yaml"])
    given = line.parse(["base.yaml", "--model.width", "9"])
    assert printed.model == given.model
    assert printed.trainer == given.trainer
    assert printed.model.init_args.width == 9


def test_the_help_teaches(capsys):
    with pytest.raises(SystemExit) as caught:
        main(["fit", "--help"])
    assert caught.value.code == 0
    shown = capsys.readouterr().out
    assert "usage: trainer fit [CONFIG.yaml ...] [--KEY VALUE ...]" in shown
    assert "class_path: digits.Digits" in shown
    assert "Stop after this many updates." in shown
    assert "exit codes:" in shown
    with pytest.raises(SystemExit):
        main(["fit", "--model.help", "fitted.Line"])
    assert "How many outputs there are. (type: int, default: 3)" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "what"),
    [
        (["nowhere.yaml"], "nowhere.yaml: No such file or directory"),
        (["base.yaml", "--config=folder"], "folder: Is a directory"),
    ],
)
def test_a_file_that_cannot_be_read_is_named_in_one_line(capsys, words, what):
    Path("folder").mkdir()
    assert error_of(capsys, "fit", *words) == f"trainer fit: {what}\n"


@pytest.mark.parametrize(
    ("words", "texts"),
    [
        (
            ["--trainer.max_epoch=3"],
            ["unrecognized arguments: --trainer.max_epoch=3", "mean 'trainer.max_epochs'?"],
        ),
        (
            ["wrong.yaml"],
            ["Group 'trainer' does not accept option 'max_epocs'", "mean 'trainer.max_epochs'?"],
        ),
        (["section.yaml"], ["Option 'modle.class_path' is not accepted", "mean 'model'?"]),
        (["latin.yaml"], ["latin.yaml cannot be read as YAML", "can't decode byte 0xfc"]),
        (["torn.yaml"], ["torn.yaml cannot be read as YAML", "line 2, column 1"]),
        (["empty.yaml"], ["empty.yaml is empty: write `trainer:`, `model:` and `data:`."]),
        (["text.yaml"], ["text.yaml has no sections: write `trainer:`"]),
        (["off.yaml"], ['"trainer.mixed_precision"', "Given value: False"]),
        (["--trainer.max_epochs=-1"], ["max_epochs is -1; it must be a whole number"]),
        (["fitted.py"], ["fitted.py is a script: use `trainer launch fitted.py`."]),
    ],
)
def test_an_error_names_the_key_and_the_value(capsys, words, texts):
    Path("torn.yaml").write_text("model: [\n")
    Path("empty.yaml").write_text("# later\n")
    Path("text.yaml").write_text("model\n")
    Path("latin.yaml").write_bytes("# für später\n".encode("latin-1"))
    Path("off.yaml").write_text("trainer: {mixed_precision: no}\n")
    Path("wrong.yaml").write_text("trainer: {max_epocs: 3}\n")
    Path("section.yaml").write_text("modle: {class_path: fitted.Line}\n")
    shown = error_of(capsys, "fit", "base.yaml", *words)
    assert [text for text in texts if text not in shown] == [], shown
    assert shown.startswith("trainer fit: ")
    assert "Traceback" not in shown
    assert not Path("runs").exists()


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (
            ["--model=fitted.Lin"],
            "model: class_path 'fitted.Lin': module 'fitted' has no attribute 'Lin'. "
            "Did you mean 'fitted.Line'?",
        ),
        (
            ["--model=fited.Line"],
            "model: class_path 'fited.Line': No module named 'fited'. Did you mean 'fitted.Line'?",
        ),
        (
            ["--model.widht=3"],
            "model: class_path 'fitted.Line': Option 'widht' is not accepted. "
            "Did you mean 'width'?",
        ),
        (
            ["--model.width=x"],
            "model: class_path 'fitted.Line': argument 'width': "
            "Expected a <class 'int'>. Got value: x.",
        ),
        ("model: {class_path: Unknown}", "model: there is no class 'Unknown'. Write module.Class."),
        (
            "model: {class_path: torch.nn.Linear}",
            "model: torch.nn.Linear is not a subclass of TrainModule.",
        ),
        (
            "model: {class_pth: fitted.Line}",
            "model: a section with a class has only class_path and init_args, not 'class_pth'; the "
            "arguments of the class are in init_args. Did you mean 'class_path'?",
        ),
        (
            "model: {class_path: fitted.Line, width: 3}",
            "model: a section with a class has only class_path and init_args, not 'width'; the "
            "arguments of the class are in init_args.",
        ),
        (
            "model: {class_path: fitted.Line, data: fitted.RowsData}",
            "`data:` lies inside `model:`; in the file it must begin at the left margin.",
        ),
        ("model: fitted.RowsData", "model: fitted.RowsData is not a subclass of TrainModule."),
        ("model: needs.Net", "model: class_path 'needs.Net': No module named 'fited'."),
        (
            "trainer: {kwargs_handlers: [{class_path: Profile}]}",
            "trainer.kwargs_handlers: there is no class 'Profile'. Did you mean 'ProfileKwargs'?",
        ),
        (
            ["--trainer.seed=3"],
            "unrecognized arguments: --trainer.seed=3\nDid you mean 'seed'?",
        ),
        (
            "trainer:\n  max_epochs: 1\n  model:\n    class_path: fitted.Line",
            "`model:` lies inside `trainer:`; in the file it must begin at the left margin.",
        ),
        (
            "model:\n  class_path: fitted.Line\n  data:\n    class_path: fitted.RowsData",
            "`data:` lies inside `model:`; in the file it must begin at the left margin.",
        ),
        (
            "trainer: {callbacks: [{class_path: EarlyStoping, init_args: {monitor: loss}}]}",
            "trainer.callbacks: there is no class 'EarlyStoping'. Did you mean 'EarlyStopping'?",
        ),
        (
            "trainer: {callbacks: [{class_path: EarlyStopping, init_args: {monitr: loss}}]}",
            "trainer.callbacks: class_path 'callbacks.EarlyStopping': "
            "Option 'monitr' is not accepted. Did you mean 'monitor'?",
        ),
    ],
)
def test_a_misspelt_class_or_key_is_one_line(capsys, words, text):
    if isinstance(words, str):
        Path("only.yaml").write_text(words)
        Path("needs.py").write_text("import fited")  # of which this folder has a near one
        words = ["only.yaml"]
    else:
        words = ["base.yaml", *words]
    end = "\n`trainer fit --help` explains the configuration.\n"
    assert error_of(capsys, "fit", *words) == f"trainer fit: {text}{end}"


def test_a_misspelt_argument_of_a_nested_class_is_named():
    Path("nested.py").write_text("import fitted\nclass Outer:\n    class Inner(fitted.Line): ...\n")
    model = "{class_path: nested.Outer.Inner, init_args: {widht: 3}}"
    # Not in this process: every later --help would list the class.
    command = [sys.executable, "-m", "trainer", "fit", f"--model={model}"]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 2
    assert "'nested.Outer.Inner': Option 'widht' is not accepted. Did you mean 'width'?" in (
        run.stderr
    )


@pytest.mark.parametrize("content", ["model: {}", "data: {}\nmodel: fitted.Line"])
def test_a_section_without_a_class_is_refused(capsys, content):
    Path("classless.yaml").write_text(content)
    shown = error_of(capsys, "fit", "classless.yaml", "--trainer.max_epochs=1")
    assert shown.startswith(f"trainer fit: {content.partition(':')[0]} has no class_path: write")


def test_callbacks_may_be_named_without_their_module():
    import trainer.lightning  # noqa: F401 - whose callbacks have the same names

    names = ["EMA", "WeightAveraging", "Timer", "ModelCheckpoint"]
    Path("bare.yaml").write_text(yaml.safe_dump({"trainer": {"callbacks": names}}))
    described = [{"class_path": name} for name in names]
    Path("paths.yaml").write_text(yaml.safe_dump({"trainer": {"callbacks": described}}))
    for file in ("bare.yaml", "paths.yaml"):
        config = line_of().parse(["base.yaml", file])
        paths = [each.class_path for each in config.trainer.callbacks]
        assert paths == [f"callbacks.{name}" for name in names]


def test_an_error_of_the_trainer_has_no_traceback(capsys):
    shown = error_of(capsys, "fit", "--model=fitted.Line", "--data=fitted.RowsData", code=1)
    assert shown.startswith("trainer fit: Nothing ends this run: max_epochs and max_steps")
    shown = error_of(capsys, "fit", "base.yaml", "--ckpt_path=nowhere", code=1)
    assert "nowhere" in shown
    assert "--ckpt_path auto" in shown
    assert "Traceback" not in shown


@pytest.mark.parametrize("words", [(), ("--data=Loaders",)])
def test_missing_sections_name_their_option(capsys, words):
    assert "arguments are required: model" in error_of(capsys, "fit")
    words = ("fit", "--model=fitted.Line", "--trainer.max_epochs=1", *words)
    shown = error_of(capsys, *words, code=1)
    assert "fit has no data" in shown
    assert "--data CLASS" in shown


def test_an_error_of_the_users_code_has_its_traceback(capsys):
    with pytest.raises(SystemExit) as end:
        main(["fit", "base.yaml", "--model.fails=absent.txt"])
    shown = end.value.code  # of an exit with a text Python prints it, and the code is 1
    assert 'fitted.py", line ' in shown
    assert "\nFileNotFoundError: " in shown
    assert "trainer/cli" not in shown  # nor a word of usage
    assert "usage" not in shown
    assert capsys.readouterr().err.count("FileNotFoundError") == 0


def test_without_jsonargparse_the_extra_is_named(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "jsonargparse", None)
    assert "pip install 'cadence-trainer[cli]'" in error_of(capsys, "fit", "base.yaml", code=1)


def _fit_here(folder: str) -> int:
    """On a rank: what `trainer fit base.yaml` does in a folder that all ranks share."""
    before, path = os.getcwd(), [*sys.path]
    os.chdir(folder)
    try:
        return main(["fit", "base.yaml", "--trainer.cpu=true"])
    finally:
        os.chdir(before)
        sys.path[:] = path
        sys.modules.pop("fitted", None)


def test_several_processes_save_one_configuration(ranks2, tmp_path):
    assert ranks2(_fit_here, str(tmp_path)) == [0, 0]
    (checkpoint, *_) = sorted(Path("runs/configured/checkpoints").iterdir())
    assert json.loads((checkpoint / "manifest.json").read_text())["world_size"] == 2
    assert yaml.safe_load(Path("runs/configured/config.yaml").read_text())["seed"] == 7
    assert len(list(Path("runs/configured").glob("config*"))) == 1
