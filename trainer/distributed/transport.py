"""What the collectives are made of: tensors and objects as bytes, moved as they are."""

from __future__ import annotations

import io
import pickle
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from trainer.distributed.meeting import as_bytes
from trainer.state import PartialState


def send(tensor: Tensor, from_process: int) -> None:
    """Give a packed tensor of every process the values of one, in place."""
    if tensor.numel():
        dist.broadcast(as_bytes(tensor), src=from_process)


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
