"""Stochastic weight averaging (SWA): end a fit with the mean of the last epochs' weights."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, get_args

from torch import Tensor

from callbacks.averages import Averages
from callbacks.base import Callback, refuse_manual_optimization
from callbacks.weight_averaging import WeightAveraging
from trainer.checks import check_choice, check_counts, check_numbers, check_positive
from trainer.errors import module_logger

if TYPE_CHECKING:
    from trainer import Trainer, TrainModule

logger = module_logger(__name__)

Strategy = Literal["cos", "linear"]


class StochasticWeightAveraging(Callback):
    """Average the weights of the last epochs, trained with a constant learning rate (SWA).

    From the epoch `swa_epoch_start` on, the module's schedulers are paused, and the learning rates
    are annealed from their current values to `swa_lrs`, as by ``torch.optim.swa_utils.SWALR``. The
    weights at the end of each epoch are added to an equally weighted mean (Izmailov et al.,
    "Averaging Weights Leads to Wider Optima and Better Generalization", 2018).

    When the run ends, the mean replaces the weights. Then the statistics of batch normalisation are
    recomputed by a pass over the training data, like ``swa_utils.update_bn``: `training_step` is
    called without a backward pass, its logged values are dropped, and RNG states, metric objects
    and other buffers are restored. Layers that are not called keep their statistics.

    Validations during the fit use the trained weights, because only for these the batch
    normalisation statistics are correct. The last checkpoint's ``model.safetensors`` holds the
    final mean; earlier checkpoints hold the trained weights. A run can resume exactly from each.
    Put callbacks that may stop the run before this one, so that it recognises the last update.

    Example::

        callback = StochasticWeightAveraging(swa_lrs=1e-2, swa_epoch_start=0.8)
        trainer = Trainer(max_epochs=10, callbacks=[callback])

    Args:
        swa_lrs: The learning rate, or one for each parameter group (of all optimizers in turn).
        swa_epoch_start: The first epoch, counted from 1, or as a fraction of ``max_epochs``.
        annealing_epochs: The number of epochs until the learning rates reach `swa_lrs`; 0 sets them
            at once.
        annealing_strategy: The shape of the annealing, ``"cos"`` or ``"linear"``.
        update_batch_norm: Recompute the statistics of batch normalisation at the end.

    Attributes:
        num_averaged: The number of epochs in the mean.

    Raises:
        ValueError: An argument is invalid; when `fit` begins, if it conflicts with the Trainer or
            the module.
    """

    def __init__(
        self,
        swa_lrs: float | Sequence[float],
        swa_epoch_start: int | float = 0.8,
        annealing_epochs: int = 10,
        annealing_strategy: Strategy = "cos",
        *,
        update_batch_norm: bool = True,
    ) -> None:
        for rate in swa_lrs if isinstance(swa_lrs, Sequence) else [swa_lrs]:
            check_positive(swa_lrs=rate)
        if isinstance(swa_epoch_start, float):  # a fraction of max_epochs
            check_numbers(0, 1, swa_epoch_start=swa_epoch_start)
        else:
            check_numbers(1, swa_epoch_start=swa_epoch_start)
        check_counts(0, annealing_epochs=annealing_epochs)
        check_choice("annealing_strategy", annealing_strategy, get_args(Strategy))
        self.swa_lrs = swa_lrs
        self.swa_epoch_start = swa_epoch_start
        self.annealing_epochs = annealing_epochs
        self.annealing_strategy = annealing_strategy
        self.update_batch_norm = update_batch_norm
        self._module: TrainModule | None = None
        self._begin()

    def _begin(self) -> None:
        self.num_averaged = 0
        self._averages = self._empty()
        self._started: int | None = None  # the epoch, from 0
        self._epoch = -1  # the epoch whose rates are set
        self._rates: list[list[float]] = []  # initial rates of each optimizer's groups

    def _empty(self) -> Averages:
        return Averages(use_buffers=False)

    def state_dict(self) -> dict[str, Any]:
        """Return the mean and the initial learning rates."""
        averages = {} if self._module is None else self._averages.full_precision(self._module)
        return {
            "num_averaged": self.num_averaged,
            "started": self._started,
            "epoch": self._epoch,
            "rates": [list(rates) for rates in self._rates],
            "averages": averages,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the mean and the initial learning rates."""
        self._begin()
        self.num_averaged = state["num_averaged"]
        self._started = state["started"]
        self._epoch = state["epoch"]
        self._rates = [list(rates) for rates in state["rates"]]
        assert self._module is not None  # since `setup`
        self._averages.begin_at(self._module, state["averages"], state["averages"])

    def weights_to_save(
        self, trainer: Trainer, module: TrainModule
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]] | None:
        """Return the final mean for other tools, and the trained weights to resume from."""
        return self._averages.state_dicts(module) if self._averages.swapped_in else None

    def setup(self, trainer: Trainer, module: TrainModule, stage: str) -> None:
        """Reset the mean of an earlier fit."""
        if stage != "fit":
            return
        if any(isinstance(other, WeightAveraging) for other in trainer.callbacks):
            raise ValueError("Use StochasticWeightAveraging or WeightAveraging, not both.")
        self._module = module
        self._begin()

    def on_train_start(self, trainer: Trainer, module: TrainModule) -> None:
        """Check the settings before the first update."""
        refuse_manual_optimization(self, module)
        self._check_number(trainer)
        first = self._first_epoch(trainer)
        never = self._started is None and first >= (trainer.max_epochs or math.inf)
        if never and not trainer.fast_dev_run and trainer.accelerator.is_main_process:
            logger.warning(
                "StochasticWeightAveraging begins in epoch %d, after the end of the run.", first + 1
            )
        if self.update_batch_norm:
            trainer.check_batch_norm()
        if self._started is not None:
            trainer.pause_schedulers()
        if trainer.ending:  # resumed at the last boundary, after this callback's call
            self._finish(trainer, module)

    def on_train_epoch_start(self, trainer: Trainer, module: TrainModule) -> None:
        """Set this epoch's learning rates."""
        epoch = trainer.current_epoch
        if epoch == self._epoch:  # resumed in the middle of it
            return
        self._epoch = epoch
        if self._started is None:
            if epoch < self._first_epoch(trainer):
                return
            self._started = epoch
            self._rates = [[] for _ in trainer.optimizers]
            trainer.pause_schedulers()
        for optimizer, rates in zip(trainer.optimizers, self._rates, strict=True):
            # Another callback may have added a parameter group of unfrozen weights.
            rates += [float(group["lr"]) for group in optimizer.param_groups[len(rates) :]]
        self._check_number(trainer)
        progress = self._annealing_progress(epoch - self._started)
        begins = [rate for rates in self._rates for rate in rates]
        for number, (group, begin) in enumerate(zip(_groups(trainer), begins, strict=True)):
            end = self.swa_lrs[number] if isinstance(self.swa_lrs, Sequence) else self.swa_lrs
            _set_rate(group, end * progress + begin * (1 - progress))

    def on_train_epoch_end(self, trainer: Trainer, module: TrainModule) -> None:
        """Add the weights to the mean."""
        if self._started is not None:
            self._update(module)
            self.num_averaged += 1

    def _update(self, module: TrainModule) -> None:
        self._averages.update(module, 1 / (self.num_averaged + 1))

    def on_boundary(self, trainer: Trainer, module: TrainModule) -> None:
        """Replace the weights by the mean before the last update is saved."""
        if trainer.ending:
            self._finish(trainer, module)

    def on_train_end(self, trainer: Trainer, module: TrainModule) -> None:
        """Replace the weights by the mean if the last boundary was not recognised as the last."""
        self._finish(trainer, module)

    def _finish(self, trainer: Trainer, module: TrainModule) -> None:
        if not self.num_averaged or self._averages.swapped_in:
            return
        self._averages.swap_in(module, keep_buffers=True)
        if self.update_batch_norm:
            trainer.update_batch_norm()

    def _check_number(self, trainer: Trainer) -> None:
        groups = len(_groups(trainer))
        if isinstance(self.swa_lrs, Sequence) and len(self.swa_lrs) != groups:
            raise ValueError(
                f"swa_lrs has {len(self.swa_lrs)} rates for {groups} parameter groups; pass "
                "one rate, or one for each group."
            )

    def _first_epoch(self, trainer: Trainer) -> int:
        """Return the first epoch of the mean, counted from 0."""
        start = self.swa_epoch_start
        if isinstance(start, float):
            if trainer.max_epochs is None:
                raise ValueError(
                    f"swa_epoch_start is {start}, a fraction, but the Trainer has no "
                    "max_epochs. Pass max_epochs, or an epoch as an int."
                )
            start = int(trainer.max_epochs * start)
        return max(int(start) - 1, 0)

    def _annealing_progress(self, epochs: int) -> float:
        """Return the progress of the annealing after this many epochs, from 0 to 1."""
        time = 1.0 if self.annealing_epochs == 0 else min(epochs / self.annealing_epochs, 1.0)
        return time if self.annealing_strategy == "linear" else (1 - math.cos(math.pi * time)) / 2


def _groups(trainer: Trainer) -> list[dict[str, Any]]:
    return [group for optimizer in trainer.optimizers for group in optimizer.param_groups]


def _set_rate(group: dict[str, Any], rate: float) -> None:
    if isinstance(group["lr"], Tensor):  # a captured graph reads the rate from this tensor
        group["lr"].fill_(rate)
    else:
        group["lr"] = rate
