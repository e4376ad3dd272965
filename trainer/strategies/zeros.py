"""Zero gradients with the layout (dense or sparse) of each parameter's real gradient."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn


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
