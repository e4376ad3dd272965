"""Notice when a metric jumps away from where it was."""

from __future__ import annotations

import logging
import math
from statistics import median
from typing import TYPE_CHECKING, Any, Literal, get_args

from callbacks.base import Callback
from callbacks.monitor import Mode, Monitor

if TYPE_CHECKING:
    from trainer import Trainer, TrainModule

logger = logging.getLogger(__name__)

Action = Literal["log", "stop"]
_STATE = ("window_values", "num_spikes", "spikes_in_a_row", "last_spike_step", "reason")
_STOPS_BY = (
    "monitor",
    "window",
    "warmup",
    "deviations",
    "rtol",
    "atol",
    "check_finite",
    "patience",
)
_SIGMA = 1.4826  # a normal distribution's standard deviation in median absolute deviations


class SpikeDetection(Callback):
    """Compare each recorded value of a metric with the median of the values before it.

    A value is a spike if it is worse than that median by more than all of: ``deviations`` standard
    deviations, taken from the window's median absolute deviation (MAD; Leys et al., "Detecting
    outliers", 2013), ``rtol`` times the median, and ``atol``. Every finite value then enters the
    window: a few spikes hardly move a median, and a lasting new level becomes the normal one.

    It looks at values where they are recorded anyway (``log_every``, or the epoch's end) and asks
    nothing of the device. They are those of all processes, which decide alike. On an accelerator
    values arrive one update after their own.

    Args:
        monitor: Name of a logged metric, the training loss for example.
        mode: ``min`` if smaller is better, so that a spike is a rise; ``max`` if it is a fall.
        window: Values that the median is taken over.
        warmup: Values before the first comparison.
        deviations: See above; 0 for no such bound.
        rtol: See above.
        atol: See above.
        check_finite: A NaN or infinite value is a spike, also during the warm-up; otherwise it is
            passed over.
        action: ``log`` writes a warning, ``stop`` also ends the run.
        patience: ``stop`` acts at this many spikes in a row.

    Attributes:
        num_spikes: How many there were.
        spikes_in_a_row: How many of the latest values were spikes.
        last_spike_step: ``global_step`` when the latest was seen, None before the first.
        reason: What it was.

    Raises:
        ValueError: If an argument makes no sense; during ``fit``, if the metric is never logged.
    """

    def __init__(
        self,
        monitor: str,
        *,
        mode: Mode = "min",
        window: int = 50,
        warmup: int = 10,
        deviations: float = 6.0,
        rtol: float = 0.1,
        atol: float = 0.0,
        check_finite: bool = True,
        action: Action = "log",
        patience: int = 1,
    ) -> None:
        for name, count, least in (
            ("window", window, 1),
            ("warmup", warmup, 1),
            ("patience", patience, 1),
        ):
            if count < least or count % 1:
                raise ValueError(f"{name} must be a count of {least} or more, got {count!r}.")
        if warmup > window:
            raise ValueError(
                f"warmup is {warmup}, but the window of {window} never holds so many values."
            )
        for name, bound in (("deviations", deviations), ("rtol", rtol), ("atol", atol)):
            if not (math.isfinite(bound) and bound >= 0):
                raise ValueError(f"{name} must be finite and at least 0, got {bound!r}.")
        if not (deviations or rtol or atol):
            raise ValueError(
                "deviations, rtol and atol are all 0, so that any worse value were a spike; give "
                "at least one of them."
            )
        if action not in get_args(Action):
            raise ValueError(f"action must be 'log' or 'stop', got {action!r}.")
        self.monitor = Monitor(monitor, mode)
        self.window = int(window)
        self.warmup = warmup
        self.deviations = deviations
        self.rtol = rtol
        self.atol = atol
        self.check_finite = check_finite
        self.action = action
        self.patience = patience
        self._begin()

    def _begin(self) -> None:
        self.window_values: list[float] = []
        self.num_spikes = 0
        self.spikes_in_a_row = 0
        self.last_spike_step: int | None = None
        self.reason: str | None = None

    @property
    def decides_by(self) -> tuple[str, ...]:
        """What all processes must have alike; nothing where it only writes to the log."""
        return _STOPS_BY if self.action == "stop" else ()

    @property
    def state_key(self) -> str:
        """The class with the metric that it watches."""
        return f"{super().state_key}({self.monitor.name}, {self.monitor.mode})"

    def state_dict(self) -> dict[str, Any]:
        """The window and what was found."""
        return {name: getattr(self, name) for name in _STATE}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from ``state``."""
        for name in _STATE:
            setattr(self, name, state[name])
        self.window_values = self.window_values[-self.window :]

    def on_train_start(self, trainer: Trainer, module: TrainModule) -> None:
        """Forget another run's values where this one begins anew."""
        if trainer.batches_seen == 0:
            self._begin()

    def on_boundary(self, trainer: Trainer, module: TrainModule) -> None:
        """Judge the metric if it was just reduced."""
        value = self.monitor.read(trainer)
        if value is None:
            return
        reason = self._judge(value)
        if math.isfinite(value):
            self.window_values = [*self.window_values, value][-self.window :]
        if reason is None:
            if math.isfinite(value):
                self.spikes_in_a_row = 0
            return
        self.reason = reason
        self.num_spikes += 1
        self.spikes_in_a_row += 1
        self.last_spike_step = trainer.global_step
        stops = self.action == "stop" and self.spikes_in_a_row >= self.patience
        if stops:
            trainer.should_stop = True
        if trainer.accelerator.is_main_process:
            after = " The run stops." if stops else ""
            logger.warning("Step %d: %s.%s", trainer.global_step, reason, after)

    def _judge(self, value: float) -> str | None:
        """Why the value is a spike, None if it is none."""
        name = self.monitor.name
        if not math.isfinite(value):
            return f"{name} = {value} is not finite" if self.check_finite else None
        if len(self.window_values) < self.warmup:
            return None
        middle = median(self.window_values)
        spread = median(abs(each - middle) for each in self.window_values)
        bound = max(self.deviations * _SIGMA * spread, self.rtol * abs(middle), self.atol)
        if not self.monitor.is_better(middle, value, bound):
            return None
        return (
            f"{name} = {value:.6g} is a spike: more than {bound:.3g} worse than {middle:.6g}, the "
            f"median of the last {len(self.window_values)} values"
        )
