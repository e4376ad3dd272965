"""Run code on all ranks or on some, in order, and raise one rank's error on all of them.

These functions need only the process group, because `trainer.state` builds its methods on them.

`split` divides inputs between processes.
"""

from __future__ import annotations

import functools
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, ParamSpec, TypeVar, cast

import numpy
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import IterableDataset, Subset

from trainer.distributed.guards import all_gather_payloads, awaited, collective_mismatch, gone
from trainer.tree import rebuild

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
        if not _alone() and not collective_mismatch(error, operation):
            report = f"{type(error).__name__}: {error}"
            # If the error cannot be sent to the others, still raise it here: it is the cause.
            with suppress(RuntimeError):
                all_gather_payloads(operation, report.encode())
            gone()
        raise error
    reports = [] if _alone() else all_gather_payloads(operation, b"")
    for rank, failure in enumerate(reports):
        if failure:
            raise RuntimeError(
                f"Rank {rank} failed while the others waited for it: {failure.decode()}"
            )


def on_all(work: Callable[[], R], operation: str) -> R:
    """Run `work` on all ranks; return only if it succeeded on all. A collective call.

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
        lost = collective_mismatch(caught, operation) or is_of_a_loss(caught)
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
        RuntimeError: On processes that did not fail, if a first process failed.
        DistributedOperationException: On all processes, if some call another operation.
    """
    if not first:
        exchange(None, operation)
        yield
        return
    error: BaseException | None = None
    try:
        yield
    except BaseException as caught:  # noqa: BLE001 - raised below, after the others were informed
        error = caught
    exchange(error, operation)


def on_main(function: Callable[[], object]) -> None:
    """Call `function` on rank 0; its error is raised on every process. A collective call.

    Raises:
        RuntimeError: On the other processes, if `function` failed; it names the rank and the error.
    """
    main = not dist.is_initialized() or dist.get_rank() == 0
    with going_first(main, "on_main"):
        if main:
            function()


def run_where(due: Callable[[], bool], function: Callable[P, R]) -> Callable[P, R | None]:
    """Wrap a function so that it runs only if `due()` is true, and otherwise returns None.

    Args:
        due: The condition; it is evaluated at each call, not when the function is wrapped.
        function: The function to wrap; the wrapper keeps its name, docstring and signature.
    """

    @functools.wraps(function)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> R | None:
        return function(*args, **kwargs) if due() else None

    return wrapper


def split(
    inputs: Any,
    *,
    rank: int,
    world_size: int,
    padding: bool = False,
    device: torch.device | None = None,
) -> Any:
    """Return one rank's part of the inputs: ``len // world_size`` items, one more on low ranks.

    Args:
        inputs: An object with a length and an index: a list, tuple, range, tensor or array (split
            along the first dimension), data frame or map-style dataset. Or a nested mapping
            of these, whose other values (strings, numbers, objects) go to every process. It is not
            changed.
        rank: The rank of this process.
        world_size: The number of processes; a single process gets the inputs themselves.
        padding: Repeat the last item so that every process has the same number of items. Empty
            inputs stay empty on every process.
        device: The device to which tensors are moved with `padding`, so that they can be gathered.

    Returns:
        The same type as the inputs, except for a tuple for a named tuple, a list for a padded
        range, and a `torch.utils.data.Subset` for an unknown type. It is empty on some processes if
        there are fewer items than processes and no padding.

    Raises:
        ValueError: The values of a mapping have different numbers of items, or a tensor or array
            has no dimension to split.
        TypeError: The inputs, or an iterable in a mapping, have no length or no index.
    """
    if not isinstance(inputs, Mapping) and not _has_items(inputs):
        raise _refusal(inputs, "inputs")
    lengths = dict(_lengths(inputs, "inputs"))
    if len(set(lengths.values())) > 1:
        listed = ", ".join(f"{name} {length}" for name, length in lengths.items())
        raise ValueError(
            "All values in the dictionary must have the same length to be split between processes; "
            f"the numbers of items are: {listed}."
        )
    if world_size == 1 or not lengths:
        return inputs
    length = next(iter(lengths.values()))
    share, extra = divmod(length, world_size)
    start = rank * share + min(rank, extra)
    stop = start + share + (rank < extra)
    repeats = share + (extra > 0) - (stop - start) if padding and length else 0
    return _take(inputs, range(start, stop), repeats, device if padding else None)


def _has_items(value: Any) -> bool:
    """Return whether a value has a length and can be indexed."""
    kind = type(value)
    indexed = hasattr(kind, "__getitem__") or hasattr(kind, "select")
    return (
        indexed
        and hasattr(kind, "__len__")
        and not isinstance(value, (str, bytes, Mapping, IterableDataset))
    )


def _lengths(value: Any, name: str) -> Iterator[tuple[str, int]]:
    """Yield the path and the number of items of each value that is split.

    Raises:
        ValueError: A tensor or array has no dimension.
        TypeError: An iterable has no length or no index.
    """
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _lengths(item, f"{name}[{key!r}]")
    elif getattr(value, "shape", None) == ():
        kind = "a tensor" if isinstance(value, Tensor) else "an array"
        raise ValueError(
            f"{name} is {kind} without dimensions; pass its .item() to give it to all processes."
        )
    elif _has_items(value):
        yield name, len(value)
    elif hasattr(type(value), "__iter__") and not isinstance(value, (str, bytes)):
        raise _refusal(value, name)


def _refusal(value: Any, name: str) -> TypeError:
    return TypeError(
        f"{name} is a {type(value).__name__}, which cannot be split between processes: it has no "
        "length and index. Pass a list of its items; loaders and streams are sharded by prepare()."
    )


def _take(value: Any, items: range, repeats: int, device: torch.device | None) -> Any:
    """Return the given items of a value, followed by its last item `repeats` times."""
    if isinstance(value, Mapping):
        return rebuild(value, [_take(item, items, repeats, device) for item in value.values()])
    if not _has_items(value):
        return value
    indices: Sequence[int] = [*items, *[len(value) - 1] * repeats] if repeats else items
    own_range = slice(items.start, items.stop)
    if isinstance(value, (list, tuple)):
        rest: Any = value[-1:] * repeats
        return value[own_range] + rest
    if isinstance(value, Tensor):
        part = value[indices] if repeats else value[own_range]
        return part if device is None else part.to(device)
    if isinstance(value, range):
        return [value[index] for index in indices] if repeats else value[own_range]
    if isinstance(value, numpy.ndarray):
        return value[indices] if repeats else value[own_range]
    if hasattr(value, "iloc"):  # a data frame; its `select` would take columns
        return value.iloc[indices]
    if hasattr(value, "select"):  # a dataset of the library `datasets`
        return value.select(indices)
    return Subset(value, indices)
