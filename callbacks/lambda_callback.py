"""A callback created from functions."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from callbacks.base import Callback
from trainer.checks import check_choice

# The hooks, which the loop calls with the trainer; the other methods handle checkpoint state.
HOOKS = tuple(
    name
    for name, method in vars(Callback).items()
    if inspect.isfunction(method) and "trainer" in inspect.signature(method).parameters
)


class LambdaCallback(Callback):
    """Call functions at hooks, without a class: ``LambdaCallback(on_train_end=function)``.

    A function takes the arguments of the :class:`Callback` hook of its name: the trainer, the
    module, and any others that the hook has. Checkpoints hold no state of this callback.

    Example::

        def print_metrics(trainer, module):
            print(trainer.current_epoch, dict(trainer.callback_metrics))

        callback = LambdaCallback(on_train_epoch_end=print_metrics)
        trainer = Trainer(max_epochs=10, callbacks=[callback])

    Args:
        **hooks: A function for each hook, by the hook's name.

    Raises:
        ValueError: There is no hook of this name.
    """

    def __init__(self, **hooks: Callable[..., Any]) -> None:
        for name, function in hooks.items():
            check_choice("The hook", name, HOOKS)
            setattr(self, name, function)
