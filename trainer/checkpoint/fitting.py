"""State dict matching: compare saved weights with a module, and load them into it."""

from __future__ import annotations

import logging
import os
from collections.abc import Container, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from trainer.checkpoint.weights import own_names
from trainer.errors import CheckpointError, printable
from trainer.names import bare_names
from trainer.tree import own_memory

_SHOWN = 20  # names of each kind listed in an error

logger = logging.getLogger(__name__)


@dataclass
class Misfits:
    """Key mismatch: how saved weights differ from a model.

    Lists missing and unexpected names, and differing shapes as ``(saved, model's)``.
    """

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

    def bare(self, model: torch.nn.Module) -> Misfits:
        """Return the mismatch with wrapper prefixes removed from all names, for messages."""
        missing, unexpected = (
            [name for name, _ in bare_names(model, zip(names, names, strict=True))]
            for names in (self.missing, self.unexpected)
        )
        return Misfits(missing, unexpected, dict(bare_names(model, self.misshaped.items())))


def compare(model: torch.nn.Module, shapes: Mapping[str, tuple[int, ...]]) -> Misfits:
    """Compare the names and shapes of weights with a model's.

    Two kinds of names do not count as missing: a tied weight whose other name was saved, and a
    weight of a lazy module that was never called.
    """
    here = model.state_dict(keep_vars=True)
    saved = {id(here[name]) for name in shapes if name in here}
    return Misfits(
        [
            name
            for name, value in here.items()
            if name not in shapes and id(value) not in saved and not is_lazy(value)
        ],
        [name for name in shapes if name not in here],
        {
            name: (shapes[name], tuple(value.shape))
            for name, value in here.items()
            if isinstance(value, torch.Tensor)
            and not is_lazy(value)
            and tuple(shapes.get(name, value.shape)) != tuple(value.shape)
        },
    )


def renames(model: torch.nn.Module) -> bool:
    """Return whether load hooks may rename keys, so that only loading shows which keys match."""
    return any(module._load_state_dict_pre_hooks for module in model.modules())


def load_into(
    module: torch.nn.Module,
    weights: Mapping[str, torch.Tensor],
    *,
    where: str | os.PathLike[str],
    strict: bool = True,
) -> None:
    """Load weights into a module, whether its submodules are compiled or not.

    Args:
        module: The module.
        weights: Tensors by the module's own names, perhaps saved from a compiled module.
        where: The file that they came from, for the error.
        strict: All names and shapes must match. False loads the weights that match and logs a
            warning that lists the others.

    Raises:
        CheckpointError: Names or shapes do not match. The message lists the missing and unexpected
            names and the differing shapes. The module is then unchanged, except if load hooks
            rename keys: for such modules only loading shows what matches.
    """
    own_memory(module)
    weights = own_names(module, weights)
    misfits = compare(module, {name: tuple(tensor.shape) for name, tensor in weights.items()})
    if translates := _translates(module):
        misfits = _load_translated(module, weights, misfits, where)
    told = printable(_grouped(misfits.bare(module)))
    if misfits and strict:
        raise CheckpointError(
            f"{os.fspath(where)} does not fit the module, a {type(module).__name__}:\n"
            f"{told}\nCreate the module as it was when the file was saved, or load what fits: "
            "load_from_checkpoint(…, strict=False), or strict_loading = False in the module, which "
            "does not count where fit resumes a run."
        )
    if not translates:
        _load(module, _without(weights, misfits.misshaped), where)
    if misfits:
        logger.warning(
            "%s does not fit %s completely; only what fits was loaded.\n%s",
            os.fspath(where),
            type(module).__name__,
            told,
        )


def _translates(module: torch.nn.Module) -> bool:
    """Return whether a module's loading may change the names or shapes of weights."""
    loaders = (type(each)._load_from_state_dict for each in module.modules())
    return renames(module) or any(not each.__module__.startswith("torch.nn.") for each in loaders)


def _load(
    module: torch.nn.Module, weights: Mapping[str, torch.Tensor], where: str | os.PathLike[str]
) -> Any:
    try:
        return module.load_state_dict(weights, strict=False)
    except RuntimeError as error:
        raise CheckpointError(f"{os.fspath(where)} cannot be loaded: {error}") from error


def _load_translated(
    module: torch.nn.Module,
    weights: Mapping[str, torch.Tensor],
    misfits: Misfits,
    where: str | os.PathLike[str],
) -> Misfits:
    """Load, and return the key mismatch that remains after the load hooks renamed keys."""
    shapes = misfits.misshaped
    try:
        found, shapes = _load(module, weights, where), {}
    except CheckpointError:
        if not shapes:
            raise
        found = _load(module, _without(weights, shapes), where)
    # A name tied to a saved one is not missing.
    missing = [name for name in found.missing_keys if name in misfits.missing]
    return Misfits(missing, list(found.unexpected_keys), shapes)


def _without(weights: Mapping[str, torch.Tensor], names: Container[str]) -> dict[str, torch.Tensor]:
    return {name: tensor for name, tensor in weights.items() if name not in names}


def _grouped(misfits: Misfits) -> str:
    """Return the key mismatch as text, with one line for each kind."""
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
