"""Processes with different numbers of batches."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import nn
from torch.distributed.algorithms.join import Join, Joinable, _JoinConfig

from trainer.state import PartialState
from trainer.strategies.compile import uncompiled


@contextmanager
def join_uneven_inputs(
    joinables: Sequence[Any], loaders: Sequence[Any], even_batches: bool | None = None
) -> Iterator[None]:
    """Let a process that runs out of batches take part in the others' reductions.

    See torch's ``Join``: a process without a batch contributes zero gradients, the sum is divided
    by the number of all processes, and at the end all take the weights of the last active one. With
    one process it does nothing.

    Args:
        joinables: Models in DDP and optimizers that are ``Joinable``, such as
            ``ZeroRedundancyOptimizer``, as `prepare` returned them.
        loaders: The prepared loaders.
        even_batches: Overrides the loaders' setting inside the block; None keeps it. With True
            every process has the same number of batches, and joining is not needed.

    Raises:
        TypeError: One of `joinables` cannot take part.
    """
    if PartialState().num_processes == 1:
        yield
        return
    taking_part = [found for each in joinables if (found := _joinable(each)) is not None]
    with ExitStack() as stack:
        if even_batches is not None:
            _override(loaders, even_batches, stack)
        if even_batches or not taking_part:
            yield
            return
        stack.callback(_disable, taking_part)
        join = Join(taking_part)
        yield
        # Not after an error, when the others may not answer. It changes the warning filters.
        with warnings.catch_warnings():
            join.__exit__(None, None, None)


def _joinable(candidate: Any) -> Joinable | None:
    """Return what takes part in collectives; None for a model that does not."""
    inner = getattr(candidate, "optimizer", candidate)
    if isinstance(inner, nn.Module):
        inner = uncompiled(inner)
    if isinstance(inner, Joinable):
        return inner
    if isinstance(inner, nn.Module):
        return None
    raise TypeError(
        f"joinables holds a {type(inner).__name__}; it takes models that were prepared, and "
        "optimizers that are torch.distributed.algorithms.Joinable."
    )


def _override(loaders: Sequence[Any], even_batches: bool, stack: ExitStack) -> None:
    settable = [loader for loader in loaders if hasattr(loader, "even_batches")]
    if len(settable) < len(loaders):
        warnings.warn(
            "Overriding even_batches is only supported for map-style datasets, yet some "
            "dataloaders given were iterable",
            UserWarning,
            stacklevel=4,
        )
    for loader in settable:
        stack.callback(setattr, loader, "even_batches", loader.even_batches)
        loader.even_batches = even_batches


def _disable(joinables: list[Joinable]) -> None:
    """Undo what torch leaves enabled: every later forward would wait for all processes."""
    for joinable in joinables:
        joinable._join_config = _JoinConfig.construct_disabled_join_config()
