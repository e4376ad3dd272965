"""Write a model's weights as one file, or as shards with an index, for other libraries.

::

    model.safetensors                      or, if that would be too big,
    model-00001-of-00002.safetensors
    model-00002-of-00002.safetensors
    model.safetensors.index.json           maps each name to its file

With ``safe_serialization=False`` the files are ``pytorch_model.bin``, or shards named accordingly.
A tensor with several names is stored once, see :mod:`trainer.checkpoint.weights`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

from callbacks.folder import with_home
from trackers.strict_json import dumps
from trainer.checkpoint.atomic import sync, write_aside
from trainer.checkpoint.tensors import portable
from trainer.checkpoint.weights import WEIGHTS_NAME, separate_tied, write_weights
from trainer.names import bare_state_dict

BIN_NAME = "pytorch_model.bin"
INDEX_SUFFIX = ".index.json"

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]I?B)", re.IGNORECASE)


def save_model(
    model: torch.nn.Module,
    save_directory: str | os.PathLike[str],
    max_shard_size: int | str = "10GB",
    safe_serialization: bool = True,
) -> None:
    """Save weights in the layout that :func:`load_checkpoint_in_model` and other libraries read.

    All files are written under hidden names and then renamed, the index last. Then the weight files
    of an earlier save are removed, in both formats, so that no reader loads them instead of the new
    ones. Other files in the folder are left alone. A save that is killed leaves the earlier weights
    or, if it is killed between two renames, shards without an index.

    Args:
        model: Its ``state_dict()`` gives the tensors, under the user's own names.
        save_directory: A folder; it is created if needed.
        max_shard_size: Bytes, or a number with a unit: ``"5MB"`` (10^6), ``"5MiB"`` (2^20). A
            larger tensor gets its own file.
        safe_serialization: Write safetensors; otherwise files of ``torch.save``.

    Raises:
        ValueError: If ``max_shard_size`` is not a size above 0, or the home that
            ``save_directory`` begins with is not known.
        NotADirectoryError: If ``save_directory`` is a file.
        RuntimeError: If parameters are on the meta device and so have no data.
        TypeError: If the state dict holds anything but plain dense tensors.
    """
    limit = parse_size(max_shard_size, "max_shard_size")
    folder = Path(with_home("save_directory", save_directory))
    if folder.exists() and not folder.is_dir():
        raise NotADirectoryError(f"{folder} is a file; save_directory must be a folder.")
    state = bare_state_dict(model)
    _refuse_meta(state)
    tensors, tied = separate_tied(state)
    folder.mkdir(parents=True, exist_ok=True)
    name = WEIGHTS_NAME if safe_serialization else BIN_NAME
    shards = plan_shards(tensors, limit)
    files = _names(name, len(shards))
    aside: dict[Path, Path] = {}
    try:
        for file, names in zip(files, shards, strict=True):
            write = partial(write_weights_file, {key: tensors[key] for key in names}, tied)
            aside[folder / file] = write_aside(folder / file, write)
        if len(files) > 1:
            total = sum(map(_bytes, tensors.values()))
            places = {key: file for file, keys in zip(files, shards, strict=True) for key in keys}
            if not safe_serialization:  # torch.save's files contain tied names too
                places |= {key: places[first] for key, first in tied.items()}
            index = folder / (name + INDEX_SUFFIX)
            aside[index] = write_aside(index, lambda path: _write_index(path, total, places))
        _put_in_place(folder, name, aside)
    finally:
        for temporary in aside.values():
            temporary.unlink(missing_ok=True)


def write_weights_file(
    tensors: Mapping[str, torch.Tensor], tied: Mapping[str, str], file: Path
) -> None:
    """Write one file of weights, in the format of its suffix.

    Args:
        tensors: The stored tensors; a tied tensor only under its first name.
        tied: The other names of tied tensors, each with the first name, in this or another file.
        file: A path that ends in ``.safetensors`` or ``.bin``.

    Raises:
        TypeError: If a tensor is not a plain dense one with data.
    """
    if file.suffix == ".safetensors":
        write_weights(tensors, tied, file)
        return
    stored = {name: _compact(tensor, f"The weight {name!r}") for name, tensor in tensors.items()}
    further = {name: stored[first] for name, first in tied.items() if first in stored}
    torch.save({**stored, **further}, file)


def parse_size(size: int | str, what: str) -> int:
    """Return a size in bytes, from an int or a number with a unit.

    ``KB MB GB TB`` are powers of 1000, ``KiB MiB GiB TiB`` of 1024, in either case; with a
    lower-case final ``b``, ``KB`` to ``TB`` count bits.

    Raises:
        ValueError: If it is neither, or not above 0; ``what`` names the argument in the message.
    """
    count = size if isinstance(size, int) and not isinstance(size, bool) else _parse(size)
    if count is None or count < 1:
        raise ValueError(
            f"{what} is {size!r}; it must be a number of bytes above 0, or a string such as "
            "'5GB', '500MB' or '5GiB' (units KB, MB, GB, TB, KiB, MiB, GiB, TiB)."
        )
    return count


def plan_shards(tensors: Mapping[str, torch.Tensor], limit: int) -> list[list[str]]:
    """Return the names for each file, in order; a tensor that would not fit starts a new file.

    Args:
        tensors: The tensors in order.
        limit: Maximum bytes per file; only a single larger tensor exceeds it.

    Returns:
        At least one list, even without tensors.
    """
    shards: list[list[str]] = [[]]
    filled = 0
    for name, tensor in tensors.items():
        size = _bytes(tensor)
        if shards[-1] and filled + size > limit:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += size
    return shards


def _parse(size: Any) -> int | None:
    match = _SIZE.fullmatch(size.strip()) if isinstance(size, str) else None
    if match is None:
        return None
    number, unit = float(match[1]), match[2]
    power = "KMGT".index(unit[0].upper()) + 1
    count = number * (1024 if len(unit) == 3 else 1000) ** power
    return int(count / 8 if unit.endswith("b") and len(unit) == 2 else count)


def _bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _names(name: str, count: int) -> list[str]:
    if count == 1:
        return [name]
    stem, suffix = name.split(".")
    return [f"{stem}-{number:05d}-of-{count:05d}.{suffix}" for number in range(1, count + 1)]


def _compact(tensor: torch.Tensor, where: str) -> torch.Tensor:
    """Return a portable tensor; a view is copied, or ``torch.save`` would write all its storage."""
    stored = portable(tensor, where).cpu()
    return stored.clone() if stored.untyped_storage().nbytes() > _bytes(stored) else stored


def _write_index(file: Path, total: int, places: Mapping[str, str]) -> None:
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(places.items()))}
    file.write_text(dumps(index, indent=2) + "\n", encoding="utf-8")


def _put_in_place(folder: Path, name: str, aside: Mapping[Path, Path]) -> None:
    other = BIN_NAME if name == WEIGHTS_NAME else WEIGHTS_NAME
    index, old = folder / (name + INDEX_SUFFIX), _files_of(folder, name)
    if index in old and any(file in aside for file in old if file != index):
        # The old index would otherwise list shards of both saves, a mixture of weights.
        index.unlink()
        sync(folder)
        old.remove(index)
    for file, temporary in aside.items():  # the index comes last
        os.replace(temporary, file)
    sync(folder)
    for file in (*old, *_files_of(folder, other)):
        if file not in aside:
            file.unlink()


def _files_of(folder: Path, name: str) -> list[Path]:
    """Return the weight files of one format in a folder, the index first."""
    stem, suffix = name.split(".")
    shard = re.compile(rf"{stem}-\d{{5}}-of-\d{{5}}\.{suffix}")
    index = name + INDEX_SUFFIX
    found = [
        file
        for file in folder.iterdir()
        if file.name in (name, index) or shard.fullmatch(file.name)
    ]
    return sorted(found, key=lambda file: (file.name != index, file.name))


def _refuse_meta(state: Mapping[str, object]) -> None:
    empty = [
        name for name, value in state.items() if isinstance(value, torch.Tensor) and value.is_meta
    ]
    if empty:
        raise RuntimeError(
            f"The model cannot be saved: {', '.join(empty[:5])}{', …' if len(empty) > 5 else ''} "
            "have no data, being on the meta device. Load weights first, or give them data with "
            "to_empty()."
        )
