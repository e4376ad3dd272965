"""Prepare a model for the user's own loop (autocast, DDP, compile), and unwrap it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from trainer import environment
from trainer.configuration import DistributedDataParallelKwargs
from trainer.engines import comm_hooks, ddp
from trainer.engines.averaging import average_gradients_of, sparse_weights
from trainer.engines.compile import compile_model, uncompiled
from trainer.engines.ddp import fix_layout
from trainer.names import bare_state_dict, wrapped_child
from trainer.plugins import TorchDynamoPlugin
from trainer.precision import Precision, unwrap_forward
from trainer.state import PartialState
from trainer.tree import own_memory

_HOOK = "_communication"  # an attribute that `prepare_model` sets on the DDP wrapper


def prepare_model(
    model: nn.Module,
    *,
    precision: Precision,
    device: torch.device | None = None,
    ddp_kwargs: DistributedDataParallelKwargs | None = None,
    dynamo_plugin: TorchDynamoPlugin | None = None,
    evaluation_mode: bool = False,
) -> nn.Module:
    """Apply autocast to a model, move it to the device, wrap it in DDP, and compile it.

    DDP is used with several processes, unless the model has no trainable parameters. A model is not
    moved if a device map spreads it over several devices, or if it was loaded quantised.

    Args:
        model: The user's model; changed in place.
        precision: The precision of the model's forward pass.
        device: The device to move the model to; None does not move it.
        ddp_kwargs: Arguments of DDP.
        dynamo_plugin: Arguments of ``torch.compile``.
        evaluation_mode: Whether the model is only evaluated, so that it needs no DDP.

    Returns:
        The model, or its DDP wrapper.

    Raises:
        ValueError: There are several processes and a device map spreads the model over devices; or
            the model is not on the kind of device that the processes use; or torch cannot run the
            communication hook there.
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
) -> comm_hooks.Hook | None:
    """Register the communication hook; return it if its state can be saved and resumed.

    PowerSGD keeps residuals by bucket. So the bucket layout is fixed before the hook is registered,
    and a resumed run has the same layout. With a static graph, the layout is unknown before the
    first update, so the state cannot be resumed. Models without PowerSGD keep the layout that DDP
    finds in their first backward.
    """
    kind = "no" if ddp_kwargs is None else ddp_kwargs.comm_hook
    keeps = kind in comm_hooks.POWER_SGD and not wrapped.static_graph
    if keeps:
        fix_layout(wrapped)  # before the hook is registered: it counts iterations
    hook = comm_hooks.register(wrapped, ddp_kwargs)
    return hook if keeps else None


def communication_of(model: nn.Module) -> comm_hooks.Hook | None:
    """Return the communication hook of a prepared model if its state must be saved; else None."""
    hook: comm_hooks.Hook | None = vars(find_ddp(model) or model).get(_HOOK)
    return hook


def verify_device_map(model: nn.Module) -> bool:
    """Return whether a device map spreads the model, or a part of it, over several devices."""
    return any(len(getattr(part, "hf_device_map", None) or ()) > 1 for part in model.modules())


def find_ddp(model: nn.Module) -> DistributedDataParallel | None:
    """Return the DDP wrapper of a model, without a compile wrapper; None if there is no DDP."""
    model = uncompiled(model)
    return model if isinstance(model, DistributedDataParallel) else None


def unwrap_model(
    model: nn.Module, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True
) -> nn.Module:
    """Return the user's module from inside all wrappers (DDP, ``torch.compile``).

    Args:
        model: The model, prepared or not.
        keep_fp32_wrapper: False restores the module's own ``forward``, without autocast, for good.
        keep_torch_compile: False removes the compiled code from the module, for good.
    """
    while child := wrapped_child(model):
        model = getattr(model, child)
    if not keep_fp32_wrapper:
        unwrap_forward(model)
    if not keep_torch_compile:
        model._compiled_call_impl = None
    return model


def get_state_dict(model: nn.Module, unwrap: bool = True) -> dict[str, Any]:
    """Return a model's state dict, by default with the parameter names of the user's own module.

    Args:
        model: The model, prepared or not.
        unwrap: Whether to remove the prefixes that wrappers add to parameter names. False returns
            ``model.state_dict()``.

    Raises:
        TypeError: `model` is not an ``nn.Module``.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"get_state_dict takes a model; it got {model!r}.")
    return bare_state_dict(model) if unwrap else model.state_dict()


def accumulating(model: nn.Module) -> AbstractContextManager[None]:
    """Return `no_sync` for a model, or a no-op while DDP must learn its ``static_graph`` first."""
    return no_sync(model) if _knows_its_graph(model) else nullcontext()


def _knows_its_graph(model: nn.Module) -> bool:
    """Return False if the model has ``static_graph`` and no backward has reduced gradients yet."""
    wrapped = find_ddp(model)
    if wrapped is None or not wrapped.static_graph:
        return True
    known: bool = wrapped._static_graph_delay_allreduce_enqueued
    return known


def no_sync(model: nn.Module) -> AbstractContextManager[None]:
    """Return a context in which backward does not all-reduce the model's gradients.

    The forward pass must be inside the context too. For a model without DDP, or another wrapper
    with a ``no_sync`` method, the context does nothing.

    Args:
        model: The model as prepared.

    Raises:
        TypeError: `model` is not an ``nn.Module``.
        ValueError: The model has ``static_graph``, and no backward has reduced gradients yet.
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
    """Make backward all-reduce gradients even though the forward passes were under `no_sync`.

    All accumulated gradients are averaged, normally during the backward in the block. With
    ``find_unused_parameters`` or ``static_graph``, DDP would have to know the forward pass, so the
    gradients are averaged when the block ends. For a model without DDP, this does nothing.

    Args:
        model: The model as prepared. The block may contain one backward.
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
        # The next forward must broadcast rank 0's buffers, as after any update.
        wrapped.require_forward_param_sync = True
        wrapped.reducer.prepare_for_backward([])
        try:
            yield
        finally:
            wrapped.require_backward_grad_sync = before
