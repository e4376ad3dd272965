"""`trainer migrate` lists what of a program will not carry over, and changes its import lines."""

from __future__ import annotations

from pathlib import Path

import pytest

from trainer.cli import main

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
accelerate.commands.launch
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
        return self.trainer.fit_loop, self.trainer.logger

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


def migrate(capsys, text: str, *options: str) -> tuple[int, list[tuple[int, str]], str]:
    """Return the exit code, the findings with their lines, and the program afterwards."""
    file = Path("script.py")
    file.write_bytes(text.encode())
    code = main(["migrate", "script.py", *options])
    findings = []
    for line in capsys.readouterr().out.splitlines():
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
    assert findings == [(1, "write 'from trainer.accelerate', or pass --write")]
    assert text == "from accelerate import Accelerator\n"


@pytest.mark.parametrize("text", [NATIVE, "import numpy\n", "from accelerate import Accelerator\n"])
def test_the_code_is_0_when_nothing_is_left_to_do(capsys, text):
    migrate(capsys, text, "--write")
    code, findings, _ = migrate(capsys, Path("script.py").read_text())
    assert (code, findings) == (0, [])


def test_what_of_lightning_will_not_carry_over_is_listed(capsys):
    code, findings, text = migrate(capsys, LIGHTNING, "--write")
    assert code == 1
    told = dict(findings)
    assert list(told) == [3, 4, 9, 10, 12, 20, 24, 25]
    assert "NoSuchCallback is not in Cadence" in told[3]
    assert "use trainer.Accelerator" in told[4]
    assert "rank_zero_only=True" in told[9]
    assert "'fit_loop': for a longer run" in told[10]
    assert "Module.training_epoch_end is never called: outputs are not collected" in told[12]
    assert "Own.on_epoch_end is never called: use on_train_epoch_end" in told[20]
    assert "'gpus'; use trainer launch --num_processes 2" in told[24]
    assert "'terminate_on_nan'; leave it out" in told[25]
    assert text.startswith(
        "import trainer.lightning as L\nimport trainer.lightning.pytorch as pytorch_lightning\n"
        "from trainer.lightning.pytorch.callbacks import"
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


def test_a_file_that_is_not_python_is_an_error(capsys):
    Path("script.py").write_text("def (")
    assert main(["migrate", "script.py"]) == 1
    assert "script.py cannot be read as Python" in capsys.readouterr().err
