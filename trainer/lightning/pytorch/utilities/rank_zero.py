"""Functions that act on rank 0 alone."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

from trainer.state import PartialState

R = TypeVar("R")
_logger = logging.getLogger("trainer.lightning")


def rank_zero_only(function: Callable[..., R], default: Any = None) -> Callable[..., R | Any]:
    """Return a function that runs on rank 0, and returns `default` on other processes."""

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> R | Any:
        return function(*args, **kwargs) if PartialState().is_main_process else default

    return call


@rank_zero_only
def rank_zero_info(*args: Any, **kwargs: Any) -> None:
    """Log a message on rank 0."""
    _logger.info(*args, **kwargs)


@rank_zero_only
def rank_zero_debug(*args: Any, **kwargs: Any) -> None:
    """Log a message for debugging on rank 0."""
    _logger.debug(*args, **kwargs)


@rank_zero_only
def rank_zero_warn(message: str, *, category: type[Warning] = UserWarning, **_: Any) -> None:
    """Warn on rank 0."""
    warnings.warn(message, category, stacklevel=3)


@rank_zero_only
def rank_zero_deprecation(message: str, **_: Any) -> None:
    """Warn of a deprecation on rank 0."""
    warnings.warn(message, DeprecationWarning, stacklevel=3)
