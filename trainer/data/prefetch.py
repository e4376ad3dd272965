"""Copying batches to an accelerator on a side stream, beside the stream that computes.

On the computing stream, the copy of the next batch would queue behind the kernels of the previous
step, and the next kernels behind the copy: the two would never overlap.
"""

from __future__ import annotations

from collections import UserDict, deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from trainer.tree import children, leaves

_WITH_STREAMS = ("cuda", "xpu")  # whose allocators support record_stream
_LEAD = 4  # batches that the host may be ahead of the device


class Lead:
    """Keeps the host from running far ahead of the device, where nothing else would.

    The memory of a batch is freed when the device is done with it, not when the host is: in an
    evaluation of large batches, where nothing is read before the end, they would pile up. Whenever
    the host waits here, the device still has that many batches of work.

    Args:
        batches: How many batches the host may be ahead.
    """

    def __init__(self, batches: int) -> None:
        self._batches = batches
        self._events: deque[Any] = deque()

    def add(self, event: Any) -> None:
        """Note that a batch was handed over; the event follows what was computed before it."""
        self._events.append(event)
        if len(self._events) > self._batches:
            self._events.popleft().synchronize()


class Streams:
    """The two streams of a CUDA or XPU device.

    Attributes:
        side: The stream for copies; used through ``wait_stream`` and ``record_event``.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._module: Any = torch.get_device_module(device)
        self.side: Any = self._module.Stream(device)
        self._lead = Lead(_LEAD)

    def on_side(self) -> AbstractContextManager[Any]:
        """Enqueue work on the side stream inside the block."""
        context: AbstractContextManager[Any] = self._module.stream(self.side)
        return context

    def current(self) -> Any:
        """Return the stream that computes; used through ``wait_event``."""
        return self._module.current_stream(self._device)

    def keep(self, held: Any, stream: Any) -> None:
        """Keep memory allocated on the side stream until this stream is done with it.

        Args:
            held: A tensor, or an object with a ``record_stream`` for its tensors.
            stream: The stream that uses it.
        """
        held.record_stream(stream)

    def note_arrival(self, stream: Any) -> None:
        """Note that a batch was handed over to this stream; see `Lead`."""
        self._lead.add(stream.record_event())


@cache  # the allocator caches memory per stream, so all passes of all loaders share one
def streams_for(device: torch.device) -> Streams | None:
    """Return the device's streams; None where batches are copied on the computing stream."""
    return Streams(device) if device.type in _WITH_STREAMS else None


@dataclass(frozen=True, slots=True)
class InFlight:
    """A batch that may still be being copied.

    Attributes:
        value: The moved batch; not to be used before `arrive`.
        streams: The streams of its device.
        event: Follows its copy on the side stream; None if it was not copied there.
    """

    value: Any
    streams: Streams
    event: Any

    def arrive(self) -> Any:
        """Return the batch for subsequent work on the current stream; the host does not wait.

        Its memory was allocated on the side stream, where the allocator reuses it as soon as the
        last reference is gone: the next batch could overwrite one that queued kernels have yet to
        read. `Streams.keep` delays that, for each tensor, until the computing stream has passed the
        point at which the tensor was dropped. Memory then holds as many batches as the host is
        ahead of the device, which `Lead` limits.
        """
        if self.event is not None:
            stream = self.streams.current()
            # Wait for this copy only: the next batch's is on the side stream already.
            stream.wait_event(self.event)
            for held in _held(self.value):
                self.streams.keep(held, stream)
            self.streams.note_arrival(stream)
        return self.value


def send(
    batch: Any, move: Callable[[Any], Any], streams: Streams, *, follow: bool = False
) -> InFlight:
    """Begin to copy a batch while the device computes.

    The host memory may be dropped immediately. For pinned memory torch's allocator records an event
    on the copying stream and reuses the memory only after it (``CachingHostAllocator.h``). Other
    memory is staged before the call returns; the driver may wait for the stream first (NVIDIA, "API
    synchronization behavior"), but this one has no kernels to wait for.

    Args:
        batch: On the host; a batch that the side stream cannot copy is copied on the current one.
        move: Returns the batch on the device, or a tree that holds it.
        streams: The streams of the device.
        follow: `move` also computes with values that the current stream may still have to write:
            the side stream first waits for it.
    """
    if not _can_go_aside(batch):
        return InFlight(move(batch), streams, None)
    if follow:
        streams.side.wait_stream(streams.current())
    with streams.on_side():
        value = move(batch)
    return InFlight(value, streams, streams.side.record_event())


def _can_go_aside(tree: Any) -> bool:
    """Return whether all of it is on the host, and the tensors of its copy can be found or kept.

    An object with its own ``.to`` moves itself by unknown code. Only a ``UserDict``, such as the
    batches of tokenizers, is known to expose all its tensors, and an object with ``record_stream``
    was made for this.
    """
    if isinstance(tree, Tensor):
        return _is_plain(tree)
    if isinstance(tree, PackedSequence):
        return _is_plain(tree.data)
    parts = children(tree) or []
    moves_itself = not isinstance(tree, type) and callable(getattr(tree, "to", None))
    if moves_itself and not (isinstance(tree, UserDict) or _has_record_stream(tree)):
        return False
    return all(_can_go_aside(value) for _, value in parts)


def _is_plain(tensor: Tensor) -> bool:
    """Return whether it is plain dense host memory without an autograd graph."""
    return (
        tensor.device.type == "cpu"
        and tensor.layout is torch.strided
        and type(tensor).__torch_dispatch__ is Tensor.__torch_dispatch__
        and not (tensor.requires_grad or tensor.is_nested or tensor.is_quantized)
    )


def _has_record_stream(thing: Any) -> bool:
    return callable(getattr(thing, "record_stream", None))


def _held(tree: Any) -> Iterator[Any]:
    """Yield what holds device memory in a moved batch."""
    for leaf in leaves(tree):
        if isinstance(leaf, PackedSequence):
            yield from _held(tuple(leaf))
        elif isinstance(leaf, Tensor):
            if leaf.device.type != "cpu":
                yield leaf
        elif not isinstance(leaf, type) and _has_record_stream(leaf):
            yield leaf
