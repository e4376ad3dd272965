"""Imports point down: from each module only to floors below it, and in no circle.

Module-level imports must lead to the same floor or a lower one and form no cycle. An import inside
a function may close a circle that is no problem at import time, but it must not point up either.
Imports under `if TYPE_CHECKING:` are for the reader of types alone and do not count.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("callbacks", "trackers", "trainer")

# A package stands for the modules in it. A module that is not here fails the test: place it first.
FLOORS = {
    "trainer._siblings": 0,
    "trainer.checks": 0,
    "trainer.enums": 0,
    "trainer.environment": 0,
    "trainer.errors": 0,
    "trainer.files": 0,
    "trainer.hints": 0,
    "trainer.interval": 0,
    "trainer.memory": 0,
    "trainer.names": 0,
    "trainer.strict_json": 0,
    "trainer.torch_compat": 0,
    "trainer.tracebacks": 0,
    "trainer.tree": 0,
    "trainer.xla": 0,
    "callbacks": 1,
    "trackers": 1,
    "trainer.distributed.guards": 1,
    "trainer.distributed.process_control": 1,
    "trainer.configuration": 2,
    "trainer.state": 2,
    "trainer.distributed": 3,
    "trainer.logging": 3,
    "trainer.fp8": 4,
    "trainer.precision": 4,
    "trainer.rng": 4,
    "trainer.tracking": 4,
    "trainer.data": 5,
    "trainer.engines": 5,
    "trainer.optim": 5,
    "trainer.big_models": 6,
    "trainer.checkpoint": 6,
    "trainer.accelerator": 7,
    "trainer.hparams": 7,
    "trainer.local_sgd": 8,
    "trainer.datamodule": 8,
    "trainer.hooks": 8,
    "trainer.loops": 8,
    "trainer.metrics": 8,
    "trainer.module": 8,
    "trainer.trainer": 9,
    "trainer.accelerate": 10,
    "trainer.launch": 10,
    "trainer.launchers": 10,
    "trainer.lightning": 10,
    "trainer.migration": 10,
    "trainer.tuning": 10,
    "trainer.utils": 10,
    "trainer.__main__": 11,
    "trainer.cli": 11,
}
TOP = 12  # `trainer/__init__.py`: the names of all floors, for users; no module of ours imports it


class Import(NamedTuple):
    """One import of one of our modules."""

    source: str
    target: str
    line: int
    deferred: bool  # inside a function

    def __str__(self) -> str:
        return f"{self.source}:{self.line} imports {self.target}"


def read_sources() -> dict[str, str]:
    """Return the text of every module of the three packages by its dotted name."""
    sources = {}
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
            sources[name] = path.read_text()
    return sources


def floor_of(module: str) -> int | None:
    """Return the floor of the module, or None for one that has no place yet."""
    if module == "trainer":
        return TOP
    while module:
        if module in FLOORS:
            return FLOORS[module]
        module = module.rpartition(".")[0]
    return None


def find_imports(sources: Mapping[str, str]) -> list[Import]:
    """Return every import from one of the modules in `sources` to another."""
    return [
        Import(module, target, line, deferred)
        for module, text in sources.items()
        for name, line, deferred in _walk(ast.parse(text), deferred=False)
        if (target := _existing(name, sources)) is not None and target != module
    ]


def _walk(node: ast.AST, *, deferred: bool) -> Iterator[tuple[str, int, bool]]:
    """Yield the full name, the line and the place of what each import statement names."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            for alias in child.names:
                yield alias.name, child.lineno, deferred
        elif isinstance(child, ast.ImportFrom):
            for alias in child.names:
                yield f"{child.module}.{alias.name}", child.lineno, deferred
        elif isinstance(child, ast.If) and _is_type_checking(child.test):
            for other in child.orelse:
                yield from _walk(ast.Module([other], []), deferred=deferred)
        else:
            function = isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef))
            yield from _walk(child, deferred=deferred or function)


def _is_type_checking(test: ast.expr) -> bool:
    return ast.unparse(test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")


def _existing(name: str, sources: Mapping[str, str]) -> str | None:
    """Return the module that `name` is, or the one it lies in: `a.b.c` may be a name in `a.b`."""
    while name:
        if name in sources:
            return name
        name = name.rpartition(".")[0]
    return None


def pointing_up(imports: list[Import]) -> list[str]:
    """Return the imports of a higher floor, as lines of text."""
    found = []
    for each in imports:
        source, target = floor_of(each.source), floor_of(each.target)
        if source is not None and target is not None and target > source:
            found.append(f"{each} (floor {source} -> floor {target})")
    return found


def find_cycle(imports: list[Import]) -> list[str]:
    """Return the modules of one circle of module-level imports, or nothing."""
    graph: dict[str, list[str]] = {}
    for each in imports:
        if not each.deferred:
            graph.setdefault(each.source, []).append(each.target)
    done: set[str] = set()

    def visit(module: str, path: list[str]) -> list[str]:
        if module in path:
            return [*path[path.index(module) :], module]
        if module in done:
            return []
        for target in graph.get(module, ()):
            if cycle := visit(target, [*path, module]):
                return cycle
        done.add(module)
        return []

    for module in list(graph):
        if cycle := visit(module, []):
            return cycle
    return []


def test_the_architecture_page_has_the_same_floors():
    page = (ROOT / "docs" / "architecture.md").read_text()
    messages = {
        place.replace("/", "."): int(floor)
        for floor, places in re.findall(r"^\| (\d+) \| (.+?) \|", page, re.MULTILINE)
        for place in re.findall(r"`(.+?)(?:/|\.py)`", places)
    }
    assert messages == FLOORS


@pytest.fixture(scope="module")
def sources() -> dict[str, str]:
    found = read_sources()
    assert {"callbacks", "trackers", "trainer"} <= found.keys()
    return found


@pytest.fixture(scope="module")
def imports(sources) -> list[Import]:
    return find_imports(sources)


def test_every_module_has_a_floor(sources):
    homeless = [module for module in sources if floor_of(module) is None]
    assert homeless == [], "give each a floor in FLOORS, and docs/architecture.md a line"


def test_no_import_points_up(imports):
    assert pointing_up(imports) == []


def test_no_imports_form_a_circle(imports):
    assert find_cycle(imports) == []


def test_callbacks_and_trackers_know_the_trainer_by_its_lowest_floor_alone(imports):
    found = [
        str(each)
        for each in imports
        if (package := each.source.partition(".")[0]) in ("callbacks", "trackers")
        and not each.target.startswith(package)
        and floor_of(each.target) != 0
    ]
    assert found == []


def test_the_core_knows_no_names_of_other_libraries(imports):
    """What ported programs need beyond translation lives in these packages."""
    edge = ("accelerate", "lightning", "migration", "utils")
    found = [
        str(each)
        for each in imports
        if _package(each.target) in edge and _package(each.source) not in (*edge, "cli")
    ]
    assert found == []


def _package(module: str) -> str:
    """Return the name directly below ``trainer``; empty for other packages."""
    return module.removeprefix("trainer.").partition(".")[0] if module != "trainer" else ""


def test_nothing_imports_the_command_line(sources, imports):
    importers = {each.source for each in imports if within_cli(each.target)}
    assert {each for each in importers if not within_cli(each)} == {"trainer.__main__"}
    named = [name for name, text in sources.items() if re.search(r'"trainer\.cli\b', text)]
    assert [each for each in named if not within_cli(each)] == []  # as of a table of modules


def within_cli(module: str) -> bool:
    return module.split(".")[:2] == ["trainer", "cli"]


def test_no_import_is_relative(sources):
    found = [
        f"{module}:{node.lineno}"
        for module, text in sources.items()
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.ImportFrom) and node.level
    ]
    assert found == []  # the names above would be wrong


# The checks themselves, on made-up modules.


def test_an_import_of_a_higher_floor_is_found_wherever_it_stands():
    sources = {
        "trainer.tree": "from trainer import state",
        "trainer.errors": "def f():\n    from trainer.state import PartialState",
        "trainer.environment": "try:\n    import trainer.state as s\nexcept ImportError:\n    pass",
        "trainer.state": "from trainer.errors import MetricError",
    }
    assert pointing_up(find_imports(sources)) == [
        "trainer.tree:1 imports trainer.state (floor 0 -> floor 2)",
        "trainer.errors:2 imports trainer.state (floor 0 -> floor 2)",
        "trainer.environment:2 imports trainer.state (floor 0 -> floor 2)",
    ]


def test_an_import_of_the_facade_points_up():
    sources = {"trainer": "", "trainer.cli": "from trainer import Trainer"}
    assert pointing_up(find_imports(sources)) == [
        "trainer.cli:1 imports trainer (floor 11 -> floor 12)"
    ]


def test_a_circle_is_found_unless_a_function_closes_it():
    sources = {
        "callbacks.a": "import callbacks.b",
        "callbacks.b": "from callbacks import c",
        "callbacks.c": "from callbacks.a import name",
    }
    cycle = ["callbacks.a", "callbacks.b", "callbacks.c", "callbacks.a"]
    assert find_cycle(find_imports(sources)) == cycle
    sources["callbacks.c"] = "def f():\n    from callbacks.a import name"
    assert find_cycle(find_imports(sources)) == []
