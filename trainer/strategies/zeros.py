"""Gradients of zero, which are sparse where a sparse embedding's are."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn


def sparse_weights(module: nn.Module) -> set[int]:
    """The ids of the weights that sparse embeddings alone have.

    One that is tied to a layer of another kind has dense gradients: the sum of both.
    """
    sparse: set[int] = set()
    dense: set[int] = set()
    for part in module.modules():
        embeds = isinstance(part, (nn.Embedding, nn.EmbeddingBag)) and part.sparse
        (sparse if embeds else dense).update(map(id, part.parameters(recurse=False)))
    return sparse - dense


def zeros_for(module: nn.Module, parameters: Sequence[Tensor]) -> Iterator[Tensor]:
    """A gradient of zero for each of the module's parameters, in the layout of its own."""
    sparse = sparse_weights(module)
    return (no_rows(p) if id(p) in sparse else torch.zeros_like(p) for p in parameters)


def add_zeros(module: nn.Module, parameters: Sequence[Tensor], times: Sequence[int]) -> None:
    """Backward of zero to each of the module's parameters, so often, with whatever hooks it.

    One by one: among leaves autograd keeps no order.
    """
    for parameter, zero, often in zip(
        parameters, zeros_for(module, parameters), times, strict=True
    ):
        for _ in range(often):
            parameter.backward(zero)


def give_nothing(module: nn.Module) -> None:
    """Give trained parameters that have no gradient one of zero: the window had no items."""
    missing = [p for p in module.parameters() if p.requires_grad and p.grad is None]
    for parameter, zero in zip(missing, zeros_for(module, missing), strict=True):
        parameter.grad = zero


def look_up_nothing(table: Tensor) -> Tensor:
    """No row of it, (0, width), through which a sparse gradient without rows comes back."""
    none = torch.empty(0, dtype=torch.int64, device=table.device)
    return nn.functional.embedding(none, table, sparse=True)


def no_rows(weight: Tensor) -> Tensor:
    """The gradient of a sparse embedding, (rows, width), of which no row was used."""
    rows = torch.empty(1, 0, dtype=torch.int64, device=weight.device)
    values = weight.new_empty(0, weight.shape[1])
    return torch.sparse_coo_tensor(rows, values, weight.shape, check_invariants=False)
