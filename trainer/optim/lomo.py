"""LOMO optimizers, which update each parameter during backward and keep no gradients.

Lv et al., "Full Parameter Fine-tuning for Large Language Models with Limited Resources", ACL 2024,
and "AdaLomo: Low-memory Optimization with Adaptive Learning Rate", 2023; their package is
``lomo-optim``.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from trainer.state import GradientState, PartialState


def is_lomo(optimizer: Optimizer) -> bool:
    """It is a ``Lomo`` or ``AdaLomo`` of the package ``lomo-optim``, prepared or not."""
    package = sys.modules.get("lomo_optim")  # who has such an optimizer has imported it
    return package is not None and isinstance(
        getattr(optimizer, "optimizer", optimizer), (package.Lomo, package.AdaLomo)
    )


def lomo_backward(loss: Tensor, learning_rate: float, optimizers: Sequence[Optimizer]) -> None:
    """Backward and update in one, with the LOMO optimizer among those prepared.

    Among several processes the update waits for the end of backward, when the gradients are
    averaged: what LOMO saves in memory is then saved on one process only.

    Args:
        loss: Of shape ().
        learning_rate: Of this update.
        optimizers: The prepared optimizers.

    Raises:
        ImportError: The package is not installed.
        ValueError: There is no learning rate, not one LOMO optimizer, or a setting under which its
            updates would be wrong.
    """
    if learning_rate is None:
        raise ValueError(
            "A learning rate must be passed for backward with a LOMO optimizer, which updates at "
            "once: accelerator.backward(loss, learning_rate=1e-3)."
        )
    _require_package()
    chosen = [optimizer for optimizer in optimizers if is_lomo(optimizer)]
    if len(chosen) != 1:
        raise ValueError(
            f"lomo_backward needs one LOMO optimizer among those prepared; there are {len(chosen)} "
            f"among {[type(getattr(o, 'optimizer', o)).__name__ for o in optimizers]}. Prepare a "
            "lomo_optim.Lomo or lomo_optim.AdaLomo, one for the whole model."
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
        _backward_together(lomo, loss, learning_rate)
    else:
        lomo.fused_backward(loss, learning_rate)


def _backward_together(lomo: Any, loss: Tensor, learning_rate: float) -> None:
    """Backward through DDP first, and the update with the averaged gradients after it.

    LOMO's hooks, called for each parameter, would otherwise use this process's own gradients and
    take them away before they are averaged.
    """
    if lomo.clip_grad_norm is not None:
        raise ValueError(
            f"LOMO's clip_grad_norm={lomo.clip_grad_norm} would clip by another norm on each "
            "process; use clip_grad_value, or one process."
        )
    model, lomo.model = lomo.model, nn.Module()  # the hooks look for gradients in here
    try:
        loss.backward()
    finally:
        lomo.model = model
    lomo.fused_backward(torch.zeros((), requires_grad=True), learning_rate)


def _require_package() -> None:
    try:
        importlib.import_module("lomo_optim")
    except ImportError as error:
        raise ImportError(
            "LOMO optimizers need the package lomo-optim, which could not be imported: "
            f"{error}. Install it with pip install 'cadence-trainer[lomo]'."
        ) from error
