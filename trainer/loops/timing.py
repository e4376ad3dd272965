"""Where the time of a run goes: a stopwatch that always runs for exactly one part.

The objects that a run works with (its feeds, engine, hooks, record, …) are timed by wrapping them
once, when the run begins, so that a run that is not timed pays nothing for it. Time in a nested
part counts for the inner part only, so the parts add up to the whole. An exception is a validation
or the sanity check: all time inside counts for the validation.
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
    """A clock, and the time that each part has taken.

    Attributes:
        name: The clock's name, for the report.
        seconds: Of each part, as far as they are known.
    """

    name: str
    seconds: Counter[str]

    def charge(self, part: str) -> None:
        """Charge the time since the last call to a part."""

    def settle(self) -> None:
        """Wait until all that was charged is in `seconds`."""


class HostLedger:
    """The clock of this process; exact for devices that work synchronously, such as the CPU."""

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
    """The device's own timeline: an event in its stream at each change of parts, read later.

    Work is charged to the part that launched it, and a gap in which the device was idle to the part
    that let it wait. Only completed events are read, so nothing waits for the device except
    `settle`, once, at the end.

    Args:
        record: Records a new event, or the used one that it is given, in the stream.
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
    """Return a ledger by events on CUDA devices, by the host's clock elsewhere."""
    if device.type != "cuda":
        return HostLedger()
    stream = torch.cuda.current_stream(device)  # of the run, even if user code switches streams

    def record(event: Any) -> Any:
        event = event or torch.cuda.Event(enable_timing=True)
        event.record(stream)
        return event

    return DeviceLedger(record)


class Stopwatch:
    """Runs for one part at a time, on the thread that created it; other threads are not timed.

    Attributes:
        ledger: The time of each part. Parts may be divided: ``"callbacks/on_train_start"``.
        calls: How often each part was entered from another one.
        validated: Batches of validations, including the sanity check.
    """

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger
        self.calls: Counter[str] = Counter()
        self.validated = 0
        self._part = REST
        self._thread: int | None = get_ident()

    def enter(self, part: str) -> str | None:
        """Switch to a part; return what to pass to `leave`."""
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
        """Inside, the time counts for this part."""
        outer = self.enter(part)
        try:
            yield
        finally:
            self.leave(outer)

    def call(self, part: str, function: Callable[..., None], *args: Any) -> None:
        """Call a function, whose time counts for this part."""
        with self.part(part):
            function(*args)

    def timed(self, part: str, function: Callable[..., T]) -> Callable[..., T]:
        """Return the function wrapped so that its calls count for this part."""

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
        """Return the generator function wrapped so that waits for items count for this part."""

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
        """Charge the time until now, and nothing more afterwards."""
        if self._thread is not None:
            self.ledger.charge(self._part)
            self._thread = None
            self.ledger.settle()


def watch(run: Run, stopwatch: Stopwatch) -> None:
    """Time the objects that a run works with by wrapping them; they live as long as the run."""
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
