"""Splitting inputs between processes."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, MutableMapping
from typing import Any

import torch
from torch import Tensor


def split(
    inputs: Any,
    *,
    rank: int,
    world_size: int,
    padding: bool = False,
    device: torch.device | None = None,
) -> Any:
    """Return the inputs of one process: ``len // world_size`` items, one more on the first ranks.

    Args:
        inputs: A list, a tuple, a tensor (along its first dimension), a dataset with ``select``, or
            a nested mapping of those; it is never changed. Anything else, alone or in a mapping,
            goes to every process whole.
        rank: This process.
        world_size: The number of processes; a single one gets the inputs themselves.
        padding: Repeat the last item so that every process has the same number. Empty inputs stay
            empty on every process.
        device: The device for tensors with `padding`, so that they can be gathered.

    Returns:
        The same type as the inputs (a tuple for a named tuple); empty on some processes if there
        are fewer items than processes and no padding.

    Raises:
        ValueError: The values of a mapping have different numbers of items, or a tensor has no
            dimension to split.
    """
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
    repeats = share + (extra > 0) - (stop - start) if padding else 0
    return _take(inputs, range(start, stop), repeats, device if padding else None)


def _splits(value: Any) -> bool:
    return isinstance(value, (list, tuple, Tensor)) or (
        hasattr(value, "select") and hasattr(value, "__len__")
    )


def _lengths(value: Any, name: str) -> Iterator[tuple[str, int]]:
    """Yield the place and the number of items of everything that is split."""
    if isinstance(value, Mapping):
        for key, each in value.items():
            yield from _lengths(each, f"{name}[{key!r}]")
    elif isinstance(value, Tensor) and value.ndim == 0:
        raise ValueError(
            f"{name} is a tensor without dimensions, which cannot be split between processes; "
            "pass its .item() to give it to all of them."
        )
    elif _splits(value):
        yield name, len(value)


def _take(value: Any, items: range, repeats: int, device: torch.device | None) -> Any:
    """Return these items of a value, then its last item `repeats` times."""
    if isinstance(value, Mapping):
        taken = {key: _take(each, items, repeats, device) for key, each in value.items()}
        if type(value) is dict or not isinstance(value, MutableMapping):
            return taken
        result: Any = copy.copy(value)
        for key, each in taken.items():
            result[key] = each
        return result
    if not _splits(value):
        return value
    if isinstance(value, Tensor):
        part = value[items.start : items.stop]
        if repeats:
            part = torch.cat([part, value[-1:].expand(repeats, *value.shape[1:])])
        return part if device is None else part.to(device)
    if isinstance(value, (list, tuple)):
        pair: Any = value[items.start : items.stop], value[-1:]  # both lists, or both tuples
        return pair[0] + pair[1] * repeats
    return value.select([*items, *[len(value) - 1] * repeats])
