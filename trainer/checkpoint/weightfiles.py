"""Find the weight files of a checkpoint (single file or shards with an index), and read them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from trackers.files import read_json
from trainer.checkpoint.manifest import check_file, is_portable, reading
from trainer.checkpoint.model import BIN_NAME, INDEX_SUFFIX
from trainer.checkpoint.torchfile import read_torch_file
from trainer.checkpoint.weights import WEIGHTS_NAME, tied_names
from trainer.errors import CheckpointError


def find_weight_files(checkpoint: str | os.PathLike[str]) -> list[Path]:
    """Return the files of a checkpoint's weights, in order.

    Args:
        checkpoint: A file of weights, an index (``.index.json``), or a folder with either. In a
            folder ``model.safetensors`` is preferred to ``pytorch_model.bin``, and both to shards.

    Raises:
        ValueError: If there are no weights, or more than one index.
        CheckpointError: If an index is damaged, or a file that it lists is missing.
    """
    path = Path(checkpoint)
    if path.is_file():
        return _indexed(path) if path.name.endswith(".json") else [path]
    if not path.is_dir():
        raise ValueError(
            f"checkpoint is {os.fspath(checkpoint)!r}; it must be a file of weights, an index that "
            "ends in .index.json, or a folder with one of these."
        )
    for name in (WEIGHTS_NAME, BIN_NAME):
        if (path / name).is_file():
            return [path / name]
    indexes = sorted(path.glob(f"*{INDEX_SUFFIX}"))
    if not indexes:
        raise ValueError(
            f"{path} holds neither {WEIGHTS_NAME} nor {BIN_NAME} nor an index that ends in "
            f"{INDEX_SUFFIX}; give the folder or the file that the weights were saved to."
        )
    if len(indexes) > 1:
        raise ValueError(
            f"{path} holds {len(indexes)} indexes: {', '.join(index.name for index in indexes)}. "
            "Give the path of the one to load, or delete the others."
        )
    return _indexed(indexes[0])


def read_shapes(file: Path) -> dict[str, tuple[int, ...]]:
    """Return the shape of each weight in a file, tied names included, without reading weights.

    Raises:
        CheckpointError: If the file cannot be read, or is not a file of weights.
    """
    if file.suffix == ".safetensors":
        with _opened(file) as opened:
            names = opened.keys()
            shapes = {name: tuple(opened.get_slice(name).get_shape()) for name in names}
            tied = tied_names(opened.metadata() or {}, shapes)
            return shapes | {name: shapes[first] for name, first in tied.items()}
    return {name: tuple(tensor.shape) for name, tensor in _torch_weights(file).items()}


def read_each(file: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the name and tensor of each weight of a file, tied names included.

    The tensors may be views of the memory-mapped file: copy the ones that you keep.

    Raises:
        CheckpointError: If the file cannot be read, or is not a file of weights.
    """
    if file.suffix == ".safetensors":
        with _opened(file) as opened:
            names = list(opened.keys())
            tied = tied_names(opened.metadata() or {}, set(names))
            for name in names:
                tensor = opened.get_tensor(name)
                for each in (name, *(other for other, first in tied.items() if first == name)):
                    yield each, tensor
        return
    yield from _torch_weights(file).items()


def _indexed(index: Path) -> list[Path]:
    names = sorted(set(read_index(index).values()))
    if not names:
        raise CheckpointError(f"{index} lists no file of weights.")
    if outside := [name for name in names if "/" in name or not is_portable(name)]:
        raise CheckpointError(f"{index} lists files outside its folder: {', '.join(outside)}.")
    if missing := [name for name in names if not (index.parent / name).is_file()]:
        raise CheckpointError(f"{index} lists files that are missing: {', '.join(missing)}.")
    return [index.parent / name for name in names]


def read_index(index: Path) -> dict[str, str]:
    """Return the file of each weight, as an index lists them.

    Raises:
        CheckpointError: The file cannot be read, or is not an index.
    """
    with reading(index, "is not an index of weights"):
        content = read_json(os.path.realpath(index))  # files in a hub cache are symlinks
        places = content.get("weight_map", content)  # some files are only the map
        if not all(isinstance(name, str) for name in places.values()):
            raise CheckpointError(f"{index} is not an index of weights.")
        return dict(places)


@contextmanager
def _opened(file: Path) -> Iterator[Any]:
    from safetensors import safe_open

    check_file(file)
    with reading(file), safe_open(file, framework="pt") as opened:
        yield opened


def _torch_weights(file: Path) -> dict[str, torch.Tensor]:
    weights = read_torch_file(file, mmap=True)
    if not isinstance(weights, dict) or not all(
        isinstance(value, torch.Tensor) for value in weights.values()
    ):
        raise CheckpointError(
            f"{file} is not a file of weights: it must hold a dict of tensors by name, as "
            "torch.save(model.state_dict(), …) writes it."
        )
    return weights
