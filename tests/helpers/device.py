"""A simulated device in host memory that counts every synchronisation of the host with it.

`counted_waits` is for one process. `counted_reads` is for the engines of several processes, which
need storages and gloo: tensors of the CPU then take the branches of an accelerator's.

Its tensors are a subclass that wraps host tensors and reports the device ``meta``. Operations on
them run on the host, and their results are on the device. Calls that would make the host wait for
a real device are counted by location: reading a value, synchronous copies, operations whose output
shape depends on values, and waits for an event that the device may not have reached, which is any
event recorded since the previous update. What waits is what waits on CUDA.
"""

from __future__ import annotations

import os
import sys
import threading
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
from trainer.distributed import transport
from trainer.distributed.step_sync import StepSync

DEVICE = torch.device("meta")
_READING = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
_READS = {"aten::_linalg_check_errors"}  # reads too, and has neither tag
_INDEXING = {"aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_"}
_MASKS = (torch.bool, torch.uint8)
_COPIES = {"aten::_to_copy", "aten::copy_"}
_ROOT = Path(__file__).parents[2]
_OURS = tuple(f"{_ROOT}{os.sep}{name}{os.sep}" for name in ("callbacks", "trackers", "trainer"))
_PLUMBING = ("distributed/", "tree.py", "metrics/cells.py")  # named is who calls these


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
    """Pass numbers to the device as to CUDA.

    ``torch.tensor(1.0, device=...)`` copies the number, which torch omits on ``meta``. That of
    ``x[index] = 1.0`` stays on the host, where torch makes it on ``meta``.
    """

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func in (torch.tensor, torch.as_tensor) and not isinstance(args[0], torch.Tensor):
            target = kwargs.get("device")
            if target is not None and torch.device(target) == DEVICE:
                return func(*args, **{**kwargs, "device": "cpu"}).to(DEVICE)
        if func is torch.Tensor.__setitem__ and _is_on(args[0]):
            tensor, index, value = args
            if isinstance(value, (int, float, complex)):
                value = torch.tensor(value, dtype=tensor.dtype, device="cpu")
            return func(tensor, index, value)
        return func(*args, **kwargs)


def _is_on(value: Any) -> bool:
    return isinstance(value, OnDevice)


def _run(waits: Waits, func: Any, args: Any, kwargs: Any) -> Any:
    """Run the operation on the host; return its result on the right device."""
    leaves = tree_leaves((args, kwargs))
    on_device = [leaf for leaf in leaves if _is_on(leaf)]
    target = kwargs.get("device")
    name = func._schema.name
    if on_device and _reads(func, args, kwargs):
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


def _reads(func: Any, args: Any, kwargs: Any) -> bool:
    """Return whether the operation reads from the device, or copies an index to it."""
    name = func._schema.name
    if name in _INDEXING:
        return _index_waits(*args)
    if name == "aten::repeat_interleave" and kwargs.get("output_size") is not None:
        return False
    return name in _READS or not _READING.isdisjoint(func.tags)


def _index_waits(tensor: Any, indices: Any, value: Any = None, *_: Any) -> bool:
    """Return whether indexing waits, as ``IndexingUtils.h`` and ``index_put_`` of torch do."""
    kinds = [(_is_on(index), index.dtype in _MASKS) for index in indices if index is not None]
    if value is not None and not _is_on(value):
        # A number is filled in under a mask of the device, which reads nothing, and else copied.
        return kinds != [(True, True)]
    # A mask of the device is counted there, and an index of the host copied. What is counted in a
    # mask of the host is copied from pinned memory, without waiting.
    return any(there == mask for there, mask in kinds)


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
        def __init__(self, device: Any = None, enable_timing: bool = False) -> None:
            assert torch.device(device) == DEVICE

        def record(self, stream: Any = None) -> None:
            self.at = waits.updates

        def query(self) -> bool:
            return self.at < waits.updates

        def synchronize(self) -> None:
            if self.at >= waits.updates:
                waits.note("event")

    monkeypatch.setattr(torch, "Event", Event)
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda device: None)
    monkeypatch.setattr(Accelerator, "device", DEVICE)
    with waits, _Numbers():
        yield waits


class Reads(TorchDispatchMode):
    """Counts what would wait for the device if all tensors were there, by operation and function.

    Tensors that code of ours has copied to the host are on the host. Other threads may wait.

    Attributes:
        places: How often, by the operation and the function of ours that caused it.
        operation: What is going on, set by the test; None counts nothing.
        updates: The number of updates, set by the test. Reading what was sent in an earlier one
            does not wait.
    """

    def __init__(self) -> None:
        super().__init__()
        self.places: Counter[tuple[str, str]] = Counter()
        self.operation: str | None = None
        self.updates = 0
        self._thread = threading.get_ident()
        self._on_host: dict[int, torch.Tensor] = {}  # by the address of the storage

    def put_on_host(self, tensor: torch.Tensor) -> torch.Tensor:
        copied = tensor.detach().clone()
        self._on_host[copied.untyped_storage().data_ptr()] = copied
        return copied

    def note(self, tensor: torch.Tensor | None = None) -> None:
        if self.operation is None or threading.get_ident() != self._thread:
            return
        if tensor is not None and tensor.untyped_storage().data_ptr() in self._on_host:
            return
        frame = sys._getframe(2)
        while (name := _name_of_ours(frame)) is None:
            if frame.f_back is None:
                return
            frame = frame.f_back
        self.places[self.operation, name] += 1

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name
        if name in _INDEXING:
            reads = any(each is not None and each.dtype in _MASKS for each in args[1])
        else:
            reads = name in _READS or not _READING.isdisjoint(func.tags)
        if reads:
            self.note(args[0])
        return func(*args, **(kwargs or {}))

    def counted(self, name: str, method: Any) -> Any:
        """Return a method of tensors that copies, which counts its calls."""

        def call(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            if name != "to":
                self.note(tensor)
                result = method(tensor, *args, **kwargs)
                return self.put_on_host(result) if name == "cpu" else result
            target = args[0] if args else kwargs.get("device")
            if isinstance(target, (str, torch.device)):
                # Torch's own code asks for the device where a tensor is already.
                ours = sys._getframe(1).f_code.co_filename.startswith(_OURS)
                if ours and not kwargs.get("non_blocking"):
                    self.note()
                args = ("cpu", *args[1:]) if torch.device(target).type == "cuda" else args
            return method(tensor, *args, **kwargs)

        return call

    def counted_maker(self, make: Any) -> Any:
        """Return a function that makes tensors of numbers, which counts those on a device."""

        def call(values: Any, *args: Any, **kwargs: Any) -> Any:
            if kwargs.get("device") is not None and not isinstance(values, torch.Tensor):
                self.note()
            return make(values, *args, **kwargs)

        return call

    def start_copy_to_host(self, tensor: torch.Tensor) -> tuple[torch.Tensor, _Arrival]:
        """Replace `trainer.tree.start_copy_to_host`."""
        return self.put_on_host(tensor), _Arrival(self)


class _Arrival:
    """An event behind a copy to the host."""

    def __init__(self, reads: Reads) -> None:
        self.reads, self.at = reads, reads.updates

    def synchronize(self) -> None:
        if self.at >= self.reads.updates:
            self.reads.note()


def _name_of_ours(frame: Any) -> str | None:
    """Return the file and the function of a frame; None if it is not of ours, or plumbing."""
    code = frame.f_code
    if not code.co_filename.startswith(_OURS) or code.co_name.startswith("<"):
        return None
    file = Path(code.co_filename).relative_to(_ROOT).as_posix().removeprefix("trainer/")
    return None if file.startswith(_PLUMBING) else f"{file}: {code.co_name}"


@contextmanager
def counted_reads() -> Iterator[Reads]:
    """Inside, tensors of the CPU are treated as an accelerator's, and waits are counted."""
    reads = Reads()
    with pytest.MonkeyPatch.context() as patch, reads:
        for name in ("to", "cpu", "cuda", "tolist", "numpy"):
            patch.setattr(torch.Tensor, name, reads.counted(name, getattr(torch.Tensor, name)))
        for name in ("tensor", "as_tensor"):
            patch.setattr(torch, name, reads.counted_maker(getattr(torch, name)))
        patch.setattr(transport, "start_copy_to_host", reads.start_copy_to_host)
        patch.setattr(torch.Tensor, "is_cpu", property(lambda _: False))
        cuda = property(lambda _: torch.device("cuda"), lambda *_: None)
        patch.setattr(StepSync, "_device", cuda, raising=False)
        yield reads
