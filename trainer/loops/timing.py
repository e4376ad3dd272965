"""The simple profiler: measures how the time of a run splits into parts, such as data wait.

The methods of a run's objects (epoch iterators, engine, hooks, recorder, …) are wrapped once when
the run begins, so a run without profiling has no overhead. At any moment exactly one part is
charged. Time in a nested part counts for the inner part only, so the parts add up to the total.
The exception is a validation, or the sanity check: all time inside counts as validation.
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
    """A clock, and the time of each part by that clock.

    Attributes:
        name: The clock's name, for the report.
        seconds: The seconds of each part; those of the latest parts may be missing.
    """

    name: str
    seconds: Counter[str]

    def charge(self, part: str) -> None:
        """Add the time since the last call to a part."""

    def settle(self) -> None:
        """Wait until `seconds` is complete."""


class HostLedger:
    """The host's clock; exact for devices that run synchronously, such as the CPU."""

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
        """Do nothing: `seconds` is always complete."""


class DeviceLedger:
    """The device's clock: an event is recorded in its stream at each change of parts.

    Kernels are charged to the part that launched them. Idle time of the device is charged to the
    part that was running on the host. Only completed events are read, so only `settle` waits for
    the device, once, at the end.

    Args:
        record: Records an event in the stream and returns it: the given one, or a new one for None.
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
    """Return a ledger: by device events on CUDA, by the host's clock elsewhere."""
    if device.type != "cuda":
        return HostLedger()
    stream = torch.cuda.current_stream(device)  # of the run, even if user code switches streams

    def record(event: Any) -> Any:
        event = event or torch.cuda.Event(enable_timing=True)
        event.record(stream)
        return event

    return DeviceLedger(record)


class Stopwatch:
    """Charges time to one part at a time, on the thread that created it.

    Other threads are not timed.

    Attributes:
        ledger: The time of each part. A part may have subparts: ``"callbacks/on_train_start"``.
        calls: How often each part was entered from another one.
        validated: The number of batches in validations, including the sanity check.
    """

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger
        self.calls: Counter[str] = Counter()
        self.validated = 0
        self._part = REST
        self._thread: int | None = get_ident()

    def enter(self, part: str) -> str | None:
        """Switch to a part; return the outer part, to be passed to `leave`."""
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
        """Switch back to the outer part."""
        if outer is not None and outer != self._part:
            self.ledger.charge(self._part)
            self._part = outer

    @contextmanager
    def part(self, part: str) -> Iterator[None]:
        """Add the time spent inside to a part."""
        outer = self.enter(part)
        try:
            yield
        finally:
            self.leave(outer)

    def call(self, part: str, function: Callable[..., None], *args: Any) -> None:
        """Call a function and add its time to a part."""
        with self.part(part):
            function(*args)

    def timed(self, part: str, function: Callable[..., T]) -> Callable[..., T]:
        """Return the function wrapped so that the time of its calls is added to a part."""

        @wraps(function)  # copies the attribute by which torch's schedulers know a wrapped `step`
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
        """Return the generator function wrapped so that waiting for items is added to a part."""

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
        """Charge the time until now, and stop."""
        if self._thread is not None:
            self.ledger.charge(self._part)
            self._thread = None
            self.ledger.settle()


def watch(run: Run, stopwatch: Stopwatch) -> None:
    """Wrap the methods of a run's objects to time them; the objects live as long as the run."""
    timed = stopwatch.timed
    mover = run.mover
    _replace(mover, rounds=stopwatch.timed_items(DATA, mover.rounds))
    _replace(mover, transfer=_making(timed, TRANSFER, mover.transfer))
    _time_methods(timed, TRANSFER, mover, "hand_over")  # which waits for a late copy
    _replace(run, bare_step=_making(timed, FORWARD, run.bare_step))
    for name, hook in run.hooks.overridden():
        _replace(run.hooks, **{name: timed(f"{CALLBACKS}/{name}", hook)})
    _time_methods(timed, LOGGING, run.metrics, "log", "reduce_step", "reduce_epoch")
    _time_methods(timed, LOGGING, run.recorder, "record", "record_later", "flush", "finish")
    if isinstance(run, FitRun):
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
