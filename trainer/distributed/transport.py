"""What the collectives are made of: tensors and bytes moved between processes as they are.

Everything travels as bytes, so that a type of tensor that a backend cannot name (int16 and float8
for gloo, for example) travels too.
"""

from __future__ import annotations

import io
import pickle
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from trainer.state import PartialState


def device_types() -> set[str]:
    """The types of device that the process group can send from."""
    return {part.partition(":")[0] for part in dist.get_backend_config().split(",")}


def side_device() -> torch.device:
    """Where sizes and objects travel: the host where the group can, so that no device waits."""
    return torch.device("cpu") if "cpu" in device_types() else PartialState().device


def packed(tensor: Tensor) -> Tensor:
    """The values in one stretch of memory, without a graph; the tensor's own memory if it is so."""
    return tensor.detach().resolve_conj().resolve_neg().contiguous()


def as_bytes(tensor: Tensor) -> Tensor:
    """A view of a packed tensor's memory; shape [bytes]."""
    return tensor.reshape(-1).view(torch.uint8)


def stack(tensor: Tensor) -> Tensor:
    """The tensors of all processes, of one shape [...]; shape [num_processes, ...]."""
    own = packed(tensor)
    size = PartialState().num_processes
    result = own.new_empty((size, *own.shape))
    if own.numel():
        dist.all_gather(list(as_bytes(result).view(size, -1)), as_bytes(own))
    return result


def send(tensor: Tensor, from_process: int) -> None:
    """Give a packed tensor of every process the values of one, in place."""
    if tensor.numel():
        dist.broadcast(as_bytes(tensor), src=from_process)


def share_numbers(own: list[int]) -> list[list[int]]:
    """As many numbers from each process, in the order of their ranks."""
    numbers = torch.tensor(own, dtype=torch.int64, device=side_device())
    rows: list[list[int]] = stack(numbers).tolist()
    return rows


def share_bytes(payload: bytes, sizes: list[int]) -> list[bytes]:
    """The payloads of all processes, of which every process knows the sizes."""
    own = torch.zeros(max(sizes), dtype=torch.uint8)
    own[: len(payload)] = torch.frombuffer(bytearray(payload), dtype=torch.uint8)
    rows = stack(own.to(side_device())).cpu()
    return [row[:size].numpy().tobytes() for row, size in zip(rows, sizes, strict=True)]


@dataclass(frozen=True)
class Unsendable:
    """Travels in place of an object that could not be pickled.

    Attributes:
        reason: The error, as text.
    """

    reason: str


class _Pickler(pickle.Pickler):
    """Sends of a tensor what belongs to it.

    Not the number of its accelerator, which means another one to another process; nor the rest of
    the memory that it is a view of.
    """

    def reducer_override(self, obj: Any) -> Any:
        if type(obj) in (Tensor, torch.nn.Parameter) and obj.layout == torch.strided:
            if obj.device.type not in ("cpu", "meta"):
                return _arrive, (obj.detach().cpu(),)
            if obj.untyped_storage().nbytes() > obj.nbytes:
                return torch.asarray, (obj.detach().clone(),)
        return NotImplemented


def _arrive(tensor: Tensor) -> Tensor:
    return tensor.to(PartialState().device)


def dump(value: Any) -> tuple[bytes, Exception | None]:
    """An object as bytes; or those of an `Unsendable` and the error."""
    buffer = io.BytesIO()
    try:
        _Pickler(buffer).dump(value)
    except Exception as error:  # noqa: BLE001 - whatever a class's own pickling raises; told to all
        return pickle.dumps(Unsendable(f"{type(error).__name__}: {error}")), error
    return buffer.getvalue(), None


def load(payload: bytes) -> Any:
    """The object that a process of this run gave to `dump`; its tensors on this one's device."""
    return pickle.loads(payload)  # noqa: S301 - from a process of this run, not from a file
