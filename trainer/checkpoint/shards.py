"""Merge safetensors shards into one file; memory use is constant.

Files of whole tensors are memory-mapped. Parts of sharded tensors are joined one tensor at a time.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from fnmatch import fnmatch
from functools import partial
from pathlib import Path

import torch

from trainer.checkpoint.loading import find_weight_files, open_safetensors, read_index
from trainer.checkpoint.serialization import aligned, stream_tensors, write_tensors
from trainer.checkpoint.sharded_state import INDEX, SHARD, ShardReader
from trainer.checkpoint.storage import (
    MANIFEST,
    locate,
    read_manifest,
    reading,
    sha256_of,
    write_whole,
)
from trainer.checkpoint.weights import (
    CONVERTS,
    INDEX_SUFFIX,
    WEIGHTS_NAME,
    tied_names,
    weights_metadata,
)
from trainer.errors import CheckpointError

_DISTRIBUTED = ".metadata"  # what torch.distributed.checkpoint writes next to its .distcp files


@dataclass(frozen=True, kw_only=True)
class Merged:
    """The result of a merge.

    Attributes:
        files: The files that held the weights.
        tensors: The number of tensors in the new file.
        tied: The number of additional names of tied tensors.
        size: The size of the new file in bytes.
        sha256: The hash of the new file.
    """

    files: tuple[Path, ...]
    tensors: int
    tied: int
    size: int
    sha256: str


def merge_weights(checkpoint: str | os.PathLike[str], output: str | os.PathLike[str]) -> Merged:
    """Write the weights of a checkpoint as one safetensors file.

    The file is written atomically and replaces an existing one. If the weights have a manifest,
    they are first checked against it.

    Args:
        checkpoint: A folder with ``model.safetensors`` or shards and their index, such as
            ``save_model`` and the Trainer write; or one of these files; one shard selects all
            shards of its checkpoint. For a folder of ``save_state``, the first model is used.
        output: A file that ends in ``.safetensors``.

    Raises:
        ValueError: There are no weights at `checkpoint`, reading them would require unpickling, or
            `output` is not a valid path for the merged file.
        CheckpointError: A file is missing or damaged, or shards contradict each other.
        OSError: Reading or writing fails.
    """
    target, source = Path(output), Path(checkpoint)
    if source.name == INDEX or fnmatch(source.name, SHARD):
        source = source.parent  # one file alone has only parts of tensors
    folder = locate(source)
    sharded = (folder / INDEX).is_file() and not (folder / WEIGHTS_NAME).is_file()
    if target.suffix != ".safetensors":
        raise ValueError(f"The output is {os.fspath(output)!r}; it must end in '.safetensors'.")
    if target.is_dir():
        raise ValueError(f"The output {target} is a folder; give the path of a file in it.")
    files = sorted(folder.glob(SHARD)) if sharded else _sources(source)
    if target.exists() and any(target.samefile(file) for file in files):
        raise ValueError(f"The output {target} is one of the files to merge; give another path.")
    target.parent.mkdir(parents=True, exist_ok=True)
    if sharded:
        return _join(folder, target)
    _check_against_manifest(files)
    tensors: dict[str, torch.Tensor] = {}
    weight_map: dict[str, Path] = {}
    metadata: dict[str, str] = {}
    for file in files:
        with open_safetensors(file) as opened:
            metadata |= opened.metadata() or {}
            for name in opened.keys():  # noqa: SIM118 - no dict
                if name in weight_map:
                    raise CheckpointError(f"{name!r} is in {weight_map[name]} and in {file}.")
                weight_map[name], tensors[name] = file, opened.get_tensor(name)
    _check_against_index(source, files, weight_map)
    write_whole(target, partial(write_tensors, tensors, metadata=metadata))
    return Merged(
        files=tuple(files),
        tensors=len(tensors),
        tied=len(tied_names(metadata, tensors)),
        size=target.stat().st_size,
        sha256=sha256_of(target),
    )


def _join(folder: Path, target: Path) -> Merged:
    """Write the whole weights of a checkpoint of sharded tensors (the first model's)."""
    names = [INDEX, *(path.name for path in folder.glob(SHARD))]
    listed = read_manifest(folder)["files"] if (folder / MANIFEST).is_file() else names
    files = [folder / name for name in listed if name == INDEX or fnmatch(name, SHARD)]
    _check_against_manifest(files)
    reader = ShardReader(folder, listed)
    further = reader.tied()
    described = aligned({n: tensor for n, tensor in reader.weights().items() if n not in further})
    if not described:
        raise ValueError(f"{folder} holds sharded tensors, but no weights of a model.")
    values = (tensor.whole() for tensor in described.values())
    metadata = weights_metadata(described, further)
    with reading(folder):
        write_whole(target, lambda path: stream_tensors(described, values, path, metadata=metadata))
    return Merged(
        files=tuple(path for path in files if path.name != INDEX),
        tensors=len(described),
        tied=len(further),
        size=target.stat().st_size,
        sha256=sha256_of(target),
    )


def _sources(checkpoint: Path) -> list[Path]:
    if (checkpoint / _DISTRIBUTED).is_file() or checkpoint.suffix == ".distcp":
        folder = checkpoint if checkpoint.is_dir() else checkpoint.parent
        raise ValueError(
            f"{checkpoint} is a checkpoint of torch.distributed.checkpoint, whose metadata file "
            f"({_DISTRIBUTED}) is a pickle: reading it can run any code, so it is not read here. "
            f"If you trust the file, torch converts it: {CONVERTS.format(folder)}."
        )
    files = find_weight_files(locate(checkpoint))
    if pickled := [file for file in files if file.suffix != ".safetensors"]:
        raise ValueError(
            f"{pickled[0]} is a pickle written by torch.save, not a safetensors file. Load it with "
            "load_checkpoint_in_model and save it with safe_serialization=True first."
        )
    return files


def _check_against_manifest(files: list[Path]) -> None:
    """Check the weight files, and no others, against the hashes in the checkpoint's manifest."""
    folder = files[0].parent
    listed = read_manifest(folder)["files"] if (folder / MANIFEST).is_file() else {}
    for file in files:
        entry = listed.get(file.name)
        if entry is not None and not file.is_file():
            raise CheckpointError(f"{file} is missing from the checkpoint.")
        if entry is not None and sha256_of(file) != entry["sha256"]:
            raise CheckpointError(f"{file} is damaged: its SHA-256 is not the manifest's.")


def _check_against_index(checkpoint: Path, files: list[Path], weight_map: dict[str, Path]) -> None:
    if checkpoint.name.endswith(INDEX_SUFFIX):
        indexes = [checkpoint]
    else:
        indexes = sorted(files[0].parent.glob(f"*.safetensors{INDEX_SUFFIX}"))
    listed = read_index(indexes[0]) if indexes else {}
    if files[0].name not in listed.values():  # the index describes other files
        return
    for name, file in listed.items():
        if name not in weight_map or weight_map[name].name != file:
            raise CheckpointError(
                f"{indexes[0]} lists {name!r} in {file}, which does not contain it."
            )
