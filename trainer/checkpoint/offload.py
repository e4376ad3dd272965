"""Weights that stay on the disk: one file of raw bytes each, and an index of what they are.

::

    <name>.dat      the elements in C order, in the machine's byte order
    index.json      {name: {"dtype": "bfloat16", "shape": [2, 3]}}
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

import torch

from trainer.checkpoint.atomic import write_whole
from trainer.checkpoint.tensors import portable
from trainer.errors import CheckpointError

_INDEX = "index.json"


def offload_weight(
    weight: torch.Tensor, name: str, folder: str | os.PathLike[str], index: dict[str, Any]
) -> dict[str, Any]:
    """Write one weight to the disk.

    Args:
        weight: Of any dense dtype.
        name: Its name; the file is ``<name>.dat``.
        folder: An existing folder.
        index: What is in the folder; the weight is added, and the same dict returned.
    """
    raw = portable(weight, f"The weight {name!r}").cpu().reshape(-1).view(torch.uint8)
    write_whole(Path(folder) / f"{name}.dat", lambda path: raw.numpy().tofile(path))
    dtype = str(weight.dtype).removeprefix("torch.")
    index[name] = {"dtype": dtype, "shape": list(weight.shape)}
    return index


def load_offloaded_weight(file: str | os.PathLike[str], info: Mapping[str, Any]) -> torch.Tensor:
    """Map a weight into memory; it is read from the disk where it is used.

    Args:
        file: The ``.dat`` file. It must not change while the tensor is in use.
        info: Its entry of the index.

    Raises:
        CheckpointError: If the file is missing or has another size than ``info`` says.
    """
    file, dtype, shape = Path(file), getattr(torch, info["dtype"]), tuple(info["shape"])
    expected = prod(shape) * dtype.itemsize
    size = file.stat().st_size if file.is_file() else None
    if size != expected:
        found = "is missing" if size is None else f"has {size} bytes"
        raise CheckpointError(f"{file} {found}; a {info['dtype']} of shape {shape} has {expected}.")
    if not size:
        return torch.empty(shape, dtype=dtype)
    flat = torch.from_file(os.fspath(file), shared=False, size=prod(shape), dtype=dtype)
    return flat.reshape(shape)


def save_offload_index(index: Mapping[str, Any], folder: str | os.PathLike[str]) -> None:
    """Add entries to a folder's index, which is made if need be; nothing to add, nothing done."""
    if index:
        known = load_offload_index(folder)
        text = json.dumps({**known, **index}, indent=2)
        write_whole(Path(folder) / _INDEX, lambda path: path.write_text(text, encoding="utf-8"))


def load_offload_index(folder: str | os.PathLike[str]) -> dict[str, Any]:
    """What a folder's index says: dtype and shape by name; empty where there is none."""
    file = Path(folder) / _INDEX
    if not file.exists():
        return {}
    try:
        index: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise CheckpointError(f"{file} cannot be read: {error}. Use another folder.") from error
    return index
