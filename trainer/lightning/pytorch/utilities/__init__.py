"""The names of ``lightning.pytorch.utilities``."""

from __future__ import annotations

import inspect
import re
from contextlib import AbstractContextManager
from importlib import metadata
from importlib.util import find_spec
from types import FrameType
from typing import Any

from torch import Tensor, nn, stack

from callbacks import Callback
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
from trainer.rng import isolated_rng, set_seed

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

_refuse = getter(__name__)
_VERSIONED = re.compile(r"_([A-Z]+)_(GREATER_EQUAL|LESS_EQUAL|EQUAL)_(\d+(?:_\d+)*)")


def __getattr__(name: str) -> bool:
    """Return a flag such as ``_RICH_AVAILABLE`` (is it installed?) or ``_TORCH_EQUAL_2_9``."""
    if name.endswith("_AVAILABLE"):
        return find_spec(name[1:].removesuffix("_AVAILABLE").lower()) is not None
    if found := _VERSIONED.fullmatch(name):
        package, relation, text = found.groups()
        asked = [int(part) for part in text.split("_")]
        own = [int(part) for part in re.findall(r"\d+", metadata.version(package.lower()))]
        if relation == "EQUAL":
            return own[: len(asked)] == asked
        return own >= asked if relation == "GREATER_EQUAL" else own[:3] <= asked
    return _refuse(name)


def is_overridden(
    method_name: str, instance: object | None = None, parent: type | None = None
) -> bool:
    """Return whether a module, data module or callback overrides a method of its base.

    Raises:
        ValueError: The object is none of these, and `parent` is not given.
    """
    from trainer.lightning.pytorch.module import LightningDataModule, LightningModule

    if instance is None:
        return False
    kinds = (LightningModule, LightningDataModule, Callback)
    base = parent or next((each for each in kinds if isinstance(instance, each)), None)
    if base is None:
        raise ValueError(f"is_overridden was given {instance!r}: pass parent=, the class.")
    return getattr(type(instance), method_name, None) is not getattr(base, method_name, None)


def get_torchvision_model(model_name: str, **kwargs: Any) -> nn.Module:
    """Return ``torchvision.models.get_model(model_name, **kwargs)``."""
    from torchvision import models  # type: ignore[import-not-found]  # optional

    made: nn.Module = models.get_model(model_name, **kwargs)
    return made


def seed_everything(seed: int | None = None, workers: bool = True, verbose: bool = True) -> int:
    """Seed Python, numpy and torch.

    Args:
        seed: The seed; None is 0.
        workers: Has no effect, since workers are always seeded for each batch.
        verbose: Has no effect.

    Returns:
        The seed.
    """
    seed = 0 if seed is None else int(seed)
    set_seed(seed)
    return seed


def isolate_rng(include_cuda: bool = True) -> AbstractContextManager[None]:
    """Return a context manager that restores the states of the random generators on exit.

    Args:
        include_cuda: Has no effect; the current device's generator is always included.
    """
    return isolated_rng()


def grad_norm(
    module: nn.Module, norm_type: float | int | str, group_separator: str = "/"
) -> dict[str, Tensor]:
    """Return the norm of each parameter's gradient, and of all together.

    Args:
        module: The module.
        norm_type: The order of the norm, such as 2 or ``"inf"``.
        group_separator: The separator before the parameter's name.

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
    """Return the arguments of the ``__init__`` of this frame, without ``self``."""
    info = inspect.getargvalues(frame)
    more = info.locals[info.keywords] if info.keywords else {}
    return {name: info.locals[name] for name in info.args[1:]} | more
