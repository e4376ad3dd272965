"""Fits that are watched, on one process or on several."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from callbacks import Callback
from tests.helpers import isolation
from tests.helpers.ranks import RankPool
from trainer import Trainer, TrainModule


class Watch(Callback):
    """Keeps what every update saw, whatever the run is asked to record.

    Attributes:
        losses: The value of the metric "loss" after each update.
        gradients: Of each parameter, before clipping.
        rates: The learning rate that the update was made with.
        weights: Of each parameter, after the update.
    """

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.gradients: list[dict[str, Tensor | None]] = []
        self.rates: list[float] = []
        self.weights: list[dict[str, Tensor]] = []

    def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
        self.gradients.append(
            {
                name: None if parameter.grad is None else parameter.grad.clone()
                for name, parameter in module.named_parameters()
            }
        )
        self.rates.append(optimizer.param_groups[0]["lr"])

    def on_boundary(self, trainer: Any, module: Any) -> None:
        self.losses.append(trainer.callback_metrics.get("loss", float("nan")))
        self.weights.append(copy_of(module))


def copy_of(module: torch.nn.Module) -> dict[str, Tensor]:
    """The module's weights and buffers, as they are now."""
    state = module.state_dict()
    return {name: tensor.clone() for name, tensor in state.items() if not is_lazy(tensor)}


def quiet_trainer(**kwargs: Any) -> Trainer:
    """A Trainer on the CPU that shows and saves nothing and records every update in run/."""
    defaults: dict[str, Any] = {
        "cpu": True,
        "progress_bar": False,
        "checkpointing": False,
        "log_every": 1,
        "num_sanity_val_steps": 0,
        "project_dir": "run",
    }
    return Trainer(**(defaults | kwargs))


def watched_fit(module: TrainModule, loader: Any, **kwargs: Any) -> Watch:
    """Fit on this process and say what its updates saw."""
    watch = Watch()
    quiet_trainer(callbacks=[watch], **kwargs).fit(module, loader)
    return watch


def on_processes(
    ranks: Callable[[int], RankPool], world: int, function: Callable[..., Any], *args: Any
) -> list[Any]:
    """`function(*args)` on so many processes, one value each; one process is this one."""
    if world > 1:
        return ranks(world)(function, *args)
    isolation.reset_trainer_state()
    isolation.reset_torch()
    return [function(*args)]


def cut_back(whole: Path, folder: Path, step: int) -> Path:
    """Copy a run as if it had been killed after the checkpoint of this update."""
    shutil.copytree(whole, folder)
    for path in (folder / "checkpoints").glob("step-*"):
        if int(path.name.removeprefix("step-")) > step:
            shutil.rmtree(path)
    assert (folder / "checkpoints" / f"step-{step:08d}").is_dir()
    return folder


def assert_same(actual: Any, expected: Any) -> None:
    """Equal to the last bit, also where both are NaN."""
    torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)
