"""Stop a run when a metric has stopped improving."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, ClassVar

from callbacks.monitor import Mode, Monitor, MonitorCallback
from trainer.checks import check_counts, check_numbers, given, suggest_arguments

if TYPE_CHECKING:
    from trainer import Trainer, TrainModule


class EarlyStopping(MonitorCallback):
    """Stop the run when ``monitor`` has not improved for ``patience`` values.

    It is checked in ``on_boundary``, once for each newly reduced value of the metric. So
    ``patience`` counts validations or epochs, for example. All ranks have the same value and make
    the same decision. ``min_epochs`` and ``min_steps`` of the Trainer still apply.

    Example::

        callback = EarlyStopping("val/accuracy", mode="max", patience=5)
        trainer = Trainer(max_epochs=100, callbacks=[callback])

    Args:
        monitor: Name of a logged metric.
        mode: ``min`` if smaller is better, ``max`` if larger is.
        min_delta: A value must beat the best one by more than this to count as an improvement.
        patience: The number of values in a row without improvement at which the run stops; 0 acts
            like 1.
        check_finite: Stop at a NaN or infinite value.
        stopping_threshold: Stop once the metric reaches this value.
        divergence_threshold: Stop once the metric is worse than this value.
        verbose: Also print each improvement, not only the reason for stopping.

    Attributes:
        best_score: The best value so far, None before the first.
        wait_count: Values in a row without improvement.
        stopped_step: ``global_step`` when it last requested the stop, None if it never did.
        stopped_epoch: ``current_epoch`` at that time.
        reason: The reason for the stop.

    Raises:
        ValueError: If an argument is invalid; during ``fit``, if an epoch has ended and the metric
            was never logged. (A run that ends inside its first epoch logs a warning instead.)
        TypeError: If ``patience`` is not a number.
    """

    _STATE = ("best_score", "wait_count", "stopped_step", "stopped_epoch", "reason")
    decides_by: ClassVar[tuple[str, ...]] = (  # must be the same on all processes
        *("monitor", "mode", "min_delta", "patience", "check_finite"),
        *("stopping_threshold", "divergence_threshold"),
    )

    @suggest_arguments(
        strict="nothing: a metric that is never logged is an error",
        check_on_train_epoch_end="nothing: each new value is checked",
        log_rank_zero_only="nothing: rank 0 logs",
        early_stopping_patience="patience=3",
        early_stopping_threshold="min_delta=0.0",
    )
    def __init__(
        self,
        monitor: str,
        *,
        mode: Mode = "min",
        min_delta: float = 0.0,
        patience: int = 3,
        check_finite: bool = True,
        stopping_threshold: float | None = None,
        divergence_threshold: float | None = None,
        verbose: bool = False,
    ) -> None:
        check_numbers(0, min_delta=min_delta)
        check_counts(0, patience=patience)
        thresholds = given(
            stopping_threshold=stopping_threshold, divergence_threshold=divergence_threshold
        )
        check_numbers(**thresholds)
        self._monitor = Monitor(monitor, mode)
        self.min_delta = min_delta
        self.patience = patience
        self.check_finite = check_finite
        self.stopping_threshold = stopping_threshold
        self.divergence_threshold = divergence_threshold
        self.verbose = verbose
        self._begin()

    def _begin(self) -> None:
        self.best_score: float | None = None
        self.wait_count = 0
        self.stopped_step: int | None = None
        self.stopped_epoch: int | None = None
        self.reason: str | None = None

    def on_boundary(self, trainer: Trainer, module: TrainModule) -> None:
        """Check the metric if it was just reduced."""
        value = self._monitor.read(trainer)
        if value is None:
            return
        best, step = self.best_score, trainer.global_step
        reason = self._stop_reason(value)
        if self.verbose and self.best_score != best:
            trainer.accelerator.print(f"Step {step}: {self.monitor} improved to {value:.4g}.")
        if reason is not None:
            if not trainer.should_stop:  # min_epochs may continue the run
                trainer.accelerator.print(f"Step {step}: EarlyStopping asks to stop: {reason}.")
            self.reason = reason
            self.stopped_step, self.stopped_epoch = step, trainer.current_epoch
            trainer.should_stop = True

    def on_train_end(self, trainer: Trainer, module: TrainModule) -> None:
        """Warn if there was no value of the metric."""
        if self.best_score is None and self.reason is None:
            self._monitor.warn_of_no_value(trainer, type(self).__name__)

    def _stop_reason(self, value: float) -> str | None:
        """Count ``value``; return the reason to stop, or None to continue."""
        name, goal, limit = self.monitor, self.stopping_threshold, self.divergence_threshold
        if self.check_finite and not math.isfinite(value):
            return f"{name} = {value} is not finite"
        best = math.nan if self.best_score is None else self.best_score  # any number beats NaN
        if self._monitor.is_better(value, best, self.min_delta):
            self.best_score, self.wait_count = value, 0
        else:
            self.wait_count += 1
        if goal is not None and (value == goal or self._monitor.is_better(value, goal)):
            return f"{name} = {value:.4g} reached the stopping threshold {goal:.4g}"
        if limit is not None and self._monitor.is_better(limit, value):
            return f"{name} = {value:.4g} is worse than the divergence threshold {limit:.4g}"
        if self.wait_count >= max(self.patience, 1):
            count = "1 value" if self.wait_count == 1 else f"{self.wait_count} values"
            # With the direction: under the wrong mode a run that improves stops here.
            moved, side = ("fallen", "below") if self.mode == "min" else ("risen", "above")
            if self.min_delta:  # the latest value may beat the best one, but not by enough
                moved += f" by more than min_delta={self.min_delta:.4g}"
            return (
                f"{name} has not {moved} {side} its best value, {best:.4g}, for {count}; "
                f"the latest is {value:.4g}"
            )
        return None
