"""The arguments of a Trainer, validated and completed, and the length of a run."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal

import torch

from callbacks import Callback, Interval, ModelCheckpoint, Progress, ProgressBar
from trainer.accelerator import Accelerator
from trainer.checks import check_bools, check_counts, check_type, choice_error, given
from trainer.configuration import (
    DeepSpeedPlugin,
    GradientAccumulationPlugin,
    ProfileKwargs,
    ProjectConfiguration,
)
from trainer.data.epoch_iterator import EpochIterator
from trainer.enums import RNGType
from trainer.hooks import is_overridden
from trainer.interval import seconds_of
from trainer.optim.clipping import validate_limits
from trainer.optim.finite import Policy, check_policy
from trainer.state import AcceleratorState, is_initialized

if TYPE_CHECKING:
    from trainer.loops.state import Counters


@dataclass(frozen=True, kw_only=True)
class Length:
    """When a fit ends.

    Attributes:
        max_epochs: After this many epochs.
        min_epochs: Not before this many epochs, even if a stop is requested.
        max_steps: After this many updates.
        min_steps: Not before this many updates, even if a stop is requested.
        max_seconds: At the first update boundary after this time in seconds.

    Raises:
        ValueError: A number is negative or has a fraction, or a minimum is above its maximum.
        TypeError: A number is of another type.
    """

    max_epochs: int | None = None
    min_epochs: int | None = None
    max_steps: int | None = None
    min_steps: int | None = None
    max_seconds: float | None = None

    def __post_init__(self) -> None:
        """Check each number, and that no minimum exceeds its maximum."""
        for unit in ("epochs", "steps"):
            low, high = getattr(self, f"min_{unit}"), getattr(self, f"max_{unit}")
            for name, number in ((f"min_{unit}", low), (f"max_{unit}", high)):
                if number is not None:
                    check_counts(0, "None for no limit", **{name: number})
            if low is not None and high is not None and low > high:
                raise ValueError(f"min_{unit} is {low}, above max_{unit}, {high}.")

    @property
    def endless(self) -> bool:
        """Whether the run has no maximum."""
        return self.max_epochs is None and self.max_steps is None and self.max_seconds is None

    def reached(self, counters: Counters, seconds: Callable[[], float]) -> bool:
        """Return whether a maximum is reached.

        Args:
            counters: The progress of the run.
            seconds: Returns its training time.
        """
        epochs, steps = counters.epoch + counters.epoch_complete, counters.global_step
        return (
            (self.max_epochs is not None and epochs >= self.max_epochs)
            or (self.max_steps is not None and steps >= self.max_steps)
            or (self.max_seconds is not None and seconds() >= self.max_seconds)
        )

    def may_stop_early(self, progress: Progress) -> bool:
        """Return whether the minimums allow an early stop."""
        return progress.steps >= (self.min_steps or 0) and progress.epochs >= (self.min_epochs or 0)


@dataclass
class Schedule:
    """Decides when a repeated event is due, such as validation or logging.

    Attributes:
        interval: How often the event is due.
        before: The run's progress at the latest call of `due`. For intervals in seconds or steps:
            the progress when the event was last due.
    """

    interval: Interval
    before: Progress = field(default_factory=Progress)

    def state_dict(self) -> list[Any]:
        """Return the interval and the progress at which the event was last due."""
        return [str(self.interval), self.before._asdict()]

    def load_state_dict(self, state: Sequence[Any], now: Progress) -> None:
        """Restore the state; if the interval has changed, count from the run's progress `now`."""
        interval, before = state
        self.before = Progress(**before) if self.interval == Interval.parse(interval) else now

    def due(self, now: Progress) -> bool:
        """Return whether the event is due; call once per update.

        For an interval in steps, it need not be called for updates at which the event is not due.
        """
        due = self.interval.due(self.before, now)
        if due or self.interval.unit != "seconds":
            self.before = now
        return due


def check_limit(name: str, limit: int | float | None) -> None:
    """Check a limit: an int is a number of batches, a float a fraction of the batches.

    Raises:
        ValueError: It is negative, or a fraction above 1.
        TypeError: It is not a number.
    """
    if limit is None:
        return
    if not isinstance(limit, float):
        check_counts(0, "batches; a float is a fraction of all", **{name: limit})
    elif not 0.0 <= limit <= 1.0:
        raise ValueError(
            f"{name} is {limit}; a float is a fraction from 0.0 to 1.0, an int a number of batches."
        )


def apply_limit(epoch_iterator: EpochIterator, name: str, limit: int | float | None) -> None:
    """Limit every epoch of an epoch iterator to a number of batches, counted over all ranks.

    A fraction is taken of the batches that the epoch has when it begins.

    Args:
        epoch_iterator: The epoch iterator.
        name: The user's argument, for messages.
        limit: A number of batches, a fraction, or None for no limit.

    Raises:
        ValueError: It is a fraction of a stream without length, or rounds down to no batch.
    """
    epoch_iterator.limited_by = name
    if limit is None or (isinstance(limit, float) and limit == 1.0):
        return
    total = epoch_iterator.num_batches
    if isinstance(limit, float) and total is None:
        raise ValueError(
            f"{name} is {limit}, but a fraction needs a loader with a length; pass an int."
        )
    epoch_iterator.limit = limit
    if total and limit and epoch_iterator.num_batches == 0:
        raise ValueError(
            f"{name} is {limit}, which of {total} batches selects none; pass at least "
            f"{1 / total:.3g}, or an int."
        )


def require_length(epoch_iterator: EpochIterator, **intervals: Interval | str | int) -> None:
    """Raise for intervals that are a fraction of an epoch of unknown length.

    Args:
        epoch_iterator: The epoch iterator.
        **intervals: The intervals by argument name.

    Raises:
        ValueError: There is such an interval.
    """
    for name, value in intervals.items():
        interval = Interval.parse(value)
        if (
            interval.unit == "epochs"
            and interval.every % 1
            and epoch_iterator.num_global_batches is None
        ):
            raise ValueError(
                f"{name} is {interval}, but a fraction of an epoch needs a loader with a length; "
                "pass steps, items, a time, or whole epochs."
            )


_DTYPES = ("bfloat16", "float16", "float32", "float64")
_COUNTS = (
    *("max_epochs", "min_epochs", "max_steps", "min_steps", "gradient_accumulation_steps"),
    *("num_sanity_val_steps", "reload_dataloaders_every_n_epochs", "seed"),
)
Limit = int | float | None
Profile = Literal["simple"] | ProfileKwargs
LIMITS = {  # the argument that limits the batches of each kind of data
    "train": "limit_train_batches",
    "validate": "limit_val_batches",
    "test": "limit_test_batches",
    "predict": "limit_predict_batches",
}


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The arguments of a `Trainer` that the loops need; `Trainer` documents them.

    Raises:
        ValueError: An argument has an invalid value.
        TypeError: An argument has a wrong type.
    """

    max_epochs: int | None = None
    min_epochs: int | None = None
    max_steps: int | None = None
    min_steps: int | None = None
    max_time: str | timedelta | Mapping[str, float] | None = None
    val_every: Interval | str | int = "1 epoch"
    num_sanity_val_steps: int = 2
    limit_train_batches: Limit = None
    limit_val_batches: Limit = None
    limit_test_batches: Limit = None
    limit_predict_batches: Limit = None
    overfit_batches: Limit = None
    reload_dataloaders_every_n_epochs: int = 0
    gradient_accumulation_steps: int = 1
    max_grad_norm: float | None = None
    max_grad_value: float | None = None
    seed: int | None = None
    log_every: Interval | str | int = "50 steps"
    non_finite: Policy = "stop"
    max_skipped_in_row: int = 50
    deterministic: bool | Literal["warn"] = False
    detect_anomaly: bool = False
    sync_batchnorm: bool = False
    dtype: str | torch.dtype | None = None
    fast_dev_run: bool = False
    profile: Profile | None = None
    barebones: bool = False

    def __post_init__(self) -> None:
        """Validate the arguments and parse intervals."""
        for name in (*LIMITS.values(), "overfit_batches"):
            check_limit(name, getattr(self, name))
        validate_limits(self.max_grad_norm, self.max_grad_value)
        check_policy(self.non_finite, self.max_skipped_in_row)
        check_bools(
            barebones=self.barebones,
            detect_anomaly=self.detect_anomaly,
            sync_batchnorm=self.sync_batchnorm,
        )
        if self.dtype is not None:
            name = str(self.dtype).removeprefix("torch.")
            if name not in _DTYPES:
                raise ValueError(choice_error("dtype", name, _DTYPES))
            object.__setattr__(self, "dtype", getattr(torch, name))
        if self.profile not in (None, "simple") and not isinstance(self.profile, ProfileKwargs):
            raise ValueError(
                f"profile is {self.profile!r}; it must be 'simple', ProfileKwargs(...) for torch's "
                "profiler, or None."
            )
        if self.deterministic not in (True, False, "warn"):
            raise ValueError(
                f"deterministic is {self.deterministic!r}; it must be True, False or 'warn'."
            )
        check_counts(-1, "-1 for all", num_sanity_val_steps=self.num_sanity_val_steps)
        check_counts(1, gradient_accumulation_steps=self.gradient_accumulation_steps)
        every = self.reload_dataloaders_every_n_epochs
        check_counts(0, reload_dataloaders_every_n_epochs=every, **given(seed=self.seed))
        for name in ("val_every", "log_every"):
            object.__setattr__(self, name, Interval.given(name, getattr(self, name)))
        _ = self.length, self._seconds  # validated here
        for name in _COUNTS:
            if (number := getattr(self, name)) is not None:
                object.__setattr__(self, name, int(number))  # users often write 1e5

    @property
    def length(self) -> Length:
        """When a run ends."""
        return Length(
            max_epochs=self.max_epochs,
            min_epochs=self.min_epochs,
            max_steps=self.max_steps,
            min_steps=self.min_steps,
            max_seconds=self._seconds if self._only_time else None,
        )

    @property
    def budget(self) -> float | None:
        """The time limit in seconds of each start of the program; None without one.

        `max_time` is such a limit only beside `max_epochs` or `max_steps`. Alone, it is the length
        of the run.
        """
        return None if self._only_time else self._seconds

    @property
    def _seconds(self) -> float | None:
        return None if self.max_time is None else seconds_of("max_time", self.max_time)

    @property
    def _only_time(self) -> bool:
        return self.max_epochs is None and self.max_steps is None

    def limit(self, kind: str) -> tuple[str, Limit]:
        """Return the name and value of the argument that limits this kind of data."""
        name = "overfit_batches" if self.overfits(kind) else LIMITS[kind]
        return "fast_dev_run" if self.fast_dev_run else name, getattr(self, name)

    def overfits(self, kind: str) -> bool:
        """Return whether `overfit_batches` applies: only the first batches are read, unshuffled."""
        return self.overfit_batches is not None and kind in ("train", "validate")

    @classmethod
    def from_arguments(cls, arguments: Mapping[str, Any]) -> Settings:
        """Return the settings of a Trainer's arguments, applying `fast_dev_run` and `barebones`.

        The micro-batches per update are taken from the argument, else from the accelerator or
        DeepSpeed, else from the default, which may come from the environment.
        """
        chosen = {field.name: arguments[field.name] for field in fields(cls)}
        batches = chosen.pop("fast_dev_run")
        if chosen["gradient_accumulation_steps"] is None:
            ready = arguments["accelerator"]
            plugins = DeepSpeedPlugin.requested(arguments["deepspeed_plugin"]) or {}
            of_plugins = [plugin.gradient_accumulation_steps for plugin in plugins.values()]
            steps = next((number for number in of_plugins if isinstance(number, int)), None)
            chosen["gradient_accumulation_steps"] = (
                GradientAccumulationPlugin(num_steps=steps).num_steps
                if ready is None
                else ready.gradient_accumulation_steps
            )
        settings = cls(**chosen)
        if batches:
            settings = settings._for_fast_dev_run(batches)
        if settings.barebones:  # no sanity check, no check for non-finite numbers
            settings = replace(settings, num_sanity_val_steps=0, non_finite="ignore")
        return settings

    def _for_fast_dev_run(self, batches: bool | int) -> Settings:
        """Return a copy for one epoch with a few batches of each kind of data."""
        if batches is not True:
            check_counts(1, fast_dev_run=batches)
        batches = int(batches)
        return replace(
            self,
            limit_train_batches=batches,
            limit_val_batches=batches,
            limit_test_batches=batches,
            limit_predict_batches=batches,
            overfit_batches=None if self.overfit_batches is None else batches,
            max_epochs=1,
            min_epochs=None,
            max_steps=None,
            min_steps=None,
            num_sanity_val_steps=0,
            val_every="1 epoch",
            log_every=1,
            fast_dev_run=True,
        )

    @property
    def writes(self) -> bool:
        """Whether the Trainer writes files."""
        return not (self.fast_dev_run or self.barebones)

    def describe(self) -> dict[str, Any]:
        """Return the arguments that are not None as plain values, for records."""
        values = {name: getattr(self, name) for name in self.__dataclass_fields__}
        return {
            name: value if isinstance(value, (int, float)) else str(value)
            for name, value in values.items()
            if value is not None
        }


LEFT_OUT: dict[str, tuple[Any, ...]] = {
    # For each argument: the feature that it configures and that `barebones=True` switches off, then
    # the values, besides the default, that do not request the feature.
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


def accelerator_for_trainer(
    ready: Accelerator | None,
    gradient_accumulation_steps: int,
    dtype: Any = None,
    **options: Any,
) -> Accelerator:
    """Return the given accelerator, or a new one with these options, checked for the Trainer.

    Args:
        ready: The user's accelerator, or None.
        gradient_accumulation_steps: Micro-batches per update, for a new accelerator.
        dtype: What a new accelerator converts modules to.
        **options: Other arguments of the `Accelerator`.

    Raises:
        ValueError: Both an accelerator and options were given, or it has an option that the Trainer
            does not support; or both `dtype` and mixed precision.
    """
    if ready is None:
        ready = _accelerator_of_ours(
            gradient_accumulation_steps=gradient_accumulation_steps,
            scheduler_tick="update",
            **options,
        )
        if dtype is not None and ready.mixed_precision != "no":
            raise ValueError(
                f"dtype is {dtype}, in which everything is computed, but mixed_precision is "
                f"{ready.mixed_precision!r}: leave one of them out."
            )
        ready.precision.dtype = dtype
    elif passed := [name for name, value in {"dtype": dtype, **options}.items() if value]:
        raise ValueError(
            f"Pass accelerator, or {', '.join(passed)} for the Trainer to create one, not both."
        )
    else:
        _check_loop_options(ready)
    config = ready.dataloader_config
    for name in ("split_batches", "dispatch_batches"):
        if getattr(config, name):
            raise ValueError(
                f"{name}=True cannot be used with the Trainer, which distributes whole batches "
                "and reads on every process. Leave it out; to keep the total batch size, divide "
                "the loader's batch size by the number of processes."
            )
    return ready


def _accelerator_of_ours(**options: Any) -> Accelerator:
    """Create an accelerator, with separate state unless the script has its own `Accelerator`."""
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


def _check_loop_options(ready: Accelerator) -> None:
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
    }
    if ready.engine.parallel.mesh is None:  # shards save memory with it
        usual["sync_each_batch"] = (ready.gradient_state.plugin.sync_each_batch, False)
    for name, (value, default) in usual.items():
        if value != default:
            raise ValueError(
                f"The Accelerator that was passed has {name}={value!r}, which is for custom loops. "
                "Leave it out."
            )


def project_dir_of(
    config: ProjectConfiguration, project_dir: str | os.PathLike[str] | None
) -> str | os.PathLike[str] | None:
    """Return `project_dir`, or the one of the `ProjectConfiguration` if it is None.

    Raises:
        ValueError: The configuration has an option that the Trainer does not use.
    """
    check_type("project_config", config, ProjectConfiguration)
    if config.total_limit:
        raise ValueError(
            f"ProjectConfiguration(total_limit={config.total_limit!r}) applies to the "
            "Accelerator's save_state, which the Trainer does not use; pass "
            "callbacks=[ModelCheckpoint(save_last=…)]."
        )
    if config.logging_dir != config.project_dir:
        raise ValueError(
            f"ProjectConfiguration(logging_dir={str(config.logging_dir)!r}) is for trackers of the "
            "Accelerator; those of a Trainer write to logs in its project_dir. Leave it out."
        )
    return config.project_dir if project_dir is None else project_dir


def with_default_callbacks(
    callbacks: Sequence[Callback] | Callback | None, *, progress_bar: bool, checkpointing: bool
) -> list[Callback]:
    """Return the user's and the default callbacks, sorted so that callbacks that save run last."""
    users = callback_list(callbacks)
    check_callbacks(users)
    every = [
        *([_default(ProgressBar())] if progress_bar else []),
        *users,
        *([_default(ModelCheckpoint())] if checkpointing else []),
    ]
    drop_replaced_defaults(every)
    return sorted(every, key=lambda callback: callback.runs_last)


def callback_list(callbacks: Sequence[Callback] | Callback | None) -> list[Callback]:
    """Return the user's callbacks as a list.

    Raises:
        TypeError: It is neither a callback nor a sequence.
    """
    if isinstance(callbacks, Callback):
        return [callbacks]
    if not isinstance(callbacks, (Sequence, type(None))):  # Hydra's lists are not Python lists
        raise TypeError(f"callbacks is {callbacks!r}; it must be a callback or a list of them.")
    return list(callbacks or [])


def _default(callback: Callback) -> Callback:
    callback._is_default = True
    return callback


def drop_replaced_defaults(callbacks: list[Callback]) -> None:
    """Remove a default callback if the user has added one of the same class or a subclass."""
    for default in [one for one in callbacks if getattr(one, "_is_default", False)]:
        if sum(isinstance(one, type(default)) for one in callbacks) > 1:
            callbacks.remove(default)


def check_callbacks(callbacks: Sequence[Any]) -> None:
    """Raise for objects that are not callbacks, and for callbacks that conflict.

    Raises:
        TypeError: One is not a callback.
        ValueError: Two have the same key in checkpoints.
    """
    for callback in callbacks:
        if not isinstance(callback, Callback):
            raise TypeError(
                f"callbacks contains {callback!r} of type {type(callback).__name__}; every item "
                "must be an instance of callbacks.Callback."
            )
    keys = [one.state_key for one in callbacks if is_overridden(one, "state_dict", Callback)]
    for key in keys:
        if keys.count(key) > 1:
            raise ValueError(
                f"Two callbacks have the state_key {key!r}, so their states in a checkpoint "
                "would be mixed up; override state_key in one of them."
            )


def check_barebones(arguments: Mapping[str, Any], defaults: Mapping[str, Any]) -> None:
    """Raise for arguments that request a feature that ``barebones=True`` switches off.

    Args:
        arguments: The Trainer's arguments.
        defaults: Their defaults, which are always accepted.

    Raises:
        ValueError: An argument requests such a feature.
    """
    for name, (part, *off) in LEFT_OUT.items():
        value, default = arguments[name], defaults[name]
        if name == "log_every":
            value, default = Interval.parse(value), Interval.parse(default)
        if value != default and value not in off:
            accepted = f"{name}={off[0]!r}" if off else f"no {name}"
            raise ValueError(
                f"barebones=True leaves {part} out, but {name} is {arguments[name]!r}: pass "
                f"{accepted}, or "
                "leave barebones=True out. To see what the optional parts cost, compare with "
                "profile='simple' instead."
            )
