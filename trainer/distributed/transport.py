"""Building blocks: broadcast, all-reduce, sum small vectors, copy to the host, pickle objects."""

from __future__ import annotations

import io
import pickle
from dataclasses import dataclass
from functools import reduce
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from trainer import xla
from trainer.distributed.guards import read_back, waiting
from trainer.state import PartialState
from trainer.tree import as_bytes, dense, start_copy_to_host


def send(tensor: Tensor, from_process: int) -> None:
    """Broadcast a dense tensor from one process, in place."""
    if not tensor.numel():
        return
    if tensor.device.type != "xla":
        dist.broadcast(as_bytes(tensor), src=from_process)
        return
    host = read_back(tensor)
    dist.broadcast(as_bytes(host), src=from_process)
    tensor.copy_(host)


def all_reduce(
    tensor: Tensor,
    operation: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM,
    group: dist.ProcessGroup | None = None,
) -> None:
    """All-reduce a tensor, in place; a collective call.

    The process group cannot send tensors of XLA devices. They are reduced over the devices if the
    devices support it (see `xla.reduces`), otherwise over the hosts.

    Args:
        tensor: The tensor, without a graph of autograd.
        operation: ``dist.ReduceOp.SUM``, ``MIN`` or ``MAX``.
        group: The processes; None means all.
    """
    if tensor.device.type != "xla":
        dist.all_reduce(tensor, operation, group=group)
    elif group is None and xla.reduces(tensor.dtype):
        xla.all_reduce(tensor, operation.name.lower())
    else:
        host = read_back(tensor)
        dist.all_reduce(host, operation, group=group)
        tensor.copy_(host)


def sum_numbers(vector: Tensor) -> None:
    """All-reduce (sum) a small vector, in place; a collective call.

    On the CPU, it uses one all-to-all exchange: each process sends its vector to every other one
    and sums the vectors in the order of the ranks. For small vectors only latency counts, and
    gloo's ring all-reduce, which is designed for large data, takes several times as long.

    Args:
        vector: A contiguous tensor of shape (numbers,).
    """
    if vector.device.type != "cpu":
        all_reduce(vector)
        return
    processes = dist.get_world_size()
    of_all = vector.new_zeros(processes, len(vector))  # kept by torch 2.11's fake group
    dist.all_to_all_single(of_all, vector.repeat(processes, 1))
    vector.copy_(add_rows(of_all))


def add_rows(rows: Tensor) -> Tensor:
    """Sum the rows of a tensor of shape (rows, numbers), in order from the first to the last.

    `torch.sum` may use another order. Rows of float16 or bfloat16 are summed in float32, so the
    caller rounds the sum only once.
    """
    is_half = rows.is_floating_point() and rows.dtype.itemsize == 2
    total: Tensor = reduce(torch.add, rows.float() if is_half else rows)
    return total


class HostCopy:
    """An asynchronous copy of a tensor on an accelerator to host memory.

    Args:
        tensor: The tensor; it may change as soon as the constructor returns.
    """

    def __init__(self, tensor: Tensor) -> None:
        self._host, self._event = start_copy_to_host(tensor)

    def read(self) -> Tensor:
        """Wait for the copy and return it."""
        with waiting:
            self._event.synchronize()
        return self._host


@dataclass(frozen=True)
class Unsendable:
    """A replacement that is sent for an object that cannot be pickled.

    Attributes:
        reason: The error, as text.
    """

    reason: str


class _Pickler(pickle.Pickler):
    """Pickles tensors by value, for every dtype; torch's own pickling does not support all.

    The device index is not sent, because it means a different device on another process. For a
    view, only its own values are sent, not the whole storage.
    """

    def reducer_override(self, obj: Any) -> Any:
        plain = type(obj) in (Tensor, torch.nn.Parameter) and obj.layout == torch.strided
        if not plain or obj.is_nested or obj.is_quantized or obj.is_meta:
            return NotImplemented
        raw = as_bytes(read_back(dense(obj))).numpy()
        return _arrive, (raw, obj.dtype, tuple(obj.shape), obj.device.type == "cpu")


def _arrive(raw: Any, dtype: torch.dtype, shape: tuple[int, ...], on_host: bool) -> Tensor:
    tensor = torch.from_numpy(raw).view(dtype).view(shape)
    return tensor if on_host else tensor.to(PartialState().device)


def dump(value: Any) -> tuple[bytes, Exception | None]:
    """Pickle an object.

    Returns:
        The bytes and None. If the object cannot be pickled, the bytes of an `Unsendable` and the
        error.
    """
    buffer = io.BytesIO()
    try:
        _Pickler(buffer).dump(value)
    except Exception as error:  # noqa: BLE001 - a class's own pickling may raise anything
        return pickle.dumps(Unsendable(f"{type(error).__name__}: {error}")), error
    return buffer.getvalue(), None


def load(payload: bytes) -> Any:
    """Unpickle the result of `dump` from a process of this run.

    Tensors that were on an accelerator are moved to this process's device.
    """
    return pickle.loads(payload)  # noqa: S301 - from a process of this run, not from a file
