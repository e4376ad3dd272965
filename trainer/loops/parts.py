"""What a Trainer is made of."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from callbacks import Callback, ModelCheckpoint
from trainer.accelerator import Accelerator
from trainer.loops.lengths import Length
from trainer.loops.project import Project
from trainer.loops.settings import Settings


@dataclass(frozen=True, kw_only=True)
class Parts:
    """What a Trainer is made of, for assembling its runs.

    Attributes:
        settings: Its arguments.
        accelerator: Its devices and processes.
        project: Its folder.
        callbacks: In the order in which they are called.
        trainer: The Trainer itself, for the hooks.
        trial_steps: Updates of a `Tuner`'s trial; None if the Trainer is not for a trial.
    """

    settings: Settings
    accelerator: Accelerator
    project: Project
    callbacks: list[Callback]
    trainer: Any
    trial_steps: int | None = None

    @property
    def tells(self) -> bool:
        """Whether to warn the user of what is missing, which trials do not."""
        return self.trial_steps is None

    @property
    def length(self) -> Length:
        """When a fit ends; a trial's settings keep the user's length, which schedules depend on."""
        if self.trial_steps is not None:
            return Length(max_steps=self.trial_steps)
        return self.settings.length

    def roots(self) -> list[Path]:
        """Return the folders of callbacks that save outside the project's folder."""
        savers = [one for one in self.callbacks if isinstance(one, ModelCheckpoint)]
        return [one.dirpath for one in savers if one.dirpath is not None]

    def choose(self, ckpt_path: Any, *, sweeps: bool = False) -> Path | None:
        """Return the checkpoint that ``ckpt_path`` means; see `Project.choose`; collective."""
        monitors = [
            (callback.monitor.name, callback.monitor.mode)
            for callback in self.callbacks
            if isinstance(callback, ModelCheckpoint) and callback.monitor is not None
        ]
        return self.project.choose(ckpt_path, self.roots(), monitors, sweeps=sweeps)
