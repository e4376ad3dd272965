"""Call ``configure_optimizers``, check the result and prepare the optimizers of a fit."""

from __future__ import annotations

import re
from functools import partial
from typing import Any

import torch
from torch.optim import Optimizer

from trainer.accelerator import Accelerator
from trainer.distributed.control import on_all
from trainer.module import TrainModule
from trainer.names import bare_names
from trainer.optim.configure import OptimizerEntry, SchedulerEntry, names_of, read_optimizers
from trainer.optim.optimizer import AcceleratedOptimizer, parameters_of
from trainer.strategies.averaging import average_gradients
from trainer.strategies.zeros import sparse_weights

_STRING_AND_NUMBER = re.compile("'(str' and '(float|int)|(float|int)' and 'str)'")
_NO_STRING = (
    "Give a number, for example float(lr): YAML reads 1e-3 as a string, and 1.0e-3 as a number."
)


def prepare_optimizers(
    module: TrainModule, accelerator: Accelerator
) -> tuple[list[AcceleratedOptimizer], list[OptimizerEntry], list[SchedulerEntry]]:
    """Call ``configure_optimizers`` and prepare the optimizers that it returned; collective.

    In manual optimisation on several processes, each optimizer averages its gradients over the
    ranks when it steps.

    Args:
        module: The user's module.
        accelerator: The accelerator.

    Returns:
        The prepared optimizers, the user's optimizers with their options, and the schedulers.

    Raises:
        TypeError: A learning rate is a string, or the hook's result is malformed; see
            `read_optimizers`.
        ValueError: An optimizer has none of the module's parameters, two optimizers share one, a
            scheduler belongs to another optimizer, or an optimizer does not support this mode.
        RuntimeError: The hook failed on another rank.
    """
    entries, schedulers = on_all(lambda: read_optimizers(_configured(module)), "fit")
    optimizers, names = [entry.optimizer for entry in entries], names_of(entries)
    alone = module.automatic_optimization or not accelerator.use_distributed
    own = {id(parameter) for parameter in module.parameters()}
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            if isinstance(group.get("lr"), str):  # torch checks the default only
                raise TypeError(
                    f"configure_optimizers returned a {type(optimizer).__name__} with a group of "
                    f"lr={group['lr']!r}. {_NO_STRING}"
                )
        if isinstance(optimizer, torch.optim.LBFGS) and module.automatic_optimization:
            raise ValueError(
                "configure_optimizers returned LBFGS, which evaluates the loss several times per "
                "update; set automatic_optimization = False and call optimizer.step(closure)."
            )
        if not any(id(p) in own for group in optimizer.param_groups for p in group["params"]):
            raise ValueError(
                f"configure_optimizers returned a {type(optimizer).__name__} that has none of the "
                f"parameters of {type(module).__name__}; pass it self.parameters()."
            )
    _check_attached(schedulers, optimizers)
    if module.automatic_optimization:
        _check_apart(optimizers, names, module)
    else:
        _check_no_limits(entries, names)
    reduce = None if alone else partial(average_gradients, sparse=sparse_weights(module))
    prepared = [
        AcceleratedOptimizer(optimizer, precision=accelerator.precision, reduce=reduce)
        for optimizer in optimizers
    ]
    return prepared, entries, schedulers


def _configured(module: TrainModule) -> Any:
    """Call ``configure_optimizers``, with a clear error if an option is a string, as from YAML.

    Raises:
        TypeError: Torch compared a string option with a number.
    """
    try:
        return module.configure_optimizers()
    except TypeError as error:
        if not _STRING_AND_NUMBER.search(str(error)):
            raise
        raise TypeError(
            f"An option in configure_optimizers of {type(module).__name__} is a string where a "
            f"number is needed ({error}). {_NO_STRING}"
        ) from error


def _check_attached(schedulers: list[SchedulerEntry], optimizers: list[Optimizer]) -> None:
    """Raise if a scheduler belongs to an optimizer that was not returned: it has no effect.

    An optimizer counts as returned if a returned optimizer that is not torch's may wrap it.

    Raises:
        ValueError: There is such a scheduler.
    """
    trained = set(map(id, parameters_of(optimizers)))
    for entry in schedulers:
        scheduled = getattr(entry.scheduler, "optimizer", None)
        if not isinstance(scheduled, Optimizer):
            continue
        known = any(scheduled is optimizer for optimizer in optimizers)
        # Compare parameters, since an optimizer that wraps another may have groups of its own.
        apart = trained.isdisjoint(map(id, parameters_of([scheduled])))
        if apart or not (known or any(map(_may_wrap, optimizers))):
            raise ValueError(
                f"configure_optimizers returned a {type(entry.scheduler).__name__} of a "
                f"{type(scheduled).__name__} that it did not return, whose learning rates have no "
                "effect: create the scheduler with the optimizer that you return."
            )


def _may_wrap(optimizer: Optimizer) -> bool:
    """Return whether an optimizer may wrap another one; torch's own do not."""
    return not type(optimizer).__module__.startswith("torch.optim.")


def _check_no_limits(entries: list[OptimizerEntry], names: list[str]) -> None:
    """Raise for clipping limits in manual optimisation, where the loop does not clip.

    Raises:
        ValueError: An optimizer has limits.
    """
    for entry, name in zip(entries, names, strict=True):
        if entry.max_grad_norm is not None or entry.max_grad_value is not None:
            raise ValueError(
                f"configure_optimizers returned limits on the gradients of {name!r}, but in manual "
                "optimisation training_step does the clipping: call self.clip_gradients(optimizer, "
                "...) there."
            )


def _check_apart(optimizers: list[Optimizer], names: list[str], module: TrainModule) -> None:
    """Raise if two optimizers share a parameter, which each update would change twice.

    Raises:
        ValueError: There is such a parameter.
    """
    owners: dict[int, int] = {}
    for number, optimizer in enumerate(optimizers):
        for parameter in parameters_of([optimizer]):
            other = owners.setdefault(id(parameter), number)
            if other != number:
                named = bare_names(module, module.named_parameters())
                name = next((n for n, p in named if p is parameter), "?")
                raise ValueError(
                    f"The optimizers {names[other]!r} and {names[number]!r} that "
                    f"configure_optimizers returned both have the parameter {name!r}. In "
                    "automatic optimisation there is one loss, and every optimizer steps at every "
                    "update: give each its own parameters. To alternate between losses set "
                    "automatic_optimization = False."
                )
