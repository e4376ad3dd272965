"""Copies of logged values, because the training loop may change the originals."""

import copy
import math
from argparse import Namespace
from collections import deque
from dataclasses import is_dataclass
from types import SimpleNamespace
from typing import Any

from trackers.media import rendered

_HOLDERS = (Namespace, SimpleNamespace, set, deque, bytearray)  # found in configurations


def frozen(value: Any, arrivals: list[Any]) -> Any:
    """Return a copy of a logged value, without waiting for a device.

    Later changes of the original do not affect it. Tensors on devices are copied to the host
    asynchronously.

    Args:
        value: a tensor, an array, a PIL image, a data frame, or dicts, lists and tuples of these. A
            matplotlib figure is replaced by its pixels. The copy of a namespace, dataclass or set
            is shallow. Other objects are returned as they are.
        arrivals: a list to which an event is added for each tensor that is still being copied. Call
            the event's `synchronize()` before reading the copy.
    """
    if isinstance(value, dict):
        return {key: frozen(item, arrivals) for key, item in value.items()}
    if type(value) in (list, tuple):  # a subclass may have another constructor
        return type(value)(frozen(item, arrivals) for item in value)
    if hasattr(value, "detach"):
        return _to_host(value.detach(), arrivals)
    if hasattr(value, "set_canvas"):
        return rendered(value)
    if isinstance(value, _HOLDERS) or (is_dataclass(value) and not isinstance(value, type)):
        return copy.copy(value)  # shallow: it may hold a model
    if not (hasattr(value, "__array__") or hasattr(value, "__array_interface__")):
        return value
    # Data frames of polars have no method `copy`; `copy.copy` of others may share their data.
    return value.copy() if hasattr(value, "copy") else copy.copy(value)


def size_of(value: Any) -> int:
    """Return the approximate memory of a copy in bytes; 0 for a single number."""
    if value is None or isinstance(value, (bool, int, float)):
        return 0
    if isinstance(value, dict):
        return sum(map(size_of, value.values()))
    if isinstance(value, (list, tuple)):
        return sum(map(size_of, value)) + 32 * len(value)
    if isinstance(value, (str, bytes)):
        return len(value)
    if hasattr(value, "getbands"):  # a PIL image
        return int(value.width * value.height * len(value.getbands()))
    # The size of a data frame is estimated from its shape.
    size = None if hasattr(value, "columns") else getattr(value, "nbytes", None)
    return size if isinstance(size, int) else 8 * math.prod(getattr(value, "shape", None) or (0,))


def _to_host(tensor: Any, arrivals: list[Any]) -> Any:
    if tensor.device.type == "cpu":
        return tensor.clone()
    import torch

    host = torch.empty_like(tensor, device="cpu", pin_memory=tensor.device.type == "cuda")
    host.copy_(tensor, non_blocking=True)
    event = torch.Event(tensor.device)
    event.record()
    arrivals.append(event)
    return host
