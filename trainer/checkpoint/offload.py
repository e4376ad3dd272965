"""Weights offloaded to disk: one file of raw bytes per tensor, and an index of dtypes and shapes.

::

    <name>.dat      the elements in C order, in the machine's byte order
    index.json      {name: {"dtype": "bfloat16", "shape": [2, 3]}}
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from trackers.strict_json import dumps
from trainer.checkpoint.atomic import write_whole
from trainer.checkpoint.tensors import portable
from trainer.errors import CheckpointError
from trainer.tree import as_bytes

_INDEX = "index.json"


def offload_weight(
    weight: torch.Tensor, name: str, folder: str | os.PathLike[str], index: dict[str, Any]
) -> None:
    """Write one weight to the disk.

    Args:
        weight: A dense tensor of any dtype.
        name: Its name; the file is ``<name>.dat``.
        folder: An existing folder.
        index: The folder's index, to which the weight is added.
    """
    raw = as_bytes(portable(weight, f"The weight {name!r}").cpu())
    write_whole(Path(folder) / f"{name}.dat", lambda path: raw.numpy().tofile(path))
    dtype = str(weight.dtype).removeprefix("torch.")
    index[name] = {"dtype": dtype, "shape": list(weight.shape)}


def save_offload_index(index: Mapping[str, Any], folder: str | os.PathLike[str]) -> None:
    """Add entries to a folder's index file, created if needed; do nothing without entries."""
    if index:
        known = _load_index(folder)
        text = dumps({**known, **index}, indent=2)
        write_whole(Path(folder) / _INDEX, lambda path: path.write_text(text, encoding="utf-8"))


def _load_index(folder: str | os.PathLike[str]) -> dict[str, Any]:
    file = Path(folder) / _INDEX
    if not file.exists():
        return {}
    try:
        index: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise CheckpointError(f"{file} cannot be read: {error}. Use another folder.") from error
    return index
