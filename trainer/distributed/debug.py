"""When tensors meet before they travel, and what they tell of themselves there.

Objects always meet, since their sizes must be known anyway. Tensors meet where the group reaches
the host's memory, so that no device has to wait, and everywhere in debug mode
(``ACCELERATE_DEBUG_MODE=true``). See `trainer.distributed.meeting`.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from trainer.distributed import meeting
from trainer.state import PartialState
from trainer.tree import children


def is_checked() -> bool:
    """Collectives of tensors begin with a meeting."""
    return PartialState().debug or meeting.side_device().type == "cpu"


def describe(tree: Any, *, free: int | None = None, sized: bool = True) -> str:
    """Structure, types and shapes of a tree, as text.

    Args:
        tree: Tensors in nested containers; of other leaves the type is told.
        free: A dimension in which sizes may differ; it is written as ``*``.
        sized: False writes all of them so.
    """
    parts = children(tree)
    if parts is not None:
        inside = ", ".join(
            f"{key!r}: {describe(value, free=free, sized=sized)}" for key, value in parts
        )
        return f"{type(tree).__name__}{{{inside}}}"
    if not isinstance(tree, Tensor):
        return type(tree).__name__
    if tree.is_nested:  # its shape differs from process to process, and may not be asked for
        return f"nested {tree.dtype}"
    sizes = list(map(str, tree.shape)) if sized else ["*"] * tree.ndim
    if free is not None and -tree.ndim <= free < tree.ndim:
        sizes[free] = "*"
    return f"{str(tree.dtype).removeprefix('torch.')}[{', '.join(sizes)}]"
