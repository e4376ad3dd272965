"""RunContext shared by all trials, which run a Trainer that writes nothing on copies."""

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
from trainer.module import TrainModule
from trainer.precision import Precision, Scaler
from trainer.rng import isolated_rng
from trainer.state import GradientState, PartialState
from trainer.trainer import Trainer


class TrialAccelerator:
    """An accelerator with a gradient scaler of its own, which can hide the other processes.

    Args:
        accelerator: The user's, which provides everything else.
        alone: Work without the other processes, so that a failure leaves none of them waiting.
    """

    def __init__(self, accelerator: Accelerator, *, alone: bool) -> None:
        self._accelerator = accelerator
        self.precision = _separate(accelerator.precision)
        self.num_processes = 1 if alone else accelerator.num_processes
        self.process_index = 0 if alone else accelerator.process_index
        self.use_distributed = accelerator.use_distributed and not alone

    def __getattr__(self, name: str) -> Any:
        if name == "_accelerator":  # looked up while copying, before it is set
            raise AttributeError(name)
        return getattr(self._accelerator, name)


def _separate(precision: Precision) -> Precision:
    """Return a copy of the precision, whose scaler starts with the state of this one."""
    scaler = precision.scaler
    if scaler is None:
        return copy.deepcopy(precision)
    twin = Scaler(scaler._device, enabled=scaler.is_enabled())
    if scaler.is_enabled():
        twin.load_state_dict(scaler.state_dict())
    separate = copy.deepcopy(precision, {id(scaler): twin})
    separate.begin()
    return separate


def make_trial(
    trainer: Trainer, callback: Callback, steps: int, *, alone: bool, **settings: Any
) -> Trainer:
    """Return a Trainer that has the user's settings but not the callbacks, and writes nothing.

    Args:
        trainer: The user's.
        callback: Its only callback.
        steps: Updates of a fit.
        alone: See `TrialAccelerator`.
        **settings: Settings that replace the user's.
    """
    changes: dict[str, Any] = {
        "num_sanity_val_steps": 0,
        "non_finite": "ignore",  # a trial is to find out whether the loss diverges
        **dict.fromkeys(("min_epochs", "min_steps", "max_time")),
        **settings,
    }
    if trainer.max_epochs is None and trainer.max_steps is None:
        changes["max_steps"] = steps
    accelerator = TrialAccelerator(trainer.accelerator, alone=alone)
    return trainer._trial(accelerator, [callback], steps, **changes)


@contextmanager
def isolate(module: TrainModule) -> Iterator[None]:
    """Isolate the trial of a copy of the module: on exit, restore RNG and process state.

    A module on an accelerator is moved to the CPU meanwhile, so that the copy has the memory that
    the module itself would have.
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
    """Return the objects with an attribute of this name, among owners and their ``hparams``."""
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
    """Set the attribute to this value, wherever `holders` found it."""
    for owner in found:
        if isinstance(owner, dict):
            owner[name] = value
        else:
            setattr(owner, name, value)
