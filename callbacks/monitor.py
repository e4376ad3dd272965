"""`Monitor`: a metric for decisions, and whether smaller or larger values are better."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any, ClassVar, Literal, get_args

from callbacks.base import Callback
from trainer.checks import check_choice
from trainer.errors import module_logger

if TYPE_CHECKING:
    from trainer import Trainer, TrainModule

logger = module_logger(__name__)

Mode = Literal["min", "max"]


def suggested(name: str, names: Collection[str]) -> str:
    """Return the end of an error message: the logged name that a monitored one resembles, if any.

    Args:
        name: The monitored name, which is not logged.
        names: The logged names.
    """
    plain = name.removesuffix("_epoch")  # the name if only one of the two values is logged
    near = [each for each in (f"{name}_epoch", plain) if each in names]
    near = near or get_close_matches(name, names, n=1)
    suffix = " The suffix _epoch needs log(…, on_step=True, on_epoch=True)."
    return f" Did you mean {near[0]!r}?{suffix if near == [plain] else ''}" if near else ""


@dataclass(frozen=True, slots=True)
class Monitor:
    """The metric ``name``, whose smallest (``min``) or largest (``max``) value is best.

    Example::

        class PrintLoss(Callback):
            loss = Monitor("val/loss", "min")

            def on_boundary(self, trainer, module):
                if (value := self.loss.read(trainer)) is not None:
                    print(trainer.global_step, value)

        trainer = Trainer(max_epochs=10, callbacks=[PrintLoss()])

    Raises:
        ValueError: If ``name`` is not the name of a metric, or ``mode`` is unknown.
    """

    name: str
    mode: Mode

    def __post_init__(self) -> None:
        check_choice("mode", self.mode, get_args(Mode))
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
        if (metric := trainer.monitored_metric(self.name)) is not None:
            value, reduced_at = metric
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
        hint = suggested(self.name, names)
        if trainer.validations == 0:
            hint += " No validation has run."
        return (
            f"The monitored metric {self.name!r} was never logged. Logged so far: "
            f"{', '.join(sorted(names)) or 'nothing'}.{hint}"
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
        return (
            "It was logged but never reduced: use a shorter log_every or val_every, a longer run, "
            "or on_epoch=True."
        )


class MonitorCallback(Callback):
    """A callback that checks each new value of a metric, with its results as state."""

    _monitor: Monitor
    _STATE: ClassVar[tuple[str, ...]]  # attributes that a checkpoint stores

    @property
    def monitor(self) -> str:
        """The name of the metric."""
        return self._monitor.name

    @property
    def mode(self) -> Mode:
        """Whether the metric's smallest (``min``) or largest (``max``) value is best."""
        return self._monitor.mode

    def _begin(self) -> None:
        """Reset the state to its value before the first metric."""
        raise NotImplementedError

    @property
    def state_key(self) -> str:
        """The name of the class with the monitored metric."""
        return f"{super().state_key}({self.monitor}, {self.mode})"

    def state_dict(self) -> dict[str, Any]:
        """Return the findings so far."""
        return {name: getattr(self, name) for name in self._STATE}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the findings in ``state``."""
        for name in self._STATE:
            setattr(self, name, state[name])

    def on_train_start(self, trainer: Trainer, module: TrainModule) -> None:
        """Reset the results of an earlier run, unless this run resumes or continues it."""
        if trainer.batches_seen == 0 and trainer.global_step == 0:
            self._begin()
