"""Limits on gradients."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


def validate_limits(max_grad_norm: float | None, max_grad_value: float | None) -> None:
    """Refuse limits that are not positive.

    Raises:
        ValueError: One of them is zero, negative or not a number.
    """
    for name, limit in (("max_grad_norm", max_grad_norm), ("max_grad_value", max_grad_value)):
        if isinstance(limit, bool) or not isinstance(limit, (int, float, type(None))):
            raise TypeError(f"{name} is {limit!r}; it must be a number, or None for no limit.")
        if limit is not None and not limit > 0:
            raise ValueError(f"{name} is {limit}; it must be above 0, or None for no limit.")


def as_list(parameters: Tensor | Iterable[Tensor]) -> list[Tensor]:
    """The tensors, whether one or several are given.

    Raises:
        TypeError: They are something else, such as the model.
    """
    if isinstance(parameters, Tensor):
        return [parameters]
    if not isinstance(parameters, Iterable) or isinstance(parameters, torch.nn.Module):
        raise TypeError(
            f"parameters is a {type(parameters).__name__}; it must be a tensor or several, such as "
            "model.parameters()."
        )
    tensors = list(parameters)
    if strangers := {type(each).__name__ for each in tensors if not isinstance(each, Tensor)}:
        raise TypeError(
            f"parameters holds {', '.join(sorted(strangers))}; it must hold tensors, such as "
            "model.parameters() does."
        )
    return tensors


def clip_(
    parameters: Tensor | Iterable[Tensor],
    *,
    max_norm: float | None = None,
    max_value: float | None = None,
    norm_type: float = 2.0,
) -> Tensor | None:
    """Clip the gradients in place, by value first, then by their common norm.

    Args:
        parameters: Those without a gradient are passed over.
        max_norm: The norm of all gradients as one vector, at most; see Pascanu, Mikolov, Bengio,
            "On the difficulty of training recurrent neural networks", ICML 2013.
        max_value: Each element's magnitude, at most.
        norm_type: The order of the norm.

    Returns:
        The norm before clipping by it; None without `max_norm`.
    """
    parameters = as_list(parameters)
    # Torch refuses to clip the values of no gradient at all.
    if max_value is not None and any(parameter.grad is not None for parameter in parameters):
        torch.nn.utils.clip_grad_value_(parameters, max_value)
    if max_norm is None:
        return None
    return torch.nn.utils.clip_grad_norm_(parameters, max_norm, norm_type)


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Limits on the gradients of some parameters; None is none.

    Attributes:
        max_norm: Of all their gradients as one vector.
        max_value: Of each element.
    """

    max_norm: float | None = None
    max_value: float | None = None


NO_LIMITS = Limits()


def clip_apart_(
    parameters: Sequence[Tensor], apart: Sequence[tuple[Sequence[Tensor], Limits]], rest: Limits
) -> None:
    """Clip in place where some parameters have limits of their own; see `clip_`.

    Args:
        parameters: All of them.
        apart: Some of them, none twice, with the limits that take the place of `rest` for them; of
            the two, one that is None is that of `rest`.
        rest: For the others, whose norm is taken without those that have one of their own.
    """
    own_value = {id(p) for members, own in apart if own.max_value is not None for p in members}
    own_norm = {id(p) for members, own in apart if own.max_norm is not None for p in members}
    # By value first, of all: a norm may be of parameters from both.
    for members, own in apart:
        if own.max_value is not None:
            clip_(members, max_value=own.max_value)
    clip_([p for p in parameters if id(p) not in own_value], max_value=rest.max_value)
    for members, own in apart:
        if own.max_norm is not None:
            clip_(members, max_norm=own.max_norm)
    clip_([p for p in parameters if id(p) not in own_norm], max_norm=rest.max_norm)
