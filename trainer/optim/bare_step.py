"""Call an optimizer's step without torch's wrapper for profiling and step hooks."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim import optimizer as module

_GLOBAL_HOOKS = ("_global_optimizer_pre_hooks", "_global_optimizer_post_hooks")
_OWN_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
_KNOWN = (
    all(hasattr(module, name) for name in _GLOBAL_HOOKS)
    and hasattr(torch.autograd.profiler, "_is_profiler_enabled")
    and hasattr(torch.autograd, "_profiler_enabled")
    and hasattr(Optimizer, "profile_hook_step")
)
# All of torch's wrappers share this code object. Their mark, `hooked`, would not identify them:
# `functools.wraps` copies it to other wrappers.
_WRAPPING = Optimizer.profile_hook_step(print).__code__ if _KNOWN else None


def step(optimizer: Optimizer, closure: Callable[[], Any] | None = None) -> Any:
    """Call ``optimizer.step``, without torch's wrapper if it would do nothing.

    Torch's wrapper takes as long as the update of a small model, and does nothing unless there are
    hooks or a profiler is running. (An ``ExecutionTraceObserver`` alone cannot be detected: torch
    reports no other listeners to Python, and opening an unused section takes 1 µs. Its trace has no
    section for the step unless the optimizer has a hook.) Without a closure none is passed
    unless it is required: the step of some optimizers takes none.

    Raises:
        TypeError: There is no closure, but the optimizer calls it.
    """
    required, by_name = _takes_closure(type(optimizer).step)
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = {}
    if required or closure is not None:
        args, kwargs = ((), {"closure": closure}) if by_name else ((closure,), {})
    bare = _bare_step(optimizer)
    try:
        return optimizer.step(*args, **kwargs) if bare is None else bare(optimizer, *args, **kwargs)
    except TypeError as error:
        if (
            closure is not None
            or not required
            or "'NoneType' object is not callable" not in str(error)
        ):
            raise
        raise TypeError(
            f"step of {type(optimizer).__name__} was called without the closure that it needs: a "
            "function that zeroes the gradients, computes the loss, does the backward pass and "
            "returns the loss. Call optimizer.step(closure), in a TrainModule with "
            "automatic_optimization = False."
        ) from error


@cache
def _takes_closure(step: Callable[..., Any]) -> tuple[bool, bool]:
    """Return whether a step must be given a closure, even if it is None, and whether by name."""
    _, *others = inspect.signature(step).parameters.values()
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    required = [each for each in others if each.default is each.empty]
    by_name = any(each.name == "closure" and each.kind is each.KEYWORD_ONLY for each in others)
    return any(each.kind in positional or each.name == "closure" for each in required), by_name


def _bare_step(optimizer: Optimizer) -> Callable[..., Any] | None:
    """Return the class's unwrapped step; None if the wrapper does something or is not torch's."""
    if not _KNOWN or torch.autograd.profiler._is_profiler_enabled:
        return None
    if torch.autograd._profiler_enabled():  # type: ignore[attr-defined]  # not in its `__all__`
        return None
    if module._global_optimizer_pre_hooks or module._global_optimizer_post_hooks:
        return None
    own = optimizer.__dict__
    if own.get(_OWN_HOOKS[0], True) or own.get(_OWN_HOOKS[1], True):
        return None
    wrapped: Any = type(optimizer).step
    if getattr(wrapped, "__code__", None) is not _WRAPPING:
        return None
    replaced = own.get("step")
    if replaced is not None and not _only_counts(replaced, wrapped):
        return None
    bare: Callable[..., Any] = wrapped.__wrapped__
    return bare


def _only_counts(step: Any, wrapped: Any) -> bool:
    """Return whether `step` is a scheduler's patch of the class's step that only counts calls."""
    marked = getattr(step, "_wrapped_by_lr_sched", False)
    return marked is True and getattr(step, "__wrapped__", None) is wrapped
