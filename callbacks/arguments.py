"""Better errors for calls with unknown arguments: they say what to write instead."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from difflib import get_close_matches
from typing import ParamSpec, TypeVar

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
                told = [f"{owner} has no argument {name!r}{hint(name)}" for name in unknown]
                raise TypeError("\n".join(told))
            try:
                signature.bind(*args, **kwargs)
            except TypeError as error:
                kinds = [signature.parameters[name].kind for name in names]
                by_name = kinds.count(inspect.Parameter.KEYWORD_ONLY)
                star = ["*"] * bool(by_name)
                shown = names[: len(names) - by_name] + star + names[len(names) - by_name :]
                told = [f"\n{name!r}{hint(name)}" for name in kwargs if name in instead]
                text = f"{error}: {owner}({', '.join(shown)}){''.join(told)}"
                raise TypeError(text) from None
            return method(*args, **kwargs)

        return call

    return decorate
