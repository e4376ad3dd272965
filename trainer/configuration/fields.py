"""What the configurations have in common: checks of their fields, and values of the environment."""

from __future__ import annotations

import dataclasses
from typing import Any, TypeVar

from trainer import environment
from trainer.checks import suggest_arguments

_T = TypeVar("_T")


def explains_itself(cls: type[_T]) -> type[_T]:
    """Decorate a dataclass so that an unknown argument's error lists the valid arguments."""
    made: Any = cls
    made.__init__ = suggest_arguments()(made.__init__)
    return cls


def at_least(minimum: int, what: str, value: object, hint: str = "") -> None:
    """Raise if a value is not an int of at least `minimum`; `hint` ends the message."""
    end = f" ({hint})." if hint else "."
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{what} is {value!r}; it must be an int{end}")
    if value < minimum:
        raise ValueError(f"{what} is {value}; it must be at least {minimum}{end}")


def check_bool_fields(configuration: Any) -> None:
    """Raise if a field annotated as a bool has another type: a text such as "no" would be true."""
    for field in dataclasses.fields(configuration):
        value = getattr(configuration, field.name)
        optional = field.type == "bool | None"
        if optional and value is None:
            continue
        if (field.type == "bool" or optional) and not isinstance(value, bool):
            owner = type(configuration).__name__
            raise TypeError(f"{owner}: {field.name} is {value!r}; it must be True or False.")


def fill(plugin: object, prefix: str, **defaults: Any) -> None:
    """Set each of these attributes that is None to its environment variable, else to its default.

    Args:
        plugin: The plugin.
        prefix: The variables' names before the attributes' names, or the whole name of the only
            one. Texts are converted to the type of the default.
        **defaults: The defaults by attribute.
    """
    for name, default in defaults.items():
        if getattr(plugin, name) is None:
            variable = prefix + name.upper() if prefix.endswith("_") else prefix
            setattr(plugin, name, _read(variable, default))


def _read(variable: str, default: Any) -> Any:
    text = environment.read(variable)
    if text is None:
        return default
    if isinstance(default, bool):
        return environment.read_flag(variable)
    if isinstance(default, int):
        return environment.read_int(variable)
    return float(text) if isinstance(default, float) else text
