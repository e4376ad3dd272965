"""Checks of arguments: the one place for the mistakes that people make in calls."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Iterable
from difflib import get_close_matches
from numbers import Real
from typing import ParamSpec, TypeVar


def given(**arguments: object) -> dict[str, object]:
    """Return the arguments that are not None, where None stands for "not given"."""
    return {name: value for name, value in arguments.items() if value is not None}


def check_bools(**given: object) -> None:
    """Raise if an argument is not a bool: a text such as "no" would count as true.

    Raises:
        TypeError: An argument is neither True nor False; 1 and 0 are accepted.
    """
    for name, value in given.items():
        if value not in (True, False):
            raise TypeError(f"{name} is {value!r}; it must be True or False.")


def check_numbers(**given: object) -> None:
    """Raise if an argument is not a number.

    Raises:
        TypeError: An argument has another type, for example a text.
        ValueError: An argument is NaN, for which all comparisons are false.
    """
    for name, value in given.items():
        if isinstance(value, bool) or not isinstance(value, Real):
            raise TypeError(f"{name} is {value!r}; it must be a number.")
        if math.isnan(value):
            raise ValueError(f"{name} is {value!r}; it must be a number.")


def check_counts(least: int, **given: object) -> None:
    """Raise if an argument is not a whole number of at least `least`; 1e3 is accepted.

    Raises:
        TypeError: An argument is not a number.
        ValueError: An argument has a fraction, or is smaller.
    """
    for name, value in given.items():
        if isinstance(value, bool) or not isinstance(value, Real):
            raise TypeError(f"{name} is {value!r}; it must be a whole number.")
        if not float(value) >= least or float(value) % 1:
            raise ValueError(f"{name} is {value!r}; it must be a whole number of at least {least}.")


def choice_error(what: str, value: object, choices: Iterable[str]) -> str:
    """Return the message for a value outside its choices, with the closest choice as a hint.

    Args:
        what: The user's name of the value: an argument or a key.
        value: The value given.
        choices: The valid values.
    """
    names = sorted(choices)
    near = get_close_matches(str(value), names, n=1)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    return f"{what} is {value!r}; it must be one of {', '.join(map(repr, names))}.{hint}"


def check_type(what: str, value: object, kind: type, fix: str = "") -> None:
    """Raise if a value is neither None nor an instance of a class.

    Args:
        what: The user's name of the value.
        value: The value given.
        kind: The class.
        fix: What to pass instead, a sentence.

    Raises:
        TypeError: It is something else.
    """
    if not isinstance(value, (kind, type(None))):
        advice = f" {fix}" if fix else ""
        raise TypeError(f"{what} is {value!r}; it must be a {kind.__name__}.{advice}")


P = ParamSpec("P")
R = TypeVar("R")


def explained(**instead: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Return a decorator that improves a method's errors for unknown or missing arguments.

    Args:
        **instead: Argument names of other trainers, each with what to write instead.

    Returns:
        The decorator. A call with an unknown argument raises a TypeError that gives its
        replacement, or lists the valid arguments. A method with ``**kwargs`` raises only for
        missing arguments.
    """

    def decorate(method: Callable[P, R]) -> Callable[P, R]:
        signature = inspect.signature(method)
        owner = method.__qualname__.removesuffix(".__init__")
        kept = inspect.Parameter.VAR_KEYWORD
        names = [name for name, each in signature.parameters.items() if each.kind is not kept][1:]
        takes_any = len(names) < len(signature.parameters) - 1

        def hint(name: str) -> str:
            if right := instead.get(name):
                nothing = right.removeprefix("nothing")
                return f"; leave it out{nothing}." if nothing != right else f"; use {right}."
            near = get_close_matches(name, names, n=1, cutoff=0.7)
            return f". Did you mean {near[0]!r}?" if near else f"; it has {', '.join(names)}."

        @functools.wraps(method)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            unknown = [] if takes_any else [n for n in kwargs if n not in signature.parameters]
            if unknown:
                lines = [f"{owner} has no argument {name!r}{hint(name)}" for name in unknown]
                raise TypeError("\n".join(lines))
            try:
                signature.bind(*args, **kwargs)
            except TypeError as error:
                kinds = [signature.parameters[name].kind for name in names]
                by_name = kinds.count(inspect.Parameter.KEYWORD_ONLY)
                star = ["*"] * bool(by_name)
                shown = names[: len(names) - by_name] + star + names[len(names) - by_name :]
                lines = [f"\n{name!r}{hint(name)}" for name in kwargs if name in instead]
                text = f"{error}: {owner}({', '.join(shown)}){''.join(lines)}"
                raise TypeError(text) from None
            return method(*args, **kwargs)

        return call

    return decorate
