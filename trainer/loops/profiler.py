"""The report of `Trainer(profile="simple")`: a table of times, and the bottleneck in words.

The simple profiler: measures how the time of a run splits into parts, such as data wait.

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
from dataclasses import dataclass
from functools import partial, wraps
from pathlib import Path
from threading import get_ident
from typing import Any, Protocol, TypeVar

import torch
from torch.utils.data import DataLoader

from trainer.accelerator import Accelerator
from trainer.checkpoint.storage import write_whole
from trainer.data.epoch_iterator import EpochIterator
from trainer.enums import DynamoBackend
from trainer.environment import share_of_cores
from trainer.errors import module_logger
from trainer.loops.config import Profile
from trainer.loops.state import FitRun, Run
from trainer.strict_json import dumps

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
    device_transfer = run.device_transfer
    _replace(
        device_transfer, global_batches=stopwatch.timed_items(DATA, device_transfer.global_batches)
    )
    _replace(device_transfer, transfer=_making(timed, TRANSFER, device_transfer.transfer))
    _time_methods(timed, TRANSFER, device_transfer, "hand_over")  # which waits for a late copy
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


logger = module_logger(__name__)

Begin = Callable[[Run, list[EpochIterator]], None]

_COMPUTING = (FORWARD, BACKWARD, OPTIMIZER)
_WORTH_A_WORD = 0.1  # a second part is mentioned from this fraction of the time
_ENOUGH = 10  # updates; with fewer, the first one, which includes set-up, dominates
_LONG_ENOUGH = 1.0  # seconds; in less time, one-off work dominates
# Backward usually takes twice as long as forward. If it takes half of the time and more than four
# times as long as forward, most of it is waiting for other ranks in the gradient reduction.
_HALF, _WAITS = 0.5, 4
_PLURALS = {"update": "updates", "batch": "batches"}
_LIMITS = {  # what the report says of each part
    DATA: "waits for data",
    TRANSFER: "waits for batches to reach the device",
    CALLBACKS: "is in callbacks and hooks",
    LOGGING: "is busy with logging",
    VALIDATING: "is in validations",
    SAVING: "is held up by saving",
    REST: "is in the loop itself",
}
_ADVICE = {
    TRANSFER: "set pin_memory=True in the DataLoader, or send smaller types",
    LOGGING: "call self.log with fewer names, or set a larger log_every",
    VALIDATING: "set a larger val_every, limit_val_batches, or larger validation batches",
    SAVING: "give ModelCheckpoint a larger every, or use a faster disk",
    REST: "use larger batches; the steps are so short that what surrounds them matters",
}


@contextmanager
def profiling(
    kind: Profile | None, stage: str, *, folder: Path | None, accelerator: Accelerator
) -> Generator[Begin, None, None]:
    """Profile a run inside, on rank 0, and print the report on exit, also after an error.

    Args:
        kind: ``"simple"``, or None for no profile.
        stage: fit, validate, test or predict.
        folder: Where to write ``profile-<stage>.json``; None writes no file.
        accelerator: The run's accelerator, which prints the report.

    Yields:
        A function that starts the profile of a run; it takes the run and its epoch iterators.
    """
    if kind is None:
        yield lambda run, epoch_iterators: None  # noqa: ARG005 - an interface
        return
    reports: list[Callable[[], Report]] = []

    def begin(run: Run, epoch_iterators: list[EpochIterator]) -> None:
        if run.rank == 0:
            stopwatch = Stopwatch(ledger_for(run.device))
            watch(run, stopwatch)
            before = run.counters.global_step
            reports.append(
                partial(_report, accelerator, run, epoch_iterators, stopwatch, stage, before)
            )

    try:
        yield begin
    finally:
        for report in reports:  # one, or none if the run could not begin
            made = report()
            accelerator.print(made.text())
            if folder is not None:
                _write(folder / f"profile-{stage}.json", made)


def _report(
    accelerator: Accelerator,
    run: Run,
    epoch_iterators: list[EpochIterator],
    stopwatch: Stopwatch,
    stage: str,
    before: int,
) -> Report:
    stopwatch.stop()
    plugin, epoch_iterator, loader = (
        accelerator.dynamo_plugin,
        epoch_iterators[0],
        epoch_iterators[0].loader,
    )
    workers = loader.num_workers if isinstance(loader, DataLoader) else None
    again = (
        isinstance(run, FitRun) and run.counters.epoch > 0 and epoch_iterator.sampler is not None
    )
    return Report.of(
        stopwatch,
        stage,
        steps=run.counters.global_step - before if isinstance(run, FitRun) else None,
        num_workers=workers,
        restarts=again and not getattr(loader, "persistent_workers", True),
        most_workers=share_of_cores(accelerator.state._local_world_size),
        processes=accelerator.num_processes,
        compiles=not (plugin.backend == DynamoBackend.NO or plugin.disable),
        # On most CPUs it is slower.
        may_halve=accelerator.mixed_precision == "no" and accelerator.device.type != "cpu",
    )


def _write(path: Path, report: Report) -> None:
    text = dumps(report.record(), indent=2) + "\n"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, lambda file: file.write_text(text, encoding="utf-8"))
    except OSError:  # not a reason to fail the run
        logger.warning("%s could not be written.", path, exc_info=True)


@dataclass(frozen=True, kw_only=True)
class Report:
    """The profile of one run: how much time each part took.

    Attributes:
        stage: fit, validate, test or predict.
        clock: The name of the clock.
        unit: What `steps` counts: ``"update"`` or ``"batch"``.
        steps: The updates of this start of a fit, or the batches of an evaluation.
        seconds: The seconds of each part, in the order of the table.
        calls: How often each part was entered.
        hooks: The seconds of each hook; their sum is the part "callbacks".
        num_workers: The number of workers of the first loader; None if it is not a DataLoader.
        restarts: Whether the workers restarted in each epoch, which ``persistent_workers`` avoids.
        most_workers: The number of CPU cores available to this process.
        processes: The number of processes of the run.
        compiles: Whether the steps are compiled.
        may_halve: Whether it computes in float32 on an accelerator, so that bf16 may help.
        validated: The batches of validations inside a fit, including the sanity check.
    """

    stage: str
    clock: str
    unit: str
    steps: int
    seconds: dict[str, float]
    calls: dict[str, int]
    hooks: dict[str, float]
    num_workers: int | None
    restarts: bool = False
    most_workers: int = 1
    processes: int = 1
    compiles: bool = False
    may_halve: bool = False
    validated: int = 0

    @classmethod
    def of(cls, stopwatch: Stopwatch, stage: str, *, steps: int | None, **facts: Any) -> Report:
        """Create the report of a stopped stopwatch.

        Args:
            stopwatch: The stopwatch.
            stage: fit, validate, test or predict.
            steps: The number of updates; None for an evaluation, whose batches are counted.
            **facts: Further attributes.
        """
        seconds, calls = _sums(stopwatch.ledger.seconds), _sums(stopwatch.calls)
        return cls(
            stage=stage,
            clock=stopwatch.ledger.name,
            unit="batch" if steps is None else "update",
            steps=int(calls.get(FORWARD, 0)) if steps is None else steps,
            seconds=seconds,
            calls={part: int(number) for part, number in calls.items()},
            hooks={
                part.partition("/")[2]: spent
                for part, spent in stopwatch.ledger.seconds.most_common()
                if "/" in part
            },
            validated=stopwatch.validated,
            **facts,
        )

    @property
    def units(self) -> str:
        """The plural of `unit`."""
        return _PLURALS[self.unit]

    @property
    def total(self) -> float:
        """The total time in seconds."""
        return sum(self.seconds.values())

    def share(self, *parts: str) -> float:
        """Return the fraction of the total time that these parts took, from 0 to 1."""
        return sum(self.seconds.get(part, 0.0) for part in parts) / (self.total or 1.0)

    def record(self) -> dict[str, Any]:
        """Return the report as a dict for the JSON file."""
        return {
            "stage": self.stage,
            "rank": 0,
            "clock": self.clock,
            self.units: self.steps,
            "seconds": self.total,
            "parts": {
                part: {
                    "calls": self.calls.get(part, 0),
                    "seconds": self.seconds[part],
                    "share": self.share(part),
                }
                for part in self.seconds
            },
            "hooks": self.hooks,
            "bottleneck": self.bottleneck(),
        }

    def text(self) -> str:
        """Return the table of times and the sentence about the bottleneck."""
        lines = [
            f"Where the time of {self.stage} went, on rank 0, by {self.clock}: "
            f"{self.steps} {self.units} in {self.total:.3f} s",
            f"{'':<12}{f'ms per {self.unit}':>16}{'seconds':>12}{'share':>9}",
        ]
        lines += [self._line(part, self.seconds[part]) for part in self.seconds]
        return "\n".join([*lines, self._line("total", self.total), self.bottleneck()])

    def _line(self, name: str, seconds: float) -> str:
        each = f"{1000 * seconds / self.steps:.3f}" if self.steps else "-"
        share = f"{100 * seconds / (self.total or 1.0):.1f} %"
        return f"{name:<12}{each:>16}{seconds:>12.3f}{share:>9}"

    def bottleneck(self) -> str:
        """Return a sentence or two: which part takes most of the time, and how to reduce it.

        Forward, backward and optimizer count as one part. If it is the largest, the device is well
        used, and the largest other part is mentioned only if it takes at least 10 % of the time.
        Nothing is concluded from fewer than 10 updates or batches, or from less than a second.
        """
        if not self.total:
            return "No time was measured."
        if not self.steps:
            return f"No {self.unit} was completed."
        if self.steps < _ENOUGH:
            return f"{_number(self.steps, self.unit)}: too few to tell what limits the run."
        if self.total < _LONG_ENOUGH:
            return f"{self.total:.2f} s: too short to tell what limits the run."
        what = "training" if self.unit == "update" else "evaluation"
        others = {part: self.share(part) for part in _LIMITS}
        largest = max(others, key=others.__getitem__)
        computing = self.share(*_COMPUTING)
        if computing < others[largest]:
            return f"The {what} {self._found(largest)}."
        doing = "computing and compiling" if self.compiles else "computing"
        sentence = (
            f"The {what} spends {_percent(computing)} of the time {doing}, which is its limit"
        )
        if self._waits_in_backward:
            sentence = (
                f"The {what} spends {_percent(self.share(BACKWARD))} of the time in "
                "backward, most of it probably waiting for the other processes"
            )
        if self.validated < _ENOUGH:
            del others[VALIDATING]
            largest = max(others, key=others.__getitem__)
        if others[largest] >= _WORTH_A_WORD:
            return f"{sentence}. It {self._found(largest)}."
        return f"{sentence}: {self._faster()}."

    @property
    def _waits_in_backward(self) -> bool:
        backward = self.share(BACKWARD)
        much = backward >= _HALF and backward > _WAITS * self.share(FORWARD)
        return self.processes > 1 and much

    def _faster(self) -> str:
        if self._waits_in_backward:
            return (
                "the callback SlowRankDetector tells whether one is slow, and larger batches or "
                "gradient_accumulation_steps let them wait less often"
            )
        means = ["mixed_precision='bf16'"] * self.may_halve
        means += ["dynamo_backend='inductor'"] * (not self.compiles)
        return f"{', '.join([*means, 'larger batches'])} or a faster device would help"

    def _found(self, part: str) -> str:
        return f"{_LIMITS[part]} {_percent(self.share(part))} of the time: {self._advice(part)}"

    def _advice(self, part: str) -> str:
        if part == VALIDATING and self.validated < _ENOUGH:
            return f"{_number(self.validated, 'batch')}, too few to tell why"
        if part == DATA:
            return self._advice_on_data()
        if part == CALLBACKS:
            return f"most of it in {next(iter(self.hooks))}; see which of yours it is"
        return _ADVICE[part]

    def _advice_on_data(self) -> str:
        workers = self.num_workers
        if workers is None:
            return "let other processes prepare the batches, or do less for each"
        more = f"raise num_workers of the DataLoader (it is {workers})"
        if workers >= self.most_workers:  # more workers help only if they wait for I/O
            more += " if its workers wait for a disk or a network"
        means = [more, "do less for each sample"]
        if workers and self.restarts:
            means.insert(1, "set persistent_workers=True if epochs are short")
        return ", or ".join(means)


def _sums(divided: Counter[str]) -> dict[str, float]:
    """Return the sum of each part over its subparts, in the order of the table."""
    sums: Counter[str] = Counter()
    for part, number in divided.items():
        sums[part.partition("/")[0]] += number
    return {part: sums[part] for part in PARTS if part in sums}


def _number(count: int, unit: str) -> str:
    return f"{count} {unit if count == 1 else _PLURALS[unit]}"


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"
