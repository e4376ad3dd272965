"""Prepare a model for the user's own loop (autocast, DDP, compile), compare it, and unwrap it."""

from __future__ import annotations

import hashlib
from collections import Counter

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from trainer import environment
from trainer.configuration import TorchDynamoPlugin
from trainer.distributed.guards import check_collective
from trainer.distributed.objects import all_gather_object
from trainer.engines.base import Engine
from trainer.engines.compile import compile_model, uncompiled
from trainer.names import hooks_of, unwrapped
from trainer.precision import Precision, unwrap_forward
from trainer.state import PartialState


def prepare_model(
    model: nn.Module,
    engine: Engine,
    *,
    precision: Precision,
    device: torch.device | None = None,
    dynamo_plugin: TorchDynamoPlugin | None = None,
    evaluation_mode: bool = False,
) -> nn.Module:
    """Convert a model to a mixed precision, move it to the device, wrap it, and compile it.

    A model is not moved if it was loaded quantised, or if hooks of `trainer.big_models` or of
    accelerate bring it to its devices.

    Args:
        model: The user's model; changed in place.
        engine: Wraps it, or leaves it as it is.
        precision: The precision of the model's forward pass.
        device: The device to move the model to; None does not move it.
        dynamo_plugin: Arguments of ``torch.compile``.
        evaluation_mode: Whether the model is only evaluated: nothing is reduced.

    Returns:
        The model, or its wrapper.

    Raises:
        ValueError: There are several processes and a device map spreads the model over devices, or
            hooks keep its weights elsewhere, or `trainer.prepare_pippy` put its layers on
            different processes; or the model is not on the kind of device that the processes use;
            or torch cannot run the communication hook there; or see `check_same_model`.
    """
    state = PartialState()
    hooked = _has_device_hooks(model)
    offloaded = hooked and any(parameter.is_meta for parameter in model.parameters())
    spread = verify_device_map(model)
    bypass = environment.read_flag("ACCELERATE_BYPASS_DEVICE_MAP")
    if (spread or offloaded) and state.use_distributed and not bypass:
        raise ValueError(
            f"{type(model).__name__} was loaded with a device map that spreads it over several "
            "devices (such as device_map='auto') or keeps weights on the CPU or the disk, which "
            f"cannot be trained by {state.num_processes} processes. Start one process, or load it "
            "without a device map; ACCELERATE_BYPASS_DEVICE_MAP=true tries it anyway."
        )
    if state.use_distributed and hasattr(model, "hf_split_points"):
        raise ValueError(
            f"{type(model).__name__} is a pipeline (prepare_pippy), whose layers are already "
            "divided over the processes: use it without preparing it."
        )
    precision.convert(model)
    precision.wrap_forward(uncompiled(model))
    quantised = any(getattr(model, f"is_loaded_in_{bits}bit", False) for bits in (4, 8))
    if engine.parallel.forward_is_collective or not evaluation_mode:
        check_same_model(model, engine)
    model = engine.prepare_module(
        model,
        device=None if spread or hooked or quantised else device,
        evaluation_mode=evaluation_mode,
    )
    compile_model(model, dynamo_plugin)
    return model


def check_same_model(model: nn.Module, engine: Engine) -> None:
    """Check that all processes have the same parameters and buffers; collective.

    Otherwise they would hang where weights are sharded or sent. Devices may differ, including the
    meta device.

    Raises:
        ValueError: Names, shapes, dtypes, what is tied or what is trained differ; raised on all
            processes, with the first difference.
    """
    if PartialState().num_processes == 1 or engine.parallel.is_model_parallel:
        return
    arguments = engine.options.ddp_kwargs
    description = _described(model, buffers=arguments is None or arguments.broadcast_buffers)
    digest = hashlib.blake2b(repr(description).encode(), digest_size=8).digest()
    digests = check_collective("prepare a model", int.from_bytes(digest, "little", signed=True))
    if len(set(digests)) == 1:
        return
    everybody = all_gather_object(description)
    usual = digests.index(Counter(digests).most_common(1)[0][0])
    other = next(rank for rank, of_rank in enumerate(digests) if of_rank != digests[usual])
    usual_model, other_model = everybody[usual], everybody[other]
    names = [
        name for name in usual_model | other_model if usual_model.get(name) != other_model.get(name)
    ]
    if names:
        difference = f"{names[0]} is {other_model.get(names[0], 'missing')} on rank {other}, but "
        difference += f"{usual_model.get(names[0], 'missing')} on rank {usual}"
    else:
        pairs = zip(usual_model, other_model, strict=True)
        first = next(name for name, same in pairs if name != same)
        difference = f"{first} has a different position on rank {other} than on rank {usual}"
    raise ValueError(
        f"{type(model).__name__} differs between the processes: {difference}. Build the same model "
        "on all of them, with the same arguments; only where its weights are may differ."
    )


def _described(model: nn.Module, *, buffers: bool) -> dict[str, str]:
    """Return what all processes must have alike, by the name of each parameter and buffer."""
    described: dict[str, str] = {}
    first: dict[int, str] = {}  # the first name of each tensor
    ignored = getattr(model, "_ddp_params_and_buffers_to_ignore", ())  # torch's way to ask for it
    for tensors in (model.named_parameters, model.named_buffers)[: 1 + buffers]:
        for name, tensor in tensors(remove_duplicate=False):
            if name in ignored:
                continue
            if (tied := first.setdefault(id(tensor), name)) != name:
                described[name] = f"tied to {tied}"
                continue
            shape = "lazy" if is_lazy(tensor) else tuple(getattr(tensor, "ds_shape", tensor.shape))
            kind = "a trained" if tensor.requires_grad else "an untrained"
            described[name] = f"{kind} tensor of shape {shape} and dtype {tensor.dtype}"
    return described


def verify_device_map(model: nn.Module) -> bool:
    """Return whether a device map spreads the model, or a part of it, over several devices."""
    return any(len(getattr(part, "hf_device_map", None) or ()) > 1 for part in model.modules())


def _has_device_hooks(model: nn.Module) -> bool:
    """Return whether hooks, of accelerate's protocol, bring a part of the model to its device."""
    hooks = (hook for part in model.modules() for hook in hooks_of(part))
    return any(hasattr(hook, "execution_device") for hook in hooks)


def unwrap_model(
    model: nn.Module, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True
) -> nn.Module:
    """Return the user's module from inside all wrappers (DDP, ``torch.compile``).

    Args:
        model: The model, prepared or not.
        keep_fp32_wrapper: False restores the module's own ``forward``, without autocast, for good.
        keep_torch_compile: False removes the compiled code from the module, for good.
    """
    model = unwrapped(model)
    if not keep_fp32_wrapper:
        unwrap_forward(model)
    if not keep_torch_compile:
        model._compiled_call_impl = None
    return model
