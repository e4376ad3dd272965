"""Weights: to and from safetensors that any tool can read, in one file or in shards.

Files use the user's own parameter names, see :mod:`trainer.names`. A tied tensor (one with several
names) is stored once, under its first name. Every other name is an entry ``other: first`` in the
file's metadata, as in ``safetensors.torch.save_model``.

:func:`save_model` writes what other libraries read::

    model.safetensors                      or, if that would be too big,
    model-00001-of-00002.safetensors
    model-00002-of-00002.safetensors
    model.safetensors.index.json           maps each name to its file

With ``safe_serialization=False`` the files are ``pytorch_model.bin``, or shards named accordingly.
"""

from __future__ import annotations

import os
import re
from collections import deque
from collections.abc import Callable, Container, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch.nn.parameter import is_lazy

from trainer.checkpoint.serialization import (
    PLAIN,
    aligned,
    extra_state,
    extra_state_tensor,
    portable,
    portable_weight,
    read_tensors,
    stream_tensors,
    write_tensors,
)
from trainer.checkpoint.storage import sync, write_temporary
from trainer.files import with_home
from trainer.names import COMPILED, EXTRA_STATE, bare_names, with_offloaded
from trainer.strict_json import dumps
from trainer.tree import gathered, is_sharded

WEIGHTS_NAME = "model.safetensors"
BIN_NAME = "pytorch_model.bin"
INDEX_SUFFIX = ".index.json"
# The command that converts a folder of torch.distributed.checkpoint, whose metadata is a pickle.
CONVERTS = "python -m torch.distributed.checkpoint.format_utils dcp_to_torch {} weights.bin"

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]I?B)", re.IGNORECASE)

T = TypeVar("T")


def save_weights(state_dict: Mapping[str, object], path: str | os.PathLike[str]) -> Path:
    """Write a module's ``state_dict()`` as safetensors.

    Args:
        state_dict: Tensors by name. Views that overlap but are not identical are stored separately;
            names lose the prefixes that ``torch.compile`` adds.
        path: A file ending in ``.safetensors``, or a folder for ``model.safetensors``.

    Returns:
        The file written.

    Raises:
        TypeError: If a value is neither a plain dense tensor nor plain data from
            ``get_extra_state``.
    """
    tensors, tied = separate_tied({_bare(name): value for name, value in state_dict.items()})
    file = _file(path)
    write_weights(tensors, tied, file)
    return file


def own_names(module: torch.nn.Module, named: Mapping[str, T]) -> dict[str, T]:
    """Rename entries to the keys of the module's ``state_dict()``, ignoring wrappers on both sides.

    Names that the module does not have are left unchanged.
    """
    here = module.state_dict(keep_vars=True)
    bare = dict(bare_names(module, zip(here, here, strict=True)))
    return {bare.get(_bare(name), name): value for name, value in named.items()}


def separate_tied(
    state_dict: Mapping[str, object],
) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Split a ``state_dict()`` into the tensors to store and the additional names of tied ones.

    A lazy module that was never called has no values yet: its tensors are left out.

    Returns:
        The tensors, in order and unchanged; and a dict from each additional name of a tied tensor
        to its first name.

    Raises:
        TypeError: If a value is neither a tensor nor plain data from ``get_extra_state``.
    """
    tensors: dict[str, torch.Tensor] = {}
    tied: dict[str, str] = {}
    first_name: dict[tuple[object, ...], str] = {}
    for name, value in state_dict.items():
        if not (isinstance(value, torch.Tensor) or is_sharded(value)):
            tensors[name] = extra_state_tensor(name, value)
            continue
        tensor: Any = value
        if is_lazy(tensor):
            continue
        first = first_name.setdefault(_memory(tensor), name) if tensor.numel() else name
        if first != name and name != "format":
            tied[name] = first
        else:
            tensors[name] = tensor
    return tensors, tied


def write_weights(tensors: Mapping[str, torch.Tensor], tied: Mapping[str, str], file: Path) -> None:
    """Write one file of weights, and in its metadata the additional names of its tied tensors.

    Raises:
        TypeError: If a tensor is not a plain dense one with data.
    """
    write_tensors(
        {name: portable_weight(tensor, name) for name, tensor in tensors.items()},
        file,
        weights_metadata(tensors, tied),
    )


def weights_metadata(stored: Container[str], tied: Mapping[str, str]) -> dict[str, str]:
    """Return the metadata of a file of weights: the additional names of its tied tensors."""
    return {"format": "pt", **{name: first for name, first in tied.items() if first in stored}}


def load_weights(path: str | os.PathLike[str]) -> dict[str, torch.Tensor]:
    """Load all weights of a file by name, to the CPU; tied names share one tensor.

    Results of ``get_extra_state`` are decoded.

    Args:
        path: A file from :func:`save_weights`, or the folder with ``model.safetensors``.

    Raises:
        CheckpointError: If the file is missing or damaged.
    """
    return {name: as_given(name, value) for name, value in read_weights(path).items()}


def as_given(name: str, value: Any) -> Any:
    """Return a weight as it was before the save, decoding a result of ``get_extra_state``."""
    return extra_state(value) if name.endswith(EXTRA_STATE) else value


def read_weights(path: str | os.PathLike[str]) -> dict[str, torch.Tensor]:
    """Load weights as :func:`load_weights` does, but leave ``get_extra_state`` results encoded."""
    tensors, metadata = read_tensors(_file(path))
    return {name: tensors[first] for name, first in tied_names(metadata, tensors).items()} | tensors


def tied_names(metadata: Mapping[str, str], stored: Container[str]) -> dict[str, str]:
    """Return the tied names in a file's metadata, as a dict from additional to first name."""
    return {
        name: first
        for name, first in metadata.items()
        if name != "format" and name not in stored and first in stored
    }


def _bare(name: str) -> str:
    return ".".join(part for part in name.split(".") if part != COMPILED)


def _memory(tensor: torch.Tensor) -> tuple[object, ...]:
    """Return a key that is equal for two tensors if they are the same view of the same memory."""
    plain = tensor.layout == torch.strided and type(tensor) in PLAIN
    if not plain or tensor.device.type == "xla":
        return (id(tensor),)  # no address, for example a DTensor; see `portable`
    memory = tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()
    return *memory, tensor.is_conj(), tensor.is_neg()


def _file(path: str | os.PathLike[str]) -> Path:
    path = Path(path)
    return path if path.suffix == ".safetensors" else path / WEIGHTS_NAME


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
        ValueError: If ``max_shard_size`` is not a size above 0, or the home directory in
            ``save_directory`` is unknown.
        NotADirectoryError: If ``save_directory`` is a file.
        RuntimeError: If parameters are on the meta device and so have no data.
        TypeError: If the state dict holds anything but plain dense tensors.
    """
    write_model(model, save_directory, max_shard_size, safe_serialization)


def write_model(
    model: torch.nn.Module,
    save_directory: str | os.PathLike[str],
    max_shard_size: int | str,
    safe_serialization: bool,
    *,
    writes: bool = True,
    parts: Callable[[torch.nn.Module], Mapping[str, Any] | None] = lambda _: None,
    step: Callable[[Callable[[], None]], object] = lambda work: work(),
) -> None:
    """Save weights as :func:`save_model` does; collective for a sharded model.

    Tensors of a sharded model are gathered and written one at a time.

    Args:
        model: See `save_model`.
        save_directory: See `save_model`.
        max_shard_size: See `save_model`.
        safe_serialization: See `save_model`.
        writes: Whether this process writes.
        parts: Returns this process's parts of the weights; None if the model has all of them.
        step: Runs each step, so that all processes raise if it fails on one.
    """
    limit = parse_size(max_shard_size, "max_shard_size")
    folder = Path(with_home("save_directory", save_directory))
    export = _Export(model, folder, WEIGHTS_NAME if safe_serialization else BIN_NAME, writes)
    step(lambda: export.begin(parts(model)))
    shards = plan_shards(export.tensors, limit)
    files = _names(export.name, len(shards))
    try:
        for file, names in zip(files, shards, strict=True):
            step(partial(export.write, folder / file, names))
        step(partial(export.finish, dict(zip(files, shards, strict=True))))
    finally:
        for temporary in export.staged.values():
            temporary.unlink(missing_ok=True)


class _Export:
    """The steps of `write_model`.

    Attributes:
        tensors: The weights by name, detached; tied tensors under their first names.
        staged: The hidden files that were written, by their final paths.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        folder: Path,
        name: str,
        writes: bool,
    ) -> None:
        self._model, self._folder, self.name, self._writes = model, folder, name, writes
        self.tensors: dict[str, torch.Tensor] = {}
        self._tied: dict[str, str] = {}
        self.staged: dict[Path, Path] = {}

    def begin(self, parts: Mapping[str, Any] | None) -> None:
        """Check the weights, and create the folder."""
        if parts is None:
            # Keep parameters as they are (not detached), so that tied tensors are the same objects.
            parts = with_offloaded(self._model, self._model.state_dict(keep_vars=True))
        state = dict(bare_names(self._model, parts.items()))
        if self._writes and self._folder.exists() and not self._folder.is_dir():
            raise NotADirectoryError(f"{self._folder} is a file; save_directory must be a folder.")
        _check_not_meta(state)
        tensors, self._tied = separate_tied(state)
        self.tensors = {name: tensor.detach() for name, tensor in tensors.items()}
        if self._writes:
            self._folder.mkdir(parents=True, exist_ok=True)

    def write(self, file: Path, names: Iterable[str]) -> None:
        """Write one file under a hidden name."""
        chosen = {name: self.tensors[name] for name in names}
        sharded = any(map(is_sharded, self.tensors.values()))
        values = map(gathered, aligned(chosen).values())
        try:
            if self._writes:
                fill = partial(write_weights_file, chosen, self._tied)
                if sharded and file.suffix == ".safetensors":
                    metadata = weights_metadata(chosen, self._tied)
                    fill = partial(stream_tensors, aligned(chosen), values, metadata=metadata)
                elif sharded:
                    tensors = zip(aligned(chosen), (tensor.cpu() for tensor in values), strict=True)
                    fill = partial(write_weights_file, dict(tensors), self._tied)
                self.staged[file] = write_temporary(file, fill)
        finally:
            deque(values, maxlen=0)  # the other processes take part in all gathers

    def finish(self, files: Mapping[str, list[str]]) -> None:
        """Write the index of several files, and rename all files to their final names."""
        if not self._writes:
            return
        if len(files) > 1:
            total = sum(map(_bytes, self.tensors.values()))
            weight_map = {key: file for file, keys in files.items() for key in keys}
            if self.name == BIN_NAME:  # torch.save's files contain tied names too
                weight_map |= {key: weight_map[first] for key, first in self._tied.items()}
            index = self._folder / (self.name + INDEX_SUFFIX)
            write = partial(_write_index, total=total, files=weight_map)
            self.staged[index] = write_temporary(index, write)
        _put_in_place(self._folder, self.name, self.staged)


def save_stages(
    weights: Mapping[str, torch.Tensor],
    folder: Path,
    stage: int,
    stages: int,
    *,
    run: Callable[[Callable[[], Any]], list[Any]],
) -> None:
    """Save a model that is split over the processes, as :func:`save_model` does; collective.

    Args:
        weights: The part of this process, under names of the whole model.
        folder: A folder visible to all processes; it is created if needed.
        stage: The position of this part among the files.
        stages: The number of parts.
        run: Runs each step on all processes, which raise if it fails on one; returns all results.
    """
    file = folder / _names(WEIGHTS_NAME, stages)[stage]
    staged: dict[Path, Path] = {}

    def write() -> tuple[Path, Path, list[str], int]:
        folder.mkdir(parents=True, exist_ok=True)
        tensors, tied = separate_tied({name: tensor.detach() for name, tensor in weights.items()})
        staged[file] = write_temporary(file, partial(write_weights_file, tensors, tied))
        return file, staged[file], list(tensors), sum(map(_bytes, tensors.values()))

    def finish() -> None:
        if stage > 0:
            return
        staged.update((at, temporary) for at, temporary, _, _ in parts)
        if stages > 1:
            index = folder / (WEIGHTS_NAME + INDEX_SUFFIX)
            files = {name: at.name for at, _, names, _ in parts for name in names}
            total = sum(size for _, _, _, size in parts)
            staged[index] = write_temporary(index, partial(_write_index, total=total, files=files))
        _put_in_place(folder, WEIGHTS_NAME, staged)

    try:
        parts = run(write)
        run(finish)
    finally:
        for temporary in staged.values():
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
        ValueError: If it is neither of these, or not above 0; ``what`` names the argument in the
            message.
    """
    count = size if isinstance(size, int) and not isinstance(size, bool) else _parse(size)
    if count is None or count < 1:
        raise ValueError(
            f"{what} is {size!r}; it must be a number of bytes above 0, or a string such as "
            "'5GB', '500MB' or '5GiB' (units KB, MB, GB, TB, KiB, MiB, GiB, TiB)."
        )
    return count


def plan_shards(tensors: Mapping[str, torch.Tensor], limit: int) -> list[list[str]]:
    """Return the tensor names of each file, in order; a tensor that does not fit starts a new file.

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
    return tensor.numel() * tensor.dtype.itemsize


def _names(name: str, count: int) -> list[str]:
    if count == 1:
        return [name]
    stem, suffix = name.split(".")
    return [f"{stem}-{number:05d}-of-{count:05d}.{suffix}" for number in range(1, count + 1)]


def _compact(tensor: torch.Tensor, where: str) -> torch.Tensor:
    """Return a portable tensor; views are copied, since ``torch.save`` writes the whole storage."""
    stored = portable(tensor, where).cpu()
    return stored.clone() if stored.untyped_storage().nbytes() > _bytes(stored) else stored


def _write_index(file: Path, total: int, files: Mapping[str, str]) -> None:
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(files.items()))}
    file.write_text(dumps(index, indent=2) + "\n", encoding="utf-8")


def _put_in_place(folder: Path, name: str, staged: Mapping[Path, Path]) -> None:
    other = BIN_NAME if name == WEIGHTS_NAME else WEIGHTS_NAME
    index, old = folder / (name + INDEX_SUFFIX), _files_of(folder, name)
    if index in old and any(file in staged for file in old if file != index):
        # The old index would otherwise list shards of both saves, a mixture of weights.
        index.unlink()
        sync(folder)
        old.remove(index)
    for file, temporary in staged.items():  # the index last
        os.replace(temporary, file)
    sync(folder)
    for file in (*old, *_files_of(folder, other)):
        if file not in staged:
            file.unlink()


def _files_of(folder: Path, name: str) -> list[Path]:
    """Return the weight files of one format in a folder, the index first."""
    stem, suffix = name.split(".")
    shard = re.compile(rf"{stem}-\d{{5}}-of-\d{{5}}\.{suffix}")
    index = name + INDEX_SUFFIX
    files = [
        file
        for file in folder.iterdir()
        if file.name in (name, index) or shard.fullmatch(file.name)
    ]
    return sorted(files, key=lambda file: (file.name != index, file.name))


def _check_not_meta(state: Mapping[str, object]) -> None:
    for name, value in state.items():
        if isinstance(value, torch.Tensor) and value.is_meta:
            raise RuntimeError(
                f"The model cannot be saved: {name} is on the meta device and has no data. Load "
                "weights first, or allocate it with to_empty()."
            )
