"""Fix the layout of DDP's gradient buckets, so that a resumed run sums in the same order."""

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
    """Make DDP rebuild its buckets now, with zero gradients; a collective call.

    By itself, DDP rebuilds its buckets once, after the first backward, in the order in which the
    gradients arrived. With three or more processes, another layout means another order of
    summation. A resumed run would then sum in a different order than the original run, and
    differ in the last bits. The order must still be that of backward: a bucket is all-reduced when
    its last gradient is ready, and with another order the all-reduce would not overlap with
    backward.

    DDP rebuilds its buckets by itself in three cases: to find unused parameters, with a static
    graph that is not known yet, and if parameters are updated in backward. Existing gradients are
    kept. Parameter hooks are not called, because they may update the parameter, as those of LOMO
    do.

    Args:
        wrapped: The model in DDP, without a communication hook (a hook would count an iteration).
        order: All parameters that DDP reduces, in the order of backward; by default the module's
            trained parameters, reversed.
        times: How often backward accumulates into each of these parameters, if a static graph is
            known; DDP learns the graph from this.
    """
    if wrapped.find_unused_parameters or (wrapped.static_graph and times is None):
        return
    ignored = wrapped.parameters_to_ignore
    named = [(n, p) for n, p in wrapped.module.named_parameters() if p.requires_grad]
    trained = order or [parameter for name, parameter in reversed(named) if name not in ignored]
    if any(hasattr(parameter, "_in_backward_optimizers") for parameter in trained):
        return
    held = [(p.grad, p._backward_hooks, p._post_accumulate_grad_hooks) for p in trained]
    values = [None if p.grad is None else p.grad.clone() for p in trained]  # may be in a bucket
    try:
        for parameter in trained:
            parameter._backward_hooks = parameter._post_accumulate_grad_hooks = {}
        if times is not None:
            _backward_of_zeros(wrapped, trained, times)
            # DDP's forward would do this itself, after the first backward.
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
