"""Handle out-of-memory errors: find a batch size that fits, and release memory."""

from __future__ import annotations

import functools
import gc
import inspect
from collections.abc import Callable
from typing import Any

import torch

from trainer.errors import module_logger

logger = module_logger(__name__)

# Messages of out-of-memory errors that are not a torch.OutOfMemoryError.
_SIGNS = (
    "out of memory",  # MPS, and libraries below torch
    "OUT_OF_DEVICE_MEMORY",  # XPU
    "CUDNN_STATUS_NOT_SUPPORTED",  # cuDNN reports this when it cannot allocate its workspace
    "DefaultCPUAllocator: can't allocate memory",
    "DefaultCPUAllocator: not enough memory",
)


def find_executable_batch_size(
    function: Any = None,
    starting_batch_size: int = 128,
    reduce_batch_size_fn: Callable[[], int] | None = None,
) -> Any:
    """Run a function with ever smaller batch sizes until one does not run out of memory.

    The decorated function is called without its first argument, the batch size. Every call begins
    with `starting_batch_size`; each out-of-memory error reduces it. Allocate everything that holds
    memory inside the function. Each process finds its own size: with several processes, the
    function must fail on all of them or on none.

    Example::

        @find_executable_batch_size(starting_batch_size=64)
        def train(batch_size, module):
            train_loader = DataLoader(train_set, batch_size)
            Trainer(max_epochs=10).fit(module, train_loader)

        train(module)

    Args:
        function: A function whose first argument is the batch size. None returns a decorator.
        starting_batch_size: The batch size of the first attempt.
        reduce_batch_size_fn: Called without arguments after an out-of-memory error; returns the
            next size, or 0 if there is none. By default, nine tenths of the last size, rounded
            down.

    Raises:
        TypeError: When called: the arguments do not fit `function`, for example because the batch
            size was passed too.
        RuntimeError: When called: no batch size above zero fits.
    """
    if function is None:
        return functools.partial(
            find_executable_batch_size,
            starting_batch_size=starting_batch_size,
            reduce_batch_size_fn=reduce_batch_size_fn,
        )

    @functools.wraps(function)
    def search(*args: Any, **kwargs: Any) -> Any:
        _check_arguments(function, args, kwargs)
        reason = ""
        batch_size = starting_batch_size
        while batch_size > 0:
            try:
                return function(batch_size, *args, **kwargs)
            except RuntimeError as error:
                if not is_out_of_memory(error):
                    raise
                reason = f" The last error: {error}"
            # The exception and the frames that held the tensors are released by now.
            free_caches()
            logger.info("A batch size of %d does not fit into memory.", batch_size)
            batch_size = reduce_batch_size_fn() if reduce_batch_size_fn else batch_size * 9 // 10
        raise RuntimeError(f"No executable batch size found, reached zero.{reason}")

    return search


def _check_arguments(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    try:
        inspect.signature(function).bind(0, *args, **kwargs)
    except TypeError as error:
        name = getattr(function, "__name__", repr(function))
        given = ", ".join(
            [*map(repr, args), *(f"{key}={value!r}" for key, value in kwargs.items())]
        )
        raise TypeError(
            f"{name}({given}) has wrong arguments: {error}. find_executable_batch_size passes the "
            f"batch size to {name} as its first argument; leave it out of the call."
        ) from error


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error means out of memory, on any device."""
    return isinstance(error, torch.OutOfMemoryError) or (
        isinstance(error, RuntimeError) and any(sign in str(error) for sign in _SIGNS)
    )


def release_memory(*objects: Any) -> list[None]:
    """Collect garbage and release the device's unused cached memory.

    Python frees only unreferenced objects, so assign the result to their names.

    Example::

        model, optimizer = release_memory(model, optimizer)

    Args:
        *objects: Objects that are no longer needed.

    Returns:
        None for each object.
    """
    count = len(objects)
    del objects
    free_caches()
    return [None] * count


def free_caches() -> None:
    """Collect garbage and release the unused cached memory of every initialised device."""
    gc.collect()
    for device in (torch.cuda, torch.xpu):
        if device.is_initialized():
            device.empty_cache()
    if torch.backends.mps.is_available():
        torch.mps.empty_cache()
