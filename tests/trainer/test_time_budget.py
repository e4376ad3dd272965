"""The time that one start of a run has, and the queue that it goes back to."""

import logging
import os
import signal
import time
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from callbacks import Callback, ModelCheckpoint
from trainer import Preempted, Trainer, TrainModule
from trainer.loops.preemption import requeue
from trainer.state import PartialState


class Slow(TrainModule):
    """Takes its time in each step, by a clock that stands still otherwise."""

    def __init__(self, passed, seconds=10.0):
        super().__init__()
        torch.manual_seed(0)
        self.line = torch.nn.Linear(2, 1)
        self.passed, self.seconds = passed, seconds

    def training_step(self, batch, batch_idx):
        self.passed[0] += self.seconds
        return torch.dropout(self.line(batch[0]), 0.3, True).square().mean()

    def validation_step(self, batch, batch_idx):
        self.passed[0] += self.seconds
        self.log("val", self.line.weight.sum())

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.fixture
def passed(monkeypatch):
    """The time that has passed, in seconds."""
    passed, start = [0.0], time.monotonic()
    monkeypatch.setattr("time.monotonic", lambda: start + passed[0])
    return passed


def loader(batches=6):
    generator = torch.Generator().manual_seed(0)
    return DataLoader(TensorDataset(torch.randn(2 * batches, 2, generator=generator)), 2)


def fit(passed, folder="run", val=None, seconds=10.0, callbacks=(), **arguments):
    arguments = {"max_epochs": 2, "seed": 1, "num_sanity_val_steps": 0} | arguments
    trainer = Trainer(
        progress_bar=False, project_dir=folder, callbacks=list(callbacks), cpu=True, **arguments
    )
    module = Slow(passed, seconds)
    trainer.fit(module, loader(), val, ckpt_path="auto")
    return trainer, module


def test_time_budget_of_each_start_does_not_change_the_result(passed, capsys):
    _, whole = fit(passed, "whole")
    starts = []
    for _ in range(9):
        try:
            _, module = fit(passed, max_time="35 seconds")
        except Preempted as ended:
            starts.append(ended.code)
            assert "resumes from there" in capsys.readouterr().out
        else:
            break
    assert starts == [124] * 3  # 12 updates in starts of four; the last start finds all done
    for one, other in zip(whole.parameters(), module.parameters(), strict=True):
        assert torch.equal(one, other)
    assert os.listdir("run/checkpoints") == ["step-00000012"]


def test_time_budget_includes_set_up(passed):
    class Prepares(Callback):
        def setup(self, trainer, module, stage):
            passed[0] += 20.0

    with pytest.raises(Preempted):
        fit(passed, callbacks=[Prepares()], max_time="35 seconds")
    assert os.listdir("run/checkpoints") == ["step-00000002"]


def test_validation_is_abandoned_at_the_end_of_the_budget(passed):
    with pytest.raises(Preempted) as ended:
        fit(passed, val=loader(3), max_time="75 seconds")  # six updates and two batches
    assert ended.value.code == 124
    trainer, _ = fit(passed, val=loader(3))
    assert trainer.validations == 2


def test_in_the_sanity_check_nothing_is_there_to_be_saved(passed):
    with pytest.raises(Preempted) as ended:
        fit(passed, val=loader(3), max_time="5 seconds", num_sanity_val_steps=2)
    assert ended.value.code == 124
    assert not Path("run/checkpoints").exists()


def test_max_time_alone_is_the_length_of_the_run(passed):
    trainer, _ = fit(passed, max_epochs=None, max_time="35 seconds")
    assert trainer.global_step == 4
    passed[0] = 0.0  # another process, whose clock begins anew
    trainer, _ = fit(passed, max_epochs=None, max_time="55 seconds")
    assert trainer.global_step == 6


def test_the_clock_of_any_process_ends_the_run_for_all_with_its_code(ranks2):
    def body():
        late = 100.0 if PartialState().process_index == 1 else 0.0
        real = time.monotonic

        class Late(Callback):
            def on_train_step_start(self, trainer, module):
                if trainer.global_step == 1:
                    time.monotonic = lambda: real() + late

        said: list[str] = []
        log = logging.getLogger("trainer.loops.fit")
        log.addFilter(keep := lambda record: said.append(record.getMessage()) or True)
        try:
            fit([0.0], callbacks=[Late(), ModelCheckpoint()], max_time="90 seconds")
        except Preempted as ended:
            return said, (ended.code, os.listdir("run/checkpoints"))
        finally:
            time.monotonic = real
            log.removeFilter(keep)
        return None

    (said, first), (silent, second) = ranks2(body)
    assert first == second
    # Rank 0 knows the rank whose clock or signal it was; no other rank says so again.
    assert (said, silent) == (["Rank 1: the run was ended by max_time (exit code 124)."], [])
    assert first[0] == 124
    assert first[1] in (["step-00000002"], ["step-00000003"])


# -- SLURM -----------------------------------------------------------------------------------------


@pytest.fixture
def scontrol(monkeypatch, tmp_path):
    """A command of that name, which writes down what it was asked, and ends as it is told to."""
    folder = tmp_path / "bin"
    folder.mkdir()
    script = folder / "scontrol"

    def install(code=0):
        script.write_text(f'#!/bin/sh\necho "$@" >> {folder}/asked\necho busy >&2\nexit {code}\n')
        script.chmod(0o755)
        monkeypatch.setenv("PATH", str(folder), prepend=os.pathsep)

    def asked():
        file = folder / "asked"
        return file.read_text().splitlines() if file.exists() else []

    install()
    return install, asked


def test_slurm_job_out_of_time_is_requeued(passed, monkeypatch, scontrol):
    monkeypatch.setenv("SLURM_JOB_ID", "77")
    with pytest.raises(Preempted):
        fit(passed, max_time="35 seconds", slurm_requeue=True)
    assert scontrol[1]() == ["requeue 77"]
    with pytest.raises(Preempted):
        fit(passed, max_time="35 seconds")  # not asked for
    assert scontrol[1]() == ["requeue 77"]


@pytest.mark.parametrize(
    ("code", "goes_back"),
    [
        (124, True),
        (128 + signal.SIGUSR1, True),
        (128 + signal.SIGTERM, False),
        (128 + signal.SIGINT, False),
    ],
)
def test_slurm_job_is_requeued_only_at_its_time_limit(monkeypatch, scontrol, code, goes_back):
    requeue(code)
    assert scontrol[1]() == []  # no job
    monkeypatch.setenv("SLURM_JOB_ID", "78")
    monkeypatch.setenv("SLURM_ARRAY_JOB_ID", "70")
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "3")
    requeue(code)
    assert scontrol[1]() == (["requeue 70_3"] if goes_back else [])


def test_failed_requeue_is_logged(monkeypatch, scontrol, caplog):
    monkeypatch.setenv("SLURM_JOB_ID", "79")
    scontrol[0](code=1)
    requeue(124)
    assert "SLURM did not requeue job 79: busy" in caplog.text
    monkeypatch.setenv("PATH", "nowhere")
    requeue(124)
    assert "No such file" in caplog.text
