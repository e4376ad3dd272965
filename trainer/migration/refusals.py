"""Errors about what was written for another trainer: all findings at once, each with what to use.

A method that a user has written and nobody calls is a silent mistake. Each hook of LightningModule,
LightningDataModule and Lightning's Callback, of its releases 1.5 to 2.x, is therefore either called
here too or refused before anything runs. So are those of a TrainerCallback, and the methods that
subclasses of Hugging Face's Trainer override, but for those that a user's own code may call.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from functools import cache
from typing import Any

from trainer.errors import module_logger
from trainer.migration.table import (
    ACCELERATE_ARGUMENTS,
    CALLBACK_HOOKS,
    HOOKS,
    HOOKS_OF_CALLBACKS,
    HUGGING_FACE_ARGUMENTS,
    HUGGING_FACE_ATTRIBUTES,
    HUGGING_FACE_CALLBACK_HOOKS,
    LIGHTNING_ARGUMENTS,
    LOGGER_METHODS,
    MODULE_HOOKS,
    NOTHING,
    TRAINER_ATTRIBUTES,
    TRAINER_METHODS,
)
from trainer.migration.values import instead_of

logger = module_logger(__name__)

ARGUMENTS = LIGHTNING_ARGUMENTS | HUGGING_FACE_ARGUMENTS | ACCELERATE_ARGUMENTS
ATTRIBUTES = TRAINER_ATTRIBUTES | HUGGING_FACE_ATTRIBUTES
UNCALLED = {
    "module": HOOKS | MODULE_HOOKS,
    "callback": HOOKS | CALLBACK_HOOKS | HUGGING_FACE_CALLBACK_HOOKS,
    "datamodule": HOOKS,
    "trainer": TRAINER_METHODS,
    "logger": LOGGER_METHODS,
}
"""Kind of owner: the hooks that nobody calls, each with what to use."""

# -- arguments of the Trainer ----------------------------------------------------------------------


def argument_refusals(given: Mapping[str, Any], known: Iterable[str]) -> dict[str, str]:
    """Return for each argument that the Trainer does not have a sentence that says what to pass.

    Args:
        given: The arguments with their values, which may be ``...`` if unknown.
        known: The arguments that it has.
    """
    names = sorted(set(known) - {"self", "unknown"})
    refusals = {name: _refusal(name, value, names) for name, value in given.items()}
    if refusals and not any(refusals.values()):
        refusals[next(reversed(refusals))] = f"; it must be one of {', '.join(map(repr, names))}."
    return {
        name: f"Trainer has no argument {name!r}{said or '.'}" for name, said in refusals.items()
    }


def _refusal(name: str, value: Any, names: list[str]) -> str:
    """What follows after the statement that there is no such argument; nothing if empty."""
    if general := ARGUMENTS.get(name):
        instead = instead_of(name, general, value)
        return f"; {'' if instead.startswith(NOTHING) else 'use '}{instead}."
    near = get_close_matches(name, names, n=1, cutoff=0.7)
    return f". Did you mean {near[0]!r}?" if near else ""


# -- hooks -----------------------------------------------------------------------------------------


def uncalled_hooks(kind: str, bases: Iterable[type]) -> dict[str, str]:
    """Return the hooks that nobody would call, each with what to use.

    Args:
        kind: ``"module"``, ``"callback"``, ``"datamodule"``, ``"trainer"`` or ``"logger"``.
        bases: The classes that the owner of the hooks inherits from, in method resolution order.
    """
    refused: dict[str, str] = UNCALLED[kind]
    for each in reversed(list(bases)):
        if each.__module__.startswith("callbacks."):
            of_kind = {
                path.partition(".")[2]: use
                for path, use in HOOKS_OF_CALLBACKS.items()
                if path.partition(".")[0] == each.__name__
            }
            refused = refused | of_kind
        if each.__module__.startswith("trainer.lightning."):  # which calls them
            refused = {name: use for name, use in refused.items() if name not in vars(each)}
    return refused


def uncalled(owner: object, kind: str) -> Iterator[str]:
    """Yield a sentence for each hook of another trainer that the owner defines.

    Args:
        owner: The user's module, callback, datamodule or logger, or a Trainer.
        kind: As for `uncalled_hooks`.
    """
    bases = type(owner).__mro__
    refused = uncalled_hooks(kind, bases)
    of_lightning = any(each.__module__.startswith("trainer.lightning.") for each in bases)
    for name in sorted(refused):
        # Not getattr of the owner: a layer may have such a name, and it is no method.
        if not callable(getattr(type(owner), name, None)):
            continue
        said = (
            f"{type(owner).__name__} defines {name}, which is never called here: {refused[name]}. "
        )
        if of_lightning and name in HOOKS:  # nor does Lightning 2, but the model of a library may
            _warn(f"{said}Its own code may call it.")
        else:
            yield f"{said}(If your own code calls it, give it another name.)"


@cache
def _warn(text: str) -> None:
    logger.warning(text)


def refuse(findings: Sequence[str]) -> None:
    """Raise all findings in one error.

    Raises:
        TypeError: There are any.
    """
    if findings:
        raise TypeError("\n".join(findings))


# -- attributes of the Trainer ---------------------------------------------------------------------


def trainer_attribute_hint(name: str) -> str:
    """What an error says about an attribute that the Trainer does not have."""
    hint = ATTRIBUTES.get(name)
    return f"Trainer has no attribute {name!r}" + (f": {hint}." if hint else ".")


def check_settable(name: str, arguments: Iterable[str]) -> None:
    """Raise an error if the Trainer would not look at an attribute that somebody sets.

    Args:
        name: The attribute.
        arguments: The Trainer's, which are looked at when it is made.

    Raises:
        AttributeError: It is one of them, or an attribute that Lightning's Trainer has.
    """
    if name in ATTRIBUTES:
        raise AttributeError(f"{trainer_attribute_hint(name)[:-1]}; setting it has no effect.")
    if name in arguments and name not in ("accelerator", "callbacks"):
        raise AttributeError(
            f"Trainer.{name} cannot be set later: pass it to Trainer({name}=...) when it is made."
        )
