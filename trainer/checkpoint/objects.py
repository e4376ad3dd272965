"""Save any object to a file atomically, and load it without running code."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

import torch

from trainer.checkpoint.loading import read_torch_file
from trainer.checkpoint.save import is_writer_rank
from trainer.checkpoint.serialization import read_tensors
from trainer.checkpoint.storage import write_whole
from trainer.checkpoint.weights import separate_tied, tied_names, write_weights
from trainer.checks import check_bools
from trainer.errors import CheckpointError
from trainer.state import PartialState


def save(
    obj: Any,
    f: str | os.PathLike[str] | BinaryIO,
    save_on_each_node: bool = False,
    safe_serialization: bool = False,
) -> None:
    """Write an object to a file, replacing it atomically.

    Only the main process writes; the other processes return at once.

    Args:
        obj: Any object that ``torch.save`` takes; with ``safe_serialization`` a dict of tensors by
            name, in which tensors that share their memory are stored once.
        f: A path, or with ``safe_serialization=False`` an open binary file.
        save_on_each_node: The main process of each machine writes.
        safe_serialization: Write safetensors instead of using ``torch.save``.

    Raises:
        TypeError: If `f` is neither a path nor a file, or an option is not a bool, on every
            process; or if safetensors cannot hold the object.
    """
    if not isinstance(f, (str, os.PathLike)) and not hasattr(f, "write"):
        raise TypeError(f"f is {f!r}; it must be a path or a file opened with 'wb'.")
    check_bools(save_on_each_node=save_on_each_node, safe_serialization=safe_serialization)
    if not is_writer_rank(PartialState(), save_on_each_node):
        return
    if not isinstance(f, (str, os.PathLike)):
        if safe_serialization:
            raise TypeError(f"f is {f!r}; with safe_serialization=True it must be a path.")
        torch.save(obj, f)
        return
    if not safe_serialization:
        write_whole(Path(f), lambda path: _write_torch(obj, path))
        return
    if not isinstance(obj, Mapping) or not all(isinstance(name, str) for name in obj):
        raise TypeError(
            f"obj is a {type(obj).__name__}; with safe_serialization=True it must be a dict of "
            "tensors by name."
        )
    tensors, tied = separate_tied(obj)
    write_whole(Path(f), lambda path: write_weights(tensors, tied, path))


def _write_torch(obj: Any, path: Path) -> None:
    with open(path, "wb") as file:  # torch rejects a path such as ".name", without a further suffix
        torch.save(obj, file)


def load(f: str | os.PathLike[str], map_location: Any = "cpu", **kwargs: Any) -> Any:
    """Load a file of :func:`save` that holds tensors, plain values and containers of them.

    Args:
        f: The file, of ``torch.save`` or safetensors.
        map_location: The device of the tensors, as for ``torch.load``.
        **kwargs: ``mmap`` of ``torch.load``, and ``weights_only``, which must be True.

    Raises:
        ValueError: ``weights_only`` is False.
        CheckpointError: If the file is missing or damaged, or holds other objects, since unpickling
            them could run any code.
    """
    if not kwargs.pop("weights_only", True):
        raise ValueError(
            "weights_only=False would unpickle the file, which can run any code: leave it out, and "
            "save tensors and plain values."
        )
    file = Path(f)
    if not _is_safetensors(file):
        return read_torch_file(file, map_location=map_location, **kwargs)
    tensors, metadata = read_tensors(file)
    placed = {name: tensor.to(map_location) for name, tensor in tensors.items()}
    return {name: placed[first] for name, first in tied_names(metadata, placed).items()} | placed


def _is_safetensors(file: Path) -> bool:
    """Return whether a file is safetensors, from its first bytes, since any suffix is allowed."""
    try:
        with open(file, "rb") as stream:
            return stream.read(9)[8:] == b"{"
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error}.") from error
