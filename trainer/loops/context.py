"""The components of a Trainer that the loops are built from."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from callbacks import Callback, ModelCheckpoint
from trainer.accelerator import Accelerator
from trainer.loops.config import Length, Settings
from trainer.loops.run_directory import Project


@dataclass(frozen=True, kw_only=True)
class RunContext:
    """The components of a Trainer, from which `trainer.loops.setup` creates a run.

    Attributes:
        settings: The Trainer's arguments.
        accelerator: Its accelerator.
        project: Its project folder.
        callbacks: Its callbacks, in the order of calls.
        trainer: The Trainer itself, passed to hooks.
        trial_steps: The number of updates in a trial of the `Tuner`; None if this is no trial.
    """

    settings: Settings
    accelerator: Accelerator
    project: Project
    callbacks: list[Callback]
    trainer: Any
    trial_steps: int | None = None

    @property
    def warns(self) -> bool:
        """Whether to print warnings about the set-up; trials of the `Tuner` do not."""
        return self.trial_steps is None

    @property
    def length(self) -> Length:
        """When a fit ends.

        A trial ends earlier than its settings say: those keep the user's length, since schedulers
        depend on it.
        """
        if self.trial_steps is not None:
            return Length(max_steps=self.trial_steps)
        return self.settings.length

    def roots(self) -> list[Path]:
        """Return the folders of `ModelCheckpoint` callbacks that have their own `dirpath`."""
        savers = [one for one in self.callbacks if isinstance(one, ModelCheckpoint)]
        return [one.dirpath for one in savers if one.dirpath is not None]

    def choose(self, ckpt_path: Any, *, sweeps: bool = False) -> Path | None:
        """Resolve ``ckpt_path`` to a checkpoint; see `Project.choose`; collective."""
        monitors = [
            (callback.monitor.name, callback.monitor.mode)
            for callback in self.callbacks
            if isinstance(callback, ModelCheckpoint) and callback.monitor is not None
        ]
        return self.project.choose(ckpt_path, self.roots(), monitors, sweeps=sweeps)
