"""Measure how long a run takes, and stop it after a given time."""

from __future__ import annotations

import time
from collections.abc import Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal, get_args

from callbacks.base import Callback
from trainer.checks import check_choice
from trainer.interval import seconds_of

if TYPE_CHECKING:
    from trainer import Trainer, TrainModule

TimedStage = Literal["train", "validate", "test", "predict", "sanity_check"]


class Timer(Callback):
    """Measure the time of training, validation, test and prediction; stop after a duration.

    The training time is added up over all starts of the run, by rank 0's clock, and includes
    validations, as for ``max_time`` of the Trainer. All ranks request the stop at the same
    boundary. Like every stop request, it waits for ``min_epochs`` and ``min_steps``. A running
    validation is finished first.

    Example::

        timer = Timer(duration="8 hours")
        trainer = Trainer(max_epochs=10, callbacks=[timer])
        trainer.fit(module, train_loader, val_loader)
        print(timer.time_elapsed("train"))  # seconds

    Args:
        duration: How long to train: ``"30 minutes"``, ``"00:12:00:00"`` (days, hours, minutes,
            seconds), a ``timedelta``, or its arguments as a dict. None only measures.
        interval: Check the clock after each update (``"step"``) or epoch (``"epoch"``).
        verbose: Print a message when the time limit is reached.

    Raises:
        ValueError: The duration is not a time above zero, or the interval is unknown.
        TypeError: The duration is of another type.
    """

    def __init__(
        self,
        duration: str | timedelta | Mapping[str, float] | None = None,
        interval: Literal["step", "epoch"] = "step",
        verbose: bool = True,
    ) -> None:
        check_choice("interval", interval, ("step", "epoch"))
        self.duration = None if duration is None else seconds_of("duration", duration)
        self.interval = interval
        self.verbose = verbose
        self._elapsed = dict.fromkeys(get_args(TimedStage), 0.0)
        self._since: dict[str, float] = {}  # when each running clock was last read

    @property
    def decides_by(self) -> tuple[str, ...]:
        """Settings that must be the same on all processes; empty if the callback only measures."""
        return () if self.duration is None else ("duration", "interval")

    def time_elapsed(self, stage: TimedStage = "train") -> float:
        """Return the seconds spent in a stage so far, over all starts of the run.

        Raises:
            ValueError: There is no such stage.
        """
        check_choice("stage", stage, self._elapsed)
        now = time.monotonic()
        return self._elapsed[stage] + now - self._since.get(stage, now)

    def time_remaining(self, stage: TimedStage = "train") -> float | None:
        """Return the seconds that a stage has left of the duration; None without a duration."""
        if self.duration is None:
            return None
        return max(self.duration - self.time_elapsed(stage), 0.0)

    def state_dict(self) -> dict[str, Any]:
        """Return the time spent in each stage, in seconds."""
        return {"time_elapsed": {stage: self.time_elapsed(stage) for stage in get_args(TimedStage)}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the times in ``state``."""
        self._elapsed.update(state["time_elapsed"])

    def on_train_start(self, trainer: Trainer, module: TrainModule) -> None:
        """Start the clock, from zero unless the run resumes."""
        if trainer.batches_seen == 0:
            self._elapsed.update(train=0.0, validate=0.0)
        self._since["train"] = time.monotonic()

    def on_boundary(self, trainer: Trainer, module: TrainModule) -> None:
        """Read rank 0's clock, which all ranks share, and stop the run when the time limit is
        reached.
        """
        elapsed = self._elapsed["train"] = trainer.progress.seconds
        self._since["train"] = time.monotonic()
        if self.duration is None or elapsed < self.duration:
            return
        if self.interval == "epoch" and not trainer.epoch_complete:
            return
        if self.verbose and not trainer.should_stop:
            trainer.accelerator.print(
                f"Timer: the time limit of {timedelta(seconds=self.duration)} was reached."
            )
        trainer.should_stop = True

    def on_train_end(self, trainer: Trainer, module: TrainModule) -> None:
        """Stop the clock."""
        self._stop("train")

    def on_validation_start(self, trainer: Trainer, module: TrainModule) -> None:
        """Start the clock of validations, or of the sanity check."""
        self._since["sanity_check" if trainer.sanity_checking else "validate"] = time.monotonic()

    def on_validation_end(self, trainer: Trainer, module: TrainModule) -> None:
        """Stop the clock of validations, or of the sanity check."""
        self._stop("sanity_check" if trainer.sanity_checking else "validate")

    def on_test_start(self, trainer: Trainer, module: TrainModule) -> None:
        """Start the clock of tests."""
        self._since["test"] = time.monotonic()

    def on_test_end(self, trainer: Trainer, module: TrainModule) -> None:
        """Stop the clock of tests."""
        self._stop("test")

    def on_predict_start(self, trainer: Trainer, module: TrainModule) -> None:
        """Start the clock of predictions."""
        self._since["predict"] = time.monotonic()

    def on_predict_end(self, trainer: Trainer, module: TrainModule) -> None:
        """Stop the clock of predictions."""
        self._stop("predict")

    def teardown(self, trainer: Trainer, module: TrainModule, stage: str) -> None:
        """Stop the clocks that an error left running."""
        for running in list(self._since):
            self._stop(running)

    def _stop(self, stage: str) -> None:
        self._elapsed[stage] += time.monotonic() - self._since.pop(stage)
