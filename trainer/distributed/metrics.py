"""`gather_for_metrics`: gather predictions and targets, with every sample exactly once."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Set
from typing import Any

from torch import Tensor

from trainer.distributed.collectives import gather_uneven, is_checked
from trainer.distributed.guards import check_collective
from trainer.distributed.objects import gather_object_from, is_sequence
from trainer.errors import module_logger
from trainer.state import GradientState, PartialState
from trainer.tree import children, leaves, map_tree, rebuild

logger = module_logger(__name__)


def gather_for_metrics(input_data: Any, use_gather_object: bool = False, copies: int = 1) -> Any:
    """Gather predictions and targets of all processes, without the loader's padding samples.

    Call it inside the loop over the prepared loader that yielded the data. At the loader's last
    batch, the padding (samples that were repeated to fill the batch) is dropped, even with one
    process. In nested loops, the innermost loader counts. After ``next(iter(loader))`` or a
    ``break``, the last batch that was read counts until another loader is read.

    It is a collective: every process must call it the same number of times. With
    ``even_batches=False``, some processes may have no last batch. Then leave the loop before it on
    all processes.

    Args:
        input_data: The data of this process's batch:

            - A column: a tensor of shape (N, …), which is concatenated along its first dimension,
              or another sequence with one object per sample (see `gather_object`). The number of
              samples N may differ between processes.
            - A mapping, named tuple or dataclass, or a tuple or list of columns: each entry is
              gathered separately.
            - A list of mappings, dataclasses, lists or tuples: one column with one entry per
              sample, unless only the lengths of its entries match the batch size.
            - Any other value, such as a 0-d tensor or a number: one value per process, and nothing
              is dropped.
        use_gather_object: Gather tensors as objects. Their other dimensions may then differ. A list
            of tensors, or a tuple of tensors of different lengths, then has one tensor per sample.
        copies: The number of processes that have the same samples, which are returned only once.

    Returns:
        The samples of all processes, in the order of the loader. With one process, tensors are
        returned unchanged except for the dropped padding, and objects as by `gather_object`.

    Raises:
        ValueError: There are several processes, and a list or tuple of tensors could hold columns
            or samples; or padding must be dropped from a column whose length is not the number of
            samples in the batch.
        Exception: See `gather` and `gather_object`.
    """
    GradientState()._begin_gather()
    flat = [] if use_gather_object else list(leaves(input_data))
    if flat and all(isinstance(leaf, Tensor) for leaf in flat) and _has_only_columns(input_data):
        return _gather_tensors(input_data, copies)
    if _has_columns(input_data, use_gather_object):
        entries = children(input_data) or []
        if PartialState().num_processes > 1:  # otherwise entries could be mixed up
            names = ", ".join(repr(name) for name, _ in entries)
            check_collective(f"gather_for_metrics ({type(input_data).__name__} of {names})")
        gathered = [gather_for_metrics(v, use_gather_object, copies) for _, v in entries]
        return rebuild(input_data, gathered)
    if not is_sequence(input_data):
        return gather_object_from(input_data, None, copies)
    processes = GradientState()._real_parts
    objects = gather_object_from(input_data, processes, copies)
    return objects if processes is not None else _cut(objects, len(input_data))


def _gather_tensors(tree: Any, copies: int) -> Any:
    processes = GradientState()._real_parts
    gathered = gather_uneven(tree, processes, copies)
    if processes is not None:  # batches of unknown size, so padding is whole batches
        return gathered
    gathered_leaves = list(leaves(gathered))
    pairs = zip(leaves(tree), gathered_leaves, strict=True)
    cut = [_cut(all_, len(local)) if local.ndim else all_ for local, all_ in pairs]
    if all(map(operator.is_, cut, gathered_leaves)):
        return gathered
    parts = iter(cut)
    return map_tree(lambda _: next(parts), tree)


def _has_only_columns(tree: Any) -> bool:
    """Return whether all containers in a tree hold columns."""
    entries = children(tree)
    return not entries or (
        _has_columns(tree, False) and all(_has_only_columns(value) for _, value in entries)
    )


def _has_columns(thing: Any, use_gather_object: bool) -> bool:
    """Return whether the entries of a container are columns, not samples.

    Raises:
        ValueError: There are several processes, and the container is ambiguous.
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
    of_process = set() if use_gather_object else {1}  # length 1 may be one value per process
    of_columns = lengths <= batch | of_process
    fit = len(lengths - of_process) <= 1 and (of_columns or not of_samples)
    if isinstance(thing, list) and of_samples and len(thing) > 1 and not lengths & batch:
        fit = False  # as many single values as samples: one per sample or one per process?
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
            check_collective("gather_for_metrics", problem=problem)
        raise problem
    return True


def _lengths(values: Iterable[Any], batch: Set[int]) -> set[int]:
    """Return the lengths of the columns among `values`, including those inside containers."""
    lengths: set[int] = set()
    for value in values:
        entries = [entry for _, entry in children(value) or ()]
        holds = not is_sequence(value) or any(isinstance(entry, Tensor) for entry in entries)
        if holds and not (is_sequence(value) and len(value) in batch):
            lengths |= _lengths(entries, batch)
        elif is_sequence(value):
            lengths.add(len(value))
    return lengths


def _cut(samples: Any, local: int) -> Any:
    """Drop the padding samples of the last batch from a gathered column.

    Args:
        samples: The gathered column.
        local: The length of this process's part of the column.

    Raises:
        ValueError: `own` is not the number of samples in this process's batch.
    """
    state = GradientState()
    real = state._real_samples(len(samples))
    if real is None or real >= len(samples):
        return samples
    several = PartialState().num_processes > 1
    if real < 0:
        if several:
            logger.info(
                "The number of repeated samples at the end of the loader is unknown; "
                "gather_for_metrics returns all samples."
            )
        return samples
    batch = state._batch_sizes
    if not batch or local in batch:
        return samples[:real]
    if several and local > 1:
        raise ValueError(
            f"gather_for_metrics got {local} entries for the loader's last batch, which has "
            f"{min(batch)} samples, so it cannot know which belong to repeated samples. Pass one "
            "entry per sample (with use_gather_object=True if they differ in size), or use "
            "gather or gather_object, which drop nothing."
        )
    return samples
