"""``ImportError`` messages with the replacement of unsupported Lightning names."""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn

from trainer.migration.table import LIGHTNING_MODULES, LIGHTNING_NAMES

_PREFIX = "trainer.lightning."


def refusal(name: str) -> str | None:
    """Return the error message for an unsupported module or name of Lightning.

    Args:
        name: The path after ``lightning.``; it or its module may be in the table.

    Returns:
        The message; None for names that are not Lightning's, and for names that begin with "_".
    """
    module = name
    while module and not name.rpartition(".")[2].startswith("_"):
        if use := LIGHTNING_NAMES.get(module, LIGHTNING_MODULES.get(module)):
            return f"lightning.{name} is not in Cadence: {use}."
        module = module.rpartition(".")[0]
    return None


def getter(module: str) -> Callable[[str], NoReturn]:
    """Return the ``__getattr__`` of a module below `trainer.lightning`.

    It raises an ``ImportError``, since ``from … import …`` would drop the message of an
    ``AttributeError``.
    """

    def get(name: str) -> NoReturn:
        path = f"{module}.{name}".removeprefix(_PREFIX)
        if path in LIGHTNING_NAMES:
            raise ImportError(refusal(path))
        raise AttributeError(f"module {module!r} has no attribute {name!r}")

    return get
