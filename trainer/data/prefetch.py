"""Prefetch to the device: copy batches asynchronously on a side stream (CUDA and XPU).

On the compute stream, the copy of the next batch would wait for the kernels of the current step,
and the next kernels would wait for the copy. Copies and computation would never overlap.
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

from trainer.tree import children, is_plain, leaves

_WITH_STREAMS = ("cuda", "xpu")  # device types whose allocators support record_stream
_MAX_BATCHES_AHEAD = 4  # batches by which the host may run ahead of the device


class RunAheadLimit:
    """Limits how many batches the host may run ahead of the device.

    The memory of a batch is freed when the device has finished with it, not when the host has. In
    an evaluation that reads no value before its end, large batches would otherwise accumulate in
    device memory. When the host waits here, the device still has `batches` batches of work queued,
    so it does not become idle.

    Args:
        batches: The number of batches by which the host may be ahead.
    """

    def __init__(self, batches: int) -> None:
        self._batches = batches
        self._events: deque[Any] = deque()

    def add(self, event: Any) -> None:
        """Record that a batch was yielded, and wait for the device if it is too far behind.

        Args:
            event: A device event, recorded after the work of earlier batches was queued.
        """
        self._events.append(event)
        if len(self._events) > self._batches:
            self._events.popleft().synchronize()


class Streams:
    """The compute stream and the copy stream of a CUDA or XPU device.

    Attributes:
        side: The side stream for copies.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.side = torch.Stream(device)
        self._run_ahead = RunAheadLimit(_MAX_BATCHES_AHEAD)

    def on_side(self) -> AbstractContextManager[Any]:
        """Return a context manager that queues work on the side stream."""
        return self.side  # as a context manager, this costs less than torch.cuda.stream

    def current(self) -> Any:
        """Return the current compute stream."""
        return torch.accelerator.current_stream(self._device)

    def keep(self, held: Any, stream: Any) -> None:
        """Keep memory that was allocated on the side stream until `stream` has finished with it.

        Args:
            held: A tensor, or an object with a ``record_stream`` method for its tensors.
            stream: The stream that uses the memory.
        """
        held.record_stream(stream)

    def note_arrival(self, stream: Any) -> None:
        """Record that a batch was passed to this stream; see `RunAheadLimit`."""
        self._run_ahead.add(stream.record_event())


@cache  # one side stream per device: the caching allocator keeps separate memory per stream
def streams_for(device: torch.device) -> Streams | None:
    """Return the device's streams; None if batches are copied on the compute stream."""
    return Streams(device) if device.type in _WITH_STREAMS else None


@dataclass(frozen=True, slots=True)
class InFlight:
    """A batch whose asynchronous copy to the device may not be finished.

    Attributes:
        value: The batch on the device; do not use it before `arrive`.
        streams: The streams of the device.
        event: The event recorded after the copy on the side stream; None if the batch was copied on
            the compute stream.
    """

    value: Any
    streams: Streams
    event: Any

    def arrive(self) -> Any:
        """Return the batch, ready for use on the current stream; the host does not wait.

        The batch's memory was allocated on the side stream. The allocator would reuse it there as
        soon as the last reference is gone, so the next batch could overwrite data that queued
        kernels have yet to read. `Streams.keep` (``record_stream``) delays the reuse of each tensor
        until the compute stream has passed the point at which the tensor was dropped. Device memory
        then holds as many batches as the host is ahead of the device; see `RunAheadLimit`.
        """
        if self.event is not None:
            stream = self.streams.current()
            # Wait for this copy only: the copy of the next batch is already queued behind it.
            stream.wait_event(self.event)
            for held in _device_memory_of(self.value):
                self.streams.keep(held, stream)
            self.streams.note_arrival(stream)
        return self.value


def send(
    batch: Any, move: Callable[[Any], Any], streams: Streams, *, follow: bool = False
) -> InFlight:
    """Start an asynchronous copy of a batch to the device, on the side stream.

    The host memory may be freed immediately. For pinned memory, torch's allocator records an event
    on the copying stream and reuses the memory only after that event (``CachingHostAllocator.h``).
    Pageable memory is staged before the call returns; the driver may first synchronize the stream
    (NVIDIA, "API synchronization behavior"), but the side stream has no kernels to wait for.

    Args:
        batch: The batch on the host. A batch that the side stream cannot copy is copied on the
            current stream.
        move: Returns the batch on the device, or a tree that holds it.
        streams: The streams of the device.
        follow: Whether `move` also reads values that queued work on the current stream may still
            write. The side stream then waits for the current stream first.
    """
    if not _fits_side_stream(batch):
        return InFlight(move(batch), streams, None)
    if follow:
        streams.side.wait_stream(streams.current())
    with streams.on_side():
        value = move(batch)
    return InFlight(value, streams, streams.side.record_event())


def _fits_side_stream(tree: Any) -> bool:
    """Return whether a batch can be copied on the side stream.

    All of its data must be on the host, and all tensors of the copy must be known, for
    ``record_stream``. An object with a ``.to`` method moves itself by unknown code. Two kinds are
    safe: a ``UserDict`` (batches of tokenizers, for example) exposes all its tensors, and an object
    with a ``record_stream`` method handles its own.
    """
    if isinstance(tree, Tensor):
        return is_plain(tree)
    if isinstance(tree, PackedSequence):
        return is_plain(tree.data)
    parts = children(tree) or []
    moves_itself = not isinstance(tree, type) and callable(getattr(tree, "to", None))
    if moves_itself and not (isinstance(tree, UserDict) or _has_record_stream(tree)):
        return False
    return all(_fits_side_stream(value) for _, value in parts)


def _has_record_stream(thing: Any) -> bool:
    return callable(getattr(thing, "record_stream", None))


def _device_memory_of(tree: Any) -> Iterator[Any]:
    """Yield the tensors and objects of a moved batch that hold device memory."""
    for leaf in leaves(tree):
        if isinstance(leaf, PackedSequence):
            yield from _device_memory_of(tuple(leaf))
        elif isinstance(leaf, Tensor):
            if leaf.device.type != "cpu":
                yield leaf
        elif not isinstance(leaf, type) and _has_record_stream(leaf):
            yield leaf
