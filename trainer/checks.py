"""Checks of arguments, for common mistakes in calls."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from difflib import get_close_matches
from numbers import Real
from typing import Any, ParamSpec, TypeVar

from trainer.tracebacks import HiddenFrames


def given(**arguments: object) -> dict[str, object]:
    """Return the arguments that are not None, where None stands for "not given"."""
    return {name: value for name, value in arguments.items() if value is not None}


def check_bools(**given: object) -> None:
    """Raise if an argument is not a bool, since a text such as "no" would count as true.

    Raises:
        TypeError: An argument is neither True nor False. 1 and 0 equal these, and are accepted.
    """
    for name, value in given.items():
        if value not in (True, False):
            raise TypeError(f"{name} is {value!r}; it must be True or False.")


def check_bool_fields(configuration: Any) -> None:
    """Raise if a dataclass field that is annotated as a bool is not one; see `check_bools`."""
    owner = type(configuration).__name__
    for field in dataclasses.fields(configuration):
        value = getattr(configuration, field.name)
        if field.type == "bool" or (field.type == "bool | None" and value is not None):
            check_bools(**{f"{owner}: {field.name}": value})


def check_numbers(least: float = -math.inf, most: float = math.inf, /, **given: object) -> None:
    """Raise a TypeError or ValueError if an argument is not a number in a range; NaN never is."""
    for name, value in given.items():
        bounds = f" from {least:g} to {most:g}" if most < math.inf else f" of at least {least:g}"
        kind = "a number" + (bounds if math.isfinite(least) else "")
        _check_number(name, value, kind, lambda number: least <= number <= most)


def check_positive(**given: object) -> None:
    """Raise a TypeError or ValueError if an argument is not a number above 0."""
    for name, value in given.items():
        _check_number(name, value, "a number above 0", lambda number: number > 0)


def check_counts(least: int, hint: str = "", /, **given: object) -> None:
    """Raise if an argument is not a whole number of at least `least`; 1e3 counts as whole.

    Args:
        least: The smallest valid number.
        hint: The end of the message, which says what other values mean.
        **given: The arguments.

    Raises:
        TypeError: An argument is not a number.
        ValueError: An argument has a fraction, or is smaller.
    """
    for name, value in given.items():
        kind = f"a whole number of at least {least}" + (f" ({hint})" if hint else "")
        _check_number(name, value, kind, lambda number: number >= least and not number % 1)


def _check_number(name: str, value: Any, kind: str, valid: Callable[[Any], bool]) -> None:
    is_number = isinstance(value, Real) and not isinstance(value, bool)
    if not is_number or not valid(value):
        error = ValueError if is_number else TypeError
        raise error(f"{name} is {value!r}; it must be {kind}.")


def check_choice(what: str, value: object, choices: Collection[str]) -> None:
    """Raise a ValueError if a value is not one of its choices; see `choice_error`."""
    if value not in choices:
        raise ValueError(choice_error(what, value, choices))


def choice_error(what: str, value: object, choices: Iterable[str]) -> str:
    """Return the message for a value outside its choices, which begins with the closest choice.

    Args:
        what: The value's name for the user: an argument or a key.
        value: The value given.
        choices: The valid values.
    """
    names = sorted(choices)
    near = get_close_matches(str(value), names, n=1)
    near = near or [name for name in names if str(value).startswith(name)]  # "bf16-mixed"
    must = f"t must be one of {', '.join(map(repr, names))}."
    if near:  # said first, since the choices may be many
        return f"{what} is {value!r}. Did you mean {near[0]!r}? I{must}"
    return f"{what} is {value!r}; i{must}"


def check_type(what: str, value: object, kind: type, fix: str = "") -> None:
    """Raise if a value is neither None nor an instance of a class.

    Args:
        what: The value's name for the user.
        value: The value given.
        kind: The class.
        fix: A sentence that says what to pass instead.

    Raises:
        TypeError: The value is something else.
    """
    if not isinstance(value, (kind, type(None))):
        advice = f" {fix}" if fix else ""
        raise TypeError(f"{what} is {value!r}; it must be a {kind.__name__}.{advice}")


def raise_findings(findings: Sequence[str]) -> None:
    """Raise all findings in one error.

    Raises:
        TypeError: There are findings.
    """
    if findings:
        raise TypeError("\n".join(findings))


P = ParamSpec("P")
R = TypeVar("R")


def suggest_arguments(**instead: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Return a decorator that improves a method's error for unknown arguments.

    Args:
        **instead: Replacements of other trainers' argument names. If the method has an argument of
            the same name, a text passed for it is treated as the other trainer's.

    Returns:
        The decorator. A call with an unknown argument raises a TypeError that gives its
        replacement, or lists the valid arguments.
    """

    def decorate(method: Callable[P, R]) -> Callable[P, R]:
        names = [*inspect.signature(method).parameters][1:]  # without self
        owner = method.__qualname__.removesuffix(".__init__")

        @functools.wraps(method)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            with HiddenFrames():
                check_arguments(owner, names, instead, kwargs)
                return method(*args, **kwargs)

        return call

    return decorate


def check_arguments(
    owner: str, names: Sequence[str], instead: Mapping[str, str], given: Mapping[str, object]
) -> None:
    """Raise if a call has unknown arguments; see `suggest_arguments`.

    Args:
        owner: The method, for the message.
        names: The names of its arguments.
        instead: Argument names of other trainers, each with what to write instead.
        given: The keyword arguments of the call.

    Raises:
        TypeError: An argument is unknown, or another trainer's.
    """

    def hint(name: str) -> str:
        if right := instead.get(name):
            nothing = right.removeprefix("nothing")
            return f"; leave it out{nothing}." if nothing != right else f"; use {right}."
        near = get_close_matches(name, names, n=1, cutoff=0.7)
        near = near or [each for each in names if each.startswith(name)]
        return f". Did you mean {near[0]!r}?" if near else f"; it has {', '.join(names)}."

    raise_findings(
        [
            f"{owner} got {name}={value!r}; use {instead[name]}."
            if name in names
            else f"{owner} has no argument {name!r}{hint(name)}"
            for name, value in given.items()
            if name not in names or (name in instead and isinstance(value, str))
        ]
    )


C = TypeVar("C", bound=type)


def explains_itself(cls: C) -> C:
    """Decorate a dataclass so that an unknown argument's error lists the valid arguments."""
    made: Any = cls
    made.__init__ = suggest_arguments()(made.__init__)
    return cls
