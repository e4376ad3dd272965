"""Makes the modules of accelerate importable below `trainer.accelerate`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

from trainer.accelerate.table import PLACES, value_of, why_not

_PREFIX = "trainer.accelerate."


class Modules(MetaPathFinder, Loader):
    """Finds and makes the modules of `PLACES`, which have no file; each looks its names up."""

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None = None,  # noqa: ARG002 - as importlib calls it
        target: ModuleType | None = None,  # noqa: ARG002 - as importlib calls it
    ) -> ModuleSpec | None:
        """Return the spec of a module of accelerate.

        Raises:
            ImportError: It is not here; the text says why.
        """
        if not fullname.startswith(_PREFIX):
            return None
        module = fullname.removeprefix(_PREFIX)
        if reason := why_not(module):
            raise ImportError(f"accelerate.{module} is not in Cadence: {reason}.", name=fullname)
        if module not in PLACES:
            return None
        return ModuleSpec(
            fullname, self, is_package=any(p.startswith(f"{module}.") for p in PLACES)
        )

    def exec_module(self, module: ModuleType) -> None:
        """Make the module look its names up."""
        name = module.__name__.removeprefix(_PREFIX)
        module.__getattr__ = partial(value_of, name)  # type: ignore[method-assign]  # PEP 562


def install() -> None:
    """Make the modules importable."""
    if not any(isinstance(finder, Modules) for finder in sys.meta_path):
        sys.meta_path.append(Modules())
