"""Checkpoints of Lightning are converted to ours, from which a run resumes as under Lightning."""

from __future__ import annotations

import re
from collections import OrderedDict
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader, TensorDataset

import trainer.lightning as L
from tests.moving.running import real
from tests.numerics.running import copy_of
from trainer import Trainer, TrainModule
from trainer.checkpoint.parts import Reader
from trainer.cli import main
from trainer.errors import CheckpointError
from trainer.lightning import convert_checkpoint

X = torch.randn(20, 3, generator=torch.Generator().manual_seed(0))
BATCHES = 5


def loader() -> DataLoader[Any]:
    return DataLoader(TensorDataset(X), 4)


def make_module(library: Any, manual: bool = False) -> Any:
    class Line(library.LightningModule):  # type: ignore[misc]
        automatic_optimization = not manual

        def __init__(self, width: int = 2) -> None:
            super().__init__()
            self.save_hyperparameters()
            torch.manual_seed(0)
            self.layer = nn.Sequential(nn.Linear(3, width), nn.Tanh(), nn.Linear(width, 1))
            self.losses: list[float] = []

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = (self.layer(batch[0]) - batch[0].sum(1, keepdim=True)).square().mean()
            self.losses.append(loss.item())
            if not manual:
                return loss
            for optimizer in self.optimizers():
                optimizer.zero_grad()
            self.manual_backward(loss)
            for optimizer in self.optimizers():
                optimizer.step()
            return None

        def configure_optimizers(self) -> Any:
            if manual:
                parts = self.layer[0].parameters(), self.layer[2].parameters()
                return [torch.optim.Adam(part, lr=0.1) for part in parts]
            optimizer = torch.optim.AdamW(self.parameters(), lr=0.1)
            schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 3])
            return {"optimizer": optimizer, "lr_scheduler": schedule}

    return Line


class Counter(L.Callback):
    """A user's callback, whose state the checkpoint has under its name."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = state["count"]

    def on_train_start(self, trainer: Any, module: Any) -> None:
        self.start = (trainer.current_epoch, trainer.global_step)


def saved_by_a_plain_loop(
    epochs: int, file: Path, average_from: int | None = None
) -> tuple[Any, Any]:
    """Train, and save in Lightning's documented layout; return the module and its optimizer.

    With `average_from`, the first update to average, it returns the averages and the optimizer.
    """
    module = make_module(SimpleNamespace(LightningModule=TrainModule))(width=4)
    made = module.configure_optimizers()
    optimizer, schedule = made["optimizer"], made["lr_scheduler"]
    averages = AveragedModel(module, use_buffers=True)
    for epoch in range(epochs):
        for number, batch in enumerate(loader()):
            optimizer.zero_grad()
            module.training_step(batch, number).backward()
            optimizer.step()
            if average_from is not None and epoch * BATCHES + number >= average_from:
                averages.update_parameters(module)
        schedule.step()
    done = {"ready": epochs, "started": epochs, "processed": epochs, "completed": epochs - 1}
    batches = dict.fromkeys(("ready", "started", "processed", "completed"), BATCHES)
    all_batches = dict.fromkeys(batches, epochs * BATCHES)
    fit = {
        "epoch_loop.batch_progress": {
            "total": all_batches,
            "current": batches,
            "is_last_batch": True,
        },
        "epoch_progress": {"total": done, "current": done},
    }
    weights = {"state_dict": OrderedDict(module.state_dict())}
    if average_from is not None:
        weights = {
            "current_model_state": OrderedDict(module.state_dict()),
            "state_dict": averages.module.state_dict(),
            "averaging_state": {"n_averaged": averages.n_averaged},
        }
    torch.save(
        {
            "epoch": epochs - 1,
            "global_step": epochs * BATCHES,
            "pytorch-lightning_version": "2.5.0",
            **weights,
            "loops": {"fit_loop": fit},
            "callbacks": {
                "ModelCheckpoint{'monitor': 'loss'}": {
                    "monitor": "loss",
                    "current_score": torch.tensor(0.25),
                },
                "Counter": {"count": 3},
                "WeightAveraging": {"latest_update_step": epochs * BATCHES},
            },
            "optimizer_states": [optimizer.state_dict()],
            "lr_schedulers": [schedule.state_dict()],
            "hparams_name": "kwargs",
            "hyper_parameters": {"width": 4},
            "of the user": [1, torch.ones(2)],
        },
        file,
    )
    return module if average_from is None else averages.module, optimizer


def test_a_run_resumes_from_a_checkpoint_of_lightning_to_the_last_bit(capsys):
    saved_by_a_plain_loop(2, Path("last.ckpt"))
    assert main(["migrate", "last.ckpt"]) == 0
    told = capsys.readouterr().out
    assert "ckpt_path='./last'" in told
    assert "start without their saved state: ModelCheckpoint" in told
    expected, of_plain = saved_by_a_plain_loop(4, Path("four.ckpt"))

    Line = make_module(L)
    module = Line(width=4)
    told_by_checkpoint = []
    module.on_load_checkpoint = told_by_checkpoint.append
    counter = Counter()
    trainer = Trainer(max_epochs=4, project_dir="run", progress_bar=False, callbacks=[counter])
    trainer.fit(module, loader(), ckpt_path="./last")
    assert counter.start == (1, 2 * BATCHES)
    assert counter.count == 3
    assert told_by_checkpoint[0]["of the user"][0] == 1
    assert module.losses == expected.losses[2 * BATCHES :]
    torch.testing.assert_close(copy_of(module), copy_of(expected), rtol=0, atol=0)
    state, of_loop = trainer.optimizers[0].state_dict(), of_plain.state_dict()
    torch.testing.assert_close(state["state"], of_loop["state"], rtol=0, atol=0)
    assert state["param_groups"][0]["lr"] == pytest.approx(0.001)

    loaded = Line.load_from_checkpoint("last")
    assert loaded.hparams.width == 4
    two, _ = saved_by_a_plain_loop(2, Path("again.ckpt"))
    torch.testing.assert_close(copy_of(loaded), copy_of(two), rtol=0, atol=0)


@pytest.mark.parametrize("first", [0, 12], ids=["before the save", "after the save"])
def test_averages_and_trained_weights_go_on_as_under_lightning(first):
    averages, _ = saved_by_a_plain_loop(2, Path("last.ckpt"), first)
    trained, _ = saved_by_a_plain_loop(2, Path("trained.ckpt"))
    assert convert_checkpoint("last.ckpt").notes == [
        "These Lightning callbacks start without their saved state: "
        "ModelCheckpoint{'monitor': 'loss'}."
    ]
    Line = make_module(L)
    loaded = Line.load_from_checkpoint("last")
    shown = averages if first == 0 else trained
    torch.testing.assert_close(copy_of(loaded), copy_of(shown), rtol=0, atol=0)

    class Late(L.pytorch.callbacks.WeightAveraging):
        def should_update(self, step_idx: int | None = None, epoch_idx: int | None = None) -> bool:
            return step_idx is not None and step_idx >= first

    expected, _ = saved_by_a_plain_loop(4, Path("four.ckpt"), first)
    whole, _ = saved_by_a_plain_loop(4, Path("whole.ckpt"))
    for callbacks, weights in (([Late()], expected), ([], whole)):
        module = Line(width=4)
        folder = f"run-{len(callbacks)}"
        trainer = L.Trainer(
            max_epochs=4, accelerator="cpu", default_root_dir=folder, callbacks=callbacks
        )
        trainer.fit(module, loader(), ckpt_path="./last")
        assert module.losses == whole.losses[2 * BATCHES :]
        torch.testing.assert_close(copy_of(module), copy_of(weights), rtol=0, atol=0)


@pytest.mark.filterwarnings("ignore")  # Lightning's own
@pytest.mark.parametrize(
    ("manual", "every"), [(False, None), (False, 3), (True, None), (True, 7)], ids=str
)
def test_the_next_losses_are_those_of_lightning_itself(manual, every, tmp_path):
    theirs = real("lightning")
    saving = {"every_n_train_steps": every} if every else {}
    steps = (every or 5) * (2 if manual else 1)

    def train(module: Any, epochs: int, path: Any = None) -> Any:
        trainer = theirs.Trainer(
            max_epochs=epochs,
            accelerator="cpu",
            devices=1,
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            callbacks=[
                theirs.pytorch.callbacks.ModelCheckpoint(
                    tmp_path / f"{epochs}", save_top_k=-1, **saving
                )
            ],
        )
        trainer.fit(module, loader(), ckpt_path=path)
        return module

    Line = make_module(theirs, manual)
    whole = train(Line(), 3)
    file = next((tmp_path / "3").glob(f"*step={steps}.ckpt"))
    expected = whole.losses[every or 5 :]
    if not every:  # inside an epoch, Lightning's own resume reads the first batches again
        assert train(Line(), 3, file).losses == expected
    converted = convert_checkpoint(file, tmp_path / "ours")
    assert converted.step == (every or 5)
    assert bool(re.search("inside an epoch", "".join(converted.notes))) == bool(every)
    module = make_module(L, manual)()
    trainer = Trainer(max_epochs=3, project_dir=tmp_path / "run", progress_bar=False)
    trainer.fit(module, loader(), ckpt_path=converted.path)
    assert module.losses == expected
    torch.testing.assert_close(copy_of(module), copy_of(whole), rtol=0, atol=0)


def test_objects_that_are_no_plain_values_are_refused_with_what_to_do():
    saved_by_a_plain_loop(1, Path("one.ckpt"))
    content = torch.load("one.ckpt", weights_only=True)
    content["hyper_parameters"]["lr"] = Fraction(1, 10)
    torch.save(content, "objects.ckpt")
    with pytest.raises(CheckpointError, match=r"hyper-parameters: fractions\.Fraction\.") as error:
        convert_checkpoint("objects.ckpt")
    program = re.search(r"say so:\n\n(.*)\n\nOr save", str(error.value), re.DOTALL)[1]
    exec(re.sub("^    ", "", program, flags=re.MULTILINE), {})
    assert (Path("objects") / "model.safetensors").exists()


def test_a_file_with_weights_alone_gives_a_checkpoint_of_weights(capsys):
    module, _ = saved_by_a_plain_loop(1, Path("one.ckpt"))
    content = torch.load("one.ckpt", weights_only=True)
    del content["loops"]  # as before Lightning 1.5
    torch.save(content, "old.ckpt")
    assert main(["migrate", "old.ckpt", "--output", "weights"]) == 0
    assert "upgrade_checkpoint" in capsys.readouterr().out
    loaded = make_module(L).load_from_checkpoint("weights")
    torch.testing.assert_close(copy_of(loaded), copy_of(module), rtol=0, atol=0)
    fresh = make_module(L)(width=4)
    trainer = Trainer(max_epochs=1, project_dir="run", progress_bar=False)
    trainer.fit(fresh, loader(), ckpt_path="weights")
    assert trainer.global_step == BATCHES


def test_batches_inside_an_epoch_are_those_of_all_processes():
    saved_by_a_plain_loop(2, Path("two.ckpt"))
    content = torch.load("two.ckpt", weights_only=True)
    fit = content["loops"]["fit_loop"]
    fit["epoch_loop.batch_progress"].update(
        current={"ready": 3, "started": 3, "processed": 2, "completed": 2}, is_last_batch=False
    )
    fit["epoch_progress"]["current"] = {"ready": 2, "started": 2, "processed": 1, "completed": 1}
    torch.save(content, "within.ckpt")
    made = convert_checkpoint("within.ckpt", num_processes=4)
    counters = Reader.open(made.path).tree("trainer")["counters"]
    assert (counters["epoch"], counters["epoch_complete"]) == (1, False)
    assert counters["epoch_batches"] == 2 * 4  # the third batch was not processed
    assert counters["batches_seen"] == 2 * BATCHES * 4


@pytest.mark.parametrize(
    ("content", "said"),
    [({"model": 1}, "not a checkpoint of Lightning"), (None, "a folder of shards")],
)
def test_what_is_no_such_file_is_named(content, said, capsys):
    if content is None:
        Path("x.ckpt").mkdir()
    else:
        torch.save(content, "x.ckpt")
    assert main(["migrate", "x.ckpt"]) == 1
    assert said in capsys.readouterr().err


def test_a_file_passed_as_ckpt_path_is_answered_with_the_command():
    saved_by_a_plain_loop(1, Path("one.ckpt"))
    module = make_module(L)()
    with pytest.raises(CheckpointError, match=r"`trainer migrate .*one\.ckpt`"):
        Trainer(max_epochs=1, project_dir="run").fit(module, loader(), ckpt_path="one.ckpt")
    with pytest.raises(CheckpointError, match=r"`trainer migrate .*one\.ckpt`"):
        type(module).load_from_checkpoint("one.ckpt")
