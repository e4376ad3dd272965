"""Batches on their way to an accelerator, by a stream of their own beside the one that computes.

On the stream that computes, the copy of the next batch would queue up behind the kernels of the
step before it, and the step's own kernels behind the copy: the two would never run at once.
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

_WITH_STREAMS = ("cuda", "xpu")  # and an allocator that can be told which of them use a tensor
_LEAD = 4  # batches by which the host may be ahead of the device


class Lead:
    """Keeps the host from running far ahead of the device, where nothing else would.

    The memory of a batch comes back when the device is done with it, not when the host is: in an
    evaluation of large batches, of which nothing is read before its end, they would pile up. The
    device still has work for so many batches whenever the host waits here.

    Args:
        batches: By so many it may be ahead.
    """

    def __init__(self, batches: int) -> None:
        self._batches = batches
        self._events: deque[Any] = deque()

    def add(self, event: Any) -> None:
        """Another batch was handed over; the event is behind what was computed before it."""
        self._events.append(event)
        if len(self._events) > self._batches:
            self._events.popleft().synchronize()


class Streams:
    """The two streams of a CUDA or XPU device.

    Attributes:
        side: That of the copies; what is asked of it is ``wait_stream`` and ``record_event``.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._module: Any = torch.get_device_module(device)
        self.side: Any = self._module.Stream(device)
        self._lead = Lead(_LEAD)

    def on_side(self) -> AbstractContextManager[Any]:
        """Inside, work is put into the side stream."""
        context: AbstractContextManager[Any] = self._module.stream(self.side)
        return context

    def current(self) -> Any:
        """The stream that computes; what is asked of it is ``wait_event``."""
        return self._module.current_stream(self._device)

    def keep(self, held: Any, stream: Any) -> None:
        """Do not reuse the memory of what was made on the side before this stream is done with it.

        Args:
            held: A tensor, or something that holds some and has their ``record_stream``.
            stream: What uses it.
        """
        held.record_stream(stream)

    def note_arrival(self, stream: Any) -> None:
        """A batch was handed over to this stream; see `Lead`."""
        self._lead.add(stream.record_event())


@cache  # the allocator keeps memory for each stream, so that one serves all passes of all loaders
def streams_for(device: torch.device) -> Streams | None:
    """The device's streams; None where batches are copied by the one that computes."""
    return Streams(device) if device.type in _WITH_STREAMS else None


@dataclass(frozen=True, slots=True)
class InFlight:
    """A batch that may still be on its way.

    Attributes:
        value: What moving it returned; nobody may use it before `arrive`.
        streams: Those of its device.
        event: Behind its copy in the side stream; None if that is not how it was copied.
    """

    value: Any
    streams: Streams
    event: Any

    def arrive(self) -> Any:
        """The batch, for what the current stream is given from now on; the host does not wait.

        Its memory was allocated on the side stream, and that is where the allocator gives it out
        again as soon as the last reference is gone: the next batch could be copied over one that
        kernels still in the queue are to read. Hence `Streams.keep` for each tensor: its memory
        then comes back when the stream has passed the point at which the tensor was dropped. As
        many batches take up memory as the host is ahead of the device: `Lead` sets a limit.
        """
        if self.event is not None:
            stream = self.streams.current()
            # For this copy alone: that of the next batch is in the side stream already.
            stream.wait_event(self.event)
            for held in _held(self.value):
                self.streams.keep(held, stream)
            self.streams.note_arrival(stream)
        return self.value


def send(
    batch: Any, move: Callable[[Any], Any], streams: Streams, *, follow: bool = False
) -> InFlight:
    """Begin to copy a batch, beside what the device computes.

    The host's memory may be dropped at once. Of pinned memory torch's allocator records an event
    in the stream that copies, and gives it out again behind it (``CachingHostAllocator.h``: the
    event is recorded whenever such a pointer is used in an asynchronous copy). Other memory is
    staged before the call returns; the driver may wait for the stream first (NVIDIA, "API
    synchronization behavior"), and this one holds no kernels that it would wait for.

    Args:
        batch: On the host; one that cannot go by the side stream goes by the current one.
        move: Returns the batch on the device, or a tree that holds it.
        streams: Those of the device.
        follow: `move` also computes, with things that the current stream may be about to write:
            the side stream begins where that one now ends.
    """
    if not _can_go_aside(batch):
        return InFlight(move(batch), streams, None)
    if follow:
        streams.side.wait_stream(streams.current())
    with streams.on_side():
        value = move(batch)
    return InFlight(value, streams, streams.side.record_event())


def _can_go_aside(tree: Any) -> bool:
    """All that it holds comes from the host, and its copy's tensors can be found or kept.

    A thing with a ``.to`` of its own is moved by code that we do not know. Of those only a
    ``UserDict`` is known to show all that it holds, as the batches of tokenizers are, and one with
    ``record_stream`` was made for this.
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
    """In the host's memory, with one block of memory behind it and no graph."""
    return (
        tensor.device.type == "cpu"
        and tensor.layout is torch.strided
        and type(tensor).__torch_dispatch__ is Tensor.__torch_dispatch__
        and not (tensor.requires_grad or tensor.is_nested or tensor.is_quantized)
    )


def _has_record_stream(thing: Any) -> bool:
    return callable(getattr(thing, "record_stream", None))


def _held(tree: Any) -> Iterator[Any]:
    """What a moved batch holds of the device's memory."""
    for leaf in leaves(tree):
        if isinstance(leaf, PackedSequence):
            yield from _held(tuple(leaf))
        elif isinstance(leaf, Tensor):
            if leaf.device.type != "cpu":
                yield leaf
        elif not isinstance(leaf, type) and _has_record_stream(leaf):
            yield leaf
