"""One process: the module as it is."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from trainer.distributed.agreement import Agreement, Tally
from trainer.strategies.zeros import give_nothing


class SingleDevice:
    """The module on one device; the interface of every engine.

    Args:
        module: The user's module.
        agreement: Receives the counts of each window.
    """

    def __init__(self, module: nn.Module, agreement: Agreement) -> None:
        self.module = module
        self._agreement = agreement

    def step(self, name: str, *args: Any) -> Any:
        """Call a method of the user's module by name, through the engine."""
        return getattr(self.module, name)(*args)

    def refuse_unknown(self) -> None:
        """Do nothing: there are no other processes to average with."""

    def begin_epoch(self) -> None:
        """Notice parameters that were frozen or unfrozen."""

    def begin_micro_batch(self, *, sync: bool) -> None:
        """Announce, before the forward pass, whether the next backward ends its window."""

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """Accumulate the gradients of a micro-batch that does not end its window."""
        loss.backward(*args, **kwargs)

    def finish_window(self, loss: Tensor | None, own: Tally) -> float | Tensor:
        """Accumulate the last gradients of a window and average them over the processes.

        Args:
            loss: None if this process has no batch in the last micro-batch.
            own: This process's counts for the window.

        Returns:
            The number of items in the window, over all processes.
        """
        if loss is not None:
            loss.backward()
        elif not own.items:  # zero gradients rather than none, as with several processes
            give_nothing(self.module)
        self._agreement.count_alone(own)
        return own.items

    def broadcast_buffers(self) -> None:
        """Broadcast rank 0's buffers, before an evaluation or a save."""

    def close(self) -> None:
        """Leave the module to other engines, also after a backward pass that has failed."""
