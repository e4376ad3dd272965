"""Check that all ranks call the same collective, before the collective runs.

If ranks call different collectives, or pass different shapes, the backends may wait forever, crash
or return wrong values. So an operation begins with a check: each rank all-gathers a hash of the
operation that it is about to run. If the hashes differ, the ranks gather the descriptions of their
operations, and all ranks raise an error that lists them. The check is one all-gather of 16 bytes
per rank. If it waits on the host for a long time, a warning names the missing ranks.

These functions need only the process group, because `trainer.state` is built on them. Data is sent
as bytes, so dtypes that a backend does not support (int16 and float8 with gloo, for example) can be
sent too.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from trainer.errors import DistributedOperationException, module_logger
from trainer.tree import as_bytes, dense

logger = module_logger(__name__)

_LONGEST = 2000  # characters of each rank's description in an error
_ANNOUNCED_AFTER = 1.0  # seconds until a waiting rank announces itself in the store
_WARNED_AFTER = 30.0  # seconds until a warning names the missing ranks
_GUARDED = (
    " If that call is inside `if accelerator.is_main_process:`, make it outside, on all processes."
)


def device_types(group: dist.ProcessGroup | None = None) -> set[str]:
    """Return the device types of the tensors that a process group can send."""
    types = {part.partition(":")[0] for part in dist.get_backend_config(group).split(",")}
    return types | {"xla"} if "cpu" in types else types  # through the host; see `transport`


def side_device(group: dist.ProcessGroup | None = None) -> torch.device:
    """Return the device for sizes and objects: the CPU if possible, so that no device waits."""
    types = device_types(group)
    if "cpu" in types:
        return torch.device("cpu")
    return torch.device(min(types), torch.accelerator.current_device_index())


def all_gather_rows(
    tensor: Tensor, group: dist.ProcessGroup | None = None, *, operation: str | None = None
) -> Tensor:
    """All-gather tensors of the same shape (…) into one tensor of shape (processes, …).

    Args:
        tensor: This process's tensor.
        group: The process group; None means the default group.
        operation: The operation, for the warning about a long wait; None never warns.
    """
    if tensor.device.type == "xla":
        of_hosts = all_gather_rows(read_back(tensor), group, operation=operation)
        return of_hosts.to(tensor.device)
    local = dense(tensor)
    size = dist.get_world_size(group)
    result = local.new_empty((size, *local.shape))
    if local.numel():
        rows = list(as_bytes(result).view(size, -1))
        if operation is None or local.device.type != "cpu":
            dist.all_gather(rows, as_bytes(local), group=group)
        else:
            work = dist.all_gather(rows, as_bytes(local), group=group, async_op=True)
            with waiting:
                _wait(work, operation, group)
    return result


def all_gather_ints(
    numbers: list[int], group: dist.ProcessGroup | None = None, *, operation: str | None = None
) -> list[list[int]]:
    """All-gather a list of integers, of the same length on every process; one row per rank."""
    local = torch.tensor(numbers, dtype=torch.int64, device=side_device(group))
    rows: list[list[int]] = read_back(all_gather_rows(local, group, operation=operation)).tolist()
    return rows


def all_gather_bytes(
    payload: bytes, sizes: list[int], group: dist.ProcessGroup | None = None
) -> list[bytes]:
    """All-gather payloads of bytes.

    Args:
        payload: The payload of this process.
        sizes: The size of each rank's payload in bytes.
        group: The process group; None means the default group.
    """
    padded = torch.zeros(max(sizes), dtype=torch.uint8)
    if payload:
        padded[: len(payload)] = torch.frombuffer(bytearray(payload), dtype=torch.uint8)
    rows = read_back(all_gather_rows(padded.to(side_device(group)), group))
    return [row[:size].numpy().tobytes() for row, size in zip(rows, sizes, strict=True)]


# A context variable, hence per thread: other threads may save meanwhile.
_forbidden: ContextVar[str] = ContextVar("forbid_collectives", default="")


@contextmanager
def forbid_collectives(why: str) -> Iterator[None]:
    """Forbid collectives on this thread inside the block, because not all ranks run it.

    A collective in the block raises an error instead of hanging.

    Args:
        why: The rest of the error message after the name of the operation: why collectives are
            forbidden here, and what to do.
    """
    token = _forbidden.set(why)
    try:
        yield
    finally:
        _forbidden.reset(token)


def check_collectives_allowed(operation: str) -> None:
    """Check that collectives are not forbidden here.

    Args:
        operation: The collective, for the error.

    Raises:
        DistributedOperationException: This thread is in an `forbid_collectives` block.
    """
    if why := _forbidden.get():
        raise DistributedOperationException(f"{operation} {why}")


def check_collective(
    plan: str,
    number: int = 0,
    problem: Exception | None = None,
    group: dist.ProcessGroup | None = None,
) -> list[int]:
    """Check that all ranks call the same collective; itself a collective call.

    Args:
        plan: A description of the operation that this process is about to run: the name by which
            users know it, then shapes and dtypes in parentheses.
        number: An integer to gather along with the check; default 0.
        problem: The error that stops this process; None without one.
        group: The process group; None means the default group.

    Returns:
        The number of each rank.

    Raises:
        DistributedOperationException: The descriptions differ, another process has a problem, or
            collectives are forbidden here (see `forbid_collectives`).
        Exception: `problem` itself, on the process that has it.
    """
    operation = plan.partition(" (")[0]
    check_collectives_allowed(operation)
    if problem is not None:
        plan = f"{operation} fails with {type(problem).__name__}: {problem}"
    digest = hashlib.blake2b(plan.encode(), digest_size=8).digest()
    local = [int.from_bytes(digest, "little", signed=True), number]
    rows = all_gather_ints(local, group, operation=operation)
    if group is None:
        call_counts.joint += 1
        call_counts.passes.clear()
    if len({row[0] for row in rows}) > 1:
        payload = plan.encode()
        sizes = [size for (size,) in all_gather_ints([len(payload)], group)]
        plans = [text.decode() for text in all_gather_bytes(payload, sizes, group)]
        if problem is None:
            raise DistributedOperationException(_complaint(plans), plans)
    if problem is not None:
        raise problem
    return [row[1] for row in rows]


def all_gather_payloads(
    plan: str, payload: bytes, group: dist.ProcessGroup | None = None
) -> list[bytes]:
    """Check the call with `check_collective`, then all-gather a small payload; collective.

    Raises:
        DistributedOperationException: See `check_collective`.
    """
    sizes = check_collective(plan, len(payload), group=group)
    return all_gather_bytes(payload, sizes, group) if any(sizes) else [b""] * len(sizes)


def collective_mismatch(error: BaseException, plan: str) -> bool:
    """Return whether an error is a mismatch with ranks that were waiting in operation `plan`.

    These ranks have raised too and left the operation, so this process must not enter it.
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
            "unequal ones. In a module, write self.trainer.accelerator.gather_for_metrics(...).",
        ]
    )


class CallCounts:
    """The progress of this process in a program that all processes run.

    A process that waits in vain reads in the store whether the others have gone on without it.

    Attributes:
        joint: The number of collectives that all processes have checked.
        passes: The number of passes begun since then, by kind: ``"forward"`` of sharded models,
            which are collective, and ``"backward"``.
    """

    def __init__(self) -> None:
        self.joint = 0
        self.passes: dict[str, int] = {}

    def note(self, kind: str) -> None:
        """Record in the store that this process begins a pass, without waiting (5 µs)."""
        self.passes[kind] = number = self.passes.get(kind, 0) + 1
        with suppress(RuntimeError):  # the process that hosts the store has ended
            store_of(None).set(f"cadence/{kind}/{dist.get_rank()}", f"{self.joint} {number}")

    def ahead(self, kind: str) -> list[int]:
        """Return the ranks that have begun more passes than this one; not a collective."""
        store, local = store_of(None), (self.joint, self.passes.get(kind, 0))
        keys = {rank: f"cadence/{kind}/{rank}" for rank in range(dist.get_world_size())}
        noted = {rank: store.get(key) for rank, key in keys.items() if store.check([key])}
        return [rank for rank, value in noted.items() if tuple(map(int, value.split())) > local]


call_counts = CallCounts()


def waiting_ranks() -> list[int]:
    """Return the ranks that have waited in a collective for more than a second."""
    return _waiting(store_of(None), dist.get_world_size())


class _Waiting:
    """Marks code in which a thread waits for other processes: ``with waiting: …``.

    Attributes:
        threads: The identifiers of the waiting threads, for the watchdog.
    """

    def __init__(self) -> None:
        self.threads: set[int] = set()

    def __enter__(self) -> None:
        self.threads.add(threading.get_ident())

    def __exit__(self, *_: object) -> None:
        self.threads.discard(threading.get_ident())


waiting = _Waiting()


def read_back(tensor: Tensor) -> Tensor:
    """Return a tensor on the host.

    This waits for the device, and so for the processes that its collectives wait for.
    """
    with waiting:
        return tensor.cpu()


def _wait(work: dist.Work, operation: str, group: dist.ProcessGroup | None) -> None:
    """Wait for a collective; if it takes long, log which ranks have not called it."""
    if _ends_within(work, _ANNOUNCED_AFTER):
        return
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    store = store_of(group)
    # The store is gone if the process that hosts it has ended. No rank can then read the note.
    with suppress(RuntimeError):
        store.set(_key(rank), operation)
    try:
        ended = _ends_within(work, _WARNED_AFTER - _ANNOUNCED_AFTER)
    except RuntimeError:  # the group's timeout is shorter, or a peer is lost
        with suppress(RuntimeError):
            _warn(operation, _waiting(store, size), size, rank, failed=True)
        raise
    else:
        if not ended:
            with suppress(RuntimeError):
                _warn(operation, _waiting(store, size), size, rank)
            work.wait()
    finally:
        gone(group)


def awaited(operation: str, group: dist.ProcessGroup | None = None) -> bool:
    """Return whether all other ranks wait in an operation within 30 seconds; not a collective.

    A failed process calls this function before it sends its error in a collective, which would
    block forever if the others never called it.

    Args:
        operation: The operation to record for this process.
        group: The process group; None means the default group.
    """
    store, size, rank = store_of(group), dist.get_world_size(group), dist.get_rank(group)
    until = time.monotonic() + _WARNED_AFTER
    try:
        store.set(_key(rank), operation)  # since another failed rank may wait for this one
        with waiting:
            while not (come := len(_waiting(store, size)) == size) and time.monotonic() < until:
                time.sleep(0.01)
    except RuntimeError:  # the process that hosts the store has ended
        return False
    if not come:
        gone(group)
    return come


def gone(group: dist.ProcessGroup | None = None) -> None:
    """Remove the note in the store that this process waits; not a collective."""
    with suppress(RuntimeError):
        store_of(group).set(_key(dist.get_rank(group)), "")


def _key(rank: int) -> str:
    return f"cadence/waiting/{rank}"


def decided_by_all(decision: str) -> bool:
    """Return whether all ranks come to the same decision within 30 seconds; not a collective.

    It is for decisions that every rank should reach without communication. A rank that is alone
    with its decision gets False, and a rank that comes too late gets the same result as the others.

    Args:
        decision: A name for the decision, unique in the program.
    """
    store, size = store_of(None), dist.get_world_size()
    key = f"cadence/decision/{decision}"
    if store.add(key, 1) == size:
        store.compare_set(f"{key}/result", "", "all")
    with suppress(RuntimeError):  # nobody has written the result
        store.wait([f"{key}/result"], timedelta(seconds=_WARNED_AFTER))
    store.compare_set(f"{key}/result", "", "some")
    return bool(store.get(f"{key}/result") == b"all")


def store_of(group: dist.ProcessGroup | None) -> Any:
    """Return the key-value store of a process group; None means the default group."""
    group = group or dist.group.WORLD
    assert group is not None  # a collective is running in it
    return group.get_group_store()


def _waiting(store: Any, size: int) -> list[int]:
    keys = {rank: _key(rank) for rank in range(size)}
    return [rank for rank, key in keys.items() if store.check([key]) and store.get(key)]


def _warn(
    operation: str, waiting: list[int], size: int, rank: int, *, failed: bool = False
) -> None:
    missing = ", ".join(str(rank) for rank in range(size) if rank not in waiting)
    if not missing or rank != min(waiting):  # only the lowest waiting rank logs
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
        work.wait()  # raises the collective's own error, if there is one
    return True
