"""Add and scale parameter groups after the optimizer and its schedulers were created."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from trainer.errors import CheckpointError
from trainer.names import bare_names

_RATES = ("lr", "initial_lr", "max_lr", "min_lr")  # keys of a group; schedulers add all but "lr"
_RATES_OF_GROUPS = ("base_lrs", "max_lrs", "min_lrs", "_last_lr")  # scheduler attributes, per group
_LISTS_OF_GROUPS = (*_RATES_OF_GROUPS, "lr_lambdas", "base_momentums", "max_momentums")


def add_group(
    optimizer: Optimizer,
    parameters: Mapping[str, nn.Parameter],
    *,
    ratio: float,
    schedulers: Iterable[Any] = (),
) -> None:
    """Add a parameter group with the options of the first group and a scaled learning rate.

    The group is added to the optimizer's torch schedulers, so that its learning rate is that of the
    first group times `ratio`.

    Args:
        optimizer: The user's optimizer, prepared or not.
        parameters: The parameters by name; the names are kept if the optimizer stores names.
        ratio: The learning rate relative to the first group's.
        schedulers: All schedulers; those of other optimizers are ignored.
    """
    first, number = optimizer.param_groups[0], len(optimizer.param_groups)
    group = {key: value for key, value in first.items() if key not in ("params", "param_names")}
    group.pop("name", None)
    group.update({key: group[key] * ratio for key in _RATES if key in group})
    named = "param_names" in first
    optimizer.add_param_group(
        group | {"params": list(parameters.items() if named else parameters.values())}
    )
    for scheduler in _schedulers_of(optimizer, schedulers):
        for key in _LISTS_OF_GROUPS:
            entries = getattr(scheduler, key, None)
            if isinstance(entries, list) and len(entries) == number:
                entries.append(entries[0] * ratio if key in _RATES_OF_GROUPS else entries[0])


def scale_group(
    optimizer: Optimizer, index: int, factor: float, *, schedulers: Iterable[Any] = ()
) -> None:
    """Multiply the learning rate of a parameter group, including in its schedulers.

    Args:
        optimizer: The user's optimizer, prepared or not.
        index: The index of the group.
        factor: The factor of its learning rates.
        schedulers: All schedulers; those of other optimizers are ignored.
    """
    group = optimizer.param_groups[index]
    group.update({key: group[key] * factor for key in _RATES if key in group})
    scaled = [
        getattr(scheduler, key, None)
        for scheduler in _schedulers_of(optimizer, schedulers)
        for key in _RATES_OF_GROUPS
    ]
    # By id, since a SequentialLR shares its list with a nested scheduler.
    for entries in {id(entries): entries for entries in scaled}.values():
        if isinstance(entries, list) and len(entries) == len(optimizer.param_groups):
            entries[index] = entries[index] * factor


def names_of_groups(optimizer: Optimizer, module: nn.Module) -> list[list[str | None]]:
    """Return the parameter names of each group; None for an unregistered parameter."""
    named = bare_names(module, module.named_parameters())
    names = {id(parameter): name for name, parameter in named}
    return [[names.get(id(p)) for p in group["params"]] for group in optimizer.param_groups]


def restore_groups(
    optimizer: Optimizer,
    saved: Sequence[Sequence[str | None]],
    module: nn.Module,
    *,
    schedulers: Iterable[Any] = (),
) -> None:
    """Add the extra parameter groups of a saved optimizer; call before loading its state.

    Args:
        optimizer: The user's optimizer, prepared or not.
        saved: The parameter names of each saved group; see `names_of_groups`.
        module: The module that owns the parameters.
        schedulers: All schedulers; those of other optimizers are ignored.

    Raises:
        CheckpointError: The module has no parameter of a saved name, or the optimizer already has
            it in another group.
    """
    taken = {id(p) for group in optimizer.param_groups for p in group["params"]}
    named = dict(bare_names(module, module.named_parameters()))
    schedulers = list(schedulers)
    for names in saved[len(optimizer.param_groups) :]:
        for name in names:
            if name not in named or id(named[name]) in taken:
                why = "which the optimizer already has" if name in named else "which does not exist"
                raise CheckpointError(
                    f"A group that was added to {type(optimizer).__name__} during the run has the "
                    f"parameter {name}, {why}. Has configure_optimizers changed since?"
                )
        added = {name: named[name] for name in names if name is not None}
        add_group(optimizer, added, ratio=1.0, schedulers=schedulers)


def _schedulers_of(optimizer: Optimizer, schedulers: Iterable[Any]) -> list[Any]:
    """Return the torch schedulers of an optimizer, including nested ones."""
    targets = {id(optimizer), id(getattr(optimizer, "optimizer", optimizer))}
    matching: list[Any] = []
    for scheduler in schedulers:
        if not isinstance(scheduler, (LRScheduler, ReduceLROnPlateau)):
            continue
        if id(getattr(scheduler, "optimizer", None)) in targets:
            matching.append(scheduler)
        matching += _schedulers_of(optimizer, getattr(scheduler, "_schedulers", ()))
    return matching
