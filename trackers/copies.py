"""Copies of logged values, which a loop may go on writing to."""

import copy
from typing import Any

from trackers.media import rendered


def frozen(value: Any, arrivals: list[Any]) -> Any:
    """A copy that later changes of the original do not reach; waits for no device.

    Tensors of devices are sent to the host.

    Args:
        value: a tensor, an array, a data frame, or dicts, lists and tuples of these; a figure of
            matplotlib, in whose place its pixels are; other objects are taken as they are.
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
    if not hasattr(value, "__array__"):
        return value
    # Frames of polars have no `copy`, and the general one would share the numbers of an array.
    return value.copy() if hasattr(value, "copy") else copy.copy(value)


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
