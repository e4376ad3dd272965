"""The state of an optimizer put into it as it was saved, or where its parameters are."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from trainer.tree import leaves


def load_state(
    optimizer: Any, saved: Mapping[str, Any], dtypes: Mapping[int, torch.dtype] | None = None
) -> None:
    """``optimizer.load_state_dict(saved)``, with the state in the precision it was saved in.

    Torch gives all state but the count of steps the type of its parameter. State in float32 beside
    weights in bfloat16, as many optimizers keep it and as the products and rates of ``NAdam`` and
    ``ASGD`` are, would be rounded by every resume. Here only that follows the parameter which had
    its type when it was saved. Devices follow the parameters as torch has it.

    Args:
        optimizer: Or anything else with a ``load_state_dict``, which is all that is called then.
        saved: Its state dict.
        dtypes: By ``id``, the types that the parameters had then; those that are not here had the
            type that they have.
    """
    optimizer.load_state_dict(saved)
    if not isinstance(optimizer, Optimizer) or not {"state", "param_groups"} <= saved.keys():
        return
    numbers = chain.from_iterable(group["params"] for group in saved["param_groups"])
    here = chain.from_iterable(group["params"] for group in optimizer.param_groups)
    for number, parameter in zip(numbers, here, strict=False):
        if number in saved["state"] and parameter in optimizer.state:
            had = (dtypes or {}).get(id(parameter), parameter.dtype)
            optimizer.state[parameter] = _as_saved(
                saved["state"][number], optimizer.state[parameter], had
            )


def _as_saved(saved: Any, loaded: Any, had: torch.dtype) -> Any:
    """What was loaded, with the tensors whose type was changed in the type they were saved in."""
    if isinstance(saved, Tensor) and isinstance(loaded, Tensor):
        changed = saved.dtype not in (loaded.dtype, had) and saved.shape == loaded.shape
        return saved.to(loaded.device) if changed else loaded
    if isinstance(saved, dict) and isinstance(loaded, dict):
        return type(loaded)(
            {k: _as_saved(saved[k], v, had) if k in saved else v for k, v in loaded.items()}
        )
    lists = isinstance(saved, (list, tuple)) and type(loaded) in (list, tuple)
    if lists and len(saved) == len(loaded):
        pairs = zip(saved, loaded, strict=True)
        return type(loaded)([_as_saved(one, other, had) for one, other in pairs])
    return loaded


def place_state(optimizer: Optimizer) -> None:
    """Move an optimizer's state to the devices of its parameters.

    An optimizer that has stepped, or whose state was loaded, before its model was moved has some
    elsewhere. Counters stay where torch keeps them.
    """
    strangers = (
        tensor.device != parameter.device
        for parameter, values in optimizer.state.items()
        if isinstance(parameter, Tensor) and isinstance(values, dict)
        for key, value in values.items()
        if key != "step"
        for tensor in leaves(value)
        if isinstance(tensor, Tensor)
    )
    if any(strangers):
        load_state(optimizer, optimizer.state_dict())  # torch itself knows what goes where
