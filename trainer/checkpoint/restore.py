"""Check that a saved `Accelerator` state matches the prepared objects, and restore it into them.

Everything is read and checked before any object is changed.
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from torch.nn.parameter import is_lazy

from trainer.checkpoint.loading import compare, renames
from trainer.checkpoint.weights import own_names
from trainer.errors import CheckpointError, module_logger
from trainer.optim.state import load_state
from trainer.rng import load_rng_state, mix, seed_generators

OPTIMIZER_FORM = {"state?": dict, "param_groups?": [{"params": list}]}  # any optimizer's

logger = module_logger(__name__)


class Stateful(Protocol):
    """Any object whose state can be saved and restored."""

    def state_dict(self) -> Any:
        """Return the state."""

    def load_state_dict(self, state_dict: Any) -> Any:
        """Restore a state."""


@dataclass(kw_only=True)
class Prepared:
    """The objects that an `Accelerator` saves and loads.

    Attributes:
        models: The bare modules.
        optimizers: The optimizers.
        schedulers: The schedulers.
        dataloaders: The prepared loaders.
        custom_objects: The objects that the user registered.
        scaler: The gradient scaler, if there is one.
        step: The `Accelerator`'s count of micro-batches.
        window_open: Whether a gradient accumulation window is incomplete: gradients have been
            accumulated, and the optimizer step has not been made.
        waiting: The optimizers that have not stepped since the last backward pass.
        communication: DDP communication hooks with state on this process, such as PowerSGD's error
            feedback.
    """

    models: Sequence[torch.nn.Module] = ()
    optimizers: Sequence[Any] = ()
    schedulers: Sequence[Stateful] = ()
    dataloaders: Sequence[Stateful] = ()
    custom_objects: Sequence[Stateful] = ()
    scaler: Stateful | None = None
    step: int = 0
    window_open: bool = False
    waiting: Sequence[Any] = ()
    communication: Sequence[Stateful] = ()


@dataclass(kw_only=True)
class Stored:
    """The contents of a folder, read into memory.

    Attributes:
        path: The folder.
        weights: The models' state dicts.
        optimizers: The optimizers' state dicts.
        schedulers: The schedulers' state dicts.
        loaders: The loaders' state dicts, each under ``"state"``; None if the folder's format does
            not have them.
        custom_objects: The custom objects' state dicts.
        scaler: The scaler's state dict, if one was saved.
        rng: This rank's RNG states as `trainer.rng.rng_state` returns them; None if this rank saved
            none.
        first_rng: The first rank's RNG states.
        step: See `Prepared`.
        gradients: Gradients of an incomplete accumulation window or of optimizers that had not
            stepped, see `trainer.checkpoint.gradients`. None if there were none, or if the folder's
            format does not have them.
        window_open: Whether these gradients belong to an incomplete accumulation window.
        communication: This rank's states of the communication hooks.
        lost: Warnings about contents of the folder that cannot be restored.
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
    window_open: bool = True
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
    """Check that the stored state matches the prepared objects; add names of tied weights.

    Returns:
        Warnings about state that will not be restored.

    Raises:
        CheckpointError: If the state of a prepared object is missing, or does not match. If
            ``strict`` is False, names of weights may differ, and the scaler and RNG states may be
            missing.
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
                "start with a new scaler."
            )
        notes.append(text)
    if prepared.scaler is None and stored.scaler is not None:
        notes.append("The gradient scaler's state is not loaded: this precision uses no scaler.")
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
                "unchanged."
            )
        notes.append("It holds no random states: the generators are left unchanged.")
    return notes


def _check_model(
    what: str, model: torch.nn.Module, weights: dict[str, torch.Tensor], *, strict: bool
) -> None:
    here = model.state_dict(keep_vars=True)
    by_value = {id(here[name]): weights[name] for name in weights if name in here}
    # A tied weight may have been saved under its other name; a lazy module had nothing to save.
    for name, value in here.items():
        if name not in weights and (id(value) in by_value or is_lazy(value)):
            weights[name] = by_value.get(id(value), value)
    if renames(model):
        return
    shapes = {
        name: tuple(value.shape) for name, value in weights.items() if hasattr(value, "shape")
    }
    mismatch = compare(model, shapes)
    if not strict:
        mismatch.missing, mismatch.unexpected = [], []
    if mismatch:
        raise CheckpointError(
            f"{what} does not fit the one prepared: {mismatch.bare(model)}. Recreate it as it was "
            "when saved."
        )


def _check_optimizer(what: str, optimizer: Any, state: Any) -> None:
    groups = getattr(optimizer, "param_groups", None)
    if groups is None or not isinstance(state, dict) or "param_groups" not in state:
        return
    here = [len(group["params"]) for group in groups]
    saved = [len(group["params"]) for group in state["param_groups"]]
    if here != saved:
        raise CheckpointError(
            f"{what} has groups of {saved} parameters, but the one prepared has {here}. Recreate "
            "it as it was when saved."
        )


def dtypes_of(
    model: torch.nn.Module, weights: Mapping[str, torch.Tensor]
) -> dict[int, torch.dtype]:
    """Return the dtypes of saved weights by the ``id`` of the parameters that they load into."""
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
    """Restore everything, the RNG states last."""
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
    # Either list may be empty, see `_check_rest`; otherwise their lengths are equal.
    for hook, state in zip(prepared.communication, stored.communication, strict=False):
        hook.load_state_dict(state)
    _apply_rng(stored, rank)


def _apply_rng(stored: Stored, rank: int) -> None:
    if stored.rng is not None:
        load_rng_state(stored.rng)
    elif stored.first_rng is not None:
        logger.warning(
            "%s was saved by fewer processes: rank %d starts with random states derived from rank "
            "0's.",
            stored.path,
            rank,
        )
        digest = hashlib.sha256(stored.first_rng["torch"].numpy().tobytes()).digest()
        seed_generators(mix(int.from_bytes(digest[:7], "big"), rank))
