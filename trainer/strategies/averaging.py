"""All-reduce gradients explicitly, where no DDP wrapper does it during backward."""

from __future__ import annotations

from collections.abc import Iterable, Set

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from trainer.optim.optimizer import parameters_of
from trainer.strategies.zeros import no_rows


def average_gradients(optimizer: Optimizer, sparse: Set[int] = frozenset()) -> None:
    """Average an optimizer's gradients over the processes; see `average_gradients_of`."""
    average_gradients_of(parameters_of([optimizer]), sparse)


def average_gradients_of(
    parameters: Iterable[nn.Parameter], sparse: Set[int] = frozenset()
) -> None:
    """Average the gradients of parameters over the processes; a collective call.

    A missing gradient counts as zero. A parameter that has no gradient on any process keeps none.
    To know this, the number of processes that have each gradient is all-reduced together with the
    gradients, and read by the host only if this process lacks a gradient.

    Args:
        parameters: The parameters, in the same order on all processes.
        sparse: The ``id`` of each parameter that may have a sparse gradient, see `sparse_weights`.
            For these, one more all-reduce finds out whether the gradient is dense on any process.
    """
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    tables = [parameter for parameter in trained if id(parameter) in sparse]
    layouts = dict(zip(map(id, tables), _layouts(tables), strict=True))
    by_type: dict[torch.dtype, list[nn.Parameter]] = {}
    for parameter in trained:
        layout = layouts.get(id(parameter), _layout(parameter) or _DENSE)
        if layout == _ROWS:
            _average_rows(parameter)
        elif layout == _DENSE:
            by_type.setdefault(parameter.dtype, []).append(parameter)
    for alike in by_type.values():
        _average_alike(alike)


_NO_GRADIENT, _ROWS, _DENSE = range(3)  # layouts of a gradient, reduced over processes with MAX


def _layout(parameter: nn.Parameter) -> int:
    gradient = parameter.grad
    return _NO_GRADIENT if gradient is None else _ROWS if gradient.is_sparse else _DENSE


def _layouts(tables: list[nn.Parameter]) -> list[int]:
    """Return each gradient's layout over all processes: dense if it is dense on any of them."""
    if not tables:
        return []
    layouts = torch.tensor(list(map(_layout, tables)), device=tables[0].device)
    dist.all_reduce(layouts, dist.ReduceOp.MAX)
    return layouts.tolist()


def _average_rows(parameter: nn.Parameter) -> None:
    """All-reduce a gradient that is sparse or missing on every process."""
    total = no_rows(parameter) if parameter.grad is None else parameter.grad.coalesce()
    dist.all_reduce(total)
    parameter.grad = total / dist.get_world_size()


def _average_alike(parameters: list[nn.Parameter]) -> None:
    """Average gradients of one dtype in a single all-reduce; the results are dense."""
    for parameter in parameters:
        if parameter.grad is not None and parameter.grad.is_sparse:  # dense on another process
            parameter.grad = parameter.grad.to_dense()
    present = [parameter.grad is not None for parameter in parameters]
    parts = [
        torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        for parameter in parameters
    ]
    # Created on the host, because creating it on the accelerator would synchronize.
    counts = torch.tensor(present, dtype=parts[0].dtype).to(parts[0].device, non_blocking=True)
    flat = torch.cat([part.reshape(-1) for part in (*parts, counts)])
    dist.all_reduce(flat)
    means = (flat[: -len(present)] / dist.get_world_size()).split([part.numel() for part in parts])
    anywhere = present if all(present) else flat[-len(present) :].tolist()
    for parameter, mean, used in zip(parameters, means, anywhere, strict=True):
        if parameter.grad is not None:
            parameter.grad.copy_(mean.view_as(parameter))
        elif used:
            parameter.grad = mean.view_as(parameter).clone()
