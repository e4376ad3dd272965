"""Where the time of a run goes: a stopwatch that always runs for exactly one part.

What a run works with (its feeds, engine, hooks, record, …) is timed by wrapping those objects once,
when the run begins, so that a run that is not timed pays nothing for it. Time inside a part that
is inside another one counts for the inner one alone, so the parts add up to the whole. What a
validation or the check before the training does is all its own.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from functools import wraps
from threading import get_ident
from typing import Any, Protocol, TypeVar

import torch

from trainer.loops.run import FitRun, Run

T = TypeVar("T")

DATA, TRANSFER, FORWARD, BACKWARD = "data wait", "transfer", "forward", "backward"
OPTIMIZER, CALLBACKS, LOGGING = "optimizer", "callbacks", "logging"
VALIDATING, SAVING, REST = "validation", "saving", "rest"
PARTS = (
    *(DATA, TRANSFER, FORWARD, BACKWARD, OPTIMIZER),
    *(CALLBACKS, LOGGING, VALIDATING, SAVING, REST),
)


class Ledger(Protocol):
    """A clock, and how much of its time each part has had.

    Attributes:
        name: The clock's, for the report.
        seconds: Of each part, as far as they are known.
    """

    name: str
    seconds: Counter[str]

    def charge(self, part: str) -> None:
        """The time since the last call was this part's."""

    def settle(self) -> None:
        """Know everything that was charged."""


class HostLedger:
    """The clock of this process; where work is done at once, as on the CPU, it is all there is."""

    name = "the clock of the host"

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.seconds: Counter[str] = Counter()
        self._clock = clock
        self._since = clock()

    def charge(self, part: str) -> None:
        """See `Ledger`."""
        now = self._clock()
        self.seconds[part] += now - self._since  # type: ignore[assignment]  # a Counter of floats
        self._since = now

    def settle(self) -> None:
        """Nothing is open."""


class DeviceLedger:
    """The device's own timeline: an event in its stream at each change of parts, read later.

    Work is charged to the part that asked for it, and a gap in which the device had nothing to do
    to the part that let it wait. Only events that have passed are read, so nobody waits for the
    device but `settle`, once, at the end.

    Args:
        record: Puts a new event, or a used one that it is given, into the stream.
    """

    name = "events of the device"

    def __init__(self, record: Callable[[Any], Any]) -> None:
        self.seconds: Counter[str] = Counter()
        self._record = record
        self._last = record(None)
        self._pending: deque[tuple[str, Any]] = deque()
        self._used: list[Any] = []

    def charge(self, part: str) -> None:
        """See `Ledger`."""
        self._pending.append((part, self._record(self._used.pop() if self._used else None)))
        self._read()

    def settle(self) -> None:
        """See `Ledger`; this waits for the device."""
        if self._pending:
            self._pending[-1][1].synchronize()
        self._read()

    def _read(self) -> None:
        while self._pending and self._pending[0][1].query():
            part, event = self._pending.popleft()
            milliseconds = self._last.elapsed_time(event)
            self.seconds[part] += milliseconds / 1000
            self._used.append(self._last)
            self._last = event


def ledger_for(device: torch.device) -> Ledger:
    """Events on CUDA devices, the host's clock elsewhere."""
    if device.type != "cuda":
        return HostLedger()
    stream = torch.cuda.current_stream(device)  # of the run, whatever the user's code switches to

    def record(event: Any) -> Any:
        event = event or torch.cuda.Event(enable_timing=True)
        event.record(stream)
        return event

    return DeviceLedger(record)


class Stopwatch:
    """Runs for one part at a time, on the thread that made it; other threads are not timed.

    Attributes:
        ledger: What each part has had. Parts may be divided: ``"callbacks/on_train_start"``.
        calls: How often each was entered from another one.
        validated: Batches of validations, and of the check before the training.
    """

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger
        self.calls: Counter[str] = Counter()
        self.validated = 0
        self._part = REST
        self._thread: int | None = get_ident()

    def enter(self, part: str) -> str | None:
        """Run for another part; returns what `leave` is to be given."""
        if get_ident() != self._thread:
            return None
        outer = self._part
        if outer == VALIDATING:
            self.validated += part == FORWARD
        elif part != outer:
            self.ledger.charge(outer)
            self.calls[part] += 1
            self._part = part
        return outer

    def leave(self, outer: str | None) -> None:
        """Run again for the part that was left."""
        if outer is not None and outer != self._part:
            self.ledger.charge(self._part)
            self._part = outer

    @contextmanager
    def part(self, part: str) -> Iterator[None]:
        """Inside, it runs for this part."""
        outer = self.enter(part)
        try:
            yield
        finally:
            self.leave(outer)

    def call(self, part: str, function: Callable[..., None], *args: Any) -> None:
        """Call a function, whose time is this part's."""
        with self.part(part):
            function(*args)

    def timed(self, part: str, function: Callable[..., T]) -> Callable[..., T]:
        """The function, whose calls are this part's."""

        @wraps(function)  # torch's schedulers look for a mark on the `step` that they wrapped
        def call(*args: Any, **kwargs: Any) -> T:
            outer = self.enter(part)
            try:
                return function(*args, **kwargs)
            finally:
                self.leave(outer)

        return call

    def timed_items(
        self, part: str, function: Callable[..., Generator[T, None, None]]
    ) -> Callable[..., Generator[T, None, None]]:
        """The generator function, whose waits for an item are this part's."""

        def call(*args: Any, **kwargs: Any) -> Generator[T, None, None]:
            items = function(*args, **kwargs)
            wait = self.timed(part, lambda: next(items, None))
            try:
                while (item := wait()) is not None:
                    yield item
            finally:
                self.timed(part, items.close)()

        return call

    def stop(self) -> None:
        """The rest up to now is charged, and nothing more."""
        if self._thread is not None:
            self.ledger.charge(self._part)
            self._thread = None
            self.ledger.settle()


def watch(run: Run, stopwatch: Stopwatch) -> None:
    """Time what a run works with, by wrapping it; all of it lives as long as the run."""
    timed = stopwatch.timed
    mover = run.mover
    _replace(mover, rounds=stopwatch.timed_items(DATA, mover.rounds))
    _replace(mover, transfer=_making(timed, TRANSFER, mover.transfer))
    _time_methods(timed, TRANSFER, mover, "hand_over")  # where a copy that is late is waited for
    _replace(run, bare_step=_making(timed, FORWARD, run.bare_step))
    for name, hook in run.hooks.overridden():
        _replace(run.hooks, **{name: timed(f"{CALLBACKS}/{name}", hook)})
    _time_methods(timed, LOGGING, run.metrics, "log", "reduce_step", "reduce_epoch")
    _time_methods(timed, LOGGING, run.recorder, "record", "record_later", "flush", "finish")
    if isinstance(run, FitRun):
        _time_methods(timed, DATA, run, "renew_loaders")
        _time_methods(timed, FORWARD, run.engine, "step")
        _time_methods(timed, BACKWARD, run.engine, "backward", "finish_window")
        _time_methods(timed, SAVING, run.writer, "start", "wait")
        for optimizer in run.optimizers:  # in manual optimisation the user calls them
            _time_methods(timed, OPTIMIZER, optimizer, "step")
    run.timing = stopwatch


def _time_methods(timed: Callable[..., Any], part: str, owner: object, *names: str) -> None:
    for name in names:
        _replace(owner, **{name: timed(part, getattr(owner, name))})


def _making(
    timed: Callable[..., Any], part: str, maker: Callable[..., Callable[..., Any]]
) -> Callable[..., Any]:
    return lambda *args, **kwargs: timed(part, maker(*args, **kwargs))


def _replace(owner: object, **methods: Callable[..., Any]) -> None:
    vars(owner).update(methods)
