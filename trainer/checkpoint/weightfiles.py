"""Files of weights as they are found: which belong together, what is in them, how they fit."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from trainer.checkpoint.model import BIN_NAME, INDEX_SUFFIX
from trainer.checkpoint.torchfile import read_torch_file
from trainer.checkpoint.weights import WEIGHTS_NAME
from trainer.errors import CheckpointError


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


def find_weight_files(checkpoint: str | os.PathLike[str]) -> list[Path]:
    """The files of a checkpoint's weights, in order.

    Args:
        checkpoint: A file of weights, an index (``.index.json``), or a folder with either. In a
            folder ``model.safetensors`` is preferred to ``pytorch_model.bin``, and both to shards.

    Raises:
        ValueError: If there is nothing of the kind, or more than one index.
        CheckpointError: If an index is damaged, or a file that it names is missing.
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
    """The shape of each weight in a file by name, tied names included; no weight is read.

    Raises:
        CheckpointError: If the file cannot be read, or holds something else.
    """
    if file.suffix == ".safetensors":
        with _opened(file) as opened:
            shapes = {name: tuple(opened.get_slice(name).get_shape()) for name in opened.keys()}  # noqa: SIM118
            return shapes | {name: shapes[first] for name, first in _tied(opened, shapes).items()}
    return {name: tuple(tensor.shape) for name, tensor in _torch_weights(file).items()}


def read_each(file: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Each weight of a file, tied names included.

    The tensors may be parts of the mapped file: copy what is kept.

    Raises:
        CheckpointError: If the file cannot be read, or holds something else.
    """
    if file.suffix == ".safetensors":
        with _opened(file) as opened:
            tied = _tied(opened, names := list(opened.keys()))
            for name in names:
                tensor = opened.get_tensor(name)
                for each in (name, *(other for other, first in tied.items() if first == name)):
                    yield each, tensor
        return
    yield from _torch_weights(file).items()


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


def _indexed(index: Path) -> list[Path]:
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        missing = [name for name in names if not (index.parent / name).is_file()]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{index} is no index of weights: {error!r}.") from error
    if not names:
        raise CheckpointError(f"{index} names no file of weights.")
    if outside := [name for name in names if Path(name).name != name]:
        raise CheckpointError(f"{index} names files outside its folder: {', '.join(outside)}.")
    if missing:
        raise CheckpointError(f"{index} names files that are missing: {', '.join(missing)}.")
    return [index.parent / name for name in names]


@contextmanager
def _opened(file: Path) -> Iterator[Any]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, framework="pt") as opened:
            yield opened
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{file} cannot be read: {error}.") from error


def _tied(opened: Any, names: Iterable[str]) -> dict[str, str]:
    """The further names in a file's metadata, each with the first; see the weights' format."""
    stored = set(names)
    metadata = opened.metadata() or {}
    return {
        name: first
        for name, first in metadata.items()
        if name not in stored and name != "format" and first in stored
    }


def _torch_weights(file: Path) -> dict[str, torch.Tensor]:
    weights = read_torch_file(file, mmap=True)
    if not isinstance(weights, dict) or not all(
        isinstance(value, torch.Tensor) for value in weights.values()
    ):
        raise CheckpointError(
            f"{file} is no file of weights: it must hold a dict of tensors by name, which is what "
            "torch.save(model.state_dict(), …) writes."
        )
    return weights
