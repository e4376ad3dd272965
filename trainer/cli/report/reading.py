"""Read the folder of a run; the page lists what cannot be read."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from trackers.jsonl import FIELDS, parse_record
from trackers.masking import masked
from trackers.media import one_level
from trainer.checkpoint.lock import holder_of
from trainer.cli.inventory import Entry, is_step, ranked_by, read_folder
from trainer.cli.parsing import CommandError, named
from trainer.cli.report.images import Images, read_images
from trainer.cli.report.series import Series
from trainer.files import read_json

RECORD, EVALUATIONS, ABOUT, CHECKPOINTS = (
    "metrics.jsonl",
    "evaluations.jsonl",
    "run.json",
    "checkpoints",
)
_SHOWN = 5  # examples named in a message


@dataclass(kw_only=True)
class Run:
    """What is known about a run.

    Attributes:
        folder: Where it is.
        name: Its name, unique on the page.
        about: The content of `run.json`; empty without one.
        metrics: By name, in order of first appearance.
        evaluations: The metrics in `evaluations.jsonl`.
        checkpoints: In order of their steps.
        ranking: Metric and mode of each callback that ranks checkpoints.
        images: By tag.
        problems: Messages about what could not be read.
        holder: The process that locks the folder now.
    """

    folder: Path
    name: str
    about: dict[str, Any] = field(default_factory=dict)
    metrics: dict[str, Series] = field(default_factory=dict)
    evaluations: dict[str, Series] = field(default_factory=dict)
    checkpoints: list[Entry] = field(default_factory=list)
    ranking: list[tuple[str, str]] = field(default_factory=list)
    images: Images = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    holder: str | None = None

    @property
    def starts(self) -> list[dict[str, Any]]:
        """The starts of the run, as recorded in `run.json`."""
        return list(self.about.get("starts", ()))

    @property
    def status(self) -> str:
        """How it ended: finished, failed, preempted, killed, running, or unknown."""
        if self.holder is not None:
            return "running"
        status = str(self.starts[-1].get("status")) if self.starts else "unknown"
        return "killed" if status == "running" else status

    @property
    def times(self) -> np.ndarray[Any, np.dtype[np.float64]]:
        """When its records were written, in order."""
        every = [series.times for series in self.metrics.values()]
        times = np.unique(np.concatenate(every)) if every else np.empty(0)
        return times[np.isfinite(times)]

    @property
    def began(self) -> float | None:
        """When it began, in seconds since 1970."""
        times = self.times
        known = [float(start["begin"]) for start in self.starts] + times[:1].tolist()
        return min(known, default=None)

    @property
    def seconds(self) -> float | None:
        """How long it ran, without the time between starts; at least until each last record."""
        times = self.times
        if not self.starts:
            return float(times[-1] - times[0]) if len(times) else None
        begins = [float(start["begin"]) for start in self.starts]
        total = 0.0
        for start, begin, following in zip(self.starts, begins, [*begins[1:], np.inf], strict=True):
            within = times[(times >= begin) & (times < following)]
            last = float(within[-1]) if len(within) else begin
            total += float(start.get("end") or last) - begin
        return total

    @property
    def updates(self) -> int | None:
        """The last update that has a record or a checkpoint."""
        steps = [int(series.steps.max()) for series in self.metrics.values()]
        steps += [int(e.manifest["step"]) for e in self.checkpoints if "step" in e.manifest]
        return max(steps, default=None)

    @property
    def epochs(self) -> int | None:
        """The number of epochs that it has begun."""
        ends = [np.nanmax(s.epochs) for s in self.metrics.values() if np.isfinite(s.epochs).any()]
        return int(max(ends)) + 1 if ends else None

    @property
    def speed(self) -> float | None:
        """Updates per second: the median over the intervals between records."""
        steps = np.concatenate([s.steps for s in self.metrics.values()] or [np.empty(0)])
        times = np.concatenate([s.times for s in self.metrics.values()] or [np.empty(0)])
        order = np.lexsort((times, steps))
        steps, index = np.unique(steps[order], return_index=True)
        seconds = np.diff(times[order][index])
        rates = np.diff(steps)[seconds > 0] / seconds[seconds > 0]
        return float(np.median(rates)) if len(rates) else None

    @property
    def best(self) -> tuple[str, str, float, int] | None:
        """The metric that measures the run's quality: name, mode, best value and its step.

        It is the one that ranks the checkpoints, else a loss, preferably of the validation.
        """
        losses = [name for name in self.metrics if "loss" in name.lower()]
        losses.sort(key=lambda name: not name.lower().startswith("val"))
        for name, mode in [*self.ranking, *((name, "min") for name in losses)]:
            found = self.metrics[name].extreme(mode) if name in self.metrics else None
            if found is not None:
                return name, mode, *found
        return None

    def parameters(self, kind: str) -> dict[str, Any]:
        """Return the ``configuration`` or the ``hyper_parameters``, flattened to one level.

        They are read from `run.json`, else from the newest checkpoint that has them.
        """
        if isinstance(values := self.about.get(kind), dict):
            return one_level(masked(values), ".")
        for entry in reversed(self.checkpoints):
            if isinstance(values := entry.manifest.get(kind), dict):
                parts = values if kind == "configuration" else _arguments(values)
                return one_level(masked(parts), ".")
        return {}


def read_runs(folders: Sequence[Path]) -> list[Run]:
    """Read the folders, each once.

    Raises:
        CommandError: One is not that of a run.
        OSError: A record cannot be read.
    """
    return [_read(path, name) for path, name in named(folders)]


def _read(folder: Path, name: str) -> Run:
    _check(folder)
    if folder.is_file():
        run = Run(folder=folder, name=name)
        run.metrics = _read_record(folder, run.problems)
        return run
    run = Run(folder=folder, name=name, holder=holder_of(folder))
    run.about = _read_about(folder / ABOUT, run.problems)
    run.metrics = _read_record(folder / RECORD, run.problems)
    run.evaluations = _read_record(folder / EVALUATIONS, run.problems)
    if (folder / CHECKPOINTS).is_dir():
        run.checkpoints, _ = read_folder(folder / CHECKPOINTS, hashes=False)
        run.ranking = ranked_by([entry for entry in run.checkpoints if is_step(entry)])
    run.problems += [f"{each.name}: {each.note}" for each in run.checkpoints if each.note]
    run.images = read_images(folder, run.problems)
    return run


def _check(folder: Path) -> None:
    """Raise unless the path is the folder of a run or a record."""
    if folder.is_file() and folder.suffix == ".jsonl":
        return
    if not folder.is_dir():
        what = "is a file" if folder.exists() else "does not exist"
        raise CommandError(
            f"{folder} {what}; give the folder of a run, its project_dir, or a record (.jsonl)."
        )
    if _is_run(folder):
        return
    inside = [each.name for each in sorted(folder.iterdir()) if each.is_dir() and _is_run(each)]
    hint = f" There are runs in it: {', '.join(inside[:_SHOWN])}." if inside else ""
    raise CommandError(
        f"{folder} is not the folder of a run: it has neither {RECORD} nor {ABOUT} nor "
        f"{CHECKPOINTS}.{hint}"
    )


def _is_run(folder: Path) -> bool:
    files = any((folder / name).is_file() for name in (RECORD, EVALUATIONS, ABOUT))
    return files or (folder / CHECKPOINTS).is_dir()


def _read_about(path: Path, problems: list[str]) -> dict[str, Any]:
    try:
        about = read_json(path)
        if any(np.isnan(_number(start["begin"])) for start in about["starts"]):
            raise TypeError("a start has no time")
        if any(np.isnan(_number(start.get("end") or 0)) for start in about["starts"]):
            raise TypeError("the end of a start is not a time")
        if not all(isinstance(each, dict) for each in about.get("warnings", [])):
            raise TypeError("a warning has no text")
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, KeyError, TypeError) as error:
        problems.append(f"{path.name} cannot be read: {error!r}.")
        return {}
    return dict(about)


def _read_record(path: Path, problems: list[str]) -> dict[str, Series]:
    """Return the numbers in a record, by name; an empty dict if the file does not exist."""
    if not path.is_file():
        return {}
    columns: dict[str, tuple[array[float], ...]] = {}
    damaged: list[int] = []
    others: dict[str, None] = {}
    with open(path, "rb") as lines:
        for number, line in enumerate(lines, start=1):
            try:
                record = parse_record(line, path.name)
                place = [_number(record.get(name)) for name in ("step", "time", "epoch")]
            except (ValueError, AttributeError):
                if line.endswith(b"\n"):
                    damaged.append(number)
                else:
                    problems.append(f"The last line of {path.name} is incomplete and left out.")
                continue
            for name, value in record.items():
                if name in FIELDS:
                    continue
                # An integer too large for a float counts as no number either.
                if not isinstance(value, float) and np.isnan(_number(value)):
                    others[name] = None
                    continue
                held = columns.get(name)
                if held is None:
                    held = columns[name] = tuple(array("d") for _ in range(4))
                for column, item in zip(held, (*place, value), strict=True):
                    column.append(item)
    if damaged:
        shown = ", ".join(map(str, damaged[:_SHOWN])) + ", …" * (len(damaged) > _SHOWN)
        problems.append(f"{len(damaged)} lines of {path.name} are not records: {shown}.")
    if others:
        shown = ", ".join(list(others)[:_SHOWN])
        problems.append(f"{path.name} has values that are not numbers, left out here: {shown}.")
    return {name: _series(*held) for name, held in columns.items()}


def _number(value: Any) -> float:
    """Return a finite number as a float, anything else as NaN."""
    try:
        number = float(value) if isinstance(value, (int, float)) else np.nan
    except OverflowError:  # an integer too large for a float
        return np.nan
    return number if np.isfinite(number) else np.nan


def _series(steps: Any, times: Any, epochs: Any, values: Any) -> Series:
    made = {"times": times, "epochs": epochs, "values": values}
    arrays = {name: np.array(column) for name, column in made.items()}
    where = np.array(steps)
    known = np.isfinite(where)
    numbers = np.arange(len(where), dtype=float)  # for the user's own records without steps
    return Series(steps=np.where(known, where, numbers), **arrays)


def _arguments(parameters: dict[str, Any]) -> dict[str, Any]:
    """Return the hyper-parameters in a manifest, see `trainer.hparams`."""
    return {**parameters.get("arguments", {}), **parameters.get("others", {})}
