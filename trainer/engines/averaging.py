"""Average gradients over the processes where no wrapper does it during backward.

Also makes zero gradients with the layout (dense or sparse) of each parameter's real gradient.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence, Set

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from trainer.distributed.guards import read_back
from trainer.distributed.transport import all_reduce
from trainer.optim.optimizer import parameters_of


def average_gradients(optimizer: Optimizer, sparse: Set[int] = frozenset()) -> None:
    """Average an optimizer's gradients over the processes; see `average_gradients_of`."""
    average_gradients_of(parameters_of([optimizer]), sparse)


def average_gradients_of(
    parameters: Iterable[nn.Parameter],
    sparse: Set[int] = frozenset(),
    group: dist.ProcessGroup | None = None,
) -> None:
    """Average the gradients of parameters over the processes; a collective call.

    A missing gradient counts as zero. A parameter that has no gradient on any process keeps none.
    To know this, the number of processes that have each gradient is all-reduced together with the
    gradients, and read by the host only if this process lacks a gradient.

    Args:
        parameters: The parameters, in the same order on all processes.
        sparse: The ``id`` of each parameter that may have a sparse gradient, see `sparse_weights`.
            For these, one more all-reduce finds out whether the gradient is dense on any process.
        group: The processes; None means all.
    """
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    tables = [parameter for parameter in trained if id(parameter) in sparse]
    layouts = dict(zip(map(id, tables), _layouts(tables, group), strict=True))
    by_type: dict[torch.dtype, list[nn.Parameter]] = {}
    for parameter in trained:
        layout = layouts.get(id(parameter), _layout(parameter) or _DENSE)
        if layout == _ROWS:
            _average_rows(parameter, group)
        elif layout == _DENSE:
            by_type.setdefault(parameter.dtype, []).append(parameter)
    for alike in by_type.values():
        _average_same_layout(alike, group)


_NO_GRADIENT, _ROWS, _DENSE = range(3)  # layouts of a gradient, reduced over processes with MAX


def _layout(parameter: nn.Parameter) -> int:
    gradient = parameter.grad
    return _NO_GRADIENT if gradient is None else _ROWS if gradient.is_sparse else _DENSE


def _layouts(tables: list[nn.Parameter], group: dist.ProcessGroup | None) -> list[int]:
    """Return each gradient's layout over all processes: dense if it is dense on any of them."""
    if not tables:
        return []
    layouts = torch.tensor(list(map(_layout, tables)), device=tables[0].device)
    all_reduce(layouts, dist.ReduceOp.MAX, group)
    return read_back(layouts).tolist()


def _average_rows(parameter: nn.Parameter, group: dist.ProcessGroup | None) -> None:
    """All-reduce a gradient that is sparse or missing on every process."""
    total = no_rows(parameter) if parameter.grad is None else parameter.grad.coalesce()
    all_reduce(total, group=group)
    parameter.grad = total / dist.get_world_size(group)


def _average_same_layout(parameters: list[nn.Parameter], group: dist.ProcessGroup | None) -> None:
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
    all_reduce(flat, group=group)
    means = (flat[: -len(present)] / dist.get_world_size(group)).split(
        [part.numel() for part in parts]
    )
    anywhere = present if all(present) else read_back(flat[-len(present) :]).tolist()
    for parameter, mean, used in zip(parameters, means, anywhere, strict=True):
        if parameter.grad is not None:
            parameter.grad.copy_(mean.view_as(parameter))
        elif used:
            parameter.grad = mean.view_as(parameter).clone()


def sparse_weights(module: nn.Module) -> set[int]:
    """Return the ``id`` of each weight that only sparse embeddings use.

    A weight that is tied to another kind of layer gets a dense gradient, the sum of both.
    """
    sparse, dense = _by_kind(module)
    return sparse - dense


def tied_sparse_weights(module: nn.Module) -> list[nn.Parameter]:
    """Return the weights that sparse embeddings share with other layers."""
    sparse, dense = _by_kind(module)
    return [parameter for parameter in module.parameters() if id(parameter) in sparse & dense]


def _by_kind(module: nn.Module) -> tuple[set[int], set[int]]:
    """Return the ids of the weights of sparse embeddings, and those of other modules' weights."""
    sparse: set[int] = set()
    dense: set[int] = set()
    for part in module.modules():
        embeds = isinstance(part, (nn.Embedding, nn.EmbeddingBag)) and part.sparse
        (sparse if embeds else dense).update(map(id, part.parameters(recurse=False)))
    return sparse, dense


def zeros_for(module: nn.Module, parameters: Sequence[Tensor]) -> Iterator[Tensor]:
    """Yield a zero gradient for each parameter, sparse if the parameter's own gradient is."""
    sparse = sparse_weights(module)
    return (no_rows(p) if id(p) in sparse else torch.zeros_like(p) for p in parameters)


def add_zeros(module: nn.Module, parameters: Sequence[Tensor], times: Sequence[int]) -> None:
    """Accumulate zeros into parameters through autograd, so that DDP's hooks run.

    Each parameter has its own call of backward, because the order of the leaves within one call is
    not defined.

    Args:
        module: The module, for the layout of the gradients.
        parameters: The parameters, in the order in which to accumulate.
        times: How often to accumulate into each parameter.
    """
    for parameter, zero, often in zip(
        parameters, zeros_for(module, parameters), times, strict=True
    ):
        for _ in range(often):
            parameter.backward(zero)


def give_nothing(module: nn.Module) -> None:
    """Give trained parameters without a gradient a zero one, for a window without items."""
    missing = [p for p in module.parameters() if p.requires_grad and p.grad is None]
    for parameter, zero in zip(missing, zeros_for(module, missing), strict=True):
        parameter.grad = zero


def look_up_nothing(table: Tensor) -> Tensor:
    """Look up zero rows, shape (0, width): backward then gives a sparse gradient without rows."""
    none = torch.empty(0, dtype=torch.int64, device=table.device)
    return nn.functional.embedding(none, table, sparse=True)


def no_rows(weight: Tensor) -> Tensor:
    """Return an empty sparse gradient, shape (rows, width), of an embedding that was not used."""
    rows = torch.empty(1, 0, dtype=torch.int64, device=weight.device)
    values = weight.new_empty(0, weight.shape[1])
    return torch.sparse_coo_tensor(rows, values, weight.shape, check_invariants=False)
