"""Preparing a model for a loop of the user's own, and getting it out again."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from trainer import environment
from trainer.configuration import DistributedDataParallelKwargs
from trainer.plugins import TorchDynamoPlugin
from trainer.precision import Precision, unwrap_forward
from trainer.state import PartialState
from trainer.strategies import communication, ddp
from trainer.strategies.buckets import fix_layout
from trainer.strategies.compile import compile_model, uncompiled
from trainer.strategies.zeros import sparse_weights

_HOOK = "_communication"  # an attribute of the DDP that `prepare_model` makes


def prepare_model(
    model: nn.Module,
    *,
    precision: Precision,
    device: torch.device | None = None,
    ddp_kwargs: DistributedDataParallelKwargs | None = None,
    dynamo_plugin: TorchDynamoPlugin | None = None,
    evaluation_mode: bool = False,
) -> nn.Module:
    """Put a model under autocast, on a device, in DDP among several processes, and compile it.

    A model that trains nothing needs no DDP. One that a device map has spread over devices, or that
    was loaded quantised, stays where it is.

    Args:
        model: The user's; changed in place.
        precision: What its forward pass computes in.
        device: None leaves it where it is.
        ddp_kwargs: Arguments of DDP.
        dynamo_plugin: Arguments of ``torch.compile``.
        evaluation_mode: It is only evaluated: no DDP.

    Returns:
        The model, or the DDP around it.

    Raises:
        ValueError: A device map has spread it and there are several processes, it is not on the
            kind of device that they reduce gradients on, or torch cannot run the communication hook
            there.
    """
    state = PartialState()
    spread = verify_device_map(model)
    bypass = environment.read_flag("ACCELERATE_BYPASS_DEVICE_MAP")
    if spread and state.use_distributed and not bypass:
        raise ValueError(
            f"{type(model).__name__} was loaded with a device map that spreads it over several "
            f"devices (such as device_map='auto'), which cannot be trained by "
            f"{state.num_processes} processes. Start one process, or load it without a device map; "
            "ACCELERATE_BYPASS_DEVICE_MAP=true tries it all the same."
        )
    precision.wrap_forward(uncompiled(model))
    quantised = any(getattr(model, f"is_loaded_in_{bits}bit", False) for bits in (4, 8))
    if device is not None and not spread and not quantised:
        model = model.to(device)
    trains = any(parameter.requires_grad for parameter in model.parameters())
    if state.use_distributed and trains and not evaluation_mode and find_ddp(model) is None:
        model = wrapped = ddp.wrap(model, ddp_kwargs)
        vars(wrapped)[_HOOK] = _register(wrapped, ddp_kwargs)
    compile_model(model, dynamo_plugin)
    return model


def _register(
    wrapped: DistributedDataParallel, ddp_kwargs: DistributedDataParallelKwargs | None
) -> communication.Hook | None:
    """Register the communication hook; return it if what it keeps can be resumed.

    PowerSGD keeps what it leaves out by bucket: the order of gradients there is fixed before, so
    that a resumed run has that of the one that it resumes. Of a static graph none is known before
    its first update. Other models are left to DDP, which finds the order of their backward passes.
    """
    kind = "no" if ddp_kwargs is None else ddp_kwargs.comm_hook
    keeps = kind in communication.POWER_SGD and not wrapped.static_graph
    if keeps:
        fix_layout(wrapped)  # before the hook is there, which counts the updates
    hook = communication.register(wrapped, ddp_kwargs)
    return hook if keeps else None


def communication_of(model: nn.Module) -> communication.Hook | None:
    """The hook whose state a prepared model's averages go on from; None for most."""
    hook: communication.Hook | None = vars(find_ddp(model) or model).get(_HOOK)
    return hook


def verify_device_map(model: nn.Module) -> bool:
    """Whether a device map has spread the model, or a part of it, over several devices."""
    return any(len(getattr(part, "hf_device_map", None) or ()) > 1 for part in model.modules())


def find_ddp(model: nn.Module) -> DistributedDataParallel | None:
    """The DDP that the model is, compiled or not; None for others."""
    model = uncompiled(model)
    return model if isinstance(model, DistributedDataParallel) else None


def unwrap_model(
    model: nn.Module, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True
) -> nn.Module:
    """The user's module, whatever wraps it: its class, and its parameters under their own names.

    Args:
        model: Prepared, compiled or neither.
        keep_fp32_wrapper: False gives it back its own ``forward``, without autocast, for good.
        keep_torch_compile: False stops it from running compiled code, for good, if it does.
    """
    while True:
        model = uncompiled(model)
        if not isinstance(model, (DistributedDataParallel, nn.DataParallel)):
            break
        model = model.module
    if not keep_fp32_wrapper:
        unwrap_forward(model)
    if not keep_torch_compile:
        model._compiled_call_impl = None
    return model


def get_state_dict(model: nn.Module, unwrap: bool = True) -> dict[str, Any]:
    """The weights; under the user's own names with `unwrap`, else under those of the wrappers.

    Raises:
        TypeError: `model` is no module.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"get_state_dict takes a model; it got {model!r}.")
    return (unwrap_model(model) if unwrap else model).state_dict()


def no_sync(model: nn.Module) -> AbstractContextManager[None]:
    """Inside, backward does not average the model's gradients over the processes.

    The forward pass must be inside too. Nothing happens for a model that does not average them.
    """
    # Not DDP alone: whatever reduces gradients by itself has a method of this name.
    own = getattr(find_ddp(model) or model, "no_sync", None)
    return nullcontext() if own is None else own()


@contextmanager
def trigger_sync_in_backward(model: nn.Module) -> Iterator[None]:
    """Inside, backward averages gradients though the forward passes were under `no_sync`.

    All that has been accumulated is averaged. With ``find_unused_parameters`` or ``static_graph``,
    for which DDP must have seen the forward pass, that happens when the block ends. Nothing happens
    for a model that does not average gradients.

    Args:
        model: As it was prepared. One backward may be in the block.
    """
    wrapped = find_ddp(model)
    if wrapped is None:
        yield
    elif wrapped.find_unused_parameters or wrapped.static_graph:
        yield
        ddp.average_gradients_of(wrapped.parameters(), sparse_weights(wrapped))
    else:
        before = wrapped.require_backward_grad_sync
        wrapped.require_backward_grad_sync = True
        # After this update, as after any, the next forward pass gets rank 0's buffers.
        wrapped.require_forward_param_sync = True
        wrapped.reducer.prepare_for_backward([])
        try:
            yield
        finally:
            wrapped.require_backward_grad_sync = before
