"""Gradients that wait for an update to come when a state is saved, and their return.

Inside a window of micro-batches, or behind a boundary of manual optimisation, they are a process's
own until they are reduced, and so part of each process's file.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import reduce
from operator import add
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from trainer.checkpoint.weights import bare_names
from trainer.errors import CheckpointError


def named_parameters(
    models: Sequence[nn.Module], optimizers: Iterable[Any]
) -> dict[str, Parameter]:
    """Every parameter of the models, then of the optimizers, under a name that is always its.

    Names are ``<model's number>.<name>``, and ``optimizer.<n>`` for the n-th of those that belong
    to no model.
    """
    named: dict[str, Parameter] = {}
    for number, model in enumerate(models):
        own = bare_names(dict(model.named_parameters()))
        named |= {f"{number}.{name}": parameter for name, parameter in own.items()}
    known = set(map(id, named.values()))
    groups = (group for optimizer in optimizers for group in optimizer.param_groups)
    loose = (each for group in groups for each in group["params"] if id(each) not in known)
    unique = {id(parameter): parameter for parameter in loose}.values()
    return named | {f"optimizer.{number}": each for number, each in enumerate(unique)}


def take(named: Mapping[str, Parameter]) -> dict[str, Any]:
    """The gradients that there are, by the names of their parameters, as a tree to be saved."""
    return {
        name: _packed(parameter.grad.detach())
        for name, parameter in named.items()
        if parameter.grad is not None
    }


def given(ranks: Sequence[Mapping[str, Any]], rank: int, world_size: int) -> dict[str, Tensor]:
    """What a process begins with, of what all those that saved have taken.

    As many processes get each its own. Any other number begins with their mean, which is what the
    reduction would have made of it.
    """
    if len(ranks) == world_size:
        return {name: _unpacked(value) for name, value in ranks[rank].items()}
    names = {name: None for each in ranks for name in each}
    return {
        name: reduce(add, [_unpacked(each[name]) for each in ranks if name in each]) / len(ranks)
        for name in names
    }


def check(named: Mapping[str, Parameter], gradients: Mapping[str, Tensor]) -> list[str]:
    """See that gradients fit.

    Returns:
        What will not be put back, each in a sentence.

    Raises:
        CheckpointError: One has another shape than its parameter.
    """
    for name in gradients.keys() & named.keys():
        if gradients[name].shape != named[name].shape:
            raise CheckpointError(
                f"The gradient of {name} has the shape {tuple(gradients[name].shape)}, the "
                f"parameter prepared {tuple(named[name].shape)}."
            )
    lost = sorted(gradients.keys() - named.keys())
    return [f"Gradients of what is not prepared are not loaded: {', '.join(lost)}."] if lost else []


def put(named: Mapping[str, Parameter], gradients: Mapping[str, Tensor]) -> None:
    """Give the parameters these gradients; the others have none."""
    for name, parameter in named.items():
        gradient = gradients.get(name)
        if gradient is None or gradient.is_sparse:
            parameter.grad = None if gradient is None else gradient.to(parameter.device)
            continue
        if parameter.grad is None:  # else DDP may have it in a bucket
            parameter.grad = torch.empty_like(parameter)
        parameter.grad.copy_(gradient)


def _packed(gradient: Tensor) -> Any:
    """A gradient as files hold it: a sparse one, as of embeddings, by its indices and values."""
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
