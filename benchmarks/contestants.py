"""The loops that are compared: one by hand, and those of Cadence; peers are in `peers.py`."""

from __future__ import annotations

import tempfile
from typing import Any

import torch
from torch import Tensor

from trainer import Accelerator, DataLoaderConfiguration, Trainer, TrainModule
from trainer.state import AcceleratorState


def by_hand(task: Any) -> None:
    """Train with the plain loop of PyTorch's tutorials."""
    model, optimizer = task.model, task.optimizer()
    model.train()
    for batch in task.loader:
        loss = task.loss(model, batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def by_hand_with_tensorboard(task: Any, *, every: int = 50) -> None:
    """Train as `by_hand` does, and log the loss to TensorBoard every so many steps."""
    from torch.utils.tensorboard import SummaryWriter

    model, optimizer = task.model, task.optimizer()
    model.train()
    with tempfile.TemporaryDirectory() as folder, SummaryWriter(folder) as writer:
        for step, batch in enumerate(task.loader, start=1):
            loss = task.loss(model, batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if step % every == 0:
                writer.add_scalar("train/loss", loss.item(), step)


class Module(TrainModule):
    """A task as a module.

    Args:
        task: The task to train.
        logs: Log the loss in each step, and show it in the progress bar.
        metrics: How many more values to log in each step.
    """

    def __init__(self, task: Any, *, logs: bool = True, metrics: int = 0) -> None:
        super().__init__()
        self.model = task.model
        self.task, self.logs = task, logs
        self.names = [f"metric/{number}" for number in range(metrics)]

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Return the loss, and log it if asked to."""
        loss = self.task.loss(self.model, batch)
        if self.logs:
            self.log("train/loss", loss, prog_bar=True)
        for name in self.names:
            self.log(name, loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return the task's optimizer."""
        return self.task.optimizer()


class CompiledModule(Module):
    """A task as a module whose step the `Trainer` compiles; the steps are counted outside of it."""

    def __init__(self, task: Any, **settings: Any) -> None:
        super().__init__(task, **settings)
        self.model = task.bare

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Count the step."""
        self.task.clock.tick()


def _fit(task: Any, *, logs: bool = True, metrics: int = 0, **settings: Any) -> None:
    AcceleratorState._reset_state()  # each turn begins like a new process
    trainer = Trainer(
        max_epochs=1,
        cpu=task.device == "cpu",
        mixed_precision=task.precision,
        dynamo_backend=task.backend,
        **settings,
    )
    kind = Module if task.backend is None else CompiledModule
    trainer.fit(kind(task, logs=logs, metrics=metrics), task.whole)


def barebones(task: Any, **settings: Any) -> None:
    """Train with a `Trainer` with everything switched off."""
    _fit(task, logs=False, barebones=True, **settings)


def quiet(task: Any, **settings: Any) -> None:
    """Train with a `Trainer` without bar and checkpoints, which still checks its gradients."""
    with tempfile.TemporaryDirectory() as folder:
        off = {"progress_bar": False, "checkpointing": False, "project_dir": f"{folder}/run"}
        _fit(task, logs=False, **off | settings)


def defaults(task: Any, *, metrics: int = 0, **settings: Any) -> None:
    """Train with a default `Trainer`: progress bar, checkpoints and ``metrics.jsonl``; TensorBoard.

    Args:
        task: The task to train.
        metrics: How many values to log in each step besides the loss.
        **settings: Other arguments of the `Trainer`.
    """
    with tempfile.TemporaryDirectory() as folder:
        settings = {"log_with": "tensorboard", "project_dir": f"{folder}/run"} | settings
        _fit(task, metrics=metrics, **settings)


def own_loop(task: Any, **settings: Any) -> None:
    """Train with a loop written by hand and Cadence's `Accelerator`."""
    AcceleratorState._reset_state()  # each turn begins like a new process
    accelerator = Accelerator(
        cpu=task.device == "cpu",
        mixed_precision=task.precision,
        # as the loop by hand copies to a device
        dataloader_config=DataLoaderConfiguration(non_blocking=task.device != "cpu"),
        **settings,
    )
    model, optimizer, loader = accelerator.prepare(task.model, task.optimizer(), task.whole)
    model.train()
    for batch in loader:
        with accelerator.autocast():
            loss = task.loss(model, batch)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
