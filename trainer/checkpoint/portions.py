"""What one process puts into a checkpoint, checked and encoded, to be written now or later.

A save in the background must hold the tensors of its own update, though state dicts are made of
the live ones. So their values are copied to memory of the host, which every save uses again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trainer.checkpoint.tensors import encode_tree, portable, write_tree
from trainer.checkpoint.weights import WEIGHTS_NAME, bare_names, separate_tied, write_weights

Write = Callable[[Path], None]
Encoded = tuple[str, dict[str, Tensor]]  # see `trainer.checkpoint.tensors.encode_tree`


@dataclass(frozen=True, slots=True)
class Portion:
    """A part of a checkpoint.

    Attributes:
        tensors: Plain, contiguous ones; they may be live.
        write: Writes them, or copies of them, into a folder, with what is to be said about them.
        text_size: Bytes of that.
    """

    tensors: Mapping[str, Tensor]
    write: Callable[[Mapping[str, Tensor], Path], None]
    text_size: int = 0

    @property
    def size(self) -> int:
        """Bytes that it takes on the disk, but for file headers."""
        return self.text_size + sum(tensor.nbytes for tensor in self.tensors.values())


def weights_portion(state_dict: Mapping[str, object], name: str = WEIGHTS_NAME) -> Portion:
    """A module's weights, see `trainer.checkpoint.weights`, for the file of this name.

    Raises:
        TypeError: A value cannot be saved.
    """
    tensors, tied = separate_tied(bare_names(state_dict))
    return Portion(
        {name: portable(tensor, f"The weight {name!r}") for name, tensor in tensors.items()},
        lambda values, folder: write_weights(values, tied, folder / name),
    )


def tree_portion(tree: object, stem: str) -> Portion:
    """A tree of state, see `trainer.checkpoint.tensors`.

    Raises:
        TypeError: The tree holds what cannot be saved; the text says where.
    """
    return encoded_portion(*encode_tree(tree, stem), stem)


def encoded_portion(document: str, tensors: Mapping[str, Tensor], stem: str) -> Portion:
    """A tree that is encoded already, by another process for example."""
    return Portion(
        tensors,
        lambda values, folder: write_tree(document, values, folder, stem),
        len(document),
    )


def write_portions(portions: Sequence[Portion]) -> Write:
    """A function that writes the portions as they are when it is called."""

    def write(folder: Path) -> None:
        for portion in portions:
            portion.write(portion.tensors, folder)

    return write


class HostCopies:
    """Memory of the host for the tensors of a save; the next one copies into the same.

    Fresh memory would have to be found and mapped page by page, which takes longer than the copy.
    """

    def __init__(self) -> None:
        self._kept: dict[tuple[int, str], Tensor] = {}

    def hold(self, portions: Sequence[Portion]) -> Write:
        """A function that writes the portions as they are now; the last such must be done with.

        The copies are only begun here where a device makes them by itself, in the order of its
        work: what it computes later cannot reach them.
        """
        kept: dict[tuple[int, str], Tensor] = {}
        for number, portion in enumerate(portions):
            for name, tensor in portion.tensors.items():
                kept[number, name] = self._copy(tensor, self._kept.get((number, name)))
        self._kept = kept
        arrivals = _events_of([tensor for part in portions for tensor in part.tensors.values()])
        writers = [portion.write for portion in portions]  # not the portions: they hold the live

        def write(folder: Path) -> None:
            for arrival in arrivals:
                arrival.synchronize()
            for number, write_one in enumerate(writers):
                write_one({name: t for (part, name), t in kept.items() if part == number}, folder)

        return write

    @staticmethod
    def _copy(tensor: Tensor, buffer: Tensor | None) -> Tensor:
        if buffer is None or (buffer.shape, buffer.dtype) != (tensor.shape, tensor.dtype):
            pin = _copies_by_itself(tensor.device)
            buffer = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=pin)
        return buffer.copy_(tensor, non_blocking=_copies_by_itself(tensor.device))


def _copies_by_itself(device: torch.device) -> bool:
    return device.type in ("cuda", "xpu")


def _events_of(tensors: Sequence[Tensor]) -> list[Any]:
    """An event for each device that copies by itself, behind the copies just asked for."""
    events = []
    for device in {tensor.device for tensor in tensors if _copies_by_itself(tensor.device)}:
        event = torch.Event(device)
        event.record()
        events.append(event)
    return events
