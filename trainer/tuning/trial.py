"""What the trials have in common: a Trainer that writes nothing, on copies."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch

from callbacks import Callback
from trainer.accelerator import Accelerator
from trainer.hparams import kept_by
from trainer.loops.lengths import Length
from trainer.module import TrainModule
from trainer.precision import Precision
from trainer.rng import isolated_rng
from trainer.state import GradientState, PartialState
from trainer.trainer import Trainer


class TrialAccelerator:
    """An accelerator whose scaler is the trial's own, and which may seem to have no peers.

    Args:
        accelerator: The user's, which has everything else.
        alone: This process works by itself: what fails here leaves nobody waiting.
    """

    def __init__(self, accelerator: Accelerator, *, alone: bool) -> None:
        self._accelerator = accelerator
        self.precision = _separate(accelerator.precision)
        self.num_processes = 1 if alone else accelerator.num_processes
        self.process_index = 0 if alone else accelerator.process_index
        self.use_distributed = accelerator.use_distributed and not alone

    def __getattr__(self, name: str) -> Any:
        if name == "_accelerator":  # asked for while it is copied, before there is one
            raise AttributeError(name)
        return getattr(self._accelerator, name)


def _separate(precision: Precision) -> Precision:
    """The same precision with a scaler that begins where this one stands."""
    scaler = precision.scaler
    if scaler is None:
        return copy.deepcopy(precision)
    twin = torch.amp.GradScaler(scaler._device, enabled=scaler.is_enabled())
    if scaler.is_enabled():
        twin.load_state_dict(scaler.state_dict())
    separate = copy.deepcopy(precision, {id(scaler): twin})
    separate.begin()
    return separate


def make_trial(
    trainer: Trainer, callback: Callback, steps: int, *, alone: bool, **settings: Any
) -> Trainer:
    """A Trainer with the user's settings and none of the user's callbacks, which writes nothing.

    Args:
        trainer: The user's.
        callback: The only one; `begin_trial` in its ``on_fit_start`` ends the fit after `steps`.
        steps: Updates of a fit.
        alone: See `TrialAccelerator`.
        **settings: In place of the user's.
    """
    changes: dict[str, Any] = {
        "num_sanity_val_steps": 0,
        "non_finite": "ignore",  # that a loss diverges is what a trial is to find out
        **dict.fromkeys(("min_epochs", "min_steps", "max_time")),
        **settings,
    }
    if trainer.max_epochs is None and trainer.max_steps is None:
        changes["max_steps"] = steps
    accelerator = TrialAccelerator(trainer.accelerator, alone=alone)
    return trainer._trial(accelerator, [callback], **changes)


def begin_trial(trial: Trainer, steps: int) -> None:
    """Let the fit at hand end after so many updates, whatever length the user's would have.

    The settings keep the user's length, since schedules are made from it.
    """
    run = trial._fit_run("begin_trial")
    run.length = Length(max_steps=steps)
    run.validates = False  # nobody misses a validation in so few


@contextmanager
def set_apart(module: TrainModule) -> Iterator[None]:
    """Inside, a copy of the module is tried out; generators and the process's state are put back.

    A module that is on an accelerator waits on the host meanwhile, so that the copy has the room
    that the module itself would have.
    """
    shared, gradients = PartialState._shared_state, GradientState()
    taken, sync = copy.deepcopy(shared.get("_seeds_taken")), gradients.sync_gradients
    with _on_host(module), isolated_rng():
        try:
            yield
        finally:
            gradients.sync_gradients = sync
            shared.pop("_seeds_taken", None)
            if taken is not None:
                shared["_seeds_taken"] = taken


@contextmanager
def _on_host(module: TrainModule) -> Iterator[None]:
    devices = {tensor.device for tensor in chain(module.parameters(), module.buffers())}
    if len(devices) != 1 or devices <= {torch.device("cpu"), torch.device("meta")}:
        yield
        return
    (device,) = devices
    module.to("cpu")
    try:
        yield
    finally:
        module.to(device)


def holders(name: str, *owners: Any) -> list[Any]:
    """The objects that have an attribute of this name: of the owners, and of their ``hparams``."""
    found: list[Any] = []
    for owner in owners:
        if owner is None:
            continue
        kept = isinstance(owner, TrainModule)
        values = kept_by(owner).values if kept else getattr(owner, "hparams", None)
        found += [each for each in (owner, values) if each is not None and _has(each, name)]
    return found


def _has(owner: Any, name: str) -> bool:
    return name in owner if isinstance(owner, dict) else hasattr(owner, name)


def set_all(found: list[Any], name: str, value: Any) -> None:
    """Give the attribute this value, wherever `holders` found it."""
    for owner in found:
        if isinstance(owner, dict):
            owner[name] = value
        else:
            setattr(owner, name, value)
