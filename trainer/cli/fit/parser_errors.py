"""One line for each parser error with a known cause; the parser's own text for others.

jsonargparse lists every type that a value could have, although the user meant only one.
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Collection, Iterator
from contextlib import suppress
from difflib import get_close_matches
from importlib import import_module
from pathlib import Path
from pydoc import locate
from typing import Any

from callbacks import Callback
from trainer.configuration import KwargsHandler
from trainer.datamodule import DataModule
from trainer.module import TrainModule

BASES = {"model": "trainer.TrainModule", "data": "trainer.DataModule"}
_SECTIONS = (*BASES, "trainer", "links", "seed", "ckpt_path")
_CLASSES: dict[str, type] = {
    "model": TrainModule,
    "data": DataModule,
    "trainer.callbacks": Callback,
    "trainer.kwargs_handlers": KwargsHandler,
}
# The beginnings of the parser's errors about unknown keys.
_REJECTED = re.compile(
    r"(?:Group '(.+?)' does not accept option|Option|unrecognized arguments:) '?(?:--)?([\w.]+)"
)
_OF_A_CLASS = ("class_path", "init_args")
_KEY = re.compile(r'Parser key "([\w.+]+)":')
_PROBLEM = re.compile(
    r"- Problem with given class_path '(?P<path>.+?)':\n *"
    r'(?:Parser key "(?P<argument>\w+)":\n *(?=Expected))?(?P<what>(?! |Parser key).+)'
)
_NO_ATTRIBUTE = re.compile(r"module '(.+)' has no attribute '(\w+)'")
_NO_MODULE = re.compile(r"No module named '(\w+)'")
_NO_OPTION = re.compile(r"Option '([\w.]+)' is not accepted")
_NO_PATH = re.compile(r"Expected a dot import path string: (\w+)")
_NO_SUBCLASS = re.compile(r"Import path (\S+ )?does not correspond to a subclass of (\w+)")
_GIVEN = re.compile(r"Given value: (.+)")


def explain(error: str, options: Collection[str]) -> str:
    """Shorten the text of a parser error, and add the nearest valid name.

    Args:
        error: The parser's text.
        options: The keys of the whole configuration.
    """
    if rejected := _REJECTED.match(error):
        return _explain_key(error, rejected[1], rejected[2], options)
    key = _KEY.match(error)
    if key is None:
        return error
    given = _GIVEN.search(error)
    if problem := _PROBLEM.search(error):
        return _explain_class(key[1], problem, given)
    if name := _NO_PATH.search(error):
        base = _CLASSES.get(key[1])
        names = [cls.__name__ for cls in _subclasses(base)] if base else []
        hint = _near(name[1], names) or " Write module.Class."
        return f"{key[1]}: there is no class {name[1]!r}.{hint}"
    if wrong := _NO_SUBCLASS.search(error):
        path = wrong[1] or (given[1] if given else "")
        return f"{key[1]}: {path.strip()} is not a subclass of {wrong[2]}."
    return error


def _explain_key(error: str, group: str | None, name: str, options: Collection[str]) -> str:
    first = name.split(".")[0]
    if group in _SECTIONS and first in _SECTIONS:
        return _misplaced(first, group)
    prefix, _, last = ".".join(filter(None, (group, name))).rpartition(".")
    # Compare without the prefix, which would make all options of a group look similar.
    tails = [option.rpartition(".") for option in options]
    within = [tail for start, _, tail in tails if start == prefix]
    near = [f"{prefix}.{tail}".lstrip(".") for tail in get_close_matches(last, within, 1)]
    sections = {option.partition(".")[0] for option in options}
    if group is None and first not in sections and first != name:
        near += get_close_matches(first, sections, 1)
    near += get_close_matches(last, options, 1) or get_close_matches(first, options, 1)
    return f"{error}\nDid you mean {near[0]!r}?" if near else error


def _misplaced(name: str, section: str) -> str:
    return f"`{name}:` lies inside `{section}:`; in the file it must begin at the left margin."


def _explain_class(key: str, problem: re.Match[str], given: re.Match[str] | None) -> str:
    path, argument, what = problem["path"], problem["argument"], problem["what"]
    option = _NO_OPTION.match(what)
    if option and path == BASES.get(key):  # chosen by the parser if it rejects the keys
        name = option[1].split(".")[0]
        if name == "class_path" and given:  # an artefact of the base class; another key is wrong
            name = next((each for each in _keys(given[1]) if each not in _OF_A_CLASS), name)
        if name in _SECTIONS:
            return _misplaced(name, key)
        hint = "" if name in _OF_A_CLASS else _near(name, _OF_A_CLASS)
        return (
            f"{key}: a section with a class has only class_path and init_args, not {name!r}; the "
            f"arguments of the class are in init_args.{hint}"
        )
    hint = ""
    if option:
        made = locate(path)  # already imported by the parser
        hint = _near(option[1], [*inspect.signature(made).parameters]) if callable(made) else ""
    elif missing := _NO_ATTRIBUTE.match(what):
        names = [
            name for name, value in vars(import_module(missing[1])).items() if _is_class(value)
        ]
        hint = _near(missing[2], names, f"{missing[1]}.")
    elif (missing := _NO_MODULE.match(what)) and path.startswith(f"{missing[1]}."):
        stems = [file.stem for file in Path.cwd().glob("*.py")]
        hint = _near(missing[1], stems, after=path.removeprefix(missing[1]))
    where = f"argument {argument!r}: " if argument else ""
    return f"{key}: class_path {path!r}: {where}{what}.{hint}"


def _near(name: str, names: Collection[str], before: str = "", after: str = "") -> str:
    near = get_close_matches(name, names, 1)
    return f" Did you mean {f'{before}{near[0]}{after}'!r}?" if near else ""


def _is_class(value: object) -> bool:
    return isinstance(value, type)


def _keys(text: str) -> list[Any]:
    with suppress(ValueError, SyntaxError):  # the value is not a literal
        if isinstance(value := ast.literal_eval(text), dict):
            return list(value)
    return []


def _subclasses(cls: type) -> Iterator[type]:
    each: type
    for each in cls.__subclasses__():
        yield each
        yield from _subclasses(each)
