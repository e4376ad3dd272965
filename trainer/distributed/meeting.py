"""Meetings: before a collective, the processes check that all of them came to the same one.

Otherwise the backends may wait forever, crash, or return garbage. So an operation begins with a
meeting: each process sends a digest of what it is about to do. If the digests differ, the processes
exchange the descriptions, and all raise. It costs one exchange of sixteen bytes per process. If it
takes long on the host, a warning names the ranks that have not come.

These functions depend on the process group alone, below the state. Everything travels as bytes, so
dtypes that a backend does not support (int16 and float8 with gloo, for example) can be sent too.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from trainer.errors import DistributedOperationException
from trainer.tree import as_bytes, dense

logger = logging.getLogger(__name__)

_LONGEST = 2000  # characters of one process's plan in an error
_ANNOUNCED_AFTER = 1.0  # seconds of waiting until a process announces that it waits
_WARNED_AFTER = 30.0  # seconds of waiting until the missing ranks are logged
_GUARDED = (
    " If that call is inside `if accelerator.is_main_process:`, make it outside, on all processes."
)


# -- what travels --------------------------------------------------------------------------------


def device_types(group: dist.ProcessGroup | None = None) -> set[str]:
    """Return the device types that a process group can send from."""
    return {part.partition(":")[0] for part in dist.get_backend_config(group).split(",")}


def side_device(group: dist.ProcessGroup | None = None) -> torch.device:
    """Return the device for sizes and objects: the host if possible, so that no device waits."""
    types = device_types(group)
    if "cpu" in types:
        return torch.device("cpu")
    return torch.device(min(types), torch.accelerator.current_device_index())


def stack(
    tensor: Tensor, group: dist.ProcessGroup | None = None, *, meeting: str | None = None
) -> Tensor:
    """Gather tensors of one shape [...] from all processes; shape [processes, ...].

    Args:
        tensor: This process's tensor.
        group: The processes.
        meeting: The operation to name in the log if the exchange takes long.
    """
    own = dense(tensor)
    size = dist.get_world_size(group)
    result = own.new_empty((size, *own.shape))
    if own.numel():
        rows = list(as_bytes(result).view(size, -1))
        if meeting is None or own.device.type != "cpu":
            dist.all_gather(rows, as_bytes(own), group=group)
        else:
            work = dist.all_gather(rows, as_bytes(own), group=group, async_op=True)
            _wait(work, meeting, group)
    return result


def share_numbers(
    own: list[int], group: dist.ProcessGroup | None = None, *, meeting: str | None = None
) -> list[list[int]]:
    """Gather the same number of integers from each process, in the order of their ranks."""
    numbers = torch.tensor(own, dtype=torch.int64, device=side_device(group))
    rows: list[list[int]] = stack(numbers, group, meeting=meeting).tolist()
    return rows


def share_bytes(
    payload: bytes, sizes: list[int], group: dist.ProcessGroup | None = None
) -> list[bytes]:
    """Gather the payloads of all processes, whose sizes every process knows."""
    own = torch.zeros(max(sizes), dtype=torch.uint8)
    if payload:
        own[: len(payload)] = torch.frombuffer(bytearray(payload), dtype=torch.uint8)
    rows = stack(own.to(side_device(group)), group).cpu()
    return [row[:size].numpy().tobytes() for row, size in zip(rows, sizes, strict=True)]


# -- meetings ------------------------------------------------------------------------------------

_unaccompanied: ContextVar[str] = ContextVar("unaccompanied", default="")  # other threads may save


@contextmanager
def unaccompanied(why: str) -> Iterator[None]:
    """Inside, refuse meetings on this thread, to which other processes do not come.

    Args:
        why: The end of the error's first sentence: why they do not, and what to do.
    """
    token = _unaccompanied.set(why)
    try:
        yield
    finally:
        _unaccompanied.reset(token)


def refuse_unaccompanied(operation: str) -> None:
    """Raise a DistributedOperationException in a block that is `unaccompanied`."""
    if why := _unaccompanied.get():
        raise DistributedOperationException(f"{operation} {why}")


def meet(
    plan: str,
    number: int = 0,
    problem: Exception | None = None,
    group: dist.ProcessGroup | None = None,
) -> list[int]:
    """Compare plans; collective.

    Args:
        plan: What this process is about to do: the operation as users know it, with shapes and
            dtypes in parentheses.
        number: An integer to share with the others.
        problem: Why this process cannot continue.
        group: The processes.

    Returns:
        The numbers of all processes.

    Raises:
        DistributedOperationException: The plans differ, another process has a problem, or this one
            is `unaccompanied`.
        Exception: `problem` itself, on the process that has it.
    """
    operation = plan.partition(" (")[0]
    refuse_unaccompanied(operation)
    if problem is not None:
        plan = f"{operation} fails with {type(problem).__name__}: {problem}"
    digest = hashlib.blake2b(plan.encode(), digest_size=8).digest()
    own = [int.from_bytes(digest, "little", signed=True), number]
    rows = share_numbers(own, group, meeting=operation)
    if len({row[0] for row in rows}) > 1:
        payload = plan.encode()
        sizes = [size for (size,) in share_numbers([len(payload)], group)]
        plans = [text.decode() for text in share_bytes(payload, sizes, group)]
        if problem is None:
            raise DistributedOperationException(_complaint(plans), plans)
    if problem is not None:
        raise problem
    return [row[1] for row in rows]


def share(plan: str, payload: bytes, group: dist.ProcessGroup | None = None) -> list[bytes]:
    """Meet, then gather a small payload; collective.

    Raises:
        DistributedOperationException: The plans differ.
    """
    sizes = meet(plan, len(payload), group=group)
    return share_bytes(payload, sizes, group) if any(sizes) else [b""] * len(sizes)


def parted(error: BaseException, plan: str) -> bool:
    """Return whether an error came from meeting others that waited in this operation.

    They have left it, so this process must not enter it any more.
    """
    return isinstance(error, DistributedOperationException) and plan in error.plans


def _complaint(plans: list[str]) -> str:
    lines = [f"  rank {rank}: {plan[:_LONGEST]}" for rank, plan in enumerate(plans)]
    operations = sorted({plan.split(" ", 1)[0].rstrip(":") for plan in plans})
    if len(operations) > 1:
        return "\n".join(
            [
                "The processes are waiting for each other in different operations:",
                *lines,
                f"Every process must call each of {' and '.join(operations)}, in the same order; "
                "inside `if accelerator.is_main_process:` only one does.",
            ]
        )
    return "\n".join(
        [
            "The processes must call the same operation, with trees of the same structure, shapes "
            "and types:",
            *lines,
            "pad_across_processes makes sizes equal; gather_for_metrics and gather_object take "
            "unequal ones.",
        ]
    )


# -- waiting -------------------------------------------------------------------------------------


def _wait(work: dist.Work, operation: str, group: dist.ProcessGroup | None) -> None:
    """Wait for an exchange; if it takes long, log which ranks have not come to it."""
    if _ends_within(work, _ANNOUNCED_AFTER):
        return
    size, own = dist.get_world_size(group), dist.get_rank(group)
    store = _store_of(group)
    # The store may have ended with its process; then notes are of no use to anyone.
    with suppress(RuntimeError):
        store.set(_key(own), operation)
    try:
        ended = _ends_within(work, _WARNED_AFTER - _ANNOUNCED_AFTER)
    except RuntimeError:  # the group's own limit is shorter, or a peer has gone
        with suppress(RuntimeError):
            _warn(operation, _waiting(store, size), size, own, failed=True)
        raise
    else:
        if not ended:
            with suppress(RuntimeError):
                _warn(operation, _waiting(store, size), size, own)
            work.wait()
    finally:
        gone(group)


def awaited(operation: str, group: dist.ProcessGroup | None = None) -> bool:
    """Return whether all others come to wait for this process within 30 seconds; not collective.

    A failed process calls it before an exchange, which would block it if they never came.
    """
    store, size, own = _store_of(group), dist.get_world_size(group), dist.get_rank(group)
    until = time.monotonic() + _WARNED_AFTER
    try:
        store.set(_key(own), operation)  # another one may have failed too
        while not (come := len(_waiting(store, size)) == size) and time.monotonic() < until:
            time.sleep(0.01)
    except RuntimeError:  # the store has ended with its process
        return False
    if not come:
        gone(group)
    return come


def gone(group: dist.ProcessGroup | None = None) -> None:
    """Withdraw the note that this process waits; not collective."""
    with suppress(RuntimeError):
        _store_of(group).set(_key(dist.get_rank(group)), "")


def _key(rank: int) -> str:
    return f"cadence/waiting/{rank}"


def _store_of(group: dist.ProcessGroup | None) -> Any:
    group = group or dist.group.WORLD
    assert group is not None  # an exchange is under way in it
    return group.get_group_store()


def _waiting(store: Any, size: int) -> list[int]:
    keys = {rank: _key(rank) for rank in range(size)}
    return [rank for rank, key in keys.items() if store.check([key]) and store.get(key)]


def _warn(operation: str, waiting: list[int], size: int, own: int, *, failed: bool = False) -> None:
    missing = ", ".join(str(rank) for rank in range(size) if rank not in waiting)
    if not missing or own != min(waiting):  # one process logs for all
        return
    if failed:
        logger.warning("%s waited for rank %s and failed.", operation, missing)
        return
    logger.warning(
        "%s has waited %g seconds for rank %s. It ends when every process has called it.%s",
        operation,
        _WARNED_AFTER,
        missing,
        _GUARDED if waiting == [0] else "",
    )


def _ends_within(work: dist.Work, seconds: float) -> bool:
    try:
        work.wait(timedelta(seconds=seconds))
    except RuntimeError:
        if not work.is_completed():
            return False
        work.wait()  # raises its own error, unless it has just ended
    return True
