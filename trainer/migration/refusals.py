"""Errors about code for another trainer: all findings at once, each with its replacement.

A method that a user has written and nothing calls is a silent mistake. So each hook of
LightningModule, LightningDataModule and Lightning's Callback, of releases 1.5 to 2.x, is either
called by `trainer.lightning` too, or raises an error before anything runs. So does each hook of a
TrainerCallback. `trainer migrate` also lists the methods that subclasses of Hugging Face's Trainer
override.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from functools import cache
from typing import Any

from trainer.errors import module_logger
from trainer.hints import HOOKS, MODULE_HOOKS
from trainer.hooks import uncalled_hooks
from trainer.migration.table import (
    ACCELERATE_ARGUMENTS,
    CALLBACK_HOOKS,
    HOOKS_OF_CALLBACKS,
    HUGGING_FACE_ARGUMENTS,
    HUGGING_FACE_ATTRIBUTES,
    HUGGING_FACE_CALLBACK_HOOKS,
    LIGHTNING_ARGUMENTS,
    LOGGER_METHODS,
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


def argument_refusals(arguments: Mapping[str, Any], parameters: Iterable[str]) -> dict[str, str]:
    """Return a sentence for each unknown argument of the Trainer, with the one to pass instead.

    Args:
        arguments: The arguments with their values, which may be ``...`` if unknown.
        parameters: The arguments that the Trainer has.
    """
    names = sorted(parameters)
    refusals = {name: _refusal(name, value, names) for name, value in arguments.items()}
    if refusals and not any(refusals.values()):
        refusals[next(reversed(refusals))] = f"; it must be one of {', '.join(map(repr, names))}."
    return {
        name: f"Trainer has no argument {name!r}{advice or '.'}"
        for name, advice in refusals.items()
    }


def _refusal(name: str, value: Any, names: list[str]) -> str:
    """Return the advice that follows "Trainer has no argument"; empty without any."""
    if general := ARGUMENTS.get(name):
        instead = instead_of(name, general, value)
        return f"; {'' if instead.startswith(NOTHING) else 'use '}{instead}."
    matches = get_close_matches(name, names, n=1, cutoff=0.7)
    return f". Did you mean {matches[0]!r}?" if matches else ""


# -- hooks -----------------------------------------------------------------------------------------


def refused_hooks(kind: str, bases: Iterable[type]) -> dict[str, str]:
    """Return the hooks that nothing would call, each with its replacement.

    Args:
        kind: ``"module"``, ``"callback"``, ``"datamodule"``, ``"trainer"`` or ``"logger"``.
        bases: The classes that the owner of the hooks inherits from, in method resolution order.
    """
    refused = dict(UNCALLED[kind])
    for base in reversed(list(bases)):
        if base.__module__.startswith("callbacks."):
            of_kind = {
                path.partition(".")[2]: use
                for path, use in HOOKS_OF_CALLBACKS.items()
                if path.partition(".")[0] == base.__name__
            }
            refused = refused | of_kind
        if base.__module__.startswith("trainer.lightning."):  # `trainer.lightning` calls them
            refused = {name: use for name, use in refused.items() if name not in vars(base)}
    return refused


def uncalled(owner: object, kind: str) -> list[str]:
    """Return a sentence for each hook of another trainer that the owner defines.

    Args:
        owner: The user's module, callback, datamodule or logger.
        kind: As for `refused_hooks`.
    """
    bases = type(owner).__mro__
    refused = refused_hooks(kind, bases)
    if any(base.__module__.startswith("trainer.lightning.") for base in bases):
        # Lightning 2 does not call `HOOKS` either, and a library's model may define them.
        own_hooks = {name: refused.pop(name) for name in HOOKS if name in refused}
        for message in uncalled_hooks(owner, kind, {kind: own_hooks}, "Its own code may call it."):
            _warn(message)
    return uncalled_hooks(owner, kind, {kind: refused})


@cache
def _warn(text: str) -> None:
    logger.warning(text)
