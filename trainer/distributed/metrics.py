"""Gathering what metrics are computed from: every sample of the loader exactly once."""

from __future__ import annotations

import logging
import operator
from collections.abc import Mapping
from dataclasses import is_dataclass
from typing import Any

from torch import Tensor

from trainer.distributed.collectives import gather_object, gather_uneven, is_sequence
from trainer.distributed.debug import is_checked
from trainer.distributed.meeting import meet
from trainer.state import GradientState, PartialState
from trainer.tree import children, leaves, map_tree, rebuild

logger = logging.getLogger(__name__)


def gather_for_metrics(input_data: Any, use_gather_object: bool = False) -> Any:
    """Gather predictions and targets of all processes, without the loader's repeated samples.

    Call it inside the loop over the prepared loader that the data come from: while its last batch
    is at hand, what the processes hold together is cut to the samples that are real; one process
    does the same. Of nested loops the innermost loader counts. Behind ``next(iter(loader))``, and a
    loop left by ``break``, the batch that was read last is still at hand until another loader is
    read. Every process must call it equally often: where
    ``even_batches=False`` leaves a process without a last batch, leave the loop on all alike.

    Args:
        input_data: One of

            - Tensors in nested containers. They are concatenated along their first dimension, the
              samples of this batch, in which the processes may differ. Tensors without dimensions
              are gathered, one value a process, and never cut.
            - A mapping, named tuple or dataclass of anything else; or a list or tuple with tensors
              beside other objects. Each entry is gathered for itself.
            - Any other sequence with one object a sample: see `gather_object`. What is no sequence
              gives one entry a process, which is never cut.
        use_gather_object: Gather tensors as objects too: those of other than the first dimension
            may then differ, and a sequence of tensors holds one a sample.

    Returns:
        The samples of all processes in the order of the loader. With one process tensors come back
        as they are but for the cut, objects as `gather_object` gives them.

    Raises:
        Exception: See `gather` and `gather_object`.
    """
    found = list(leaves(input_data))
    if found and not use_gather_object and all(isinstance(leaf, Tensor) for leaf in found):
        return _gather_tensors(input_data)
    if _is_record(input_data, use_gather_object):
        entries = children(input_data) or []
        if PartialState().num_processes > 1 and is_checked():  # else entries would be mixed up
            names = ", ".join(repr(name) for name, _ in entries)
            meet(f"gather_for_metrics ({type(input_data).__name__} of {names})")
        return rebuild(input_data, [gather_for_metrics(v, use_gather_object) for _, v in entries])
    objects = gather_object(input_data)
    return _cut(objects) if is_sequence(input_data) else objects


def _gather_tensors(tree: Any) -> Any:
    gathered = gather_uneven(tree)
    whole = list(leaves(gathered))
    owns = leaves(tree)
    cut = [_cut(all_) if own.ndim else all_ for own, all_ in zip(owns, whole, strict=True)]
    if all(map(operator.is_, cut, whole)):
        return gathered
    parts = iter(cut)
    return map_tree(lambda _: next(parts), tree)


def _is_record(thing: Any, use_gather_object: bool) -> bool:
    """Its entries are data of different kinds, not samples."""
    if isinstance(thing, (list, tuple)) and not hasattr(thing, "_fields"):
        return not use_gather_object and any(isinstance(each, Tensor) for each in thing)
    record = isinstance(thing, (Mapping, tuple)) or is_dataclass(thing)
    return record and children(thing) is not None


def _cut(samples: Any) -> Any:
    """Without the samples, of all processes, that the loader has repeated."""
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
