"""What a folder holds of an `Accelerator`'s state, how it fits what is prepared, its return.

Everything is read and compared before anything is changed.
"""

from __future__ import annotations

import hashlib
import inspect
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch

from trainer.checkpoint.fitting import compare, renames
from trainer.checkpoint.weights import own_names
from trainer.errors import CheckpointError
from trainer.optim.state import load_state
from trainer.rng import load_rng_state, mix, seed_generators

logger = logging.getLogger(__name__)


class Stateful(Protocol):
    """Anything whose state can be taken and put back."""

    def state_dict(self) -> Any:
        """Its state."""

    def load_state_dict(self, state_dict: Any) -> Any:
        """Take a state over."""


@dataclass(kw_only=True)
class Prepared:
    """What an `Accelerator` saves and loads.

    Attributes:
        models: The bare modules.
        optimizers: The optimizers.
        schedulers: The schedulers.
        dataloaders: The prepared loaders.
        custom_objects: What the user registered.
        scaler: The gradient scaler, if there is one.
        step: Micro-batches since the last update of the accumulation's count.
        window_open: Gradients have been gathered for an update that is still to come.
        communication: The hooks whose state on this process its averages of gradients go on from.
    """

    models: Sequence[torch.nn.Module] = ()
    optimizers: Sequence[Any] = ()
    schedulers: Sequence[Stateful] = ()
    dataloaders: Sequence[Stateful] = ()
    custom_objects: Sequence[Stateful] = ()
    scaler: Stateful | None = None
    step: int = 0
    window_open: bool = False
    communication: Sequence[Stateful] = ()


@dataclass(kw_only=True)
class Stored:
    """What a folder holds, read into memory.

    Attributes:
        path: The folder.
        weights: The models' state dicts.
        optimizers: Their state dicts.
        schedulers: Their state dicts.
        loaders: Their state dicts, each under ``"state"``; None where the folder's format does not
            say.
        custom_objects: Their state dicts.
        scaler: The scaler's state dict, if one was saved.
        rng: This rank's random states as `trainer.rng.rng_state` returns them; None if there are
            none of this rank.
        first_rng: The first rank's.
        step: See `Prepared`.
        gradients: Those of an open window, see `trainer.checkpoint.gradients`; None if there was
            none, or the folder's format does not say.
        communication: This rank's states of the communication hooks.
        lost: What the folder holds that cannot be put back, each in a sentence.
    """

    path: Path
    weights: list[dict[str, torch.Tensor]]
    optimizers: list[Any]
    schedulers: list[Any]
    loaders: list[Any] | None
    custom_objects: list[Any]
    scaler: Any
    rng: dict[str, Any] | None
    first_rng: dict[str, Any] | None
    step: int
    gradients: dict[str, torch.Tensor] | None = None
    communication: list[Any] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)


def check(
    stored: Stored,
    models: Sequence[torch.nn.Module],
    prepared: Prepared,
    *,
    strict: bool,
    model_kwargs: Mapping[str, Any],
) -> list[str]:
    """Compare what was read with what is prepared; complete the weights by the models' ties.

    Returns:
        What will not be put back, each in a sentence.

    Raises:
        CheckpointError: If state that is prepared is missing in the folder, or does not fit. With
            ``strict`` false names of weights may differ, and a scaler and random states be missing.
        TypeError: If a model's ``load_state_dict`` does not take ``model_kwargs``.
    """
    notes = list(stored.lost)
    pairs = (
        ("models", stored.weights, models, False),
        ("optimizers", stored.optimizers, prepared.optimizers, False),
        ("schedulers", stored.schedulers, prepared.schedulers, False),
        ("custom objects", stored.custom_objects, prepared.custom_objects, True),
    )
    for what, saved, here, exactly in pairs:
        if len(saved) < len(here) or (exactly and len(saved) != len(here)):
            raise CheckpointError(
                f"{stored.path} holds the state of {len(saved)} {what}, but {len(here)} are "
                f"{'registered' if exactly else 'prepared'} here. Prepare and register the same "
                "objects, in the same order, as when it was saved."
            )
        if len(saved) > len(here):
            notes.append(
                f"The last {len(saved) - len(here)} of {len(saved)} {what} are not loaded: only "
                f"{len(here)} are prepared."
            )
    notes += _check_rest(stored, prepared, strict=strict)
    for number, (model, weights) in enumerate(zip(models, stored.weights, strict=False)):
        stored.weights[number] = weights = own_names(model, weights)
        _check_model(f"Model {number} of {stored.path}", model, weights, strict=strict)
        inspect.signature(model.load_state_dict).bind(weights, strict=strict, **model_kwargs)
    for number, (optimizer, state) in enumerate(
        zip(prepared.optimizers, stored.optimizers, strict=False)
    ):
        _check_optimizer(f"Optimizer {number} of {stored.path}", optimizer, state)
    return notes


def _check_rest(stored: Stored, prepared: Prepared, *, strict: bool) -> list[str]:
    notes = []
    if prepared.scaler is not None and stored.scaler is None:
        text = f"{stored.path} holds no state of a gradient scaler."
        if strict:
            raise CheckpointError(
                f"{text} Load it with the precision it was saved with, or pass strict=False to "
                "begin with a new scaler."
            )
        notes.append(text)
    if prepared.scaler is None and stored.scaler is not None:
        notes.append("The gradient scaler's state is not loaded: this precision has none.")
    if prepared.communication and len(stored.communication) != len(prepared.communication):
        notes.append(
            f"It holds the state of {len(stored.communication)} communication hooks, but "
            f"{len(prepared.communication)} are registered: these stay as they are."
        )
        stored.communication.clear()
    loaders = stored.loaders
    if loaders is not None and len(loaders) != len(prepared.dataloaders):
        notes.append(
            f"It holds the epochs of {len(loaders)} loaders, but {len(prepared.dataloaders)} are "
            "prepared; they are matched by their order."
        )
    if stored.rng is None and stored.first_rng is None:
        if strict:
            raise CheckpointError(
                f"{stored.path} holds no random states. Pass strict=False to leave the generators "
                "as they are."
            )
        notes.append("It holds no random states: the generators are left as they are.")
    return notes


def _check_model(
    what: str, model: torch.nn.Module, weights: dict[str, torch.Tensor], *, strict: bool
) -> None:
    here = model.state_dict(keep_vars=True)
    by_value = {id(here[name]): weights[name] for name in weights if name in here}
    for name, value in here.items():  # a tied name may have been saved under the other
        if name not in weights and id(value) in by_value:
            weights[name] = by_value[id(value)]
    if renames(model):
        return
    shapes = {
        name: tuple(value.shape) for name, value in weights.items() if hasattr(value, "shape")
    }
    misfits = compare(model, shapes)
    if not strict:
        misfits.missing, misfits.unexpected = [], []
    if misfits:
        raise CheckpointError(
            f"{what} does not fit the one prepared: {misfits}. Make it as it was when it was saved."
        )


def _check_optimizer(what: str, optimizer: Any, state: Any) -> None:
    groups = getattr(optimizer, "param_groups", None)
    if groups is None or not isinstance(state, dict) or "param_groups" not in state:
        return
    here = [len(group["params"]) for group in groups]
    saved = [len(group["params"]) for group in state["param_groups"]]
    if here != saved:
        raise CheckpointError(
            f"{what} has groups of {saved} parameters, the one prepared of {here}. Make it as it "
            "was when it was saved."
        )


def dtypes_of(
    model: torch.nn.Module, weights: Mapping[str, torch.Tensor]
) -> dict[int, torch.dtype]:
    """The types of saved weights by the ``id`` of the parameters that are loaded with them."""
    named = model.named_parameters()
    return {id(each): weights[name].dtype for name, each in named if name in weights}


def apply(
    stored: Stored,
    models: Sequence[torch.nn.Module],
    prepared: Prepared,
    *,
    rank: int,
    strict: bool,
    model_kwargs: Mapping[str, Any],
) -> None:
    """Put everything back, the generators last."""
    dtypes: dict[int, torch.dtype] = {}
    for model, weights in zip(models, stored.weights, strict=False):
        dtypes |= dtypes_of(model, weights)
    for model, weights in zip(models, stored.weights, strict=False):
        model.load_state_dict(weights, strict=strict, **model_kwargs)
    for optimizer, state in zip(prepared.optimizers, stored.optimizers, strict=False):
        load_state(optimizer, state, dtypes)
    for scheduler, state in zip(prepared.schedulers, stored.schedulers, strict=False):
        scheduler.load_state_dict(state)
    for loader, state in zip(prepared.dataloaders, stored.loaders or [], strict=False):
        loader.load_state_dict(state["state"])
    if prepared.scaler is not None and stored.scaler is not None:
        prepared.scaler.load_state_dict(stored.scaler)
    for obj, state in zip(prepared.custom_objects, stored.custom_objects, strict=True):
        obj.load_state_dict(state)
    # One side may be empty, see `_check_rest`; else there are as many.
    for hook, state in zip(prepared.communication, stored.communication, strict=False):
        hook.load_state_dict(state)
    _apply_rng(stored, rank)


def _apply_rng(stored: Stored, rank: int) -> None:
    if stored.rng is not None:
        load_rng_state(stored.rng)
    elif stored.first_rng is not None:
        logger.warning(
            "%s was saved by fewer processes: rank %d begins with random states derived from rank "
            "0's.",
            stored.path,
            rank,
        )
        digest = hashlib.sha256(stored.first_rng["torch"].numpy().tobytes()).digest()
        seed_generators(mix(int.from_bytes(digest[:7], "big"), rank))
