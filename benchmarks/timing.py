"""Time contenders in turn, so that whatever slows the machine down affects all of them."""

from __future__ import annotations

import gc
import io
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks.report import Column, Row, Unavailable

Sample = dict[str, float]
LEAST_STEPS = 3  # of a turn: one that does not count, and the two that a time lies between

MICROSECONDS = (
    Column("cpu", "CPU µs"),
    Column("cpu_ratio", "CPU ×", 3),
    Column("wall", "wall µs"),
    Column("wall_ratio", "wall ×", 3),
)


@dataclass(frozen=True, kw_only=True)
class Lap:
    """The time and the outcome of one turn of a contender.

    Attributes:
        wall: Wall-clock seconds per step.
        cpu: CPU seconds per step, over all threads of the process.
        outcome: What the turn computed, which must be the same for all contenders.
    """

    wall: float
    cpu: float
    outcome: Any = None


@dataclass(frozen=True, kw_only=True)
class Contender:
    """A row of a table.

    Attributes:
        name: Its name in the table, which ``--rows`` searches.
        run: Makes one complete turn.
        needs: The packages that must be installed.
    """

    name: str
    run: Callable[[], Lap]
    needs: tuple[str, ...] = ()

    @property
    def missing(self) -> list[str]:
        """The required packages that are not installed."""
        return [name for name in self.needs if find_spec(name) is None]


class Clock:
    """Record the time at the first and at the last of the counted steps.

    Every contender calls `tick` at the same point of each step, mostly in the forward pass. Its
    time thus excludes everything before the first step and after the last one (set-up, final
    checkpoints), and includes everything between two steps.

    Args:
        steps: The expected number of steps.
        skip: How many steps at the beginning are not counted.
        wait: Called before the time is recorded, to wait for a device.
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
        """Return the time per step, after the last one.

        Raises:
            RuntimeError: The number of steps is not the expected one.
        """
        if self.count != self.steps:
            raise RuntimeError(f"{self.count} steps were made, but {self.steps} were expected.")
        (wall, cpu), (wall_end, cpu_end) = self.notes
        number = self.steps - self.first
        return Lap(wall=(wall_end - wall) / number, cpu=(cpu_end - cpu) / number, outcome=outcome)


def timed(function: Callable[[], Any], number: int = 1) -> Lap:
    """Time one call; return its time per part, of `number` parts, and what it returned."""
    wall, cpu = time.perf_counter(), time.process_time()
    outcome = function()
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    return Lap(wall=wall / number, cpu=cpu / number, outcome=outcome)


def resident() -> int:
    """Return the resident memory of this process, in bytes.

    Raises:
        Unavailable: psutil is not installed.
    """
    try:
        import psutil
    except ImportError as error:
        raise Unavailable("Memory is measured with psutil: pip install psutil.") from error
    memory: int = psutil.Process().memory_info().rss
    return memory


def apart(module: str, *arguments: object) -> str:
    """Run a module as a script in a process of its own; return the last line that it prints."""
    command = [sys.executable, "-m", module, *map(str, arguments)]
    root = Path(__file__).parents[1]
    output = subprocess.run(command, check=True, cwd=root, stdout=subprocess.PIPE, text=True).stdout
    return output.splitlines()[-1]


class _Terminal(io.TextIOBase):
    """A terminal that discards its output, so that progress bars are drawn but not shown."""

    encoding = "utf-8"

    def isatty(self) -> bool:
        return True

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        return len(text)


@contextmanager
def unseen() -> Iterator[None]:
    """Inside, output goes to a terminal that discards it."""
    with redirect_stdout(_Terminal()), redirect_stderr(_Terminal()):
        yield


def is_chosen(name: str, rows: Sequence[str]) -> bool:
    """Return whether the name contains one of these texts, in any case; without texts, yes."""
    return not rows or any(row.casefold() in name.casefold() for row in rows)


def chosen(contenders: Sequence[Contender], rows: Sequence[str]) -> list[Contender]:
    """Return the first contender, the reference, and those selected by `rows`.

    Args:
        contenders: All contenders.
        rows: Parts of names, in any case; if empty, all contenders are selected.
    """
    first, *others = contenders
    return [first, *(each for each in others if is_chosen(each.name, rows))]


def take_turns(
    contenders: Sequence[Contender],
    repeats: int,
    *,
    unit: float = 1e-6,
    group: str = "",
    agree: Callable[[Any, Any], bool] = lambda one, other: one == other,
) -> list[Row]:
    """Run all contenders in rounds, and compare each with the reference of the same round.

    A warm-up round is not counted. Each round begins with another contender. The row of a contender
    whose outcome differs from the reference's says so and has no figures.

    Args:
        contenders: The first one is the reference.
        repeats: The number of counted rounds.
        unit: The unit of the figures, in seconds.
        group: The group of the rows.
        agree: Returns whether two outcomes are the same.

    Returns:
        A row per contender, with the quartiles of the columns of `MICROSECONDS`.
    """
    present = [contender for contender in contenders if not contender.missing]
    laps: dict[str, list[Lap]] = {contender.name: [] for contender in present}
    if contenders[0].missing:
        packages = ", ".join(contenders[0].missing)
        return [
            Row(name=c.name, group=group, void=f"not installed: {packages}") for c in contenders
        ]
    gc.collect()
    gc.freeze()  # collections during the turns must not scan existing objects …
    try:
        for number in range(repeats + 1):
            at = number % len(present)
            for contender in (*present[at:], *present[:at]):
                gc.collect()
                with unseen():
                    lap = contender.run()
                laps[contender.name].append(lap)
            if number == 0:
                gc.collect()  # garbage of the last turn
                gc.freeze()  # … nor what the warm-up round imported
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
            row.void = "void: its outcome differs from the reference"
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
        # the CPU clock may not advance during a short turn
        samples[f"{key}_ratio"] = [a / max(b, 1e-9) for a, b in zip(times, others, strict=True)]
    return samples


def quartiles(values: Sequence[float]) -> list[float]:
    """Return the median, the lower and the upper quartile."""
    if len(values) == 1:
        return [values[0]] * 3
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return [middle, low, high]
