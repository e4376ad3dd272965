"""`Trainer(barebones=True)`: the training alone."""

import inspect
import re

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from callbacks import EMA, Interval, ModelCheckpoint, ProgressBar
from trackers import CSVTracker
from trainer import Trainer, TrainModule
from trainer.loops.config import LEFT_OUT


class Module(TrainModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Sequential(
            torch.nn.Linear(3, 4), torch.nn.Dropout(), torch.nn.Linear(4, 1)
        )
        self.validated = 0

    def training_step(self, batch, batch_idx):
        loss = self.net(batch[0]).square().mean()
        self.log("loss", loss, on_step=True, on_epoch=True, prog_bar=True)
        return loss

    def validation_step(self, batch, batch_idx):
        self.validated += 1
        self.log("val", self.net(batch[0]).square().mean())

    test_step = validation_step

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.05)
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5)
        return {"optimizer": optimizer, "scheduler": scheduler, "monitor": "val"}


def loader():
    generator = torch.Generator().manual_seed(3)
    return DataLoader(TensorDataset(torch.randn(24, 3, generator=generator)), 4, shuffle=True)


def trained(**kwargs):
    module_seed = 5
    trainer = Trainer(
        cpu=True,
        seed=module_seed,
        max_epochs=3,
        gradient_accumulation_steps=4,
        max_grad_norm=0.1,
        **kwargs,
    )
    module = Module()
    trainer.fit(module, loader(), loader())
    return trainer, module


def test_barebones_weights_equal_those_of_the_full_run(tmp_path):
    """Clipping, accumulation, dropout, the schedule and the validations that it reads stay."""
    full, expected = trained(project_dir=tmp_path / "run")
    bare, module = trained(barebones=True)
    for a, b in zip(module.parameters(), expected.parameters(), strict=True):
        assert torch.equal(a, b)
    assert bare.callback_metrics == {"val": full.callback_metrics["val"]}
    rates = [each.optimizers[0].param_groups[0]["lr"] for each in (full, bare)]
    assert rates[0] == rates[1]
    assert module.validated == expected.validated - 2  # the check before the training


def test_barebones_writes_and_shows_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    trainer, _ = trained(barebones=True, project_dir="run")
    assert trainer.callbacks == []
    assert list(tmp_path.iterdir()) == []
    assert capsys.readouterr() == ("", "")
    assert trainer._fit.optim.guard is None
    assert trainer.progress_values() == {}
    assert "loss_epoch" not in trainer.callback_metrics


def test_evaluations_still_return_their_metrics():
    trainer, module = trained(barebones=True)
    (metrics,) = trainer.test(module, loader())
    assert metrics["val"] > 0


def reading(monitor, interval="epoch"):
    class Reads(Module):
        def configure_optimizers(self):
            return super().configure_optimizers() | {"monitor": monitor, "interval": interval}

    return Reads()


@pytest.mark.parametrize(
    ("interval", "val", "logged"),
    [
        ("epoch", None, "but nothing was recorded yet: barebones=True"),
        ("step", loader, "but nothing was recorded yet: barebones=True"),
        ("epoch", loader, "it must be one of 'val'"),
    ],
)
def test_schedule_monitoring_a_training_metric_names_barebones(interval, val, logged):
    trainer = Trainer(cpu=True, max_epochs=1, barebones=True)
    with pytest.raises(ValueError, match=f"A scheduler's monitor is 'loss_epoch'[;,] {logged}"):
        trainer.fit(reading("loss_epoch", interval), loader(), val and val())


def test_missing_monitor_error_without_barebones_does_not_mention_it():
    trainer = Trainer(cpu=True, max_epochs=1, checkpointing=False, progress_bar=False)
    with pytest.raises(ValueError, match="'los'; it must be one of 'loss_epoch'") as messages:
        trainer.fit(reading("los"), loader())
    assert "barebones" not in str(messages.value)


# Of each argument: values that are refused, and values that pass.
ANSWERS = {
    "fast_dev_run": ([True, 1, 3], [False, 0]),
    "profile": (["simple"], [None]),
    "callbacks": ([[EMA()], ModelCheckpoint(), (ProgressBar(),)], [None, [], ()]),
    "progress_bar": ([], [True, False]),
    "checkpointing": ([], [True, False]),
    "log_with": (
        ["tensorboard", ["csv"], "all", CSVTracker, CSVTracker("a", "b")],
        [None, [], ()],
    ),
    "project_name": (["digits", "ignore"], [None]),
    "run_name": (["first"], [None]),
    "log_every": (
        [1, 10, "1 epoch", Interval.parse("51 steps")],
        [50, "50 steps", Interval.parse("50 steps")],
    ),
    "num_sanity_val_steps": ([-1, 1, 3], [0, 2]),
    "non_finite": (["skip"], ["stop", "ignore"]),
    "max_skipped_in_row": ([1, 49], [50]),
    "detect_anomaly": ([True], [False]),
    "slurm_requeue": ([True], [False]),
}


@pytest.mark.parametrize("name", ANSWERS)
def test_arguments_of_disabled_parts_raise(name):
    refused, passed = ANSWERS[name]
    part = LEFT_OUT[name][0]
    for value in refused:
        shown = repr(value) if isinstance(value, (int, str)) else ""
        said = re.escape(f"barebones=True leaves {part} out, but {name} is {shown}")
        with pytest.raises(ValueError, match=said):
            Trainer(cpu=True, barebones=True, **{name: value})
        Trainer(cpu=True, barebones=False, **{"project_dir": "run", name: value})
    for value in passed:
        Trainer(cpu=True, barebones=True, **{name: value})


def test_every_trainer_argument_is_classified_for_barebones():
    """A new one must be thought of here."""
    kept = {
        *("max_epochs", "min_epochs", "max_steps", "min_steps", "max_time", "val_every"),
        *("limit_train_batches", "limit_val_batches", "limit_test_batches"),
        *("limit_predict_batches", "overfit_batches", "reload_dataloaders_every_n_epochs"),
        *("gradient_accumulation_steps", "max_grad_norm", "max_grad_value", "deterministic"),
        *("seed", "project_dir", "project_config", "accelerator", "mixed_precision", "cpu"),
        *(
            "dataloader_config",
            "deepspeed_plugin",
            "fsdp_plugin",
            "megatron_lm_plugin",
            "torch_tp_plugin",
        ),
        *("dynamo_backend", "dynamo_plugin", "kwargs_handlers", "parallelism_config", "engine"),
        *("dtype", "sync_batchnorm"),
    }
    arguments = set(inspect.signature(Trainer).parameters) - {"barebones", "unknown"}
    assert arguments == kept | set(LEFT_OUT)
    assert not kept & set(LEFT_OUT)
    assert ANSWERS.keys() == LEFT_OUT.keys()


def test_documentation_lists_the_arguments_that_barebones_refuses():
    said = inspect.getdoc(Trainer)
    messages = re.search("    barebones: .*?\n    slurm_requeue:", said, re.DOTALL)[0]
    for name in LEFT_OUT:
        assert f"`{name}" in messages, name


def several():
    trainer, module = trained(barebones=True)
    return [each.tolist() for each in module.parameters()], trainer.callback_metrics


def test_on_two_processes_all_have_the_same(ranks2):
    (first, metrics), (second, same) = ranks2(several)
    assert first == second
    assert metrics == same
