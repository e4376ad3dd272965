"""Preparing a model for the user's own loop, and unwrapping it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from trainer import environment
from trainer.configuration import DistributedDataParallelKwargs
from trainer.names import bare_state_dict, wrapped_child
from trainer.plugins import TorchDynamoPlugin
from trainer.precision import Precision, unwrap_forward
from trainer.state import PartialState
from trainer.strategies import communication, ddp
from trainer.strategies.averaging import average_gradients_of
from trainer.strategies.buckets import fix_layout
from trainer.strategies.compile import compile_model, uncompiled
from trainer.strategies.zeros import sparse_weights
from trainer.tree import own_memory

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
    """Apply autocast to a model, move it, wrap it in DDP on several processes, and compile it.

    A model without trainable parameters needs no DDP. A model that a device map spreads over
    devices, or that was loaded quantised, is not moved.

    Args:
        model: The user's; changed in place.
        precision: The precision of its forward pass.
        device: None leaves it where it is.
        ddp_kwargs: Arguments of DDP.
        dynamo_plugin: Arguments of ``torch.compile``.
        evaluation_mode: The model is only evaluated and needs no DDP.

    Returns:
        The model, or the DDP around it.

    Raises:
        ValueError: A device map spreads it and there are several processes, it is not on the kind
            of device that they use, or torch cannot run the communication hook there.
    """
    state = PartialState()
    spread = verify_device_map(model)
    bypass = environment.read_flag("ACCELERATE_BYPASS_DEVICE_MAP")
    if spread and state.use_distributed and not bypass:
        raise ValueError(
            f"{type(model).__name__} was loaded with a device map that spreads it over several "
            f"devices (such as device_map='auto'), which cannot be trained by "
            f"{state.num_processes} processes. Start one process, or load it without a device map; "
            "ACCELERATE_BYPASS_DEVICE_MAP=true tries it anyway."
        )
    precision.wrap_forward(uncompiled(model))
    quantised = any(getattr(model, f"is_loaded_in_{bits}bit", False) for bits in (4, 8))
    if device is not None and not spread and not quantised:
        model = model.to(device)
    own_memory(model)
    trains = any(parameter.requires_grad for parameter in model.parameters())
    if state.use_distributed and trains and not evaluation_mode and find_ddp(model) is None:
        model = wrapped = ddp.wrap(model, ddp_kwargs)
        vars(wrapped)[_HOOK] = _register(wrapped, ddp_kwargs)
    compile_model(model, dynamo_plugin)
    return model


def _register(
    wrapped: DistributedDataParallel, ddp_kwargs: DistributedDataParallelKwargs | None
) -> communication.Hook | None:
    """Register the communication hook; return it if its state can be resumed.

    PowerSGD keeps residuals by bucket, so the bucket layout is fixed beforehand and is that of a
    resumed run too. With a static graph the layout is unknown before the first update. Other models
    keep the layout that DDP finds from their backward passes.
    """
    kind = "no" if ddp_kwargs is None else ddp_kwargs.comm_hook
    keeps = kind in communication.POWER_SGD and not wrapped.static_graph
    if keeps:
        fix_layout(wrapped)  # before the hook exists, which counts iterations
    hook = communication.register(wrapped, ddp_kwargs)
    return hook if keeps else None


def communication_of(model: nn.Module) -> communication.Hook | None:
    """Return the communication hook of a prepared model if its state must be saved, or None."""
    hook: communication.Hook | None = vars(find_ddp(model) or model).get(_HOOK)
    return hook


def verify_device_map(model: nn.Module) -> bool:
    """Return whether a device map spreads the model, or a part of it, over several devices."""
    return any(len(getattr(part, "hf_device_map", None) or ()) > 1 for part in model.modules())


def find_ddp(model: nn.Module) -> DistributedDataParallel | None:
    """Return the model as DDP, without a compile wrapper; None if it is not DDP."""
    model = uncompiled(model)
    return model if isinstance(model, DistributedDataParallel) else None


def unwrap_model(
    model: nn.Module, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True
) -> nn.Module:
    """Return the user's module, with its own class and parameter names, from inside all wrappers.

    Args:
        model: Prepared, compiled or neither.
        keep_fp32_wrapper: False permanently restores its own ``forward``, without autocast.
        keep_torch_compile: False permanently removes compiled code from it.
    """
    while child := wrapped_child(model):
        model = getattr(model, child)
    if not keep_fp32_wrapper:
        unwrap_forward(model)
    if not keep_torch_compile:
        model._compiled_call_impl = None
    return model


def get_state_dict(model: nn.Module, unwrap: bool = True) -> dict[str, Any]:
    """Return the weights: under the user's own names with `unwrap`, wherever a wrapper sits.

    Without it they are those of ``model.state_dict()``.

    Raises:
        TypeError: `model` is not an ``nn.Module``.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"get_state_dict takes a model; it got {model!r}.")
    return bare_state_dict(model) if unwrap else model.state_dict()


def accumulating(model: nn.Module) -> AbstractContextManager[None]:
    """Enter `no_sync`, unless DDP with ``static_graph`` must learn the graph first."""
    return no_sync(model) if _knows_its_graph(model) else nullcontext()


def _knows_its_graph(model: nn.Module) -> bool:
    """Return False for ``static_graph`` before the first forward pass that synchronises."""
    wrapped = find_ddp(model)
    if wrapped is None or not wrapped.static_graph:
        return True
    known: bool = wrapped._static_graph_delay_allreduce_enqueued
    return known


def no_sync(model: nn.Module) -> AbstractContextManager[None]:
    """Keep backward from averaging the model's gradients over the processes.

    The forward pass must be inside the block too. It does nothing for a model without DDP or the
    like.

    Raises:
        TypeError: `model` is not an ``nn.Module``.
        ValueError: It has ``static_graph``, and no backward has averaged its gradients yet.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"accumulate and no_sync take models, one by one; they got {model!r}.")
    if not _knows_its_graph(model):
        raise ValueError(
            "With static_graph=True torch learns the graph in the first backward, which must "
            "average the gradients: it cannot be under no_sync. Use accumulate, which begins with "
            "one that does, or leave out static_graph."
        )
    # Other wrappers that reduce gradients have a method of this name too.
    own = getattr(find_ddp(model) or model, "no_sync", None)
    return nullcontext() if own is None else own()


@contextmanager
def trigger_sync_in_backward(model: nn.Module) -> Iterator[None]:
    """Make backward average gradients although the forward passes were under `no_sync`.

    Everything accumulated is averaged: when the block ends with ``find_unused_parameters`` or
    ``static_graph``, for which DDP must have seen the forward pass, else in backward. It does
    nothing for a model without DDP.

    Args:
        model: As prepared. The block may hold one backward.
    """
    wrapped = find_ddp(model)
    if wrapped is None:
        yield
    elif wrapped.find_unused_parameters or wrapped.static_graph:
        yield
        average_gradients_of(wrapped.parameters(), sparse_weights(wrapped))
    else:
        before = wrapped.require_backward_grad_sync
        wrapped.require_backward_grad_sync = True
        # As after any update, the next forward pass must broadcast rank 0's buffers.
        wrapped.require_forward_param_sync = True
        wrapped.reducer.prepare_for_backward([])
        try:
            yield
        finally:
            wrapped.require_backward_grad_sync = before
