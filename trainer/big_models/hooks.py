"""Hooks around the forward pass of modules, which move inputs and weights to the device.

Unlike torch's own hooks a `ModelHook` sees and replaces all arguments, and can act when it is
attached and detached. A hooked module has the hook as ``_hf_hook`` and its own forward method as
``_old_forward``; other libraries look for these names.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from trainer.big_models.offload import in_own_pages
from trainer.big_models.tensors import (
    Device,
    TiedCopies,
    as_device,
    find_tensor,
    memory_of,
    non_persistent_buffers,
    set_module_tensor_to_device,
    set_tensor,
)
from trainer.memory import free_caches
from trainer.names import hooks_of
from trainer.state import PartialState
from trainer.tree import leaves, send_to_device

Args = tuple[Any, ...]
Kwargs = dict[str, Any]
M = TypeVar("M", bound=nn.Module)

# Attributes that `dispatch_model` sets on a model, removed with its hook.
MOVE_METHODS = ("to", "cpu", "cuda", "xpu", "mtia")
_ALIGNMENT = 64  # bytes; the alignment of torch's own CPU memory


class ModelHook:
    """A hook that acts before and after a module's forward pass; see `add_hook_to_module`.

    Attributes:
        no_grad: Whether the forward pass runs under ``torch.no_grad()``.
    """

    no_grad = False

    def init_hook(self, module: M) -> M:
        """Act when the hook is attached; returns the module."""
        return module

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> tuple[Args, Kwargs]:
        """Act before the forward pass; returns its positional and keyword arguments."""
        del module
        return args, kwargs

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        """Act after the forward pass; returns its output."""
        del module
        return output

    def detach_hook(self, module: M) -> M:
        """Act when the hook is removed; returns the module."""
        return module


class SequentialHook(ModelHook):
    """Several hooks, each called in turn."""

    def __init__(self, *hooks: ModelHook) -> None:
        self.hooks = hooks
        self.no_grad = any(hook.no_grad for hook in hooks)

    def init_hook(self, module: M) -> M:
        """Attach all hooks."""
        for hook in self.hooks:
            module = hook.init_hook(module)
        return module

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> tuple[Args, Kwargs]:
        """Call all hooks, each with the result of the previous one."""
        for hook in self.hooks:
            args, kwargs = hook.pre_forward(module, *args, **kwargs)
        return args, kwargs

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        """Call all hooks, each with the result of the previous one."""
        for hook in self.hooks:
            output = hook.post_forward(module, output)
        return output

    def detach_hook(self, module: M) -> M:
        """Detach all hooks."""
        for hook in self.hooks:
            module = hook.detach_hook(module)
        return module


def add_hook_to_module(module: M, hook: ModelHook, append: bool = False) -> M:
    """Attach a hook to a module; it is called around the module's ``forward``.

    Args:
        module: The module; changed in place.
        hook: The hook.
        append: Keep an existing hook, which is called first; otherwise it is removed.

    Returns:
        The module.
    """
    present = vars(module).get("_hf_hook")
    if present is not None and not append:
        remove_hook_from_module(module)
        present = None
    module = hook.init_hook(module)
    if present is not None:
        earlier = present.hooks if isinstance(present, SequentialHook) else (present,)
        hook = SequentialHook(*earlier, hook)
    else:
        forward = module.forward
        module.__dict__["_old_forward"] = forward
        # A partial rather than a closure, so that a deep copy calls its own forward. Wrapped, so
        # that tools can read the signature.
        module.__dict__["forward"] = functools.update_wrapper(
            functools.partial(_hooked_forward, module), forward
        )
    module.__dict__["_hf_hook"] = hook
    return module


def _hooked_forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    hook: ModelHook = module.__dict__["_hf_hook"]
    try:
        args, kwargs = _without_compile(hook.pre_forward)(module, *args, **kwargs)
        with torch.set_grad_enabled(torch.is_grad_enabled() and not hook.no_grad):
            output = module.__dict__["_old_forward"](*args, **kwargs)
    except BaseException:  # for example out of memory, after which the caller tries a smaller batch
        for align_hook in align_hooks(module):
            align_hook.offload_weights(module)
        raise
    return _without_compile(hook.post_forward)(module, output)


def _without_compile(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that ``torch.compile`` does not compile."""
    if not torch.compiler.is_compiling():
        return function  # `disable` would import the compiler, which takes seconds
    disabled: Callable[..., Any] = torch.compiler.disable(function)
    return disabled


def remove_hook_from_module(module: M, recurse: bool = False) -> M:
    """Detach the hook of a module, and restore its ``forward``.

    Args:
        module: The module; changed in place.
        recurse: Whether to remove the hooks of all submodules too. Offloaded weights that were tied
            are tied again.

    Returns:
        The module.
    """
    parts = list(module.modules()) if recurse else [module]
    offloaded = [
        (part, name, value)
        for part in parts
        for hook in align_hooks(part)
        for name, value in hook.values_to_return()
    ]
    for part in parts:
        attributes = vars(part)
        if (hook := attributes.pop("_hf_hook", None)) is not None:
            hook.detach_hook(part)
        if "_old_forward" in attributes:
            before = attributes.pop("_old_forward")
            del attributes["forward"]
            if part.forward != before:  # it was set on the instance
                attributes["forward"] = before
            for name in MOVE_METHODS:
                attributes.pop(name, None)
    tied: dict[Any, Tensor] = {}
    for part, name, value in offloaded:
        set_tensor(part, name, tied.setdefault(memory_of(value), find_tensor(part, name)))
    return module


def remove_hook_from_submodules(module: nn.Module) -> None:
    """Remove the hooks of a module and of all its submodules."""
    remove_hook_from_module(module, recurse=True)


class AlignDevicesHook(ModelHook):
    """Move a module's inputs to its device, and its weights too if they are offloaded.

    Offloaded weights are on the meta device between forward passes. They are read-only: a gradient
    for one is an error, and changes made in a forward pass are lost. ``state_dict()`` contains
    their values; loading into them is an error.

    Args:
        execution_device: The device of the forward pass; None leaves inputs and weights in place.
        offload: Whether the weights are offloaded between forward passes.
        io_same_device: Move the output to the device of the first input.
        weights_map: The offloaded weights by name; a weight that is not in it is not offloaded.
            None keeps the module's own weights, on the CPU.
        offload_buffers: Whether to offload buffers too, except non-persistent ones. Otherwise they
            are on the execution device.
        place_submodules: Whether the hook is also responsible for the weights of the submodules.
        skip_keys: Names of keyword arguments, and keys in outputs, that are not moved.
        tied_params_map: See `set_module_tensor_to_device`. A weight with a copy on the execution
            device is not offloaded.
    """

    def __init__(
        self,
        execution_device: Device | None = None,
        offload: bool = False,
        io_same_device: bool = False,
        weights_map: Mapping[str, Tensor] | None = None,
        offload_buffers: bool = False,
        place_submodules: bool = False,
        skip_keys: str | Sequence[str] | None = None,
        tied_params_map: TiedCopies | None = None,
    ) -> None:
        self.execution_device = execution_device
        self.offload = offload
        self.io_same_device = io_same_device
        self.weights_map = weights_map
        self.offload_buffers = offload_buffers
        self.place_submodules = place_submodules
        self.skip_keys = skip_keys
        self.tied_params_map = tied_params_map
        self.input_device: torch.device | None = None
        self.original_devices: dict[str, torch.device] = {}
        self._offloaded: list[str] = []
        self._tied: set[str] = set()  # of these, tied ones by address when the hook was attached
        self._shared: list[tuple[int, torch.device]] = []  # copies made by this hook
        self._handles: list[Any] = []

    def __repr__(self) -> str:
        names = ("execution_device", "offload", "io_same_device", "offload_buffers")
        shown = [f"{n}={getattr(self, n)!r}" for n in (*names, "place_submodules", "skip_keys")]
        return f"AlignDevicesHook({', '.join(shown)})"

    def init_hook(self, module: M) -> M:
        """Place the module's weights for the time between forward passes."""
        device = self.execution_device
        tensors = dict(self._tensors(module))
        self.original_devices = {name: tensor.device for name, tensor in tensors.items()}
        if self.offload:
            self._offloaded = self._choose(module, tensors)
            if self.weights_map is None:
                self.weights_map = {n: tensors[n].detach().to("cpu") for n in self._offloaded}
        for name in tensors:
            if name in self._offloaded:
                set_module_tensor_to_device(module, name, "meta")
            elif device is not None:
                tied = self.tied_params_map
                set_module_tensor_to_device(
                    module, name, device, tied_params_map=tied, clear_cache=False
                )
        _flatten(module)
        if self._offloaded:
            save = functools.partial(_add_offloaded, self)
            load = functools.partial(_check_not_loading_offloaded, self)
            owner: Any = module  # torch has no types for these attributes
            self._handles = [
                owner.register_state_dict_post_hook(save),
                owner.register_load_state_dict_pre_hook(load),
            ]
        return module

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> tuple[Args, Kwargs]:
        """Move the weights and the inputs to the execution device."""
        if self.io_same_device:
            devices = (leaf.device for leaf in leaves([args, kwargs]) if isinstance(leaf, Tensor))
            self.input_device = next(devices, None)
        self.load_weights(module)
        if self.execution_device is None:
            return args, kwargs
        device = as_device(self.execution_device)
        return send(args, device), send(kwargs, device, self.skip_keys)

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        """Offload the weights, and move the output to the device of the inputs."""
        self.offload_weights(module)
        if self.io_same_device and self.input_device is not None:
            output = send(output, self.input_device, self.skip_keys)
        return output

    def detach_hook(self, module: M) -> M:
        """Restore offloaded weights to the module, except where it had none."""
        for handle in self._handles:
            handle.remove()
        for name, value in self.values_to_return():
            device = self.original_devices[name]
            set_module_tensor_to_device(module, name, device, value, clear_cache=False)
        self._handles, self._offloaded = [], []
        return module

    def values_to_return(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the offloaded weights to restore when the hook is detached."""
        for name in self._offloaded:
            if self.original_devices[name].type != "meta":
                yield name, self._values()[name]

    def load_weights(self, module: nn.Module, device: Device | None = None) -> None:
        """Load the offloaded weights to a device, by default the execution device."""
        if not self._offloaded:
            return
        target = device if device is not None else self.execution_device
        onto = as_device("cpu" if target is None else target)
        for name in self._offloaded:
            value = self._values()[name]
            tied = self.tied_params_map if name in self._tied else None
            if tied is not None and onto not in tied.get(value.data_ptr(), (onto,)):
                self._shared.append((value.data_ptr(), onto))
            if onto.type == "cpu" and value.is_cpu and value.data_ptr() % _ALIGNMENT:
                value = in_own_pages(value)  # products depend on the alignment in the last bits
            set_module_tensor_to_device(
                module,
                name,
                onto,
                value,
                tied_params_map=tied,
                clear_cache=False,
            )
            self._raise_on_gradient_of(module, name)
        _flatten(module)

    def offload_weights(self, module: nn.Module) -> None:
        """Free the memory of the offloaded weights."""
        for name in self._offloaded:
            set_module_tensor_to_device(module, name, "meta")
        for address, device in self._shared:
            if self.tied_params_map is not None:
                self.tied_params_map[address].pop(device, None)
        self._shared = []

    def _raise_on_gradient_of(self, module: nn.Module, name: str) -> None:
        """Raise if a gradient is computed for an offloaded weight, since it would be lost."""
        owner, _, leaf = name.rpartition(".")
        weight: Tensor = getattr(module.get_submodule(owner), leaf)
        if weight.requires_grad and torch.is_grad_enabled():
            weight.register_hook(functools.partial(_raise_on_gradient, name, type(module).__name__))

    def _values(self) -> Mapping[str, Tensor]:
        assert self.weights_map is not None  # set by init_hook
        return self.weights_map

    def _tensors(self, module: nn.Module) -> Iterator[tuple[str, Tensor]]:
        recurse = self.place_submodules
        for source in (module.named_parameters, module.named_buffers):
            yield from source(recurse=recurse, remove_duplicate=False)

    def _choose(self, module: nn.Module, tensors: Mapping[str, Tensor]) -> list[str]:
        """Return the names of the tensors to offload.

        Raises:
            ValueError: A tensor has values neither here nor in `weights_map`.
        """
        buffers = non_persistent_buffers(module)
        if not self.offload_buffers:
            buffers |= {name for name, _ in module.named_buffers(remove_duplicate=False)}
        weights = tensors if self.weights_map is None else self.weights_map
        tied = self.tied_params_map or {}
        device = None if self.execution_device is None else as_device(self.execution_device)
        chosen = []
        for name, tensor in tensors.items():
            address = 0 if tensor.is_meta else tensor.data_ptr()
            if name in buffers or device in tied.get(address, ()):
                continue
            if name in weights:
                chosen.append(name)
                if address in tied:
                    self._tied.add(name)
            elif tensor.is_meta:
                raise ValueError(
                    f"{name} of {type(module).__name__} is on the meta device, and not among the "
                    "offloaded weights: load its checkpoint first."
                )
        return chosen


def _flatten(module: nn.Module) -> None:
    if isinstance(module, nn.RNNBase):
        module.flatten_parameters()  # cuDNN needs contiguous weights


def _add_offloaded(
    hook: AlignDevicesHook, module: nn.Module, state: dict[str, Any], prefix: str, *rest: Any
) -> None:
    del module, rest
    for name in hook._offloaded:
        if prefix + name in state:
            value = hook._values()[name]
            # Use the tensor itself if possible, since tied tensors are recognised by identity.
            state[prefix + name] = value.detach() if value.requires_grad else value


def _check_not_loading_offloaded(
    hook: AlignDevicesHook, module: nn.Module, state: Mapping[str, Any], prefix: str, *rest: Any
) -> None:
    del module, rest
    if offloaded := [prefix + name for name in hook._offloaded if prefix + name in state]:
        raise RuntimeError(
            f"The weights {', '.join(offloaded)} are offloaded, so no checkpoint can be loaded "
            "into them. Call remove_hook_from_submodules(model) first, or load before the model "
            "is dispatched."
        )


def _raise_on_gradient(name: str, owner: str, gradient: Tensor) -> None:
    del gradient
    raise RuntimeError(
        f"A gradient reached the weight {name!r} of {owner}, which is offloaded and cannot be "
        "trained. Freeze it with requires_grad_(False) (adapters on it can be trained), or place "
        "its module on a device."
    )


def send(tree: Any, device: torch.device, skip_keys: str | Sequence[str] | None = None) -> Any:
    """Return `send_to_device`, or the tree itself if it is already on the device.

    A module may change its list or dict arguments in place, so these must remain the caller's
    objects.
    """
    if all(_is_on(leaf, device) for leaf in leaves(tree)):
        return tree
    return send_to_device(tree, device, skip_keys=skip_keys)


def _is_on(leaf: Any, device: torch.device) -> bool:
    if isinstance(leaf, Tensor):
        return leaf.device == device
    return not callable(getattr(leaf, "to", None))


class CpuOffload(ModelHook):
    """Keep a whole model on the CPU until its forward pass; it then stays on the device.

    Args:
        execution_device: The device of the forward pass; None is the accelerator if there is one.
        prev_module_hook: The hook of a model that moves to the CPU when this one runs.
    """

    def __init__(
        self,
        execution_device: Device | None = None,
        prev_module_hook: UserCpuOffloadHook | None = None,
    ) -> None:
        self.prev_module_hook = prev_module_hook
        default = PartialState().default_device if execution_device is None else execution_device
        self.execution_device = as_device(default)

    def init_hook(self, module: M) -> M:
        """Move the model to the CPU."""
        return module.to("cpu")

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> tuple[Args, Kwargs]:
        """Move the previous model to the CPU, and this one and its inputs to the device."""
        device = self.execution_device
        previous = self.prev_module_hook
        if previous is not None and any(p.device == device for p in previous.model.parameters()):
            previous.offload()
            if device.type != "cpu":
                free_caches()
        module.to(device)
        return send(args, device), send(kwargs, device)


class UserCpuOffloadHook:
    """The object from `cpu_offload_with_hook`, to offload the model or to remove its hook."""

    def __init__(self, model: nn.Module, hook: ModelHook) -> None:
        self.model = model
        self.hook = hook

    def offload(self) -> None:
        """Move the model to the CPU."""
        self.hook.init_hook(self.model)

    def remove(self) -> None:
        """Remove the model's hook."""
        remove_hook_from_module(self.model)


class LayerwiseCastingHook(ModelHook):
    """Keep a module's weights in one dtype, and convert them to another for its forward pass.

    Args:
        storage_dtype: The dtype between forward passes, such as ``torch.float8_e4m3fn``.
        compute_dtype: The dtype during forward passes.
        non_blocking: Convert asynchronously.
    """

    def __init__(
        self, storage_dtype: torch.dtype, compute_dtype: torch.dtype, non_blocking: bool
    ) -> None:
        self.storage_dtype = storage_dtype
        self.compute_dtype = compute_dtype
        self.non_blocking = non_blocking

    def init_hook(self, module: M) -> M:
        """Convert the weights to `storage_dtype`."""
        return module.to(dtype=self.storage_dtype, non_blocking=self.non_blocking)

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> tuple[Args, Kwargs]:
        """Convert the weights to `compute_dtype`."""
        module.to(dtype=self.compute_dtype, non_blocking=self.non_blocking)
        return args, kwargs

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        """Convert the weights back."""
        module.to(dtype=self.storage_dtype, non_blocking=self.non_blocking)
        return output


def align_hooks(module: nn.Module) -> list[AlignDevicesHook]:
    """Return the `AlignDevicesHook` objects of a module itself."""
    return [hook for hook in hooks_of(module) if isinstance(hook, AlignDevicesHook)]


def has_offloaded_params(module: nn.Module) -> bool:
    """Return whether a hook of this module (not of its submodules) offloads its weights."""
    return any(hook.offload for hook in align_hooks(module))


@contextmanager
def align_module_device(
    module: nn.Module, execution_device: torch.device | None = None
) -> Iterator[None]:
    """Keep a module's own weights on a device inside the block.

    Args:
        module: The module. If its weights are offloaded, changes made to them are lost.
        execution_device: The device; None takes that of the module's hook, if it offloads.
    """
    offloading = [hook for hook in align_hooks(module) if hook.offload]
    before: dict[str, torch.device] = {}
    try:
        if offloading:
            for hook in offloading:
                hook.load_weights(module, execution_device)
        elif execution_device is not None:
            parameters = module.named_parameters(recurse=False)
            before = {name: parameter.device for name, parameter in parameters}
            for name in before:
                set_module_tensor_to_device(module, name, execution_device)
        yield
    finally:
        for hook in offloading:
            hook.offload_weights(module)
        for name, device in before.items():
            set_module_tensor_to_device(module, name, device)
