"""Save and restore gradients that have been computed but not yet applied by an optimizer step.

Such gradients exist inside a gradient accumulation window, and in manual optimisation before the
user's step. Before the all-reduce the gradients differ between processes, so each rank's file holds
its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import reduce
from operator import add
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from trainer.errors import CheckpointError
from trainer.names import bare_names


def named_parameters(
    models: Sequence[nn.Module], optimizers: Iterable[Any]
) -> dict[str, Parameter]:
    """Return the parameters of the models, then of the optimizers, under stable names.

    Names are ``<model's number>.<name>``, and ``optimizer.<n>`` for the n-th parameter that belongs
    to no model.
    """
    named: dict[str, Parameter] = {}
    for number, model in enumerate(models):
        parameters = bare_names(model, model.named_parameters())
        named |= {f"{number}.{name}": parameter for name, parameter in parameters}
    of_models = set(map(id, named.values()))
    groups = (group for optimizer in optimizers for group in optimizer.param_groups)
    loose = (p for group in groups for p in group["params"] if id(p) not in of_models)
    unique = {id(parameter): parameter for parameter in loose}.values()
    return named | {f"optimizer.{number}": parameter for number, parameter in enumerate(unique)}


def collect(named: Mapping[str, Parameter]) -> dict[str, Any]:
    """Return the gradients that exist (``.grad`` is not None) by parameter name, for saving."""
    return {
        name: _packed(parameter.grad.detach())
        for name, parameter in named.items()
        if parameter.grad is not None
    }


def for_rank(ranks: Sequence[Mapping[str, Any]], rank: int, world_size: int) -> dict[str, Tensor]:
    """Return the gradients that this rank restores, from the gradients of all ranks that saved.

    With the same number of processes, each rank gets its own. With a different number, each rank
    gets the mean over the saved ranks, as the all-reduce would have computed it.
    """
    if len(ranks) == world_size:
        return {name: _unpacked(value) for name, value in ranks[rank].items()}
    names = {name: None for gradients in ranks for name in gradients}
    return {
        name: reduce(add, [_unpacked(gradients[name]) for gradients in ranks if name in gradients])
        / len(ranks)
        for name in names
    }


def check(named: Mapping[str, Parameter], gradients: Mapping[str, Tensor]) -> list[str]:
    """Check that the gradients fit the parameters.

    Returns:
        Warnings about gradients that will not be restored.

    Raises:
        CheckpointError: A gradient and its parameter differ in shape.
    """
    for name in gradients.keys() & named.keys():
        if gradients[name].shape != named[name].shape:
            raise CheckpointError(
                f"The gradient of {name} has the shape {tuple(gradients[name].shape)}, but the "
                f"prepared parameter has {tuple(named[name].shape)}."
            )
    lost = sorted(gradients.keys() - named.keys())
    return [f"Gradients of unprepared parameters are dropped: {', '.join(lost)}."] if lost else []


def put(named: Mapping[str, Parameter], gradients: Mapping[str, Tensor]) -> None:
    """Set the parameters' ``.grad``, to None where a parameter has no saved gradient."""
    for name, parameter in named.items():
        gradient = gradients.get(name)
        if gradient is None or getattr(gradient, "is_sparse", False):
            parameter.grad = None if gradient is None else gradient.to(parameter.device)
            continue
        if parameter.grad is None:  # an existing .grad is kept: it may be a view of a DDP bucket
            parameter.grad = torch.empty_like(parameter)
        parameter.grad.copy_(gradient)


def _packed(gradient: Tensor) -> Any:
    """Return a gradient in savable form: a sparse one as its indices and values."""
    if not gradient.is_sparse:
        return gradient
    return [gradient._indices(), gradient._values(), gradient.shape, gradient.is_coalesced()]


def _unpacked(value: Any) -> Tensor:
    if isinstance(value, Tensor):
        return value
    indices, values, shape, coalesced = value
    return torch.sparse_coo_tensor(
        indices, values, shape, is_coalesced=coalesced, check_invariants=True
    )
