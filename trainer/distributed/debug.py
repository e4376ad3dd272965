"""Do all processes call the same collective, with tensors that fit together?

If not, the backends wait forever, end the process, or return what nobody sent. So a collective
begins with a meeting: each process sends a digest of what it is about to do. Where they differ, all
learn from all what that was, and all raise. It costs one exchange of sixteen bytes a process.

Objects always meet, since their sizes must be known anyway. Tensors meet where the group reaches
the host's memory, so that no device has to wait, and everywhere in debug mode
(``ACCELERATE_DEBUG_MODE=true``).
"""

from __future__ import annotations

import hashlib
from typing import Any

from torch import Tensor

from trainer.distributed import transport
from trainer.errors import DistributedOperationException
from trainer.state import PartialState
from trainer.tree import children

_LONGEST = 2000  # characters of one process's plan in an error


def is_checked() -> bool:
    """Collectives of tensors begin with a meeting."""
    return PartialState().debug or transport.side_device().type == "cpu"


def meet(plan: str, number: int = 0, problem: Exception | None = None) -> list[int]:
    """Compare plans; collective.

    Args:
        plan: What this process is about to do, with which shapes and types.
        number: Something to tell the others.
        problem: Why this process cannot go on.

    Returns:
        The numbers of all processes.

    Raises:
        DistributedOperationException: The plans differ, or another process has a problem.
        Exception: `problem` itself, on the process that has it.
    """
    if problem is not None:
        plan = f"{plan.partition(' (')[0]} fails with {type(problem).__name__}: {problem}"
    digest = hashlib.blake2b(plan.encode(), digest_size=8).digest()
    rows = transport.share_numbers([int.from_bytes(digest, "little", signed=True), number])
    if len({row[0] for row in rows}) > 1:
        payload = plan.encode()
        sizes = [size for (size,) in transport.share_numbers([len(payload)])]
        plans = [text.decode() for text in transport.share_bytes(payload, sizes)]
        if problem is None:
            raise DistributedOperationException(_complaint(plans))
    if problem is not None:
        raise problem
    return [row[1] for row in rows]


def _complaint(plans: list[str]) -> str:
    lines = [f"  rank {rank}: {plan[:_LONGEST]}" for rank, plan in enumerate(plans)]
    return "\n".join(
        [
            "The processes must call the same operation, with trees of the same structure, shapes "
            "and types:",
            *lines,
            "pad_across_processes makes sizes equal; gather_for_metrics and gather_object take "
            "unequal ones.",
        ]
    )


def describe(tree: Any, *, free: int | None = None) -> str:
    """Structure, types and shapes of a tree, as text.

    Args:
        tree: Tensors in nested containers; of other leaves the type is told.
        free: A dimension in which sizes may differ; it is written as ``*``.
    """
    parts = children(tree)
    if parts is not None:
        inside = ", ".join(f"{key!r}: {describe(value, free=free)}" for key, value in parts)
        return f"{type(tree).__name__}{{{inside}}}"
    if not isinstance(tree, Tensor):
        return type(tree).__name__
    if tree.is_nested:  # its shape differs from process to process, and may not be asked for
        return f"nested {tree.dtype}"
    sizes = list(map(str, tree.shape))
    if free is not None and -tree.ndim <= free < tree.ndim:
        sizes[free] = "*"
    return f"{str(tree.dtype).removeprefix('torch.')}[{', '.join(sizes)}]"
