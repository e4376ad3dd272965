"""The protocol of engines: how a module is run, and how its gradients are reduced."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from torch import Tensor

from trainer.distributed.step_sync import StepStats


class Engine(Protocol):
    """How a module runs; the loops and checkpoints ask it, and never which engine it is."""

    def step(self, name: str, *args: Any) -> Any:
        """Call a method of the user's module by name, through the engine."""

    def begin_epoch(self) -> None:
        """Notice parameters that were frozen or unfrozen, before an epoch's first window."""

    def begin_micro_batch(self, *, sync: bool) -> None:
        """Announce, before the forward pass, whether the next backward ends its window."""

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """Accumulate the gradients of a micro-batch that does not end its window."""

    def finish_window(self, loss: Tensor | None, own: StepStats) -> float | Tensor:
        """Accumulate the last gradients of a window and average them over the processes.

        Args:
            loss: None if this process has no batch in the last micro-batch.
            own: This process's counts for the window.

        Returns:
            The number of items in the window, over all processes.
        """

    def check_unknown_parameters(self) -> None:
        """Check that no gradients were left out of the averaging.

        Raises:
            RuntimeError: Some were, of parameters that the engine does not know.
        """

    def broadcast_buffers(self) -> None:
        """Make rank 0's buffers everybody's, before an evaluation or a save."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state of this process's engine for a checkpoint; empty if it has none."""

    def load_state_dicts(self, saved: Sequence[Mapping[str, Any]]) -> None:
        """Restore the state from those of all processes that saved, in the order of their ranks."""

    def close(self) -> None:
        """Leave the module to other engines, also after a backward pass that has failed."""
