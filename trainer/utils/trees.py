"""Work on nested containers, by the names that scripts have for it; see :mod:`trainer.tree`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from trainer.tree import convert_to_fp32, leaves, map_tree, rebuild


@dataclass
class TensorInformation:
    """What a tensor can be made again from, without its values."""

    shape: torch.Size
    dtype: torch.dtype


def is_tensor(value: Any) -> bool:
    """Whether it is a tensor."""
    return isinstance(value, Tensor)


def honor_type(obj: Any, generator: Iterable[Any]) -> Any:
    """What a generator yields, in a container of the type of `obj`: list, tuple or named tuple."""
    if isinstance(obj, tuple) and hasattr(obj, "_make"):
        return obj._make(generator)
    return type(obj)(generator)


def recursively_apply(
    func: Callable[..., Any],
    data: Any,
    *args: Any,
    test_type: Callable[[Any], bool] = is_tensor,
    error_on_other_type: bool = False,
    **kwargs: Any,
) -> Any:
    """Apply a function to what passes a test in nested lists, tuples and mappings.

    Args:
        func: Is called with each such object, and `args` and `kwargs`.
        data: The containers; they are not changed. What passes the test is not looked into.
        *args: For `func`.
        test_type: By default whether it is a tensor.
        error_on_other_type: Refuse other objects; else they stay as they are.
        **kwargs: For `func`.

    Raises:
        TypeError: There is another object, and that is an error.
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

        if isinstance(data, Mapping):
            return rebuild(data, list(map(again, data.values())))
        return honor_type(data, map(again, data))
    if test_type(data):
        return func(data, *args, **kwargs)
    if error_on_other_type:
        raise TypeError(
            f"{getattr(func, '__name__', func)} met a {type(data).__name__}, which "
            f"{getattr(test_type, '__name__', test_type)} does not take."
        )
    return data


def find_device(data: Any) -> torch.device | None:
    """The device of the first tensor in nested containers; None without one."""
    return next((leaf.device for leaf in leaves(data) if isinstance(leaf, Tensor)), None)


def listify(data: Any) -> Any:
    """Every tensor as a number or as nested lists of numbers."""
    return map_tree(lambda leaf: leaf.detach().tolist() if is_tensor(leaf) else leaf, data)


def get_data_structure(data: Any) -> Any:
    """Every tensor's shape and type in its place."""
    return map_tree(
        lambda leaf: TensorInformation(leaf.shape, leaf.dtype) if is_tensor(leaf) else leaf, data
    )


def initialize_tensors(data_structure: Any) -> Any:
    """Tensors of any values where `get_data_structure` has left their shapes and types."""
    return recursively_apply(
        lambda each: torch.empty(each.shape, dtype=each.dtype),
        data_structure,
        test_type=lambda value: isinstance(value, TensorInformation),
    )


def pad_input_tensors(tensor: Any, batch_size: int, num_processes: int, dim: int = 0) -> Any:
    """Every tensor padded with zeros so that the processes can share it out evenly.

    Args:
        tensor: Tensors in nested containers.
        batch_size: Their size along `dim`.
        num_processes: What the size is to be a multiple of.
        dim: The dimension to pad.

    Raises:
        TypeError: There is something else than tensors.
    """

    def pad(leaf: Tensor) -> Tensor:
        shape = list(leaf.shape)
        shape[dim] = -batch_size % num_processes
        return torch.cat([leaf, leaf.new_zeros(shape)], dim=dim)

    return recursively_apply(pad, tensor, error_on_other_type=True)


def convert_outputs_to_fp32(model_forward: Callable[..., Any]) -> Callable[..., Any]:
    """The function with every float16 and bfloat16 tensor that it returns as float32."""

    @functools.wraps(model_forward)
    def forward(*args: Any, **kwargs: Any) -> Any:
        return convert_to_fp32(model_forward(*args, **kwargs))

    return forward


def merge_dicts(source: Mapping[str, Any], destination: dict[str, Any]) -> dict[str, Any]:
    """Put what one dict holds into another, dict by dict; the second is changed and returned."""
    for key, value in source.items():
        if isinstance(value, dict):
            merge_dicts(value, destination.setdefault(key, {}))
        else:
            destination[key] = value
    return destination
