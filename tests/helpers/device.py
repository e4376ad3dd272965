"""A simulated device in host memory that counts every synchronisation of the host with it.

Its tensors are a subclass that wraps host tensors and reports the device ``meta``. Operations on
them run on the host, and their results are on the device. Calls that would make the host wait for
a real device are counted by location: reading a value, synchronous copies, operations whose output
shape depends on values, and waits for an event that the device may not have reached, which is any
event recorded since the previous update.
"""

from __future__ import annotations

import traceback
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from trainer import Accelerator

DEVICE = torch.device("meta")
_READS = {
    "aten::_local_scalar_dense",
    "aten::equal",
    "aten::is_nonzero",
    "aten::masked_select",
    "aten::nonzero",
    "aten::_unique2",
}
_COPIES = {"aten::_to_copy", "aten::copy_"}
_ROOT = Path(__file__).parents[2]


class OnDevice(torch.Tensor):
    """A tensor on the device; `host` holds its values."""

    @staticmethod
    def __new__(cls, host, waits):
        return torch.Tensor._make_wrapper_subclass(
            cls,
            host.size(),
            strides=host.stride(),
            storage_offset=host.storage_offset(),
            dtype=host.dtype,
            device=DEVICE,
        )

    def __init__(self, host, waits):
        self.host, self.waits = host, waits

    def __repr__(self):
        return f"OnDevice({self.host!r})"

    def tolist(self):
        self.waits.note("tolist")
        return self.host.tolist()

    def numpy(self, *, force=False):
        raise TypeError("can't convert a device's tensor to numpy")

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        waits = next(leaf.waits for leaf in tree_leaves((args, kwargs)) if _is_on(leaf))
        return _run(waits, func, args, kwargs or {})


class Waits(TorchDispatchMode):
    """While this mode is active, tensors can be put on the device.

    Attributes:
        places: How often the host waited, by operation and the line of ours that caused it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.places: Counter[str] = Counter()
        self.updates = 0  # set by the test, which counts them

    @property
    def total(self) -> int:
        return self.places.total()

    def note(self, operation: str) -> None:
        ours = [
            f"{Path(frame.filename).relative_to(_ROOT)}:{frame.lineno}"
            for frame in traceback.extract_stack()
            if frame.filename.startswith(str(_ROOT)) and frame.filename != __file__
            if ".venv" not in frame.filename
        ]
        self.places[f"{operation} in {ours[-1] if ours else '?'}"] += 1

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return _run(self, func, args, kwargs or {})


class _Numbers(TorchFunctionMode):
    """Let ``torch.tensor(1.0, device=...)`` copy the number, which torch omits on ``meta``."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func in (torch.tensor, torch.as_tensor) and not isinstance(args[0], torch.Tensor):
            target = kwargs.get("device")
            if target is not None and torch.device(target) == DEVICE:
                return func(*args, **{**kwargs, "device": "cpu"}).to(DEVICE)
        return func(*args, **kwargs)


def _is_on(value: Any) -> bool:
    return isinstance(value, OnDevice)


def _run(waits: Waits, func: Any, args: Any, kwargs: Any) -> Any:
    """Run the operation on the host; return its result on the right device."""
    leaves = tree_leaves((args, kwargs))
    on_device = [leaf for leaf in leaves if _is_on(leaf)]
    target = kwargs.get("device")
    name = func._schema.name
    if on_device and name in _READS:
        waits.note(name)
    if name in _COPIES and not _non_blocking(func, args, kwargs):
        sides = [_is_on(leaf) for leaf in leaves if isinstance(leaf, torch.Tensor)]
        if target is not None:
            sides.append(torch.device(target) == DEVICE)
        # A host scalar as an operand is passed with the kernel launch; that is no copy.
        if any(sides) and not all(sides):
            waits.note(name)
    if target is not None and torch.device(target) == DEVICE:
        kwargs = {**kwargs, "device": torch.device("cpu")}
    kwargs = {**kwargs, "pin_memory": False} if kwargs.get("pin_memory") else kwargs
    inner = tree_map(lambda leaf: leaf.host if _is_on(leaf) else leaf, (args, kwargs))
    result = func(*inner[0], **inner[1])
    if not on_device and (target is None or torch.device(target) != DEVICE):
        return result
    if target is not None and torch.device(target).type == "cpu":
        return result
    if name == "aten::copy_" and not _is_on(args[0]):
        return args[0]
    known = {id(leaf.host): leaf for leaf in on_device}
    return tree_map(
        lambda leaf: known.get(id(leaf)) if id(leaf) in known else _put(leaf, waits), result
    )


def _put(value: Any, waits: Waits) -> Any:
    return OnDevice(value, waits) if isinstance(value, torch.Tensor) else value


def _non_blocking(func: Any, args: Any, kwargs: Any) -> bool:
    if "non_blocking" in kwargs:
        return bool(kwargs["non_blocking"])
    names = [argument.name for argument in func._schema.arguments]
    index = names.index("non_blocking")
    return len(args) > index and bool(args[index])


@contextmanager
def counted_waits(monkeypatch: pytest.MonkeyPatch) -> Iterator[Waits]:
    """Inside, the device is in use, with events whose waits are counted."""
    waits = Waits()

    class Event:
        def __init__(self, device: Any = None) -> None:
            assert torch.device(device) == DEVICE

        def record(self) -> None:
            self.at = waits.updates

        def query(self) -> bool:
            return self.at < waits.updates

        def synchronize(self) -> None:
            if self.at >= waits.updates:
                waits.note("event")

    monkeypatch.setattr(torch, "Event", Event)
    monkeypatch.setattr(Accelerator, "device", DEVICE)
    with waits, _Numbers():
        yield waits
