"""The arguments of a `Trainer` that the loops need, validated once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, Literal

from callbacks import Interval
from callbacks.checks import expect_bools
from trainer.loops.lengths import Length, check_limit, seconds_of
from trainer.optim.clipping import validate_limits
from trainer.optim.finite import Policy, check_policy

Limit = int | float | None
Profile = Literal["simple"]
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
    fast_dev_run: bool = False
    profile: Profile | None = None
    barebones: bool = False

    def __post_init__(self) -> None:
        """Validate the arguments and parse intervals."""
        for name in (*LIMITS.values(), "overfit_batches"):
            check_limit(name, getattr(self, name))
        validate_limits(self.max_grad_norm, self.max_grad_value)
        check_policy(self.non_finite, self.max_skipped_in_row)
        expect_bools(barebones=self.barebones, detect_anomaly=self.detect_anomaly)
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
            object.__setattr__(self, name, Interval.given(name, getattr(self, name)))
        _ = self.length  # validated here
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
        """The time limit in seconds of each start of the program; None without one.

        `max_time` is such a limit only beside `max_epochs` or `max_steps`. Alone, it is the length
        of the run.
        """
        return None if self._only_time else seconds_of(self.max_time)

    @property
    def _only_time(self) -> bool:
        return self.max_epochs is None and self.max_steps is None

    def limit(self, kind: str) -> tuple[str, Limit]:
        """Return the name and the value of the argument that limits the batches of this data."""
        name = "overfit_batches" if self.overfits(kind) else LIMITS[kind]
        return "fast_dev_run" if self.fast_dev_run else name, getattr(self, name)

    def overfits(self, kind: str) -> bool:
        """Return whether `overfit_batches` applies: only the first batches are read, unshuffled."""
        return self.overfit_batches is not None and kind in ("train", "validate")

    def for_a_trial(self, batches: bool | int) -> Settings:
        """Return a copy for `fast_dev_run`: one epoch with a few batches of each kind of data.

        Args:
            batches: The number of batches; True for one.
        """
        if batches is not True:
            _whole("fast_dev_run", batches, 1, "True for one batch, False for none")
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

    def stripped(self) -> Settings:
        """Return a copy for `barebones`: no sanity check, no check for non-finite numbers."""
        return replace(self, num_sanity_val_steps=0, non_finite="ignore")

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


def _whole(name: str, value: Any, least: int, hint: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} is {value!r}; it must be an int ({hint}).")
    if value < least:
        raise ValueError(f"{name} is {value}; it must be at least {least} ({hint}).")
