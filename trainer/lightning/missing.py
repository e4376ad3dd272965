"""What of Lightning is not here raises an ``ImportError`` that says what to use."""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn

from trainer.migration.table import LIGHTNING_MODULES, LIGHTNING_NAMES

_PREFIX = "trainer.lightning."


def refusal(name: str) -> str | None:
    """Return what to say of a module or name of Lightning that is not here.

    Args:
        name: As after ``lightning.``; the table has it, or the module that it is in.

    Returns:
        The sentence; None for what is not Lightning's, and for names that begin with "_".
    """
    module = name
    while module and not name.rpartition(".")[2].startswith("_"):
        if use := LIGHTNING_NAMES.get(module, LIGHTNING_MODULES.get(module)):
            return f"lightning.{name} is not in Cadence: {use}."
        module = module.rpartition(".")[0]
    return None


def getter(module: str) -> Callable[[str], NoReturn]:
    """Return the ``__getattr__`` of a module below `trainer.lightning`.

    Not an ``AttributeError``, of which ``from … import …`` would drop the text.
    """

    def get(name: str) -> NoReturn:
        path = f"{module}.{name}".removeprefix(_PREFIX)
        if path in LIGHTNING_NAMES:
            raise ImportError(refusal(path))
        raise AttributeError(f"module {module!r} has no attribute {name!r}")

    return get
