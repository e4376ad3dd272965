"""How much each micro-batch counts, so that an update is that of the whole batch (P4).

The loss of a micro-batch is a mean over its items, so the whole batch's is the sum of
``loss × items`` over micro-batches and processes, divided by the sum of items. That sum is known
only at the end of the window, hence two factors. Backward uses ``loss × items ÷ reference``, the
reference being fixed for the run: nominal items of a window. At the end the gradients (summed over
micro-batches and averaged over *N* processes) are multiplied by ``N × reference ÷ total``. Both
are skipped where they are 1, which is every full window of equal micro-batches, and where a window
is a single micro-batch, whose mean is that of the whole: an update is then a plain loop's to the
last bit.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from trainer.distributed.collectives import broadcast_object


class LossWeighting:
    """The two factors for one run.

    Args:
        micro_batches: Micro-batches of a full window, on each process; may change between windows.
        world_size: Processes whose gradients are averaged.
        reference: Nominal items of one micro-batch; None until the first one is seen.
    """

    def __init__(
        self, *, micro_batches: int, world_size: int, reference: float | None = None
    ) -> None:
        self.micro_batches = micro_batches
        self.world_size = world_size
        self.reference = reference

    def refer_to(self, items: float) -> None:
        """Take the items of rank 0's first micro-batch for the nominal ones; collective, then.

        Before the forward pass, which for those who have items may be a collective by itself.
        """
        if self.reference is None:
            self.reference = broadcast_object(items) or 1.0

    def weigh(self, loss: Tensor, items: float) -> Tensor:
        """``loss × items ÷ reference``, as a division that is exact for equal micro-batches.

        Args:
            loss: The mean over the micro-batch.
            items: How many that was; above 0.
        """
        if self.micro_batches * self.world_size == 1:  # its mean is that of the whole window
            return loss
        assert self.reference is not None
        divisor = self.reference * self.micro_batches / items
        return loss if divisor == 1.0 else loss / divisor

    def rescale_(self, gradients: Iterable[Tensor | None], total: float | Tensor) -> None:
        """Multiply the gradients by ``N × reference ÷ total``, in place.

        Args:
            gradients: Averaged over the processes; None is passed over.
            total: The window's items over all processes; as a device tensor it is not read. A
                window without items has gradients of zero, and keeps them.
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
            factor = factor.to(torch.float32)  # as it is rounded anyway: else a kernel for each
        if present:
            torch._foreach_mul_(present, factor)
