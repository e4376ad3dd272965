"""Nested containers of tensors: map over them, find their batch size, put them on a device.

A tree is a tensor, or a list, tuple, named tuple or mapping of trees; anything else is a leaf that
passes through untouched.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence


def map_tree(function: Callable[[Any], Any], tree: Any) -> Any:
    """Apply `function` to every leaf; containers keep their types.

    Args:
        function: Takes a leaf, returns its replacement.
        tree: The nested containers; they are not changed.
    """
    if isinstance(tree, Mapping):
        items = {key: map_tree(function, value) for key, value in tree.items()}
        return _rebuild_mapping(tree, items)
    if isinstance(tree, PackedSequence):  # its batch sizes stay on the host wherever the rest is
        indices = map(function, (tree.sorted_indices, tree.unsorted_indices))
        return PackedSequence(function(tree.data), tree.batch_sizes, *indices)
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):  # a named tuple
        return type(tree)(*(map_tree(function, value) for value in tree))
    if isinstance(tree, (list, tuple)):
        return type(tree)(map_tree(function, value) for value in tree)
    return function(tree)


def _rebuild_mapping(like: Mapping[Any, Any], items: dict[Any, Any]) -> Any:
    """A mapping of the type of `like`; subclasses such as ``BatchEncoding`` take a dict."""
    if type(like) is dict:
        return items
    if isinstance(like, defaultdict):
        return type(like)(like.default_factory, items)
    return type(like)(items)  # type: ignore[call-arg]  # Mapping itself declares no constructor


def leaves(tree: Any) -> Iterator[Any]:
    """Every leaf, in the order of the containers."""
    if isinstance(tree, Mapping):
        for value in tree.values():
            yield from leaves(value)
    elif isinstance(tree, (list, tuple)) and not isinstance(tree, PackedSequence):
        for value in tree:
            yield from leaves(value)
    else:
        yield tree


def to_device(tree: Any, device: torch.device, *, non_blocking: bool = False) -> Any:
    """Copy every leaf that has a ``.to`` (tensors, packed sequences, …) to `device`."""

    def move(leaf: Any) -> Any:
        if isinstance(leaf, Tensor) or hasattr(leaf, "to"):
            return leaf.to(device, non_blocking=non_blocking)
        return leaf

    return map_tree(move, tree)


def detach(tree: Any) -> Any:
    """Every tensor without its graph."""
    return map_tree(lambda leaf: leaf.detach() if isinstance(leaf, Tensor) else leaf, tree)


def to_host(tree: Any) -> Any:
    """Every tensor detached and copied to host memory."""
    return map_tree(lambda leaf: leaf.detach().cpu() if isinstance(leaf, Tensor) else leaf, tree)


def find_batch_size(tree: Any) -> int | None:
    """The length of the first dimension of the first tensor that has one; None without any."""
    for leaf in leaves(tree):
        if isinstance(leaf, PackedSequence):
            return int(leaf.batch_sizes[0])  # every sequence has a first step
        if isinstance(leaf, Tensor) and leaf.ndim > 0:
            return leaf.shape[0]
    return None
