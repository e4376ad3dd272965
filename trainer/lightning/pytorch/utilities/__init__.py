"""The names of ``lightning.pytorch.utilities``."""

from __future__ import annotations

import inspect
from types import FrameType
from typing import Any

from torch import Tensor, nn, stack

from trainer.data.combined import CombinedLoader
from trainer.hparams import HyperParameters as AttributeDict
from trainer.lightning.missing import getter
from trainer.lightning.pytorch.utilities import combined_loader, rank_zero, types
from trainer.lightning.pytorch.utilities.rank_zero import (
    rank_zero_debug,
    rank_zero_deprecation,
    rank_zero_info,
    rank_zero_only,
    rank_zero_warn,
)
from trainer.rng import isolated_rng as isolate_rng
from trainer.rng import set_seed

MisconfigurationException = ValueError

__all__ = [
    "AttributeDict",
    "CombinedLoader",
    "MisconfigurationException",
    "combined_loader",
    "get_init_args",
    "grad_norm",
    "isolate_rng",
    "rank_zero",
    "rank_zero_debug",
    "rank_zero_deprecation",
    "rank_zero_info",
    "rank_zero_only",
    "rank_zero_warn",
    "seed_everything",
    "types",
]

__getattr__ = getter(__name__)


def seed_everything(seed: int | None = None, workers: bool = True, verbose: bool = True) -> int:
    """Seed Python, numpy and torch.

    Args:
        seed: The seed; None is 0.
        workers: Has no effect: workers are always seeded, by the batch.
        verbose: Has no effect.

    Returns:
        The seed.
    """
    seed = 0 if seed is None else int(seed)
    set_seed(seed)
    return seed


def grad_norm(
    module: nn.Module, norm_type: float | int | str, group_separator: str = "/"
) -> dict[str, Tensor]:
    """Return the norm of each parameter's gradient, and of all together.

    Args:
        module: The module.
        norm_type: The order of the norm, such as 2 or ``"inf"``.
        group_separator: Stands before the parameter's name.

    Returns:
        ``grad_2.0_norm/weight`` and so on, and ``grad_2.0_norm_total``.
    """
    order = float(norm_type)
    norms = {
        f"grad_{order}_norm{group_separator}{name}": parameter.grad.detach().norm(order)
        for name, parameter in module.named_parameters()
        if parameter.grad is not None
    }
    if norms:
        norms[f"grad_{order}_norm_total"] = stack(list(norms.values())).norm(order)
    return norms


def get_init_args(frame: FrameType) -> dict[str, Any]:
    """Return the arguments of the ``__init__`` that has this frame, without ``self``."""
    info = inspect.getargvalues(frame)
    more = info.locals[info.keywords] if info.keywords else {}
    return {name: info.locals[name] for name in info.args[1:]} | more
