"""Gradient clipping."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


def validate_limits(max_grad_norm: float | None, max_grad_value: float | None) -> None:
    """Check that the clipping limits are positive numbers or None.

    Raises:
        ValueError: A limit is zero, negative or NaN.
        TypeError: A limit is not a number.
    """
    for name, limit in (("max_grad_norm", max_grad_norm), ("max_grad_value", max_grad_value)):
        if isinstance(limit, (bool, str)):
            raise TypeError(f"{name} is {limit!r}; it must be a number, or None for no limit.")
        if limit is not None and not limit > 0:
            raise ValueError(f"{name} is {limit}; it must be above 0, or None for no limit.")


def as_list(parameters: Tensor | Iterable[Tensor]) -> list[Tensor]:
    """Return one tensor or several as a list.

    Raises:
        TypeError: The argument is something else, such as the model.
    """
    if isinstance(parameters, Tensor):
        return [parameters]
    if not isinstance(parameters, Iterable) or isinstance(parameters, torch.nn.Module):
        raise TypeError(
            f"parameters is a {type(parameters).__name__}; it must be a tensor or an iterable of "
            "tensors, such as model.parameters()."
        )
    return list(parameters)


def clip_(
    parameters: Tensor | Iterable[Tensor],
    *,
    max_norm: float | None = None,
    max_value: float | None = None,
    norm_type: float = 2.0,
) -> Tensor | None:
    """Clip gradients in place: first each element by value, then all by their total norm.

    Args:
        parameters: The parameters; those without a gradient are skipped.
        max_norm: The maximum norm of all gradients as one vector; see Pascanu, Mikolov, Bengio,
            "On the difficulty of training recurrent neural networks", ICML 2013. None: no limit.
        max_value: The maximum magnitude of each element. None: no limit.
        norm_type: The order p of the norm.

    Returns:
        The total norm before clipping by norm, a tensor of shape (); None without `max_norm`.

    Raises:
        ValueError: A gradient is sparse.
    """
    parameters = as_list(parameters)
    try:
        # `clip_grad_value_` raises if no parameter has a gradient.
        if max_value is not None and any(parameter.grad is not None for parameter in parameters):
            torch.nn.utils.clip_grad_value_(parameters, max_value)
        if max_norm is None:
            return None
        return torch.nn.utils.clip_grad_norm_(parameters, max_norm, norm_type)
    except NotImplementedError as error:
        if not any(p.grad is not None and p.grad.is_sparse for p in parameters):
            raise
        raise ValueError(
            "Sparse gradients, as of Embedding(sparse=True), cannot be clipped. Clip the others "
            "alone: in a Trainer give their optimizer its own 'max_grad_norm' beside it in what "
            "configure_optimizers returns; elsewhere pass only their parameters."
        ) from error


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Gradient clipping limits of some parameters; None means no limit.

    Attributes:
        max_norm: The maximum norm of all their gradients as one vector.
        max_value: The maximum magnitude of each gradient element.
    """

    max_norm: float | None = None
    max_value: float | None = None


NO_LIMITS = Limits()
CLIP_IN_STEP = (
    "In manual optimisation training_step does the clipping: call self.clip_gradients(optimizer, "
    "...) there."
)


class Clipper(Protocol):
    """Clips gradients in place; an engine, see `trainer.engines.base.Engine`."""

    def clip_grad_norm_(self, parameters: Iterable[Tensor], max_norm: float) -> Tensor:
        """Scale the gradients to a total norm of at most `max_norm`."""

    def clip_grad_value_(self, parameters: Iterable[Tensor], max_value: float) -> None:
        """Limit the magnitude of each element."""


def clip_each_(
    clipper: Clipper,
    parameters: Sequence[Tensor],
    groups: Sequence[tuple[Sequence[Tensor], Limits]],
    rest: Limits,
) -> None:
    """Clip gradients in place, with separate limits for some parameters; see `clip_`.

    Args:
        clipper: Clips the gradients of some parameters.
        parameters: All parameters.
        groups: Disjoint groups of parameters with their own limits. For a limit that is None, the
            limit of `rest` applies.
        rest: The limits of all other parameters. Their total norm excludes groups that have a
            `max_norm` of their own.
    """
    own_value = {id(p) for members, limit in groups if limit.max_value is not None for p in members}
    own_norm = {id(p) for members, limit in groups if limit.max_norm is not None for p in members}
    # Clip by value first, in all groups: a total norm may span groups with different value limits.
    for members, limit in groups:
        if limit.max_value is not None:
            clipper.clip_grad_value_(members, limit.max_value)
    if rest.max_value is not None:
        others = [p for p in parameters if id(p) not in own_value]
        clipper.clip_grad_value_(others, rest.max_value)
    for members, limit in groups:
        if limit.max_norm is not None:
            clipper.clip_grad_norm_(members, limit.max_norm)
    if rest.max_norm is not None:
        others = [p for p in parameters if id(p) not in own_norm]
        clipper.clip_grad_norm_(others, rest.max_norm)
