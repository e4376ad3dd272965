"""Results, as a table and as the JSON that the chart and the README are made from."""

from __future__ import annotations

import json
import os
import platform
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from trackers.code import git_commit

PACKAGES = (
    "torch",
    "cadence-trainer",
    "numpy",
    "tensorboard",
    "wandb",
    "accelerate",
    "lightning",
    "transformers",
    "pytorch-ignite",
)


class Unavailable(RuntimeError):
    """A requirement of a benchmark is missing; the message says which, and what to do."""


@dataclass(frozen=True)
class Column:
    """A column of the table.

    Attributes:
        key: Its key in the rows' values.
        title: Its heading.
        digits: Digits after the decimal point.
    """

    key: str
    title: str
    digits: int = 1


@dataclass(kw_only=True)
class Row:
    """A row of the table.

    Attributes:
        name: What was measured.
        group: Its group, whose first row the others are compared with.
        values: By column key, a number, or a median with its lower and upper quartile.
        void: Why there are no values.
        samples: By key, the values that the quartiles were computed from.
    """

    name: str
    group: str = ""
    values: dict[str, float | list[float]] = field(default_factory=dict)
    void: str | None = None
    samples: dict[str, list[float]] = field(default_factory=dict)


@dataclass(kw_only=True)
class Result:
    """The result of a benchmark.

    Attributes:
        benchmark: The benchmark's name on the command line.
        title: The title of the table.
        columns: The columns of the table.
        rows: The rows of the table.
        settings: The settings of the benchmark, such as the number of steps.
        notes: What a reader of the table must know.
        made: When it was measured, in UTC.
        machine: The machine that it was measured on.
        versions: The versions of the packages that it was measured with.
    """

    benchmark: str
    title: str
    columns: Sequence[Column]
    rows: list[Row]
    settings: dict[str, Any]
    notes: Sequence[str] = ()
    made: str = field(
        default_factory=lambda: datetime.now(timezone.utc).isoformat(timespec="minutes")
    )
    machine: dict[str, Any] = field(default_factory=lambda: machine())
    versions: dict[str, str] = field(default_factory=lambda: versions())

    def save(self, folder: Path) -> Path:
        """Save the result in a folder as ``<benchmark>.json``."""
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{self.benchmark}.json"
        path.write_text(json.dumps(rounded(asdict(self)), indent=1, ensure_ascii=False) + "\n")
        return path

    @classmethod
    def load(cls, path: Path) -> Result:
        """Load a result that `save` wrote."""
        return cls.of(json.loads(path.read_text()))

    @classmethod
    def of(cls, values: dict[str, Any]) -> Result:
        """Return a result from its values, as `dataclasses.asdict` gives them."""
        columns = [Column(**column) for column in values["columns"]]
        rows = [Row(**row) for row in values["rows"]]
        return cls(**(values | {"columns": columns, "rows": rows}))

    def table(self) -> str:
        """Return the table as aligned Markdown."""
        body = []
        group = None
        for row in self.rows:
            if row.group != group and row.group:
                body.append([f"*{row.group}*"] + [""] * len(self.columns))
            group = row.group
            cells = [_cell(row.values.get(column.key), column.digits) for column in self.columns]
            if row.void is not None:
                cells = [row.void] + [""] * (len(self.columns) - 1)
            body.append([row.name, *cells])
        return _aligned(["", *(column.title for column in self.columns)], body)

    def about(self) -> str:
        """Return one line: the time, the settings, the machine and the versions."""
        settings = ", ".join(f"{name} {value}" for name, value in self.settings.items())
        machine = ", ".join(f"{value}" for value in self.machine.values() if value)
        packages = ", ".join(f"{name} {version}" for name, version in self.versions.items())
        return f"{self.made}; {settings}; {machine}; {packages}."


def _cell(value: float | list[float] | None, digits: int) -> str:
    if value is None:
        return ""
    if isinstance(value, (int, float)):
        return f"{value:,.{digits}f}"
    middle, low, high = (f"{each:,.{digits}f}" for each in value)
    return middle if low == high else f"{middle} ({low}–{high})"


def _aligned(head: list[str], body: list[list[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(head, *body, strict=True)]

    def line(cells: Iterable[str]) -> str:
        first, *others = cells
        padded = [first.ljust(widths[0])]
        padded += [cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True)]
        return "| " + " | ".join(padded) + " |"

    rule = "|" + "|".join(
        "-" * (width + 2) if not at else "-" * (width + 1) + ":" for at, width in enumerate(widths)
    )
    return "\n".join([line(head), rule + "|", *map(line, body)])


def rounded(value: Any) -> Any:
    """Round all numbers to six digits, which exceed the precision of a clock."""
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, dict):
        return {key: rounded(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [rounded(each) for each in value]
    return value


def machine() -> dict[str, Any]:
    """Return the properties of this machine that matter for a measurement."""
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    return {
        "processor": _processor(),
        "cores": f"{os.cpu_count()} cores",
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "",
        "system": f"{platform.system()} {platform.machine()}",
        "threads": f"torch threads {torch.get_num_threads()}",
        "load": f"load {load:.1f} at the end",
    }


def _processor() -> str:
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def versions() -> dict[str, str]:
    """Return the versions of Python and of the relevant packages that are installed."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    commit = git_commit(Path(__file__).parent)
    if commit is not None:
        found["cadence-trainer"] = f"{found.get('cadence-trainer', 'checkout')} at {commit[:9]}"
    return found


def say(text: str) -> None:
    """Print to standard error and flush, also when it is a file."""
    print(text, file=sys.stderr, flush=True)
