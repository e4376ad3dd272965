"""Run a backward pass without torch's treatment of arguments that are not given."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import graph

_METHOD, _FUNCTION = Tensor.backward, torch.autograd.backward


def _is_defined_in(function: object, module: object) -> bool:
    code = getattr(function, "__code__", None)
    return code is not None and code.co_filename == getattr(module, "__file__", None)


# Another package may replace torch's functions, before this import or later.
_KNOWN = (
    _is_defined_in(_METHOD, torch._tensor)
    and _is_defined_in(_FUNCTION, torch.autograd)
    and hasattr(graph, "_engine_run_backward")
    and hasattr(torch._C, "_is_torch_function_mode_enabled")
    and hasattr(torch._C, "_are_functorch_transforms_active")
)


def backward(
    loss: Tensor,
    *args: Any,
    roots: Sequence[Tensor] = (),
    gradients: Sequence[Tensor] = (),
    **kwargs: Any,
) -> None:
    """Call ``loss.backward``, for a plain real scalar directly at the engine's door.

    Before it enters the engine, torch normalises the losses, gradients and inputs that it may have
    been given. That takes a tenth of a small model's backward pass. Whatever is not a plain loss,
    or is to be intercepted (by a tensor subclass, a torch function mode, a replacement of
    ``backward``), takes torch's way, with its errors.

    Args:
        loss: A tensor of one element with a graph.
        *args: Arguments of ``loss.backward``; with any, torch's way is taken.
        roots: Other tensors from which the same pass starts; then without other arguments.
        gradients: Their gradients.
        **kwargs: See `args`.
    """
    if (
        _KNOWN
        and not (args or kwargs)
        and not torch.compiler.is_compiling()  # torch traces its own functions only
        and type(loss) is Tensor
        and "backward" not in loss.__dict__
        and loss.ndim == 0
        and loss.is_floating_point()
        and Tensor.backward is _METHOD
        and torch.autograd.backward is _FUNCTION
        and not torch._C._is_torch_function_mode_enabled()
        and not torch._C._are_functorch_transforms_active()
    ):
        graph._engine_run_backward(
            (loss, *roots),
            (torch.ones_like(loss), *gradients),
            False,  # the graph is not kept
            False,  # and none is made of the backward pass
            (),  # all leaves get gradients
            allow_unreachable=True,
            accumulate_grad=True,
        )
    elif roots:
        torch.autograd.backward([loss, *roots], [None, *gradients])
    else:
        loss.backward(*args, **kwargs)
