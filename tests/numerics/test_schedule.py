"""One optimizer update is one tick, whatever the number of processes and micro-batches (P6)."""

from __future__ import annotations

import logging
import os
import signal
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR, ReduceLROnPlateau
from torch.utils.data import DataLoader, TensorDataset

from callbacks import Callback, ModelCheckpoint
from tests.numerics.running import on_processes, quiet_trainer
from trainer import Preempted, TrainModule

EPOCHS, SAMPLES = 3, 23
WORLDS = (1, 2, 3)
every_world = pytest.mark.parametrize("world", WORLDS)
every_accumulation = pytest.mark.parametrize("accumulation", [1, 2, 5])


def loader() -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.randn(SAMPLES, 3)), batch_size=2)


def updates_of(world: int, accumulation: int) -> int:
    """Updates in an epoch of 12 batches."""
    rounds = -(-12 // world)
    return -(-rounds // accumulation)


def halving(optimizer: Any) -> LambdaLR:
    return LambdaLR(optimizer, lambda tick: 0.5**tick)


class Scheduled(TrainModule):
    """Its learning rate tells how many ticks there were."""

    def __init__(self, interval: str = "step", frequency: int = 1, one_cycle: bool = False) -> None:
        super().__init__()
        self.net = nn.Linear(3, 1)
        self.interval, self.frequency, self.one_cycle = interval, frequency, one_cycle

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.net(batch[0]).square().mean()

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=1.0)
        schedule: Any = halving(optimizer)
        if self.one_cycle:
            total = self.trainer.estimated_stepping_batches
            schedule = OneCycleLR(optimizer, max_lr=0.5, total_steps=total)
        return {
            "optimizer": optimizer,
            "scheduler": schedule,
            "interval": self.interval,
            "frequency": self.frequency,
        }


class Rates(Callback):
    """The learning rate and the step that each update was made at, and those after it."""

    def __init__(self) -> None:
        self.used: list[float] = []
        self.steps: list[int] = []
        self.after: list[float] = []

    def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
        self.used.append(optimizer.param_groups[0]["lr"])

    def on_boundary(self, trainer: Any, module: Any) -> None:
        self.steps.append(trainer.global_step)
        self.after.append(trainer.optimizers[0].param_groups[0]["lr"])


def rates(accumulation: int, *module_args: Any, **module_kwargs: Any) -> Rates:
    seen = Rates()
    trainer = quiet_trainer(
        max_epochs=EPOCHS, gradient_accumulation_steps=accumulation, callbacks=[seen]
    )
    trainer.fit(Scheduled(*module_args, **module_kwargs), loader())
    assert trainer.global_step == len(seen.used)
    return seen


@every_world
@every_accumulation
def test_one_update_is_one_tick_and_one_step(ranks, world, accumulation):
    updates = EPOCHS * updates_of(world, accumulation)
    for seen in on_processes(ranks, world, rates, accumulation):
        assert seen.steps == list(range(1, updates + 1))
        assert seen.used == [0.5**tick for tick in range(updates)]
        assert seen.after == [0.5**tick for tick in range(1, updates + 1)]


@every_world
def test_a_frequency_counts_updates(ranks, world):
    updates = EPOCHS * updates_of(world, 2)
    for seen in on_processes(ranks, world, rates, 2, "step", 3):
        assert seen.after == [0.5 ** (update // 3) for update in range(1, updates + 1)]


@every_world
def test_an_epoch_is_one_tick_of_an_epoch_wise_schedule(ranks, world):
    each = updates_of(world, 2)
    for seen in on_processes(ranks, world, rates, 2, "epoch"):
        assert seen.used == [0.5**epoch for epoch in range(EPOCHS) for _ in range(each)]


def one_cycle(accumulation: int) -> Rates:
    return rates(accumulation, one_cycle=True)


@every_world
@every_accumulation
def test_one_cycle_over_estimated_stepping_batches_ends_exactly(ranks, world, accumulation):
    updates = EPOCHS * updates_of(world, accumulation)
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=1.0)
    schedule = OneCycleLR(optimizer, max_lr=0.5, total_steps=updates)
    wanted = []
    for _ in range(updates):
        wanted.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    for seen in on_processes(ranks, world, one_cycle, accumulation):
        assert seen.used == wanted
        assert seen.used[-1] == min(seen.used) == pytest.approx(0.5 / 25 / 1e4, rel=1e-9)


def resumed_one_cycle(folder: str, until: int | None, accumulation: int) -> tuple[Any, ...]:
    """Train to an update, or to the end; return the rates, and what the schedule warned of."""
    reported = Messages()
    logger = logging.getLogger("trainer.optim.configure")
    logger.addHandler(reported)
    seen = Rates()
    trainer = quiet_trainer(
        max_epochs=EPOCHS,
        project_dir=folder,
        gradient_accumulation_steps=accumulation,
        callbacks=[seen, SignalAt(until), ModelCheckpoint()],
    )
    try:
        trainer.fit(Scheduled(one_cycle=True), loader(), ckpt_path="auto")
    except Preempted:
        pass
    finally:
        logger.removeHandler(reported)
    return seen.used, reported.messages


class Messages(logging.Handler):
    """Keeps the messages of a logger."""

    def __init__(self) -> None:
        super().__init__()
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


class SignalAt(Callback):
    """Sends SIGTERM at an update."""

    def __init__(self, at: int | None) -> None:
        self.at = at

    def on_boundary(self, trainer: Any, module: Any) -> None:
        if trainer.global_step == self.at:
            signal.raise_signal(signal.SIGTERM)


def test_one_cycle_resumed_on_fewer_ranks_stays_at_its_end(ranks, tmp_path):
    ((whole, _), _) = on_processes(ranks, 2, resumed_one_cycle, str(tmp_path / "whole"), None, 1)
    assert len(whole) == 18
    for name in ("longer", "kept"):
        ((begun, reported), _) = on_processes(
            ranks, 2, resumed_one_cycle, str(tmp_path / name), 4, 1
        )
        assert 4 <= len(begun) < 9
        assert not reported
    # Twice the micro-batches on half the processes: as many updates as before.
    ((rest, reported),) = on_processes(ranks, 1, resumed_one_cycle, str(tmp_path / "kept"), None, 2)
    assert begun + rest == whole
    assert not reported
    longer = str(tmp_path / "longer")
    parts = [on_processes(ranks, 1, resumed_one_cycle, longer, at, 1)[0] for at in (20, None)]
    rates = begun + [rate for used, _ in parts for rate in used]
    assert rates == whole + whole[-1:] * (18 - len(begun))
    ((message,),) = [reported for _, reported in parts if reported]  # once in the run
    assert "OneCycleLR was made for total_steps=18" in message
    assert "raise gradient_accumulation_steps to keep the number of updates" in message


class Watching(Scheduled):
    """Its rate follows a value of its validations, or of its training, by updates."""

    VALUES = (5.0, 4.0, 4.0, 3.0, 3.0, 3.0)  # validations: from the second on, one does not improve

    def __init__(self, monitor: str, frequency: int, signal_at: int | None = None) -> None:
        super().__init__()
        self.monitor, self.frequency, self.signal_at = monitor, frequency, signal_at

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.log("train", float(self.global_step))  # never improves
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        if self.global_step == self.signal_at:
            os.kill(os.getpid(), signal.SIGTERM)
        self.log("val", self.VALUES[self.global_step // 4 - 1])

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=1.0)
        plateau = ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
        return {
            "optimizer": optimizer,
            "scheduler": plateau,
            "interval": "step",
            "frequency": self.frequency,
            "monitor": self.monitor,
        }


def watching_rates(*args: Any, **kwargs: Any) -> list[float]:
    seen = Rates()
    trainer = quiet_trainer(max_steps=24, val_every="4 steps", callbacks=[seen], **kwargs)
    trainer.fit(Watching(*args), loader(), loader(), ckpt_path="auto")
    return seen.after


# The values of updates 4, 8, …: 5, 4, 4, 3, 3, 3.
BY_VALIDATION = [1.0] * 11 + [0.5] * 8 + [0.25] * 4 + [0.125]
BY_TRAINING = [1.0] + [0.5**tick for tick in range(1, 24)]


@every_world
def test_a_step_schedule_uses_the_validation_of_its_update(ranks, world):
    for after in on_processes(ranks, world, watching_rates, "val", 4):
        assert after == BY_VALIDATION


@every_world
def test_a_step_schedule_uses_what_its_update_logged(ranks, world):
    for after in on_processes(ranks, world, watching_rates, "train", 1):
        assert after == BY_TRAINING


@pytest.mark.parametrize("signal_at", [12, 16])
def test_a_validation_interrupted_by_a_signal_ticks_once(signal_at):
    with pytest.raises(Preempted):
        watching_rates("val", 4, signal_at, checkpointing=True)
    assert watching_rates("val", 4, checkpointing=True) == BY_VALIDATION[signal_at - 1 :]
