"""`trainer migrate` lists what of a program will not carry over, and changes its import lines."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

import pytest

from trainer.cli import _run, main
from trainer.cli.migrate import IMPORTS
from trainer.cli.parsing import CommandError
from trainer.lightning.missing import refusal

ACCELERATE = """\
import os, accelerate  # ü
from accelerate import Accelerator
from accelerate.utils import (
    set_seed,
    get_shape,
)
import accelerate.utils.operations as ops

accelerator = accelerate.Accelerator(cpu=True)
accelerate.utils.nothing.part
accelerate.commands.menu
ops.gather, ops.verify_operation
"""
LIGHTNING = """\
import lightning as L
import pytorch_lightning
from lightning.pytorch.callbacks import Callback, NoSuchCallback
from lightning_fabric import Fabric


class Module(L.LightningModule):
    def training_step(self, batch, batch_idx):
        self.log("loss", 1.0, rank_zero_only=True, sync_dist=True)
        return self.trainer.received_sigterm, self.trainer.logger

    def training_epoch_end(self, outputs):
        pass

    def configure_callbacks(self):
        return []


class Own(Callback):
    def on_epoch_end(self, trainer, pl_module):
        pass


trainer = L.Trainer(max_epochs=3, gpus=2, devices=1)
other = pytorch_lightning.Trainer(terminate_on_nan=True, seed=3)
"""
HUGGING_FACE = """\
from transformers import Trainer, TrainerCallback, TrainingArguments


class Own(Trainer):
    def compute_loss(self, model, inputs):
        pass


class Told(TrainerCallback):
    def on_step_end(self, args, state, control):
        pass


arguments = TrainingArguments(output_dir="out", eval_steps=500, bf16=True)
"""
NATIVE = """\
from trainer import Trainer

trainer = Trainer(max_epochs=3)
"""


PROCESSES = """\
import pytorch_lightning as pl
from accelerate import Accelerator

accelerator = Accelerator()
if accelerator.is_main_process and True:
    accelerator.print("one")
    if accelerator.num_processes:
        accelerator.load_state("out")
else:
    accelerator.gather([])
accelerator.gather([])


@accelerator.on_main_process
def save():
    accelerator.get_state_dict(None)


class Base(pl.LightningModule):
    pass


class Module(Base):
    def validation_epoch_end(self, outputs):
        if self.trainer.is_global_zero:
            self.log("accuracy", 1.0)


pl.callbacks.ModelCheckpoint(period=1)
pl.Trainer(strategy="xla", devices=2)
"""
OWNERS = """\
import lightning as L
import wandb
from lightning.pytorch.callbacks import *
from lightning.pytorch.tuner.tuning import NoSuch
from lightning_utilities.core.rank_zero import rank_zero_only


class Module(L.LightningModule):
    def training_step(self, batch, batch_idx):
        if self.trainer.is_global_zero:
            wandb.log({"a": 1})
            self.logger.experiment.log({"b": 2})
            self.log("c", 3)

    @rank_zero_only
    def note(self):
        self.log("d", 4)


class Told(L.Callback):
    def on_train_end(self, trainer, pl_module):
        trainer.is_global_zero and pl_module
        if trainer.is_global_zero: pl_module.log("e", 5)


def use(trainer):
    return trainer.received_sigterm, trainer.train


made: L.Trainer = use(None)
made.received_sigterm
L.Trainer(plugins=[]), L.Trainer(plugins=[use])
trainer = use(None)
trainer.received_sigterm
"""


def migrate(capsys, text: str, *options: str) -> tuple[int, list[tuple[int, str]], str]:
    """Return the exit code, the findings with their lines, and the program afterwards."""
    file = Path("script.py")
    file.write_bytes(text.encode())
    code = main(["migrate", "script.py", *options])
    findings = []
    out, err = capsys.readouterr()
    assert ("script.py: rewritten" in err) == (file.read_bytes() != text.encode())
    for line in out.splitlines():
        name, number, told = line.split(":", 2)
        assert name == "script.py"
        findings.append((int(number), told.strip()))
    return code, findings, file.read_bytes().decode()


def test_the_import_lines_of_accelerate_are_changed_and_the_rest_is_listed(capsys):
    code, findings, text = migrate(capsys, ACCELERATE.replace("\n", "\r\n"), "--write")
    assert code == 1
    assert [line for line, _ in findings] == [5, 10, 11, 12]
    assert "get_shape is not in Cadence: gather, reduce" in findings[0][1]
    assert findings[1][1].startswith("accelerate.utils.nothing.part is not in Cadence")
    assert "the command is `trainer`" in findings[2][1]
    assert text.replace("\r\n", "\n") == (
        ACCELERATE.replace("os, accelerate ", "os, trainer.accelerate as accelerate ")
        .replace("from accelerate", "from trainer.accelerate")
        .replace("import accelerate.utils", "import trainer.accelerate.utils")
    )


def test_without_write_the_file_stays_and_its_import_lines_are_listed(capsys):
    code, findings, text = migrate(capsys, "from accelerate import Accelerator\n")
    assert code == 1
    assert findings == [
        (1, "write 'from trainer.accelerate' for 'from accelerate', or pass --write")
    ]
    assert text == "from accelerate import Accelerator\n"


@pytest.mark.parametrize("text", [NATIVE, "import numpy\n", "from accelerate import Accelerator\n"])
def test_the_code_is_0_when_nothing_is_left_to_do(capsys, text):
    migrate(capsys, text, "--write")
    code, findings, _ = migrate(capsys, Path("script.py").read_text())
    assert (code, findings) == (0, [])
    assert main(["migrate", "script.py"]) == 0
    assert capsys.readouterr() == ("", "Nothing is left to do.\n")


def test_what_of_lightning_will_not_carry_over_is_listed(capsys):
    code, findings, text = migrate(capsys, LIGHTNING, "--write")
    assert code == 1
    told = dict(findings)
    assert list(told) == [3, 4, 9, 10, 12, 20, 24, 25]
    assert "NoSuchCallback is not in Cadence" in told[3]
    assert "use trainer.Accelerator" in told[4]
    assert "rank_zero_only=True" in told[9]
    assert "'received_sigterm': a callback's on_preemption" in told[10]
    assert "Module.training_epoch_end is never called: outputs are not collected" in told[12]
    assert "Own.on_epoch_end is never called: use on_train_epoch_end" in told[20]
    assert "'gpus'; use trainer launch --num_processes 2" in told[24]
    assert "'terminate_on_nan'; leave it out" in told[25]
    assert text.startswith(
        "import trainer.lightning as L\nimport trainer.lightning.pytorch as pytorch_lightning\n"
        "from trainer.lightning.pytorch.callbacks import"
    )


@pytest.mark.parametrize(("base", "listed"), [("lightning", [8]), ("trainer", [6, 8])])
def test_what_a_checkpoint_does_not_have_for_hooks_is_listed(capsys, base, listed):
    text = """\
import lightning as L


class Module(L.LightningModule):
    def on_save_checkpoint(self, checkpoint):
        weights = checkpoint["state_dict"]
        checkpoint["mine"], self.checkpoint["callbacks"] = weights, {}
        checkpoint["optimizer_states"].clear()

    def other(self, checkpoint):
        checkpoint["optimizer_states"]
"""
    if base == "trainer":
        text = text.replace("lightning", "trainer").replace("L.LightningModule", "L.TrainModule")
    _, findings, _ = migrate(capsys, text, "--write")
    assert [line for line, _ in findings] == listed
    assert findings[-1][1].endswith(
        "not there: use trainer.optimizers, on loading in on_train_start."
    )


def test_what_of_the_hugging_face_trainer_takes_another_form_is_listed(capsys):
    code, findings, text = migrate(capsys, HUGGING_FACE, "--write")
    assert code == 1
    assert text == HUGGING_FACE
    told = "\n".join(f"{line} {text}" for line, text in findings)
    assert "1 transformers.TrainingArguments: pass its arguments to trainer.Trainer" in told
    assert "5 Own.compute_loss is never called: the loss is what training_step" in told
    assert "10 Told.on_step_end is never called: use on_train_step_end" in told
    assert "14 Trainer has no argument 'output_dir'; use project_dir." in told
    assert "14 Trainer has no argument 'eval_steps'; use val_every='500 steps'." in told
    assert "14 Trainer has no argument 'bf16'; use mixed_precision='bf16'." in told


def test_what_not_all_processes_would_call_is_listed_and_what_classes_inherit(capsys):
    _, findings, _ = migrate(capsys, PROCESSES, "--write")
    told = dict(findings)
    assert list(told) == [8, 16, 24, 26, 29, 30]
    assert told[8].startswith("accelerator.load_state in a block of one process: call it")
    assert "get_state_dict in a block of one process" in told[16]
    assert "Module.validation_epoch_end is never called" in told[24]
    assert "self.log in a block of one process" in told[26]
    assert told[29].startswith("lightning.pytorch.callbacks.ModelCheckpoint has no argument 'peri")
    assert told[30].startswith("strategy is 'xla'; it must be")


def test_what_is_no_trainer_and_no_value_of_a_module_is_not_listed(capsys):
    _, findings, _ = migrate(capsys, OWNERS, "--write")
    told = dict(findings)
    assert list(told) == [3, 4, 13, 17, 23, 31, 32]
    assert "import names one by one" in told[3]
    assert "lightning.pytorch.tuner.tuning.NoSuch is not in Cadence" in told[4]
    assert "self.log in a block of one process" in told[13]
    assert "self.log in a block of one process" in told[17]
    assert "pl_module.log in a block of one process" in told[23]
    assert "no attribute 'received_sigterm'" in told[31]
    assert "no argument 'plugins'" in told[32]


def test_a_file_that_is_not_python_is_an_error(capsys):
    Path("script.py").write_text("def (")
    assert main(["migrate", "script.py"]) == 1
    assert "script.py cannot be read as Python" in capsys.readouterr().err


def test_a_folder_stands_for_its_programs_and_configurations(capsys):
    Path("part/.venv").mkdir(parents=True)
    Path("part/empty").mkdir()
    Path("part/.venv/other.py").write_text("def (")
    Path("part/model.py").write_text("import lightning as L\n")
    Path("part/other.py").write_bytes(b"\xef\xbb\xbfimport numpy\r\n")
    Path("python2.py").write_text("print 1\n")
    callbacks = ["EarlyStopping  # own", "SpikeDetection"]
    lines = [f"- class_path: lightning.pytorch.callbacks.{each}\r\n" for each in callbacks]
    Path("run.yaml").write_bytes("".join(lines).encode())
    Path("other.yaml").write_text("lr: 1\n")
    assert main(["migrate", ".", "--all"]) == 1
    out, err = capsys.readouterr()
    assert "part/model.py:1: write 'trainer.lightning' for 'lightning', or pass" in out
    assert "run.yaml:1: write 'trainer.lightning.pytorch.callbacks.EarlyStopping', or" in out
    assert "python2.py cannot be read" in err
    Path("python2.py").unlink()
    new = [lines[0].replace("lightning", "trainer.lightning"), lines[1]]  # the other is not there
    for rewritten in (["part/model.py", "run.yaml"], []):
        assert main(["migrate", ".", "--all", "--write"]) == 1
        out, err = capsys.readouterr()
        assert out.splitlines() == [f"run.yaml:2: {refusal('pytorch.callbacks.SpikeDetection')}"]
        assert err.splitlines() == [f"{name}: rewritten" for name in rewritten]
        assert Path("run.yaml").read_bytes() == "".join(new).encode()
    with pytest.raises(CommandError, match="has neither Python programs nor YAML files"):
        _run(["migrate", "part/empty"])


def test_a_folder_shows_each_cause_with_its_number_and_first_places(capsys):
    for number in range(4):
        text = f"import lightning as L\nclass M{number}(L.LightningModule):\n    "
        Path(f"m{number}.py").write_text(text + "def training_epoch_end(self, outputs): ...\n")
    Path("run.yaml").write_text("class_path: pytorch_lightning.callbacks.Timer\n")
    Path("run.py").write_text("import lightning as L\nL.Trainer(terminate_on_nan=True)\n")
    assert main(["migrate", "."]) == 1
    causes = capsys.readouterr().out.splitlines()
    assert causes[0] == f"6 x {IMPORTS}"
    assert causes[1] == "    m0.py:1, m1.py:1, m2.py:1, 3 more"
    assert causes[2].startswith("4 x training_epoch_end is never called: outputs are not collected")
    assert causes[3] == "    m0.py:3, m1.py:3, m2.py:3, 1 more"
    assert causes[4].startswith("1 x Trainer has no argument 'terminate_on_nan'")
    assert causes[5:] == ["    run.py:2", "11 findings in 6 files; --all shows each with its line."]


LIBRARIES = """\
import lightning as L
import torch
from optuna.integration import PyTorchLightningPruningCallback
from pytorch_forecasting import BaseModel, Baseline
from torch_geometric.data.lightning import LightningDataset
from sweeps import instantiate
from own.callbacks import Own


class Forecast(BaseModel):
    def training_step(self, batch, batch_idx): ...


class Helper(BaseModel):
    pass


def train(trial):
    prune = PyTorchLightningPruningCallback(trial, monitor="loss")
    trainer = L.Trainer(
        callbacks=[
            prune,
            Own(),
            instantiate("callback"),
        ],
    )
    model = Baseline.from_dataset(None)
    trainer.fit(model)
    trainer.validate(Own(), datamodule=LightningDataset([]))
"""


def test_classes_of_libraries_are_listed_where_a_trainer_gets_them(capsys, monkeypatch):
    # Optuna, once imported, has a module of its own making there, without a spec.
    monkeypatch.setitem(sys.modules, "optuna.integration", ModuleType("optuna.integration"))
    Path("own").mkdir()
    _, findings, _ = migrate(capsys, LIBRARIES, "--write")
    assert [line for line, _ in findings] == [10, 22, 28, 29]
    assert all("start the program with `trainer launch --as_lightning`" in t for _, t in findings)
    assert findings[1][1].startswith("optuna.integration.PyTorchLightningPruningCallback is a ca")
    assert findings[2][1].startswith("pytorch_forecasting.Baseline.from_dataset is a module or da")
    Path("optuna").mkdir()
    Path("optuna/tune.py").write_text(LIBRARIES)
    main(["migrate", "optuna/tune.py"])
    assert "optuna.integration.PyTorchLightningPruningCallback is" in capsys.readouterr().out


def test_what_steps_and_hooks_took_in_lightning_1_is_listed(capsys):
    text = """\
import lightning as L
class Gan(L.LightningModule):
    def training_step(self, batch, batch_idx, optimizer_idx): ...
    def validation_step(self, batch, batch_idx, hiddens=None): ...
    def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_idx, closure): ...
    def own(self, optimizer_idx): ...
"""
    _, findings, _ = migrate(capsys, text, "--write")
    assert [line for line, _ in findings] == [3, 4, 5]
    assert findings[0][1].startswith(
        "Gan.training_step takes optimizer_idx, which no step receives in Cadence: for several"
    )
    assert findings[2][1].endswith(
        "optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure)."
    )


FITS = """\
from lightning import Trainer

trainer = Trainer(max_epochs=1, logger=False, enable_model_summary=False)
if later:
    trainer.fit(one)
else:
    trainer.fit(other)
trainer = Trainer(max_epochs=1, logger=False, enable_model_summary=False)
trainer.fit(one)
for _ in range(3):
    trainer = Trainer(max_epochs=1, logger=False, enable_model_summary=False)
    trainer.fit(one)
"""


@pytest.mark.parametrize(
    ("more", "line"),
    [("", None), ("    trainer.fit(one)\n", 13), ("\nwhile later:\n    trainer.fit(one)\n", 15)],
)
def test_a_second_fit_is_listed_of_our_trainer(capsys, more, line):
    _, findings, _ = migrate(capsys, FITS + more, "--write")
    assert findings == []
    ours = (FITS + more).replace("from lightning", "from trainer")
    _, findings, _ = migrate(capsys, ours.replace("logger=False, enable_model_summary=False", ""))
    said = "trainer.fit is called a second time: each fit is a separate run"
    assert [number for number, _ in findings] == ([] if line is None else [line])
    assert all(told.startswith(said) for _, told in findings)


def test_no_import_is_written_of_a_module_that_is_not_there(capsys):
    kept = """\
import lightning.pytorch.plugins.io as io
from lightning.pytorch.trainer.connectors import logger_connector
from accelerate.test_utils import testing
"""
    _, findings, text = migrate(capsys, kept + "from lightning import Trainer\n", "--write")
    assert text == kept + "from trainer.lightning import Trainer\n"
    assert [line for line, _ in findings] == [1, 2, 3]
    _, findings, _ = migrate(capsys, kept)
    assert not any("write" in told for _, told in findings)


def test_a_program_that_would_not_compile_stays_as_it_is(capsys):
    text = "from accelerate import Accelerator\nreturn\n"
    Path("script.py").write_text(text)
    assert main(["migrate", "script.py", "--write"]) == 1
    assert (
        "script.py is not changed; the rewritten file would fail with 'return'"
        in capsys.readouterr().err
    )
    assert Path("script.py").read_text() == text


READS = """\
import os
import shutil
import torch
from torch.utils.data import DistributedSampler, distributed
import lightning as L

saver = L.pytorch.callbacks.ModelCheckpoint()
trainer = L.Trainer(profiler="advanced")
trainer = L.Trainer(devices=args.devices, use_distributed_sampler=False, precision=args.precision)
trainer = L.Trainer(devices=1, use_distributed_sampler=False, profiler=args.profiler)
loader = torch.utils.data.DataLoader([1], sampler=DistributedSampler([1]))
other = distributed.DistributedSampler([1])
weights = torch.load(saver.best_model_path)["state_dict"]
best = trainer.checkpoint_callback.best_model_path
saved = torch.load(best)
saved["state_dict"]
torch.load(args.path, weights_only=True)["state_dict"]
saved = torch.load("last.ckpt")
saved["hyper_parameters"], saved["own"]
torch.load("resnet.pth")["state_dict"]
shutil.copy(best, "out")
if os.path.isfile(best) and os.path.exists(best):
    open(saver.last_model_path)
artifact.add_file(best)
best = "text"
open(best)
"""


def test_data_that_are_sharded_twice_and_checkpoints_read_as_files_are_listed(capsys):
    _, findings, _ = migrate(capsys, READS, "--write")
    assert [line for line, _ in findings] == [8, 9, 11, 12, 13, 15, 17, 19, 21, 22, 23, 24]
    told = dict(findings)
    assert "use profiler='simple'" in told[8]
    assert all("DataLoaderConfiguration(presharded=True)" in told[line] for line in (9, 11, 12))
    assert all("load_from_checkpoint" in told[line] for line in (13, 15, 17, 19))
    assert "use shutil.copytree" in told[21]
    assert "use os.path.exists" in told[22]
    assert "use add_dir" in told[24]
    # Own loops save files with `torch.save`.
    _, findings, _ = migrate(capsys, READS.replace("import lightning as L", "import accelerate"))
    assert not any("torch.load reads" in text for _, text in findings)


@pytest.mark.parametrize(
    ("words", "what"),
    [
        (["there.py", "nowhere.py", "--write"], "nowhere.py: No such file or directory"),
        (["nowhere.ckpt"], "nowhere.ckpt: No such file or directory"),
        (["empty"], "empty has neither Python programs nor YAML files."),
    ],
)
def test_a_path_with_nothing_to_read_is_named_in_one_line(words, what, capsys):
    Path("empty").mkdir()
    Path("there.py").write_text("import lightning\n")
    assert main(["migrate", *words]) == 2
    assert capsys.readouterr().err == f"trainer migrate: {what}\n"
    assert Path("there.py").read_text() == "import lightning\n"
