"""`Monitor`: a metric for decisions, and whether smaller or larger values are better."""

from __future__ import annotations

import difflib
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, get_args

from trainer.checks import choice_error
from trainer.errors import module_logger

if TYPE_CHECKING:
    from trainer import Trainer

logger = module_logger(__name__)

Mode = Literal["min", "max"]


@dataclass(frozen=True, slots=True)
class Monitor:
    """The metric ``name``, whose smallest (``min``) or largest (``max``) value is best.

    Raises:
        ValueError: If ``name`` is not the name of a metric, or ``mode`` is unknown.
    """

    name: str
    mode: Mode

    def __post_init__(self) -> None:
        if self.mode not in get_args(Mode):
            raise ValueError(choice_error("mode", self.mode, get_args(Mode)))
        if not isinstance(self.name, str) or not self.name:
            raise ValueError(
                f"monitor is {self.name!r}; it must be the name of a logged metric: 'val/loss'."
            )

    def is_better(self, value: float, than: float, min_delta: float = 0.0) -> bool:
        """Return whether ``value`` beats ``than`` by more than ``min_delta``; a NaN never does."""
        if math.isnan(value) or math.isnan(than):
            return not math.isnan(value)
        gain = than - value if self.mode == "min" else value - than
        return gain > min_delta

    def read(self, trainer: Trainer) -> float | None:
        """Return the value if it was reduced at this boundary, else None.

        If training and validation log the same name, it is the value of the validation.

        Raises:
            ValueError: If the metric should have been logged by now but never was: an epoch has
                just ended and, if the fit has validations, one has run.
        """
        if (known := trainer.monitored_metric(self.name)) is not None:
            value, reduced_at = known
            return float(value) if reduced_at == trainer.global_step else None
        if self.name in trainer.logged_names:
            return None  # logged per step: its value arrives at the next log interval
        if trainer.epoch_complete and (trainer.validations > 0 or not trainer.has_validation):
            raise ValueError(self.never_logged(trainer))
        return None

    def never_logged(self, trainer: Trainer) -> str:
        """Return an error message if the metric was never logged, else an empty string.

        The message lists the logged names and says what to do.
        """
        names = {*trainer.callback_metrics, *trainer.logged_names}
        if self.name in names:
            return ""
        of_epoch = f"{self.name}_epoch"  # the name if the step value is also logged
        near = [of_epoch] if of_epoch in names else []
        near = near or difflib.get_close_matches(self.name, names, n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        if not trainer.has_validation:
            hint += " No validation runs in this fit."
        elif trainer.validations == 0:
            hint += " No validation has run yet."
        if trainer.current_epoch == 0 and not trainer.epoch_complete:
            hint += " No epoch has ended yet."
        if of_epoch in names:
            fix = f"With on_step and on_epoch it is {self.name}_step and {of_epoch}: name one."
        else:
            fix = f"Log it with self.log({self.name!r}, value)."
        return (
            f"The monitored metric {self.name!r} was never logged. "
            f"Logged so far: {', '.join(sorted(names)) or 'nothing'}.{hint} {fix}"
        )

    def warn_of_no_value(self, trainer: Trainer, callback: str) -> None:
        """Warn that a callback had no value of the metric during the whole run, and why."""
        if trainer.global_step == 0:
            return
        hint = self.never_logged(trainer) or self.never_reduced(trainer)
        logger.warning(f"{callback} saw no value of {self.name!r} in this run. {hint}".rstrip())

    def never_reduced(self, trainer: Trainer) -> str:
        """Return an error message if it was logged but never reduced; else an empty string."""
        if self.name not in trainer.logged_names or self.name in trainer.metric_updates:
            return ""
        when = (
            "It was logged but never reduced: step values are reduced every log_every and at the "
            "end of an epoch, validation values every val_every, those of an epoch (on_epoch=True) "
            "at its end"
        )
        if trainer.current_epoch == 0 and not trainer.epoch_complete:
            return f"{when}, and no epoch has ended. Use shorter intervals, or longer training."
        return f"{when}. Use a shorter interval, or log it with on_epoch=True."
