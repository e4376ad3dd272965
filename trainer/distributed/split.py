"""Split inputs (lists, tensors, datasets, …) between processes, without a loader."""

from __future__ import annotations

from collections import UserList, deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy
import torch
from torch import Tensor
from torch.utils.data import IterableDataset, Subset

from trainer.tree import rebuild


def split(
    inputs: Any,
    *,
    rank: int,
    world_size: int,
    padding: bool = False,
    device: torch.device | None = None,
) -> Any:
    """Return one rank's part of the inputs: ``len // world_size`` items, one more on low ranks.

    Args:
        inputs: An object with a length and an index: a list, tuple, range, deque, tensor or array
            (split along the first dimension), data frame or map-style dataset. Or a nested mapping
            of these, whose other values (strings, numbers, objects) go to every process. It is not
            changed.
        rank: The rank of this process.
        world_size: The number of processes; a single process gets the inputs themselves.
        padding: Repeat the last item so that every process has the same number of items. Empty
            inputs stay empty on every process.
        device: The device to which tensors are moved with `padding`, so that they can be gathered.

    Returns:
        The same type as the inputs, except for a tuple for a named tuple, a list for a padded
        range, and a `torch.utils.data.Subset` for an unknown type. It is empty on some processes if
        there are fewer items than processes and no padding.

    Raises:
        ValueError: The values of a mapping have different numbers of items, or a tensor or array
            has no dimension to split.
        TypeError: The inputs, or an iterable in a mapping, have no length or no index.
    """
    if not isinstance(inputs, Mapping) and not _has_items(inputs):
        raise _refusal(inputs, "inputs")
    lengths = dict(_lengths(inputs, "inputs"))
    if len(set(lengths.values())) > 1:
        found = ", ".join(f"{name} {length}" for name, length in lengths.items())
        raise ValueError(
            "All values in the dictionary must have the same length to be split between processes; "
            f"the numbers of items are: {found}."
        )
    if world_size == 1 or not lengths:
        return inputs
    length = next(iter(lengths.values()))
    share, extra = divmod(length, world_size)
    start = rank * share + min(rank, extra)
    stop = start + share + (rank < extra)
    repeats = share + (extra > 0) - (stop - start) if padding and length else 0
    return _take(inputs, range(start, stop), repeats, device if padding else None)


def _has_items(value: Any) -> bool:
    """Return whether a value has a length and can be indexed."""
    kind = type(value)
    indexed = hasattr(kind, "__getitem__") or hasattr(kind, "select")
    return (
        indexed
        and hasattr(kind, "__len__")
        and not isinstance(value, (str, bytes, Mapping, IterableDataset))
    )


def _lengths(value: Any, name: str) -> Iterator[tuple[str, int]]:
    """Yield the path and the number of items of each value that is split.

    Raises:
        ValueError: A tensor or array has no dimension.
        TypeError: An iterable has no length or no index.
    """
    if isinstance(value, Mapping):
        for key, each in value.items():
            yield from _lengths(each, f"{name}[{key!r}]")
    elif getattr(value, "shape", None) == ():
        kind = "a tensor" if isinstance(value, Tensor) else "an array"
        raise ValueError(
            f"{name} is {kind} without dimensions, which cannot be split between processes; pass "
            "its .item() to give it to all of them."
        )
    elif _has_items(value):
        yield name, len(value)
    elif hasattr(type(value), "__iter__") and not isinstance(value, (str, bytes)):
        raise _refusal(value, name)


def _refusal(value: Any, name: str) -> TypeError:
    return TypeError(
        f"{name} is a {type(value).__name__}, which cannot be split between processes: it has no "
        "length and index for each item, as a list, an array or a map-style dataset has. Pass a "
        "list of its items; a value for all processes needs no splitting. Loaders and streams are "
        "divided by prepare()."
    )


def _take(value: Any, items: range, repeats: int, device: torch.device | None) -> Any:
    """Return the given items of a value, followed by its last item `repeats` times."""
    if isinstance(value, Mapping):
        return rebuild(value, [_take(each, items, repeats, device) for each in value.values()])
    if not _has_items(value):
        return value
    own = slice(items.start, items.stop)
    indices: Sequence[int] = [*items, *[len(value) - 1] * repeats] if repeats else items
    if isinstance(value, (list, tuple, UserList)):
        parts: Any = value[own], value[-1:]  # of the same type
        return parts[0] + parts[1] * repeats
    if isinstance(value, Tensor):
        part = value[own]
        if repeats:
            part = torch.cat([part, value[-1:].expand(repeats, *value.shape[1:])])
        return part if device is None else part.to(device)
    if isinstance(value, numpy.ndarray):
        return value[indices] if repeats else value[own]
    if isinstance(value, range):
        return [value[index] for index in indices] if repeats else value[own]
    if isinstance(value, deque):
        return deque((value[index] for index in indices), value.maxlen)
    if hasattr(value, "iloc"):  # a data frame; its `select` would take columns
        return value.iloc[indices]
    if hasattr(value, "select"):  # a dataset of the library `datasets`
        return value.select(indices)
    return Subset(value, indices)
