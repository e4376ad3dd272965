"""Configuration fields that also have an environment variable, an option and a help text."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from trainer import environment


@dataclass(frozen=True, kw_only=True)
class Setting:
    """The names of a configuration field outside Python: variable, option and key.

    Attributes:
        env: Its environment variable; one for each value of a tuple.
        kind: The kind of value, which determines how strings are parsed: see `_READERS` here and,
            for options, `trainer.launch.options`.
        fallback: The value of a field that is None and whose variable is not set.
        help: Its line in ``trainer launch --help``; a setting without help has only a variable.
        option: Its name as an option of `trainer launch` and as a key of the configuration file.
        question: The question of `trainer config`.
    """

    env: tuple[str, ...]
    kind: str
    fallback: Any = None
    help: str = ""
    option: str = ""
    question: str = ""

    def read(self) -> Any:
        """Return the value in the environment, else the fallback; an empty one counts as unset."""
        if not any(environment.read(name) for name in self.env):
            return self.fallback
        values = [_READERS.get(self.kind, environment.read)(name) for name in self.env]
        return values[0] if len(values) == 1 else tuple(values)

    def variables(self, value: Any) -> dict[str, Any]:
        """Return the variables that pass a value to another process."""
        if len(self.env) > 1:
            return dict(zip(self.env, value, strict=True))
        joined = ",".join(map(str, value)) if isinstance(value, (list, tuple)) else value
        return {self.env[0]: joined}


def _read_names(variable: str) -> list[str]:
    return [name.strip() for name in str(environment.read(variable)).split(",")]


def _read_float(variable: str) -> float:
    return float(str(environment.read(variable)))


# By kind; others are read unchanged.
_READERS: dict[str, Callable[[str], Any]] = {
    **dict.fromkeys(("bool", "bools", "flag"), environment.read_flag),
    **dict.fromkeys(("count", "int", "stage", "version"), environment.read_int),
    "float": _read_float,
    "names": _read_names,
}


def setting(
    kind: str,
    help: str = "",  # noqa: A002 - as argparse calls it
    fallback: Any = None,
    *,
    env: str | tuple[str, ...] = (),
    option: str = "",
    question: str = "",
) -> Any:
    """Return a field whose default is None; `fill` reads it from the environment.

    The arguments are those of `Setting`. The variable is the class's ``_env_prefix`` and the name
    of the field, unless `env` is passed; the option is the variable in lower case, without
    ``ACCELERATE_``.
    """
    made = Setting(
        env=(env,) if isinstance(env, str) else env,
        kind=kind,
        fallback=fallback,
        help=help,
        option=option,
        question=question,
    )
    return dataclasses.field(default=None, metadata={"setting": made})


def nested(kind: type) -> Any:
    """Return a field for a nested configuration, whose options become options of the outer one."""
    return dataclasses.field(default=None, metadata={"options": options_of(kind)})


def settings_of(kind: type) -> dict[str, Setting]:
    """Return the settings of a configuration by field."""
    found: dict[str, Setting] = {}
    for field in dataclasses.fields(kind):
        if "setting" in field.metadata:
            made: Setting = field.metadata["setting"]
            env = made.env or (getattr(kind, "_env_prefix", "") + field.name.upper(),)
            option = made.option or env[0].lower().removeprefix("accelerate_")
            found[field.name] = replace(made, env=env, option=option)
    return found


def options_of(*kinds: type) -> dict[str, Setting]:
    """Return the settings of configurations that also are options, by option."""
    found: dict[str, Setting] = {}
    for kind in kinds:
        settings = settings_of(kind)
        for field in dataclasses.fields(kind):
            if field.name in settings and settings[field.name].help:
                found[settings[field.name].option] = settings[field.name]
            found |= field.metadata.get("options", {})
    return found


def fill(configuration: Any, *names: str) -> None:
    """Set fields that are None to their environment variables, else to their fallbacks.

    Args:
        configuration: The configuration.
        *names: The fields; without names, all fields.
    """
    settings = settings_of(type(configuration))
    for name in names or settings:
        if getattr(configuration, name) is None:
            setattr(configuration, name, settings[name].read())
