"""Change the number of micro-batches per update at given epochs."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from typing import TYPE_CHECKING

from callbacks.base import Callback, refuse_manual_optimization
from trainer.checks import check_counts

if TYPE_CHECKING:
    from trainer import Trainer, TrainModule


class GradientAccumulationScheduler(Callback):
    """Change ``gradient_accumulation_steps`` at the beginning of given epochs.

    ``GradientAccumulationScheduler({0: 8, 4: 4, 8: 1})`` makes an update from every 8 micro-batches
    in epochs 0 to 3, from every 4 in epochs 4 to 7, and from each micro-batch from epoch 8 on.
    Without an entry for epoch 0, the Trainer's own ``gradient_accumulation_steps`` applies until
    the first entry. The gradient is the mean over the whole window, whatever its length; the
    learning rate is not changed.

    Example::

        callback = GradientAccumulationScheduler({0: 8, 4: 4, 8: 1})
        trainer = Trainer(max_epochs=10, callbacks=[callback])

    Args:
        scheduling: A dict from epoch (from 0) to the number of micro-batches per process and update
            from that epoch on.

    Raises:
        ValueError: ``scheduling`` is not a dict or is empty, an epoch is below 0 or a number of
            micro-batches below 1; in ``fit``, if the module uses manual optimisation.
        TypeError: An epoch or a number of micro-batches is not an int.
    """

    def __init__(self, scheduling: Mapping[int, int]) -> None:
        if not isinstance(scheduling, Mapping) or not scheduling:
            raise ValueError(f"scheduling is {scheduling!r}; it must be a dict such as {{0: 8}}.")
        for epoch, steps in scheduling.items():
            check_counts(0, **{f"the epoch {epoch!r} of scheduling": epoch})
            check_counts(1, **{f"scheduling[{epoch!r}]": steps})
        self.scheduling = {int(at): int(steps) for at, steps in sorted(scheduling.items())}

    def steps_in(self, epoch: int, otherwise: int) -> int:
        """Return the micro-batches per update in an epoch, or ``otherwise`` before any entry."""
        index = bisect_right(list(self.scheduling), epoch)
        return list(self.scheduling.values())[index - 1] if index else otherwise

    def setup(self, trainer: Trainer, module: TrainModule, stage: str) -> None:
        """Raise for manual optimisation, in which the module decides when to step."""
        if stage == "fit":
            refuse_manual_optimization(self, module)

    def on_train_epoch_start(self, trainer: Trainer, module: TrainModule) -> None:
        """Set the number for this epoch; it depends only on the epoch, so no state is saved."""
        now = trainer.gradient_accumulation_steps  # before the first entry, the Trainer's argument
        trainer.gradient_accumulation_steps = self.steps_in(trainer.current_epoch, now)

    on_train_start = on_train_epoch_start  # a run that resumes inside an epoch does not start it
