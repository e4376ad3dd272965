"""The order in which DDP reduces gradients: the layout of its buckets."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from trainer.strategies.zeros import add_zeros


def fix_layout(
    wrapped: DistributedDataParallel,
    order: Sequence[nn.Parameter] | None = None,
    times: Sequence[int] | None = None,
) -> None:
    """Make DDP rebuild its buckets now, with zero gradients; collective.

    DDP does so once, in the order in which gradients first arrive. With three or more processes a
    new layout means a new order of summation: rebuilt during training, a resumed run would sum in
    another order than the run it resumes. A bucket is reduced once its last gradient is ready, so
    the order must be that of backward; otherwise nothing overlaps with it.

    Where DDP must see the graph first, to find unused parameters or because a static graph is not
    known yet, the rebuild is left to its first update; so it is where parameters are updated in
    backward. Existing gradients are kept, and parameter hooks are not called: they may update the
    parameter, as LOMO's do.

    Args:
        wrapped: Without a communication hook, which would count an iteration.
        order: All parameters that it reduces; by default the module's, reversed.
        times: How often backward accumulates into each of them, where a static graph is known; DDP
            learns the graph from this.
    """
    if wrapped.find_unused_parameters or (wrapped.static_graph and times is None):
        return
    ignored = wrapped.parameters_to_ignore
    named = [(n, p) for n, p in wrapped.module.named_parameters() if p.requires_grad]
    trained = order or [parameter for name, parameter in reversed(named) if name not in ignored]
    if any(hasattr(parameter, "_in_backward_optimizers") for parameter in trained):
        return
    held = [(p.grad, p._backward_hooks, p._post_accumulate_grad_hooks) for p in trained]
    values = [None if p.grad is None else p.grad.clone() for p in trained]  # it may be in a bucket
    try:
        for parameter in trained:
            parameter._backward_hooks = parameter._post_accumulate_grad_hooks = {}
        if times is not None:
            _backward_of_zeros(wrapped, trained, times)
            # DDP's own forward pass would do this after the first backward pass.
            wrapped.reducer._delay_all_reduce()  # type: ignore[attr-defined]  # in no stub
            wrapped._static_graph_delay_allreduce_enqueued = True
        _backward_of_zeros(wrapped, trained, times or [1] * len(trained))
        wrapped.reducer._rebuild_buckets()
    finally:
        for parameter, (gradient, hooks, later), value in zip(trained, held, values, strict=True):
            parameter.grad = None if gradient is None or value is None else gradient.copy_(value)
            parameter._backward_hooks = hooks
            parameter._post_accumulate_grad_hooks = later


def _backward_of_zeros(
    wrapped: DistributedDataParallel, parameters: Sequence[nn.Parameter], times: Sequence[int]
) -> None:
    wrapped.reducer.prepare_for_forward()
    wrapped.reducer.prepare_for_backward([])
    for parameter in parameters:
        parameter.grad = None
    add_zeros(wrapped.module, parameters, times)
