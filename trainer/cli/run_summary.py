"""The content of `trainer report` and `trainer watch`: numbers and texts without a layout."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from datetime import datetime, timezone
from typing import Any, NamedTuple

import numpy as np

from trainer.cli.runs import Floats, Run, Series

GOOD, WARNING, BAD = "good", "warning", "bad"
KINDS = {
    "running": GOOD,
    "finished": GOOD,
    "preempted": WARNING,
    "killed": BAD,
    "failed": BAD,
    "not finite": BAD,
    "warning": WARNING,
    "skipped": WARNING,
    "file": WARNING,
}
"""Status of a run, or kind of an event: whether it is good or bad, if it is either."""
_RUNS_OF_BAD = 4  # up to so many stretches of non-finite values are listed
_LISTED = 12  # maximum number of updates listed for skipped updates
_METRICS = 6  # maximum number of metrics shown for a checkpoint
_LARGE = 1e9  # from here on numbers have an exponent


# -- values ----------------------------------------------------------------------------------------


class Summary(NamedTuple):
    """A summary of a metric: values with their steps, None if no value is finite.

    Attributes:
        last: The last value, finite or not.
        low: The smallest finite value.
        high: The largest finite value.
        number: The number of values.
        bad: The number of non-finite values.
    """

    last: tuple[float, int]
    low: tuple[float, int] | None
    high: tuple[float, int] | None
    number: int
    bad: int


def summary_of(series: Series) -> Summary:
    """Return the summary of a metric."""
    bad = int((~series.finite).sum())
    low, high = series.extreme("min"), series.extreme("max")
    return Summary(series.at(-1), low, high, len(series.values), bad)


def short(value: float, digits: int = 5) -> str:
    """Return a rounded number for display."""
    if not math.isfinite(value):
        return exact(value)
    whole = isinstance(value, int) or 10**digits <= abs(value) < _LARGE
    return f"{value:,.0f}" if whole else f"{value:.{digits}g}"


def exact(value: float) -> str:
    """Return a number with all its digits, as in the record."""
    if math.isfinite(value):
        return repr(value)
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


def not_finite(series: Series) -> str:
    """Describe the non-finite values: kind, number and updates; empty if all are finite."""
    bad = np.flatnonzero(~series.finite)
    if not len(bad):
        return ""
    kinds = ", ".join(dict.fromkeys(map(exact, series.values[bad].tolist())))
    stretches = np.split(series.steps[bad], np.flatnonzero(np.diff(bad) > 1) + 1)
    ends = [(f"{stretch[0]:.0f}", f"{stretch[-1]:.0f}") for stretch in stretches]
    if len(ends) > _RUNS_OF_BAD:
        span = f"from update {ends[0][0]} to {ends[-1][1]}"
        return f"{kinds} {len(bad)} times, in {len(ends)} places {span}"
    places = [first if first == last else f"{first} to {last}" for first, last in ends]
    times = f" {len(bad)} times" if len(bad) > 1 else ""
    return f"{kinds}{times}, at update {', '.join(places)}"


def thinned(x: Floats, y: Floats, columns: int) -> tuple[Floats, Floats]:
    """Return the points that a chart needs: the smallest and largest value of each column.

    The first and the last value are kept, and the first non-finite value of each column, as NaN,
    which gives a gap in the line.

    Returns:
        At most 3 · `columns` + 2 points.
    """
    if len(x) <= 2 * columns:
        return x, np.where(np.isfinite(y), y, np.nan)
    low, high = np.nanmin(x), np.nanmax(x)
    place = np.floor((x - low) / max(high - low, 1e-300) * columns)
    column = np.cumsum(np.diff(place, prepend=place[0]) != 0)  # a curve that goes back starts again
    finite = np.isfinite(y)
    # In each column, finite points come first, sorted by value, then the others in their original
    # order.
    order = np.lexsort((np.where(finite, y, 0.0), ~finite, column))
    first = np.flatnonzero(np.diff(column, prepend=-1))
    numbers = np.add.reduceat(finite, first)
    size = np.diff(np.append(first, len(x)))
    lowest, highest = first[numbers > 0], (first + numbers - 1)[numbers > 0]
    gaps = (first + numbers)[numbers < size]
    ends = [[0], [len(x) - 1]]
    chosen = np.unique(np.concatenate([*ends, order[lowest], order[highest], order[gaps]]))
    return x[chosen], np.where(np.isfinite(y[chosen]), y[chosen], np.nan)


# -- runs ------------------------------------------------------------------------------------------


def overview(run: Run) -> dict[str, Any]:
    """Return facts about a run by name; None if unknown."""
    manifests = [entry.manifest for entry in reversed(run.checkpoints)]

    def newest(key: str) -> Any:
        """Return a field of `run.json`, else of the newest checkpoint that has it."""
        return next((source[key] for source in (run.about, *manifests) if source.get(key)), None)

    return {
        "run": run.name,
        "status": run.status,
        "best": run.best,
        "updates": run.updates,
        "epochs": run.epochs,
        "began": moment(run.began),
        "ran for": duration(run.seconds),
        "updates/s": run.record.speed(),
        "starts": len(run.starts) or None,
        "processes": newest("world_size"),
        "device": run.about.get("device"),
        "module": run.about.get("module"),
        "torch": dict(newest("versions") or {}).get("torch"),
        "code": run.about.get("code"),
    }


class Parameter(NamedTuple):
    """A hyper-parameter, or an argument of the Trainer.

    Attributes:
        name: Its name.
        owner: Which of the two it is.
        texts: Its values.
    """

    name: str
    owner: str
    texts: list[str | None]


def parameters(runs: Sequence[Run]) -> tuple[list[Parameter], list[Parameter]]:
    """Return the hyper-parameters and Trainer arguments that differ between runs, and the others.

    Those that differ have a value for each run (None if missing); the others have a single value.
    """
    different: list[Parameter] = []
    same: list[Parameter] = []
    for kind, owner in (("hyper_parameters", "hyper-parameter"), ("configuration", "Trainer")):
        of_runs = [run.parameters(kind) for run in runs]
        for name in dict.fromkeys(name for values in of_runs for name in values):
            texts = [_plain(values[name]) if name in values else None for values in of_runs]
            differs = len(set(texts)) > 1
            parameter = Parameter(name, owner, texts if differs else texts[:1])
            (different if differs else same).append(parameter)
    return different, same


def _plain(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


class Trials(NamedTuple):
    """The runs of a sweep.

    Attributes:
        metric: The name of the metric that measures most of the runs; None without one.
        mode: "min" or "max".
        names: The names of parameters that differ: hyper-parameters, then Trainer arguments.
        rows: For each run, best first: its number, its best value of the metric with the step (None
            without one), and its values of `names`.
    """

    metric: str | None
    mode: str
    names: list[str]
    rows: list[tuple[int, tuple[float, int] | None, list[str | None]]]


def trials(runs: Sequence[Run]) -> Trials | None:
    """Return the runs as the trials of a sweep; None if no parameter differs."""
    different, _ = parameters(runs)
    if not different:
        return None
    measures = Counter[tuple[str | None, str]](best[:2] for run in runs if (best := run.best))
    ((metric, mode), _), *_ = measures.most_common(1) or [((None, "min"), 0)]
    scores = [
        run.metrics[metric].extreme(mode) if metric is not None and metric in run.metrics else None
        for run in runs
    ]
    sign = 1 if mode == "min" else -1
    order = sorted(
        range(len(runs)),
        key=lambda index: sign * score[0] if (score := scores[index]) else math.inf,
    )
    rows = [(index, scores[index], [p.texts[index] for p in different]) for index in order]
    return Trials(metric, mode, [parameter.name for parameter in different], rows)


def checkpoint_metrics(run: Run, metrics: dict[str, float]) -> list[tuple[str, float]]:
    """Return some metrics of a checkpoint: first those that rank checkpoints, then validation's."""
    ranking = [name for name, _ in run.ranking if name in metrics]
    order = sorted(metrics, key=lambda name: (not name.startswith("val"), name))
    return [(name, metrics[name]) for name in list(dict.fromkeys(ranking + order))[:_METRICS]]


def roles_of(run: Run) -> dict[str, list[str]]:
    """Return the roles of checkpoints by name: the last, and the best by each ranking metric."""
    usable = [e for e in run.checkpoints if e.state == "sound" and e.is_step]
    roles = {usable[-1].name: ["last"]} if usable else {}
    for name, mode in dict.fromkeys(run.ranking):
        scored = [e for e in usable if math.isfinite(e.metrics.get(name, math.nan))]
        if scored:
            sign = 1 if mode == "min" else -1
            best = min(scored, key=lambda e: sign * e.metrics[name])  # of equal ones the oldest
            roles.setdefault(best.name, []).insert(0, f"best {name}")
    return roles


# -- what went wrong -------------------------------------------------------------------------------


class Event(NamedTuple):
    """Something that happened to a run.

    Attributes:
        kind: The kind, such as "warning".
        text: A description.
        time: The time, as a result of `moment`; None if unknown.
    """

    kind: str
    text: str
    time: tuple[str, str] | None = None


def events_of(run: Run) -> Iterator[Event]:
    """Return errors, warnings, skipped updates, non-finite values and unreadable files."""
    for index, start in enumerate(run.starts):
        if index > 0:
            text = f"start {index + 1}, after update {start.get('step', 0)}"
            yield Event("start", text, moment(start["begin"]))
        status = start.get("status")
        if status in ("failed", "preempted"):
            text = start.get("error") or "ended by a signal"
            yield Event(status, text, moment(start.get("end")))
        elif status == "running" and (index < len(run.starts) - 1 or run.status == "killed"):
            yield Event(
                "killed", "ended without a message: the process was killed, or the machine failed"
            )
    for warning in run.about.get("warnings", ()):
        text = f"{warning.get('text')} ({warning.get('logger')})"
        yield Event("warning", text, moment(warning.get("time")))
    if more := run.about.get("more_warnings"):
        yield Event("warning", f"{more} more warnings, which were not kept")
    if text := _skipped(run.metrics.get("skipped_updates")):
        yield Event("skipped", text)
    for name, series in run.metrics.items():
        if text := not_finite(series):
            yield Event("not finite", f"{name} is {text}")
    for problem in run.problems:
        yield Event("file", problem)


def _skipped(series: Series | None) -> str:
    """Return the updates at which the count of skipped updates grew."""
    if series is None or not series.finite.any():
        return ""
    values = series.values[series.finite]
    grown = series.steps[series.finite][np.diff(values, prepend=0.0) > 0]
    steps = [f"{step:.0f}" for step in grown]
    more = f" and {len(steps) - _LISTED} later ones" if len(steps) > _LISTED else ""
    total = int(values.max())
    noticed = f"noticed at update {', '.join(steps[:_LISTED])}{more}"
    return f"{total} update{'s' * (total != 1)} skipped, {noticed}"


# -- time ------------------------------------------------------------------------------------------


def moment(seconds: float | None) -> tuple[str, str] | None:
    """Return a date and time in UTC, for people and as ISO 8601."""
    if seconds is None:
        return None
    when = datetime.fromtimestamp(seconds, timezone.utc)
    return when.strftime("%Y-%m-%d %H:%M:%S"), when.isoformat()


def duration(seconds: float | None) -> str | None:
    """Return a duration such as ``2 h 05 min``."""
    if seconds is None:
        return None
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours < 48 else f"{hours // 24} d {hours % 24:02d} h"
