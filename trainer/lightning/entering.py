"""Makes ``import lightning`` find `trainer.lightning`, for libraries that inherit its classes.

A library such as optuna-integration, torch-geometric or pytorch-forecasting derives its callbacks,
data modules and models from the classes that ``import lightning`` provides when the library is
imported. If `trainer.lightning` is imported under that name, they become subclasses of Cadence's
classes.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

PLACES = {
    "lightning": "trainer.lightning",
    "lightning_fabric": "trainer.lightning.fabric",
    "pytorch_lightning": "trainer.lightning.pytorch",
}
"""Package: where its names are here."""

FOLDER = Path(__file__).with_name("as_lightning")
"""On ``sys.path``, it has the packages of `PLACES`, and for ``importlib.metadata`` their version.

A child process gets it by ``sys.path`` or ``PYTHONPATH``, before it imports anything.
"""


def enter_as(name: str) -> None:
    """Make ``import lightning`` find `trainer.lightning` in this process and those it spawns.

    Call it before anything imports Lightning; ``trainer launch --as_lightning`` does this for an
    unchanged program. The packages ``pytorch_lightning`` and ``lightning_fabric`` are replaced too.
    None of the packages has to be installed.

    Args:
        name: ``"lightning"``.

    Raises:
        ValueError: Another name is passed.
        ImportError: Lightning itself is already imported, so classes may inherit from it.
    """
    if name != "lightning":
        raise ValueError(f"enter_as was called with {name!r}; the name must be 'lightning'.")
    if any(isinstance(each, _Entered) for each in sys.meta_path):
        return
    loaded = [sys.modules[each] for each in PLACES if each in sys.modules]
    if loaded:
        raise ImportError(
            f"{loaded[0].__name__} is imported already, from {loaded[0].__file__}, and classes may "
            "inherit its own: call enter_as before everything that imports Lightning, or start the "
            "program with `trainer launch --as_lightning`."
        )
    if str(FOLDER) not in sys.path:
        sys.path.insert(0, str(FOLDER))
    sys.meta_path.insert(0, _Entered())


class _Entered(MetaPathFinder, Loader):
    """Finds each Lightning module as the same module object as in `trainer.lightning`."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        package, dot, name = fullname.partition(".")
        if package not in PLACES:
            return None
        try:
            found = find_spec(PLACES[package] + dot + name)
        except ModuleNotFoundError as error:  # whose message names the replacement
            raise ModuleNotFoundError(str(error), name=fullname) from None
        if found is None:
            return None
        is_package = found.submodule_search_locations is not None
        return ModuleSpec(fullname, self, loader_state=found, is_package=is_package)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return import_module(spec.loader_state.name)

    def exec_module(self, module: ModuleType) -> None:
        assert module.__spec__ is not None
        module.__spec__ = module.__spec__.loader_state  # its own; the import replaced it
