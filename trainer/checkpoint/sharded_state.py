"""Sharded tensors in a checkpoint: each process writes the parts that it holds.

``shard-<rank>.safetensors`` holds a process's parts, with the offsets of each in the header under
the keys that torch's ``HuggingFaceStorageReader`` reads. ``shards.json`` holds the whole shape and
dtype of each tensor, so that a missing part is noticed. Parts are written without communication,
and read by any layout of processes: each reads only what it holds.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from copy import copy
from fnmatch import fnmatch
from functools import cached_property
from itertools import chain, repeat
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from trainer.checkpoint.serialization import not_a_tensor, portable, write_tensors
from trainer.errors import CheckpointError
from trainer.files import read_json

INDEX = "shards.json"
SHARD = "shard-*.safetensors"
_OFFSETS = "DCP_SHARDING_INFO"  # the key of torch.distributed.checkpoint's safetensors reader
_LARGEST = 1 << 30


def is_sharded(value: object) -> bool:
    """Return whether a value is a tensor that is split over processes (a ``DTensor``)."""
    return isinstance(value, Tensor) and hasattr(value, "device_mesh")


def local_part(tensor: Any) -> tuple[list[int], Tensor]:
    """Return the offsets and the values of this process's part of a sharded tensor."""
    local = tensor.to_local()
    if not local.numel():
        return [0] * tensor.ndim, local
    (chunk,) = tensor.__create_chunk_list__()  # what torch.distributed.checkpoint asks, too
    return list(chunk.offsets), local


def gathered(tensor: Any) -> Tensor:
    """Return the whole tensor on all processes; collective for a sharded one."""
    whole: Tensor = tensor.full_tensor() if is_sharded(tensor) else tensor
    return whole


class Shards:
    """Collects this process's parts of the sharded tensors of a checkpoint.

    Args:
        rank: The rank of this process.
        mesh: The device mesh of all processes.
    """

    def __init__(self, rank: int, mesh: Any) -> None:
        self._rank, self._mesh = rank, mesh
        self._parts: dict[str, Tensor] = {}
        self._offsets: dict[str, list[int]] = {}
        self._index: dict[str, Any] = {}
        self._seen: dict[tuple[object, ...], str] = {}

    def add(self, name: str, tensor: Any) -> str:
        """Add a tensor, sharded or the same on all processes; return the name it is stored under.

        Tensors that share memory, such as tied weights, are stored once.
        """
        offsets, local = local_part(tensor) if is_sharded(tensor) else ([0] * tensor.ndim, tensor)
        memory = (local.data_ptr(), tuple(local.shape), local.stride(), tuple(offsets))
        if local.numel() and (known := self._seen.setdefault(memory, name)) != name:
            return known
        dtype = str(tensor.dtype).removeprefix("torch.")
        self._index[name] = {"shape": list(tensor.shape), "dtype": dtype}
        writes = self._writes(tensor) if is_sharded(tensor) else self._rank == 0
        if writes and (local.numel() or not tensor.numel()):
            self._parts[name] = portable(local.detach(), name)
            self._offsets[name] = offsets
        return name

    def add_weights(self, state_dict: Mapping[str, Any], section: str = "") -> None:
        """Add all weights of a model; names of tied weights are recorded.

        Args:
            state_dict: The weights by name; those of lazy modules without values are left out.
            section: What their names begin with, which tells the models of a checkpoint apart.

        Raises:
            TypeError: A value is not a tensor.
        """
        for name, tensor in state_dict.items():
            if not isinstance(tensor, Tensor):
                raise TypeError(not_a_tensor(name, tensor))
            if is_lazy(tensor):
                continue
            stored = self.add(section + name, tensor)
            if stored != section + name:
                self._index[section + name] = {"tied": stored}
            self._index[section + name]["section"] = section

    def _writes(self, tensor: Any) -> bool:
        """Return whether this process is the first of those that hold the same part."""
        mesh = tensor.device_mesh
        where = mesh.get_coordinate()
        same = [
            place
            for place, placement in zip(where, tensor.placements, strict=True)
            if placement.is_replicate()
        ]
        # Along dimensions of all processes that the tensor's mesh lacks, it is the same, too.
        own = mesh.mesh_dim_names or ()
        root = zip(self._mesh.mesh_dim_names or (), self._mesh.get_coordinate(), strict=True)
        same += [place for name, place in root if name not in own]
        return not any(same)

    @property
    def tensors(self) -> dict[str, Tensor]:
        """This process's parts by name."""
        return self._parts

    def write(self, values: Mapping[str, Tensor], folder: Path) -> None:
        """Write parts with these values into a folder, and on rank 0 the index."""
        offsets = {name: {"saved_offsets": where} for name, where in self._offsets.items()}
        metadata = {"format": "pt", "DCP_VERSION": "1.0", _OFFSETS: json.dumps(offsets)}
        if values:
            write_tensors(values, folder / f"shard-{self._rank:05d}.safetensors", metadata)
        if self._rank == 0:
            document = {"version": 1, "tensors": self._index}
            (folder / INDEX).write_text(json.dumps(document), encoding="utf-8")


class ShardedTensor:
    """A tensor of a sharded checkpoint, of which any region can be read.

    Attributes:
        shape: The shape of the whole tensor.
        dtype: Its dtype.
    """

    def __init__(self, reader: ShardReader, name: str, shape: list[int], dtype: str) -> None:
        self._reader, self._name = reader, name
        self.shape = torch.Size(shape)
        self.dtype: torch.dtype = getattr(torch, dtype)

    def read(self, offsets: Sequence[int], shape: Sequence[int]) -> Tensor:
        """Return a region, on the CPU.

        Raises:
            CheckpointError: A part of it is in no file.
        """
        region = torch.empty(tuple(shape), dtype=self.dtype)
        filled = 0
        for part, opened in self._reader.parts_of(self._name):
            size = opened.get_slice(self._name).get_shape()
            low = [max(a, b) for a, b in zip(offsets, part, strict=True)]
            high = [
                min(a + s, b + z) for a, s, b, z in zip(offsets, shape, part, size, strict=True)
            ]
            if any(last <= first for first, last in zip(low, high, strict=True)):
                continue
            there, here = _slices(low, high, part), _slices(low, high, offsets)
            piece = opened.get_slice(self._name)[there] if there else opened.get_tensor(self._name)
            region[here] = piece
            filled += piece.numel()
        if filled != region.numel():
            raise CheckpointError(
                f"{self._name}: {filled} of {region.numel()} values are in the shards."
            )
        return region

    def whole(self) -> Tensor:
        """Return the whole tensor, on the CPU."""
        return self.read([0] * len(self.shape), self.shape)


def _slices(low: Sequence[int], high: Sequence[int], offsets: Sequence[int]) -> tuple[slice, ...]:
    """Return the slices from `low` to `high` in a part that begins at some offsets."""
    return tuple(slice(a - o, b - o) for a, b, o in zip(low, high, offsets, strict=True))


class ShardReader:
    """Opens the shards of a checkpoint.

    Args:
        folder: The checkpoint.
        files: The names of its files, by its manifest.

    Raises:
        CheckpointError: A shard cannot be read.
    """

    def __init__(self, folder: Path, files: Iterable[str]) -> None:
        self._folder = folder
        self._shards = sorted(name for name in files if fnmatch(name, SHARD))
        self._index = read_json(folder / INDEX, _LARGEST)["tensors"]

    @cached_property
    def _opened(self) -> dict[str, list[tuple[list[int], Any]]]:
        from safetensors import safe_open

        found: dict[str, list[tuple[list[int], Any]]] = {}
        for name in self._shards:
            opened: Any = safe_open(self._folder / name, framework="pt")
            for key, where in json.loads(opened.metadata()[_OFFSETS]).items():
                found.setdefault(key, []).append((where["saved_offsets"], opened))
        return found

    def parts_of(self, name: str) -> list[tuple[list[int], Any]]:
        """Return the offsets of each part of a tensor, with its opened file."""
        return self._opened.get(name, [])

    def tensor(self, name: str) -> ShardedTensor:
        """Return a tensor by name."""
        known = self._index[name]
        if "tied" in known:
            return self.tensor(known["tied"])
        return ShardedTensor(self, name, known["shape"], known["dtype"])

    def weights(self, section: str = "") -> dict[str, ShardedTensor]:
        """Return the weights of a model by name; see `Shards.add_weights`."""
        return {
            name.removeprefix(section): self.tensor(name)
            for name, known in self._index.items()
            if known.get("section") == section
        }

    def tied(self, section: str = "") -> dict[str, str]:
        """Return the further names of tied weights of a model, each with the stored name."""
        return {
            name.removeprefix(section): known["tied"].removeprefix(section)
            for name, known in self._index.items()
            if known.get("section") == section and "tied" in known
        }


def fill_(target: Any, source: Tensor | ShardedTensor) -> None:
    """Copy a whole tensor, in memory or in a checkpoint, into a tensor that may be sharded."""
    if not is_sharded(target):
        target.copy_(source.whole() if isinstance(source, ShardedTensor) else source)
        return
    offsets, local = local_part(target)
    if local.numel():
        local.copy_(region_of(source, offsets, local.shape))


def region_of(
    source: Tensor | ShardedTensor, offsets: Sequence[int], shape: Sequence[int]
) -> Tensor:
    """Return a region of a tensor."""
    if isinstance(source, ShardedTensor):
        return source.read(offsets, shape)
    return source[tuple(slice(o, o + s) for o, s in zip(offsets, shape, strict=True))]


def like(source: Tensor | ShardedTensor, target: Any) -> Tensor:
    """Return a tensor's values, sharded as another tensor of its shape is."""
    if not is_sharded(target) or tuple(source.shape) != tuple(target.shape):
        return source.whole() if isinstance(source, ShardedTensor) else source
    from torch.distributed.tensor import DTensor

    offsets, local = local_part(target)
    part = (
        region_of(source, offsets, local.shape) if local.numel() else local.new_empty(local.shape)
    )
    return DTensor.from_local(
        part.to(device=local.device, dtype=source.dtype),
        target.device_mesh,
        target.placements,
        run_check=False,
        shape=target.shape,
        stride=target.stride(),
    )


def state_like(optimizer: Any, saved: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a saved optimizer state whose tensors are sharded as the optimizer's parameters are.

    Args:
        optimizer: The optimizer.
        saved: Its state dict, as read: tensors may be `ShardedTensor` objects.
    """
    if not {"state", "param_groups"} <= saved.keys():
        return saved
    numbers = chain.from_iterable(group["params"] for group in saved["param_groups"])
    here = chain.from_iterable(group["params"] for group in optimizer.param_groups)
    state = dict(saved["state"])
    for number, parameter in zip(numbers, here, strict=False):
        if number in state:
            state[number] = {
                key: like(value, parameter) if isinstance(value, (Tensor, ShardedTensor)) else value
                for key, value in state[number].items()
            }
    return {**saved, "state": state}


def resharded(saved: Any, here: Any) -> Any:
    """Return saved state with whole or sharded tensors in place of `ShardedTensor` objects.

    Args:
        saved: Nested dicts and lists, as read.
        here: The present state, whose tensors tell how those at the same place are sharded.
    """
    if isinstance(saved, ShardedTensor):
        return like(saved, here) if isinstance(here, Tensor) else saved.whole()
    if isinstance(saved, Mapping):
        own = here if isinstance(here, Mapping) else {}
        made: Any = copy(saved)
        for key, value in saved.items():
            made[key] = resharded(value, own.get(key))
        return made
    if type(saved) in (list, tuple):
        padded = chain(here if isinstance(here, (list, tuple)) else (), repeat(None))
        return type(saved)(resharded(a, b) for a, b in zip(saved, padded, strict=False))
    return saved
