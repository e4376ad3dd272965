"""Save and load an optimizer's state: bare parameter names, saved precision, right device."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from trainer.names import WRAPPED_AS, bare_names
from trainer.tree import leaves


def state_of(optimizer: Any, modules: Iterable[nn.Module]) -> Any:
    """Return ``optimizer.state_dict()``, with the module's own parameter names.

    If the optimizer stores parameter names, prefixes of wrappers (DDP, compile) are removed.

    Args:
        optimizer: The optimizer; for any other object, only its ``state_dict`` is called.
        modules: The unwrapped modules that have the parameters.
    """
    state = optimizer.state_dict()
    if not (isinstance(optimizer, Optimizer) and "param_names" in optimizer.param_groups[0]):
        return state
    named = chain.from_iterable(bare_names(module, module.named_parameters()) for module in modules)
    names = {id(parameter): name for name, parameter in named}
    for group, saved in zip(optimizer.param_groups, state["param_groups"], strict=True):
        pairs = zip(group["params"], saved["param_names"], strict=True)
        saved["param_names"] = [_bare(name, names.get(id(p))) for p, name in pairs]
    return state


def _bare(name: str, bare: str | None) -> str:
    """Return the module's name `bare`, unless the user named the parameter differently."""
    ours, saved = (
        [part for part in path.split(".") if part not in WRAPPED_AS] for path in (bare or "", name)
    )
    return bare if bare is not None and ours == saved else name


def load_state(
    optimizer: Any, saved: Mapping[str, Any], dtypes: Mapping[int, torch.dtype] | None = None
) -> None:
    """Call ``optimizer.load_state_dict(saved)``, but keep the dtypes of the saved state.

    Torch casts all state except the step count to the dtype of its parameter. Many optimizers keep
    float32 state for bfloat16 weights, and ``NAdam`` and ``ASGD`` keep float32 products and rates.
    Each resume would round these. Here, state is cast to its parameter's dtype only if it had that
    dtype when it was saved. State moves to its parameter's device, as in torch.

    Args:
        optimizer: The optimizer; for any other object, only its ``load_state_dict`` is called.
        saved: The state dict.
        dtypes: The dtypes of the parameters when the state was saved, by ``id``. A missing
            parameter had its present dtype.
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
    """Return the loaded state, in which tensors that torch has cast have their saved dtype."""
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
        return type(loaded)([_as_saved(value, other, had) for value, other in pairs])
    return loaded


def keeps_on_host(key: str, group: Mapping[str, Any]) -> bool:
    """Return whether torch keeps a state (the step count) on the CPU for any parameter device.

    Args:
        key: The name of the state.
        group: The parameter group.
    """
    return key == "step" and not (group.get("fused") or group.get("capturable"))


def place_state(optimizer: Optimizer) -> None:
    """Move an optimizer's state to the devices of its parameters.

    It may be on another device if the optimizer stepped, or its state was loaded, before the model
    was moved. Step counts stay on the CPU if torch keeps them there.
    """
    misplaced = (
        tensor.device != parameter.device
        for parameter, values in optimizer.state.items()
        if isinstance(parameter, Tensor) and isinstance(values, dict)
        for key, value in values.items()
        if key != "step"
        for tensor in leaves(value)
        if isinstance(tensor, Tensor)
    )
    if any(misplaced):
        load_state(optimizer, optimizer.state_dict())  # torch moves state to the right device
