"""Exponential moving average (EMA) of the weights, for evaluation and checkpoints."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, get_args

from callbacks.averages import Averages
from callbacks.base import Callback
from trainer.checks import check_choice, check_counts, check_numbers, given, suggest_arguments
from trainer.errors import module_logger

if TYPE_CHECKING:
    from torch import Tensor

    from trainer import Trainer, TrainModule

logger = module_logger(__name__)

Final = Literal["average", "trained"]


class WeightAveraging(Callback):
    """Keep an exponential moving average (EMA) of the weights, with a decay of 0.999 by default.

    After an optimizer step the average becomes ``decay * average + (1 - decay) * weights``; the
    first average is the weights themselves. During each validation of the fit, the averages are
    swapped with the weights. In checkpoints, ``model.safetensors`` holds the averages, for
    ``load_from_checkpoint``, ``ckpt_path`` of `test` and other tools. ``trained.safetensors`` holds
    the exact trained weights, from which a run resumes, with or without this callback. Outside a
    fit, `validate`, `test` and `predict` use the module's current weights.

    It needs memory for one copy of the trained weights (float32 for 16-bit weights).

    Example::

        callback = WeightAveraging(decay=0.9999, decay_warmup=True)
        trainer = Trainer(max_epochs=10, callbacks=[callback])

    Args:
        decay: The weight of the old average at each update, from 0 to 1; 0.999 averages over about
            the last 1000 updates.
        decay_warmup: Begin with a smaller decay, ``min(decay, (1 + n) / (10 + n))`` after *n*
            updates of the average, so that early weights are forgotten sooner (the rule of
            TensorFlow's ``ExponentialMovingAverage`` with ``num_updates``).
        update_every_n_steps: The number of optimizer steps between updates of the average.
        update_starting_at_step: The first ``global_step`` at which to update the average; before,
            the trained weights are used.
        update_starting_at_epoch: The first epoch, counted from 0, in which to update the average.
            If both are given, both must be reached.
        use_buffers: Also average floating-point buffers, such as the statistics of batch
            normalisation. False uses the buffers of the trained model. Pass False if weights are
            pruned in several steps, because a pruning mask is a buffer too.
        final_weights: The weights that the module has after the fit, ``"average"`` or
            ``"trained"``.

    Attributes:
        num_updates: The number of updates of the average.

    Raises:
        ValueError: An argument is invalid.
    """

    @suggest_arguments(
        avg_fn="nothing: the average is decay * average + (1 - decay) * weights",
        multi_avg_fn="nothing: the average is decay * average + (1 - decay) * weights",
        device="nothing: the average is on the device of the weights",
        ema_decay="decay=0.999",
    )
    def __init__(
        self,
        decay: float = 0.999,
        *,
        decay_warmup: bool = False,
        update_every_n_steps: int = 1,
        update_starting_at_step: int | None = None,
        update_starting_at_epoch: int | None = None,
        use_buffers: bool = True,
        final_weights: Final = "average",
    ) -> None:
        check_numbers(0, 1, decay=decay)
        check_counts(1, update_every_n_steps=update_every_n_steps)
        starts = given(
            update_starting_at_step=update_starting_at_step,
            update_starting_at_epoch=update_starting_at_epoch,
        )
        check_counts(0, **starts)
        check_choice("final_weights", final_weights, get_args(Final))
        self.decay = decay
        self.decay_warmup = decay_warmup
        self.update_every_n_steps = update_every_n_steps
        self.update_starting_at_step = update_starting_at_step
        self.update_starting_at_epoch = update_starting_at_epoch
        self.use_buffers = use_buffers
        self.final_weights = final_weights
        self._module: TrainModule | None = None
        self._fitting = self._evaluating = False
        self._begin()

    def _begin(self) -> None:
        self.num_updates = 0
        self._averages = self._empty()
        self._seen_step = 0  # in manual optimisation not every training_step steps

    def _empty(self) -> Averages:
        return Averages(use_buffers=self.use_buffers)

    @property
    def state_key(self) -> str:
        """A key without the decay, which a resumed run may change."""
        return WeightAveraging.__qualname__

    def state_dict(self) -> dict[str, Any]:
        """Return the state that is stored in addition to the checkpoint's weights."""
        if self._module is None or not self.num_updates:
            return {"num_updates": 0}
        return {
            "num_updates": self.num_updates,
            "names": list(self._averages.full_precision(self._module)),
            "exact": self._averages.full_precision(self._module, only_narrow=True),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the averages from the module, which holds them when this is called."""
        self._begin()
        self.num_updates = state["num_updates"]
        if self.num_updates:
            assert self._module is not None  # since `setup`
            self._averages.begin_at(self._module, state["names"], state["exact"])

    def weights_to_save(
        self, trainer: Trainer, module: TrainModule
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]] | None:
        """Return the averages for other tools, and the trained weights to resume from."""
        return self._averages.state_dicts(module) if self.num_updates else None

    def setup(self, trainer: Trainer, module: TrainModule, stage: str) -> None:
        """Reset the averages of an earlier fit."""
        self._fitting = stage == "fit"
        if self._fitting:
            self._module = module
            self._begin()

    def on_train_start(self, trainer: Trainer, module: TrainModule) -> None:
        """Record the current step."""
        self._seen_step = trainer.global_step

    def on_train_step_end(self, trainer: Trainer, module: TrainModule) -> None:
        """Update the average if due."""
        if trainer.global_step != self._seen_step:
            self._seen_step = trainer.global_step
            if self._is_due(trainer):
                self._update(module)

    def _is_due(self, trainer: Trainer) -> bool:
        """Return whether to update the average after this optimizer step."""
        step = trainer.global_step
        return (
            step % self.update_every_n_steps == 0
            and step >= (self.update_starting_at_step or 0)
            and trainer.current_epoch >= (self.update_starting_at_epoch or 0)
        )

    def _update(self, module: TrainModule) -> None:
        decay, n = self.decay, self.num_updates
        if self.decay_warmup:
            decay = min(decay, (1 + n) / (10 + n))
        self._averages.update(module, 1 - decay)
        self.num_updates += 1

    def on_validation_start(self, trainer: Trainer, module: TrainModule) -> None:
        """Swap the averages in."""
        if self._fitting and self.num_updates:
            self._swap_in(trainer, module)
            self._evaluating = True

    def on_validation_end(self, trainer: Trainer, module: TrainModule) -> None:
        """Swap the trained weights back in."""
        self._end_evaluation(module)

    def on_exception(self, trainer: Trainer, module: TrainModule, exception: BaseException) -> None:
        """Swap the trained weights back in if a validation raised, since they may be saved."""
        self._end_evaluation(module)

    def on_train_end(self, trainer: Trainer, module: TrainModule) -> None:
        """Leave the module with the ``final_weights``."""
        if not (self.num_updates or trainer.fast_dev_run) and trainer.accelerator.is_main_process:
            logger.warning(
                "WeightAveraging averaged no weights: the run ended before update_starting_at_step,"
                " update_starting_at_epoch or update_every_n_steps was reached."
            )
        if self.final_weights == "average" and self.num_updates:
            self._swap_in(trainer, module)

    def teardown(self, trainer: Trainer, module: TrainModule, stage: str) -> None:
        """Swap the trained weights back in after an interrupted validation; keep the averages."""
        self._end_evaluation(module)
        self._fitting = False

    def _swap_in(self, trainer: Trainer, module: TrainModule) -> None:
        self._averages.swap_in(module)
        if self._averages.use_buffers:  # each process averages its own buffers; rank 0's are used
            trainer.broadcast_buffers()

    def _end_evaluation(self, module: TrainModule) -> None:
        if self._evaluating:
            self._averages.swap_out(module)
            self._evaluating = False


class EMA(WeightAveraging):
    """`WeightAveraging` under its usual name.

    It is a class and not an alias, so that a configuration file can use its short name.

    Example::

        trainer = Trainer(max_epochs=10, callbacks=[EMA(decay=0.9999)])
    """

    @property
    def state_key(self) -> str:
        """The key of `WeightAveraging`, because the state is the same."""
        return WeightAveraging.__qualname__
