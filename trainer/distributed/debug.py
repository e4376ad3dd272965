"""When tensor collectives are checked for mismatched calls, and the description that is compared.

The check costs one small collective before the actual one; see `trainer.distributed.meeting`.
Collectives of objects are always checked, because the sizes must be exchanged anyway. Collectives
of tensors are checked if the process group can use host memory, so that no device has to wait, and
always in debug mode (``ACCELERATE_DEBUG_MODE=true``).
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from trainer.distributed import meeting
from trainer.state import PartialState
from trainer.tree import children


def is_checked() -> bool:
    """Return whether tensor collectives first check that all ranks call the same collective."""
    return PartialState().debug or meeting.side_device().type == "cpu"


def describe(tree: Any, *, free: int | None = None, sized: bool = True) -> str:
    """Return the structure, dtypes and shapes of a tree as text.

    Args:
        tree: Tensors in nested containers; another leaf is described by its type.
        free: A dimension whose size may differ between processes; it is written as ``*``.
        sized: Whether to include the sizes; False writes all of them as ``*``.
    """
    parts = children(tree)
    if parts is not None:
        inside = ", ".join(
            f"{key!r}: {describe(value, free=free, sized=sized)}" for key, value in parts
        )
        return f"{type(tree).__name__}{{{inside}}}"
    if not isinstance(tree, Tensor):
        return type(tree).__name__
    if tree.is_nested:  # its shape may differ between processes and is not available
        return f"nested {tree.dtype}"
    sizes = list(map(str, tree.shape)) if sized else ["*"] * tree.ndim
    if free is not None and -tree.ndim <= free < tree.ndim:
        sizes[free] = "*"
    return f"{str(tree.dtype).removeprefix('torch.')}[{', '.join(sizes)}]"
