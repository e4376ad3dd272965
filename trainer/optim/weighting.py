"""Weighting of micro-batches, so that an update equals that of the whole batch (P4).

The loss of a micro-batch is a mean over its items, so the whole batch's loss is the sum of
``loss × items`` over micro-batches and processes, divided by the sum of items. That sum is known
only at the end of the window, hence two factors. Backward uses ``loss × items ÷ reference``, where
the reference, the nominal items of a window, is fixed for the run. At the end the gradients (summed
over micro-batches and averaged over *N* processes) are multiplied by ``N × reference ÷ total``.
A factor of 1 is skipped, as in every full window of equal micro-batches, and so are both factors if
the window is a single micro-batch, whose mean is that of the whole: an update is then bit-identical
to a plain loop's.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from trainer.distributed.objects import broadcast_object


class LossWeighting:
    """Applies the two factors of a run.

    Args:
        micro_batches: Micro-batches per full window, on each process; may change between windows.
        world_size: The number of processes whose gradients are averaged.
        reference: Nominal items of a micro-batch; None until the first one is seen.
    """

    def __init__(
        self, *, micro_batches: int, world_size: int, reference: float | None = None
    ) -> None:
        self.micro_batches = micro_batches
        self.world_size = world_size
        self.reference = reference

    def refer_to(self, items: float) -> None:
        """Set the reference to the items of rank 0's first micro-batch; collective the first time.

        Call it before the forward pass, which may run collectives on the ranks that have items.
        """
        if self.reference is None:
            self.reference = broadcast_object(items) or 1.0

    def weigh(self, loss: Tensor, items: float) -> Tensor:
        """Return ``loss × items ÷ reference``, by a division that is exact for equal micro-batches.

        Args:
            loss: The mean over the micro-batch.
            items: The number of its items; above 0.
        """
        if self.micro_batches * self.world_size == 1:  # its mean is that of the whole window
            return loss
        assert self.reference is not None
        divisor = self.reference * self.micro_batches / items
        return loss if divisor == 1.0 else loss / divisor

    def rescale_(self, gradients: Iterable[Tensor | None], total: float | Tensor) -> None:
        """Multiply the gradients by ``N × reference ÷ total``, in place.

        Args:
            gradients: The gradients, averaged over the processes; None is skipped.
            total: The window's items over all processes; a device tensor is not read back. The
                gradients of a window without items are zero and remain so.
        """
        if self.micro_batches * self.world_size == 1:
            return
        assert self.reference is not None
        nominal = self.world_size * self.reference * self.micro_batches
        if not isinstance(total, Tensor):
            if total in (0, nominal):
                return
            factor: float | Tensor = nominal / total
        else:
            factor = torch.where(total > 0, nominal / total, 1.0)
        present = [gradient for gradient in gradients if gradient is not None]
        if isinstance(factor, Tensor) and all(g.dtype == torch.float32 for g in present):
            factor = factor.to(torch.float32)  # same rounding; float64 would launch more kernels
        if present:
            torch._foreach_mul_(present, factor)
