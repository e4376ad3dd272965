"""Two streams for the simulated device: they record their calls, and their copies arrive late.

A tensor that is put on the device of `tests.helpers.device` inside `on_side` holds nonsense until a
stream waits for an event that was recorded after the copy. Code that uses a batch too early thus
computes with nonsense.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.helpers.device import OnDevice


class Event:
    def __init__(self, number: int, behind: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        self.number, self.behind = number, behind


class Stream:
    def __init__(self, name: str, streams: LateStreams) -> None:
        self.name, self._streams = name, streams

    def record_event(self) -> Event:
        streams = self._streams
        event = Event(streams.events, streams.late)
        streams.events, streams.late = streams.events + 1, []
        streams.note("event", event.number, self.name)
        return event

    def wait_event(self, event: Event) -> None:
        self._streams.note("wait", event.number, self.name)
        for tensor, host in event.behind:
            tensor.copy_(host)
        event.behind.clear()

    def wait_stream(self, stream: Stream) -> None:
        self._streams.note("follow", stream.name, self.name)


class LateStreams:
    """A stand-in for `trainer.data.prefetch.Streams`.

    Attributes:
        log: The calls, with their arguments and the name of the stream.
        kept: What must not be overwritten before the computing stream has used it.
        late: The tensors copied since the last event, each with its values.
        events: The number of recorded events.
    """

    def __init__(self) -> None:
        self.log: list[tuple[Any, ...]] = []
        self.kept: list[Any] = []
        self.late: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.events = 0
        self.side = Stream("side", self)
        self._current = self._computing = Stream("computing", self)

    def note(self, *entry: Any) -> None:
        self.log.append(entry)

    @contextmanager
    def on_side(self) -> Iterator[None]:
        made: dict[int, torch.Tensor] = {}
        self._current = self.side
        try:
            with _Made(made):
                yield
        finally:
            self._current = self._computing
        for tensor in made.values():
            self.late.append((tensor, tensor.clone()))
            tensor.fill_(torch.nan if tensor.is_floating_point() else -1)

    def current(self) -> Stream:
        return self._current

    def keep(self, held: Any, stream: Stream) -> None:
        self.note("keep", stream.name)
        self.kept.append(held)

    def note_arrival(self, stream: Stream) -> None:
        """Do nothing: the host cannot run ahead of a simulated device."""

    def copying(self, device: torch.device) -> LateStreams | None:
        """Replace `trainer.data.prefetch.streams_for`."""
        return self if device.type == "meta" else None


class _Made(TorchDispatchMode):
    """Collect the host values of all tensors that are put on the device."""

    def __init__(self, made: dict[int, torch.Tensor]) -> None:
        super().__init__()
        self._made = made

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, OnDevice):
                self._made[id(leaf)] = leaf.host
        return result
