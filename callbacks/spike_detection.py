"""Detect spikes (sudden jumps) of a metric, such as the training loss."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Literal, get_args

from callbacks.monitor import Mode, Monitor, MonitorCallback
from trainer.checks import check_choice, check_counts, check_numbers
from trainer.errors import module_logger

if TYPE_CHECKING:
    from trainer import Trainer, TrainModule

logger = module_logger(__name__)

Action = Literal["log", "stop"]
_STOPS_BY = (
    *("monitor", "mode", "window", "warmup", "deviations"),
    *("rtol", "atol", "check_finite", "patience"),
)
_SIGMA = 1.4826  # standard deviation ÷ MAD of a normal distribution


class SpikeDetection(MonitorCallback):
    """Compare each logged value of a metric with the median of the values before it.

    A value is a spike if it is worse than the median by more than all of: ``deviations`` standard
    deviations, estimated from the window's median absolute deviation (MAD; Leys et al., "Detecting
    outliers", 2013), ``rtol`` times the median, and ``atol``. Every finite value, spikes included,
    is then added to the window: a few spikes hardly change the median, and a lasting new level
    becomes the normal one.

    It uses values when they are logged anyway (``log_every``, or the end of an epoch) and never
    waits for the device. They are reduced over all processes, so that all processes make the same
    decision. In a run with one process on an accelerator, a step's value is read one update later.

    Example::

        callback = SpikeDetection("train/loss", action="stop", patience=3)
        trainer = Trainer(max_epochs=10, callbacks=[callback])

    Args:
        monitor: Name of a logged metric, the training loss for example.
        mode: ``min`` if smaller is better, so that a spike is a rise; ``max`` if larger is better,
            so that it is a fall.
        window: The number of values over which the median is taken.
        warmup: The number of values before the first comparison.
        deviations: See above; 0 disables this bound.
        rtol: See above.
        atol: See above.
        check_finite: Whether a NaN or infinite value is a spike, even during the warm-up; otherwise
            it is ignored.
        action: ``log`` writes a warning, ``stop`` also ends the run.
        patience: With ``stop``, the number of spikes in a row that ends the run.

    Attributes:
        num_spikes: The number of spikes so far.
        spikes_in_a_row: The number of spikes in a row up to the latest value.
        last_spike_step: ``global_step`` when the latest spike was seen, None before the first.
        reason: A description of the latest spike.

    Raises:
        ValueError: If an argument is invalid; during ``fit``, if an epoch has ended and the metric
            was never logged. (A run that ends inside its first epoch logs a warning instead.)
    """

    _STATE = ("window_values", "num_spikes", "spikes_in_a_row", "last_spike_step", "reason")

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
        check_counts(1, window=window, warmup=warmup, patience=patience)
        check_numbers(0, deviations=deviations, rtol=rtol, atol=atol)
        if warmup > window:
            raise ValueError(
                f"warmup is {warmup}, but window is {window}; warmup must be at most window."
            )
        if not (deviations or rtol or atol):
            raise ValueError("deviations, rtol and atol are all 0; set at least one above 0.")
        check_choice("action", action, get_args(Action))
        self._monitor = Monitor(monitor, mode)
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
        """Settings that must be the same on all processes; empty if the callback only logs."""
        return _STOPS_BY if self.action == "stop" else ()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the window and the findings in ``state``."""
        super().load_state_dict(state)
        self.window_values = self.window_values[-self.window :]

    def on_boundary(self, trainer: Trainer, module: TrainModule) -> None:
        """Check the metric if it was just reduced."""
        value = self._monitor.read(trainer)
        if value is None:
            return
        reason = self._spike_reason(value)
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

    def on_train_end(self, trainer: Trainer, module: TrainModule) -> None:
        """Warn if there was no value of the metric."""
        if not self.window_values and self.monitor not in trainer.metric_updates:
            self._monitor.warn_of_no_value(trainer, type(self).__name__)

    def _spike_reason(self, value: float) -> str | None:
        """Return why the value is a spike, or None if it is not."""
        from statistics import median  # imported here to keep `import trainer` fast

        name = self.monitor
        if not math.isfinite(value):
            return f"{name} = {value} is not finite" if self.check_finite else None
        if len(self.window_values) < self.warmup:
            return None
        middle = median(self.window_values)
        spread = median(abs(earlier - middle) for earlier in self.window_values)
        bound = max(self.deviations * _SIGMA * spread, self.rtol * abs(middle), self.atol)
        if not self._monitor.is_better(middle, value, bound):
            return None
        return (
            f"{name} = {value:.6g} is a spike: more than {bound:.3g} worse than {middle:.6g}, the "
            f"median of the last {len(self.window_values)} values"
        )
