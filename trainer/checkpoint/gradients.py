"""Gradients that a window of micro-batches has gathered when its state is saved, and their return.

They are a process's own until the window ends, and so part of each process's file.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch.nn import Parameter

from trainer.checkpoint.restore import Prepared
from trainer.checkpoint.weights import bare_names
from trainer.errors import CheckpointError


def named_parameters(prepared: Prepared) -> dict[str, Parameter]:
    """Every parameter of the models, then of the optimizers, under a name that is always its.

    Names are ``<model's number>.<name>``, and ``optimizer.<n>`` for the n-th of those that belong
    to no model.
    """
    named: dict[str, Parameter] = {}
    for number, model in enumerate(prepared.models):
        own = bare_names(dict(model.named_parameters()))
        named |= {f"{number}.{name}": parameter for name, parameter in own.items()}
    known = set(map(id, named.values()))
    groups = (group for optimizer in prepared.optimizers for group in optimizer.param_groups)
    loose = (each for group in groups for each in group["params"] if id(each) not in known)
    unique = {id(parameter): parameter for parameter in loose}.values()
    return named | {f"optimizer.{number}": each for number, each in enumerate(unique)}


def take(prepared: Prepared) -> dict[str, torch.Tensor] | None:
    """The gradients that there are by the names of their parameters; None outside a window."""
    if not prepared.window_open:
        return None
    return {
        name: parameter.grad.detach()
        for name, parameter in named_parameters(prepared).items()
        if parameter.grad is not None
    }


def combine(ranks: Sequence[Mapping[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """What each of any number of processes begins with in place of those that saved.

    The end of the window takes the mean over the processes, so this is their mean.
    """
    names = {name: None for rank in ranks for name in rank}
    return {
        name: torch.stack([rank[name] for rank in ranks if name in rank]).sum(0) / len(ranks)
        for name in names
    }


def check(prepared: Prepared, gradients: Mapping[str, torch.Tensor]) -> list[str]:
    """See that gradients fit.

    Returns:
        What will not be put back, each in a sentence.

    Raises:
        CheckpointError: One has another shape than its parameter.
    """
    here = named_parameters(prepared)
    for name in gradients.keys() & here.keys():
        if gradients[name].shape != here[name].shape:
            raise CheckpointError(
                f"The gradient of {name} has the shape {tuple(gradients[name].shape)}, the "
                f"parameter prepared {tuple(here[name].shape)}."
            )
    lost = sorted(gradients.keys() - here.keys())
    return [f"Gradients of what is not prepared are not loaded: {', '.join(lost)}."] if lost else []


def put(prepared: Prepared, gradients: Mapping[str, torch.Tensor]) -> None:
    """Give the parameters these gradients; the others have none."""
    for name, parameter in named_parameters(prepared).items():
        if name not in gradients:
            parameter.grad = None
            continue
        if parameter.grad is None:  # else DDP may have it in a bucket
            parameter.grad = torch.empty_like(parameter)
        parameter.grad.copy_(gradients[name])
