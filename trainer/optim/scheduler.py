"""The scheduler that `Accelerator.prepare` returns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch.optim.lr_scheduler import LRScheduler

from trainer.optim.optimizer import AcceleratedOptimizer
from trainer.state import GradientState, PartialState


def is_at_end(scheduler: Any) -> bool:
    """Return whether a scheduler has reached `total_steps`; a further step of OneCycleLR raises."""
    end = getattr(scheduler, "total_steps", None)
    return end is not None and scheduler.last_epoch >= end - 1


class AcceleratedScheduler:
    """A learning rate scheduler that advances only with updates that its optimizers have made.

    ``step()`` does nothing inside a gradient accumulation window, or if the update was skipped.
    Otherwise it advances once (``tick="update"``), or once per process (``tick="process"``).
    Scripts written for Accelerate's API expect the latter, since they count the schedule in batches
    of one process. With `split_batches` it advances once, since the processes share each batch.
    With ``tick=None`` it does nothing: the engine has advanced the schedule, as its library does.
    Other attributes, such as ``base_lrs`` and ``get_lr``, are those of the user's scheduler.

    Args:
        scheduler: The user's scheduler.
        optimizers: The prepared optimizers to which it belongs, or a single one.
        step_with_optimizer: Whether ``step()`` depends on the optimizers. If False, it advances
            once per call.
        split_batches: Whether each batch of the loader is split among the processes.
        tick: ``"process"``, ``"update"`` or None.
        processes: The number of processes that read different data; None means all.

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
        tick: str | None = "process",
        processes: int | None = None,
    ) -> None:
        self.scheduler = scheduler
        if isinstance(optimizers, AcceleratedOptimizer):
            optimizers = [optimizers]
        self.optimizers = list(optimizers)
        self.step_with_optimizer = step_with_optimizer
        self.split_batches = split_batches
        self.tick, self.processes = tick, processes
        self._gradient_state = GradientState()

    def __getattr__(self, name: str) -> Any:
        if name == "scheduler":  # looked up while unpickling, before it is set
            raise AttributeError(name)
        return getattr(self.scheduler, name)

    def __getstate__(self) -> dict[str, Any]:
        # Without `GradientState`, which is shared in the process and must not be copied.
        return {k: v for k, v in vars(self).items() if k != "_gradient_state"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, _gradient_state=GradientState())

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Advance the schedule, if an update was made.

        Args:
            *args: Arguments of the user's scheduler, such as a metric for ``ReduceLROnPlateau``.
                With arguments it advances only once, so that a metric does not count several times.
            **kwargs: Keyword arguments of the user's scheduler, with the same effect.
        """
        if self.tick is None:
            return
        if not self.step_with_optimizer:
            self.scheduler.step(*args, **kwargs)
            return
        if not self._gradient_state.sync_gradients:
            self._count_waiting()
            return
        if any(optimizer.step_was_skipped for optimizer in self.optimizers):
            return
        once = self.tick == "update" or self.split_batches or args or kwargs
        for _ in range(1 if once else self.processes or PartialState().num_processes):
            if not is_at_end(self.scheduler):
                self.scheduler.step(*args, **kwargs)

    def _count_waiting(self) -> None:
        """Increment the scheduler's `_step_count` inside a window, if `adjust_scheduler` is set."""
        counted = hasattr(self.scheduler, "_step_count")
        if counted and self._gradient_state.adjust_scheduler:
            self.scheduler._step_count += 1

    def get_last_lr(self) -> list[Any]:
        """Return the current learning rate of each parameter group."""
        return self.scheduler.get_last_lr()

    def state_dict(self) -> dict[str, Any]:
        """Return the wrapped scheduler's state dict."""
        return self.scheduler.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the wrapped scheduler's state dict."""
        self.scheduler.load_state_dict(state_dict)
