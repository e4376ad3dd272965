"""Weights offloaded to disk, and mappings that read them on access.

An offload folder holds safetensors files, and an index of which weight is in which::

    index.json                     {name: {"safetensors_file", "weight_name", "dtype", "shape", …}}
    offload-<name>.safetensors     one weight that was written here
    offload-<number>.safetensors   a hard link to a file of a checkpoint, which takes no space

An indexed file may also be in another folder. A weight without a file name is stored as raw bytes
in ``<name>.dat``, as written by accelerate.

Weights are memory-mapped: only pages that are used are read, into the system's page cache, which
shrinks when memory is short. A file is unmapped when its last tensor is freed.
"""

from __future__ import annotations

import mmap
import os
import uuid
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn

from trainer.big_models.tensors import memory_of, parse_dtype, set_module_tensor_to_device
from trainer.checkpoint.serialization import stream_tensors
from trainer.checkpoint.storage import check_file, reading
from trainer.errors import CheckpointError
from trainer.files import hidden_beside, read_json
from trainer.strict_json import dumps

Folder = str | os.PathLike[str]
Index = dict[str, dict[str, Any]]

INDEX = "index.json"
_NUMBER = "number"  # identifies a written weight, in its file and in the index


def offload_weight(
    weight: Tensor, weight_name: str, offload_folder: Folder, index: Index | None = None
) -> Index | None:
    """Write one weight to an offload folder.

    Args:
        weight: A dense tensor.
        weight_name: Its name.
        offload_folder: An existing folder.
        index: The folder's index, to which the weight is added; pass it to `save_offload_index`.

    Returns:
        `index`.

    Raises:
        TypeError: The weight is not a plain dense tensor with values.
    """
    file = Path(offload_folder) / f"offload-{quote(weight_name, safe='')}.safetensors"
    hidden, number = hidden_beside(file), uuid.uuid4().hex
    try:
        # Not synced, since the folder is of no use after this process.
        stream_tensors({weight_name: weight}, [weight], hidden, {"format": "pt", _NUMBER: number})
        os.replace(hidden, file)
    except BaseException:
        hidden.unlink(missing_ok=True)
        raise
    if index is not None:
        index[weight_name] = {**entry(file.name, weight_name, weight), _NUMBER: number}
    return index


def entry(file: str, weight_name: str, like: Any) -> dict[str, Any]:
    """Return a weight's entry in an index.

    Args:
        file: The file's name in the folder, or a path.
        weight_name: The weight's name in the file.
        like: Any object with the weight's dtype and shape.
    """
    dtype = str(like.dtype).removeprefix("torch.")
    shape = list(like.shape)
    return {"safetensors_file": file, "weight_name": weight_name, "dtype": dtype, "shape": shape}


def link_weights(file: Path, folder: Path) -> str | None:
    """Give a checkpoint's file a second name in an offload folder, without copying it.

    The weights remain available if the checkpoint is replaced or deleted.

    Returns:
        The name; None if the folder is on another disk, or its file system has no links.
    """
    source = Path(os.path.realpath(file))  # files in a hub cache are symlinks
    link = folder / f"offload-{source.stat().st_ino}.safetensors"
    try:
        if not (link.exists() and link.samefile(source)):
            link.unlink(missing_ok=True)
            os.link(source, link)
    except OSError:
        return None
    return link.name


def save_offload_index(index: Index | None, offload_folder: Folder) -> None:
    """Add entries to a folder's index, created if needed; do nothing without entries."""
    if not index:
        return
    file = Path(offload_folder) / INDEX
    hidden = hidden_beside(file)
    existing = read_offload_index(offload_folder) if file.exists() else {}
    hidden.write_text(dumps({**existing, **index}, indent=2), encoding="utf-8")
    os.replace(hidden, file)


def read_offload_index(offload_folder: Folder) -> Index:
    """Return a folder's index.

    Raises:
        CheckpointError: There is no index, or it is damaged.
    """
    file = Path(offload_folder) / INDEX
    with reading(file):
        index: Index = read_json(file)
        return {name: dict(described) for name, described in index.items()}


def offload_state_dict(save_dir: Folder, state_dict: Mapping[str, Tensor]) -> None:
    """Write tensors to an offload folder, created if needed, and add them to its index.

    Args:
        save_dir: The folder.
        state_dict: Tensors by name; one with several names is written once.
    """
    folder = Path(save_dir)
    folder.mkdir(parents=True, exist_ok=True)
    index: Index = {}
    first: dict[Any, str] = {}
    for name, tensor in state_dict.items():
        stored = first.setdefault(memory_of(tensor), name)
        if stored == name:
            offload_weight(tensor, name, folder, index)
        else:
            index[name] = index[stored]
    save_offload_index(index, folder)


def load_offloaded_weight(weight_file: Folder, weight_info: Mapping[str, Any]) -> Tensor:
    """Return a weight from a ``.dat`` file, memory-mapped.

    Args:
        weight_file: The file.
        weight_info: Its ``dtype`` and ``shape``.

    Raises:
        CheckpointError: The file is missing, or too short.
    """
    file, shape = Path(weight_file), weight_info["shape"]
    dtype = parse_dtype(weight_info["dtype"])
    size = torch.Size(shape).numel()
    check_file(file)
    with reading(file):
        if (size_on_disk := file.stat().st_size) != size * dtype.itemsize:
            raise CheckpointError(
                f"{file} has {size_on_disk} bytes; {dtype} of shape {list(shape)} has "
                f"{size * dtype.itemsize}."
            )
        if not size:
            return torch.empty(shape, dtype=dtype)
        return torch.from_file(str(file), shared=False, size=size, dtype=dtype).view(shape)


def load_offloaded_weights(model: nn.Module, index: Index | None, offload_folder: Folder) -> None:
    """Put the weights of an index into a model, on the CPU.

    Args:
        model: The model.
        index: The entries of the weights, as filled in by `offload_weight`; without entries nothing
            is done.
        offload_folder: The folder of the weights.

    Raises:
        ValueError: The model has no such tensor, or one of another shape.
        CheckpointError: A file is missing or damaged.
    """
    if index:
        weights = OffloadedWeightsLoader(save_folder=offload_folder, index=index)
        for name, weight in weights.items():
            set_module_tensor_to_device(model, name, "cpu", weight.clone())


def extract_submodules_state_dict(
    state_dict: Mapping[str, Tensor], submodule_names: Iterable[str]
) -> dict[str, Tensor]:
    """Return the entries of a state dict for these modules or tensors."""
    names = list(submodule_names)
    return {
        key: tensor
        for key, tensor in state_dict.items()
        if any(not name or f"{key}.".startswith(f"{name}.") for name in names)
    }


def in_own_pages(weight: Tensor) -> Tensor:
    """Return a copy of a weight on the CPU, whose memory returns to the system with the tensor.

    Torch's allocator returns only part of the memory of large weights that are repeatedly loaded
    and freed.
    """
    pages = mmap.mmap(-1, weight.nbytes)
    copy = torch.frombuffer(pages, dtype=weight.dtype).view(weight.shape)
    return copy.copy_(weight.detach())


class OffloadedWeightsLoader(Mapping[str, Tensor]):
    """The weights of a state dict and of an offload folder by name, read on access.

    While a weight is in use, each access returns the same tensor, also by tied names.

    Args:
        state_dict: Weights in memory, which take precedence.
        save_folder: An offload folder.
        index: The entries of an index; None reads the index of `save_folder`. Paths are relative to
            that folder.
        device: The device of weights from safetensors files; None is the CPU.

    Raises:
        ValueError: Neither `state_dict`, `save_folder` nor `index` is given.
        CheckpointError: The index is missing or damaged; or, on access to a weight, its file.
    """

    def __init__(
        self,
        state_dict: Mapping[str, Tensor] | None = None,
        save_folder: Folder | None = None,
        index: Mapping[str, Any] | None = None,
        device: Any = None,
    ) -> None:
        if state_dict is None and save_folder is None and index is None:
            raise ValueError(
                "Need either a `state_dict`, a `save_folder` or an `index` of offloaded weights."
            )
        if index is None:
            index = {} if save_folder is None else read_offload_index(save_folder)
        self.state_dict = {} if state_dict is None else state_dict
        self.save_folder = save_folder
        self.index = index
        self.device = device
        self.all_keys = list(dict.fromkeys([*self.state_dict, *self.index]))
        self._in_use: WeakValueDictionary[tuple[str, str], Tensor] = WeakValueDictionary()

    def __getitem__(self, key: str) -> Tensor:
        if key in self.state_dict:
            return self.state_dict[key]
        info = self.index[key]
        folder = Path(self.save_folder or "")
        if (file := info.get("safetensors_file")) is None:
            return load_offloaded_weight(folder / f"{key}.dat", info)
        key_in_file = str(folder / file), str(info.get("weight_name", key))
        weight = self._in_use.get(key_in_file)
        if weight is None:
            weight = self._read(*key_in_file, info)
            self._in_use[key_in_file] = weight
        return weight

    def _read(self, file: str, name: str, info: Mapping[str, Any]) -> Tensor:
        from safetensors import safe_open

        check_file(Path(file))
        with reading(file), safe_open(file, framework="pt") as opened:
            number = info.get(_NUMBER)
            if number is not None and (opened.metadata() or {}).get(_NUMBER) != number:
                raise CheckpointError(
                    f"{file} is not the weight that was written: another model has written to "
                    "the same folder. Give each model a separate offload folder."
                )
            weight: Tensor = opened.get_tensor(name)
        wanted = parse_dtype(info.get("dtype") or weight.dtype)
        return weight.to(self.device or "cpu", wanted)

    def __contains__(self, key: object) -> bool:
        return key in self.state_dict or key in self.index  # without reading the weight

    def __iter__(self) -> Iterator[str]:
        return iter(self.all_keys)

    def __len__(self) -> int:
        return len(self.all_keys)


class PrefixedDataset(Mapping[str, Tensor]):
    """The entries of a mapping whose names begin with a prefix, named without the prefix."""

    def __init__(self, dataset: Mapping[str, Tensor], prefix: str) -> None:
        self.dataset = dataset
        self.prefix = prefix

    def __getitem__(self, key: str) -> Tensor:
        return self.dataset[f"{self.prefix}{key}"]

    def __contains__(self, key: object) -> bool:
        return f"{self.prefix}{key}" in self.dataset  # without reading the weight, unlike Mapping's

    def __iter__(self) -> Iterator[str]:
        return (k.removeprefix(self.prefix) for k in self.dataset if k.startswith(self.prefix))

    def __len__(self) -> int:
        return sum(1 for _ in self)
