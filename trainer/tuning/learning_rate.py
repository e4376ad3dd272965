"""The learning-rate range test: train while the rate rises, and find where the loss falls.

L. N. Smith, "Cyclical Learning Rates for Training Neural Networks", WACV 2017, section 3.3.
"""

# ruff: noqa: ARG002 - hooks take all of the loop's arguments, used or not

from __future__ import annotations

import math
from bisect import bisect
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.functional import avg_pool1d

from callbacks import Callback
from trainer.checks import check_choice, check_counts, choice_error
from trainer.errors import module_logger
from trainer.module import TrainModule
from trainer.trainer import Trainer

logger = module_logger(__name__)

_LOSS = "_range_test_loss"
_SETTLED = 10  # number of losses after which their average no longer depends on single batches
_MODES = ("exponential", "linear")
_GROUPS = ("scaled", "same")
Groups = Literal["scaled", "same"] | int


@dataclass(frozen=True, kw_only=True)
class LearningRateTest:
    """The result of a learning-rate range test, the same on all processes.

    Attributes:
        mode: ``"exponential"`` or ``"linear"``.
        lrs: The rate of each update.
        losses: The smoothed loss before each update, over all processes.
        raw_losses: The same losses, not smoothed.
        scales: The rate of each parameter group, over all optimizers, as a multiple of the tested
            one; None for a group whose rate was not changed.
        diverged: Whether the test ended before the largest rate.
    """

    mode: str
    lrs: list[float] = field(repr=False)
    losses: list[float] = field(repr=False)
    raw_losses: list[float] = field(repr=False)
    scales: list[float | None]
    diverged: bool

    @property
    def results(self) -> dict[str, list[float]]:
        """`lrs` and `losses` under Lightning's names ``"lr"`` and ``"loss"``."""
        return {"lr": self.lrs, "loss": self.losses}

    def suggestion(self, skip_begin: int = 10, skip_end: int = 1) -> float | None:
        """Return half of the rate at which the loss has fallen halfway to its lowest value.

        It is computed from the raw losses, with a centred moving average over a sixth of the
        updates, because the average in `losses` lags behind the rates. Half of the rate is far
        enough from divergence for training.

        Args:
            skip_begin: The number of updates at the beginning that are left out.
            skip_end: The number of updates at the end that are left out, where the loss explodes.

        Returns:
            The rate; None if fewer than three updates are left, or if the fall is less than two
            standard errors of its estimate. The log states the reason.
        """
        check_counts(0, skip_begin=skip_begin, skip_end=skip_end)
        raw_losses = self.raw_losses[skip_begin : max(len(self.raw_losses) - skip_end, 0)]
        if len(raw_losses) < 3:
            logger.warning(
                "No learning rate can be suggested: of %d updates, skip_begin=%d and skip_end=%d "
                "leave %d. Test more rates with num_training, or a smaller max_lr.",
                len(self.raw_losses),
                skip_begin,
                skip_end,
                len(raw_losses),
            )
            return None
        losses = torch.tensor(raw_losses, dtype=torch.float64)
        half_window = max(len(losses) // 12, 1)
        window = 2 * half_window + 1
        smooth = avg_pool1d(losses[None], window, 1, half_window, count_include_pad=False)[0]
        lowest = int(smooth.argmin())
        halfway = (losses[: lowest + 1].mean() + smooth[lowest]) / 2
        above = (smooth[: lowest + 1] > halfway).nonzero()
        fallen = int(above[-1]) + 1 if len(above) else 0
        before = losses[:fallen]
        around = losses[max(lowest - half_window, 0) : lowest + half_window + 1]
        # The losses around the lowest were selected for being low, so their variance is too small.
        if fallen < 2 or before.mean() - around.mean() <= 2 * before.std() * math.sqrt(
            1 / len(before) + 1 / len(around)
        ):
            logger.warning(
                "No learning rate can be suggested: between %g and %g the loss falls nowhere by "
                "more than its noise. Test other rates with min_lr and max_lr, more of them with "
                "num_training, or use larger batches.",
                self.lrs[0],
                self.lrs[-1],
            )
            return None
        return self.lrs[skip_begin + fallen] / 2

    def plot(self, suggest: bool = False, show: bool = False, ax: Any = None) -> Any:
        """Plot the smoothed loss over the rate.

        Args:
            suggest: Mark the suggestion.
            show: Show the figure in a window or notebook.
            ax: matplotlib axes to draw on; by default new ones.

        Returns:
            The figure.

        Raises:
            ImportError: matplotlib is not installed.
        """
        try:
            from matplotlib import pyplot
        except ImportError as error:
            raise ImportError(
                "A plot needs matplotlib: pip install 'cadence-trainer[plot]'. The numbers are in "
                "lrs and losses."
            ) from error
        ax = pyplot.subplots()[1] if ax is None else ax
        ax.plot(self.lrs, self.losses)
        ax.set_xscale("log" if self.mode == "exponential" else "linear")
        ax.set_xlabel("learning rate")
        ax.set_ylabel("loss")
        rate = self.suggestion() if suggest else None
        if rate is not None:
            ax.plot([rate], [self.losses[bisect(self.lrs, rate)]], "o", color="red")
        if show:
            pyplot.show()
        return ax.figure


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """The rates to test, and when to stop; see `Tuner.lr_find`.

    Raises:
        ValueError: A value is outside its range.
        TypeError: A value has the wrong type.
    """

    min_lr: float
    max_lr: float
    num_training: int
    mode: str
    early_stop_threshold: float | None
    smoothing: float
    groups: Groups

    def __post_init__(self) -> None:
        """Check every value."""
        check_choice("mode", self.mode, _MODES)
        if not 0 < self.min_lr < self.max_lr < math.inf:
            raise ValueError(
                f"min_lr is {self.min_lr} and max_lr is {self.max_lr}; they must be positive, "
                "and max_lr must be larger than min_lr."
            )
        check_counts(2, num_training=self.num_training)
        object.__setattr__(self, "num_training", int(self.num_training))  # users often write 1e2
        threshold = self.early_stop_threshold
        if threshold is not None and not threshold > 1:
            raise ValueError(
                f"early_stop_threshold is {threshold}; it must be above 1, or None for no stop."
            )
        if not 0 <= self.smoothing < 1:
            raise ValueError(f"smoothing is {self.smoothing}; it must be 0 or more and below 1.")
        if self.groups not in _GROUPS:
            if isinstance(self.groups, str):
                raise ValueError(
                    f"{choice_error('groups', self.groups, _GROUPS)} Or pass a group's number."
                )
            check_counts(0, groups=self.groups)

    def rate(self, step: int) -> float:
        """Return the rate of an update, counted from 0."""
        part = step / (self.num_training - 1)
        if self.mode == "exponential":
            return float(self.min_lr * (self.max_lr / self.min_lr) ** part)
        return self.min_lr + (self.max_lr - self.min_lr) * part

    def scales(self, groups: list[dict[str, Any]]) -> list[float | None]:
        """Return the multiple of the tested rate that each group gets; None leaves it unchanged.

        Raises:
            ValueError: There is no group with the given number.
        """
        if isinstance(self.groups, int):
            if self.groups >= len(groups):
                raise ValueError(
                    f"groups is {self.groups}, but there are {len(groups)} parameter groups, "
                    "counted from 0."
                )
            return [1.0 if number == self.groups else None for number in range(len(groups))]
        if self.groups == "same":
            return [1.0] * len(groups)
        # A schedule, such as a warm-up, may have set the rate to 0; initial_lr has the user's rate.
        rates = [float(group.get("initial_lr", group["lr"])) for group in groups]
        largest = max(rates)
        return [rate / largest if largest > 0 else 1.0 for rate in rates]


@dataclass
class RangeTest(Callback):
    """Sets the rate before each update and records the loss.

    Attributes:
        sweep: The rates to test.
        raw: The losses.
        smoothed: Their moving averages.
        scales: Each group's multiple of the rate.
        diverged: Whether the test ended before the largest rate.
    """

    sweep: Sweep
    raw: list[float] = field(default_factory=list)
    smoothed: list[float] = field(default_factory=list)
    scales: list[float | None] = field(default_factory=list)
    diverged: bool = False
    _groups: list[dict[str, Any]] = field(default_factory=list)
    _average: float = 0.0
    _backward: list[Tensor] = field(default_factory=list)

    def on_fit_start(self, trainer: Trainer, module: TrainModule) -> None:
        """Pause the schedulers and find the parameter groups."""
        if module.automatic_optimization:
            trainer.pause_schedulers()
        self._groups = [g for optimizer in trainer.optimizers for g in optimizer.param_groups]
        self.scales = self.sweep.scales(self._groups)

    def on_train_step_start(self, trainer: Trainer, module: TrainModule) -> None:
        """Set the rate of the next update."""
        rate = self.sweep.rate(trainer.global_step)
        for group, scale in zip(self._groups, self.scales, strict=True):
            if scale is None:
                continue
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(rate * scale)
            else:
                group["lr"] = rate * scale

    def on_train_batch_start(
        self, trainer: Trainer, module: TrainModule, batch: Any, batch_idx: int
    ) -> None:
        """Drop the losses of the previous micro-batch."""
        self._backward.clear()

    def on_before_backward(self, trainer: Trainer, module: TrainModule, loss: Tensor) -> None:
        """Record the loss, since in manual optimisation the step may not return it."""
        if not module.automatic_optimization:
            self._backward.append(loss.detach())

    def on_train_batch_end(
        self, trainer: Trainer, module: TrainModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Log the loss, which is averaged over micro-batches and processes like other metrics."""
        loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
        if loss is None and self._backward:
            loss = torch.stack([loss.reshape(()).double() for loss in self._backward]).sum()
        if not isinstance(loss, Tensor):
            raise ValueError(
                "lr_find found no loss: training_step returned None and did not call "
                "manual_backward. Return the loss, or a dict with it under 'loss'."
            )
        trainer.metrics.log(_LOSS, loss.detach(), on_step=True, on_epoch=False)

    def on_boundary(self, trainer: Trainer, module: TrainModule) -> None:
        """Read the loss, and stop if the rate has become too large."""
        trainer._fit_run("on_boundary").recorder.flush()  # a range test may wait for the device
        if trainer.global_step == len(self.raw):
            return  # a boundary without an update, in manual optimisation
        loss = float(trainer.callback_metrics[_LOSS])
        if not math.isfinite(loss):
            self.diverged = trainer.should_stop = True
            return
        past = self.sweep.smoothing
        self._average = past * self._average + (1 - past) * loss
        self.raw.append(loss)
        smoothed = self._average / (1 - past ** len(self.raw))
        lowest = min(self.smoothed[_SETTLED:], default=math.inf)
        self.smoothed.append(smoothed)
        threshold = self.sweep.early_stop_threshold
        if threshold is not None and smoothed > lowest + (threshold - 1) * abs(lowest):
            self.diverged = trainer.should_stop = True

    def result(self) -> LearningRateTest:
        """Return the result of the test."""
        return LearningRateTest(
            mode=self.sweep.mode,
            lrs=[self.sweep.rate(step) for step in range(len(self.raw))],
            losses=self.smoothed,
            raw_losses=self.raw,
            scales=self.scales,
            diverged=self.diverged,
        )
