"""Check a Trainer's arguments and fill in defaults: accelerator, project folder and callbacks."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from inspect import Parameter
from typing import Any

from callbacks import Callback, Interval, ModelCheckpoint, ProgressBar
from trainer.accelerator import Accelerator
from trainer.choices import RNGType
from trainer.configuration import GradientAccumulationPlugin, ProjectConfiguration
from trainer.errors import expect
from trainer.hooks import is_overridden
from trainer.state import AcceleratorState, is_initialized

LEFT_OUT: dict[str, tuple[Any, ...]] = {
    # For each argument: the feature that it configures and that `barebones=True` switches off, then
    # the values by which the argument does not request the feature. Neither does its default.
    "fast_dev_run": ("the trial run", False, 0),
    "profile": ("the profile", None),
    "callbacks": ("callbacks", None, [], ()),
    "progress_bar": ("the progress bar", False),
    "checkpointing": ("checkpoints", False),
    "log_with": ("trackers", None, [], ()),
    "project_name": ("trackers", None),
    "run_name": ("trackers", None),
    "log_every": ("records of metrics",),
    "num_sanity_val_steps": ("the check before the training", 0),
    "non_finite": ("the check for NaN", "ignore"),
    "max_skipped_in_row": ("the check for NaN",),
    "detect_anomaly": ("the search for anomalies", False),
    "slurm_requeue": ("the save that a requeued job resumes from", False),
}


def chosen_window(steps: int | None, ready: Accelerator | None) -> int:
    """Return the micro-batches per update: the argument, else the accelerator's, else the default.

    The default may come from the environment.
    """
    if steps is not None:
        return steps
    if ready is not None:
        return ready.gradient_accumulation_steps
    found = GradientAccumulationPlugin().num_steps
    assert found is not None  # the default is read from the environment
    return found


def chosen_accelerator(
    ready: Accelerator | None, gradient_accumulation_steps: int, **options: Any
) -> Accelerator:
    """Return the given accelerator, or a new one with these options, checked for the Trainer.

    Args:
        ready: The user's accelerator, or None.
        gradient_accumulation_steps: Micro-batches per update, for a new accelerator.
        **options: Other arguments of the `Accelerator`.

    Raises:
        ValueError: Both an accelerator and options were given, or it has an option that the Trainer
            does not support.
    """
    if ready is None:
        ready = _accelerator_of_ours(
            gradient_accumulation_steps=gradient_accumulation_steps,
            scheduler_tick="update",
            **options,
        )
    elif said := [name for name, value in options.items() if value]:
        raise ValueError(
            f"Pass accelerator, or {', '.join(said)} for the Trainer to make one, not both."
        )
    else:
        _refuse_of_own_loops(ready)
    config = ready.dataloader_config
    for name in ("split_batches", "dispatch_batches"):
        if getattr(config, name):
            raise ValueError(
                f"{name}=True cannot be used with the Trainer, which distributes whole batches and "
                "reads on every process. Leave it out; to keep the total batch size of all "
                "processes, divide the loader's by their number."
            )
    return ready


def _accelerator_of_ours(**options: Any) -> Accelerator:
    """Create an accelerator; its state is its own unless the script has an `Accelerator`, too."""
    before = AcceleratorState._leave_to_trainer(shares=False)
    ours = not is_initialized()
    try:
        ready = Accelerator(**options)
    except BaseException:
        AcceleratorState._shared_state = before
        raise
    if ours:
        ready.state._of_trainer = True
    if before.get("_runs"):  # called in a hook of another Trainer
        AcceleratorState._shared_state = before
    return ready


def _refuse_of_own_loops(ready: Accelerator) -> None:
    """Raise for options of a user's accelerator that the Trainer would silently ignore.

    Raises:
        ValueError: It has such an option.
    """
    if ready.log_with:
        raise ValueError(
            "The Accelerator that was passed has log_with, whose trackers init_trackers starts in "
            "custom loops; pass log_with to the Trainer."
        )
    usual = {
        "device_placement": (ready.device_placement, True),
        "step_scheduler_with_optimizer": (ready.step_scheduler_with_optimizer, True),
        "rng_types": (ready.rng_types, [RNGType.GENERATOR]),
        "sync_with_dataloader": (ready.gradient_state.sync_with_dataloader, True),
        "adjust_scheduler": (ready.gradient_state.adjust_scheduler, True),
        "sync_each_batch": (ready.gradient_state.plugin.sync_each_batch, False),
    }
    for name, (value, default) in usual.items():
        if value != default:
            raise ValueError(
                f"The Accelerator that was passed has {name}={value!r}, which is for custom loops; "
                "the Trainer decides that itself. Leave it out."
            )


def project_dir_of(
    config: ProjectConfiguration, project_dir: str | os.PathLike[str] | None
) -> str | os.PathLike[str] | None:
    """Return `project_dir`, or the one of the `ProjectConfiguration` if it is None.

    Raises:
        ValueError: The configuration has an option that the Trainer does not use.
        TypeError: `config` is not a `ProjectConfiguration`.
    """
    expect("project_config", config, ProjectConfiguration)
    if config.total_limit:
        raise ValueError(
            f"ProjectConfiguration(total_limit={config.total_limit!r}) concerns the Accelerator's "
            "save_state, which the Trainer does not use; pass callbacks=[ModelCheckpoint("
            "save_last=…)]."
        )
    if config.logging_dir != config.project_dir:
        raise ValueError(
            f"ProjectConfiguration(logging_dir={str(config.logging_dir)!r}) is for trackers of the "
            "Accelerator; those of a Trainer write to logs in its project_dir. Leave it out."
        )
    return config.project_dir if project_dir is None else project_dir


def complete(
    callbacks: Sequence[Callback] | Callback | None, *, progress_bar: bool, checkpointing: bool
) -> list[Callback]:
    """Return the user's callbacks and the default ones, sorted so that those that save run last."""
    given = listed(callbacks)
    check_callbacks(given)
    every = [
        *([_default(ProgressBar())] if progress_bar else []),
        *given,
        *([_default(ModelCheckpoint())] if checkpointing else []),
    ]
    make_way(every)
    return sorted(every, key=lambda callback: callback.runs_last)


def listed(callbacks: Sequence[Callback] | Callback | None) -> list[Callback]:
    """Return the user's callbacks as a list.

    Raises:
        TypeError: It is neither a callback nor a sequence.
    """
    if isinstance(callbacks, Callback):
        callbacks = [callbacks]
    # Hydra's lists are neither list nor tuple.
    if isinstance(callbacks, str) or not isinstance(callbacks, (Sequence, type(None))):
        raise TypeError(f"callbacks is {callbacks!r}; it must be a callback or a list of them.")
    return list(callbacks or [])


def _default(callback: Callback) -> Callback:
    callback._is_default = True
    return callback


def make_way(callbacks: list[Callback]) -> None:
    """Remove a default callback if the user has added one of the same class or a subclass."""
    for default in [one for one in callbacks if getattr(one, "_is_default", False)]:
        if sum(isinstance(one, type(default)) for one in callbacks) > 1:
            callbacks.remove(default)


def check_callbacks(given: Sequence[Any]) -> None:
    """Raise for objects that are not callbacks, and for callbacks that conflict.

    Raises:
        TypeError: One is not a callback.
        ValueError: Two have the same key in checkpoints, or two are progress bars.
    """
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


def refuse_beside_barebones(arguments: Mapping[str, Parameter], given: Mapping[str, Any]) -> None:
    """Raise for arguments that request a feature that ``barebones=True`` switches off.

    Args:
        arguments: The Trainer's parameters, whose defaults are always accepted.
        given: The values of the arguments in `LEFT_OUT`, with intervals parsed.

    Raises:
        ValueError: An argument requests such a feature.
    """
    for name, (part, *off) in LEFT_OUT.items():
        value = given[name]
        if not any(_same(value, each) for each in (arguments[name].default, *off)):
            accepted = f"{name}={off[0]!r}" if off else f"no {name}"
            raise ValueError(
                f"barebones=True leaves {part} out, but {name} is {_shown(value)}: pass "
                f"{accepted}, or "
                "leave barebones=True out. To see what the optional parts cost, compare with "
                "profile='simple' instead."
            )


def _shown(value: Any) -> str:
    """Format a value as the user may have written it."""
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_shown, value))}]"
    if isinstance(value, Callback):
        return f"{type(value).__name__}(...)"
    return repr(str(value) if isinstance(value, Interval) else value)


def _same(value: Any, other: Any) -> bool:
    """Return whether two values are equal; intervals are parsed before they are compared."""
    return bool(value == (Interval.parse(other) if isinstance(value, Interval) else other))
