"""Create modules without memory for their weights, and replace single tensors of modules.

A parameter on the ``meta`` device has a shape and a dtype but no values. A model made of them needs
no memory, whatever its size; values come later, from a checkpoint.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import contextmanager, nullcontext
from enum import Enum
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.nn.parameter import is_lazy

from trainer import environment


class CustomDtype(Enum):
    """Weight types that are not torch dtypes, for computing the sizes of modules."""

    FP8 = "fp8"
    INT4 = "int4"
    INT2 = "int2"

    @property
    def itemsize(self) -> float:
        """The bytes of one value."""
        return {"fp8": 1.0, "int4": 0.5, "int2": 0.25}[self.value]


Device: TypeAlias = int | str | torch.device
# Copies of tied weights: the address of the first one, and its copy on each device.
TiedCopies: TypeAlias = MutableMapping[int, MutableMapping[torch.device, Tensor]]


@contextmanager
def init_empty_weights(include_buffers: bool | None = None) -> Iterator[None]:
    """Create modules in the block without memory for their parameters.

    Example::

        with init_empty_weights():
            model = Model(config)
        model = load_checkpoint_and_dispatch(model, "checkpoint", device_map="auto")

    Args:
        include_buffers: Whether buffers also have no values. Non-persistent buffers, which
            checkpoints do not contain, then never get values. None reads
            ``ACCELERATE_INIT_INCLUDE_BUFFERS``, by default False.
    """
    with init_on_device(torch.device("meta"), include_buffers):
        yield


@contextmanager
def init_on_device(device: torch.device, include_buffers: bool | None = None) -> Iterator[None]:
    """Create modules in the block with their parameters on a device; tied weights stay tied.

    Example::

        with init_on_device(accelerator.device):
            model = Model(config)

    Args:
        device: The device.
        include_buffers: Whether everything created in the block is on the device, as in
            ``with torch.device(…)``; otherwise only parameters are. None reads
            ``ACCELERATE_INIT_INCLUDE_BUFFERS``, by default False.
    """
    device = as_device(device)
    if include_buffers is None:
        include_buffers = environment.read_flag("ACCELERATE_INIT_INCLUDE_BUFFERS")

    def place(module: nn.Module, name: str, parameter: nn.Parameter | None) -> Any:
        del module, name
        if parameter is None or parameter.device == device or is_lazy(parameter):
            return None  # register it unchanged
        return as_parameter(parameter.detach().to(device), parameter)

    handle = register_module_parameter_registration_hook(place)
    try:
        with device if include_buffers else nullcontext():
            yield
    finally:
        handle.remove()


def dtype_byte_size(dtype: torch.dtype) -> float:
    """Return the bytes of one value of a dtype or `CustomDtype`; 1/8 for a bool."""
    return 1 / 8 if dtype is torch.bool else dtype.itemsize


def id_tensor_storage(tensor: Tensor) -> tuple[torch.device, int, int]:
    """Return the device, the address and the bytes of a tensor's storage.

    They are equal for tensors that share a storage; meta tensors have the address 0.
    """
    storage = tensor.untyped_storage()
    return tensor.device, storage.data_ptr(), storage.nbytes()


def as_parameter(value: Tensor, like: Tensor) -> Tensor:
    """Return a value as a parameter with the class and attributes of another one."""
    kind: Any = type(like)
    made: Tensor = kind(value.detach(), requires_grad=like.requires_grad)
    vars(made).update(vars(like))
    return made


def named_module_tensors(
    module: nn.Module,
    include_buffers: bool = True,
    recurse: bool = False,
    remove_non_persistent: bool = False,
) -> Iterator[tuple[str, Tensor]]:
    """Yield the parameters and then the buffers of a module, with their names.

    Args:
        module: The module.
        include_buffers: Whether buffers are yielded.
        recurse: Whether tensors of its submodules are yielded.
        remove_non_persistent: Whether non-persistent buffers are left out.
    """
    yield from module.named_parameters(recurse=recurse)
    if include_buffers:
        left_out = non_persistent_buffers(module) if remove_non_persistent else set()
        for name, buffer in module.named_buffers(recurse=recurse):
            if name not in left_out:
                yield name, buffer


def non_persistent_buffers(module: nn.Module) -> set[str]:
    """Return the names of non-persistent buffers, including those of submodules."""
    return {
        f"{path}.{name}".removeprefix(".")
        for path, part in module.named_modules(remove_duplicate=False)
        for name in part._non_persistent_buffers_set  # torch has no public name for them
    }


def find_tied_parameters(model: nn.Module, **kwargs: Any) -> list[list[str]]:
    """Return the sorted names of each parameter with several names.

    Args:
        model: The model, perhaps on the meta device.
        **kwargs: Ignored.
    """
    del kwargs
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return [sorted(group) for group in names.values() if len(group) > 1]


def retie_parameters(model: nn.Module, tied_params: list[list[str]]) -> None:
    """Make each group of names one parameter again, the first one not on the meta device.

    Args:
        model: The model.
        tied_params: The result of `find_tied_parameters`.
    """
    for group in tied_params:
        tensors = [find_tensor(model, name) for name in group]
        real = next((tensor for tensor in tensors if not tensor.is_meta), None)
        if real is not None:
            for name in group:
                set_tensor(model, name, real)


def find_owner(module: nn.Module, name: str) -> tuple[nn.Module, str]:
    """Return the submodule that holds a tensor, and the tensor's name in it.

    Raises:
        ValueError: There is no parameter or buffer of this name.
    """
    path, _, leaf = name.rpartition(".")
    try:
        owner = module.get_submodule(path)
    except AttributeError as error:
        raise ValueError(f"{type(module).__name__} has no {name!r}: {error}.") from error
    names = [name for name, _ in named_module_tensors(owner)]
    if leaf not in names:
        raise ValueError(
            f"{type(module).__name__} does not have a parameter or a buffer named {name!r}; "
            f"{path or 'it'} has {', '.join(names) or 'none'}."
        )
    return owner, leaf


def find_tensor(module: nn.Module, name: str) -> Tensor:
    """Return a parameter or buffer by its full name; see `find_owner`."""
    owner, leaf = find_owner(module, name)
    tensor: Tensor = getattr(owner, leaf)
    return tensor


def set_tensor(module: nn.Module, name: str, value: Tensor) -> None:
    """Replace a parameter or buffer by another one."""
    owner, leaf = find_owner(module, name)
    # With setattr, so that recurrent layers refresh their list of flattened weights.
    setattr(owner, leaf, value)


def memory_of(tensor: Tensor) -> tuple[Any, ...]:
    """Return a key that is equal for two tensors if they are the same values in memory."""
    return tensor.data_ptr() or id(tensor), tensor.dtype, tensor.shape, tensor.stride()


def as_device(device: Device) -> torch.device:
    """Return a device in the form of ``tensor.device``: with its index, if it has one.

    Raises:
        ValueError: This process has no such device.
    """
    try:
        return torch.empty(0, device=device).device
    except (AssertionError, RuntimeError) as error:  # the torch build or the machine lacks it
        count, kind = torch.accelerator.device_count(), torch.accelerator.current_accelerator()
        present = ["'cpu'", *(f"'{kind}:{index}'" for index in range(count))]
        raise ValueError(
            f"There is no device {device!r} here: it must be one of {', '.join(present)} ({error})."
        ) from error


def set_module_tensor_to_device(
    module: nn.Module,
    tensor_name: str,
    device: Device,
    value: Tensor | None = None,
    dtype: str | torch.dtype | None = None,
    fp16_statistics: Tensor | None = None,
    tied_params_map: TiedCopies | None = None,
    non_blocking: bool = False,
    clear_cache: bool = True,
) -> None:
    """Put a parameter or buffer of a module on a device, as a new tensor.

    Args:
        module: The module.
        tensor_name: The tensor's full name.
        device: The device, ``"meta"`` to free the memory.
        value: The new value, of the same shape; None keeps the old one.
        dtype: The dtype to convert a floating-point value to; None means the old tensor's.
        fp16_statistics: The scales of an 8-bit weight of bitsandbytes (its attribute ``SCB``).
        tied_params_map: Copies of tied weights by the address of the original and by device. An
            existing copy is used, and a new one is added; only for addresses that are keys.
        non_blocking: Copy asynchronously.
        clear_cache: Whether to release the accelerator's unused cached memory afterwards.

    Raises:
        ValueError: There is no such tensor, it has another shape, or it is on the meta device and
            no `value` is given.
    """
    owner, leaf = find_owner(module, tensor_name)
    old: Tensor = getattr(owner, leaf)
    target = as_device(device)
    if value is None and old.is_meta and target.type != "meta":
        raise ValueError(
            f"{tensor_name} is on the meta device, we need a `value` to put in on {device}: load "
            "its checkpoint first."
        )
    if value is not None and value.shape != old.shape:
        raise ValueError(
            f"Trying to set a tensor of shape {tuple(value.shape)} in {tensor_name!r} (which has "
            f"shape {tuple(old.shape)}): create the model as it was when it was saved."
        )
    source = old if value is None else value
    wanted = parse_dtype(dtype) if dtype is not None and source.is_floating_point() else old.dtype
    copies = (tied_params_map or {}).get(0 if source.is_meta else source.data_ptr())
    new = None if copies is None else copies.get(target)
    if new is None:
        new = old
        if value is not None or old.device != target or old.dtype != wanted:
            new = source.detach().to(target, wanted, non_blocking=non_blocking)
            new = as_parameter(new, old) if isinstance(old, nn.Parameter) else new
        if fp16_statistics is not None:
            vars(new)["SCB"] = fp16_statistics.to(target, non_blocking=non_blocking)
        if copies is not None:
            copies[target] = new
    setattr(owner, leaf, new)
    if clear_cache and target.type not in ("cpu", "meta"):
        torch.accelerator.empty_cache()


def parse_dtype(dtype: str | torch.dtype) -> torch.dtype:
    """Return a dtype from its name, such as ``"float16"`` or ``"torch.float16"``.

    Raises:
        ValueError: The name is not a dtype's.
    """
    named = getattr(torch, dtype.removeprefix("torch."), 0) if isinstance(dtype, str) else dtype
    if not isinstance(named, torch.dtype):
        raise ValueError(
            f"dtype is {dtype!r}; it must be a torch.dtype or its name, for example 'float16'."
        )
    return named


def longest_prefix(name: str, names: Mapping[str, Any]) -> str | None:
    """Return the longest key that names a module or tensor, or a module that contains it."""
    while name and name not in names:
        name = name.rpartition(".")[0]
    return name if name in names else None
