"""Local SGD: processes train independently, and their weights are averaged every few steps."""

from __future__ import annotations

from contextlib import ExitStack
from types import TracebackType

from torch import nn

from trainer.accelerator import Accelerator
from trainer.checks import check_bools, check_counts, check_type


class LocalSGD:
    """A context in which processes average weights every few steps, instead of gradients.

    Use it where communication is slow. See Stich, "Local SGD Converges Fast and Communicates
    Little", ICLR 2019.

    Weights are also averaged at the end of the block. Buffers and optimizer states are not
    averaged. With one process nothing is averaged.

    Example::

        with LocalSGD(accelerator, model, local_sgd_steps=8) as local_sgd:
            for inputs, targets in train_loader:
                with accelerator.accumulate(model):
                    accelerator.backward(torch.nn.functional.cross_entropy(model(inputs), targets))
                    optimizer.step()
                    optimizer.zero_grad()
                    local_sgd.step()

    Args:
        accelerator: The `Accelerator` that prepared the model.
        model: The prepared model.
        local_sgd_steps: The number of `step` calls between two averages.
        enabled: False disables the context.

    Raises:
        ValueError: `local_sgd_steps` is below 1.
        NotImplementedError: The engine shards the model, or a library makes the updates, so that
            processes cannot train independently.
    """

    def __init__(
        self, accelerator: Accelerator, model: nn.Module, local_sgd_steps: int, enabled: bool = True
    ) -> None:
        check_type("accelerator", accelerator, Accelerator)
        check_counts(1, local_sgd_steps=local_sgd_steps)
        check_bools(enabled=enabled)
        engine = accelerator.engine
        if engine.parallel.divides_state or engine.driver is not None:
            raise NotImplementedError(
                "LocalSGD needs the whole model on each process, to train it independently, but "
                f"{accelerator.distributed_type} updates all processes together: train with DDP, "
                "or leave LocalSGD out."
            )
        self.accelerator, self.model = accelerator, model
        self.local_sgd_steps = local_sgd_steps
        self.enabled = enabled and accelerator.use_distributed
        self.num_steps = 0
        self._context = ExitStack()

    def __enter__(self) -> LocalSGD:
        if self.enabled:
            self._context.enter_context(self.accelerator.no_sync(self.model))
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            if self.enabled and kind is None:  # after an error, other processes may not get here
                self._average()
        finally:
            self._context.close()

    def step(self) -> None:
        """Count a step, and average the weights if due; collective in that case."""
        self.num_steps += 1
        if self.enabled and self.num_steps % self.local_sgd_steps == 0:
            self._average()

    def _average(self) -> None:
        weights = [parameter.data for parameter in self.model.parameters()]
        for own, mean in zip(weights, self.accelerator.reduce(weights, "mean"), strict=True):
            own.copy_(mean)
