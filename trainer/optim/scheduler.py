"""The scheduler that `Accelerator.prepare` returns."""

from __future__ import annotations

from typing import Any

from torch.optim.lr_scheduler import LRScheduler

from trainer.optim.optimizer import AcceleratedOptimizer
from trainer.state import GradientState, PartialState


class AcceleratedScheduler:
    """A scheduler that follows the updates its optimizers really made.

    ``step()`` does nothing while a window of micro-batches goes on, or when an update was
    skipped. Otherwise it advances once (``tick="update"``) or once a process
    (``tick="process"``): scripts written for the documented API count the schedule in batches of
    one process, and expect the second.

    Args:
        scheduler: The user's scheduler.
        optimizers: The prepared optimizers that it belongs to.
        step_with_optimizer: False advances once a call, whatever the optimizers do.
        tick: ``"process"`` or ``"update"``.

    Attributes:
        scheduler: The user's scheduler.
    """

    def __init__(
        self,
        scheduler: LRScheduler,
        optimizers: list[AcceleratedOptimizer],
        *,
        step_with_optimizer: bool = True,
        tick: str = "process",
    ) -> None:
        self.scheduler = scheduler
        self.optimizers = optimizers
        self.step_with_optimizer = step_with_optimizer
        self.tick = tick
        self._gradient_state = GradientState()

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Advance the schedule, if an update was made."""
        if not self.step_with_optimizer:
            self.scheduler.step(*args, **kwargs)
            return
        if not self._gradient_state.sync_gradients:
            return
        if any(optimizer.step_was_skipped for optimizer in self.optimizers):
            return
        ticks = PartialState().num_processes if self.tick == "process" else 1
        end = getattr(self.scheduler, "total_steps", None)
        for _ in range(ticks):
            if end is None or self.scheduler.last_epoch < end - 1:  # OneCycleLR raises past its end
                self.scheduler.step(*args, **kwargs)

    def get_last_lr(self) -> list[Any]:
        """The learning rate of each group."""
        return self.scheduler.get_last_lr()

    def state_dict(self) -> dict[str, Any]:
        """The wrapped scheduler's state dict."""
        return self.scheduler.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the wrapped scheduler's state dict."""
        self.scheduler.load_state_dict(state_dict)
