"""Misspelt hook names: a method that nobody calls is a silent mistake."""

from __future__ import annotations

import difflib
import dis
import inspect
import logging
import re
from collections.abc import Container, Iterable
from itertools import pairwise
from types import CodeType
from typing import Any

logger = logging.getLogger(__name__)

_HOOK = re.compile(r"on_.*|.*_step|.*_dataloader|configure_.*|prepare_data|setup|teardown")
_LOADERS = [f"{phase}_dataloader" for phase in ("train", "val", "test", "predict")]
_OTHER_WORDS = {r"_begin$": "_start", r"(?<![a-z])val_(?!dataloader)": "validation_"}
_ALIKE = 0.9  # difflib's ratio for names that differ by a letter or two


def tell_of_misspelt(owner: object, base: type) -> None:
    """Log a warning for methods named almost like a hook that the user does not define.

    This is not an error: a method may have any name and be called by the user's own code. One that
    another method of the class uses is a helper, of which nothing is said.

    Args:
        owner: The user's module, callback or datamodule.
        base: The class whose hooks it may override.
    """
    own = [cls for cls in type(owner).__mro__ if cls not in base.__mro__]
    members = [getattr(owner, "__dict__", {}), *map(vars, own)]
    defined = {name for each in members for name, value in each.items() if inspect.isroutine(value)}
    hooks = {*filter(_HOOK.fullmatch, dir(base)), *_LOADERS}
    open_ = hooks - defined
    for name in sorted(defined.difference(dir(base), hooks)):
        spelt = name
        for others, ours in _OTHER_WORDS.items():
            spelt = re.sub(others, ours, spelt)
        spellings = (difflib.get_close_matches(each, open_, 1, _ALIKE) for each in (name, spelt))
        near = next(filter(None, spellings), None)
        if near and name not in used_by_itself(own):
            logger.warning(
                "%s defines %s, which is not a hook, so the Trainer never calls it; "
                "did you mean %s?",
                type(owner).__name__,
                name,
                near[0],
            )


def used_by_itself(classes: Iterable[type], but: Container[str] = ()) -> set[str]:
    """The attributes that methods of these classes read of ``self``: what is called by user code.

    Args:
        classes: The user's class and its bases.
        but: Methods that do not count.
    """
    members = [each for cls in classes for each in vars(cls).items()]
    return {used for name, value in members if name not in but for used in _used(value) - {name}}


def named_by_itself(classes: Iterable[type]) -> set[str]:
    """All attributes that methods of these classes read or set, of whatever."""
    codes = [_code_of(member) for cls in classes for member in vars(cls).values()]
    return {name for code in codes if code for name in code.co_names}


def _used(member: Any) -> set[str]:
    code = _code_of(member)
    return set() if code is None else _read_of_self(code)


def _code_of(member: Any) -> CodeType | None:
    function = getattr(member, "__func__", getattr(member, "fget", member))
    try:
        code = getattr(inspect.unwrap(function), "__code__", None) if callable(function) else None
    except ValueError:  # an object that has any attribute, such as unittest.mock.call
        return None
    return code if isinstance(code, CodeType) else None


def _read_of_self(code: CodeType) -> set[str]:
    steps = [each for each in dis.get_instructions(code) if each.opname != "EXTENDED_ARG"]
    read = {
        step.argval
        for before, step in pairwise(steps)
        if step.opname in ("LOAD_ATTR", "LOAD_METHOD")
        # Later Python versions load two variables in one step.
        and "self" in (before.argval, *(before.argval if type(before.argval) is tuple else ())[1:])
    }
    return read.union(*(_read_of_self(each) for each in code.co_consts if type(each) is CodeType))
