"""A model's weights in a folder: one file, or shards with an index, as other libraries read them.

::

    model.safetensors                      or, where that would be too big,
    model-00001-of-00002.safetensors
    model-00002-of-00002.safetensors
    model.safetensors.index.json           which name is in which file

``pytorch_model.bin`` and its kin take the same places with ``safe_serialization=False``. A tensor
of several names is stored once, as :mod:`trainer.checkpoint.weights` says.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

from trainer.checkpoint.atomic import write_aside
from trainer.checkpoint.layout import sync
from trainer.checkpoint.tensors import portable
from trainer.checkpoint.weights import WEIGHTS_NAME, bare_names, separate_tied, write_weights

BIN_NAME = "pytorch_model.bin"
INDEX_SUFFIX = ".index.json"

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]I?B)", re.IGNORECASE)


def save_model(
    model: torch.nn.Module,
    save_directory: str | os.PathLike[str],
    max_shard_size: int | str = "10GB",
    safe_serialization: bool = True,
) -> None:
    """Save weights so that :func:`load_checkpoint_in_model` and other libraries read them.

    Everything is written under hidden names and then renamed, the index last. Files of an earlier
    save go after that, those of the other kind too, which might else be loaded in place of the new
    ones; other files in the folder are left alone. A save that is killed leaves the earlier weights
    or, for a moment between the renames, shards without an index.

    Args:
        model: The bare module; its ``state_dict()`` gives names, without what ``torch.compile``
            puts into those of compiled submodules, and tensors.
        save_directory: A folder; it is made if need be.
        max_shard_size: Bytes, or a number with a unit: ``"5MB"`` (10^6), ``"5MiB"`` (2^20). A
            tensor that is bigger gets a file of its own.
        safe_serialization: Write safetensors; otherwise files of ``torch.save``.

    Raises:
        ValueError: If ``max_shard_size`` is no size above 0.
        NotADirectoryError: If ``save_directory`` is a file.
        RuntimeError: If parameters have no data, being on the meta device.
        TypeError: If the state dict holds something else than plain dense tensors.
    """
    limit = parse_size(max_shard_size, "max_shard_size")
    folder = Path(save_directory)
    if folder.exists() and not folder.is_dir():
        raise NotADirectoryError(f"{folder} is a file; save_directory must be a folder.")
    state = bare_names(model.state_dict())
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
            if not safe_serialization:  # there every name is in a file
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
    """Write one file of weights, of the kind that its name ends in.

    Args:
        tensors: Each stored tensor by its first name.
        tied: For each further name of a tensor, stored here or elsewhere, its first.
        file: Ends in ``.safetensors`` or ``.bin``.

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
    """Bytes of a size: an int, or a number and a unit.

    ``KB MB GB TB`` are powers of 1000, ``KiB MiB GiB TiB`` of 1024, in either case; after a small
    final ``b`` the number counts bits.

    Raises:
        ValueError: If it is neither, or not above 0; the text names ``what`` it is for.
    """
    count = size if isinstance(size, int) and not isinstance(size, bool) else _parse(size)
    if count is None or count < 1:
        raise ValueError(
            f"{what} is {size!r}; it must be a number of bytes above 0, or a text such as '5GB', "
            "'500MB' or '5GiB' (units KB, MB, GB, TB, KiB, MiB, GiB, TiB)."
        )
    return count


def plan_shards(tensors: Mapping[str, torch.Tensor], limit: int) -> list[list[str]]:
    """Names for each file, in order: a file is begun when the next tensor would not fit any more.

    Args:
        tensors: The tensors in their order.
        limit: Bytes in a file; only a single bigger tensor passes it.

    Returns:
        At least one list, even for no tensors at all.
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
    """A portable tensor without the rest of a bigger storage, which ``torch.save`` would write."""
    stored = portable(tensor, where).cpu()
    return stored.clone() if stored.untyped_storage().nbytes() > _bytes(stored) else stored


def _write_index(file: Path, total: int, places: Mapping[str, str]) -> None:
    index = {"metadata": {"total_size": total}, "weight_map": dict(places)}
    file.write_text(json.dumps(index, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _put_in_place(folder: Path, name: str, aside: Mapping[Path, Path]) -> None:
    other = BIN_NAME if name == WEIGHTS_NAME else WEIGHTS_NAME
    index, old = folder / (name + INDEX_SUFFIX), _files_of(folder, name)
    if index in old and any(file in aside for file in old if file != index):
        # Shards of both saves would go under the old index: rather none is found than a mixture.
        index.unlink()
        sync(folder)
        old.remove(index)
    for file, temporary in aside.items():  # the index is the last of them
        os.replace(temporary, file)
    sync(folder)
    for file in (*old, *_files_of(folder, other)):
        if file not in aside:
            file.unlink()


def _files_of(folder: Path, name: str) -> list[Path]:
    """The files of weights of one kind that are in a folder, the index first."""
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
