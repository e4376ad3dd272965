"""tests/accelerator_members.md is complete: every public member has a row that names its tests.

A test belongs to a row if it exists and speaks of the member, in its own text or in that of the
helpers in its file. What the members of the `Accelerator` do is shown through an `Accelerator`.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import re
from enum import Enum
from importlib import import_module
from pathlib import Path
from typing import NamedTuple

import trainer
import trainer.utils
from trainer import Accelerator, AcceleratorState, GradientState, PartialState

ROOT = Path(__file__).resolve().parents[1]
TABLE = ROOT / "tests" / "accelerator_members.md"

# Of the trainer, not of a loop of one's own; and the classes that have tables of their own.
ELSEWHERE = {
    "CombinedLoader",
    "DataModule",
    "MetricError",
    "Preempted",
    "TrainModule",
    "Trainer",
    "Tuner",
}
TABLES = {"Accelerator", "AcceleratorState", "GradientState", "PartialState"}

LINK = re.compile(r"\[(test_\w+)\]\(([\w/]+\.py)\)")


class Row(NamedTuple):
    """A row of a table of members."""

    section: str
    names: tuple[str, ...]
    tests: tuple[tuple[str, str], ...]  # file below tests/, name


def rows_of(text: str) -> list[Row]:
    """The rows that name tests; those of other tables have no such column."""
    rows, section, shown = [], "", False
    for line in text.splitlines():
        if line.startswith("## "):
            section = line.removeprefix("## ")
        cells = [cell.strip() for cell in line.strip("|").split(" | ")] if "|" in line else []
        if not cells:
            shown = False
        elif cells[-1] == "shown by":
            shown = True
        elif shown and not line.startswith("|---"):
            tests = tuple((file, name) for name, file in LINK.findall(cells[-1]))
            rows.append(Row(section, tuple(re.findall(r"`(.+?)`", cells[0])), tests))
    return rows


ROWS = rows_of(TABLE.read_text())


def named_in(section: str) -> list[str]:
    """The names in the first cells of the sections that begin so, in order."""
    return [name for row in ROWS if row.section.startswith(section) for name in row.names]


def public(names: object) -> set[str]:
    return {name for name in names if not name.startswith("_")}


def members(kind: type, *instances: object) -> set[str]:
    """Public names of a class, of its annotations, and of instances' own attributes."""
    annotated = {name for each in kind.__mro__ for name in inspect.get_annotations(each)}
    return public({*dir(kind), *annotated, *(n for each in instances for n in vars(each))})


def arguments(kind: type) -> set[str]:
    return set(inspect.signature(kind).parameters)


@functools.cache
def read_tests(file: str) -> dict[str, str]:
    """The text of each test in a file, with that of the helpers of the file that it leads to."""
    tree = ast.parse((ROOT / "tests" / file).read_text())
    known: dict[str, ast.stmt] = {}
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            known[node.name] = node
        elif isinstance(node, ast.Assign):
            known |= {target.id: node for target in node.targets if isinstance(target, ast.Name)}

    def text(name: str) -> str:
        seen: dict[str, str] = {}
        waiting = [name]
        while waiting:
            here = waiting.pop()
            if here not in seen:
                seen[here] = ast.unparse(known[here])
                found = (getattr(n, "id", getattr(n, "arg", None)) for n in ast.walk(known[here]))
                waiting += [each for each in found if each in known]
        return "\n".join(seen.values())

    return {name: text(name) for name in known if name.startswith("test_")}


def speaks_of(text: str, name: str) -> bool:
    return re.search(rf"\b{re.escape(name.rpartition('.')[2])}\b", text) is not None


# -- every member has a row ------------------------------------------------------------------------


def test_every_argument_of_the_accelerator_has_a_row():
    assert set(named_in("Accelerator: arguments")) == arguments(Accelerator)


def test_every_member_of_the_accelerator_has_a_row():
    rows = [name for row in ROWS if row.section.startswith("Accelerator: ") for name in row.names]
    found = set(rows[len(named_in("Accelerator: arguments")) :])
    assert found == members(Accelerator, Accelerator(cpu=True))


def test_every_member_of_the_states_has_a_row():
    accelerator = Accelerator(cpu=True)
    process = members(PartialState, PartialState())
    assert set(named_in("PartialState")) == process
    mine = members(AcceleratorState, accelerator.state) - process
    assert set(named_in("AcceleratorState")) == mine | {"mixed_precision"}
    assert set(named_in("GradientState")) == members(GradientState, GradientState())


def test_every_configuration_and_helper_has_a_row():
    names = {*trainer.utils.__all__, *trainer.__all__} - ELSEWHERE - TABLES
    choices = {n for n in names if inspect.isclass(kind := of(n)) and issubclass(kind, Enum)}
    configurations = {n for n in names if dataclasses.is_dataclass(of(n))} | choices
    assert set(named_in("Configurations and handlers")) == configurations
    assert set(named_in("Helpers")) == names - configurations


def of(name: str) -> object:
    """What the name is, in `trainer` or in `trainer.utils`."""
    return getattr(trainer if name in trainer.__all__ else trainer.utils, name)


def test_no_member_has_two_rows():
    for section in {row.section for row in ROWS}:
        names = named_in(section)
        assert len(names) == len(set(names)), section


def test_objects_are_where_the_table_says():
    for path in named_in("Prepared objects and trackers"):
        module, _, name = path.rpartition(".")
        assert hasattr(import_module(module), name), path


# -- every row has tests ---------------------------------------------------------------------------


def test_every_row_is_shown_by_tests_that_exist():
    assert [row.names for row in ROWS if not row.tests] == []
    named = {test for row in ROWS for test in row.tests}
    assert sorted(f"{file}::{name}" for file, name in named if name not in read_tests(file)) == []


def test_every_name_is_used_by_a_test_of_its_row():
    silent = []
    for row in ROWS:
        texts = [read_tests(file).get(name, "") for file, name in row.tests]
        if row.section.startswith("Accelerator: "):
            texts = [text for text in texts if "Accelerator" in text or "accelerate(" in text]
        spoken = {name for name in row.names for text in texts if speaks_of(text, name)}
        silent += [(row.section, name) for name in row.names if name not in spoken]
    assert silent == []


# -- the checks themselves -------------------------------------------------------------------------


def test_helpers_of_a_test_count_as_a_part_of_it():
    text = read_tests("test_members_have_tests.py")["test_every_row_is_shown_by_tests_that_exist"]
    assert speaks_of(text, "unparse")  # of read_tests
    assert not speaks_of(text, "get_annotations")  # of members, which it does not use
    assert not speaks_of("accumulated", "accumulate")
