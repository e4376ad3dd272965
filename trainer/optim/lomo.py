"""Support of LOMO optimizers, which update each parameter during backward and keep no gradients.

Lv et al., "Full Parameter Fine-tuning for Large Language Models with Limited Resources", ACL 2024,
and "AdaLomo: Low-memory Optimization with Adaptive Learning Rate", 2023; their package is
``lomo-optim``.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from trainer.state import GradientState, PartialState


def is_lomo(optimizer: Optimizer) -> bool:
    """Return whether it is a ``Lomo`` or ``AdaLomo`` of ``lomo-optim``, prepared or not."""
    package = sys.modules.get("lomo_optim")  # imported by the code that created the optimizer
    return package is not None and isinstance(
        getattr(optimizer, "optimizer", optimizer), (package.Lomo, package.AdaLomo)
    )


def lomo_backward(loss: Tensor, learning_rate: float, optimizers: Sequence[Optimizer]) -> None:
    """Run the backward pass, in which the LOMO optimizer updates the parameters.

    With several processes, the update is made after the backward pass, once the gradients are
    averaged. LOMO then saves no memory.

    Args:
        loss: The loss, a tensor of shape ().
        learning_rate: The learning rate of this update.
        optimizers: All prepared optimizers, among them exactly one LOMO optimizer.

    Raises:
        ValueError: `learning_rate` is None, there is not exactly one LOMO optimizer, or a setting
            would make its updates wrong (accumulation, fp16).
    """
    if learning_rate is None:
        raise ValueError(
            "Pass a learning rate to backward with a LOMO optimizer, which updates during "
            "backward: accelerator.backward(loss, learning_rate=1e-3)."
        )
    chosen = [optimizer for optimizer in optimizers if is_lomo(optimizer)]
    if len(chosen) != 1:
        raise ValueError(
            f"lomo_backward needs one prepared LOMO optimizer; there are {len(chosen)} among "
            f"{[type(getattr(o, 'optimizer', o)).__name__ for o in optimizers]}. Prepare one "
            "lomo_optim.Lomo or lomo_optim.AdaLomo for the whole model."
        )
    steps = GradientState().num_steps
    if steps != 1:
        raise ValueError(
            f"LOMO updates at every backward and cannot accumulate over {steps} micro-batches; use "
            "gradient_accumulation_steps=1."
        )
    precision = getattr(chosen[0], "_precision", None)
    if precision is not None and precision.scaler is not None:
        raise ValueError("LOMO cannot use the scaled gradients of fp16; use 'bf16' or 'no'.")
    lomo: Any = getattr(chosen[0], "optimizer", chosen[0])
    if PartialState().num_processes > 1 and not lomo.zero3_enabled:
        _backward_all(lomo, loss, learning_rate)
    else:
        lomo.fused_backward(loss, learning_rate)


def _backward_all(lomo: Any, loss: Tensor, learning_rate: float) -> None:
    """Run the backward pass through DDP, then the update with the averaged gradients.

    Otherwise LOMO's parameter hooks would use and drop this rank's gradients before they are
    averaged.
    """
    if lomo.clip_grad_norm is not None:
        raise ValueError(
            f"LOMO's clip_grad_norm={lomo.clip_grad_norm} would clip by a different norm on each "
            "process; use clip_grad_value, or one process."
        )
    model, lomo.model = lomo.model, nn.Module()  # the hooks read gradients from this model
    try:
        loss.backward()
    finally:
        lomo.model = model
    lomo.fused_backward(torch.zeros((), requires_grad=True), learning_rate)
