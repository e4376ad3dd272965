"""Schedule-free optimizers, which compute gradients at other weights than those to evaluate.

Defazio et al., "The Road Less Scheduled", NeurIPS 2024; their package is ``schedulefree``. Its
optimizers have the methods ``train`` and ``eval``, which put the one or the other weights into the
parameters, in place and up to rounding.
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
    """Return whether an optimizer has other weights for the evaluation."""
    return all(callable(getattr(optimizer, name, None)) for name in ("train", "eval"))


@contextmanager
def evaluation_weights(optimizers: Sequence[AcceleratedOptimizer]) -> Iterator[None]:
    """Put the weights to evaluate into the parameters, and exactly the trained ones back on exit.

    Copies are kept, since going there and back by ``eval`` and ``train`` rounds: how often a run
    validates or saves would change it.

    Optimizers that are there already, as after a fit, stay as they are.

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
