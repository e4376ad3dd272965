"""Merge safetensors shards into one file, copied in chunks so that memory use is constant.

A safetensors file consists of the header's length (8 bytes, little-endian), the header as JSON, and
the bytes of all tensors, at the offsets that the header gives by name
(https://github.com/huggingface/safetensors#format). So a merge writes a new header and copies byte
ranges; no tensor is created.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

from trainer.checkpoint.loading import find_weight_files, read_index
from trainer.checkpoint.storage import MANIFEST, locate, read_manifest, sha256_of, write_whole
from trainer.checkpoint.weights import INDEX_SUFFIX, tied_names
from trainer.errors import CheckpointError

_CHUNK = 1 << 22  # bytes copied at a time
_HEADER_LIMIT = 100_000_000  # bytes; safetensors refuses longer headers
_DISTRIBUTED = ".metadata"  # what torch.distributed.checkpoint writes beside its .distcp files


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


@dataclass(frozen=True)
class _Stretch:
    """The byte range of one tensor in one file."""

    file: Path
    offset: int
    size: int
    dtype: str
    shape: tuple[int, ...]


def merge_weights(checkpoint: str | os.PathLike[str], output: str | os.PathLike[str]) -> Merged:
    """Write the weights of a checkpoint as one safetensors file.

    The file is written atomically and replaces an existing one. Its hash is verified by reading it
    back before the rename. If the weights have a manifest, they are first checked against it.

    Args:
        checkpoint: A folder with ``model.safetensors`` or shards and their index, such as
            ``save_model`` and the Trainer write; or one of these files.
        output: A file that ends in ``.safetensors``.

    Raises:
        ValueError: There are no weights at `checkpoint`, reading them would require unpickling, or
            `output` is not a valid path for the merged file.
        CheckpointError: A file is missing or damaged, or shards contradict each other.
        OSError: Reading or writing fails.
    """
    target = Path(output)
    if target.suffix != ".safetensors":
        raise ValueError(f"The output is {os.fspath(output)!r}; it must end in '.safetensors'.")
    if target.is_dir():
        raise ValueError(f"The output {target} is a folder; give the path of a file in it.")
    files = _sources(Path(checkpoint))
    if target.exists() and any(target.samefile(file) for file in files):
        raise ValueError(f"The output {target} is one of the files to merge; give another path.")
    _check_against_manifest(files)
    stretches, metadata = _read_headers(files)
    _check_against_index(Path(checkpoint), files, stretches)
    target.parent.mkdir(parents=True, exist_ok=True)
    digest = hashlib.sha256()
    write_whole(target, partial(_write, stretches, metadata, digest))
    return Merged(
        files=tuple(files),
        tensors=len(stretches),
        tied=len(tied_names(metadata, stretches)),
        size=target.stat().st_size,
        sha256=digest.hexdigest(),
    )


def _sources(checkpoint: Path) -> list[Path]:
    if (checkpoint / _DISTRIBUTED).is_file() or checkpoint.suffix == ".distcp":
        raise ValueError(
            f"{checkpoint} is a checkpoint of torch.distributed.checkpoint, whose metadata file "
            f"({_DISTRIBUTED}) is a pickle: reading it can run any code, so it is not read here. "
            "If you trust the file, torch converts it: python -m "
            "torch.distributed.checkpoint.format_utils dcp_to_torch FOLDER weights.bin."
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
    if not (folder / MANIFEST).is_file():
        return
    listed = read_manifest(folder)["files"]
    for file in files:
        known = listed.get(file.name)
        if known is not None and sha256_of(file) != known["sha256"]:
            raise CheckpointError(f"{file} is damaged: its SHA-256 is not the manifest's.")


def _check_against_index(checkpoint: Path, files: list[Path], found: dict[str, _Stretch]) -> None:
    if checkpoint.name.endswith(INDEX_SUFFIX):
        indexes = [checkpoint]
    else:
        indexes = sorted(files[0].parent.glob(f"*.safetensors{INDEX_SUFFIX}"))
    if not indexes:
        return
    listed = read_index(indexes[0])
    if files[0].name not in listed.values():  # the index describes other files
        return
    for name, file in listed.items():
        if name not in found or found[name].file.name != file:
            raise CheckpointError(
                f"{indexes[0]} lists {name!r} in {file}, which does not contain it."
            )


def _read_headers(files: list[Path]) -> tuple[dict[str, _Stretch], dict[str, str]]:
    """Return the byte range of every tensor by name, and the merged metadata of all files."""
    stretches: dict[str, _Stretch] = {}
    metadata: dict[str, str] = {}
    for file in files:
        header, begin = _read_header(file)
        metadata |= header.pop("__metadata__", None) or {}
        for name, entry in header.items():
            if name in stretches:
                raise CheckpointError(f"{name!r} is in {stretches[name].file} and in {file}.")
            first, last = entry["data_offsets"]
            shape = tuple(entry["shape"])
            stretches[name] = _Stretch(file, begin + first, last - first, entry["dtype"], shape)
    return stretches, metadata


def _read_header(file: Path) -> tuple[dict[str, Any], int]:
    """Return the header of a safetensors file, and the offset of its tensors."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, framework="np"):  # checks the header against the file
            pass
        with open(file, "rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            header: dict[str, Any] = json.loads(stream.read(length))
    except (OSError, SafetensorError, ValueError) as error:
        raise CheckpointError(f"{file} cannot be read: {error}.") from error
    return header, 8 + length


def _write(
    stretches: dict[str, _Stretch], metadata: dict[str, str], digest: Any, file: Path
) -> None:
    """Write the merged file, read it back and compare; update `digest` with the bytes written."""
    # Tensors with the largest element size first, so that every tensor's offset is aligned to it.
    order = sorted(stretches, key=lambda name: (-_element(stretches[name]), name))
    with open(file, "wb") as stream:
        for piece in _pieces(_header(order, stretches, metadata), order, stretches):
            stream.write(piece)
            digest.update(piece)
        stream.flush()
        os.fsync(stream.fileno())
    if sha256_of(file) != digest.hexdigest():
        raise CheckpointError(f"{file} differs from what was written to it: check the disk.")
    _read_header(file)


def _header(order: list[str], stretches: dict[str, _Stretch], metadata: dict[str, str]) -> bytes:
    entries: dict[str, Any] = {"__metadata__": metadata} if metadata else {}
    end = 0
    for name in order:
        part = stretches[name]
        offsets = [end, end := end + part.size]
        entries[name] = {"dtype": part.dtype, "shape": part.shape, "data_offsets": offsets}
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    if len(text) > _HEADER_LIMIT:
        raise ValueError(
            f"The header of {len(order)} tensors has {len(text)} bytes; safetensors files allow "
            f"{_HEADER_LIMIT}."
        )
    return len(text).to_bytes(8, "little") + text


def _pieces(header: bytes, order: list[str], stretches: dict[str, _Stretch]) -> Iterator[bytes]:
    yield header
    for name in order:
        part = stretches[name]
        left = part.size
        with open(part.file, "rb") as stream:
            stream.seek(part.offset)
            while left:
                piece = stream.read(min(left, _CHUNK))
                if not piece:
                    raise CheckpointError(f"{part.file} was truncated while it was being read.")
                left -= len(piece)
                yield piece


def _element(part: _Stretch) -> float:
    return part.size / max(prod(part.shape), 1)
