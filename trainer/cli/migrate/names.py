"""The packages that are migrated, and the new places of their names."""

from __future__ import annotations

import sys
from contextlib import suppress
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from inspect import isclass
from pathlib import Path
from typing import Any

import libcst as cst
from libcst.metadata import QualifiedNameSource

MOVED = {
    "lightning_utilities.core.rank_zero": "trainer.lightning.pytorch.utilities.rank_zero",
    "accelerate": "trainer.accelerate",
    "lightning": "trainer.lightning",
    "lightning_fabric": "trainer.lightning.fabric",
    "pytorch_lightning": "trainer.lightning.pytorch",
}
"""Package: where its names are here."""
_NO_LIBRARIES = ("callbacks", "torch", "trackers", "trainer", "transformers")


def moved(path: str) -> str:
    """Return the new path of a module, or of a name in a module."""
    for package, new in MOVED.items():
        if f"{path}.".startswith(f"{package}."):
            return new + path.removeprefix(package)
    return path


@cache
def is_module(path: str) -> bool:
    """Return whether a module exists at a path; only for our modules, since it imports packages."""
    with suppress(ImportError):
        return find_spec(path) is not None
    return False


def package_of(path: str) -> str | None:
    """Return the package of `MOVED` to which a path belongs, by its old or new name."""
    for package, new in MOVED.items():
        if f"{path}.".startswith((f"{package}.", f"{new}.")):
            return package
    return None


def original(path: str) -> str:
    """Return the path in the other library, for an old or a new path."""
    for package in ("accelerate", "lightning"):
        new = MOVED[package]
        if f"{path}.".startswith(f"{new}."):
            return package + path.removeprefix(new)
    return path


def name_in(path: str) -> str:
    """Return a path without its package, as in the table: ``pytorch.callbacks.Timer``."""
    package, _, inner = original(path).partition(".")
    return {"lightning_fabric": "fabric.", "pytorch_lightning": "pytorch."}.get(package, "") + inner


def value_of(path: str) -> Any:
    """Return a module, or an object in a module, by its path.

    Raises:
        ImportError: There is no such module, or the name is not supported.
        AttributeError: There is no such name.
    """
    parts = path.split(".")
    value: Any = import_module(parts[0])
    for at, name in enumerate(parts[1:], start=2):
        try:
            value = getattr(value, name)
        except AttributeError:
            if isclass(value) or not hasattr(value, "__path__"):
                raise
            value = import_module(".".join(parts[:at]))
        if isclass(value) or not hasattr(value, "__spec__"):
            return value  # do not look up attributes of classes and instances
    return value


def class_of(path: str | None) -> type | None:
    """Return the class at a path in a moved package or in ours; None if there is none."""
    if path is None or not (package_of(path) or path.startswith(("trainer.", "callbacks."))):
        return None
    with suppress(ImportError, AttributeError):
        value = value_of(moved(path))
        return value if isclass(value) else None
    return None


@cache
def is_of_a_library(path: str, program: Path) -> bool:
    """Return whether a name comes from a third-party library other than torch.

    Args:
        path: The dotted path of an imported name.
        program: The file that imports it.
    """
    top = path.partition(".")[0]
    if not top or package_of(path) or top in (*sys.stdlib_module_names, *_NO_LIBRARIES):
        return False
    folders = program.absolute().parents
    for place in (folder / part / top for folder in folders for part in ("", "src")):
        # A folder named like a library may hold scripts about it, and is then not a package.
        is_package = place not in folders or (place / "__init__.py").exists()
        if (place.is_dir() and is_package) or place.with_name(f"{top}.py").is_file():
            return False
    return True


def path_of(visitor: Any, node: cst.CSTNode) -> str | None:
    """Return the dotted path of an imported name or of its attribute; None for others.

    Args:
        visitor: A visitor with libcst's ``QualifiedNameProvider``.
        node: An expression.
    """
    names = visitor.get_metadata(cst.metadata.QualifiedNameProvider, node, set())
    paths = sorted(
        qualified.name for qualified in names if qualified.source is QualifiedNameSource.IMPORT
    )
    return next((path for path in paths if package_of(path)), paths[0] if paths else None)


def dotted(node: cst.BaseExpression | None) -> str:
    """Return the source text of a dotted name."""
    return "" if node is None else cst.Module([]).code_for_node(node)


def literal(node: cst.BaseExpression) -> Any:
    """Return the value of a literal expression, else ``...``."""
    import ast

    with suppress(ValueError, SyntaxError):
        return ast.literal_eval(dotted(node).strip())
    return ...
