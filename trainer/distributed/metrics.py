"""Gathering what metrics are computed from: every sample of the loader exactly once."""

from __future__ import annotations

import logging
import operator
from collections.abc import Iterable, Set
from typing import Any

from torch import Tensor

from trainer.distributed.collectives import gather_uneven
from trainer.distributed.debug import is_checked
from trainer.distributed.meeting import meet
from trainer.distributed.objects import gather_object, gather_object_from, is_sequence
from trainer.state import GradientState, PartialState
from trainer.tree import children, leaves, map_tree, rebuild

logger = logging.getLogger(__name__)


def gather_for_metrics(input_data: Any, use_gather_object: bool = False) -> Any:
    """Gather predictions and targets of all processes, without the loader's repeated samples.

    Call it inside the loop over the prepared loader that yielded the data: at the loader's last
    batch the gathered samples are cut to the real ones, also with one process. In nested loops the
    innermost loader counts. After ``next(iter(loader))`` or a ``break``, the batch read last counts
    as the current one until another loader is read. Every process must call it equally often: where
    ``even_batches=False`` leaves a process without a last batch, leave the loop on all of them.

    Args:
        input_data: What one process returns for its batch:

            - A column: a tensor, which is concatenated along its first dimension, or any other
              sequence with one object per sample, see `gather_object`. Numbers of samples may
              differ between processes.
            - A mapping, named tuple or dataclass, or a tuple or list of columns. Each entry is
              gathered separately.
            - A list of mappings, dataclasses, lists or tuples is a column of samples, unless its
              length is not that of the batch and that of its entries is.
            - Anything else, such as a tensor without dimensions or a number, gives one value per
              process and is never cut.
        use_gather_object: Gather tensors as objects too: their other dimensions may then differ,
            and a list of tensors, or a tuple of tensors that differ in length, holds one per
            sample.

    Returns:
        The samples of all processes in the order of the loader. With one process tensors are
        returned as they are, apart from the cut, and objects as `gather_object` returns them.

    Raises:
        ValueError: There are several processes, and a list or tuple of tensors may hold columns or
            samples, or the length of a column to be cut is not the number of samples in the batch.
        Exception: See `gather` and `gather_object`.
    """
    found = [] if use_gather_object else list(leaves(input_data))
    if found and all(isinstance(leaf, Tensor) for leaf in found) and _has_only_columns(input_data):
        return _gather_tensors(input_data)
    if _has_columns(input_data, use_gather_object):
        entries = children(input_data) or []
        if PartialState().num_processes > 1:  # otherwise entries could be mixed up
            names = ", ".join(repr(name) for name, _ in entries)
            meet(f"gather_for_metrics ({type(input_data).__name__} of {names})")
        return rebuild(input_data, [gather_for_metrics(v, use_gather_object) for _, v in entries])
    if not is_sequence(input_data):
        return gather_object(input_data)
    processes = GradientState()._real_parts
    objects = gather_object_from(input_data, processes)
    return objects if processes is not None else _cut(objects, len(input_data))


def _gather_tensors(tree: Any) -> Any:
    processes = GradientState()._real_parts
    gathered = gather_uneven(tree, processes)
    if processes is not None:  # batches of unknown sizes, repeated whole
        return gathered
    whole = list(leaves(gathered))
    pairs = zip(leaves(tree), whole, strict=True)
    cut = [_cut(all_, len(own)) if own.ndim else all_ for own, all_ in pairs]
    if all(map(operator.is_, cut, whole)):
        return gathered
    parts = iter(cut)
    return map_tree(lambda _: next(parts), tree)


def _has_only_columns(tree: Any) -> bool:
    """Return whether all containers in a tree have columns."""
    entries = children(tree)
    return not entries or (
        _has_columns(tree, False) and all(_has_only_columns(value) for _, value in entries)
    )


def _has_columns(thing: Any, use_gather_object: bool) -> bool:
    """Return whether the entries of a container are columns rather than samples.

    Raises:
        ValueError: There are several processes, and either is possible.
    """
    entries = children(thing)
    if entries is None:
        return False
    values = [value for _, value in entries]
    if not isinstance(thing, (list, tuple)) or hasattr(thing, "_fields"):
        return True
    if isinstance(thing, list) and use_gather_object:
        return False
    batch = GradientState()._batch_sizes
    lengths = _lengths(values, batch)
    if not lengths and not any(isinstance(value, Tensor) for value in values):
        return False
    of_samples = len(thing) in batch
    of_process = set() if use_gather_object else {1}  # one row may be a value of the process
    of_columns = lengths <= batch | of_process
    fit = len(lengths - of_process) <= 1 and (of_columns or not of_samples)
    if use_gather_object or not any(isinstance(value, Tensor) for value in values):
        return fit and (isinstance(thing, tuple) or (bool(batch) and of_columns and not of_samples))
    if not fit and PartialState().num_processes > 1:
        problem = ValueError(
            f"gather_for_metrics got a {type(thing).__name__} of {len(thing)} entries with tensors "
            f"whose first dimensions are {sorted(lengths)}, so it cannot know the number of "
            "samples. If it holds one tensor per sample, pass use_gather_object=True; if it holds "
            "tensors with one row per sample, gather those of equal length together."
        )
        if is_checked():
            meet("gather_for_metrics", problem=problem)
        raise problem
    return True


def _lengths(values: Iterable[Any], batch: Set[int]) -> set[int]:
    """Return the lengths of columns, also of those in containers."""
    found: set[int] = set()
    for value in values:
        entries = [entry for _, entry in children(value) or ()]
        holds = not is_sequence(value) or any(isinstance(entry, Tensor) for entry in entries)
        if holds and not (is_sequence(value) and len(value) in batch):
            found |= _lengths(entries, batch)
        elif is_sequence(value):
            found.add(len(value))
    return found


def _cut(samples: Any, own: int) -> Any:
    """Cut the samples that the loader repeated to fill the last batches.

    Args:
        samples: A gathered column.
        own: The length of this process's part of it.
    """
    state = GradientState()
    real = state._real_samples(len(samples))
    if real is None or real >= len(samples):
        return samples
    several = PartialState().num_processes > 1
    if real < 0:
        if several:
            logger.info(
                "The loader does not know how many of its last samples are repeated ones; "
                "gather_for_metrics returns all of them."
            )
        return samples
    batch = state._batch_sizes
    if not batch or own in batch:
        return samples[:real]
    if several and own > 1:
        raise ValueError(
            f"gather_for_metrics got {own} entries for the loader's last batch, which has "
            f"{min(batch)} samples, so it cannot know which belong to repeated samples. Pass one "
            "entry per sample, as objects with use_gather_object=True where they differ in size; "
            "gather and gather_object cut nothing."
        )
    return samples
