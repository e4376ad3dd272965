"""Count the samples in a batch, split and concatenate batches, and send them between processes.

A batch is a tree of containers. Its tensors have the shape ``(N, …)``, with one row per sample. A
list or tuple without tensors and without nested lists (names, paths, dicts of plain values) is a
column, with one entry per sample. Any other value (a number, a string, a 0-d tensor) belongs to the
whole batch.

After concatenation, a list could have as many entries as the joined batch has samples by chance. So
`wrap_columns` records which lists are columns before batches are concatenated.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from trainer.tree import children, leaves, map_tree, rebuild


class Column:
    """Wraps a list of a batch, so that tree functions treat the list as one leaf.

    Attributes:
        values: The list or tuple.
        counts: Whether the list has one entry per sample.
    """

    def __init__(self, values: Any, *, counts: bool) -> None:
        self.values, self.counts = values, counts


def wrap_columns(batch: Any) -> Any:
    """Return a batch with its lists wrapped in `Column`, for the functions below."""
    samples = samples_in(batch)

    def mark(value: Any) -> Any:
        return Column(value, counts=len(value) == samples) if _is_column(value) else value

    return _map(mark, batch)


def unwrap_columns(batch: Any) -> Any:
    """Undo `wrap_columns`: return the batch with plain lists in place of each `Column`."""
    return _map(lambda value: value.values if isinstance(value, Column) else value, batch)


def length(batch: Any) -> int:
    """Return the number of samples in a batch.

    Raises:
        ValueError: The batch has no tensor or column that counts samples, or its tensors have
            different first dimensions.
    """
    samples = samples_in(batch)
    if samples is not None:
        return samples
    rows = _rows(batch)
    contents = f"tensors of the lengths {sorted(rows)}" if rows else f"a {type(batch).__name__}"
    raise ValueError(
        f"A batch cannot be split into samples: it holds {contents}. Let collate_fn return tensors "
        "whose first dimension counts the samples, or make each process read its own batches: "
        "dispatch_batches=False without split_batches."
    )


def samples_in(batch: Any) -> int | None:
    """Return the number of samples in a batch; None if it cannot be split into samples."""
    rows = _rows(batch)
    if any(isinstance(leaf, PackedSequence) for leaf in leaves(batch)):
        return None
    return rows.pop() if len(rows) == 1 else None


def take(batch: Any, start: int, stop: int) -> Any:
    """Return samples ``start:stop`` as a batch."""
    samples = length(batch)

    def cut(value: Any) -> Any:
        if not _counts(value, samples):
            return value
        if isinstance(value, Column):
            return Column(value.values[start:stop], counts=True)
        return value[start:stop]

    return _map(cut, batch)


def concatenate(batches: Sequence[Any]) -> Any:
    """Concatenate several batches along the sample dimension.

    Raises:
        ValueError: The batches differ in structure, in the shape of a sample, or in a value that
            belongs to the whole batch.
    """
    if len(batches) == 1:
        return batches[0]
    sizes = [length(batch) for batch in batches]
    parts = [_parts(batch) for batch in batches]
    if len({tuple(path for path, _ in batch_parts) for batch_parts in parts}) > 1:
        raise ValueError(_mismatch("their keys or their numbers of tensors differ"))
    joined = iter([_join(values, sizes) for values in zip(*parts, strict=True)])
    return _map(lambda _: next(joined), batches[0])


def _join(entries: Sequence[tuple[str, Any]], sizes: Sequence[int]) -> Any:
    """Concatenate the values that several batches have at the same path in the tree."""
    path, values = entries[0][0] or "the batch", [value for _, value in entries]
    if all(_counts(value, size) for value, size in zip(values, sizes, strict=True)):
        if isinstance(values[0], Column):
            lists = [value.values for value in values]
            return Column(type(lists[0])(chain.from_iterable(lists)), counts=True)
        if not isinstance(values[0], Tensor):
            return type(values[0])(chain.from_iterable(values))
        shapes = sorted({tuple(value.shape[1:]) for value in values})
        if len(shapes) > 1:
            raise ValueError(_mismatch(f"samples have the shapes {shapes} in {path}"))
        return torch.cat(values)
    first, *others = map(unwrap_columns, values)
    for other in others:
        if not _equal(first, other):
            raise ValueError(_mismatch(f"{path} is {first!r} in one and {other!r} in another"))
    return Column(first, counts=False) if isinstance(values[0], Column) else first


def _mismatch(what: str) -> str:
    return (
        f"The batches of the processes cannot be joined to be split again: {what}. Pass "
        "split_batches=True to split one batch at a time, dispatch_batches=False to let every "
        "process read its own, or pad them alike in collate_fn."
    )


def pad_batch(batch: Any, beginning: Any, samples: int) -> Any:
    """Pad a batch to `samples` samples by repeating the samples of the batch `beginning`."""
    missing = samples - length(batch)
    repeats, rest = divmod(max(missing, 0), length(beginning))
    last = [take(beginning, 0, rest)] if rest else []
    return concatenate([batch, *[beginning] * repeats, *last])


def _map(function: Callable[[Any], Any], tree: Any) -> Any:
    """Apply `function` to every leaf: tensors, columns, and other values that are no containers."""
    parts = children(tree)
    if parts is None or _is_column(tree):
        return function(tree)
    return rebuild(tree, [_map(function, value) for _, value in parts])


def _parts(tree: Any, path: str = "") -> list[tuple[str, Any]]:
    """Return the leaves that `_map` visits, each with its path in the tree."""
    parts = children(tree)
    if parts is None or _is_column(tree):
        return [(path, tree)]
    return [leaf for key, value in parts for leaf in _parts(value, f"{path}[{key!r}]")]


def _is_column(tree: Any) -> bool:
    return type(tree) in (list, tuple) and not any(
        isinstance(value, (list, tuple, PackedSequence))
        or any(isinstance(leaf, Tensor) for leaf in leaves(value))
        for value in tree
    )


def _rows(batch: Any) -> set[int]:
    """Return the distinct lengths of a batch's tensors, or of its first column without tensors."""
    values = [value for _, value in _parts(batch)]
    rows = {value.shape[0] for value in values if isinstance(value, Tensor) and value.ndim > 0}
    lists = [value for value in values if _is_column(value)]
    lists += [value.values for value in values if isinstance(value, Column) and value.counts]
    return rows or set(map(len, lists[:1]))


def _counts(value: Any, samples: int) -> bool:
    """Return whether the value has one entry per sample."""
    if isinstance(value, Tensor):
        return value.ndim > 0
    if isinstance(value, Column):
        return value.counts
    return _is_column(value) and len(value) == samples


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return torch.equal(a, b)
    return type(a) is type(b) and bool(a == b)


class TensorSlot:
    """Stands for a tensor that is sent separately; has its shape and dtype."""

    def __init__(self, tensor: Tensor) -> None:
        self.shape, self.dtype = tuple(tensor.shape), tensor.dtype


def split_off_tensors(batch: Any) -> tuple[Any, list[Tensor]]:
    """Return a batch's picklable skeleton, with a `TensorSlot` for each tensor; and the tensors."""
    tensors: list[Tensor] = []

    def take_out(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        tensors.append(leaf)
        return TensorSlot(leaf)

    return map_tree(take_out, batch), tensors


def insert_tensors(skeleton: Any, device: torch.device | None) -> tuple[Any, list[Tensor]]:
    """Rebuild a batch from its skeleton, with empty tensors on `device`.

    Returns:
        The batch, and its tensors, which the caller fills (by a broadcast, for example).
    """
    tensors: list[Tensor] = []

    def put_in(leaf: Any) -> Any:
        if not isinstance(leaf, TensorSlot):
            return leaf
        tensors.append(torch.empty(leaf.shape, dtype=leaf.dtype, device=device))
        return tensors[-1]

    return map_tree(put_in, skeleton), tensors
