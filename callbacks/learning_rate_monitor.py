"""Log the learning rates of the optimizers."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

from torch import Tensor

from callbacks.base import Callback
from trainer.checks import suggest_arguments

if TYPE_CHECKING:
    from trainer import Trainer, TrainModule


def _group_names(optimizer_name: str, groups: list[dict[str, Any]]) -> list[str]:
    """Return one name per parameter group; a group's own ``"name"`` replaces its number."""
    if len(groups) == 1 and "name" not in groups[0]:
        return [optimizer_name]
    names = [str(group.get("name", f"pg{index}")) for index, group in enumerate(groups, start=1)]
    twice = [name for name, count in Counter(names).items() if count > 1]
    if twice:
        raise ValueError(
            f"Two parameter groups of {optimizer_name} have the 'name' {twice[0]!r}. Rename one."
        )
    return [f"{optimizer_name}/{name}" for name in names]


class LearningRateMonitor(Callback):
    """Log every parameter group's learning rate at updates whose values are logged (``log_every``).

    A value is named ``lr-<optimizer>``. The optimizer's name is the ``"name"`` that
    ``configure_optimizers`` gives it, else its class, with ``-1``, ``-2`` for further optimizers of
    that class. With several groups, ``/pg1``, ``/pg2`` (or the group's ``"name"``) is added. A
    ``"name"`` in the scheduler's own dict replaces ``lr-<optimizer>``. The value at step *n* is the
    learning rate after *n* steps of the scheduler.

    Example::

        trainer = Trainer(max_epochs=10, callbacks=[LearningRateMonitor(log_momentum=True)])

    Args:
        log_momentum: Also log ``<name>-momentum`` (``betas[0]`` where the optimizer has betas).
        log_weight_decay: Also log ``<name>-weight_decay``.
    """

    @suggest_arguments(logging_interval="nothing: it records as often as the Trainer's log_every")
    def __init__(self, *, log_momentum: bool = False, log_weight_decay: bool = False) -> None:
        self.log_momentum = log_momentum
        self.log_weight_decay = log_weight_decay

    def on_train_step_end(self, trainer: Trainer, module: TrainModule) -> None:
        """Log the learning rates if this update's values will be logged."""
        if trainer.log_due:
            self._log(trainer, module, on_step=True)

    def _log(self, trainer: Trainer, module: TrainModule, *, on_step: bool) -> None:
        # All processes have the same rates. They are logged as a mean, so that they are reduced
        # with the other values. Only rank 0 has weight, since a mean over several ranks may round.
        # The weight is 1, since a batch may have no items.
        weight = float(trainer.accelerator.is_main_process)
        for name, value in self._values(trainer).items():
            # an optimizer that keeps its rate in a tensor changes it in place later
            value = value.detach().clone() if isinstance(value, Tensor) else float(value)
            module.log(name, value, on_step=on_step, on_epoch=not on_step, batch_size=weight)

    def _values(self, trainer: Trainer) -> dict[str, Any]:
        custom = {
            id(getattr(s.scheduler, "optimizer", None)): s.name
            for s in trainer.schedulers
            if s.name
        }
        seen: Counter[str] = Counter()
        values: dict[str, Any] = {}
        for prepared, name_ in zip(trainer.optimizers, trainer.optimizer_names, strict=True):
            optimizer = getattr(prepared, "optimizer", prepared)
            name = custom.get(id(optimizer), f"lr-{name_}")
            seen[name] += 1
            if seen[name] > 1:  # several schedules of one name
                name = f"{name}-{seen[name] - 1}"
            groups = prepared.param_groups
            for key, group in zip(_group_names(name, groups), groups, strict=True):
                values[key] = group["lr"]
                if self.log_momentum:
                    momentum = group.get("momentum", 0.0)
                    values[f"{key}-momentum"] = group["betas"][0] if "betas" in group else momentum
                if self.log_weight_decay:
                    values[f"{key}-weight_decay"] = group.get("weight_decay", 0.0)
        return values
