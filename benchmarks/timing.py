"""Contenders that take turns, so that what slows the machine down slows all of them alike."""

from __future__ import annotations

import gc
import io
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

from benchmarks.report import Column, Row

Sample = dict[str, float]

MICROSECONDS = (
    Column("cpu", "CPU µs"),
    Column("cpu_ratio", "CPU ×", 3),
    Column("wall", "wall µs"),
    Column("wall_ratio", "wall ×", 3),
)


@dataclass(frozen=True, kw_only=True)
class Lap:
    """What one turn of a contender took.

    Attributes:
        wall: Seconds a step, by the wall.
        cpu: Seconds a step of all threads of the process together.
        outcome: What the turn came to; all contenders must come to the same.
    """

    wall: float
    cpu: float
    outcome: Any = None


@dataclass(frozen=True, kw_only=True)
class Contender:
    """A row of a table.

    Attributes:
        name: In the table, and what ``--rows`` looks in.
        run: One turn, from nothing to its end.
        needs: Packages without which it is left out.
    """

    name: str
    run: Callable[[], Lap]
    needs: tuple[str, ...] = ()

    @property
    def missing(self) -> list[str]:
        """Those that are not installed."""
        return [name for name in self.needs if find_spec(name) is None]


class Clock:
    """Notes the time at the first and at the last of the steps that count.

    Every contender calls `tick` at the same place of each step, mostly in the forward pass, so that
    what comes before the first step and after the last one (set-up, checkpoints at the end) is not
    in its time, and everything between two steps is.

    Args:
        steps: How many there will be.
        skip: How many of them do not count, at the beginning.
        wait: Called before the time is noted, to wait for a device.
    """

    def __init__(
        self, steps: int, skip: int | None = None, wait: Callable[[], None] = lambda: None
    ) -> None:
        skip = min(50, steps // 5) if skip is None else skip
        if steps - skip < 2:
            raise ValueError(f"{steps} steps, {skip} of them not counted, are too few: at least 3.")
        self.steps, self.first, self.wait = steps, skip + 1, wait
        self.count = 0
        self.notes: list[tuple[float, float]] = []

    def tick(self) -> None:
        """Count a step."""
        self.count += 1
        if self.count == self.first or self.count == self.steps:
            self.wait()
            self.notes.append((time.perf_counter(), time.process_time()))

    def lap(self, outcome: Any = None) -> Lap:
        """The time of a step, when all are done.

        Raises:
            RuntimeError: There were fewer or more steps than said.
        """
        if self.count != self.steps:
            raise RuntimeError(f"{self.count} steps were made; it should have been {self.steps}.")
        (wall, cpu), (wall_end, cpu_end) = self.notes
        number = self.steps - self.first
        return Lap(wall=(wall_end - wall) / number, cpu=(cpu_end - cpu) / number, outcome=outcome)


def timed(function: Callable[[], Any], number: int = 1) -> Lap:
    """The time of one call, for each of `number` parts; the outcome is what it returns."""
    wall, cpu = time.perf_counter(), time.process_time()
    outcome = function()
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    return Lap(wall=wall / number, cpu=cpu / number, outcome=outcome)


class _Terminal(io.TextIOBase):
    """Takes everything like a terminal, so that progress bars are drawn, and shows nothing."""

    encoding = "utf-8"

    def isatty(self) -> bool:
        return True

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        return len(text)


@contextmanager
def unseen() -> Iterator[None]:
    """Inside, what is printed goes to a terminal that nobody looks at."""
    with redirect_stdout(_Terminal()), redirect_stderr(_Terminal()):
        yield


def chosen(contenders: Sequence[Contender], rows: Sequence[str]) -> list[Contender]:
    """The first contender, which the others are compared with, and those that `rows` asks for.

    Args:
        contenders: All of them.
        rows: Parts of names, in whatever case; none asks for all.
    """
    wanted = [row.casefold() for row in rows]
    first, *others = contenders
    kept = [c for c in others if not wanted or any(row in c.name.casefold() for row in wanted)]
    return [first, *kept]


def take_turns(
    contenders: Sequence[Contender],
    repeats: int,
    *,
    unit: float = 1e-6,
    group: str = "",
    agree: Callable[[Any, Any], bool] = lambda one, other: one == other,
) -> list[Row]:
    """Run all in turn, again and again, and compare each with the first one of the same round.

    A round before the first is not counted. Each round begins with another contender. Whoever comes
    to another outcome than the first contender gets no figures but a row that says so.

    Args:
        contenders: The first one is the reference.
        repeats: How many rounds.
        unit: Of the figures, in seconds.
        group: Of the rows.
        agree: Whether two outcomes are the same.

    Returns:
        A row for each, with the figures of `MICROSECONDS`: of each its quartiles.
    """
    present = [contender for contender in contenders if not contender.missing]
    laps: dict[str, list[Lap]] = {contender.name: [] for contender in present}
    if contenders[0].missing:
        packages = ", ".join(contenders[0].missing)
        return [
            Row(name=c.name, group=group, void=f"not installed: {packages}") for c in contenders
        ]
    gc.collect()
    gc.freeze()  # what is there already is not to be looked through time and again …
    try:
        for number in range(repeats + 1):
            at = number % len(present)
            for contender in (*present[at:], *present[:at]):
                gc.collect()
                with unseen():
                    lap = contender.run()
                laps[contender.name].append(lap)
            if number == 0:
                gc.collect()  # what the last one has left
                gc.freeze()  # … nor what the first turns have imported
    finally:
        gc.unfreeze()
    reference = laps[contenders[0].name]
    rows = []
    for contender in contenders:
        row = Row(name=contender.name, group=group)
        if contender.missing:
            row.void = f"not installed: {', '.join(contender.missing)}"
        elif not all(
            agree(lap.outcome, other.outcome)
            for lap, other in zip(laps[contender.name], reference, strict=True)
        ):
            row.void = "void: it came to another result"
        else:
            samples = _samples(laps[contender.name][1:], reference[1:], unit)
            row.values = {key: quartiles(values) for key, values in samples.items()}
            row.samples = samples
        rows.append(row)
    return rows


def _samples(laps: list[Lap], reference: list[Lap], unit: float) -> dict[str, list[float]]:
    samples: dict[str, list[float]] = {}
    for key in ("cpu", "wall"):
        times = [getattr(lap, key) for lap in laps]
        others = [getattr(lap, key) for lap in reference]
        samples[key] = [each / unit for each in times]
        # the clock of the processor may stand still during a short turn
        samples[f"{key}_ratio"] = [a / max(b, 1e-9) for a, b in zip(times, others, strict=True)]
    return samples


def quartiles(values: Sequence[float]) -> list[float]:
    """The median, and the quarters of the values below and above it."""
    if len(values) == 1:
        return [values[0]] * 3
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return [middle, low, high]
