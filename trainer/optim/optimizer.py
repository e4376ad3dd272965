"""The optimizer that `Accelerator.prepare` returns."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.optim import Optimizer

from trainer.distributed.collectives import reduce as reduce_
from trainer.optim.lomo import is_lomo
from trainer.optim.state import place_state
from trainer.precision import Precision
from trainer.state import GradientState, PartialState

# Attributes left out of copies and pickles: state shared in the process, and the `step` by which a
# torch scheduler patches the instance. In a copy that would still step the original optimizer.
_NOT_COPIED = ("_gradient_state", "step", "before_step")


class OptimizerDriver(Protocol):
    """Steps optimizers whose state it owns; implemented by engines.

    The optimizers keep the user's parameter groups, whose options are read at each update.

    Attributes:
        schedules: Schedules that the driver advances with each update, in a loop written by the
            user.
    """

    schedules: Sequence[Any]

    def prepare_scheduler(self, scheduler: Any) -> Any:
        """Return the scheduler to use instead, after its optimizer was prepared."""

    def optimizer_step(self, optimizer: Optimizer) -> None:
        """Make an update."""

    def optimizer_zero_grad(self, optimizer: Optimizer) -> None:
        """Drop the gradients."""

    def optimizer_state_dict(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return this process's part of the state, numbered as in a single process.

        Tensors of which this process has only parts are `LocalShards`. The call may be collective.
        """

    def load_optimizer_state_dict(self, optimizer: Optimizer, state: dict[str, Any]) -> None:
        """Load this process's part of such a state, whose tensors may be whole or in files."""


class LossOfUpdate:
    """The closure of an update whose forward and backward passes have run: it returns the loss.

    Args:
        loss: A detached tensor of shape (); None on a rank without a batch.
    """

    def __init__(self, loss: Tensor | None) -> None:
        self._loss = loss
        self._called = False

    def __call__(self) -> Tensor | None:
        """Return the loss.

        Raises:
            RuntimeError: The closure is called again, by an optimizer that evaluates the loss
                several times.
        """
        if self._called:
            raise RuntimeError(
                "The closure of optimizer_step was called twice, but forward and backward run "
                "only once for an update. For an optimizer that runs them again, such as LBFGS "
                "or SAM, set automatic_optimization = False and step it in training_step."
            )
        self._called = True
        return self._loss


class AcceleratedOptimizer(Optimizer):
    """A wrapper of an optimizer that steps only at the end of a gradient accumulation window.

    Parameters, state and parameter groups are those of the wrapped optimizer.

    Args:
        optimizer: The user's optimizer.
        device_placement: Whether to move its state to the devices of its parameters.
        precision: Unscales gradients, and skips updates whose gradients overflowed (fp16).
        reduce: Called with the wrapped optimizer before each update, to average its gradients over
            the ranks; None if the engine averages them.
        driver: Steps the optimizer and owns its state; None if the optimizer does this itself.

    Attributes:
        optimizer: The user's optimizer.
        steps: The number of updates that were due at the end of a window, made or skipped.
        before_step: Called with this optimizer before each update, after its gradients are averaged
            and unscaled. With a closure, it is called each time the closure has computed gradients.
        is_dummy: Whether this rank runs a dummy batch, so that losses of closures count as zero.
    """

    before_step: Callable[[AcceleratedOptimizer], None] | None = None
    is_dummy = False

    def __init__(
        self,
        optimizer: Optimizer,
        device_placement: bool = True,
        *,
        precision: Precision,
        reduce: Callable[[Optimizer], None] | None = None,
        driver: OptimizerDriver | None = None,
    ) -> None:
        # Do not call Optimizer.__init__: the parameters are the wrapped optimizer's.
        self.optimizer = optimizer
        self._precision = precision
        precision.watch(optimizer)
        self._reduce = reduce
        self.driver = driver
        self._reduced = False
        self._gradient_state = GradientState()
        self._skipped: bool | Tensor = False
        self._takes_set_to_none = _takes(optimizer.zero_grad, "set_to_none")
        self._updates_in_backward = is_lomo(optimizer)
        self.steps = 0
        if device_placement:
            place_state(optimizer)

    def __getattr__(self, name: str) -> Any:
        # Other attributes, such as hooks, are those of the wrapped optimizer.
        if name == "optimizer":  # looked up while unpickling, before it is set
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
        """The wrapped optimizer's parameter groups."""
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
        """Whether the last ``step`` was skipped because of overflow or non-finite gradients.

        For a fused optimizer on an accelerator, reading this waits for the device.
        """
        self._skipped = bool(self._skipped)
        return self._skipped

    @property
    def scaler(self) -> torch.amp.GradScaler | None:
        """The gradient scaler of fp16; None with other precisions."""
        return self._precision.scaler

    @property
    def is_overflow(self) -> bool:
        """Deprecated alias of `step_was_skipped`."""
        warnings.warn(
            "is_overflow is the earlier name of step_was_skipped; use the new name.",
            FutureWarning,
            stacklevel=2,
        )
        return self.step_was_skipped

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group to the wrapped optimizer."""
        self.optimizer.add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        """Return the wrapped optimizer's state dict."""
        if self.driver is not None:
            return self.driver.optimizer_state_dict(self.optimizer)
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the wrapped optimizer's state dict."""
        if self.driver is not None:
            self.driver.load_optimizer_state_dict(self.optimizer, state_dict)
            return
        self.optimizer.load_state_dict(state_dict)

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Zero the gradients; inside a gradient accumulation window do nothing.

        Args:
            set_to_none: Whether gradients become None instead of zeros. None means True, if the
                wrapped optimizer accepts the argument.
        """
        if not self._gradient_state.sync_gradients:
            return
        self._reduced = False
        if self.driver is not None:
            self.driver.optimizer_zero_grad(self.optimizer)
            return
        zero = getattr(self.optimizer.zero_grad, "__func__", None)
        if zero is Optimizer.zero_grad and set_to_none is not False:
            # The same without torch's profiler section, which costs more than a small model's step.
            for group in self.optimizer.param_groups:
                for parameter in group["params"]:
                    parameter.grad = None
        elif self._takes_set_to_none or set_to_none is not None:
            self.optimizer.zero_grad(set_to_none=set_to_none is not False)
        else:
            self.optimizer.zero_grad()

    def synchronize(self) -> None:
        """Average the gradients over the ranks now (e.g. before clipping), once per update."""
        if self._reduce is not None and not self._reduced:
            self._reduce(self.optimizer)
            self._reduced = True

    def note_backward(self) -> None:
        """Record that a backward pass has added gradients that are not averaged yet."""
        self._reduced = False

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Make an update; inside a gradient accumulation window do nothing.

        A LOMO optimizer has already made its update during the backward pass.

        Args:
            closure: Computes the loss, calls backward and returns the loss; for optimizers such as
                LBFGS.

        Returns:
            The wrapped optimizer's result. Torch's optimizers return the closure's loss, or None
            without a closure.

        Raises:
            ValueError: A closure is given inside a window, where it would not be called, or with
                ``mixed_precision="fp16"``.
        """
        if not self._gradient_state.sync_gradients:
            if closure is not None:
                raise ValueError(
                    "step was called with a closure inside a gradient accumulation window, where "
                    "it would never be called. Use gradient_accumulation_steps=1, or call backward "
                    "and then step() without a closure."
                )
            self._note_call()
            return None
        returned: Any = None
        if isinstance(closure, LossOfUpdate):  # the gradients are already computed
            returned, closure = closure(), None
        if self.driver is not None:
            self._drive(self.driver, closure)
            self._note_call()
        elif self._updates_in_backward:
            self._note_call()
        else:
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
                self._note_call()
            else:
                step = self.optimizer.step  # the optimizer's step may not take a closure
                result = step() if closure is None else step(closure)
                returned = result if returned is None else returned
                self._skipped = False
        self._reduced = False
        self.steps += 1
        return returned

    def _drive(self, driver: OptimizerDriver, closure: Callable[[], Any] | None) -> None:
        """Make the update with the driver.

        Raises:
            ValueError: There is a closure, which the driver would not call.
        """
        if closure is not None:
            raise ValueError(
                "step was called with a closure, which DeepSpeed and megatron-core do not call: "
                "call backward, then step() without a closure."
            )
        if self.before_step is not None:
            self.before_step(self)
        driver.optimizer_step(self.optimizer)
        self._skipped = False

    def _call_together(self, closure: Callable[[], Any]) -> Any:
        """Call a closure, and average its gradients and its loss over the ranks; collective.

        The loss must be equal on all ranks, since the optimizer may decide by it how often to call
        the closure.
        """
        self._reduced = False
        loss = closure()
        self.synchronize()
        if loss is None:
            return None
        number = not isinstance(loss, Tensor)
        dtype = torch.float64 if number else None  # a Python number keeps its precision
        local = torch.as_tensor(loss, dtype=dtype, device=PartialState().device).detach()
        mean = reduce_(torch.zeros_like(local) if self.is_dummy else local, "mean")
        return mean.item() if number else mean

    @property
    def skipped(self) -> bool | Tensor:
        """`step_was_skipped` without waiting for the device; may be a tensor of shape ()."""
        return self._skipped

    def skip_step(self) -> None:
        """Skip an update that is due, and record it as skipped."""
        self._precision.skip_step(self.optimizer)
        self._skipped = True
        self._note_call()
        self._reduced = False
        self.steps += 1

    def _note_call(self) -> None:
        # Torch's schedulers warn if their optimizer has not stepped before them. They must not warn
        # if the step was called but was inside a window, or the update was skipped.
        self.optimizer._opt_called = True  # type: ignore[attr-defined]

    def train(self) -> None:
        """Switch a schedule-free optimizer to its training weights."""
        if callable(switch := getattr(self.optimizer, "train", None)):
            switch()

    def eval(self) -> None:
        """Switch a schedule-free optimizer to its evaluation weights."""
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
    """Return the parameters of all optimizers, each once, in order."""
    unique: dict[int, torch.nn.Parameter] = {}
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                unique.setdefault(id(parameter), parameter)
    return list(unique.values())


class ParameterLists:
    """The parameters of a module and its optimizers, as of the latest update.

    Args:
        module: The module.
        optimizers: Its optimizers; their `param_groups` may change at any time.

    Attributes:
        all: All parameters of the module and the optimizers.
        unused: The parameters that are in no optimizer.
        unregistered: Unregistered parameters: an optimizer has them, the module does not.
        first: Whether the latest refresh was the first one.
        changed: Whether the latest refresh found other parameters than the previous one.
        warned: Whether a warning about unregistered parameters was logged.
        warned_unused: The `id` of each unused parameter that a warning has named.
    """

    def __init__(self, module: torch.nn.Module, optimizers: Sequence[AcceleratedOptimizer]) -> None:
        self._module, self._optimizers = module, optimizers
        self.all = list(module.parameters())
        self.unused: list[torch.nn.Parameter] = []
        self.unregistered: list[torch.nn.Parameter] = []
        self.first = self.changed = False
        self.warned = False
        self.warned_unused: set[int] = set()
        self._signature: list[int] = []

    def refresh(self, epoch: int) -> bool:
        """Refresh the lists if they may have changed; return whether parameters must be checked.

        This is the case at the first update of each epoch, and if a parameter group is another list
        or has another length, first or last parameter. Comparing all parameters at every update
        would be slow. Unregistered parameters are checked until a warning was logged.
        """
        now, self.first = [epoch], not self._signature
        for optimizer in self._optimizers:
            for group in optimizer.optimizer.param_groups:
                parameters = group["params"]
                now += id(parameters), len(parameters)
                if parameters:
                    now += id(parameters[0]), id(parameters[-1])
        self.changed = now != self._signature
        if not self.changed:
            return bool(self.unregistered) and not self.warned
        registered, used = list(self._module.parameters()), parameters_of(self._optimizers)
        registered_ids, used_ids = set(map(id, registered)), set(map(id, used))
        self.unused = [p for p in registered if id(p) not in used_ids]
        self.unregistered = [p for p in used if id(p) not in registered_ids]
        self.all = registered + self.unregistered
        self._signature = now
        return True


def twin_of(optimizer: Optimizer, instead: Mapping[int, Tensor] | None = None) -> Optimizer:
    """Return an optimizer of the same class, with separate groups and state.

    Hooks and a patched ``step`` stay with the user's optimizer, since an engine steps the twin in
    its own way.

    Args:
        optimizer: The user's optimizer.
        instead: Replacements of parameters, by the parameters' ``id``; None keeps the trainable
            ones. Other parameters are left out, and so are groups without parameters.
    """
    twin: Optimizer = object.__new__(type(optimizer))
    twin.__dict__.update({k: v for k, v in vars(optimizer).items() if k != "step"})
    twin.param_groups = []
    for group in optimizer.param_groups:
        if instead is None:
            parameters = [parameter for parameter in group["params"] if parameter.requires_grad]
        else:
            parameters = [instead[id(p)] for p in group["params"] if id(p) in instead]
        if parameters:
            twin.param_groups.append({**group, "params": parameters})
    twin.state = type(optimizer.state)(dict)
    return twin
