"""Copies of logged values, which a loop may go on writing to."""

import copy
import math
from argparse import Namespace
from collections import deque
from dataclasses import is_dataclass
from types import SimpleNamespace
from typing import Any

from trackers.media import rendered

_HOLDERS = (Namespace, SimpleNamespace, set, deque, bytearray)  # as configurations have them


def frozen(value: Any, arrivals: list[Any]) -> Any:
    """A copy that later changes of the original do not reach; waits for no device.

    Tensors of devices are sent to the host.

    Args:
        value: a tensor, an array, a picture of PIL, a data frame, or dicts, lists and tuples of
            these; a figure of matplotlib, in whose place its pixels are; a namespace, a dataclass
            or a set, of which only what is put in its fields later is kept out; other objects are
            taken as they are.
        arrivals: gets an event for each tensor on its way: its copy may be read after the event's
            `synchronize()`.
    """
    if isinstance(value, dict):
        return {key: frozen(item, arrivals) for key, item in value.items()}
    if type(value) in (list, tuple):  # a subclass may not be made from its items
        return type(value)(frozen(item, arrivals) for item in value)
    if hasattr(value, "detach"):
        return _to_host(value.detach(), arrivals)
    if hasattr(value, "set_canvas"):
        return rendered(value)
    if isinstance(value, _HOLDERS) or (is_dataclass(value) and not isinstance(value, type)):
        return copy.copy(value)  # not what they hold: that may be a model
    if not (hasattr(value, "__array__") or hasattr(value, "__array_interface__")):
        return value
    # Frames of polars have no `copy`, and the general one would share the numbers of an array.
    return value.copy() if hasattr(value, "copy") else copy.copy(value)


def size_of(value: Any) -> int:
    """About how much memory a copy takes, in bytes; a number by itself takes nothing."""
    if value is None or isinstance(value, (bool, int, float)):
        return 0
    if isinstance(value, dict):
        return sum(map(size_of, value.values()))
    if isinstance(value, (list, tuple)):
        return sum(map(size_of, value)) + 32 * len(value)
    if isinstance(value, (str, bytes)):
        return len(value)
    if hasattr(value, "getbands"):  # a picture
        return int(value.width * value.height * len(value.getbands()))
    size = None if hasattr(value, "columns") else getattr(value, "nbytes", None)  # of a data frame
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
