"""Gathering what metrics are computed from: every sample of the loader exactly once."""

from __future__ import annotations

import logging
import operator
from collections.abc import Mapping
from dataclasses import is_dataclass
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
        input_data: One of

            - Tensors in nested containers. They are concatenated along their first dimension, the
              samples of this batch, whose size may differ between processes. Tensors without
              dimensions are gathered as one value per process, and never cut.
            - A mapping, named tuple or dataclass of anything else, or a list or tuple with both
              tensors and other objects. Each entry is gathered separately.
            - Any other sequence, with one object per sample: see `gather_object`. Anything that is
              not a sequence gives one entry per process and is never cut.
        use_gather_object: Gather tensors as objects too: their other dimensions may then differ,
            and a sequence of tensors holds one per sample.

    Returns:
        The samples of all processes in the order of the loader. With one process tensors are
        returned as they are, apart from the cut, and objects as `gather_object` returns them.

    Raises:
        Exception: See `gather` and `gather_object`.
    """
    found = list(leaves(input_data))
    if found and not use_gather_object and all(isinstance(leaf, Tensor) for leaf in found):
        return _gather_tensors(input_data)
    if _is_record(input_data, use_gather_object):
        entries = children(input_data) or []
        if PartialState().num_processes > 1 and is_checked():  # otherwise entries could be mixed up
            names = ", ".join(repr(name) for name, _ in entries)
            meet(f"gather_for_metrics ({type(input_data).__name__} of {names})")
        return rebuild(input_data, [gather_for_metrics(v, use_gather_object) for _, v in entries])
    if not is_sequence(input_data):
        return gather_object(input_data)
    processes = GradientState()._real_parts
    objects = gather_object_from(input_data, processes)
    return objects if processes is not None else _cut(objects)


def _gather_tensors(tree: Any) -> Any:
    processes = GradientState()._real_parts
    gathered = gather_uneven(tree, processes)
    if processes is not None:  # batches of unknown sizes, repeated whole
        return gathered
    whole = list(leaves(gathered))
    owns = leaves(tree)
    cut = [_cut(all_) if own.ndim else all_ for own, all_ in zip(owns, whole, strict=True)]
    if all(map(operator.is_, cut, whole)):
        return gathered
    parts = iter(cut)
    return map_tree(lambda _: next(parts), tree)


def _is_record(thing: Any, use_gather_object: bool) -> bool:
    """Return whether the entries are data of different kinds rather than samples."""
    if isinstance(thing, (list, tuple)) and not hasattr(thing, "_fields"):
        return not use_gather_object and any(isinstance(each, Tensor) for each in thing)
    record = isinstance(thing, (Mapping, tuple)) or is_dataclass(thing)
    return record and children(thing) is not None


def _cut(samples: Any) -> Any:
    """Cut the samples that the loader repeated to fill the last batches."""
    real = GradientState()._real_samples(len(samples))
    if real is None or real >= len(samples):
        return samples
    if real < 0:
        if PartialState().num_processes > 1:
            logger.info(
                "The loader does not know how many of its last samples are repeated ones; "
                "gather_for_metrics returns all of them."
            )
        return samples
    return samples[:real]
