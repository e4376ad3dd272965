"""A pool of ranks where gloo reduces gradients, however few they are.

Tests train small models, whose gradients the `Trainer` exchanges; most users' models are larger.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from trainer.engines import exchange


def reducing(pool: Callable[..., Any]) -> Callable[..., Any]:
    """Return a pool that runs functions as `pool` does, but lets DDP reduce all gradients."""

    def call(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        def run(*args: Any) -> Any:
            few, exchange._FEW = exchange._FEW, -1
            try:
                return function(*args)
            finally:
                exchange._FEW = few

        return pool(run, *args, **kwargs)

    return call
