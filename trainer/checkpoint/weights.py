"""Weights as one safetensors file that any tool reads, tied names included.

The file carries the module's own names. A tensor that several names share is stored once, under
the first of them; every other name is an entry ``other: first`` of the file's metadata, which is
also how ``safetensors.torch.save_model`` records it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import torch

from trainer.checkpoint.tensors import portable, read_tensors, write_tensors
from trainer.errors import CheckpointError

WEIGHTS_NAME = "model.safetensors"


def save_weights(state_dict: Mapping[str, object], path: str | os.PathLike[str]) -> Path:
    """Write a module's ``state_dict()`` as safetensors.

    Args:
        state_dict: Tensors by name. Views that overlap without being the same are stored apart.
        path: A file ending in ``.safetensors``, or a folder for ``model.safetensors``.

    Returns:
        The file written.

    Raises:
        TypeError: If a value is not a plain dense tensor, for example what ``get_extra_state``
            returned.
    """
    tensors, tied = separate_tied(state_dict)
    file = _file(path)
    write_weights(tensors, tied, file)
    return file


def separate_tied(
    state_dict: Mapping[str, object],
) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Split a ``state_dict()`` into the tensors to store and the names that repeat one of them.

    Returns:
        The tensors as they are, in order; and for each further name of one of them, its first name.

    Raises:
        TypeError: If a value is not a tensor, for example what ``get_extra_state`` returned.
    """
    tensors: dict[str, torch.Tensor] = {}
    tied: dict[str, str] = {}
    first_name: dict[tuple[object, ...], str] = {}
    for name, value in state_dict.items():
        if not isinstance(value, torch.Tensor):
            raise TypeError(
                f"The weight {name!r} is a {type(value).__name__}; a weights file holds tensors "
                "only. Let get_extra_state return a tensor, or save that state beside the weights."
            )
        first = first_name.setdefault(_memory(value), name) if value.numel() else name
        if first != name and name != "format":
            tied[name] = first
        else:
            tensors[name] = value
    return tensors, tied


def write_weights(tensors: Mapping[str, torch.Tensor], tied: Mapping[str, str], file: Path) -> None:
    """Write one file of weights, with the tied names whose first name is in it.

    Raises:
        TypeError: If a tensor is not a plain dense one with data.
    """
    write_tensors(
        {name: portable(tensor, f"The weight {name!r}") for name, tensor in tensors.items()},
        file,
        {"format": "pt", **{name: first for name, first in tied.items() if first in tensors}},
    )


def load_weights(path: str | os.PathLike[str]) -> dict[str, torch.Tensor]:
    """Every weight of a file by name, on the CPU; tied names share one tensor.

    Args:
        path: A file from :func:`save_weights`, or the folder with ``model.safetensors``.

    Raises:
        CheckpointError: If the file is missing or damaged.
    """
    tensors, metadata = read_tensors(_file(path))
    metadata.pop("format", None)
    tied = {name: tensors[first] for name, first in metadata.items() if first in tensors}
    return {**tied, **tensors}


def load_into(
    module: torch.nn.Module, weights: Mapping[str, torch.Tensor], *, where: str | os.PathLike[str]
) -> None:
    """Load weights into a module; every name and shape must fit.

    Args:
        module: The module.
        weights: Tensors by the module's own names.
        where: The file that they came from, for the error.

    Raises:
        CheckpointError: Listing the missing, the unexpected and the mis-shaped names. The weights
            that fit are then already loaded.
    """
    try:
        module.load_state_dict(weights, strict=True)
    except RuntimeError as error:
        raise CheckpointError(
            f"{os.fspath(where)} does not fit the module. Make the module as it was when the file "
            f"was saved, or load what fits with load_state_dict(…, strict=False). {error}"
        ) from error


def _memory(tensor: torch.Tensor) -> tuple[object, ...]:
    """The same for two tensors exactly where they are the same view of the same memory."""
    if tensor.layout != torch.strided:
        return (id(tensor),)  # it has no one stretch of memory
    memory = tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()
    return *memory, tensor.is_conj(), tensor.is_neg()


def _file(path: str | os.PathLike[str]) -> Path:
    path = Path(path)
    return path if path.suffix == ".safetensors" else path / WEIGHTS_NAME
