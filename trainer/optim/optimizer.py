"""The optimizer that `prepare` returns."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from numbers import Real
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from trainer.distributed.collectives import reduce as reduce_
from trainer.optim.bare_step import step
from trainer.optim.lomo import is_lomo
from trainer.optim.state import place_state
from trainer.precision import Precision
from trainer.state import GradientState, PartialState

# What belongs to one object in one process: state that the process shares, and the `step` that a
# torch scheduler puts before the class's own, which would go on stepping the original of a copy.
_NOT_COPIED = ("_gradient_state", "step", "before_step")


class AcceleratedOptimizer(Optimizer):
    """An optimizer that steps only when the window of accumulated micro-batches is full.

    Parameters, state and groups are the wrapped optimizer's own.

    Args:
        optimizer: The user's optimizer.
        device_placement: Move its state to its parameters' devices.
        precision: Unscales gradients and skips updates that overflowed.
        reduce: Called with the wrapped optimizer before each update, where nothing else averages
            its gradients over the processes.

    Attributes:
        optimizer: The user's optimizer.
        steps: How many updates were asked for at the end of a window, made or skipped.
        before_step: Called with this optimizer before each update, when its gradients are averaged
            and unscaled; with a closure, whenever that has computed them.
        weightless: This process has no batch; the losses of closures count as zero.
    """

    before_step: Callable[[AcceleratedOptimizer], None] | None = None
    weightless = False

    def __init__(
        self,
        optimizer: Optimizer,
        device_placement: bool = True,
        *,
        precision: Precision,
        reduce: Callable[[Optimizer], None] | None = None,
    ) -> None:
        # Not Optimizer.__init__: there is one set of parameters, and it is the wrapped one's.
        self.optimizer = optimizer
        self._precision = precision
        precision.watch(optimizer)
        self._reduce = reduce
        self._reduced = False
        self._gradient_state = GradientState()
        self._skipped: bool | Tensor = False
        self._takes_set_to_none = _takes(optimizer.zero_grad, "set_to_none")
        self._updates_in_backward = is_lomo(optimizer)
        self.steps = 0
        if device_placement:
            place_state(optimizer)

    def __getattr__(self, name: str) -> Any:
        # What is not here is the wrapped optimizer's: its hooks, its own attributes.
        if name == "optimizer":  # asked for while unpickling, before there is one
            raise AttributeError(name)
        return getattr(self.optimizer, name)

    def __getstate__(self) -> dict[str, Any]:
        return {k: v for k, v in vars(self).items() if k not in _NOT_COPIED}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, _gradient_state=GradientState())
        self._precision.watch(self.optimizer)

    @property
    def state(self) -> Any:
        """The wrapped optimizer's state."""
        return self.optimizer.state

    @state.setter
    def state(self, state: Any) -> None:
        self.optimizer.state = state

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The wrapped optimizer's groups."""
        return self.optimizer.param_groups

    @param_groups.setter
    def param_groups(self, param_groups: list[dict[str, Any]]) -> None:
        self.optimizer.param_groups = param_groups

    @property
    def defaults(self) -> dict[str, Any]:
        """The wrapped optimizer's defaults."""
        return self.optimizer.defaults

    @defaults.setter
    def defaults(self, defaults: dict[str, Any]) -> None:
        self.optimizer.defaults = defaults

    @property
    def step_was_skipped(self) -> bool:
        """The last ``step`` left the parameters alone, since their gradients had overflowed.

        Of a fused optimizer on an accelerator, reading it waits for the device.
        """
        self._skipped = bool(self._skipped)
        return self._skipped

    @property
    def scaler(self) -> torch.amp.GradScaler | None:
        """The gradient scaler of fp16; None in other precisions."""
        return self._precision.scaler

    @property
    def is_overflow(self) -> bool:
        """The earlier name of `step_was_skipped`."""
        warnings.warn(
            "is_overflow is the earlier name of step_was_skipped; use that.",
            FutureWarning,
            stacklevel=2,
        )
        return self.step_was_skipped

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group to the wrapped optimizer."""
        self.optimizer.add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        """The wrapped optimizer's state dict."""
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the wrapped optimizer's state dict."""
        self.optimizer.load_state_dict(state_dict)

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Drop the gradients, unless the window goes on.

        Args:
            set_to_none: None is True, where the wrapped optimizer knows the argument.

        Raises:
            ValueError: It is given, and the wrapped optimizer does not know it.
        """
        if not self._takes_set_to_none and set_to_none is not None:
            raise ValueError(
                f"zero_grad was called with set_to_none={set_to_none}, which "
                f"{type(self.optimizer).__name__}.zero_grad does not take; leave it out."
            )
        if not self._gradient_state.sync_gradients:
            return
        self._reduced = False
        zero = getattr(self.optimizer.zero_grad, "__func__", None)
        if zero is Optimizer.zero_grad and set_to_none is not False:
            # The same without what a profile is told, which takes longer than small models.
            for group in self.optimizer.param_groups:
                for parameter in group["params"]:
                    parameter.grad = None
        elif self._takes_set_to_none:
            self.optimizer.zero_grad(set_to_none=set_to_none is not False)
        else:
            self.optimizer.zero_grad()

    def synchronize(self) -> None:
        """Average the gradients over the processes, once an update: before clipping, say."""
        if self._reduce is not None and not self._reduced:
            self._reduce(self.optimizer)
            self._reduced = True

    def note_backward(self) -> None:
        """Gradients are about to be added that the processes have not averaged yet."""
        self._reduced = False

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Make an update, unless the window goes on.

        A LOMO optimizer has made it during backward.

        Args:
            closure: Evaluates the loss anew and calls backward, for optimizers such as LBFGS.

        Returns:
            What the wrapped optimizer does: of torch's the loss of the closure, None without one.

        Raises:
            ValueError: A closure is given in the middle of a window, where it would never run; or
                with ``mixed_precision="fp16"``.
        """
        if not self._gradient_state.sync_gradients:
            if closure is not None:
                raise ValueError(
                    "step was called with a closure in the middle of a window of micro-batches, "
                    "whose gradients it would never compute. Use gradient_accumulation_steps=1 "
                    "and a closure over the whole batch, or call backward and then step() without "
                    "a closure."
                )
            self._note_call()
            return None
        returned = None
        if not self._updates_in_backward:
            if self._reduce is not None and closure is not None:
                closure = partial(self._call_together, closure)
            elif self._reduce is not None:
                self.synchronize()
            if self.before_step is not None and closure is not None:
                closure = _followed_by(closure, partial(self.before_step, self))
            elif self.before_step is not None:
                self._precision.unscale(self.optimizer)
                self.before_step(self)
            if self._precision.scales:
                made = self._precision.step(self.optimizer, closure)
                self._skipped = ~made if isinstance(made, Tensor) else not made
            else:
                returned = step(self.optimizer, closure)
                self._skipped = False
        self._note_call()
        self._reduced = False
        self.steps += 1
        return returned

    def _call_together(self, closure: Callable[[], Any]) -> Any:
        """Call a closure for gradients and a loss that are the mean over the processes.

        By the loss, too, an optimizer decides how often it calls the closure.

        Raises:
            TypeError: What the closure returned has no mean: it is no loss, nor None.
        """
        self._reduced = False
        loss = closure()
        number = isinstance(loss, Real)
        one = isinstance(loss, Tensor) and loss.is_floating_point() and loss.numel() == 1
        if not (loss is None or number or one):
            raise TypeError(
                f"The closure that was given to step of {type(self.optimizer).__name__} returned "
                f"{loss!r} of type {type(loss).__name__}; among several processes, which take its "
                "mean, it must return the loss: a number or a floating-point tensor of one "
                "element, or None."
            )
        self.synchronize()
        if loss is None:
            return None
        # A Python number keeps its precision.
        dtype = torch.float64 if number else None
        own = torch.as_tensor(loss, dtype=dtype, device=PartialState().device).detach()
        mean = reduce_(torch.zeros_like(own) if self.weightless else own, "mean")
        return mean.item() if number else mean

    @property
    def skipped(self) -> bool | Tensor:
        """What `step_was_skipped` reads, without waiting for the device."""
        return self._skipped

    def leave_out(self) -> None:
        """An update is due and is not made: everything goes on as behind one."""
        self._skipped = True
        self._note_call()
        self._reduced = False
        self.steps += 1

    def _note_call(self) -> None:
        # Torch's schedulers warn if their optimizer was not stepped before them. It was, though the
        # update may have to wait or was left out.
        self.optimizer._opt_called = True  # type: ignore[attr-defined]

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


def _followed_by(closure: Callable[[], Any], then: Callable[[], None]) -> Callable[[], Any]:
    def call() -> Any:
        loss = closure()
        then()
        return loss

    return call


def _takes(function: Callable[..., Any], name: str) -> bool:
    parameters = inspect.signature(function).parameters
    return name in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())


def parameters_of(optimizers: Sequence[Optimizer]) -> list[torch.nn.Parameter]:
    """Every parameter of the optimizers, once, in order."""
    unique: dict[int, torch.nn.Parameter] = {}
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                unique.setdefault(id(parameter), parameter)
    return list(unique.values())
