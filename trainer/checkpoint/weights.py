"""Save weights as one safetensors file that any tool can read, including tied weights.

The file uses the user's own names, see :mod:`trainer.names`. A tied tensor (one with several names)
is stored once, under its first name. Every other name is an entry ``other: first`` in the file's
metadata, as in ``safetensors.torch.save_model``.
"""

from __future__ import annotations

import os
from collections.abc import Container, Mapping
from pathlib import Path
from typing import TypeVar

import torch
from torch.nn.parameter import is_lazy

from trainer.checkpoint.tensors import portable, read_tensors, write_tensors
from trainer.names import COMPILED, bare_names

WEIGHTS_NAME = "model.safetensors"

T = TypeVar("T")


def save_weights(state_dict: Mapping[str, object], path: str | os.PathLike[str]) -> Path:
    """Write a module's ``state_dict()`` as safetensors.

    Args:
        state_dict: Tensors by name. Views that overlap but are not identical are stored separately;
            names lose the prefixes that ``torch.compile`` adds.
        path: A file ending in ``.safetensors``, or a folder for ``model.safetensors``.

    Returns:
        The file written.

    Raises:
        TypeError: If a value is not a plain dense tensor, for example the result of
            ``get_extra_state``.
    """
    tensors, tied = separate_tied({_bare(name): value for name, value in state_dict.items()})
    file = _file(path)
    write_weights(tensors, tied, file)
    return file


def own_names(module: torch.nn.Module, named: Mapping[str, T]) -> dict[str, T]:
    """Rename entries to the keys of the module's ``state_dict()``, whatever wrappers either has.

    Names that the module does not have are left unchanged.
    """
    here = module.state_dict(keep_vars=True)
    own = dict(bare_names(module, zip(here, here, strict=True)))
    return {own.get(_bare(name), name): value for name, value in named.items()}


def separate_tied(
    state_dict: Mapping[str, object],
) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Split a ``state_dict()`` into the tensors to store and the additional names of tied ones.

    A lazy module that was never called has no values yet: its tensors are left out.

    Returns:
        The tensors, in order and unchanged; and a dict from each additional name of a tied tensor
        to its first name.

    Raises:
        TypeError: If a value is not a tensor, for example the result of ``get_extra_state``.
    """
    tensors: dict[str, torch.Tensor] = {}
    tied: dict[str, str] = {}
    first_name: dict[tuple[object, ...], str] = {}
    for name, value in state_dict.items():
        if not isinstance(value, torch.Tensor):
            raise TypeError(
                f"The weight {name!r} is a {type(value).__name__}; a weights file holds tensors "
                "only. Make get_extra_state return a tensor, or save that state separately."
            )
        if is_lazy(value):
            continue
        first = first_name.setdefault(_memory(value), name) if value.numel() else name
        if first != name and name != "format":
            tied[name] = first
        else:
            tensors[name] = value
    return tensors, tied


def write_weights(tensors: Mapping[str, torch.Tensor], tied: Mapping[str, str], file: Path) -> None:
    """Write one file of weights, and in its metadata the additional names of its tied tensors.

    Raises:
        TypeError: If a tensor is not a plain dense one with data.
    """
    write_tensors(
        {name: portable(tensor, f"The weight {name!r}") for name, tensor in tensors.items()},
        file,
        {"format": "pt", **{name: first for name, first in tied.items() if first in tensors}},
    )


def load_weights(path: str | os.PathLike[str]) -> dict[str, torch.Tensor]:
    """Load all weights of a file by name, to the CPU; tied names share one tensor.

    Args:
        path: A file from :func:`save_weights`, or the folder with ``model.safetensors``.

    Raises:
        CheckpointError: If the file is missing or damaged.
    """
    tensors, metadata = read_tensors(_file(path))
    return {name: tensors[first] for name, first in tied_names(metadata, tensors).items()} | tensors


def tied_names(metadata: Mapping[str, str], stored: Container[str]) -> dict[str, str]:
    """Return the tied names in a file's metadata, as a dict from additional to first name."""
    return {
        name: first
        for name, first in metadata.items()
        if name != "format" and name not in stored and first in stored
    }


def _bare(name: str) -> str:
    return ".".join(part for part in name.split(".") if part != COMPILED)


def _memory(tensor: torch.Tensor) -> tuple[object, ...]:
    """Return a key that is equal for two tensors if they are the same view of the same memory."""
    if tensor.layout != torch.strided:
        return (id(tensor),)  # it has no single storage
    memory = tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()
    return *memory, tensor.is_conj(), tensor.is_neg()


def _file(path: str | os.PathLike[str]) -> Path:
    path = Path(path)
    return path if path.suffix == ".safetensors" else path / WEIGHTS_NAME
