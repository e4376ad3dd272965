"""An optimizer's step without the section of a profile and the hooks that torch puts around it."""

from __future__ import annotations

from collections.abc import Callable
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
# All of torch's wrappers run this code. Its mark on them, `hooked`, is on what others wrap around
# them too: `functools.wraps` copies it.
_WRAPPING = Optimizer.profile_hook_step(print).__code__ if _KNOWN else None


def step(optimizer: Optimizer, closure: Callable[[], Any] | None = None) -> Any:
    """``optimizer.step(closure)``.

    What torch wraps every optimizer's step in takes as long as the update of a small model, and
    does nothing unless there are hooks or a profile is taken. (Of an ``ExecutionTraceObserver``
    alone nobody can know: torch tells Python of no other listener, and to open a section in vain
    takes 1 µs. In its trace there is no section for the step unless the optimizer has a hook.)
    """
    bare = _bare_step(optimizer)
    return optimizer.step(closure) if bare is None else bare(optimizer, closure)


def _bare_step(optimizer: Optimizer) -> Callable[..., Any] | None:
    """What the step of the optimizer's class does inside; None where it is not that alone."""
    if not _KNOWN or torch.autograd.profiler._is_profiler_enabled:
        return None
    if torch.autograd._profiler_enabled():  # type: ignore[attr-defined]  # not in its `__all__`
        return None
    if module._global_optimizer_pre_hooks or module._global_optimizer_post_hooks:
        return None
    own = optimizer.__dict__
    if own.get(_OWN_HOOKS[0], True) or own.get(_OWN_HOOKS[1], True):
        return None
    wrapped = type(optimizer).step
    if getattr(wrapped, "__code__", None) is not _WRAPPING:
        return None
    replaced = own.get("step")
    if replaced is not None and not _only_counts(replaced, wrapped):
        return None
    bare: Callable[..., Any] = wrapped.__wrapped__  # type: ignore[attr-defined]
    return bare


def _only_counts(step: Any, wrapped: Any) -> bool:
    """It is what a scheduler has put in the place of the class's step, to see that it is called."""
    marked = getattr(step, "_wrapped_by_lr_sched", False)
    return marked is True and getattr(step, "__wrapped__", None) is wrapped
