"""Functions that act on rank 0 alone."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

import torch.distributed as dist

from trainer import environment

R = TypeVar("R")
_logger = logging.getLogger(__name__)
_logger.setLevel(logging.INFO)
_shown = logging.StreamHandler()  # as in Lightning, whose messages appear without set-up
_shown.addFilter(lambda _: not logging.getLogger().hasHandlers())
_logger.addHandler(_shown)


class _RankZeroOnly:
    @property
    def rank(self) -> int:
        """The rank of this process, even before the first Trainer is created."""
        return dist.get_rank() if dist.is_initialized() else environment.detect_launch().rank

    def __call__(self, fn: Callable[..., R], default: Any = None) -> Callable[..., R | Any]:
        """Return a function that runs on rank 0, and returns `default` on other processes."""

        @wraps(fn)
        def call(*args: Any, **kwargs: Any) -> R | Any:
            return fn(*args, **kwargs) if self.rank == 0 else default

        return call


rank_zero_only = _RankZeroOnly()


def rank_prefixed_message(message: str, rank: int | None) -> str:
    """Return a message that begins with the rank, if there is one."""
    return message if rank is None else f"[rank: {rank}] {message}"


@rank_zero_only
def rank_zero_info(*args: Any, **kwargs: Any) -> None:
    """Log a message on rank 0; it goes to stderr unless the root logger has handlers."""
    _logger.info(*args, **kwargs)


@rank_zero_only
def rank_zero_debug(*args: Any, **kwargs: Any) -> None:
    """Log a message for debugging on rank 0."""
    _logger.debug(*args, **kwargs)


@rank_zero_only
def rank_zero_warn(
    message: str, stacklevel: int = 4, *, category: type[Warning] = UserWarning, **_: Any
) -> None:
    """Warn on rank 0; `stacklevel` is Lightning's, which includes two of its own functions."""
    warnings.warn(message, category, stacklevel=max(stacklevel - 1, 1))


@rank_zero_only
def rank_zero_deprecation(message: str, stacklevel: int = 5, **_: Any) -> None:
    """Warn of a deprecation on rank 0."""
    warnings.warn(message, DeprecationWarning, stacklevel=max(stacklevel - 2, 1))
