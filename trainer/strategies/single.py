"""One process: the module as it is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from trainer.distributed.agreement import Agreement, Tally
from trainer.strategies.zeros import give_nothing


class SingleDevice:
    """The module on one device; see `trainer.strategies.base.Engine` for the methods.

    Args:
        module: The user's module.
        agreement: Receives the counts of each window.
    """

    def __init__(self, module: nn.Module, agreement: Agreement) -> None:
        self.module = module
        self._agreement = agreement

    def step(self, name: str, *args: Any) -> Any:
        """Call a method of the user's module by name."""
        return getattr(self.module, name)(*args)

    def refuse_unknown(self) -> None:
        """Do nothing: there are no other processes to average with."""

    def begin_epoch(self) -> None:
        """Do nothing: any parameter may be trained."""

    def begin_micro_batch(self, *, sync: bool) -> None:
        """Do nothing: there is nothing to reduce."""

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """Accumulate the gradients of a micro-batch that does not end its window."""
        loss.backward(*args, **kwargs)

    def finish_window(self, loss: Tensor | None, own: Tally) -> float | Tensor:
        """Accumulate the last gradients of a window."""
        if loss is not None:
            loss.backward()
        elif not own.items:  # zero gradients rather than none, as with several processes
            give_nothing(self.module)
        self._agreement.count_alone(own)
        return own.items

    def broadcast_buffers(self) -> None:
        """Do nothing: there are no other processes."""

    def state_dict(self) -> dict[str, Any]:
        """Return an empty state."""
        return {}

    def load_state_dicts(self, saved: Sequence[Mapping[str, Any]]) -> None:
        """Do nothing: there is no state."""

    def close(self) -> None:
        """Do nothing: the module was not wrapped."""
