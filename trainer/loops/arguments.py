"""What a Trainer was given, checked and completed: its accelerator, its folder, its callbacks."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from inspect import Parameter
from typing import Any

from callbacks import Callback, ModelCheckpoint, ProgressBar
from trainer.accelerator import Accelerator
from trainer.configuration import ProjectConfiguration
from trainer.hooks import is_overridden


def chosen_accelerator(
    ready: Accelerator | None, gradient_accumulation_steps: int, **options: Any
) -> Accelerator:
    """The one that was given, or one with these options, if the loop can work with it."""
    if ready is None:
        ready = Accelerator(
            gradient_accumulation_steps=gradient_accumulation_steps,
            scheduler_tick="update",
            **options,
        )
    elif said := [name for name, value in options.items() if value]:
        raise ValueError(
            f"Pass accelerator, or {', '.join(said)} for the Trainer to make one, not both."
        )
    config = ready.dataloader_config
    for name in ("split_batches", "dispatch_batches"):
        if getattr(config, name):
            raise ValueError(
                f"{name}=True cannot be used with the Trainer, which shares out whole batches and "
                "reads on every process. Leave it out; to keep the batch size of all processes "
                "together, divide the loader's by their number."
            )
    return ready


def project_dir_of(
    config: ProjectConfiguration, project_dir: str | os.PathLike[str] | None
) -> str | os.PathLike[str] | None:
    """The folder that both say."""
    if not isinstance(config, ProjectConfiguration):
        raise TypeError(f"project_config is {config!r}; it must be a ProjectConfiguration.")
    if config.total_limit:
        raise ValueError(
            f"ProjectConfiguration(total_limit={config.total_limit!r}) concerns the Accelerator's "
            "save_state, which the Trainer does not use; pass callbacks=[ModelCheckpoint("
            "save_last=…)]."
        )
    return config.project_dir if project_dir is None else project_dir


def complete(
    callbacks: Sequence[Callback] | Callback | None, *, progress_bar: bool, checkpointing: bool
) -> list[Callback]:
    """The user's callbacks with the defaults, those that save last."""
    if isinstance(callbacks, Callback):
        callbacks = [callbacks]
    if not isinstance(callbacks, (list, tuple, type(None))):
        raise TypeError(f"callbacks is {callbacks!r}; it must be a callback or a list of them.")
    given = list(callbacks or [])
    for callback in given:
        if not isinstance(callback, Callback):
            raise TypeError(
                f"callbacks holds {callback!r} of type {type(callback).__name__}; every one must "
                "be an instance of callbacks.Callback."
            )
    keys = [one.state_key for one in given if is_overridden(one, "state_dict", Callback)]
    for key in keys:
        if keys.count(key) > 1:
            raise ValueError(
                f"Two callbacks have the state_key {key!r}, so that a checkpoint could not tell "
                "them apart; override the property in one of them."
            )
    bars = [one for one in given if isinstance(one, ProgressBar)]
    if len(bars) > 1:
        names = " and ".join(type(bar).__name__ for bar in bars)
        raise ValueError(f"callbacks holds {names}, which would draw over each other; pass one.")
    if progress_bar and not bars:
        given.insert(0, ProgressBar())
    if checkpointing and not any(isinstance(one, ModelCheckpoint) for one in given):
        given.append(ModelCheckpoint())
    return sorted(given, key=lambda callback: callback.runs_last)


def refuse_beside_barebones(arguments: Mapping[str, Parameter], **given: Any) -> None:
    """Refuse what was asked for and is what ``barebones=True`` turns off.

    Args:
        arguments: The Trainer's, with their defaults, which nobody asked for.
        **given: The values of those that it turns off.

    Raises:
        ValueError: Something else than the default, and not off.
    """
    for name, value in given.items():
        if value and value not in ("ignore", arguments[name].default):
            raise ValueError(
                f"barebones=True turns {name} off, but {name} is {value!r}: leave one of them out. "
                "To see what the optional parts cost, compare with profile='simple' instead."
            )
