"""Sharded tensors in a checkpoint: each process writes the parts that it holds.

``shard-<rank>.safetensors`` holds a process's parts. The header has the offsets of each part, under
the keys that torch's ``HuggingFaceStorageReader`` reads. If a process has several parts of a
tensor, the second ones are in ``shard-<rank>-1.safetensors``, and so on. ``shards.json`` holds the
full shape and dtype of each tensor, so that a missing part is noticed. Writing needs no
communication. Any layout of processes can read the files: each process reads only the bytes of its
own parts, one tensor at a time, into existing tensors where possible.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import copy
from fnmatch import fnmatch
from itertools import accumulate, chain, product, repeat
from operator import mul
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parameter import is_lazy

from trainer.checkpoint.serialization import (
    aligned,
    dtypes_by_name,
    extra_state_tensor,
    portable,
    stream_tensors,
)
from trainer.checkpoint.storage import check_file, reading
from trainer.errors import CheckpointError
from trainer.files import read_json
from trainer.tree import (
    LocalShards,
    as_bytes,
    fill_,
    is_sharded,
    local_part,
    local_parts,
    map_tree,
    region_of,
)

INDEX = "shards.json"
SHARD = "shard-*.safetensors"
_OFFSETS = "DCP_SHARDING_INFO"  # the key of torch.distributed.checkpoint's safetensors reader
_LARGEST = 1 << 30


def _shard_of(rank: int, number: int = 0) -> str:
    return f"shard-{rank:05d}{f'-{number}' if number else ''}.safetensors"


class Shards:
    """Collects this process's parts of the sharded tensors of a checkpoint.

    Args:
        rank: The rank of this process.
        mesh: The device mesh of all processes; None if no tensor is a ``DTensor``.
    """

    def __init__(self, rank: int, mesh: Any = None) -> None:
        self._rank, self._mesh = rank, mesh
        self._parts: dict[str, Tensor] = {}
        self._places: dict[str, tuple[int, str, list[int]]] = {}  # (file, name, offsets)
        self._index: dict[str, Any] = {}
        self._seen: dict[object, tuple[str, object]] = {}

    def add(self, name: str, tensor: Any) -> str:
        """Add a tensor, sharded or the same on all processes; return the name it is stored under.

        Tensors that share memory, for example tied weights, are stored once.
        """
        parts = local_parts(tensor)
        if isinstance(tensor, LocalShards):  # the same on all processes, even without parts
            memory: object = id(tensor)
        else:
            offsets, local = parts[0]
            memory = (local.data_ptr(), tuple(local.shape), local.stride(), tuple(offsets))
            memory = memory if local.numel() else object()
        first, _ = self._seen.setdefault(memory, (name, tensor))
        if first != name:
            return first
        dtype = str(tensor.dtype).removeprefix("torch.")
        self._index[name] = {"shape": list(tensor.shape), "dtype": dtype}
        if self._writes(tensor):
            held = [(o, local) for o, local in parts if local.numel() or not tensor.numel()]
            for number, (offsets, local) in enumerate(held):
                key = f"{number} {name}"
                self._parts[key] = portable(local.detach(), name)
                self._places[key] = number, name, offsets
        return name

    def add_weights(self, state_dict: Mapping[str, Any], section: str = "") -> None:
        """Add all weights of a model; names of tied weights are recorded.

        Args:
            state_dict: The weights by name; those of lazy modules without values are left out.
            section: A prefix for their names, which distinguishes the models of a checkpoint.

        Raises:
            TypeError: A value is neither a tensor nor plain data from ``get_extra_state``.
        """
        for name, tensor in state_dict.items():
            if not (isinstance(tensor, Tensor) or is_sharded(tensor)):
                tensor = extra_state_tensor(name, tensor)
            if is_lazy(tensor):
                continue
            stored = self.add(section + name, tensor)
            if stored != section + name:
                self._index[section + name] = {"tied": stored}
            self._index[section + name]["section"] = section

    def _writes(self, tensor: Any) -> bool:
        """Return whether this process is the first that holds this part."""
        if isinstance(tensor, LocalShards):
            return tensor.saved
        if not is_sharded(tensor):
            return self._rank == 0
        mesh = tensor.device_mesh
        where = mesh.get_coordinate()
        same = [
            coordinate
            for coordinate, placement in zip(where, tensor.placements, strict=True)
            if placement.is_replicate()
        ]
        # The tensor is also replicated along mesh dimensions that its own mesh lacks.
        dimensions = mesh.mesh_dim_names or ()
        root = zip(self._mesh.mesh_dim_names or (), self._mesh.get_coordinate(), strict=True)
        same += [coordinate for name, coordinate in root if name not in dimensions]
        return not any(same)

    @property
    def tensors(self) -> dict[str, Tensor]:
        """This process's parts."""
        return self._parts

    @property
    def files(self) -> list[str]:
        """The names of the files that `write` writes."""
        index = [INDEX] if self._rank == 0 else []
        return [*(_shard_of(self._rank, number) for number in self._numbers), *index]

    @property
    def _numbers(self) -> list[int]:
        return sorted({number for number, *_ in self._places.values()})

    def write(self, values: Mapping[str, Tensor], folder: Path) -> None:
        """Write parts with these values into a folder, and on rank 0 the index."""
        for number in self._numbers:
            here = {key: place[1:] for key, place in self._places.items() if place[0] == number}
            offsets = {name: {"saved_offsets": where} for name, where in here.values()}
            metadata = {"format": "pt", "DCP_VERSION": "1.0", _OFFSETS: json.dumps(offsets)}
            described = aligned({name: values[key] for key, (name, _) in here.items()})
            file = folder / _shard_of(self._rank, number)
            stream_tensors(described, described.values(), file, metadata)
        if self._rank == 0:
            document = {"version": 1, "tensors": self._index}
            (folder / INDEX).write_text(json.dumps(document), encoding="utf-8")


class ShardedTensor:
    """A tensor in the files of a checkpoint; any region can be read.

    ``tensor.copy_(sharded)`` reads the region that `tensor` holds, as ``load_state_dict`` does.
    Other torch functions receive the whole tensor.

    Args:
        files: Returns the files to search for its parts.
        name: Its name in the files.
        shape: The shape of the whole tensor.
        dtype: Its dtype.
    """

    def __init__(
        self,
        files: Callable[[], Iterable[TensorFile]],
        name: str,
        shape: Sequence[int],
        dtype: torch.dtype,
    ) -> None:
        self._files, self._name = files, name
        self.shape, self.dtype = torch.Size(shape), dtype
        self.nbytes = math.prod(shape) * dtype.itemsize

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Take part in functions of torch; see torch's notes on extending it."""
        if function is Tensor.copy_ and isinstance(args[1], cls):
            target, source = args[:2]
            for offsets, local in local_parts(target):
                local.copy_(source.read(offsets, local.shape))
            return target
        return function(
            *map_tree(_whole, args), **{k: map_tree(_whole, v) for k, v in (kwargs or {}).items()}
        )

    def size(self) -> torch.Size:
        """Return the shape, as a tensor does."""
        return self.shape

    def __getitem__(self, region: Sequence[slice]) -> Tensor:
        """Return the region given by one slice per dimension; see `read`."""
        return self.read([s.start for s in region], [s.stop - s.start for s in region])

    def read(self, offsets: Sequence[int], shape: Sequence[int]) -> Tensor:
        """Return a region, on the CPU.

        Raises:
            CheckpointError: No file has some part of the region.
        """
        region = torch.empty(tuple(shape), dtype=self.dtype)
        filled = 0
        for file in self._files() if region.numel() else ():
            if self._name not in file.parts:
                continue
            part, size, _ = file.parts[self._name]
            low = [max(a, b) for a, b in zip(offsets, part, strict=True)]
            high = [
                min(a + s, b + z) for a, s, b, z in zip(offsets, shape, part, size, strict=True)
            ]
            if any(last <= first for first, last in zip(low, high, strict=True)):
                continue
            here = tuple(slice(a - o, b - o) for a, b, o in zip(low, high, offsets, strict=True))
            file.read(self._name, low, high, into=region[here])
            filled += region[here].numel()
            if filled == region.numel():  # the other files need not be opened
                break
        if filled != region.numel():
            raise CheckpointError(
                f"{self._name}: {filled} of {region.numel()} values are in the shards."
            )
        return region

    def whole(self) -> Tensor:
        """Return the whole tensor, on the CPU."""
        return self.read([0] * len(self.shape), self.shape)


def _whole(value: Any) -> Any:
    return value.whole() if isinstance(value, ShardedTensor) else value


class TensorFile:
    """A safetensors file, of whole tensors or parts.

    It is read rather than memory-mapped. Mapped pages count as memory of the process, and are lost
    if the file is removed.

    Attributes:
        metadata: Strings by name.
        parts: The offsets, the shape and the position in the file of each part, by name.

    Raises:
        CheckpointError: It is missing or damaged.
    """

    def __init__(self, file: Path) -> None:
        self._file = file
        check_file(file)
        with reading(file), open(file, "rb") as stream:
            (size,) = struct.unpack("<Q", stream.read(8))
            self._header = json.loads(stream.read(min(size, _LARGEST)))
            self.metadata: dict[str, str] = self._header.pop("__metadata__", {})
            offsets = json.loads(self.metadata.get(_OFFSETS, "{}"))
            self.parts: dict[str, tuple[list[int], list[int], int]] = {
                name: (
                    offsets[name]["saved_offsets"] if offsets else [0] * len(entry["shape"]),
                    entry["shape"],
                    8 + size + entry["data_offsets"][0],
                )
                for name, entry in self._header.items()
            }

    def tensors(self) -> dict[str, ShardedTensor]:
        """Return the tensors of a file of whole tensors by name, to be read later."""
        dtypes = dtypes_by_name()
        return {
            name: ShardedTensor(lambda: [self], name, entry["shape"], dtypes[entry["dtype"]])
            for name, entry in self._header.items()
        }

    def read(self, name: str, low: Sequence[int], high: Sequence[int], *, into: Tensor) -> None:
        """Read the values of a part from the indices `low` to `high` of the whole tensor.

        Raises:
            CheckpointError: The file is shorter than its header says.
        """
        offsets, shape, begin = self.parts[name]
        sizes = [b - a for a, b in zip(low, high, strict=True)]
        first = [a - o for a, o in zip(low, offsets, strict=True)]
        # Dimensions after this one are read whole, so that the values are contiguous.
        last = max((d for d, size in enumerate(sizes) if size != shape[d]), default=0)
        strides = [*accumulate(reversed(shape[1:]), mul, initial=1)][::-1]
        width = into.dtype.itemsize
        run = math.prod(sizes[last:]) * width
        values = into if into.is_contiguous() else torch.empty(sizes, dtype=into.dtype)
        raw: Any = as_bytes(values).numpy()
        target = memoryview(raw)
        rows = product(*(range(a, a + s) for a, s in zip(first[:last], sizes, strict=False)))
        with reading(self._file), open(self._file, "rb") as stream:
            for number, row in enumerate(rows):
                index = (*row, *first[last : last + 1])
                stream.seek(begin + width * sum(map(mul, index, strides)))
                if stream.readinto(target[number * run : (number + 1) * run]) != run:
                    raise CheckpointError(f"{self._file} is damaged: it ends inside {name}.")
        if values is not into:
            into.copy_(values)


class ShardReader:
    """Opens the shards of a checkpoint.

    Args:
        folder: The checkpoint.
        files: The names of its files, by its manifest.

    Raises:
        CheckpointError: The index cannot be read.
    """

    def __init__(self, folder: Path, files: Iterable[str]) -> None:
        with reading(folder / INDEX):
            self._index = read_json(folder / INDEX, _LARGEST)["tensors"]
        own = _shard_of(dist.get_rank() if dist.is_initialized() else 0).partition(".")[0]
        shards = (name for name in files if fnmatch(name, SHARD))
        names = sorted(shards, key=lambda name: (not name.startswith(own), name))
        self._unopened = (TensorFile(folder / name) for name in names)
        self._opened: list[TensorFile] = []

    def shards(self) -> Iterator[TensorFile]:
        """Yield the shards; this process's own come first.

        If the layout is unchanged, these are all that this process needs, so each shard is opened
        only when it is requested.
        """
        yield from self._opened
        for shard in self._unopened:
            self._opened.append(shard)
            yield shard

    def tensor(self, name: str) -> ShardedTensor:
        """Return a tensor by name."""
        entry = self._index[name]
        if "tied" in entry:
            return self.tensor(entry["tied"])
        return ShardedTensor(self.shards, name, entry["shape"], getattr(torch, entry["dtype"]))

    def weights(self, section: str = "") -> dict[str, ShardedTensor]:
        """Return the weights of a model by name; see `Shards.add_weights`."""
        return {
            name.removeprefix(section): self.tensor(name)
            for name, entry in self._index.items()
            if entry.get("section") == section
        }

    def tied(self, section: str = "") -> dict[str, str]:
        """Return the additional names of a model's tied weights, each with the stored name."""
        return {
            name.removeprefix(section): entry["tied"].removeprefix(section)
            for name, entry in self._index.items()
            if entry.get("section") == section and "tied" in entry
        }


def materialize(source: Tensor | ShardedTensor) -> Tensor:
    """Return a whole tensor, in memory or in a checkpoint."""
    return source.whole() if isinstance(source, ShardedTensor) else source


def like(source: Tensor | ShardedTensor, target: Any) -> Tensor:
    """Return a tensor's values, sharded like another tensor of the same shape."""
    if not is_sharded(target) or tuple(source.shape) != tuple(target.shape):
        return materialize(source)
    from torch.distributed.tensor import DTensor

    offsets, local = local_part(target)
    part = region_of(source, offsets, local.shape)
    part = part.clone() if isinstance(source, Tensor) else part  # to free the other parts
    return DTensor.from_local(
        part.to(device=local.device, dtype=source.dtype),
        target.device_mesh,
        target.placements,
        run_check=False,
        shape=target.shape,
        stride=target.stride(),
    )


def state_like(optimizer: Any, saved: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a saved optimizer state, with tensors sharded like the optimizer's parameters.

    If the optimizer already has a tensor for it, that tensor is filled and returned, so that memory
    is not used twice.

    Args:
        optimizer: The optimizer.
        saved: Its state dict, as read: tensors may be `ShardedTensor` objects.
    """
    if not {"state", "param_groups"} <= saved.keys():
        return resharded(saved, None)  # type: ignore[no-any-return]  # a mapping like `saved`
    saved = {**saved, "param_groups": resharded(saved["param_groups"], None)}
    if getattr(optimizer, "driver", None) is not None:
        return saved  # the engine selects its parts
    numbers = chain.from_iterable(group["params"] for group in saved["param_groups"])
    here = chain.from_iterable(group["params"] for group in optimizer.param_groups)
    state = dict(saved["state"])
    for number, parameter in zip(numbers, here, strict=False):
        if number in state:
            current = getattr(optimizer, "state", {}).get(parameter, {})
            state[number] = {
                key: _placed(value, parameter, current.get(key))
                for key, value in state[number].items()
            }
    return {**saved, "state": state}


def _placed(value: Any, parameter: Any, current: Any) -> Any:
    """Return a value of a parameter's state; if it is a tensor, shard it like the parameter."""
    if not isinstance(value, (Tensor, ShardedTensor)):
        return resharded(value, current)
    alike = is_sharded(current) and (current.dtype, current.shape) == (value.dtype, value.shape)
    if alike and current.placements == parameter.placements:
        fill_(current, value)
        return current
    return like(value, parameter)


def resharded(saved: Any, here: Any, named: Mapping[str, Tensor] | None = None) -> Any:
    """Return saved state with whole or sharded tensors in place of `ShardedTensor` objects.

    Args:
        saved: Nested dicts and lists, as read.
        here: The present state, whose tensors define the sharding of tensors at the same place.
        named: Tensors by name, such as parameters, that define it where `here` has no such place.
    """
    if isinstance(saved, ShardedTensor):
        return like(saved, here) if isinstance(here, Tensor) else saved.whole()
    if isinstance(saved, Mapping):
        current = here if isinstance(here, Mapping) else {}
        made: Any = copy(saved)
        for key, value in saved.items():
            made[key] = resharded(value, current.get(key, (named or {}).get(key)), named)
        return made
    if type(saved) in (list, tuple):
        padded = chain(here if isinstance(here, (list, tuple)) else (), repeat(None))
        return type(saved)(resharded(a, b, named) for a, b in zip(saved, padded, strict=False))
    return saved
