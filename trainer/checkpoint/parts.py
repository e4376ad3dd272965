"""The parts of a checkpoint: the files that one process writes, and a reader for all of them.

A fit and an `Accelerator` differ in the parts that they list; both save them with
:func:`trainer.checkpoint.save.save_checkpoint` and read them with :class:`Reader`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trainer.checkpoint.loading import read_torch_file
from trainer.checkpoint.serialization import encode_tree, load_tree, portable_weight, write_tree
from trainer.checkpoint.sharded_state import INDEX, ShardReader, Shards, TensorFile
from trainer.checkpoint.storage import examine
from trainer.checkpoint.weights import (
    WEIGHTS_NAME,
    read_weights,
    separate_tied,
    tied_names,
    write_weights_file,
)
from trainer.errors import CheckpointError

# The trained weights, if model.safetensors holds others, such as averaged weights.
TRAINED_NAME = "trained.safetensors"
Write = Callable[[Path], Sequence[str]]  # writes into a folder; returns the names of the files
Encoded = tuple[str, dict[str, Tensor]]  # from `trainer.checkpoint.serialization.encode_tree`


def section_of(name: str) -> str:
    """Return the prefix of the names of these weights among the sharded tensors.

    Args:
        name: The file that holds these weights in a checkpoint without shards.
    """
    return "" if name == WEIGHTS_NAME else f"{name.removesuffix('.safetensors')}/"


@dataclass(frozen=True, slots=True)
class StatePart:
    """Tensors and text of one process for a checkpoint, validated and encoded.

    Attributes:
        tensors: Plain, contiguous tensors. Training may still change them in place.
        write: Writes the tensors it is passed (these or copies) and the part's text into a folder.
        files: The names of the files that it writes.
        text_size: The size of the text in bytes.
    """

    tensors: Mapping[str, Tensor]
    write: Callable[[Mapping[str, Tensor], Path], None]
    files: Sequence[str]
    text_size: int = 0

    @property
    def size(self) -> int:
        """The size on disk in bytes, without file headers."""
        return self.text_size + sum(tensor.nbytes for tensor in self.tensors.values())


def weights_part(state_dict: Mapping[str, object], name: str = WEIGHTS_NAME) -> StatePart:
    """Return a module's weights as a state part, in the format of the file name's suffix.

    Raises:
        TypeError: A value cannot be saved.
    """
    tensors, tied = separate_tied(state_dict)
    return StatePart(
        {name: portable_weight(tensor, name) for name, tensor in tensors.items()},
        lambda values, folder: write_weights_file(values, tied, folder / name),
        [name],
    )


def tree_part(tree: object, stem: str, shards: Shards | None = None) -> StatePart:
    """Return nested state as a state part; sharded tensors are added to `shards` instead.

    Raises:
        TypeError: The tree holds a value that cannot be saved; the message says where.
    """
    return encoded_part(*encode_tree(tree, stem, shards), stem)


def shards_part(shards: Shards) -> StatePart:
    """Return this process's parts of sharded tensors as a state part."""
    return StatePart(shards.tensors, shards.write, shards.files)


def encoded_part(document: str, tensors: Mapping[str, Tensor], stem: str) -> StatePart:
    """Return an already encoded tree as a state part, for example one from another process."""
    return StatePart(
        tensors,
        lambda values, folder: write_tree(document, values, folder, stem),
        [f"{stem}.json", *([f"{stem}.safetensors"] if tensors else [])],
        len(document),
    )


def state_parts(
    weights: Mapping[str, Mapping[str, object]],
    trees: Mapping[str, object],
    shards: Shards | None,
    names: Mapping[str, str] | None = None,
) -> list[StatePart]:
    """Return weights and nested states as state parts; sharded tensors go to `shards`, if given.

    Args:
        weights: State dicts of modules by the names of their files.
        trees: Nested states by the stems of their files.
        shards: See `Shards`; with it, all weights are sharded.
        names: The names of files to show in errors.

    Raises:
        CheckpointError: A value cannot be saved; the message says where.
    """
    parts = []
    for file, content in [*weights.items(), *trees.items()]:
        try:
            if file in trees:
                parts.append(tree_part(content, file, shards))
            elif shards is None:
                parts.append(weights_part(weights[file], file))
            else:
                shards.add_weights(weights[file], section_of(file))
        except TypeError as error:
            what = (names or {}).get(file, f"The state for {file}")
            raise CheckpointError(f"{what} cannot be saved. {error}") from error
    return parts


def write_parts(parts: Sequence[StatePart]) -> Write:
    """Return a function that writes the parts, with the tensors' values at the time of the call."""

    def write(folder: Path) -> list[str]:
        for part in parts:
            part.write(part.tensors, folder)
        return files_of(parts)

    return write


def files_of(parts: Iterable[StatePart]) -> list[str]:
    """Return the names of the files that parts write."""
    return [name for part in parts for name in part.files]


@dataclass(frozen=True)
class Reader:
    """Reads the parts of a checkpoint whose files match its manifest.

    Attributes:
        path: The folder to read.
        manifest: Its manifest.
    """

    path: Path
    manifest: Mapping[str, Any]

    @classmethod
    def open(cls, target: Path, **how: Any) -> Reader:
        """Check a checkpoint; see `trainer.checkpoint.storage.examine`, also for the arguments.

        Raises:
            CheckpointError: A file is missing or damaged.
        """
        return cls(*examine(target, **how))

    @property
    def files(self) -> Mapping[str, Any]:
        """The checkpoint's files by name."""
        return self.manifest["files"]  # type: ignore[no-any-return]  # from JSON

    def tree(self, stem: str, *, later: bool = False) -> Any:
        """Return the tree of :func:`tree_part`; see `trainer.checkpoint.serialization.load_tree`.

        Args:
            stem: The files' name before the dot.
            later: Whole tensors are also returned as `ShardedTensor` objects, which are read when
                copied.

        Raises:
            CheckpointError: The tree is missing, or cannot be read.
        """
        read = (lambda file: TensorFile(file).tensors()) if later else None
        return load_tree(self.path, stem, self.files, self.shards, read)

    @cached_property
    def shards(self) -> ShardReader | None:
        """The sharded tensors; None if there are none."""
        return ShardReader(self.path, self.files) if INDEX in self.files else None

    def has_weights(self, name: str) -> bool:
        """Return whether the checkpoint has the weights of that file, perhaps sharded."""
        if name in self.files:
            return True
        return self.shards is not None and bool(self.shards.weights(section_of(name)))

    def weights(self, *names: str, later: bool = False) -> dict[str, Any]:
        """Return the weights of the first of the named files that exists.

        Weights that were saved sharded are returned as `ShardedTensor` objects.

        Args:
            *names: The files.
            later: See `tree`.

        Raises:
            CheckpointError: None of the files exists, or it cannot be read.
        """
        file = next((self.path / name for name in names if name in self.files), None)
        if file is None and self.shards is not None:
            return dict(self.shards.weights(section_of(names[0])))
        if file is None:
            raise CheckpointError(f"The manifest of {self.path} lists no {' or '.join(names)}.")
        if file.suffix == ".safetensors" and later:
            opened = TensorFile(file)
            tensors = opened.tensors()
            tied = tied_names(opened.metadata, tensors)
            return {name: tensors[first] for name, first in tied.items()} | tensors
        if file.suffix == ".safetensors":
            return read_weights(file)
        weights: dict[str, torch.Tensor] = read_torch_file(file)
        return weights
