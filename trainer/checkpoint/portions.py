"""One process's part of a checkpoint, validated and encoded, to be written now or later.

State dicts refer to live tensors, but a background save must hold their values at its update. So
the values are copied to host memory, which every save reuses.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trainer.checkpoint.tensors import encode_tree, portable, write_tree
from trainer.checkpoint.weights import WEIGHTS_NAME, separate_tied, write_weights

Write = Callable[[Path], None]
Encoded = tuple[str, dict[str, Tensor]]  # see `trainer.checkpoint.tensors.encode_tree`


@dataclass(frozen=True, slots=True)
class Portion:
    """A part of a checkpoint.

    Attributes:
        tensors: Plain, contiguous tensors, perhaps live ones.
        write: Writes the tensors, or copies of them, and the portion's text into a folder.
        text_size: The size of the text in bytes.
    """

    tensors: Mapping[str, Tensor]
    write: Callable[[Mapping[str, Tensor], Path], None]
    text_size: int = 0

    @property
    def size(self) -> int:
        """The size on disk in bytes, without file headers."""
        return self.text_size + sum(tensor.nbytes for tensor in self.tensors.values())


def weights_portion(state_dict: Mapping[str, object], name: str = WEIGHTS_NAME) -> Portion:
    """Return a module's weights as a portion; see `trainer.checkpoint.weights`.

    Raises:
        TypeError: A value cannot be saved.
    """
    tensors, tied = separate_tied(state_dict)
    return Portion(
        {name: portable(tensor, f"The weight {name!r}") for name, tensor in tensors.items()},
        lambda values, folder: write_weights(values, tied, folder / name),
    )


def tree_portion(tree: object, stem: str) -> Portion:
    """Return a tree of state as a portion; see `trainer.checkpoint.tensors`.

    Raises:
        TypeError: The tree holds a value that cannot be saved; the message says where.
    """
    return encoded_portion(*encode_tree(tree, stem), stem)


def encoded_portion(document: str, tensors: Mapping[str, Tensor], stem: str) -> Portion:
    """Return an already encoded tree as a portion, for example one from another process."""
    return Portion(
        tensors,
        lambda values, folder: write_tree(document, values, folder, stem),
        len(document),
    )


def write_portions(portions: Sequence[Portion]) -> Write:
    """Return a function that writes the portions' values at the time of its call."""

    def write(folder: Path) -> None:
        for portion in portions:
            portion.write(portion.tensors, folder)

    return write


class HostCopies:
    """Host memory for the tensors of a save, reused by the next save.

    Allocating and mapping fresh memory page by page takes longer than the copy.
    """

    def __init__(self) -> None:
        self._kept: dict[tuple[int, str], Tensor] = {}

    def hold(self, portions: Sequence[Portion]) -> Write:
        """Return a function that writes the portions' present values.

        The previous such function must have finished: its memory is reused. Asynchronous copies
        from a device are only enqueued here, in stream order: later kernels cannot affect them.
        """
        kept: dict[tuple[int, str], Tensor] = {}
        for number, portion in enumerate(portions):
            for name, tensor in portion.tensors.items():
                kept[number, name] = self._copy(tensor, self._kept.get((number, name)))
        self._kept = kept
        arrivals = _events_of([tensor for part in portions for tensor in part.tensors.values()])
        writers = [portion.write for portion in portions]  # the portions refer to live tensors

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
    """Record an event on each device with asynchronous copies, after the copies just enqueued."""
    events = []
    for device in {tensor.device for tensor in tensors if _copies_by_itself(tensor.device)}:
        event = torch.Event(device)
        event.record()
        events.append(event)
    return events
