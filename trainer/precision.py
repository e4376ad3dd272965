"""Mixed precision: autocast of the forward pass, and loss scaling for fp16."""

from __future__ import annotations

import copy
import functools
import warnings
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import MethodType, SimpleNamespace
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import OptState
from torch.optim import Optimizer

from trainer.configuration import (
    AORecipeKwargs,
    AutocastKwargs,
    GradScalerKwargs,
    TERecipeKwargs,
)
from trainer.distributed.transport import sum_numbers
from trainer.errors import module_logger
from trainer.fp8 import TorchAOLayers, TransformerEngineLayers
from trainer.state import PartialState
from trainer.tree import map_tree, part_here

logger = module_logger(__name__)

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.bfloat16}
_NARROW = {str(dtype) for dtype in _DTYPES.values()}
_NO_CONTEXT: AbstractContextManager[Any] = nullcontext()


def _check_device(mode: str, device: torch.device) -> None:
    """Check that a device supports the precision; torch would only warn.

    Raises:
        ValueError: The device does not support it.
    """
    if device.type == "xla" and mode != "bf16":
        raise ValueError(
            f"mixed_precision={mode!r} cannot be used on {device}: use 'bf16' or 'no' there."
        )
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            torch.autocast(device.type, dtype=_DTYPES[mode])
    except (RuntimeError, UserWarning) as error:
        other = "'no'" if mode == "bf16" else "'bf16' or 'no'"
        raise ValueError(
            f"mixed_precision={mode!r} cannot be used on {device}: {error} Use {other} there."
        ) from error


class Scaler(torch.amp.GradScaler):
    """A ``GradScaler`` whose scale and state dict include the updates made so far.

    `Precision` calls ``update``, which adapts the scale, only at the next backward. Until then,
    `get_scale` and `state_dict` return the values that ``update`` would give now, without changing
    the scaler.
    """

    def get_scale(self) -> float:
        """Return the scale for the next loss; it synchronizes with the device."""
        return torch.amp.GradScaler.get_scale(self._adapted())

    def state_dict(self) -> dict[str, Any]:
        """Return the scaler's state dict for the next loss; it synchronizes with the device."""
        return torch.amp.GradScaler.state_dict(self._adapted())

    def _unscale_grads_(
        self, optimizer: Any, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        """Unscale gradients; an overflow of sharded ones on any process counts on all.

        Torch's own method checks only the processes that share the first gradient, and does not
        support gradients of several meshes.
        """
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        unscale: Any = super()._unscale_grads_  # private; there is no public hook
        if not any(hasattr(p.grad, "to_local") for p in parameters):
            flags: dict[torch.device, Tensor] = unscale(optimizer, inv_scale, found_inf, allow_fp16)
            return flags
        parts = [_part_with_gradient(p.grad) for p in parameters if p.grad is not None]
        flags = unscale(
            SimpleNamespace(param_groups=[{"params": parts}]), inv_scale, found_inf, allow_fp16
        )
        for flag in flags.values():
            anywhere = flag.to(PartialState().device).reshape(1)
            sum_numbers(anywhere)
            flag.copy_(anywhere[0].clamp(max=1.0))
        return flags

    def _adapted(self) -> Scaler:
        """Return this scaler, or an updated copy if an optimizer has stepped with its scale."""
        if not self._enabled:  # a disabled scaler has no state
            return self
        states = self._per_optimizer_states
        if not any(state["stage"] is OptState.STEPPED for state in states.values()):
            return self
        assert self._scale is not None  # exists since the gradients were unscaled
        assert self._growth_tracker is not None
        adapted = object.__new__(Scaler)
        vars(adapted).update(vars(self))
        adapted._scale, adapted._growth_tracker = self._scale.clone(), self._growth_tracker.clone()
        # A deep copy: torch sums the overflow flags in place, and the originals still decide the
        # steps of other optimizers.
        adapted._per_optimizer_states = copy.deepcopy(states)
        adapted.update()
        return adapted


def _part_with_gradient(gradient: Tensor) -> Tensor:
    """Return a tensor whose ``grad`` is this process's part of a gradient, in the same memory."""
    part = part_here(gradient)
    holder = part.detach()
    holder.grad = part
    return holder


class Precision:
    """Mixed precision: autocast for the forward pass, and loss scaling for fp16.

    ``"bf16"`` and ``"fp16"`` run the forward pass under ``torch.autocast``. ``"fp16"`` also scales
    the loss, so that small gradients do not underflow (Micikevicius et al., "Mixed Precision
    Training", ICLR 2018). It skips updates whose gradients overflowed, and adapts the scale. Both
    work on the CPU too, but fp16 is slow there, so use bf16. ``"fp8"`` is ``"bf16"`` with linear
    layers that multiply in 8 bits, which `convert` puts into a module.

    Args:
        mode: ``"no"``, ``"bf16"``, ``"fp16"`` or ``"fp8"``.
        device: The device of the forward pass.
        autocast: Arguments of ``torch.autocast``; None takes the defaults.
        scaler: Arguments of ``torch.amp.GradScaler``; None takes the defaults.
        recipe: Which layers compute in 8 bits, and how; None takes torchao's recipe.

    Attributes:
        recipe: The recipe in use; None unless the mode is ``"fp8"``.
        layers: Converts layers to 8 bits; None unless the mode is ``"fp8"``.
        autocasts: Whether the forward pass runs under autocast. It may be set, unless the mode is
            ``"no"``.
        scales: Whether losses are scaled and updates with overflowed gradients are skipped.
        dtype: The dtype to which `convert` converts modules, and of new floating-point tensors in
            steps; None leaves both unchanged. It may be set if the mode is ``"no"``.

    Raises:
        ValueError: The device does not support the mode.
        ImportError: The recipe's package is not installed.
    """

    def __init__(
        self,
        mode: str,
        device: torch.device,
        *,
        autocast: AutocastKwargs | None = None,
        scaler: GradScalerKwargs | None = None,
        recipe: AORecipeKwargs | TERecipeKwargs | None = None,
    ) -> None:
        if mode != "no":
            _check_device(mode, device)
        self.mode = mode
        self.autocasts = mode != "no"
        self.dtype: torch.dtype | None = None
        self._device_type = device.type
        self._autocast = (autocast or AutocastKwargs()).to_kwargs()
        self.layers: TorchAOLayers | TransformerEngineLayers | None = None
        self.recipe = (recipe or AORecipeKwargs()) if mode == "fp8" else None
        if isinstance(self.recipe, TERecipeKwargs):
            self.layers = TransformerEngineLayers(self.recipe)
        elif self.recipe is not None:
            self.layers = TorchAOLayers(self.recipe, device)
        self._unscaled: set[int] = set()  # ids of optimizers unscaled since the last scale update
        self._stepped: set[int] = set()  # ids of optimizers that stepped with the current scale
        self._known: WeakSet[Optimizer] = WeakSet()  # optimizers whose gradients may be scaled
        self.scaler: torch.amp.GradScaler | None = None
        self.scales = False
        if mode == "fp16":
            self.scaler = Scaler(device.type, **(scaler or GradScalerKwargs()).to_kwargs())
            if device.type == "cpu":
                logger.warning(
                    "mixed_precision='fp16' on the CPU: autocast to float16 with a gradient "
                    "scaler, as on an accelerator but slow; 'bf16' needs no scaler and is faster."
                )
            self.scales = self.scaler.is_enabled()

    def __getstate__(self) -> dict[str, Any]:
        # A copy of this object has no optimizers; copies of the optimizers register with it.
        return {name: value for name, value in vars(self).items() if name != "_known"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, _known=WeakSet())

    def autocast(self, handler: AutocastKwargs | None = None) -> AbstractContextManager[Any]:
        """Return the autocast context manager for the forward pass.

        Args:
            handler: Overrides the constructor's `autocast` argument. With
                ``AutocastKwargs(enabled=False)``, the block computes in full precision even inside
                another autocast context.
        """
        if not self.autocasts:
            if handler is None or handler.enabled:
                return _NO_CONTEXT if self.dtype is None else self.new_tensors()
            if not torch.amp.is_autocast_available(self._device_type):
                return _NO_CONTEXT  # no autocast to disable
            return torch.autocast(self._device_type, **handler.to_kwargs())
        kwargs = self._autocast if handler is None else handler.to_kwargs()
        if self.layers is None:
            return torch.autocast(self._device_type, dtype=_DTYPES[self.mode], **kwargs)
        return self._eight_bits(kwargs)

    def new_tensors(self) -> AbstractContextManager[Any]:
        """Return a context manager in which floating-point tensors are created in `dtype`."""
        return _NO_CONTEXT if self.dtype is None else _default_dtype(self.dtype)

    @contextmanager
    def _eight_bits(self, kwargs: dict[str, Any]) -> Iterator[None]:
        assert self.layers is not None
        autocast = torch.autocast(self._device_type, dtype=torch.bfloat16, **kwargs)
        with autocast, self.layers.context():
            yield

    def convert(self, module: nn.Module) -> None:
        """Convert a module to `dtype`, or its layers to 8 bits if the mode is ``"fp8"``; in place.

        Parameters stay the same objects under the same names; a module that was already converted
        is unchanged.
        """
        if self.dtype is not None:
            module.to(self.dtype)
        if self.layers is not None:
            self.layers.convert(module)

    def use_scaler(self, scaler: torch.amp.GradScaler | None) -> None:
        """Use another scaler from the next backward on; None scales no losses.

        Raises:
            TypeError: `scaler` is not a ``GradScaler``.
        """
        if not isinstance(scaler, (torch.amp.GradScaler, type(None))):
            raise TypeError(f"scaler is {scaler!r}; it must be a torch.amp.GradScaler or None.")
        if type(scaler) in (torch.amp.GradScaler, torch.cuda.amp.GradScaler):
            scaler.__class__ = Scaler  # the user keeps the object
        self.scaler = scaler
        self.scales = scaler is not None and scaler.is_enabled()
        self.begin()

    def scale(self, loss: Tensor) -> Tensor:
        """Return the loss times the current scale; without a scaler, the loss itself."""
        if self.scaler is None:
            return loss
        self._adapt()
        return self.scaler.scale(loss)

    def scale_nothing(self, device: torch.device) -> None:
        """Update the scaler as `scale` does, on a rank that has no loss or no items."""
        if self.scales:
            self.scale(torch.zeros((), device=device))

    def _adapt(self) -> None:
        """Adapt the scale (``GradScaler.update``) after the updates made with it.

        It is not called directly after an optimizer step, because gradients of another optimizer
        may still have the same scale. It is called at the next backward, or at a second step of the
        same optimizer.
        """
        if self.scaler is not None and self._stepped:
            before = self._scale().clone()
            self.scaler.update()
            self._carry_over(before)
            self._stepped.clear()
            self._unscaled.clear()

    def _scale(self) -> Tensor:
        """Return the scale, a tensor of shape (), without synchronizing with the device."""
        scale = None if self.scaler is None else self.scaler._get_scale_async()
        assert scale is not None  # created when the first loss is scaled
        return scale

    def _carry_over(self, before: Tensor) -> None:
        """Convert gradients that wait for a later optimizer step to the new scale.

        They belong to optimizers that step less often than others. The gradients that are
        accumulated next will have the new scale.

        Args:
            before: The scale before the update, a tensor of shape ().
        """
        after = self._scale()
        seen: set[int] = set()
        for optimizer in self._known:
            if id(optimizer) in self._stepped:
                continue
            factor = after if id(optimizer) in self._unscaled else after / before
            for parameter in (p for group in optimizer.param_groups for p in group["params"]):
                if parameter.grad is not None and id(parameter) not in seen:
                    seen.add(id(parameter))
                    parameter.grad.mul_(factor.to(parameter.grad.device))

    def watch(self, optimizer: Optimizer) -> None:
        """Register an optimizer, whose gradients are rescaled when the scale changes."""
        if self.scaler is not None:
            self._known.add(optimizer)

    def begin(self) -> None:
        """Start a run: reset the record of steps and unscaled gradients of an interrupted run."""
        self._stepped.clear()
        self._unscaled.clear()

    def unscale(self, optimizer: Optimizer) -> None:
        """Divide the optimizer's gradients by the scale, at most once per update.

        If the optimizer has stepped since the last backward, nothing happens.

        Raises:
            ValueError: The scaler cannot unscale gradients of this dtype.
        """
        if self.scaler is None or id(optimizer) in self._stepped:
            return
        if id(optimizer) not in self._unscaled:
            with _refusals_explained(optimizer):
                self.scaler.unscale_(optimizer)
            self._unscaled.add(id(optimizer))

    def unscale_together(self, optimizers: Sequence[Optimizer]) -> None:
        """Unscale the gradients of several optimizers that step together on one loss.

        If gradients of one optimizer overflowed, the updates of all are skipped, as with a single
        optimizer over all parameters. The gradients come from the same loss and are clipped by a
        common norm, so an overflow affects them all.
        """
        for optimizer in optimizers:
            self.unscale(optimizer)
        if self.scaler is None or not self.scaler.is_enabled() or len(optimizers) < 2:
            return
        overflows = [flag for one in optimizers for flag in self._overflows(one).values()]
        if overflows:
            anywhere = torch.stack([flag.to(overflows[0].device) for flag in overflows]).amax(0)
            for flag in overflows:
                flag.copy_(anywhere)

    def _overflows(self, optimizer: Optimizer) -> dict[Any, Tensor]:
        """Return the scaler's overflow flag for each device of the optimizer's gradients."""
        assert self.scaler is not None
        flags: dict[Any, Tensor] = self.scaler._found_inf_per_device(optimizer)
        return flags

    def step(self, optimizer: Optimizer, closure: Any = None) -> bool | Tensor:
        """Make an optimizer step with scaled gradients, unless they overflowed.

        Args:
            optimizer: The optimizer.
            closure: Must be None: a closure would compute new gradients.

        Returns:
            Whether the step was made. For a fused optimizer, which decides this on the device, it
            is a bool tensor of shape (), so that the host does not wait.

        Raises:
            ValueError: A closure is given; or see `unscale`.
        """
        assert self.scaler is not None
        if closure is not None:
            raise ValueError("A closure cannot be used with mixed_precision='fp16'; use 'bf16'.")
        if id(optimizer) in self._stepped:
            self._adapt()
        made: list[bool] = []
        handle = optimizer.register_step_post_hook(lambda *_: made.append(True))
        try:
            with _refusals_explained(optimizer):  # step unscales first, if `unscale` was not called
                self.scaler.step(optimizer)
        finally:
            handle.remove()
        self._stepped.add(id(optimizer))
        if getattr(optimizer, "_step_supports_amp_scaling", False):
            # A fused optimizer's step is always called, and skips the update itself on overflow.
            overflows = self._overflows(optimizer).values()
            return torch.stack([flag.to(self._device_type) for flag in overflows]).sum() == 0
        return bool(made)

    def skip_step(self, optimizer: Optimizer) -> None:
        """Count an update that the user's code skipped as one with the current scale.

        Otherwise the next gradients would be treated as unscaled.
        """
        if self.scaler is not None and id(optimizer) in self._unscaled:
            self.scaler._per_optimizer_states[id(optimizer)]["stage"] = OptState.STEPPED
            self._stepped.add(id(optimizer))

    def wrap_forward(self, model: nn.Module) -> None:
        """Replace the model's ``forward`` by one that runs under autocast and returns float32.

        A wrapper of an earlier call is replaced. A pickle of the model does not contain the
        wrapper.
        """
        unwrap_forward(model)
        if not self.autocasts:
            return
        original = model.forward
        function: Any = original
        if isinstance(original, MethodType) and original.__self__ is model:
            function = original.__func__

        def forward(model: nn.Module, *args: Any, **kwargs: Any) -> Any:
            with self.autocast():
                # Read `forward` from the model, because a copy of the model has its own.
                outputs = vars(model)["_original_forward"](*args, **kwargs)
            return map_tree(_to_float32, outputs)

        functools.update_wrapper(forward, function)
        vars(forward)["replaces"] = "forward" in vars(model)
        vars(model).update(_original_forward=original, forward=MethodType(forward, model))

    def state_dict(self) -> dict[str, Any]:
        """Return the scaler's state; empty without a scaler."""
        self._adapt()
        return {} if self.scaler is None else self.scaler.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the scaler's state; do nothing if there is no scaler here or in the state."""
        self._adapt()
        if self.scaler is not None and state:
            self.scaler.load_state_dict(state)


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def unwrap_forward(model: nn.Module) -> None:
    """Restore a model's ``forward`` from before `Precision.wrap_forward`, if it was wrapped."""
    original = vars(model).pop("_original_forward", None)
    if original is None:
        return
    wrapper = vars(model).pop("forward")
    if getattr(wrapper, "replaces", False):  # the original was an instance attribute too
        vars(model)["forward"] = original


_REFUSALS = ("unscale FP16", "not implemented")


@contextmanager
def _refusals_explained(optimizer: Optimizer) -> Iterator[None]:
    """Re-raise the scaler's error about gradients of a low-precision dtype, with a fix."""
    try:
        yield
    except (ValueError, RuntimeError) as error:
        # torch's messages are "Attempting to unscale FP16 gradients" and, for bfloat16 on CUDA,
        # "…_unscale_cuda not implemented" (pytorch#127176). Any other error comes from the
        # optimizer and is raised unchanged.
        parameters = (
            parameter for group in optimizer.param_groups for parameter in group["params"]
        )
        narrow = {
            str(parameter.dtype) for parameter in parameters if parameter.grad is not None
        } & _NARROW
        if not narrow or not any(text in str(error) for text in _REFUSALS):
            raise
        raise ValueError(
            "mixed_precision='fp16' needs float32 parameters, but some that the optimizer "
            f"updates are {' and '.join(sorted(narrow))} ({error}). Convert them with "
            "module.float(): autocast still computes in float16. Or pass mixed_precision='no'."
        ) from error


def _to_float32(leaf: Any) -> Any:
    narrow = isinstance(leaf, Tensor) and leaf.dtype in (torch.float16, torch.bfloat16)
    return leaf.float() if narrow else leaf
