"""Schedule-free optimizers, which compute gradients at weights other than the evaluated ones.

Defazio et al., "The Road Less Scheduled", NeurIPS 2024; their package is ``schedulefree``. Its
optimizers have the methods ``train`` and ``eval``, which put the evaluation or the training weights
into the parameters, in place and up to rounding.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

from torch.optim import Optimizer

from trainer.optim.optimizer import AcceleratedOptimizer, parameters_of


def schedule_free(optimizers: Iterable[AcceleratedOptimizer]) -> list[AcceleratedOptimizer]:
    """Return those optimizers that are schedule-free."""
    return [optimizer for optimizer in optimizers if is_schedule_free(optimizer.optimizer)]


def is_schedule_free(optimizer: Optimizer) -> bool:
    """Return whether an optimizer has separate weights for evaluation."""
    return all(callable(getattr(optimizer, name, None)) for name in ("train", "eval"))


@contextmanager
def evaluation_weights(optimizers: Sequence[AcceleratedOptimizer]) -> Iterator[None]:
    """Put the evaluation weights into the parameters, and restore the trained ones exactly on exit.

    The trained weights are restored from copies, since a round trip through ``eval`` and ``train``
    rounds them, and the run would depend on how often it validates or saves.

    Optimizers that already have their evaluation weights in place, for example after a fit, are not
    changed.

    Args:
        optimizers: Schedule-free optimizers.
    """
    optimizers = [
        prepared
        for prepared in optimizers
        if all(group.get("train_mode", True) for group in prepared.param_groups)
    ]
    parameters = parameters_of(optimizers)
    trained = [parameter.detach().clone() for parameter in parameters]
    for optimizer in optimizers:
        optimizer.eval()
    try:
        yield
    finally:
        for optimizer in optimizers:
            optimizer.train()
        for parameter, value in zip(parameters, trained, strict=True):
            parameter.detach().copy_(value)
