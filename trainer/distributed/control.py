"""Who runs what, and in which order; nobody waits in vain for a process that failed.

These are functions of the process group alone: `trainer.state` builds its methods on them.
"""

from __future__ import annotations

import functools
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import ParamSpec, TypeVar, cast

import torch.distributed as dist

from trainer.distributed.meeting import awaited, gone, parted, share

P = ParamSpec("P")
R = TypeVar("R")


def exchange(error: BaseException | None, operation: str) -> None:
    """Wait for all processes; go on only if each of them fared well.

    Every process calls it alike, with the error that it met or None.

    Args:
        error: This process's.
        operation: What users called.

    Raises:
        BaseException: `error` itself, where there is one.
        RuntimeError: On the other processes; it names the rank and its error.
        DistributedOperationException: On the other processes, when one calls another operation.
    """
    if error is not None:
        if not _alone() and not parted(error, operation):
            report = f"{type(error).__name__}: {error}"
            # Whatever keeps the others from hearing of it, this is what went wrong first.
            with suppress(RuntimeError):
                share(operation, report.encode())
            gone()
        raise error
    reports = [] if _alone() else share(operation, b"")
    for rank, told in enumerate(reports):
        if told:
            raise RuntimeError(
                f"Rank {rank} failed while the others waited for it: {told.decode()}"
            )


def on_all(work: Callable[[], R], operation: str) -> R:
    """Do something on every process, and go on only if each of them fared well; collective.

    Args:
        work: What is done. A hook of the user's may be collective: where one process fails in it,
            the others may wait there, and not here. So this one waits half a minute for them.
        operation: What users called.

    Returns:
        This process's result.

    Raises:
        Exception: What `work` raised here.
        RuntimeError: On the other processes; it names the rank and its error.
        DistributedOperationException: On the other processes, where they wait in another operation.
    """
    result: R | None = None
    error: Exception | None = None
    try:
        result = work()
    except Exception as caught:
        lost = parted(caught, operation) or is_of_a_loss(caught)
        if _alone() or lost or not awaited(operation):
            raise
        error = caught  # raised below, once the others know
    exchange(error, operation)
    return cast(R, result)


def _alone() -> bool:
    return not dist.is_initialized() or dist.get_world_size() == 1


def shown(error: BaseException) -> str:
    """Its type and what it says, whatever its ``__str__`` does."""
    return "".join(traceback.format_exception_only(type(error), error)).strip()


def is_of_backend(error: BaseException) -> bool:
    """What it raises where another process has gone or does not answer, among other things."""
    return isinstance(error, dist.DistBackendError) or (
        isinstance(error, RuntimeError) and "gloo/transport/" in shown(error)  # it has no type
    )


def is_of_a_loss(error: BaseException | None) -> bool:
    """The backend's error is behind this one."""
    while error is not None and not is_of_backend(error):
        error = error.__cause__ or error.__context__
    return error is not None


@contextmanager
def going_first(first: bool, operation: str) -> Iterator[None]:
    """The block runs on the processes that go first, then on the others.

    An error in one that goes first is raised on every process: the others do not run the block. An
    error in one of the others stays there, since nobody waits for them.

    Args:
        first: This process goes first.
        operation: What users called.

    Raises:
        RuntimeError: On the processes without an error, when one that went first failed.
        DistributedOperationException: On all processes, when the others do not come here.
    """
    if not first:
        exchange(None, operation)
        yield
        return
    error: BaseException | None = None
    try:
        yield
    except BaseException as caught:  # noqa: BLE001 - raised below, once the others know
        error = caught
    exchange(error, operation)


def on_main(function: Callable[[], object]) -> None:
    """Call `function` on rank 0 of the process group; its error is raised on every process.

    Raises:
        RuntimeError: On the other processes, when it failed; it names rank and error.
    """
    error: BaseException | None = None
    if not dist.is_initialized() or dist.get_rank() == 0:
        try:
            function()
        except BaseException as caught:  # noqa: BLE001 - raised below, once the others know
            error = caught
    exchange(error, "on_main")


def run_where(due: Callable[[], bool], function: Callable[P, R]) -> Callable[P, R | None]:
    """A function that does what `function` does where `due()` holds, and returns None elsewhere.

    Args:
        due: Asked at each call, not when the function is decorated.
        function: Keeps its name, its docstring and its signature.

    Raises:
        TypeError: `function` cannot be called.
    """
    if not callable(function):
        raise TypeError(f"A function is to be decorated, but {function!r} cannot be called.")

    @functools.wraps(function)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> R | None:
        return function(*args, **kwargs) if due() else None

    return wrapper
