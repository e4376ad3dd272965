"""The optimizer that `prepare` returns."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer

from trainer.precision import Precision
from trainer.state import GradientState


class AcceleratedOptimizer(Optimizer):
    """An optimizer that steps only when the window of accumulated micro-batches is full.

    Parameters, state and groups are the wrapped optimizer's own.

    Args:
        optimizer: The user's optimizer.
        precision: Unscales gradients and skips updates that overflowed.
        reduce: Called with the wrapped optimizer before each update, where nothing else averages
            its gradients over the processes.

    Attributes:
        optimizer: The user's optimizer.
        step_was_skipped: The last ``step`` left the parameters as they were, since their
            gradients had overflowed.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        *,
        precision: Precision,
        reduce: Callable[[Optimizer], None] | None = None,
    ) -> None:
        # Not Optimizer.__init__: there is one set of parameters, and it is the wrapped one's.
        self.optimizer = optimizer
        self._precision = precision
        self._reduce = reduce
        self._reduced = False
        self._gradient_state = GradientState()
        self.step_was_skipped = False
        self.steps = 0

    def __getattr__(self, name: str) -> Any:
        # What is not here is the wrapped optimizer's: its hooks, its own attributes.
        if name == "optimizer":  # asked for while unpickling, before there is one
            raise AttributeError(name)
        return getattr(self.optimizer, name)

    def __getstate__(self) -> dict[str, Any]:
        # Without what the process shares: a copy of it would be another one.
        return {k: v for k, v in vars(self).items() if k != "_gradient_state"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, _gradient_state=GradientState())

    @property
    def state(self) -> Any:  # type: ignore[override]  # a plain attribute in torch
        """The wrapped optimizer's state."""
        return self.optimizer.state

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]  # as above
        """The wrapped optimizer's groups."""
        return self.optimizer.param_groups

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]  # as above
        """The wrapped optimizer's defaults."""
        return self.optimizer.defaults

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group to the wrapped optimizer."""
        self.optimizer.add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        """The wrapped optimizer's state dict."""
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the wrapped optimizer's state dict."""
        self.optimizer.load_state_dict(state_dict)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients, unless the window goes on."""
        if self._gradient_state.sync_gradients:
            self._reduced = False
            self.optimizer.zero_grad(set_to_none)

    def synchronize(self) -> None:
        """Average the gradients over the processes, once an update: before clipping, say."""
        if self._reduce is not None and not self._reduced:
            self._reduce(self.optimizer)
            self._reduced = True

    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Make an update, unless the window goes on."""
        if not self._gradient_state.sync_gradients:
            return
        self.synchronize()
        self.step_was_skipped = not self._precision.step(self.optimizer, closure)
        self._reduced = False
        self.steps += 1

    def train(self) -> None:
        """Switch a schedule-free optimizer to its training point."""
        if callable(switch := getattr(self.optimizer, "train", None)):
            switch()

    def eval(self) -> None:
        """Switch a schedule-free optimizer to its evaluation point."""
        if callable(switch := getattr(self.optimizer, "eval", None)):
            switch()

    def __repr__(self) -> str:
        return f"AcceleratedOptimizer({self.optimizer!r})"


def parameters_of(optimizers: list[Optimizer]) -> list[torch.nn.Parameter]:
    """Every parameter of the optimizers, once, in order."""
    unique: dict[int, torch.nn.Parameter] = {}
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                unique.setdefault(id(parameter), parameter)
    return list(unique.values())
