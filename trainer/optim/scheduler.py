"""The scheduler that `Accelerator.prepare` returns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch.optim.lr_scheduler import LRScheduler

from trainer.optim.optimizer import AcceleratedOptimizer
from trainer.state import GradientState, PartialState


class AcceleratedScheduler:
    """A scheduler that follows the updates its optimizers really made.

    ``step()`` does nothing while a window of micro-batches goes on, or when an update was
    skipped. Otherwise it advances once (``tick="update"``) or once a process
    (``tick="process"``): scripts written for the documented API count the schedule in batches of
    one process, and expect the second. Where the processes divide one batch there is only one to
    count. What is not here is the user's scheduler's own: ``base_lrs``, ``get_lr``, ``print_lr``.

    Args:
        scheduler: The user's scheduler.
        optimizers: The prepared optimizers that it belongs to, or one.
        step_with_optimizer: False advances once a call, whatever the optimizers do.
        split_batches: The processes divide one batch among them.
        tick: ``"process"`` or ``"update"``.

    Attributes:
        scheduler: The user's scheduler.
    """

    def __init__(
        self,
        scheduler: LRScheduler,
        optimizers: AcceleratedOptimizer | Sequence[AcceleratedOptimizer],
        step_with_optimizer: bool = True,
        split_batches: bool = False,
        *,
        tick: str = "process",
    ) -> None:
        self.scheduler = scheduler
        one = isinstance(optimizers, AcceleratedOptimizer)
        self.optimizers: list[AcceleratedOptimizer] = [optimizers] if one else list(optimizers)  # type: ignore[list-item]
        self.step_with_optimizer = step_with_optimizer
        self.split_batches = split_batches
        self.tick = tick
        self._gradient_state = GradientState()

    def __getattr__(self, name: str) -> Any:
        if name == "scheduler":  # asked for while unpickling, before there is one
            raise AttributeError(name)
        return getattr(self.scheduler, name)

    def __getstate__(self) -> dict[str, Any]:
        # Without what the process shares: a copy of it would be another one.
        return {k: v for k, v in vars(self).items() if k != "_gradient_state"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, _gradient_state=GradientState())

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Advance the schedule, if an update was made.

        Args:
            *args: What the user's scheduler takes: a metric for ``ReduceLROnPlateau``. With any
                it advances once, since the same value is no second one.
            **kwargs: The same.
        """
        if not self.step_with_optimizer:
            self.scheduler.step(*args, **kwargs)
            return
        if not self._gradient_state.sync_gradients:
            self._count_waiting()
            return
        if any(optimizer.step_was_skipped for optimizer in self.optimizers):
            return
        once = self.tick == "update" or self.split_batches or args or kwargs
        end = getattr(self.scheduler, "total_steps", None)
        for _ in range(1 if once else PartialState().num_processes):
            if end is None or self.scheduler.last_epoch < end - 1:  # OneCycleLR raises past its end
                self.scheduler.step(*args, **kwargs)

    def _count_waiting(self) -> None:
        """Count a call within a window as torch counts those that advance, if it is to be."""
        counted = hasattr(self.scheduler, "_step_count")
        if counted and self._gradient_state.adjust_scheduler:
            self.scheduler._step_count += 1

    def get_last_lr(self) -> list[Any]:
        """The learning rate of each group."""
        return self.scheduler.get_last_lr()

    def state_dict(self) -> dict[str, Any]:
        """The wrapped scheduler's state dict."""
        return self.scheduler.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the wrapped scheduler's state dict."""
        self.scheduler.load_state_dict(state_dict)
