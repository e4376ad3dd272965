"""The report of `Trainer(profile="simple")`: a table of times, and the bottleneck in words."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from torch.utils.data import DataLoader

from trackers.strict_json import dumps
from trainer.accelerator import Accelerator
from trainer.checkpoint.atomic import write_whole
from trainer.choices import DynamoBackend
from trainer.data.feed import Feed
from trainer.environment import share_of_cores
from trainer.loops import timing
from trainer.loops.run import FitRun, Run
from trainer.loops.settings import Profile
from trainer.loops.timing import PARTS, Stopwatch, ledger_for

logger = logging.getLogger(__name__)

Begin = Callable[[Run, list[Feed]], None]

_COMPUTING = (timing.FORWARD, timing.BACKWARD, timing.OPTIMIZER)
_WORTH_A_WORD = 0.1  # a second part is mentioned from this fraction of the time
_ENOUGH = 10  # updates; with fewer, the first one, which includes set-up, dominates
_LONG_ENOUGH = 1.0  # seconds; in less time, one-off work dominates
# Backward usually takes twice as long as forward. If it takes half of the time and more than four
# times as long as forward, most of it is waiting for other ranks in the gradient reduction.
_HALF, _WAITS = 0.5, 4
_PLURALS = {"update": "updates", "batch": "batches"}
_LIMITS = {  # what the report says of each part
    timing.DATA: "waits for data",
    timing.TRANSFER: "waits for batches to reach the device",
    timing.CALLBACKS: "is in callbacks and hooks",
    timing.LOGGING: "is busy with logging",
    timing.VALIDATING: "is in validations",
    timing.SAVING: "is held up by saving",
    timing.REST: "is in the loop itself",
}
_ADVICE = {
    timing.TRANSFER: "set pin_memory=True in the DataLoader, or send smaller types",
    timing.LOGGING: "call self.log with fewer names, or set a larger log_every",
    timing.VALIDATING: "set a larger val_every, limit_val_batches, or larger validation batches",
    timing.SAVING: "give ModelCheckpoint a larger every, or use a faster disk",
    timing.REST: "use larger batches; the steps are so short that what surrounds them matters",
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
        yield lambda run, feeds: None  # noqa: ARG005 - an interface
        return
    reports: list[Callable[[], Report]] = []

    def begin(run: Run, feeds: list[Feed]) -> None:
        if run.rank == 0:
            stopwatch = Stopwatch(ledger_for(run.device))
            timing.watch(run, stopwatch)
            before = run.counters.global_step
            reports.append(partial(_report, accelerator, run, feeds, stopwatch, stage, before))

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
    feeds: list[Feed],
    stopwatch: Stopwatch,
    stage: str,
    before: int,
) -> Report:
    stopwatch.stop()
    plugin, feed, loader = accelerator.dynamo_plugin, feeds[0], feeds[0].loader
    workers = loader.num_workers if isinstance(loader, DataLoader) else None
    again = isinstance(run, FitRun) and run.counters.epoch > 0 and feed.sampler is not None
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
            steps=int(calls.get(timing.FORWARD, 0)) if steps is None else steps,
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
        told = f"The {what} spends {_percent(computing)} of the time {doing}, which is its limit"
        if self._waits_in_backward:
            told = (
                f"The {what} spends {_percent(self.share(timing.BACKWARD))} of the time in "
                "backward, most of it probably waiting for the other processes"
            )
        if self.validated < _ENOUGH:
            del others[timing.VALIDATING]
            largest = max(others, key=others.__getitem__)
        if others[largest] >= _WORTH_A_WORD:
            return f"{told}. It {self._found(largest)}."
        return f"{told}: {self._faster()}."

    @property
    def _waits_in_backward(self) -> bool:
        backward = self.share(timing.BACKWARD)
        much = backward >= _HALF and backward > _WAITS * self.share(timing.FORWARD)
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
        if part == timing.VALIDATING and self.validated < _ENOUGH:
            return f"{_number(self.validated, 'batch')}, too few to tell why"
        if part == timing.DATA:
            return self._advice_on_data()
        if part == timing.CALLBACKS:
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
