"""An import hook for another library's module paths below a package of ours."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


class ModuleFinder(MetaPathFinder, Loader):
    """Meta path finder and loader of modules without a file.

    Args:
        package: Our package, such as ``trainer.accelerate``.
        names: By module path without the package, a function that returns the value of a name in
            the module.
        refusal: Returns the error message for an unsupported module path; None if the library has
            no such module.
        functions: Modules whose parent package has a function of the same name.
    """

    def __init__(
        self,
        package: str,
        names: Mapping[str, Callable[[str], Any]],
        refusal: Callable[[str], str | None],
        *,
        functions: Sequence[str] = (),
    ) -> None:
        self.package = package
        self._names = names
        self._refusal = refusal
        self._functions = functions

    def install(self) -> None:
        """Make the modules importable, after all other finders."""
        for finder in sys.meta_path:
            if isinstance(finder, ModuleFinder) and finder.package == self.package:
                return
        sys.meta_path.append(self)

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None = None,  # noqa: ARG002 - as importlib calls it
        target: ModuleType | None = None,  # noqa: ARG002 - as importlib calls it
    ) -> ModuleSpec | None:
        """Return the spec of a module.

        Raises:
            ModuleNotFoundError: The module is not supported; the message names the replacement.
        """
        name = fullname.removeprefix(f"{self.package}.")
        if name == fullname:
            return None
        if name in self._names:
            is_package = any(module.startswith(f"{name}.") for module in self._names)
            return ModuleSpec(fullname, self, is_package=is_package)
        if message := self._refusal(name):
            raise ModuleNotFoundError(message, name=fullname)
        return None

    def exec_module(self, module: ModuleType) -> None:
        """Set the module's ``__getattr__`` to look up its names."""
        name = module.__name__.removeprefix(f"{self.package}.")
        module.__getattr__ = self._names[name]  # type: ignore[method-assign]  # PEP 562
        for inner in self._functions:
            above, _, function = inner.rpartition(".")
            if above == name:  # the import of a module sets its name above: import it first
                imported = import_module(f"{self.package}.{inner}")
                setattr(module, function, getattr(imported, function))
