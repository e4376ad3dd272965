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
        agreement: Told the numbers of each window.
    """

    def __init__(self, module: nn.Module, agreement: Agreement) -> None:
        self.module = module
        self._agreement = agreement

    def step(self, name: str, *args: Any) -> Any:
        """Call a method of the user's module by its name, through the engine."""
        return getattr(self.module, name)(*args)

    def refuse_unknown(self) -> None:
        """Nothing: there is nobody to average with."""

    def begin_epoch(self) -> None:
        """Take note of parameters that were frozen or unfrozen."""

    def begin_micro_batch(self, *, sync: bool) -> None:
        """Say whether the coming backward ends its window, before the forward pass."""

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """Add the gradients of a micro-batch that does not end its window."""
        loss.backward(*args, **kwargs)

    def finish_window(self, loss: Tensor | None, own: Tally) -> float | Tensor:
        """Add the last gradients of a window and make them those of all processes.

        Args:
            loss: None if this process's last micro-batch has nothing to add.
            own: This process's numbers of the window.

        Returns:
            The window's items over all processes.
        """
        if loss is not None:
            loss.backward()
        elif not own.items:  # the gradient is zero, as among several processes, and not missing
            give_nothing(self.module)
        self._agreement.count_alone(own)
        return own.items

    def broadcast_buffers(self) -> None:
        """Make rank 0's buffers everybody's, before an evaluation or a save."""
