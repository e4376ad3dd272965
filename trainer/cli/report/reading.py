"""What a run's folder holds, as far as it can be read; what cannot is told on the page."""

from __future__ import annotations

import json
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from trackers.jsonl import FIELDS, parse_record
from trackers.media import one_level
from trainer.checkpoint.lock import holder_of
from trainer.cli.inventory import Entry, is_step, ranked_by, read_folder
from trainer.cli.parsing import CommandError, named
from trainer.cli.report.images import Images, read_images
from trainer.cli.report.series import Series

RECORD, EVALUATIONS, ABOUT, CHECKPOINTS = (
    "metrics.jsonl",
    "evaluations.jsonl",
    "run.json",
    "checkpoints",
)
_SHOWN = 5  # problems of a kind


@dataclass(kw_only=True)
class Run:
    """What is known of a run.

    Attributes:
        folder: Where it is.
        name: Unlike that of the others on the page.
        about: `run.json`, empty without one.
        metrics: By name, in the order in which they were first recorded.
        evaluations: Those of `evaluations.jsonl`.
        checkpoints: By their steps.
        ranking: Metric and mode of each callback that ranks them.
        images: By tag.
        problems: What could not be read, for people.
        holder: The process that runs in the folder now.
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
        """Each start of it, as `run.json` has them."""
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
        """In seconds since 1970."""
        times = self.times
        known = [float(start["begin"]) for start in self.starts] + times[:1].tolist()
        return min(known, default=None)

    @property
    def seconds(self) -> float | None:
        """How long it ran, without the time between its starts; by its records at least."""
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
        """The last update that anything is known of."""
        steps = [int(series.steps.max()) for series in self.metrics.values()]
        steps += [int(e.manifest["step"]) for e in self.checkpoints if "step" in e.manifest]
        return max(steps, default=None)

    @property
    def epochs(self) -> int | None:
        """The number of epochs that it was in."""
        ends = [np.nanmax(s.epochs) for s in self.metrics.values() if np.isfinite(s.epochs).any()]
        return int(max(ends)) + 1 if ends else None

    @property
    def speed(self) -> float | None:
        """Updates a second, the median over the time between two records."""
        steps = np.concatenate([s.steps for s in self.metrics.values()] or [np.empty(0)])
        times = np.concatenate([s.times for s in self.metrics.values()] or [np.empty(0)])
        order = np.lexsort((times, steps))
        steps, index = np.unique(steps[order], return_index=True)
        seconds = np.diff(times[order][index])
        rates = np.diff(steps)[seconds > 0] / seconds[seconds > 0]
        return float(np.median(rates)) if len(rates) else None

    @property
    def best(self) -> tuple[str, str, float, int] | None:
        """The metric that says how good it is: its name, its mode, the best value and its step.

        What ranks the checkpoints; else a loss, rather of the validation than of the training.
        """
        losses = [name for name in self.metrics if "loss" in name.lower()]
        losses.sort(key=lambda name: not name.lower().startswith("val"))
        for name, mode in [*self.ranking, *((name, "min") for name in losses)]:
            found = self.metrics[name].extreme(mode) if name in self.metrics else None
            if found is not None:
                return name, mode, *found
        return None

    def parameters(self, kind: str) -> dict[str, Any]:
        """The ``configuration`` or the ``hyper_parameters``, on one level.

        Of `run.json`; else of the newest checkpoint that says.
        """
        if isinstance(told := self.about.get(kind), dict):
            return one_level(told, ".")
        for entry in reversed(self.checkpoints):
            if isinstance(told := entry.manifest.get(kind), dict):
                parts = told if kind == "configuration" else _arguments(told)
                return one_level(parts, ".")
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
    """Refuse what is not the folder of a run, nor a record."""
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
        about = json.loads(path.read_bytes())
        if any(np.isnan(_number(start["begin"])) for start in about["starts"]):
            raise TypeError("a start has no time")
        if any(np.isnan(_number(start.get("end") or 0)) for start in about["starts"]):
            raise TypeError("the end of a start is no time")
        if not all(isinstance(each, dict) for each in about.get("warnings", [])):
            raise TypeError("a warning has no text")
    except FileNotFoundError:
        return {}
    except (ValueError, KeyError, TypeError) as error:
        problems.append(f"{path.name} cannot be read: {error!r}.")
        return {}
    return dict(about)


def _read_record(path: Path, problems: list[str]) -> dict[str, Series]:
    """The numbers of a record by name; nothing where there is none."""
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
                    problems.append(f"The last line of {path.name} is torn; it is left out.")
                continue
            for name, value in record.items():
                if name in FIELDS:
                    continue
                # An integer beyond all floats is no number here either.
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
        problems.append(f"{len(damaged)} lines of {path.name} are no records: {shown}.")
    if others:
        shown = ", ".join(list(others)[:_SHOWN])
        problems.append(f"{path.name} has values that are no numbers, which are left out: {shown}.")
    return {name: _series(*held) for name, held in columns.items()}


def _number(value: Any) -> float:
    """A finite number, or NaN for anything else."""
    try:
        number = float(value) if isinstance(value, (int, float)) else np.nan
    except OverflowError:  # an integer beyond all floats
        return np.nan
    return number if np.isfinite(number) else np.nan


def _series(steps: Any, times: Any, epochs: Any, values: Any) -> Series:
    made = {"times": times, "epochs": epochs, "values": values}
    arrays = {name: np.array(column) for name, column in made.items()}
    where = np.array(steps)
    known = np.isfinite(where)
    numbers = np.arange(len(where), dtype=float)  # for records of one's own that have no step
    return Series(steps=np.where(known, where, numbers), **arrays)


def _arguments(parameters: dict[str, Any]) -> dict[str, Any]:
    """The hyper-parameters in a manifest, see `trainer.hparams`."""
    return {**parameters.get("arguments", {}), **parameters.get("others", {})}
