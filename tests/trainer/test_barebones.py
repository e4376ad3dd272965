"""`Trainer(barebones=True)`: the training alone."""

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from callbacks import EMA, ModelCheckpoint, ProgressBar
from trainer import Trainer, TrainModule


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


def test_the_weights_are_those_of_the_run_with_everything(tmp_path):
    """Clipping, accumulation, dropout, the schedule and the validations that it reads stay."""
    full, expected = trained(project_dir=tmp_path / "run")
    bare, module = trained(barebones=True)
    for a, b in zip(module.parameters(), expected.parameters(), strict=True):
        assert torch.equal(a, b)
    assert bare.callback_metrics == {"val": full.callback_metrics["val"]}
    rates = [each.optimizers[0].param_groups[0]["lr"] for each in (full, bare)]
    assert rates[0] == rates[1]
    assert module.validated == expected.validated - 2  # the check before the training


def test_nothing_is_written_shown_or_watched(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    trainer, _ = trained(barebones=True, project_dir="run")
    assert trainer.callbacks == []
    assert list(tmp_path.iterdir()) == []
    assert capsys.readouterr() == ("", "")
    assert trainer._fit.guard is None
    assert trainer.progress_values() == {}
    assert "loss_epoch" not in trainer.callback_metrics


def test_evaluations_still_return_their_metrics():
    trainer, module = trained(barebones=True)
    (metrics,) = trainer.test(module, loader())
    assert metrics["val"] > 0


def test_a_schedule_that_reads_what_the_training_logs_says_so():
    class Reads(Module):
        def configure_optimizers(self):
            return super().configure_optimizers() | {"monitor": "loss_epoch"}

    trainer = Trainer(cpu=True, max_epochs=1, barebones=True)
    with pytest.raises(ValueError, match=r"'loss_epoch'.*nothing was recorded"):
        trainer.fit(Reads(), loader())


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("callbacks", [EMA()]),
        ("callbacks", ModelCheckpoint()),
        ("callbacks", (ProgressBar(),)),
        ("log_with", "tensorboard"),
        ("num_sanity_val_steps", -1),
        ("num_sanity_val_steps", 1),
        ("non_finite", "skip"),
        ("profile", "simple"),
        ("fast_dev_run", True),
        ("fast_dev_run", 3),
        ("detect_anomaly", True),
        ("slurm_requeue", True),
    ],
)
def test_what_contradicts_it_is_refused_by_name(name, value):
    with pytest.raises(ValueError, match=f"barebones=True turns {name} off, but {name} is "):
        Trainer(cpu=True, barebones=True, **{name: value})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("callbacks", []),
        ("callbacks", None),
        ("log_with", []),
        ("num_sanity_val_steps", 0),
        ("num_sanity_val_steps", 2),
        ("non_finite", "ignore"),
        ("non_finite", "stop"),
        ("progress_bar", False),
        ("checkpointing", False),
        ("log_every", 10),
    ],
)
def test_what_is_off_or_the_default_is_no_contradiction(name, value):
    Trainer(cpu=True, barebones=True, **{name: value})


def test_a_word_that_is_no_bool_is_refused():
    with pytest.raises(TypeError, match="barebones is 'yes'"):
        Trainer(cpu=True, barebones="yes")


def several():
    trainer, module = trained(barebones=True)
    return [each.tolist() for each in module.parameters()], trainer.callback_metrics


def test_on_two_processes_all_have_the_same(ranks2):
    (first, metrics), (second, same) = ranks2(several)
    assert first == second
    assert metrics == same
