"""Checks of argument values, which raise a clear error where an invalid value enters."""

from __future__ import annotations

import math
from numbers import Real


def given(**arguments: object) -> dict[str, object]:
    """Return the arguments that are not None, where None stands for "not given"."""
    return {name: value for name, value in arguments.items() if value is not None}


def expect_bools(**given: object) -> None:
    """Raise if an argument is not a bool: a text such as "no" would count as true.

    Raises:
        TypeError: An argument is neither True nor False; 1 and 0 are accepted.
    """
    for name, value in given.items():
        if value not in (True, False):
            raise TypeError(f"{name} is {value!r}; it must be True or False.")


def expect_numbers(**given: object) -> None:
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


def expect_counts(least: int, **given: object) -> None:
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
