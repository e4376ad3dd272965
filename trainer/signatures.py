"""What hooks and steps are called with: those that take less are adapted, others refused."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn

from trainer.hints import STEP_ARGUMENTS

# Parts of an update that a module may override; see `trainer.module.TrainModule`.
PARTS_OF_UPDATE = (
    "backward",
    "optimizer_step",
    "optimizer_zero_grad",
    "lr_scheduler_step",
    "configure_gradient_clipping",
)


def check_signature(call: Callable[..., Any], name: str, like: Callable[..., Any]) -> None:
    """Refuse a hook that cannot be called as it will be, before anything runs.

    Args:
        call: The user's method, bound.
        name: Its name.
        like: The hook of the base class, unbound. It is called with the arguments of that; a hook
            may leave out those with a default, a part of an update may not.

    Raises:
        TypeError: Its arguments are others.
    """
    expected = list(inspect.signature(like).parameters.values())[1:]
    takes = _signature(call)
    if takes is None or any(parameter.kind is parameter.VAR_POSITIONAL for parameter in expected):
        return
    try:
        every = name in PARTS_OF_UPDATE
        takes.bind(
            *[
                parameter.name
                for parameter in expected
                if every or parameter.default is parameter.empty
            ]
        )
    except TypeError as error:
        owner = type(getattr(call, "__self__", call)).__name__
        names = ", ".join(["self", *(parameter.name for parameter in expected)])
        raise TypeError(
            f"{owner}.{name}{takes} is called with other arguments here ({error}): "
            f"def {name}({names})."
        ) from None


def check_state_dict_methods(module: nn.Module) -> None:
    """Refuse a ``state_dict`` or ``load_state_dict`` that cannot be called as torch's.

    It would be missed when a checkpoint is loaded, which may be after a crash.

    Raises:
        TypeError: It takes other arguments.
    """
    for name, arguments in (("state_dict", ()), ("load_state_dict", ({},))):
        takes = _signature(getattr(module, name))
        option = {"keep_vars": True} if name == "state_dict" else {"strict": False}
        try:
            if takes is not None:
                takes.bind(*arguments, **option)
        except TypeError as error:
            raise TypeError(
                f"{type(module).__name__}.{name}{takes} cannot be called as torch's ({error}): "
                f"def {name}(self, *args, **kwargs), and pass them to super().{name}."
            ) from None


def with_loader_number(call: Callable[..., Any]) -> Callable[..., Any]:
    """A batch hook that insists on a ``dataloader_idx`` gets 0 with a single loader."""
    takes = _signature(call)
    number = None if takes is None else takes.parameters.get("dataloader_idx")
    if takes is None or number is None or number.default is not number.empty:
        return call
    return partial(_call_with_number, call, len(takes.parameters))


def _call_with_number(call: Callable[..., Any], takes: int, *args: Any) -> None:
    call(*args, *([0] if len(args) < takes else []))


def without_batch_idx(module: nn.Module) -> dict[str, Callable[..., Any]]:
    """Those of the module's steps that do not take the batch's number, as functions that do.

    Raises:
        TypeError: A step takes what no step is given any more.
    """
    adapted: dict[str, Callable[..., Any]] = {}
    for name in ("training_step", "validation_step", "test_step", "predict_step"):
        step = getattr(module, name)
        takes = _signature(step)
        if takes is None:
            continue
        for argument, hint in STEP_ARGUMENTS.items():
            if argument in takes.parameters:
                raise TypeError(
                    f"{type(module).__name__}.{name} takes {argument}, which no step is given "
                    f"here: {hint}."
                )
        kinds = [parameter.kind for parameter in takes.parameters.values()]
        by_place = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        several = [kind for kind in kinds if kind in by_place]
        if inspect.Parameter.VAR_POSITIONAL in kinds or "batch_idx" in takes.parameters:
            continue
        if len(several) == 1 or list(takes.parameters)[1:2] == ["dataloader_idx"]:
            adapted[name] = partial(_call_without_number, step, len(several) > 1)
    return adapted


def _call_without_number(
    step: Callable[..., Any], several: bool, batch: Any, _: int, dataloader_idx: int = 0
) -> Any:
    return step(batch, dataloader_idx) if several else step(batch)


def check_step_signature(module: nn.Module, name: str, loaders: int) -> None:
    """Refuse a step that does not fit the number of loaders, before anything runs.

    Raises:
        TypeError: It lacks ``dataloader_idx`` with several, or insists on it with one.
    """
    step = getattr(module, name)
    takes = _signature(step)
    if takes is None or isinstance(step, partial):
        return
    arguments = ["batch", "batch_idx"] + ["dataloader_idx"] * (loaders > 1)
    try:
        takes.bind(*arguments)
    except TypeError:
        if name == "training_step":
            fitting, fix = "", f"{name}(self, batch, batch_idx)."
        else:
            fitting = f" does not fit {loaders} loader{'s' * (loaders > 1)}: it"
            fix = f"{name}(self, batch, batch_idx, dataloader_idx=0) to take one or several."
        raise TypeError(
            f"{type(module).__name__}.{name}{takes}{fitting} is called with "
            f"{', '.join(arguments)}. Define {fix}"
        ) from None


def _signature(call: Callable[..., Any]) -> inspect.Signature | None:
    try:
        return inspect.signature(call)
    except (TypeError, ValueError):  # of something built in, which does not say
        return None
