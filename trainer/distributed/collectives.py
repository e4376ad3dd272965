"""Collectives over trees of tensors and over plain objects; one process answers at once.

Each function is called by every process alike. Tensors must lie on the process's device.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from trainer.configuration import Choice
from trainer.state import PartialState
from trainer.tree import map_tree


class Reduction(Choice):
    """How values of several processes become one."""

    SUM = "sum"
    MEAN = "mean"
    NONE = "none"


def _expect_tensor(leaf: Any, operation: str) -> Tensor:
    if not isinstance(leaf, Tensor):
        raise TypeError(
            f"{operation} takes tensors, or lists, tuples and dicts of them; it met "
            f"{type(leaf).__name__}. Use gather_object for other objects."
        )
    return leaf.contiguous()


def gather(tree: Any) -> Any:
    """Concatenate each tensor of every process along its first dimension.

    Args:
        tree: Tensors in nested containers; each of the same shape on every process. A tensor
            without dimensions becomes one of length ``num_processes``.

    Returns:
        The same containers with first dimensions ``num_processes`` times as long; the input
        itself with one process.

    Raises:
        TypeError: Several processes, and a leaf is not a tensor.
    """
    world_size = PartialState().num_processes
    if world_size == 1:
        return tree

    def gather_one(leaf: Any) -> Tensor:
        tensor = _expect_tensor(leaf, "gather")
        parts = [torch.empty_like(tensor) for _ in range(world_size)]
        dist.all_gather(parts, tensor)
        return torch.stack(parts) if tensor.ndim == 0 else torch.cat(parts)

    return map_tree(gather_one, tree)


def reduce(tree: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
    """Reduce each tensor over the processes; every process gets the result.

    Args:
        tree: Tensors in nested containers; they are not changed.
        reduction: ``"sum"``, ``"mean"``, or ``"none"`` for the values as they are.
        scale: Multiplied into the result.

    Raises:
        ValueError: The reduction is unknown.
        TypeError: A leaf is not a tensor, or a mean of integers is asked for.
    """
    reduction = Reduction.parse(reduction, "reduction")
    world_size = PartialState().num_processes

    def reduce_one(leaf: Any) -> Tensor:
        tensor = _expect_tensor(leaf, "reduce").clone()
        if reduction == Reduction.MEAN and not (tensor.is_floating_point() or tensor.is_complex()):
            raise TypeError(
                f"The mean of {tensor.dtype} is not of that type; convert with .float() first."
            )
        if reduction != Reduction.NONE and world_size > 1:
            dist.all_reduce(tensor)
            if reduction == Reduction.MEAN:
                tensor /= world_size
        return tensor if scale == 1.0 else tensor * scale

    return map_tree(reduce_one, tree)


def broadcast(tree: Any, from_process: int = 0) -> Any:
    """Give every process the tensors of one; they are changed in place and returned."""
    if PartialState().num_processes > 1:

        def broadcast_one(leaf: Any) -> Any:
            if isinstance(leaf, Tensor):
                # The backends read and write one stretch of memory, whatever view of it they get.
                packed = leaf.contiguous()
                dist.broadcast(packed, src=from_process)
                if packed is not leaf:
                    leaf.copy_(packed)
            return leaf

        with torch.no_grad():
            return map_tree(broadcast_one, tree)
    return tree


def gather_object(items: list[Any]) -> list[Any]:
    """Concatenate the lists of all processes, in the order of their ranks.

    The objects travel pickled between the processes of one run, never through a file.
    """
    return [item for part in all_gather_object(items) for item in part]


def all_gather_object(value: Any) -> list[Any]:
    """One value a process, in the order of their ranks."""
    world_size = PartialState().num_processes
    if world_size == 1:
        return [value]
    parts: list[Any] = [None] * world_size
    dist.all_gather_object(parts, value)
    return parts


def broadcast_object(value: Any, from_process: int = 0) -> Any:
    """The value of one process, on every process."""
    if PartialState().num_processes == 1:
        return value
    box = [value]
    dist.broadcast_object_list(box, src=from_process, device=_object_device())
    return box[0]


def _object_device() -> torch.device | None:
    state = PartialState()
    return None if state.device.type == "cpu" else state.device
