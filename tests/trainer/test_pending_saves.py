"""Saves that are asked for inside a window are made at its boundary, by all processes."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from callbacks import Callback, ModelCheckpoint
from tests.trainer.test_saving import Net
from trainer import Trainer
from trainer.checkpoint.storage import verify
from trainer.errors import CheckpointError, Preempted


class Ask(Callback):
    """Asks at a hook, the first time that it is called at an update; counts the saves made."""

    def __init__(self, hook: str, step: int, path: str = "asked", rank: int | None = None) -> None:
        self.made: list[int] = []

        def ask(trainer: Any, *_: Any) -> None:
            here = rank in (None, trainer.global_rank)
            if here and trainer.global_step == step and not self.answers:
                self.answers = [trainer.save_checkpoint(path, **self.options)]
                assert not Path(path).exists()

        self.answers: list[Any] = []
        self.options: dict[str, Any] = {}
        setattr(self, hook, ask)

    def on_save_checkpoint(self, trainer: Any, module: Any, checkpoint: Any) -> None:
        self.made.append(trainer.global_step)


class SaveAt(Callback):
    """What the others are compared with: a save at a boundary, behind all that is decided there."""

    runs_last = True

    def __init__(self, step: int) -> None:
        self.step = step

    def on_boundary(self, trainer: Any, module: Any) -> None:
        if trainer.global_step == self.step:
            trainer.save_checkpoint("expected")


class Decide(Callback):
    """Has a state that changes at the boundary."""

    def __init__(self) -> None:
        self.boundaries = 0

    def on_boundary(self, trainer: Any, module: Any) -> None:
        self.boundaries += 1

    def state_dict(self) -> dict[str, Any]:
        return {"boundaries": self.boundaries}


def fit(*callbacks: Callback, module: Net | None = None, **arguments: Any) -> Trainer:
    defaults = {"max_epochs": 2, "seed": 3, "gradient_accumulation_steps": 2, "val_every": 3}
    trainer = Trainer(
        callbacks=[Decide(), *callbacks],
        progress_bar=False,
        checkpointing=False,
        cpu=True,
        num_sanity_val_steps=0,
        **(defaults | arguments),
    )
    samples = torch.randn(32, 3, generator=torch.Generator().manual_seed(1))
    loader = DataLoader(TensorDataset(samples), batch_size=4, shuffle=True)
    trainer.fit(module or Net(), loader, DataLoader(TensorDataset(samples[:4]), batch_size=4))
    return trainer


def content_of(checkpoint: str) -> dict[str, Any]:
    """Every file's bytes but for what differs between any two runs."""
    files = {path.name: path.read_bytes() for path in Path(checkpoint).iterdir()}
    del files["manifest.json"], files["record.json"]
    state = json.loads(files["trainer.json"])["tree"]
    state["counters"].pop("seconds")
    state["run_id"] = None
    return files | {"trainer.json": state}


HOOKS = {  # the update after which each is first called with this many updates made
    "on_fit_start": (0, 1),
    "on_train_start": (0, 1),
    "on_train_epoch_start": (0, 1),
    "on_train_step_start": (2, 3),
    "on_train_batch_start": (2, 3),
    "on_before_backward": (2, 3),
    "on_after_backward": (2, 3),
    "on_before_optimizer_step": (2, 3),
    "on_train_batch_end": (3, 3),
    "on_train_step_end": (3, 3),
    "on_before_zero_grad": (3, 3),
    "on_validation_end": (3, 3),
    "on_train_epoch_end": (4, 4),
}


@pytest.mark.parametrize("hook", HOOKS)
def test_save_checkpoint_inside_a_window_is_made_at_its_boundary(hook):
    called_at, boundary = HOOKS[hook]
    ask = Ask(hook, called_at)
    fit(ask, SaveAt(boundary), project_dir="run")
    assert ask.answers == [Path("asked").absolute()]
    assert ask.made == [boundary] * 2
    assert verify(Path("asked"))["step"] == boundary
    assert content_of("asked") == content_of("expected")


def test_two_calls_for_one_path_are_one_save_as_the_later_asked():
    class Twice(Callback):
        def on_train_batch_start(self, trainer, module, batch, batch_idx):
            if trainer.global_step == 1:
                trainer.save_checkpoint("asked")
                trainer.save_checkpoint("other", background=True)

        def on_train_step_end(self, trainer, module):
            if trainer.global_step == 2:
                trainer.save_checkpoint("asked", weights_only=True)

    ask = Ask("on_train_start", -1)
    fit(Twice(), ask)
    assert ask.made == [2]  # of the other; weights alone ask nobody
    assert verify(Path("asked"))["weights_only"]
    assert verify(Path("other"))["step"] == 2


def test_pending_saves_of_a_failed_fit_are_warned_of(caplog):
    trainer = None

    class Save(Callback):
        def on_exception(self, trainer, module, exception):
            trainer.save_checkpoint("later")

    with pytest.raises(ArithmeticError):
        fit(Ask("on_train_batch_start", 1), Save(), module=Net(fail_at=1))
    assert not Path("asked").exists()
    for name in ("asked", "later"):
        assert (
            f"The checkpoint {Path(name).absolute()} was not saved: it was requested inside"
            in caplog.text
        )

    class Hold(Callback):
        def setup(self, of, module, stage):
            nonlocal trainer
            trainer = of

    with pytest.raises(ArithmeticError):
        fit(Hold(), module=Net(fail_at=1))
    with pytest.raises(RuntimeError, match="failed inside an accumulation window"):
        trainer.save_checkpoint("after")


def test_a_signal_does_not_lose_a_pending_save():
    class Told(Callback):
        def on_train_batch_start(self, trainer, module, batch, batch_idx):
            if trainer.global_step == 1 and not seen:
                seen.append(True)
                signal.raise_signal(signal.SIGTERM)

    seen: list[bool] = []
    with pytest.raises(Preempted):
        fit(Ask("on_before_backward", 1), Told(), ModelCheckpoint(), project_dir="run")
    assert verify(Path("asked"))["step"] == 2
    state, other = content_of("asked"), content_of("run/checkpoints/step-00000002")
    assert state["trainer.json"]["unfinished"]
    assert state == other


def test_a_save_that_fails_at_the_boundary_ends_the_run_or_does_not(caplog):
    Path("asked").mkdir()
    Path("asked/notes").write_text("mine")  # what is there is no checkpoint

    class Here(Callback):
        def __init__(self, **options):
            self.options = options

        def on_train_step_start(self, trainer, module):
            if trainer.global_step == 1:
                trainer.save_checkpoint("asked", **self.options)

    with pytest.raises(CheckpointError, match="asked"):
        fit(Here())
    trainer = fit(Here(required=False))
    assert trainer.global_step == 8
    assert "continues without this checkpoint" in caplog.text
    assert Path("asked/notes").read_text() == "mine"


# -- several processes -----------------------------------------------------------------------------

AMONG_TWO = [
    ("on_train_step_start", 1, 2),
    ("on_train_batch_start", 1, 2),
    ("on_before_backward", 1, 2),
    ("on_train_batch_end", 1, 2),  # of the window's first micro-batch
    ("on_train_step_end", 1, 2),  # known to all with the next window
    ("on_train_step_end", 2, 2),  # known to all at the end of the epoch
    ("on_validation_end", 3, 3),
    ("on_train_epoch_end", 2, 2),
    ("on_train_batch_end", 3, 3),  # the fit ends there
]


@pytest.mark.parametrize("rank", [None, 0, 1])
def test_save_checkpoint_on_one_rank_saves_on_all(ranks2, rank):
    def body():
        found = []
        for number, (hook, step, boundary) in enumerate(AMONG_TWO):
            ask = Ask(hook, step, f"asked-{number}", rank)
            fit(ask, SaveAt(boundary), project_dir=f"run-{number}", max_steps=3)
            equal = content_of(f"asked-{number}") == content_of("expected")
            found.append((hook, ask.made, equal))
        return found

    expected = [(hook, [boundary] * 2, True) for hook, _, boundary in AMONG_TWO]
    assert ranks2(body) == [expected] * 2


def test_processes_that_ask_for_different_checkpoints_make_them_all(ranks2):
    def body():
        rank = int(Trainer(max_steps=1, cpu=True).global_rank)
        asks = [Ask("on_train_step_start", 1, f"of-{rank}"), Ask("on_train_start", 0, "both")]
        asks[0].options = {"weights_only": rank == 1}
        fit(*asks, max_steps=3)
        return asks[0].made

    assert ranks2(body) == [[1, 2]] * 2
    assert [verify(Path(name))["step"] for name in ("both", "of-0", "of-1")] == [1, 2, 2]
    assert verify(Path("of-1"))["weights_only"]
    assert not verify(Path("of-0"))["weights_only"]
