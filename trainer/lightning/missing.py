"""What of Lightning is not here raises an ``ImportError`` that says what to use."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from types import ModuleType
from typing import NoReturn

from trainer.migration.table import LIGHTNING_NAMES

_PREFIX = "trainer.lightning."


def _refusal(name: str) -> str | None:
    use = LIGHTNING_NAMES.get(name)
    return None if use is None else f"lightning.{name} is not in Cadence: {use}."


def getter(module: str) -> Callable[[str], NoReturn]:
    """Return the ``__getattr__`` of a module below `trainer.lightning`.

    Not an ``AttributeError``, of which ``from … import …`` would drop the text.
    """

    def get(name: str) -> NoReturn:
        if said := _refusal(f"{module}.{name}".removeprefix(_PREFIX)):
            raise ImportError(said)
        raise AttributeError(f"module {module!r} has no attribute {name!r}")

    return get


class _Finder(MetaPathFinder):
    """Refuses modules of Lightning that are not here; it is asked after all others."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> None:
        """Find nothing.

        Raises:
            ImportError: The module is one of Lightning's; the text says what to use.
        """
        if fullname.startswith(_PREFIX) and (said := _refusal(fullname.removeprefix(_PREFIX))):
            raise ImportError(said, name=fullname)


def install() -> None:
    """Refuse such modules when they are imported."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.append(_Finder())
