"""The profiles of a run: `Trainer(profile="simple")` and `Trainer(profile=ProfileKwargs(...))`.

The first shows how much time each part takes, and the bottleneck. The second runs
`Accelerator.profile` around the run.

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
from dataclasses import dataclass, replace
from functools import partial, wraps
from pathlib import Path
from threading import get_ident
from typing import Any, TypeVar

import torch
from torch.utils.data import DataLoader

from trainer.accelerator import Accelerator
from trainer.checkpoint.storage import write_whole
from trainer.configuration import ProfileKwargs
from trainer.data.epoch_iterator import EpochIterator
from trainer.enums import DynamoBackend
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


class HostLedger:
    """The time of each part by the host's clock; exact for devices that run synchronously.

    Attributes:
        name: The clock's name, for the report.
        seconds: The seconds of each part; complete after `settle`.
    """

    name = "the host's clock"

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.seconds: Counter[str] = Counter()
        self._clock = clock
        self._since = clock()

    def charge(self, part: str) -> None:
        """Add the time since the last call to a part."""
        now = self._clock()
        self.seconds[part] += now - self._since  # type: ignore[assignment]  # a Counter of floats
        self._since = now

    def settle(self) -> None:
        """Wait until `seconds` is complete."""


class DeviceLedger:
    """Like `HostLedger` by the device's clock: records a stream event at each change of parts.

    Kernels are charged to the part that launched them. Idle time of the device is charged to the
    part that was running on the host. Only completed events are read, so only `settle` waits for
    the device, once, at the end.

    Args:
        record: Records an event in the stream and returns it.
    """

    name = "events of the device"

    def __init__(self, record: Callable[[], Any]) -> None:
        self.seconds: Counter[str] = Counter()
        self._record = record
        self._last = record()
        self._pending: deque[tuple[str, Any]] = deque()

    def charge(self, part: str) -> None:
        """See `HostLedger`."""
        self._pending.append((part, self._record()))
        self._read()

    def settle(self) -> None:
        """See `HostLedger`; this waits for the device."""
        if self._pending:
            self._pending[-1][1].synchronize()
        self._read()

    def _read(self) -> None:
        while self._pending and self._pending[0][1].query():
            part, event = self._pending.popleft()
            self.seconds[part] += self._last.elapsed_time(event) / 1000
            self._last = event


def ledger_for(device: torch.device) -> HostLedger | DeviceLedger:
    """Return a ledger: by device events on CUDA and XPU, by the host's clock elsewhere."""
    if device.type not in ("cuda", "xpu"):
        return HostLedger()
    module: Any = torch.get_device_module(device)
    stream = module.current_stream(device)  # of the run, even if user code switches streams

    return DeviceLedger(lambda: stream.record_event(module.Event(enable_timing=True)))


class Stopwatch:
    """Charges time to one part at a time, on the thread that created it.

    Other threads are not timed.

    Attributes:
        ledger: The time of each part. A part may have subparts: ``"callbacks/on_train_start"``.
        calls: How often each part was entered from another one.
    """

    def __init__(self, ledger: HostLedger | DeviceLedger) -> None:
        self.ledger = ledger
        self.calls: Counter[str] = Counter()
        self._part = REST
        self._thread: int | None = get_ident()

    def enter(self, part: str) -> str | None:
        """Switch to a part; return the outer part, to be passed to `leave`."""
        if get_ident() != self._thread:
            return None
        outer = self._part
        if VALIDATING != outer != part:
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
    _time_methods(timed, TRANSFER, device_transfer, "hand_over")  # waits if the copy is late
    _replace(run, bare_step=_making(timed, FORWARD, run.bare_step))
    for name, hook in run.hooks.overridden():
        _replace(run.hooks, **{name: timed(f"{CALLBACKS}/{name}", hook)})
    _time_methods(timed, LOGGING, run.metrics, "log", "reduce_step", "reduce_epoch")
    _time_methods(timed, LOGGING, run.recorder, "record", "record_later", "flush", "finish")
    if isinstance(run, FitRun):
        _time_methods(timed, FORWARD, run.engine, "forward")
        _time_methods(timed, BACKWARD, run.engine, "backward", "sync_stats")
        _time_methods(timed, SAVING, run.saving.writer, "start", "wait")
        for optimizer in run.optim.optimizers:  # in manual optimisation the user calls them
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

_WORTH_A_WORD = 0.1  # the second-largest part is mentioned above this fraction of the time
_ENOUGH = 10  # updates; with fewer, the first one, which includes set-up, dominates
_LONG_ENOUGH = 1.0  # seconds; in less time, one-off work dominates
# Backward usually takes twice as long as forward. If it takes half of the time and more than four
# times as long as forward, most of it is waiting for other ranks in the gradient reduction.
_HALF, _WAITS = 0.5, 4
_LIMITS = {  # the report's text about each part, and its advice
    DATA: ("waits for data", "{workers}do less for each sample"),
    TRANSFER: (
        "waits for batches to reach the device",
        "set pin_memory=True in the DataLoader, or send smaller types",
    ),
    CALLBACKS: ("is in callbacks and hooks", "most of it in {hook}"),
    LOGGING: (
        "is busy with logging",
        "call self.log with fewer names, or set a larger log_every",
    ),
    VALIDATING: (
        "is in validations",
        "set a larger val_every, limit_val_batches, or larger validation batches",
    ),
    SAVING: ("is held up by saving", "give ModelCheckpoint a larger every, or use a faster disk"),
    REST: ("is in the loop itself", "use larger batches, since the steps are very short"),
}


@contextmanager
def profiling(
    kind: Profile | None, stage: str, *, folder: Path | None, accelerator: Accelerator
) -> Generator[Begin, None, None]:
    """Profile a run inside. Print the report of rank 0 on exit, also after an error.

    Args:
        kind: ``"simple"``; arguments of torch's profiler; or None for no profile.
        stage: fit, validate, test or predict.
        folder: Where to write ``profile-<stage>.json``, or traces; None writes no file.
        accelerator: The run's accelerator, which prints the report.

    Yields:
        A function that starts the profile of a run; it takes the run and its epoch iterators.
    """
    if kind is None:
        yield lambda run, epoch_iterators: None  # noqa: ARG005 - an interface
        return
    if isinstance(kind, ProfileKwargs):
        if kind.output_trace_dir is None and kind.on_trace_ready is None and folder is not None:
            kind = replace(kind, output_trace_dir=folder / f"profile-{stage}")
        with accelerator.profile(kind) as profiler:
            yield partial(_count_steps, profiler.step)
        return
    finish: Callable[[], Report] | None = None

    def begin(run: Run, epoch_iterators: list[EpochIterator]) -> None:
        nonlocal finish
        if run.rank == 0:
            stopwatch = Stopwatch(ledger_for(run.device))
            watch(run, stopwatch)
            loader, before = epoch_iterators[0].loader, run.counters.global_step
            finish = partial(_report, accelerator, run, loader, stopwatch, stage, before)

    try:
        yield begin
    finally:
        if finish is not None:  # the run began
            report = finish()
            accelerator.print(report.text())
            if folder is not None:
                _write(folder / f"profile-{stage}.json", report)


def _count_steps(step: Callable[[], None], run: Run, _: list[EpochIterator]) -> None:
    """Call a function after each update of a fit, or each batch of an evaluation."""
    if isinstance(run, FitRun):
        _replace(run.hooks, on_boundary=_then(run.hooks.on_boundary, step))
    else:
        make = run.bare_step
        _replace(run, bare_step=lambda name: _then(make(name), step))


def _then(function: Callable[..., T], step: Callable[[], None]) -> Callable[..., T]:
    def call(*args: Any) -> T:
        result = function(*args)
        step()
        return result

    return call


def _report(
    accelerator: Accelerator, run: Run, loader: Any, stopwatch: Stopwatch, stage: str, before: int
) -> Report:
    stopwatch.stop()
    seconds, calls = _sums(stopwatch.ledger.seconds), _sums(stopwatch.calls)
    fits = isinstance(run, FitRun)
    plugin = accelerator.dynamo_plugin
    return Report(
        stage=stage,
        clock=stopwatch.ledger.name,
        unit="update" if fits else "batch",
        steps=run.counters.global_step - before if fits else int(calls.get(FORWARD, 0)),
        seconds=seconds,
        calls={part: int(number) for part, number in calls.items()},
        hooks={
            part.partition("/")[2]: spent
            for part, spent in stopwatch.ledger.seconds.most_common()
            if "/" in part
        },
        num_workers=loader.num_workers if isinstance(loader, DataLoader) else None,
        processes=accelerator.num_processes,
        compiles=not (plugin.backend == DynamoBackend.NO or plugin.disable),
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
        processes: The number of processes of the run.
        compiles: Whether the steps are compiled.
    """

    stage: str
    clock: str
    unit: str
    steps: int
    seconds: dict[str, float]
    calls: dict[str, int]
    hooks: dict[str, float]
    num_workers: int | None
    processes: int = 1
    compiles: bool = False

    @property
    def units(self) -> str:
        """The plural of `unit`."""
        return "updates" if self.unit == "update" else "batches"

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
            f"Time of {self.stage} by part, on rank 0, measured by {self.clock}: "
            f"{self.steps} {self.units} in {self.total:.3f} s",
            f"{'':<12}{f'ms per {self.unit}':>16}{'seconds':>12}{'share':>9}",
        ]
        for name, seconds in {**self.seconds, "total": self.total}.items():
            milliseconds = f"{1000 * seconds / self.steps:.3f}" if self.steps else "-"
            share = f"{100 * seconds / (self.total or 1.0):.1f} %"
            lines.append(f"{name:<12}{milliseconds:>16}{seconds:>12.3f}{share:>9}")
        return "\n".join([*lines, self.bottleneck()])

    def bottleneck(self) -> str:
        """Return a sentence or two: which part takes most of the time, and how to reduce it.

        Forward, backward and optimizer count as one part. If it is the largest, the device is well
        used, and the largest other part is mentioned only if it takes at least 10 % of the time.
        Nothing is concluded from fewer than 10 updates or batches, or from less than a second.
        """
        if self.steps < _ENOUGH or self.total < _LONG_ENOUGH:
            return f"Too few {self.units}, or too short a time, to tell what limits the run."
        loop = "training" if self.unit == "update" else "evaluation"
        largest = max(_LIMITS, key=self.share)
        computing, backward = self.share(FORWARD, BACKWARD, OPTIMIZER), self.share(BACKWARD)
        if computing < self.share(largest):
            return f"The {loop} {self._limited_by(largest)}."
        if self.processes > 1 and backward >= max(_HALF, _WAITS * self.share(FORWARD)):
            spent = f"{_percent(backward)} of the time in backward, most of it probably waiting"
            faster = "SlowRankDetector finds a slow process, and larger batches reduce the waiting"
        else:
            spent = f"{_percent(computing)} of the time computing"
            compiling = "" if self.compiles else "dynamo_backend='inductor', "
            faster = f"mixed_precision, {compiling}larger batches or a faster device may help"
        if self.share(largest) >= _WORTH_A_WORD:
            faster = f"it {self._limited_by(largest)}"
        return f"The {loop} spends {spent}: {faster}."

    def _limited_by(self, part: str) -> str:
        what, advice = _LIMITS[part]
        workers = f"raise num_workers of the DataLoader (it is {self.num_workers}), or "
        if self.num_workers is None:
            workers = ""
        advice = advice.format(workers=workers, hook=next(iter(self.hooks), ""))
        return f"{what} {_percent(self.share(part))} of the time: {advice}"


def _sums(divided: Counter[str]) -> dict[str, float]:
    """Return the sum of each part over its subparts, in the order of the table."""
    sums: Counter[str] = Counter()
    for part, number in divided.items():
        sums[part.partition("/")[0]] += number
    return {part: sums[part] for part in PARTS if part in sums}


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"
