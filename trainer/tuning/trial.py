"""Trials: a Trainer that writes nothing, on copies of the module and its data."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from copyreg import dispatch_table
from dataclasses import replace
from itertools import chain
from mmap import mmap
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any

import numpy
import torch
from torch import Tensor

from callbacks import Callback
from trainer.accelerator import Accelerator
from trainer.engines.choose import choose_engine
from trainer.hparams import kept_by
from trainer.module import TrainModule
from trainer.precision import Precision, Scaler
from trainer.rng import isolated_rng
from trainer.state import GradientState, PartialState
from trainer.trainer import Trainer

_PLAIN = frozenset({type(None), bool, int, float, complex, str, bytes, list, tuple, dict, set})
_SHARED = (type, FunctionType, BuiltinFunctionType, ModuleType, Tensor, numpy.ndarray, mmap)


class TrialAccelerator:
    """An accelerator with its own gradient scaler, which can hide the other processes.

    Args:
        accelerator: The user's accelerator, which provides everything else.
        alone: Run without the other processes, so that none of them waits after a failure.
    """

    def __init__(self, accelerator: Accelerator, *, alone: bool) -> None:
        self._accelerator = accelerator
        self.precision = _separate(accelerator.precision)
        self.num_processes = 1 if alone else accelerator.num_processes
        self.process_index = 0 if alone else accelerator.process_index
        self.use_distributed = accelerator.use_distributed and not alone
        options = accelerator.engine.options
        self.engine = choose_engine(replace(options, rank=0, world_size=1) if alone else options)

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
        trainer: The user's Trainer.
        callback: The trial's only callback.
        steps: The number of updates of a fit.
        alone: See `TrialAccelerator`.
        **settings: Settings that replace the user's.
    """
    changes: dict[str, Any] = {
        "num_sanity_val_steps": 0,
        "non_finite": "ignore",  # a trial must be able to observe divergence
        **dict.fromkeys(("min_epochs", "min_steps", "max_time")),
        **settings,
    }
    length = trainer._context.settings.length
    if length.max_epochs is None and length.max_steps is None:
        changes["max_steps"] = steps
    accelerator = TrialAccelerator(trainer.accelerator, alone=alone)
    return trainer._trial(accelerator, [callback], steps, **changes)


@contextmanager
def isolate(module: TrainModule) -> Iterator[None]:
    """Isolate a trial of a copy of the module; on exit, restore RNG and process state.

    During the trial, a module on an accelerator is moved to the CPU, so that the copy has its
    memory.
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


def owners_of(name: str, *owners: Any) -> list[Any]:
    """Return the objects with an attribute of this name, among owners and their ``hparams``."""
    with_attribute: list[Any] = []
    for owner in owners:
        if owner is None:
            continue
        is_module = isinstance(owner, TrainModule)
        values = kept_by(owner).values if is_module else getattr(owner, "hparams", None)
        candidates = [obj for obj in (owner, values) if obj is not None]
        with_attribute += [obj for obj in candidates if _has(obj, name)]
    return with_attribute


def _has(owner: Any, name: str) -> bool:
    return name in owner if isinstance(owner, dict) else hasattr(owner, name)


def set_attribute(owners: list[Any], name: str, value: Any) -> None:
    """Set the attribute to this value, wherever `owners_of` found it."""
    for owner in owners:
        if isinstance(owner, dict):
            owner[name] = value
        else:
            setattr(owner, name, value)


def copy_for_trial(module: TrainModule, data: Any, shared: list[Any]) -> tuple[TrainModule, Any]:
    """Return copies of a module and of its data.

    The module is copied completely. The data's tensors, arrays and objects that cannot be copied
    (open databases, locks) are shared. Positions, generators and counters are copied.

    Args:
        module: The user's module.
        data: Loaders and datamodules, in any container. Objects that they share with each other or
            with the module are also shared between the copies.
        shared: Objects that the copies share with the originals.

    Raises:
        TypeError: The module cannot be copied.
        ValueError: Something in the data can be read only once.
    """
    memo: dict[int, Any] = {id(obj): obj for obj in shared}
    try:
        module_copy = copy.deepcopy(module, memo)
    except Exception as error:
        raise TypeError(
            f"A {type(module).__name__} cannot be copied, but trials run on a copy of the "
            f"module: {type(error).__name__}: {error}. Create what cannot be copied in setup() "
            "or configure_model()."
        ) from error
    buffer = io.BytesIO()
    pickler = _Pickler(buffer, memo)
    pickler.dump(data)
    buffer.seek(0)
    return module_copy, _Unpickler(buffer, pickler.shared).load()


class _Pickler(pickle.Pickler):
    """Pickles an object, except for the objects that its copy shares with it.

    Attributes:
        shared: The shared objects, in the order of the references to them.
    """

    def __init__(self, file: io.BytesIO, memo: dict[int, Any]) -> None:
        super().__init__(file, protocol=5)
        self._memo = memo
        self.shared: list[Any] = []

    def persistent_id(self, obj: Any) -> int | None:
        if id(obj) in self._memo:
            obj = self._memo[id(obj)]
        elif type(obj) in _PLAIN or not self._is_shared(obj):
            return None
        self.shared.append(obj)
        return len(self.shared) - 1

    def _is_shared(self, obj: Any) -> bool:
        if isinstance(obj, _SHARED):
            return True
        if type(obj) in dispatch_table:
            return False
        try:
            obj.__reduce_ex__(5)
        except Exception as error:
            if isinstance(obj, Iterator):
                raise ValueError(
                    f"The data hold a {type(obj).__name__}, which can be read only once: a trial "
                    "would use up the first batches of the training. Pass a loader or another "
                    "object that can be iterated again."
                ) from error
            return True
        return False


class _Unpickler(pickle.Unpickler):
    """Unpickles the output of a `_Pickler` of this process."""

    def __init__(self, file: io.BytesIO, shared: list[Any]) -> None:
        super().__init__(file)
        self._shared = shared

    def persistent_load(self, pid: Any) -> Any:
        return self._shared[pid]
