"""One process: the module as it is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from trainer.distributed.step_sync import StepStats, StepSync
from trainer.engines.averaging import give_nothing


class SingleDevice:
    """The module on one device; see `trainer.engines.base.Engine` for the methods.

    Args:
        module: The user's module.
        step_sync: Receives the counts of each window.
    """

    def __init__(self, module: nn.Module, step_sync: StepSync) -> None:
        self.module = module
        self._agreement = step_sync

    def step(self, name: str, *args: Any) -> Any:
        """Call a method of the user's module by name."""
        return getattr(self.module, name)(*args)

    def check_unknown_parameters(self) -> None:
        """Do nothing: there are no other processes to average with."""

    def begin_epoch(self) -> None:
        """Do nothing: any parameter may be trained."""

    def begin_micro_batch(self, *, sync: bool) -> None:
        """Do nothing: there is nothing to reduce."""

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """Accumulate the gradients of a micro-batch that does not end its window."""
        loss.backward(*args, **kwargs)

    def finish_window(self, loss: Tensor | None, own: StepStats) -> float | Tensor:
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
