"""Gradient clipping."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor
from torch.optim import Optimizer

from trainer.optim.optimizer import parameters_of


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
        max_norm: The maximum norm of all gradients as one vector; see Pascanu, Mikolov, Bengio, "On
            the difficulty of training recurrent neural networks", ICML 2013. None means no limit.
        max_value: The maximum magnitude of each element. None means no limit.
        norm_type: The order p of the norm.

    Returns:
        The total norm before clipping by norm, a tensor of shape (); None without `max_norm`.

    Raises:
        ValueError: A gradient is sparse, and is limited by value, or by norm before torch 2.14.
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
            "Sparse gradients, as of Embedding(sparse=True), cannot be clipped. Clip only the "
            "dense gradients: with a Trainer, put 'max_grad_norm' into the dict of their "
            "optimizer in configure_optimizers; elsewhere pass only their parameters."
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
    "In manual optimisation, clip in training_step: call self.clip_gradients(optimizer, ...)."
)


class Clipper(Protocol):
    """Clips gradients in place, as `trainer.engines.base.Gradients` do."""

    def clip_grad_norm_(self, parameters: Iterable[Tensor], max_norm: float) -> Tensor:
        """Scale the gradients to a total norm of at most `max_norm`."""

    def clip_grad_value_(self, parameters: Iterable[Tensor], max_value: float) -> None:
        """Limit the magnitude of each element."""


@dataclass(frozen=True)
class Clipping:
    """Selects the gradients that a loop clips together: all except those of optimizers with limits.

    Attributes:
        common: The limits of all other parameters. Their total norm excludes optimizers that have a
            `max_norm` of their own.
        own: Optimizers with limits of their own. If one of the limits is None, the common one
            applies.
    """

    common: Limits = NO_LIMITS
    own: Sequence[tuple[Optimizer, Limits]] = ()

    @cached_property
    def clips(self) -> bool:
        """Whether there is any limit."""
        return bool(self.own) or self.common != NO_LIMITS

    def limits_of(self, optimizer: Optimizer) -> Limits:
        """Return the optimizer's own limits, or else the common ones."""
        return next((limits for owner, limits in self.own if owner is optimizer), self.common)

    def clip_(self, clipper: Clipper, parameters: Sequence[Tensor]) -> None:
        """Clip gradients in place.

        The optimizers' parameters are listed each time, since the user may add a parameter group at
        any time.

        Args:
            clipper: Clips the gradients of some parameters.
            parameters: All parameters.
        """
        groups = [(parameters_of([optimizer]), limits) for optimizer, limits in self.own]
        own_value = {id(p) for ps, limits in groups if limits.max_value is not None for p in ps}
        own_norm = {id(p) for ps, limits in groups if limits.max_norm is not None for p in ps}
        # By value first, in all groups: a total norm may span groups with different value limits.
        for members, limits in groups:
            if limits.max_value is not None:
                clipper.clip_grad_value_(members, limits.max_value)
        if self.common.max_value is not None:
            others = [p for p in parameters if id(p) not in own_value]
            clipper.clip_grad_value_(others, self.common.max_value)
        for members, limits in groups:
            if limits.max_norm is not None:
                clipper.clip_grad_norm_(members, limits.max_norm)
        if self.common.max_norm is not None:
            others = [p for p in parameters if id(p) not in own_norm]
            clipper.clip_grad_norm_(others, self.common.max_norm)
