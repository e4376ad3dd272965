"""Writes ``lightning_signatures.json``: the signatures of Lightning's public classes and functions.

``python tests/moving/lightning_signatures.py`` does it, where Lightning is installed.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

FILE = Path(__file__).with_suffix(".json")
_MODULES = """
    lightning.pytorch lightning.pytorch.callbacks lightning.pytorch.callbacks.progress
    lightning.pytorch.callbacks.progress.rich_progress lightning.pytorch.cli
    lightning.pytorch.core.optimizer lightning.pytorch.demos lightning.pytorch.demos.boring_classes
    lightning.pytorch.demos.mnist_datamodule lightning.pytorch.loggers
    lightning.pytorch.loggers.logger lightning.pytorch.profilers lightning.pytorch.strategies
    lightning.pytorch.tuner lightning.pytorch.utilities lightning.pytorch.utilities.grads
    lightning.pytorch.utilities.model_helpers lightning.pytorch.utilities.model_summary
    lightning.pytorch.utilities.rank_zero lightning.pytorch.utilities.seed"""


def parameters(function: Any) -> list[str]:
    """Return the parameters, those that are only given by name with a ``*``."""
    kinds = inspect.Parameter
    marks = {kinds.POSITIONAL_ONLY: "", kinds.POSITIONAL_OR_KEYWORD: "", kinds.KEYWORD_ONLY: "*"}
    found = inspect.signature(function).parameters.values()
    return [f"{marks[each.kind]}{each.name}" for each in found if each.kind in marks]


def found_in(module: str) -> Iterator[tuple[str, Any]]:
    """Yield the public classes and functions of a module."""
    names = vars(import_module(module))
    for name, found in sorted(names.items()):
        home = str(getattr(found, "__module__", ""))
        own = [name] if home == module and not name.startswith("_") else []
        if name in (names.get("__all__") or own) or (
            name.startswith("rank_zero_") and module.endswith("rank_zero")
        ):
            yield name, found


def signatures() -> Iterator[tuple[str, list[str]]]:
    """Yield each function, class and method, with the parameters that a caller gives."""
    everything = [pair for module in _MODULES.split() for pair in found_in(module)]
    classes = [found for _, found in everything if inspect.isclass(found)]
    seen = set()
    for module in _MODULES.split():
        for name, found in found_in(module):
            path = f"{module.partition('.')[2]}.{name}"
            if inspect.isfunction(found):
                yield path, parameters(found)
            if not inspect.isclass(found) or found in seen:
                continue
            seen.add(found)
            yield path, parameters(found.__init__)[1:]
            # Methods of a base that has an entry of its own stand there.
            bases = [each for each in found.__mro__ if each is found or each not in classes]
            bases = [each for each in bases if each.__module__.startswith("lightning.")]
            names = {method for each in bases for method in vars(each) if method[0] != "_"}
            for method in sorted(names):
                value = next(vars(each)[method] for each in bases if method in vars(each))
                function = getattr(value, "__func__", value)
                if inspect.isfunction(function):
                    given = parameters(function)
                    yield f"{path}.{method}", given[not isinstance(value, staticmethod) :]


if __name__ == "__main__":
    rows = [f"{json.dumps(path)}: {json.dumps(names)}" for path, names in signatures()]
    FILE.write_text("{\n" + ",\n".join(rows) + "\n}\n")
