"""What a Trainer was told, validated once."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, Literal

from callbacks import Callback, EarlyStopping, Interval, ModelCheckpoint, SpikeDetection, Timer
from callbacks.monitor import Monitor
from trainer.distributed.collectives import all_gather_object
from trainer.loops.lengths import Length, check_limit, seconds_of
from trainer.optim.clipping import validate_limits
from trainer.optim.finite import Policy, check_policy

Limit = int | float | None
Profile = Literal["simple"]
LIMITS = {  # the argument that limits each kind of data
    "train": "limit_train_batches",
    "validate": "limit_val_batches",
    "test": "limit_test_batches",
    "predict": "limit_predict_batches",
}
# what each process may have for itself: it neither decides nor changes a number of a fit
_OF_A_PROCESS = {
    "deterministic",
    "detect_anomaly",
    "profile",
    "limit_test_batches",
    "limit_predict_batches",
}
_Decider = EarlyStopping | ModelCheckpoint | SpikeDetection | Timer


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The arguments of a `Trainer` that its loops need; see there.

    Raises:
        ValueError: An argument is outside its choices.
        TypeError: An argument is of another type.
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
    fast_dev_run: bool = False
    profile: Profile | None = None
    barebones: bool = False

    def __post_init__(self) -> None:
        """Refuse what cannot be meant, and settle what has several spellings."""
        for name in (*LIMITS.values(), "overfit_batches"):
            check_limit(name, getattr(self, name))
        validate_limits(self.max_grad_norm, self.max_grad_value)
        check_policy(self.non_finite, self.max_skipped_in_row)
        if self.barebones not in (True, False):
            raise TypeError(f"barebones is {self.barebones!r}; it must be True or False.")
        if self.profile not in (None, "simple"):
            raise ValueError(
                f"profile is {self.profile!r}; it must be 'simple', a table of where the time "
                "goes, or None. For a trace of every operator by torch's profiler pass "
                "callbacks=[callbacks.Profiler()]."
            )
        if self.deterministic not in (True, False, "warn"):
            raise ValueError(
                f"deterministic is {self.deterministic!r}; it must be True, False or 'warn'."
            )
        _whole("num_sanity_val_steps", self.num_sanity_val_steps, -1, "0 for none, -1 for all")
        reload = "reload_dataloaders_every_n_epochs"
        _whole(reload, self.reload_dataloaders_every_n_epochs, 0, "0 for never")
        _whole("gradient_accumulation_steps", self.gradient_accumulation_steps, 1, "1 for none")
        if self.seed is not None:
            _whole("seed", self.seed, 0, "None for no seed")
        for name in ("val_every", "log_every"):
            try:
                object.__setattr__(self, name, Interval.parse(getattr(self, name)))
            except (TypeError, ValueError) as error:
                raise type(error)(f"{name}: {error}") from None
        assert self.length is not None  # made here so that it is checked here
        seconds_of(self.max_time)

    @property
    def length(self) -> Length:
        """When a run ends."""
        return Length(
            max_epochs=self.max_epochs,
            min_epochs=self.min_epochs,
            max_steps=self.max_steps,
            min_steps=self.min_steps,
            max_seconds=seconds_of(self.max_time) if self._only_time else None,
        )

    @property
    def budget(self) -> float | None:
        """The seconds after which one start of a run ends, whose length is another one."""
        return None if self._only_time else seconds_of(self.max_time)

    @property
    def _only_time(self) -> bool:
        return self.max_epochs is None and self.max_steps is None

    def limit(self, kind: str) -> tuple[str, Limit]:
        """The argument that limits a kind of data, and its value."""
        if self.overfit_batches is not None and kind in ("train", "validate"):
            return "overfit_batches", self.overfit_batches
        return LIMITS[kind], getattr(self, LIMITS[kind])

    def for_a_trial(self, batches: bool | int) -> Settings:
        """The same with one epoch of a few batches of everything; True is one batch."""
        if batches is not True:
            _whole("fast_dev_run", batches, 1, "True for one batch, False for none")
        batches = int(batches)
        return replace(
            self,
            limit_train_batches=batches,
            limit_val_batches=batches,
            limit_test_batches=batches,
            limit_predict_batches=batches,
            max_epochs=1,
            min_epochs=None,
            max_steps=None,
            min_steps=None,
            num_sanity_val_steps=0,
            val_every="1 epoch",
            log_every=1,
            fast_dev_run=True,
        )

    def stripped(self) -> Settings:
        """The same without what looks on or speaks: the check before training and of numbers."""
        return replace(self, num_sanity_val_steps=0, non_finite="ignore")

    @property
    def writes(self) -> bool:
        """The Trainer leaves files behind."""
        return not (self.fast_dev_run or self.barebones)

    def describe(self) -> dict[str, Any]:
        """What was set, as plain values, for records."""
        values = {name: getattr(self, name) for name in self.__dataclass_fields__}
        return {
            name: value if isinstance(value, (int, float)) else str(value)
            for name, value in values.items()
            if value is not None
        }


def _whole(name: str, value: Any, least: int, hint: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} is {value!r}; it must be an int ({hint}).")
    if value < least:
        raise ValueError(f"{name} is {value}; it must be at least {least} ({hint}).")


def refuse_differing(
    settings: Settings, callbacks: Iterable[Callback], ckpt_path: str | os.PathLike[str] | None
) -> None:
    """Refuse a fit that processes are told differently, before one waits for the others in vain.

    Compared is what decides how the loop goes; collective.

    Raises:
        ValueError: On all processes alike; it names the argument and what each process has.
    """
    own = {name: repr(value) for name, value in settings.describe().items()}
    for name in _OF_A_PROCESS if settings.budget is None else {*_OF_A_PROCESS, "max_time"}:
        own.pop(name, None)
    deciders = [each for each in callbacks if isinstance(each, _Decider) and each.decides_by]
    own["callbacks that save or stop"] = ", ".join(map(_decides_by, deciders)) or "none"
    word = ckpt_path in (None, "auto", "best", "last")  # paths may lie on disks of their own
    own["ckpt_path"] = repr(ckpt_path) if word else "a path"
    told = all_gather_object(own)
    for name in dict.fromkeys(name for each in told for name in each):
        values = [each.get(name, "None") for each in told]
        if any(value != values[0] for value in values):
            shown = "; ".join(f"rank {rank}: {value}" for rank, value in enumerate(values))
            hint = ""
            if name == "max_time" or "second" in shown or "duration" in shown:
                hint = (
                    " Times that each works out for itself are never quite the same: take rank "
                    "0's, seconds = trainer.utils.broadcast_object_list([seconds])[0]."
                )
            raise ValueError(
                f"fit was told something else on each process, {name}: {shown}. Give all the same; "
                f"what one process has to do alone, such as writing, it does by itself.{hint}"
            )


def _decides_by(callback: _Decider) -> str:
    """The class, with what decides when it acts."""
    parts = [
        f"{name}={value if not isinstance(value, Monitor) else value.name + ' ' + value.mode}"
        for name in callback.decides_by
        if (value := getattr(callback, name)) is not None
    ]
    return f"{type(callback).__name__}({', '.join(parts)})"
