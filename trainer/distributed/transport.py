"""Building blocks of the collectives: tensors and objects as bytes, and sums of a few numbers."""

from __future__ import annotations

import io
import pickle
from dataclasses import dataclass
from functools import reduce
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from trainer.state import PartialState
from trainer.tree import as_bytes, dense


def send(tensor: Tensor, from_process: int) -> None:
    """Broadcast a packed tensor from one process, in place."""
    if tensor.numel():
        dist.broadcast(as_bytes(tensor), src=from_process)


def sum_numbers(vector: Tensor) -> None:
    """Sum a few numbers over the processes, in place; collective.

    On the host each process sends them to each other one at once, and adds up in the order of the
    ranks. All that counts for a few numbers is how often processes wait for each other: an
    all-reduce of gloo, which is made for many, takes several times as long.

    Args:
        vector: Shape [numbers], contiguous.
    """
    if vector.device.type != "cpu":
        dist.all_reduce(vector)
        return
    processes = dist.get_world_size()
    of_all = vector.new_empty(processes, len(vector))
    dist.all_to_all_single(of_all, vector.repeat(processes, 1))
    vector.copy_(add_rows(of_all))


def add_rows(rows: Tensor) -> Tensor:
    """Add up rows, (rows, numbers), from the first to the last: `torch.sum` has another order.

    Those of 16 bits are added up in float32, so that the sum is rounded once.
    """
    is_half = rows.is_floating_point() and rows.dtype.itemsize == 2
    total: Tensor = reduce(torch.add, rows.float() if is_half else rows)
    return total


@dataclass(frozen=True)
class Unsendable:
    """Sent in place of an object that could not be pickled.

    Attributes:
        reason: The error, as text.
    """

    reason: str


class _Pickler(pickle.Pickler):
    """Pickles tensors by value, of every dtype: torch's own pickling lacks some.

    The device index is left out, since it means another device on another process; so is the rest
    of the storage that a tensor is a view of.
    """

    def reducer_override(self, obj: Any) -> Any:
        plain = type(obj) in (Tensor, torch.nn.Parameter) and obj.layout == torch.strided
        if not plain or obj.is_nested or obj.is_quantized or obj.is_meta:
            return NotImplemented
        raw = as_bytes(dense(obj).cpu()).numpy()
        return _arrive, (raw, obj.dtype, tuple(obj.shape), obj.device.type == "cpu")


def _arrive(raw: Any, dtype: torch.dtype, shape: tuple[int, ...], on_host: bool) -> Tensor:
    tensor = torch.from_numpy(raw).view(dtype).view(shape)
    return tensor if on_host else tensor.to(PartialState().device)


def dump(value: Any) -> tuple[bytes, Exception | None]:
    """Return an object as bytes and None, or an `Unsendable` as bytes and the error."""
    buffer = io.BytesIO()
    try:
        _Pickler(buffer).dump(value)
    except Exception as error:  # noqa: BLE001 - a class's own pickling may raise anything
        return pickle.dumps(Unsendable(f"{type(error).__name__}: {error}")), error
    return buffer.getvalue(), None


def load(payload: bytes) -> Any:
    """Return an object that a process of this run dumped, its tensors on this one's device."""
    return pickle.loads(payload)  # noqa: S301 - from a process of this run, not from a file
