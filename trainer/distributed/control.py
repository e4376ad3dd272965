"""Which processes run what, and in which order; a failure reaches those that wait for it.

These functions depend on the process group alone: `trainer.state` builds its methods on them.
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
    """Wait for all processes; return only if none of them failed.

    Every process calls it, with its error or None.

    Args:
        error: This process's error.
        operation: The function that users called.

    Raises:
        BaseException: `error` itself, if there is one.
        RuntimeError: On the other processes; it names the rank and its error.
        DistributedOperationException: On the other processes, when one calls another operation.
    """
    if error is not None:
        if not _alone() and not parted(error, operation):
            report = f"{type(error).__name__}: {error}"
            # Even if it cannot be reported to the others, `error` is what went wrong first.
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
    """Run `work` on every process; return only if none of them failed; collective.

    Args:
        work: It may contain collectives, as users' hooks do: if one process fails in it, the others
            may be waiting there rather than here, so the failed one waits 30 seconds for them.
        operation: The function that users called.

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
    """Return an error's type and message, even if its ``__str__`` fails."""
    return "".join(traceback.format_exception_only(type(error), error)).strip()


def is_of_backend(error: BaseException) -> bool:
    """Return whether the backend raised it, as it does when a peer is gone, for example."""
    return isinstance(error, dist.DistBackendError) or (
        isinstance(error, RuntimeError)
        and "gloo/transport/" in shown(error)  # gloo has no error type of its own
    )


def is_of_a_loss(error: BaseException | None) -> bool:
    """Return whether an error of the backend is this one or a cause of it."""
    while error is not None and not is_of_backend(error):
        error = error.__cause__ or error.__context__
    return error is not None


@contextmanager
def going_first(first: bool, operation: str) -> Iterator[None]:
    """Run the block on the processes that go first, then on the others.

    An error on a process that goes first is raised on every process, and the others do not run the
    block. An error on one of the others stays there, since no process waits for it.

    Args:
        first: Whether this process goes first.
        operation: The function that users called.

    Raises:
        RuntimeError: On the processes without an error, when one that went first failed.
        DistributedOperationException: On all processes, when the others call something else.
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
    """Wrap a function so that it runs only where `due()` holds, and returns None elsewhere.

    Args:
        due: Evaluated at each call, not when the function is decorated.
        function: Its name, docstring and signature are kept.

    Raises:
        TypeError: `function` is not callable.
    """
    if not callable(function):
        raise TypeError(f"Only a function can be decorated; {function!r} is not callable.")

    @functools.wraps(function)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> R | None:
        return function(*args, **kwargs) if due() else None

    return wrapper
