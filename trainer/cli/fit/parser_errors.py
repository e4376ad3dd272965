"""One line for each error of the parser that has a known cause; the parser's own text for others.

jsonargparse lists every type that a value could have had, of which the user meant one.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Collection, Iterator
from difflib import get_close_matches
from importlib import import_module
from pathlib import Path

from callbacks import Callback
from trainer.datamodule import DataModule
from trainer.module import TrainModule

BASES = {"model": "trainer.TrainModule", "data": "trainer.DataModule"}
_SECTIONS = (*BASES, "trainer", "links", "seed", "ckpt_path")
_CLASSES: dict[str, type] = {"model": TrainModule, "data": DataModule}
# How the parser begins its errors about keys that no part of the configuration has.
_REJECTED = re.compile(
    r"(?:Group '(.+?)' does not accept option|Option|unrecognized arguments:) '?(?:--)?([\w.]+)"
)
_KEY = re.compile(r'Parser key "([\w.+]+)":')
_PROBLEM = re.compile(
    r"- Problem with given class_path '(?P<path>.+?)':\n *"
    r'(?:Parser key "(?P<argument>\w+)":\n *(?=Expected))?(?P<what>(?! |Parser key).+)'
)
_NO_ATTRIBUTE = re.compile(r"module '(.+)' has no attribute '(\w+)'")
_NO_MODULE = re.compile(r"No module named '(\w+)'")
_NO_OPTION = re.compile(r"Option '([\w.]+)' is not accepted")
_NO_PATH = re.compile(r"Expected a dot import path string: (\w+)")
_NO_SUBCLASS = re.compile(r"Import path \S+ does not correspond to a subclass of \w+")


def explain(error: str, options: Collection[str]) -> str:
    """Return the text of an error of the parser, shorter and with the nearest valid name.

    Args:
        error: The text of the parser.
        options: The keys of the whole configuration.
    """
    if rejected := _REJECTED.match(error):
        return _explain_key(error, rejected[1], rejected[2], options)
    key = _KEY.match(error)
    if key is None:
        return error
    if problem := _PROBLEM.search(error):
        return _explain_class(key[1], problem)
    if name := _NO_PATH.search(error):
        names = [cls.__name__ for cls in _subclasses(_CLASSES.get(key[1], Callback))]
        hint = _near(name[1], names) or " Write module.Class."
        return f"{key[1]}: there is no class {name[1]!r}.{hint}"
    if wrong := _NO_SUBCLASS.search(error):
        return f"{key[1]}: {wrong[0]}."
    return error


def _explain_key(error: str, group: str | None, name: str, options: Collection[str]) -> str:
    first = name.split(".")[0]
    if group in _SECTIONS and first in _SECTIONS:
        return _misplaced(first, group)
    key = ".".join(filter(None, (group, name)))
    near = get_close_matches(key, options, 1) or get_close_matches(key.split(".")[0], options, 1)
    return f"{error}\nDid you mean {near[0]!r}?" if near else error


def _misplaced(name: str, section: str) -> str:
    return f"`{name}:` lies inside `{section}:`; in the file it must begin at the left margin."


def _explain_class(key: str, problem: re.Match[str]) -> str:
    path, argument, what = problem["path"], problem["argument"], problem["what"]
    option = _NO_OPTION.match(what)
    if option and path == BASES.get(key):  # the parser's choice where it does not accept the keys
        name = option[1].split(".")[0]
        if name in _SECTIONS:
            return _misplaced(name, key)
        hint = "" if name == "class_path" else _near(name, ("class_path", "init_args"))
        return (
            f"{key}: a section with a class has class_path and init_args alone; the arguments of "
            f"the class are in init_args.{hint}"
        )
    hint = ""
    if option:
        hint = _near(option[1], [*inspect.signature(_import(path)).parameters])
    elif missing := _NO_ATTRIBUTE.match(what):
        names = [
            name for name, value in vars(import_module(missing[1])).items() if _is_class(value)
        ]
        hint = _near(missing[2], names, f"{missing[1]}.")
    elif missing := _NO_MODULE.match(what):
        stems = [file.stem for file in Path.cwd().glob("*.py")]
        hint = _near(missing[1], stems, after=path.removeprefix(missing[1]))
    where = f"argument {argument!r}: " if argument else ""
    return f"{key}: class_path {path!r}: {where}{what}.{hint}"


def _near(name: str, names: Collection[str], before: str = "", after: str = "") -> str:
    near = get_close_matches(name, names, 1)
    return f" Did you mean {f'{before}{near[0]}{after}'!r}?" if near else ""


def _is_class(value: object) -> bool:
    return isinstance(value, type)


def _import(path: str) -> type:
    module, _, name = path.rpartition(".")
    found: type = getattr(sys.modules[module], name)  # which the parser has imported
    return found


def _subclasses(cls: type) -> Iterator[type]:
    each: type
    for each in cls.__subclasses__():
        yield each
        yield from _subclasses(each)
