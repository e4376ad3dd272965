"""Helpers for modules, their submodules and their weights."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn

from trainer.checkpoint.weights import separate_tied
from trainer.configuration import AutocastKwargs
from trainer.engines.compile import compile_regions, is_compiled, is_repeated_blocks
from trainer.engines.model import unwrap_model
from trainer.enums import DistributedType
from trainer.errors import module_logger
from trainer.names import COMPILED, wrapped_child
from trainer.precision import Precision
from trainer.state import AcceleratorState
from trainer.state.group import default_device
from trainer.tree import is_sharded

logger = module_logger(__name__)

compile_regions_deepspeed = compile_regions_fsdp2 = compile_regions  # all of them compile in place


def extract_model_from_parallel(
    model: nn.Module,
    keep_fp32_wrapper: bool = True,
    keep_torch_compile: bool = True,
    recursive: bool = False,
) -> nn.Module:
    """Same as `Accelerator.unwrap_model`; `recursive` also unwraps submodules, in place."""
    model = unwrap_model(model, keep_fp32_wrapper, keep_torch_compile)
    if recursive:
        for part in list(model.modules()):
            for name, child in part.named_children():
                if wrapped_child(child):
                    setattr(part, name, unwrap_model(child, keep_fp32_wrapper, keep_torch_compile))
    return model


def is_compiled_module(module: nn.Module) -> bool:
    """Return whether a module is compiled: by ``torch.compile`` or ``module.compile()``."""
    return is_compiled(module)


def has_compiled_regions(module: nn.Module) -> bool:
    """Return whether a submodule is compiled."""
    return any(is_compiled(part) for part in module.modules() if part is not module)


def has_repeated_blocks(module: nn.Module) -> bool:
    """Return whether a module or submodule is a ``ModuleList`` of blocks of one class."""
    return any(map(is_repeated_blocks, module.modules()))


def is_peft_model(model: nn.Module) -> bool:
    """Return whether a model, prepared or not, is a ``PeftModel``."""
    kinds = {f"{kind.__module__}.{kind.__name__}" for kind in type(unwrap_model(model)).__mro__}
    return "peft.peft_model.PeftModel" in kinds


def model_has_dtensor(model: nn.Module) -> bool:
    """Return whether a parameter is sharded over processes (a ``DTensor``)."""
    return any(map(is_sharded, model.parameters()))


def get_model_tp_size(model: nn.Module) -> int | None:
    """Return the number of processes over which transformers splits a model's layers, or None."""
    size = getattr(model, "tp_size", None)
    if size is None:
        config = getattr(getattr(model, "config", None), "distributed_config", None)
        if isinstance(config, Mapping):
            size = config.get("tp_size")
        else:
            size = getattr(config, "tp_size", None)
    return None if size is None else int(size)


def get_module_children_bottom_up(model: nn.Module, return_fqns: bool = False) -> list[Any]:
    """Return all modules of a model, each after those inside it.

    Args:
        model: The model; it is the last.
        return_fqns: Return pairs of a name and a module.
    """
    ordered: deque[Any] = deque()
    waiting = [("", model)]
    while waiting:
        path, module = waiting.pop()
        ordered.appendleft((path, module) if return_fqns else module)
        waiting += [(f"{path}.{n}".lstrip("."), child) for n, child in module.named_children()]
    return list(ordered)


def recursive_getattr(obj: Any, attr: str) -> Any:
    """Return an attribute of attributes: ``recursive_getattr(model, "encoder.layers")``."""
    return attrgetter(attr)(obj)


def get_pretty_name(obj: Any) -> str:
    """Return the qualified name of a class or function, or of an object's class."""
    named = obj if hasattr(obj, "__qualname__") or hasattr(obj, "__name__") else type(obj)
    return str(getattr(named, "__qualname__", None) or named.__name__)


def clean_state_dict_for_safetensors(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """Return contiguous tensors; of tensors that share memory, only the first."""
    non_tensors = {n: value for n, value in state_dict.items() if not isinstance(value, Tensor)}
    tensors, tied = separate_tied({n: v for n, v in state_dict.items() if n not in non_tensors})
    if tied:
        logger.warning("Left out %s, which share memory with other names.", ", ".join(sorted(tied)))
    return {name: tensor.contiguous() for name, tensor in tensors.items()} | non_tensors


def get_parameters_from_modules(
    modules: Iterable[nn.Module] | str | None, model: nn.Module, device: Any
) -> set[nn.Parameter]:
    """Return the parameters of modules.

    Args:
        modules: The modules, or a regular expression for module names in `model`; matching modules
            are moved to `device`.
        model: The model.
        device: The device.
    """
    if isinstance(modules, str):
        named = model.named_modules()
        modules = [module.to(device) for name, module in named if re.fullmatch(modules, name)]
    return {parameter for module in modules or () for parameter in module.parameters()}


def ensure_weights_retied(
    param_init_fn: Callable[[nn.Module], Any], model: nn.Module, device: Any
) -> Callable[[nn.Module], Any]:
    """Return an initialisation function that ties the weights of a model again.

    Args:
        param_init_fn: Allocates memory for a module on the meta device, which gives it new
            parameters.
        model: The model, whose ``_tied_weights_keys`` (as in transformers) name tied weights.
        device: Not used.
    """
    del device
    names = getattr(model, "_tied_weights_keys", None) or ()
    tied = {id(model.get_parameter(name)) for name in names}
    retied: dict[int, nn.Parameter] = {}

    def initialise(module: nn.Module) -> Any:
        before = {n: id(p) for n, p in module.named_parameters(recurse=False) if id(p) in tied}
        result = param_init_fn(module)
        for name, key in before.items():
            setattr(module, name, retied.setdefault(key, getattr(module, name)))
        return result

    return initialise if tied else param_init_fn


def fsdp2_canonicalize_names(named_params: Mapping[str, Any]) -> dict[str, Any]:
    """Remove the names of checkpointing and compile wrappers from the keys."""
    added = {"_checkpoint_wrapped_module", COMPILED}
    return {
        ".".join(part for part in name.split(".") if part not in added): value
        for name, value in named_params.items()
    }


def get_mixed_precision_context_manager(
    native_amp: bool = False, autocast_kwargs: AutocastKwargs | None = None
) -> Any:
    """Return an autocast context for the precision of the `Accelerator`.

    Args:
        native_amp: Whether mixed precision is in use; False does nothing.
        autocast_kwargs: Arguments of the context.
    """
    state = AcceleratorState()
    mode = state.mixed_precision if native_amp else "no"
    mode = "bf16" if mode == "fp8" else mode
    return Precision(mode, state.device).autocast(autocast_kwargs)


def get_grad_scaler(
    distributed_type: DistributedType | None = None, **kwargs: Any
) -> torch.amp.GradScaler:
    """Return a ``torch.amp.GradScaler`` for the default device, with these arguments."""
    del distributed_type
    return torch.amp.GradScaler(default_device().type, **kwargs)


def get_fsdp2_grad_scaler(**kwargs: Any) -> torch.amp.GradScaler:
    """Same as `get_grad_scaler`."""
    return get_grad_scaler(**kwargs)
