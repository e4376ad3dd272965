"""The scheduler that `Accelerator.prepare` returns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch.optim.lr_scheduler import LRScheduler

from trainer.optim.optimizer import AcceleratedOptimizer
from trainer.state import GradientState, PartialState


def is_at_end(scheduler: Any) -> bool:
    """Return whether a schedule has reached its last step, past which OneCycleLR raises."""
    end = getattr(scheduler, "total_steps", None)
    return end is not None and scheduler.last_epoch >= end - 1


class AcceleratedScheduler:
    """A scheduler that advances with the updates its optimizers actually made.

    ``step()`` does nothing inside a window of micro-batches, or when an update was skipped.
    Otherwise it advances once (``tick="update"``) or once for each process (``tick="process"``):
    scripts written for the documented API count the schedule in batches of one process, and expect
    the latter. With `split_batches` the processes share one batch, which counts once. Other
    attributes are the user's scheduler's: ``base_lrs``, ``get_lr``, ``print_lr``.

    Args:
        scheduler: The user's scheduler.
        optimizers: The prepared optimizers that it belongs to, or one.
        step_with_optimizer: False advances once per call, whatever the optimizers do.
        split_batches: The processes divide each batch among them.
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
        if isinstance(optimizers, AcceleratedOptimizer):
            optimizers = [optimizers]
        self.optimizers = list(optimizers)
        self.step_with_optimizer = step_with_optimizer
        self.split_batches = split_batches
        self.tick = tick
        self._gradient_state = GradientState()

    def __getattr__(self, name: str) -> Any:
        if name == "scheduler":  # looked up while unpickling, before it is set
            raise AttributeError(name)
        return getattr(self.scheduler, name)

    def __getstate__(self) -> dict[str, Any]:
        # Without the process's shared state, which must not be copied.
        return {k: v for k, v in vars(self).items() if k != "_gradient_state"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, _gradient_state=GradientState())

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Advance the schedule, if an update was made.

        Args:
            *args: Arguments of the user's scheduler: a metric for ``ReduceLROnPlateau``. With any
                argument it advances once, since the same metric must not count several times.
            **kwargs: Keyword arguments of the user's scheduler, with the same effect.
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
        for _ in range(1 if once else PartialState().num_processes):
            if not is_at_end(self.scheduler):
                self.scheduler.step(*args, **kwargs)

    def _count_waiting(self) -> None:
        """Increment torch's count of steps for a call inside a window, if `adjust_scheduler`."""
        counted = hasattr(self.scheduler, "_step_count")
        if counted and self._gradient_state.adjust_scheduler:
            self.scheduler._step_count += 1

    def get_last_lr(self) -> list[Any]:
        """Return the learning rate of each group."""
        return self.scheduler.get_last_lr()

    def state_dict(self) -> dict[str, Any]:
        """Return the wrapped scheduler's state dict."""
        return self.scheduler.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the wrapped scheduler's state dict."""
        self.scheduler.load_state_dict(state_dict)
