"""Nested containers of tensors, for scripts; our own code uses `trainer.tree`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from trainer.distributed.collectives import broadcast
from trainer.distributed.objects import gather_object
from trainer.state import PartialState
from trainer.tree import children, convert_to_fp32, leaves, map_tree, rebuild


@dataclass
class TensorInformation:
    """The shape and dtype of a tensor, without its values."""

    shape: torch.Size
    dtype: torch.dtype


def is_torch_tensor(tensor: Any) -> bool:
    """Return whether a value is a tensor."""
    return isinstance(tensor, Tensor)


def is_tensor_information(tensor_info: Any) -> bool:
    """Return whether a value is a `TensorInformation`."""
    return isinstance(tensor_info, TensorInformation)


def is_namedtuple(data: Any) -> bool:
    """Return whether a value is a named tuple."""
    return isinstance(data, tuple) and hasattr(data, "_fields") and hasattr(data, "_asdict")


def honor_type(obj: Any, generator: Iterable[Any]) -> Any:
    """Return a generator's items in a list or tuple with the class and attributes of `obj`."""
    return rebuild(obj, list(generator))


def recursively_apply(
    func: Callable[..., Any],
    data: Any,
    *args: Any,
    test_type: Callable[[Any], bool] = is_torch_tensor,
    error_on_other_type: bool = False,
    **kwargs: Any,
) -> Any:
    """Apply a function to the objects that pass a test in nested lists, tuples and mappings.

    Args:
        func: Called with each such object, `args` and `kwargs`.
        data: The containers; they are not changed. Containers that pass the test are not entered.
        *args: Further arguments of `func`.
        test_type: The test; by default whether the object is a tensor.
        error_on_other_type: Raise for other objects; by default they are returned unchanged.
        **kwargs: Further arguments of `func`.

    Raises:
        TypeError: There is another object and `error_on_other_type` is True.
    """
    if isinstance(data, (list, tuple, Mapping)) and not test_type(data):

        def again(value: Any) -> Any:
            return recursively_apply(
                func,
                value,
                *args,
                test_type=test_type,
                error_on_other_type=error_on_other_type,
                **kwargs,
            )

        return rebuild(data, [again(value) for _, value in children(data) or ()])
    if test_type(data):
        return func(data, *args, **kwargs)
    if error_on_other_type:
        raise TypeError(
            f"{getattr(func, '__name__', func)} found a {type(data).__name__}, which "
            f"{getattr(test_type, '__name__', test_type)} does not accept."
        )
    return data


def copy_tensor_to_devices(tensor: Tensor | None = None) -> Tensor:
    """Broadcast the tensor of one process; the others pass None. Collective.

    Raises:
        ValueError: No process has a tensor, or several have.
    """
    state = PartialState()
    specs = gather_object([None if tensor is None else (tensor.shape, tensor.dtype)])
    owners = [rank for rank, spec in enumerate(specs) if spec is not None]
    if len(owners) != 1:
        raise ValueError(
            f"copy_tensor_to_devices was given a tensor on the processes {owners}; it must be one."
        )
    shape, dtype = specs[owners[0]]
    made = torch.empty(shape, dtype=dtype, device=state.device) if tensor is None else tensor
    return broadcast(made, owners[0])  # type: ignore[no-any-return]  # a tensor, as given


def find_device(data: Any) -> torch.device | None:
    """Return the device of the first tensor in nested containers; None without a tensor."""
    return next((leaf.device for leaf in leaves(data) if isinstance(leaf, Tensor)), None)


def listify(data: Any) -> Any:
    """Return the containers with each tensor as a number or nested lists of numbers."""
    return map_tree(lambda leaf: leaf.detach().tolist() if is_torch_tensor(leaf) else leaf, data)


def get_data_structure(data: Any) -> Any:
    """Return the containers with each tensor replaced by its `TensorInformation`."""
    return map_tree(
        lambda leaf: TensorInformation(leaf.shape, leaf.dtype) if is_torch_tensor(leaf) else leaf,
        data,
    )


def initialize_tensors(data_structure: Any) -> Any:
    """Return uninitialised tensors for a result of `get_data_structure`."""
    return recursively_apply(
        lambda info: torch.empty(info.shape, dtype=info.dtype),
        data_structure,
        test_type=is_tensor_information,
    )


def pad_input_tensors(tensor: Any, batch_size: int, num_processes: int, dim: int = 0) -> Any:
    """Pad every tensor with zeros so that it can be divided evenly among the processes.

    Args:
        tensor: Tensors in nested containers.
        batch_size: The tensors' size along `dim`.
        num_processes: The padded size is a multiple of this number.
        dim: The dimension to pad.

    Raises:
        TypeError: A leaf is not a tensor.
    """

    def pad(leaf: Tensor) -> Tensor:
        shape = list(leaf.shape)
        shape[dim] = -batch_size % num_processes
        return torch.cat([leaf, leaf.new_zeros(shape)], dim=dim)

    return recursively_apply(pad, tensor, error_on_other_type=True)


def convert_outputs_to_fp32(model_forward: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function to convert float16 and bfloat16 tensors in its result to float32."""

    @functools.wraps(model_forward)
    def forward(*args: Any, **kwargs: Any) -> Any:
        return convert_to_fp32(model_forward(*args, **kwargs))

    return forward


def merge_dicts(source: Mapping[str, Any], destination: dict[str, Any]) -> dict[str, Any]:
    """Merge `source` recursively into `destination`, which is changed and returned."""
    for key, value in source.items():
        if isinstance(value, dict):
            merge_dicts(value, destination.setdefault(key, {}))
        else:
            destination[key] = value
    return destination
