"""Run code on all ranks or on some, in order, and raise an error of one rank on all of them.

These functions need only the process group, because `trainer.state` builds its methods on them.
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
    """Wait for all processes; return only if none of them failed. A collective call.

    Args:
        error: This process's error, or None.
        operation: The name of the function that the user called.

    Raises:
        BaseException: `error` itself, if it is not None.
        RuntimeError: On the other processes; it names the rank that failed and its error.
        DistributedOperationException: On the other processes, if one calls another operation.
    """
    if error is not None:
        if not _alone() and not parted(error, operation):
            report = f"{type(error).__name__}: {error}"
            # If the error cannot be sent to the others, still raise it here: it is the cause.
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
    """Run `work` on all ranks; return only if it failed on none of them. A collective call.

    Args:
        work: The function to run. It may contain collectives, as users' hooks do. If it fails on
            one process, the others may be waiting in one of these collectives. So the failed
            process waits up to 30 seconds for the others to finish `work`.
        operation: The name of the function that the user called.

    Returns:
        The result of `work` on this process.

    Raises:
        Exception: The error that `work` raised on this process.
        RuntimeError: On the other processes; it names the rank that failed and its error.
        DistributedOperationException: On the other processes, if they wait in another operation.
    """
    result: R | None = None
    error: Exception | None = None
    try:
        result = work()
    except Exception as caught:
        lost = parted(caught, operation) or is_of_a_loss(caught)
        if _alone() or lost or not awaited(operation):
            raise
        error = caught  # raised by `exchange`, after it is sent to the others
    exchange(error, operation)
    return cast(R, result)


def _alone() -> bool:
    return not dist.is_initialized() or dist.get_world_size() == 1


def shown(error: BaseException) -> str:
    """Return an error's type and message, even if its ``__str__`` fails."""
    return "".join(traceback.format_exception_only(type(error), error)).strip()


def is_of_backend(error: BaseException) -> bool:
    """Return whether an error comes from the communication backend: a lost peer, for example."""
    return isinstance(error, dist.DistBackendError) or (
        isinstance(error, RuntimeError)
        and "gloo/transport/" in shown(error)  # gloo has no error type of its own
    )


def is_of_a_loss(error: BaseException | None) -> bool:
    """Return whether an error, or one of its causes, comes from the communication backend."""
    while error is not None and not is_of_backend(error):
        error = error.__cause__ or error.__context__
    return error is not None


@contextmanager
def going_first(first: bool, operation: str) -> Iterator[None]:
    """Run the block on some processes first, then on the others.

    If a first process fails, all processes raise, and the others do not run the block. If one of
    the others fails, only that process raises, because no process waits for it.

    Args:
        first: Whether this process is one of the first.
        operation: The name of the function that the user called.

    Raises:
        RuntimeError: On the processes without an error of their own, if a first process failed.
        DistributedOperationException: On all processes, if some call another operation.
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
    """Call `function` on rank 0; its error is raised on every process. A collective call.

    Raises:
        RuntimeError: On the other processes, if `function` failed; it names the rank and the error.
    """
    error: BaseException | None = None
    if not dist.is_initialized() or dist.get_rank() == 0:
        try:
            function()
        except BaseException as caught:  # noqa: BLE001 - raised below, once the others know
            error = caught
    exchange(error, "on_main")


def run_where(due: Callable[[], bool], function: Callable[P, R]) -> Callable[P, R | None]:
    """Wrap a function so that it runs only if `due()` is true, and otherwise returns None.

    Args:
        due: The condition; it is evaluated at each call, not when the function is wrapped.
        function: The function to wrap; the wrapper keeps its name, docstring and signature.

    Raises:
        TypeError: `function` is not callable.
    """
    if not callable(function):
        raise TypeError(f"Only a function can be decorated; {function!r} is not callable.")

    @functools.wraps(function)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> R | None:
        return function(*args, **kwargs) if due() else None

    return wrapper
