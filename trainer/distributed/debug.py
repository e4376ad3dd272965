"""When collectives of tensors are checked first, and by which description of the tensors.

Collectives of objects are always checked, since their sizes must be exchanged anyway. Those of
tensors are checked where the group can use the host's memory, so that no device waits, and
everywhere in debug mode (``ACCELERATE_DEBUG_MODE=true``). See `trainer.distributed.meeting`.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from trainer.distributed import meeting
from trainer.state import PartialState
from trainer.tree import children


def is_checked() -> bool:
    """Return whether collectives of tensors begin with a meeting."""
    return PartialState().debug or meeting.side_device().type == "cpu"


def describe(tree: Any, *, free: int | None = None, sized: bool = True) -> str:
    """Return the structure, dtypes and shapes of a tree as text.

    Args:
        tree: Tensors in nested containers; other leaves appear as their type.
        free: A dimension whose size may differ; it is written as ``*``.
        sized: False writes all sizes as ``*``.
    """
    parts = children(tree)
    if parts is not None:
        inside = ", ".join(
            f"{key!r}: {describe(value, free=free, sized=sized)}" for key, value in parts
        )
        return f"{type(tree).__name__}{{{inside}}}"
    if not isinstance(tree, Tensor):
        return type(tree).__name__
    if tree.is_nested:  # its shape may differ between processes, and cannot be queried
        return f"nested {tree.dtype}"
    sizes = list(map(str, tree.shape)) if sized else ["*"] * tree.ndim
    if free is not None and -tree.ndim <= free < tree.ndim:
        sizes[free] = "*"
    return f"{str(tree.dtype).removeprefix('torch.')}[{', '.join(sizes)}]"
