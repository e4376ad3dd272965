"""State parts: what one process contributes to a checkpoint, validated and encoded.

A part is written at once or, in a background save, later. State dicts refer to tensors that
training continues to change, so a background save first copies their values to host memory. That
memory is reused by every save.
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
Encoded = tuple[str, dict[str, Tensor]]  # the result of `trainer.checkpoint.tensors.encode_tree`


@dataclass(frozen=True, slots=True)
class Portion:
    """A state part: tensors and text of one process for a checkpoint.

    Attributes:
        tensors: Plain, contiguous tensors. Training may still change them in place.
        write: Writes given tensors (these or copies of them) and the part's text into a folder.
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
    """Return a module's weights as a state part; see `trainer.checkpoint.weights`.

    Raises:
        TypeError: A value cannot be saved.
    """
    tensors, tied = separate_tied(state_dict)
    return Portion(
        {name: portable(tensor, f"The weight {name!r}") for name, tensor in tensors.items()},
        lambda values, folder: write_weights(values, tied, folder / name),
    )


def tree_portion(tree: object, stem: str) -> Portion:
    """Return nested state as a state part; see `trainer.checkpoint.tensors`.

    Raises:
        TypeError: The tree holds a value that cannot be saved; the message says where.
    """
    return encoded_portion(*encode_tree(tree, stem), stem)


def encoded_portion(document: str, tensors: Mapping[str, Tensor], stem: str) -> Portion:
    """Return an already encoded tree as a state part, for example one from another process."""
    return Portion(
        tensors,
        lambda values, folder: write_tree(document, values, folder, stem),
        len(document),
    )


def write_portions(portions: Sequence[Portion]) -> Write:
    """Return a function that writes the values that the tensors have when it is called."""

    def write(folder: Path) -> None:
        for portion in portions:
            portion.write(portion.tensors, folder)

    return write


class HostCopies:
    """Host memory (pinned for CUDA and XPU) for the tensors of a save, reused by the next save.

    It is reused because allocating and mapping new pages takes longer than the copy itself.
    """

    def __init__(self) -> None:
        self._kept: dict[tuple[int, str], Tensor] = {}

    def hold(self, portions: Sequence[Portion]) -> Write:
        """Copy the tensors' current values; return a function that writes these copies.

        The previous such function must have finished, because its memory is reused. Copies from a
        device are only enqueued here. They run in stream order, so later kernels cannot change what
        they read.
        """
        kept: dict[tuple[int, str], Tensor] = {}
        for number, portion in enumerate(portions):
            for name, tensor in portion.tensors.items():
                kept[number, name] = self._copy(tensor, self._kept.get((number, name)))
        self._kept = kept
        arrivals = _events_of([tensor for part in portions for tensor in part.tensors.values()])
        writers = [portion.write for portion in portions]  # keep no reference to the live tensors

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
    """Record an event per device after the asynchronous copies that were just enqueued."""
    events = []
    for device in {tensor.device for tensor in tensors if _copies_by_itself(tensor.device)}:
        event = torch.Event(device)
        event.record()
        events.append(event)
    return events
