"""How weights fit a module, and loading them into it."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from trainer.checkpoint.weights import own_names
from trainer.errors import CheckpointError

_SHOWN = 20  # names of a kind in an error

logger = logging.getLogger(__name__)


@dataclass
class Misfits:
    """Where weights and a model differ: names, and for shapes ``(saved, the model's)``."""

    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    misshaped: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.missing or self.unexpected or self.misshaped)

    def __str__(self) -> str:
        parts = [f"missing: {', '.join(self.missing)}"] if self.missing else []
        parts += [f"unexpected: {', '.join(self.unexpected)}"] if self.unexpected else []
        parts += [
            f"{name} is {saved} in the file and {here} in the model"
            for name, (saved, here) in self.misshaped.items()
        ]
        return "; ".join(parts)


def compare(model: torch.nn.Module, shapes: Mapping[str, tuple[int, ...]]) -> Misfits:
    """How weights of these names and shapes fit a model.

    A name that the model ties to a saved one is not missing.
    """
    here = model.state_dict(keep_vars=True)
    saved = {id(here[name]) for name in shapes if name in here}
    return Misfits(
        [name for name, value in here.items() if name not in shapes and id(value) not in saved],
        [name for name in shapes if name not in here],
        {
            name: (shapes[name], tuple(value.shape))
            for name, value in here.items()
            if isinstance(value, torch.Tensor)
            and not torch.nn.parameter.is_lazy(value)
            and tuple(shapes.get(name, value.shape)) != tuple(value.shape)
        },
    )


def renames(model: torch.nn.Module) -> bool:
    """Whether modules translate what is loaded, so that only loading shows what fits."""
    return any(module._load_state_dict_pre_hooks for module in model.modules())


def load_into(
    module: torch.nn.Module,
    weights: Mapping[str, torch.Tensor],
    *,
    where: str | os.PathLike[str],
    strict: bool = True,
) -> None:
    """Load weights into a module, whose submodules may be compiled or not.

    Args:
        module: The module.
        weights: Tensors by the module's own names; they may have been saved compiled.
        where: The file that they came from, for the error.
        strict: Every name must fit. Otherwise those that do are loaded, and a warning of the log
            lists the others. Shapes must fit in any case.

    Raises:
        CheckpointError: Listing the missing, the unexpected and the mis-shaped names. Nothing is
            loaded then, unless modules translate the names of what they load: only loading shows
            what fits those.
    """
    weights = own_names(module, weights)
    misfits = compare(module, {name: tuple(tensor.shape) for name, tensor in weights.items()})
    if _translates(module):
        misfits = _load_translated(module, weights, misfits, where)
        _refuse(module, misfits, where, strict=strict)
    else:
        _refuse(module, misfits, where, strict=strict)
        try:
            module.load_state_dict(weights, strict=False)
        except RuntimeError as error:
            raise CheckpointError(f"{os.fspath(where)} cannot be loaded: {error}") from error
    if misfits:
        logger.warning(
            "%s does not fit %s wholly; what fits was loaded.\n%s",
            os.fspath(where),
            type(module).__name__,
            _grouped(misfits),
        )


def _translates(module: torch.nn.Module) -> bool:
    """Whether modules change the names or shapes of what is loaded."""
    loaders = (type(each)._load_from_state_dict for each in module.modules())
    return renames(module) or any(not each.__module__.startswith("torch.nn.") for each in loaders)


def _load_translated(
    module: torch.nn.Module,
    weights: Mapping[str, torch.Tensor],
    misfits: Misfits,
    where: str | os.PathLike[str],
) -> Misfits:
    """Load, and return which of the misfits remain when the modules have translated."""
    shapes = misfits.misshaped
    try:
        try:
            found = module.load_state_dict(weights, strict=False)
            shapes = {}
        except RuntimeError:
            if not shapes:
                raise
            fitting = {name: tensor for name, tensor in weights.items() if name not in shapes}
            found = module.load_state_dict(fitting, strict=False)
    except RuntimeError as error:
        raise CheckpointError(f"{os.fspath(where)} cannot be loaded: {error}") from error
    # A name tied to one that is there is not missing.
    missing = [name for name in found.missing_keys if name in misfits.missing]
    return Misfits(missing, list(found.unexpected_keys), shapes)


def _refuse(
    module: torch.nn.Module, misfits: Misfits, where: str | os.PathLike[str], *, strict: bool
) -> None:
    if misfits if strict else misfits.misshaped:
        fix = (
            "or make a new module from what fits with load_from_checkpoint(…, strict=False)"
            if not misfits.misshaped
            else "and replace what shall have another shape after loading"
        )
        raise CheckpointError(
            f"{os.fspath(where)} does not fit the module, a {type(module).__name__}:\n"
            f"{_grouped(misfits)}\nMake the module as it was when the file was saved, {fix}."
        )


def _grouped(misfits: Misfits) -> str:
    """The names of each kind of misfit on a line of their own."""
    shapes = [
        f"{name} ({list(saved)} in the file, {list(here)} in the module)"
        for name, (saved, here) in misfits.misshaped.items()
    ]
    kinds = {
        "missing from the file": misfits.missing,
        "unexpected in the file": misfits.unexpected,
        "of another shape": shapes,
    }
    return "\n".join(
        f"  {kind} ({len(names)}): {', '.join(names[:_SHOWN])}{', …' * (len(names) > _SHOWN)}"
        for kind, names in kinds.items()
        if names
    )
