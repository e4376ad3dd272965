"""Lockstep: a rank without a batch runs a dummy batch, so that no collective waits for it.

A forward pass may be collective: with sharded parameters, `torch.nn.SyncBatchNorm`, or a custom
layer. So all ranks run every micro-batch. On a rank without a batch, or whose batch has no items,
the loss is multiplied by 0, so other ranks receive nothing from it in backward. Its gradients are
replaced by zeros rather than multiplied, since infinity × 0 is NaN.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm


def has_sync_batch_norm(module: nn.Module) -> bool:
    """Return whether a forward pass in train mode is collective because of its layers."""
    return any(isinstance(part, nn.SyncBatchNorm) for part in module.modules())


def synchronize_batch_norm(module: nn.Module) -> None:
    """Convert a module's batch normalisation to `SyncBatchNorm`, in place."""
    for part in list(module.modules()):
        for name, child in list(part.named_children()):
            if isinstance(child, _BatchNorm) and not isinstance(child, nn.SyncBatchNorm):
                setattr(part, name, nn.SyncBatchNorm.convert_sync_batchnorm(child))


@contextmanager
def zero_gradients(parameters: Iterable[Tensor]) -> Iterator[None]:
    """Make the gradients of parameters zero in backward passes inside the block."""
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    handles = [parameter.register_hook(torch.zeros_like) for parameter in trained]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def isolated_batch_norm(module: nn.Module, *, counts: bool) -> Iterator[None]:
    """Keep a dummy batch out of what `SyncBatchNorm` exchanges in forward and backward.

    Args:
        module: The module.
        counts: Whether the batch counts in the statistics, as a real batch without items does.
    """
    norms = [part for part in module.modules() if isinstance(part, nn.SyncBatchNorm)]
    if not norms:
        yield
        return
    with ExitStack() as stack:
        stack.enter_context(torch.compiler.set_stance("force_eager"))  # compiled: `forward` as was
        for norm in norms:
            forward = partial(_without_gradient if counts else _without_count, norm, norm.forward)
            replaced = vars(norm).get("forward")
            vars(norm)["forward"] = forward
            stack.callback(_put_back, norm, replaced)
        yield


def _put_back(norm: nn.Module, forward: Any) -> None:
    if forward is None:
        del vars(norm)["forward"]
    else:
        vars(norm)["forward"] = forward


def _without_gradient(norm: nn.Module, forward: Any, batch: Tensor) -> Tensor:
    """Run the layer; its backward exchanges zeros, since a loss over no items is NaN."""
    output: Tensor = forward(batch)
    if norm.training and output.requires_grad:
        output.register_hook(torch.zeros_like)
    return output


def _without_count(norm: nn.SyncBatchNorm, forward: Any, batch: Tensor) -> Tensor:
    """Take part in the layer's collectives with a count of 0."""
    if not norm.training:
        unchanged: Tensor = forward(batch)
        return unchanged
    nothing = forward(batch[:0])
    # Not by its own statistics, of which there are none with one value a channel.
    mean, var = norm.running_mean, norm.running_var
    if mean is None or var is None:
        mean, var = batch.new_zeros(batch.shape[1]), batch.new_ones(batch.shape[1])
    output = nn.functional.batch_norm(batch, mean, var, norm.weight, norm.bias, eps=norm.eps)
    return torch.cat([nothing, output])
