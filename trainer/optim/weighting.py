"""Loss weighting of micro-batches, so that an update equals that of the whole batch.

The loss of a micro-batch is a mean over its items. The whole batch's loss is therefore the sum of
``loss × items`` over micro-batches and ranks, divided by the total number of items. The total is
known only at the end of the gradient accumulation window, so two factors are used. The backward
pass uses ``loss × items ÷ nominal``, where ``nominal`` is the number of items of a full window on
one rank: the items of a full micro-batch (the reference, fixed for the run) times the number of
micro-batches. At the end of the window, the gradients (summed over micro-batches and averaged over
*N* ranks) are multiplied by ``N × nominal ÷ total``.

A factor of 1 is skipped, for example in every full window of equal micro-batches. Both factors are
skipped if the window is a single micro-batch on a single rank. The update is then bit-identical to
that of a plain training loop.
"""

from __future__ import annotations

import reprlib
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from trainer.distributed.objects import broadcast_object


class LossWeighting:
    """Applies the two factors to losses and gradients.

    Args:
        micro_batches: Micro-batches per full window on each rank; may change between windows.
        world_size: The number of ranks whose gradients are averaged.
        reference: The nominal number of items of a micro-batch; None until the first one is seen.
    """

    def __init__(
        self, *, micro_batches: int, world_size: int, reference: float | None = None
    ) -> None:
        self.micro_batches = micro_batches
        self.world_size = world_size
        self.reference = reference

    def state_dict(self) -> dict[str, float | None]:
        """Return the reference, which is fixed for the run."""
        return {"reference": self.reference}

    def load_state_dict(self, state: Mapping[str, float | None]) -> None:
        """Restore the reference."""
        self.reference = state["reference"]

    def refer_to(self, items: float) -> None:
        """Set the reference to the number of items of rank 0's first micro-batch; collective.

        Call it before the forward pass, in which ranks that have items may run other collectives.

        Args:
            items: The items of this rank's micro-batch.
        """
        self.reference = broadcast_object(items) or 1.0

    def weigh(self, loss: Tensor, items: float) -> Tensor:
        """Return ``loss × items ÷ nominal``; see the module's docstring.

        It is computed by one division, which is exact for equal micro-batches.

        Args:
            loss: The mean over the micro-batch, of shape ().
            items: The number of items of the micro-batch; above 0.
        """
        if self.micro_batches * self.world_size == 1:  # the loss is the whole window's mean
            return loss
        assert self.reference is not None
        divisor = self.reference * self.micro_batches / items
        return loss if divisor == 1.0 else loss / divisor

    def factor(self, total: float | Tensor) -> float | Tensor | None:
        """Return ``N × nominal ÷ total``, by which the gradients of a window are multiplied.

        Args:
            total: The window's items over all ranks: a number, or a device tensor of shape (),
                which is not read back.

        Returns:
            The factor, a tensor of shape () if `total` is one; None if it is 1, or if the window
            has no items, since its gradients are zero.
        """
        if self.micro_batches * self.world_size == 1:
            return None
        assert self.reference is not None
        nominal = self.world_size * self.reference * self.micro_batches
        if isinstance(total, Tensor):
            return torch.where(total > 0, nominal / total, 1.0)
        return None if total in (0, nominal) else nominal / total


def scale_(gradients: Iterable[Tensor | None], factor: float | Tensor) -> None:
    """Multiply gradients by a factor, in place; None is skipped."""
    present = [gradient for gradient in gradients if gradient is not None]
    if isinstance(factor, Tensor) and all(g.dtype == torch.float32 for g in present):
        factor = factor.to(torch.float32)  # the same result with fewer kernels than float64
    if present:
        torch._foreach_mul_(present, factor)  # no public function multiplies many at once


def loss_of(outputs: Any) -> Tensor:
    """Check the loss that `training_step` returned, and return it as a tensor of shape ().

    Raises:
        TypeError: The output is neither a tensor nor a dict with a tensor under ``"loss"``.
        ValueError: The loss does not have exactly one element, does not require a gradient, or is
            complex.
    """
    loss = outputs
    if isinstance(outputs, dict):
        if "loss" not in outputs:
            raise TypeError(
                f"training_step returned a dict without 'loss'; its keys are {sorted(outputs)}."
            )
        loss = outputs["loss"]
    if not isinstance(loss, Tensor):
        raise TypeError(
            f"training_step returned {reprlib.repr(loss)} of type {type(loss).__name__} as its "
            "loss; it must return a tensor of one element, a dict with one under 'loss', or None "
            "to skip the batch. (To do backward and step yourself set "
            "automatic_optimization = False.)"
        )
    if loss.numel() != 1:
        raise ValueError(
            f"training_step returned a loss of shape {tuple(loss.shape)}; it must have one "
            "element: the mean over the batch, for example loss.mean()."
        )
    if not loss.requires_grad:
        raise ValueError(
            "training_step returned a loss without a graph: nothing that it was computed from "
            "requires a gradient. Was it detached, taken with .item(), computed under no_grad, or "
            "are all parameters frozen?"
        )
    if loss.is_complex():
        raise ValueError(
            f"training_step returned a loss of {loss.dtype}; it must be a real number, for example "
            "its .abs() or .real."
        )
    return loss if loss.ndim == 0 else loss.reshape(())
