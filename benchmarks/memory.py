"""The peak memory of a run, and whether memory grows with its steps.

Each run has its own process, since the recorded peak of a process never falls.
"""

from __future__ import annotations

import gc
import json
import resource
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from benchmarks import contestants
from benchmarks.arguments import at_least
from benchmarks.report import Column, Result, Row
from benchmarks.task import Task
from benchmarks.timing import LEAST_STEPS, Clock, apart, is_chosen, quartiles, resident, unseen

STEPS, REPEATS = 100_000, 3
WARM_UP = 0.2  # of the steps: by then the caches and the allocator have reached their size
WIDTH = 4472  # of a layer with twenty million parameters
COLUMNS = (
    Column("peak", "peak, MB"),
    Column("ratio", "×", 3),
    Column("growth", "growth, kB"),
    Column("per_step", "bytes per step", 2),
)
KINDS: dict[str, Callable[[Any], None]] = {
    "PyTorch loop by hand": contestants.by_hand,
    "the same, with TensorBoard": contestants.by_hand_with_tensorboard,
    "Cadence Trainer, everything off": contestants.barebones,
    "Cadence Trainer, defaults": contestants.defaults,
    "Cadence Trainer, defaults without TensorBoard": partial(contestants.defaults, log_with=None),
    "Cadence Accelerator": contestants.own_loop,
}


class Meter(Clock):
    """Record the resident memory instead of the time, at the first counted step and the last."""

    def __init__(self, steps: int) -> None:
        super().__init__(steps, skip=int(WARM_UP * steps))
        self.bytes: list[int] = []

    def tick(self) -> None:
        """Count a step."""
        self.count += 1
        if self.count == self.first or self.count == self.steps:
            gc.collect()
            self.bytes.append(resident())


def task_of(steps: int, *, wide: bool) -> tuple[Task, Meter]:
    """Return the task to train, with a meter in place of its clock."""
    hidden = (WIDTH, WIDTH) if wide else (64,)
    task = Task(steps, dataset="batched", optimizer="adamw", hidden=hidden)
    meter = Meter(steps)
    task.clock = task.model.clock = meter
    return task, meter


def measure(train: Callable[[Any], None], steps: int, *, wide: bool) -> dict[str, float]:
    """Run once in this process; return its peak and its growth after the warm-up, in bytes."""
    task, meter = task_of(steps, wide=wide)
    with unseen():
        train(task)
    if meter.count != steps:
        raise RuntimeError(f"{meter.count} steps were made, but {steps} were expected.")
    before, after = meter.bytes
    unit = 1 if sys.platform == "darwin" else 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    return {"peak": float(peak), "growth": float(after - before)}


def add_arguments(parser: ArgumentParser) -> None:
    """Add the options of this benchmark."""
    parser.add_argument(
        "--wide-steps",
        type=at_least(LEAST_STEPS),
        default=20,
        help="steps of the run with 20 million parameters",
    )


def names() -> list[str]:
    """Return the names of all rows."""
    return list(KINDS)


def _measured_apart(name: str, steps: int, *, wide: bool) -> dict[str, float]:
    return json.loads(apart("benchmarks.memory", name, steps, int(wide)))


def table(
    measured: Callable[[str], dict[str, float]], names: list[str], repeats: int, counted: int
) -> list[Row]:
    """Measure all in turn; return rows relative to the first, with growth over `counted` steps."""
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in names}
    for _ in range(repeats):
        for name in names:
            runs[name].append(measured(name))
    best = [each["peak"] for each in runs[names[0]]]
    found = []
    for name, each in runs.items():
        peaks = [one["peak"] for one in each]
        samples = {
            "peak": [peak / 1e6 for peak in peaks],
            "ratio": [one / other for one, other in zip(peaks, best, strict=True)],
            "growth": [one["growth"] / 1e3 for one in each],
            "per_step": [one["growth"] / counted for one in each],
        }
        values: dict[str, Any] = {key: quartiles(list_) for key, list_ in samples.items()}
        if repeats == 1:
            values = {key: value[0] for key, value in values.items()}
        found.append(Row(name=name, values=values, samples=samples))
    return found


def run(options: Namespace) -> Result:
    """Run the benchmark, each run in its own process."""
    resident()  # its absence is told here, not by a process that fails
    reference, *others = KINDS
    kept = [each for each in others if is_chosen(each, options.rows)]
    found = []
    for wide, steps in ((False, options.steps), (True, options.wide_steps)):
        parts = table(
            partial(_measured_apart, steps=steps, wide=wide),
            [reference, *kept],
            options.repeats,
            steps - int(WARM_UP * steps),
        )
        for row in parts:
            size = "20 million" if wide else "2,762"
            row.group = f"{size} parameters, {steps:,} steps"
            if wide:  # too few steps to show growth
                for key in ("growth", "per_step"):
                    del row.values[key], row.samples[key]
        found += parts
    return Result(
        benchmark="memory",
        title="Resident memory of a run with AdamW",
        columns=COLUMNS,
        rows=found,
        settings={"steps": options.steps, "repeats": options.repeats},
        notes=[f"Growth is counted from {WARM_UP:.0%} of the steps to the last one."],
    )


if __name__ == "__main__":
    torch.set_num_threads(1)
    name, steps, wide = sys.argv[1:]
    print(json.dumps(measure(KINDS[name], int(steps), wide=wide == "1")))
