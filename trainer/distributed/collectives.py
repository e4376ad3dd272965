"""Collectives over nested containers of tensors: gather, reduce, broadcast and pad.

Every process must call each function; with one process no communication takes place. Tensors must
be on the process's device. Results have no autograd graph. If the calls of the processes do not
match, all processes raise an error (see `trainer.distributed.guards`). Collectives of objects are
always checked, since their sizes must be exchanged anyway. Collectives of tensors are checked if
the group can communicate through host memory, so that no device waits, and always in debug mode
(``ACCELERATE_DEBUG_MODE=true``).
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor

from trainer.distributed import guards, transport
from trainer.distributed.guards import check_collective
from trainer.enums import Choice
from trainer.state import PartialState
from trainer.tree import children, dense, leaves, map_tree


def is_checked() -> bool:
    """Return whether tensor collectives first check that all ranks call the same collective."""
    return PartialState().debug or guards.side_device().type == "cpu"


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


# Dtypes that are summed unchanged. Others are summed in a wider dtype, because backends do not
# support some of them, and sums of small integers would overflow.
_SUMMED = {
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex64,
    torch.complex128,
    torch.int32,
    torch.int64,
}


class Reduction(Choice):
    """How the values of several processes are combined."""

    SUM = "sum"
    MEAN = "mean"
    NONE = "none"


class CannotPadNestedTensorWarning(UserWarning):
    """The category of the warning that a nested tensor was not padded."""


def gather(tensor: Any) -> Any:
    """Gather tensors from all processes, concatenated along their first dimension.

    Args:
        tensor: Tensors in nested containers, each of the same shape on every process.

    Returns:
        The same containers. A tensor of shape (N, …) becomes (num_processes * N, …), in the order
        of the ranks; a 0-d tensor becomes (num_processes,). With one process, the input itself.

    Raises:
        TypeError: There are several processes, and a leaf is not a dense tensor.
        ValueError: A tensor is on a device that the process group cannot send from.
        DistributedOperationException: The processes' calls do not match.
    """
    if PartialState().num_processes == 1:
        return tensor
    _agree("gather", tensor)
    return map_tree(_gather_one, tensor)


def _gather_one(tensor: Tensor) -> Tensor:
    parts = guards.all_gather_rows(tensor)
    return parts if tensor.ndim == 0 else parts.flatten(0, 1)


def gather_uneven(tensor: Any, processes: int | None = None, copies: int = 1) -> Any:
    """Gather tensors whose first dimension may differ between processes; see `gather`.

    It needs one more collective, to gather the sizes, and the host waits for it.

    Args:
        tensor: See `gather`.
        processes: Keep only the samples of this many processes, from rank 0 on; None keeps all.
            0-d tensors are kept from all processes.
        copies: The number of processes that have the same samples, which are kept only once.
    """
    world_size = PartialState().num_processes
    if world_size == 1:
        return tensor
    _agree("gather", tensor, free=0)
    lengths = [len(leaf) for leaf in leaves(tensor) if leaf.ndim]
    rows = guards.all_gather_ints(lengths) if lengths else []
    columns = iter(zip(*rows, strict=True))

    def gather_one(leaf: Tensor) -> Tensor:
        sizes = next(columns) if leaf.ndim else (1,)
        if len(set(sizes)) == 1:
            gathered = _gather_one(leaf)
            if copies > 1:
                gathered = torch.cat(gathered.split(sizes[0])[::copies])
            cut_at = None if processes is None or not leaf.ndim else sum(sizes[:processes])
            return gathered if cut_at is None else gathered[:cut_at]
        parts = guards.all_gather_rows(_padded(leaf, 0, max(sizes), 0, first=False))
        cut = [part[:size] for part, size in zip(parts, sizes, strict=True)]
        return torch.cat(cut[::copies][:processes])

    return map_tree(gather_one, tensor)


def reduce(tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
    """All-reduce each tensor; every process gets the result.

    Args:
        tensor: Tensors in nested containers, each of the same shape on every process; they are not
            changed.
        reduction: ``"sum"``, ``"mean"``, or ``"none"`` for a copy of the local values without
            communication. The sum of booleans (their count) and of 8-bit and 16-bit integers is
            int64.
        scale: A factor for the result.

    Raises:
        ValueError: The reduction is unknown, or a tensor is on a device that the process group
            cannot send from.
        TypeError: A leaf is not a dense tensor, or the mean of integers is requested.
        DistributedOperationException: The processes' calls do not match.
    """
    reduction = Reduction.parse(reduction, "reduction")
    if reduction != Reduction.NONE:
        _agree(f"reduce {reduction}", tensor, means=reduction == Reduction.MEAN)
    elif (problem := _problem("reduce", tensor)) is not None:
        raise problem

    def reduce_one(leaf: Tensor) -> Tensor:
        if reduction == Reduction.NONE:
            total = leaf.detach().clone()
        else:
            total = _sum(leaf)
            if reduction == Reduction.MEAN:
                total /= PartialState().num_processes
        if scale != 1.0:
            total = total * scale
        is_integer = not (leaf.is_floating_point() or leaf.is_complex())
        same = not is_integer or leaf.dtype in (torch.uint32, torch.uint64)
        narrow = same and total.dtype == _wide(leaf.dtype)
        return total.to(leaf.dtype) if narrow else total

    return map_tree(reduce_one, tensor)


def _sum(tensor: Tensor) -> Tensor:
    """Return the sum over the processes as a new tensor, in a dtype that can hold the sum."""
    total = torch.empty_like(
        tensor, dtype=_wide(tensor.dtype), memory_format=torch.contiguous_format
    )
    total.copy_(tensor.detach())
    if PartialState().num_processes > 1 and total.numel():
        transport.all_reduce(total)
    return total


def _wide(dtype: torch.dtype) -> torch.dtype:
    if dtype in _SUMMED:
        return dtype
    if dtype.is_complex:
        return torch.complex64
    return torch.float32 if dtype.is_floating_point else torch.int64


def broadcast(tensor: Any, from_process: int = 0) -> Any:
    """Broadcast the tensors of one process to all, in place.

    Args:
        tensor: Tensors in nested containers, each of the same shape on every process; they are
            changed in place. Other leaves stay unchanged.
        from_process: The rank that sends; default 0.

    Returns:
        The input.

    Raises:
        ValueError: There is no such rank, or a tensor is on a device that the process group cannot
            send from.
        DistributedOperationException: The processes' calls do not match.
    """
    check_rank(from_process)
    if PartialState().num_processes == 1:
        return tensor
    _agree(f"broadcast from {from_process}", tensor, others=True)

    receives = PartialState().process_index != from_process

    def broadcast_one(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            values = dense(leaf)
            transport.send(values, from_process)
            shared = leaf.is_contiguous() and not leaf.is_conj() and not leaf.is_neg()
            if receives and not shared:
                leaf.copy_(values)
        return leaf

    with torch.no_grad():
        map_tree(broadcast_one, tensor)
    return tensor


def pad_across_processes(
    tensor: Any, dim: int = 0, pad_index: int = 0, pad_first: bool = False
) -> Any:
    """Pad each tensor to its largest size over the processes, so that `gather` accepts it.

    Args:
        tensor: Tensors in nested containers. Their sizes may differ between processes in any
            dimension; call this function again to pad another dimension.
        dim: The dimension to pad; a negative one counts from the end. A tensor without this
            dimension is not padded. A nested tensor is not padded either, and gives a
            `CannotPadNestedTensorWarning`.
        pad_index: The value to pad with.
        pad_first: Pad at the beginning instead of the end.

    Returns:
        The same containers. A tensor that needs no padding is returned itself, not a copy.

    Raises:
        TypeError: A leaf is not a tensor; raised with one process too.
        ValueError: A tensor is on a device that the process group cannot send from.
        DistributedOperationException: The processes' calls do not match.
    """
    _agree(f"pad_across_processes along dimension {dim}", tensor, sized=False, nested=True)

    def size_of(leaf: Tensor) -> int | None:
        return None if leaf.is_nested or not -leaf.ndim <= dim < leaf.ndim else leaf.shape[dim]

    sizes = [size for leaf in leaves(tensor) if (size := size_of(leaf)) is not None]
    rows = guards.all_gather_ints(sizes) if sizes and PartialState().num_processes > 1 else [sizes]
    largest = iter([max(column) for column in zip(*rows, strict=True)])

    def pad_one(leaf: Tensor) -> Tensor:
        size = size_of(leaf)
        if leaf.is_nested:
            warnings.warn(
                "pad_across_processes does not change a nested tensor; convert it with "
                "torch.nested.to_padded_tensor(tensor, padding) first.",
                CannotPadNestedTensorWarning,
                stacklevel=2,
            )
        if size is None or size == (target := next(largest)):
            return leaf
        return _padded(leaf, dim, target, pad_index, first=pad_first)

    return map_tree(pad_one, tensor)


def _padded(tensor: Tensor, dim: int, size: int, value: int, *, first: bool) -> Tensor:
    shape = list(tensor.shape)
    missing = size - shape[dim]
    shape[dim] = missing
    padding = tensor.detach().new_full(shape, value)
    parts = (padding, tensor) if first else (tensor, padding)
    return torch.cat(parts, dim=dim)


def _agree(
    operation: str,
    tree: Any,
    *,
    free: int | None = None,
    sized: bool = True,
    means: bool = False,
    others: bool = False,
    nested: bool = False,
) -> None:
    """Check, before any tensor is sent, that the tensors of all processes match.

    Args:
        operation: The collective, for the error.
        tree: The tensors of this process.
        free: A dimension whose size may differ between processes.
        sized: Whether the sizes of the tensors must match at all.
        means: Whether a mean is computed, so that integers are rejected.
        others: Whether leaves other than tensors are allowed.
        nested: Whether nested tensors are allowed.
    """
    problem = _problem(operation, tree, means=means, others=others, nested=nested)
    if PartialState().num_processes > 1 and is_checked():
        where = "" if free is None else f" along dimension {free}"
        check_collective(
            f"{operation}{where} ({describe(tree, free=free, sized=sized)})", problem=problem
        )
        return
    guards.check_collectives_allowed(operation)  # `check_collective` includes this check
    if problem is not None:
        raise problem


def _problem(
    operation: str, tree: Any, *, means: bool = False, others: bool = False, nested: bool = False
) -> Exception | None:
    """Return an error that explains why this tree cannot be sent; None if it can."""
    state = PartialState()
    reachable = guards.device_types() if state.num_processes > 1 else None
    operation = operation.partition(" ")[0]
    for leaf in leaves(tree):
        if not isinstance(leaf, Tensor):
            if others and not isinstance(leaf, torch.nn.utils.rnn.PackedSequence):
                continue
            return TypeError(
                f"{operation} takes tensors, or lists, tuples, dicts and dataclasses of them; it "
                f"got {type(leaf).__name__}. Use gather_object for other objects."
            )
        if leaf.is_nested and nested:
            continue
        if leaf.is_nested or leaf.layout != torch.strided:
            return TypeError(
                f"{operation} takes dense tensors; it got one with layout {leaf.layout}"
                f"{', nested' if leaf.is_nested else ''}. Convert it first, with .to_dense() or "
                "torch.nested.to_padded_tensor()."
            )
        if means and not (leaf.is_floating_point() or leaf.is_complex()):
            return TypeError(
                f"The mean of {leaf.dtype} values has another dtype; convert with .float() first."
            )
        if reachable is not None and (
            leaf.device.type not in reachable
            or (leaf.device.type == state.device.type != "cpu" and leaf.device != state.device)
        ):
            return ValueError(
                f"{operation} got a tensor on {leaf.device}, but this process works on "
                f"{state.device}. Move it there first, with .to(accelerator.device)."
            )
    return None


def check_rank(rank: int) -> None:
    """Raise a ValueError if there is no process of this rank."""
    world_size = PartialState().num_processes
    if not 0 <= rank < world_size:
        raise ValueError(
            f"from_process is {rank}; it must be a rank from 0 to {world_size - 1}, one of the "
            f"{world_size} process(es)."
        )


class Trigger:
    """A distributed flag: one process sets it, for example to leave the loop, and all see it.

    The processes see it when all of them call `check`.
    """

    def __init__(self) -> None:
        self._is_set = False

    def set(self) -> None:
        """Set the flag on this process."""
        self._is_set = True

    def check(self) -> bool:
        """Return whether any process has set the flag since the last check, and reset the flag.

        It is a collective: every process must call it.
        """
        votes = torch.tensor(int(self._is_set), device=PartialState().device)
        self._is_set = False
        return bool(guards.read_back(reduce(votes)))
