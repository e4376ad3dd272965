"""The tables and lists of the page."""

from __future__ import annotations

import base64
import json
import math
import struct
from collections.abc import Iterator, Sequence
from datetime import datetime, timezone
from typing import Any

import numpy as np

from trainer.cli.inventory import Entry, is_step
from trainer.cli.listing import size_text
from trainer.cli.report.markup import Markup, element, number, table, together
from trainer.cli.report.reading import Run
from trainer.cli.report.series import Stretch, stretches

_STRETCHES = 4  # up to which each is listed
_LISTED = 12  # updates at which skipped ones were noticed
_METRICS = 6  # of a checkpoint
_SIDE = 320  # pixels: an image is enlarged up to this width, and a quarter of it in height
_ROWS = 60  # events of a run
_NONE = "–"  # noqa: RUF001 - a dash in a table


def swatch(index: int, name: str) -> Markup:
    """Return the colour and the name of a run."""
    return element("span", element("i", style=f"background:var(--run-{index})"), name, class_="run")


def overview(runs: Sequence[Run]) -> Markup:
    """Return a table with a row about each run."""
    columns: list[tuple[str, Any]] = [
        ("run", lambda index, run: swatch(index, run.name)),
        ("status", lambda _, run: element("b", run.status, class_=f"status {run.status}")),
        ("best", lambda _, run: _best(run)),
        ("updates", lambda _, run: _count(run.updates)),
        ("epochs", lambda _, run: _count(run.epochs)),
        ("began", lambda _, run: moment(run.began)),
        ("ran for", lambda _, run: duration(run.seconds)),
        ("updates/s", lambda _, run: _NONE if run.speed is None else number(run.speed, 3)),
        ("starts", lambda _, run: _count(len(run.starts) or None)),
        ("processes", lambda _, run: _field(run, "world_size")),
        ("device", lambda _, run: run.about.get("device") or _NONE),
        ("module", lambda _, run: run.about.get("module") or _NONE),
        ("torch", lambda _, run: _torch(run)),
        ("code", lambda _, run: _code(run)),
    ]
    made = [(name, [cell(index, run) for index, run in enumerate(runs)]) for name, cell in columns]
    made = [(name, cells) for name, cells in made if any(cell != _NONE for cell in cells)]
    rows = [list(row) for row in zip(*(cells for _, cells in made), strict=True)]
    return table([name for name, _ in made], rows, class_="overview")


def _best(run: Run) -> object:
    if run.best is None:
        return _NONE
    name, mode, value, step = run.best
    return together(
        number(value), element("small", f" {mode} {name}, update ", number(step), class_="soft")
    )


def _count(value: int | None) -> object:
    return _NONE if value is None else number(value)


def _field(run: Run, key: str) -> Any:
    """Return a field of `run.json`, else of the newest checkpoint that has it."""
    manifests = [entry.manifest for entry in reversed(run.checkpoints)]
    found = [each[key] for each in (run.about, *manifests) if each.get(key) is not None]
    return found[0] if found else _NONE


def _torch(run: Run) -> object:
    versions = _field(run, "versions")
    return versions.get("torch", _NONE) if isinstance(versions, dict) else _NONE


def _code(run: Run) -> object:
    commit = run.about.get("code")
    return element("code", str(commit)[:10], title=commit) if commit else _NONE


# -- values ----------------------------------------------------------------------------------------


def values(runs: Sequence[Run], kind: str = "metrics") -> Markup:
    """Return a table of the last, smallest and largest value of each metric and run."""
    found = [getattr(run, kind) for run in runs]
    rows: list[list[object]] = []
    for name in dict.fromkeys(name for each in found for name in each):
        having = [(index, each[name]) for index, each in enumerate(found) if name in each]
        first = [element("th", name, rowspan=len(having), scope="rowgroup")]
        for index, series in having:
            rows.append(
                [
                    *first,
                    *([swatch(index, runs[index].name)] if len(runs) > 1 else []),
                    *_valued(series.at(-1)),
                    *_valued(series.extreme("min")),
                    *_valued(series.extreme("max")),
                    number(len(series.values)),
                    number(int((~series.finite).sum())),
                ]
            )
            first = []
    extremes = ("last", "update", "smallest", "update", "largest", "update")
    head = ["metric", *(["run"] if len(runs) > 1 else []), *extremes, "values", "not finite"]
    return table(list[object](head), rows, class_=kind)


def _valued(found: tuple[float, int] | None) -> list[object]:
    if found is None:
        return [_NONE, _NONE]
    value, step = found
    return [number(value), number(step)]


# -- hyper-parameters ------------------------------------------------------------------------------


def parameters(runs: Sequence[Run]) -> Markup | None:
    """Return the hyper-parameters and Trainer arguments; for several runs, differences first."""
    rows: list[tuple[bool, list[object]]] = []
    for kind, title in (("hyper_parameters", "hyper-parameter"), ("configuration", "Trainer")):
        of_runs = [run.parameters(kind) for run in runs]
        for name in dict.fromkeys(name for each in of_runs for name in each):
            texts = [_plain(each[name]) if name in each else _NONE for each in of_runs]
            differs = len(set(texts)) > 1
            kinds = element("td", title, class_="soft")
            rows.append((differs, [element("th", name), kinds, *texts]))
    if not rows:
        return None
    head: list[object] = ["name", "of", *(swatch(i, run.name) for i, run in enumerate(runs))]
    if len(runs) == 1:
        return table(["name", "of", "value"], [row for _, row in rows], class_="parameters")
    different = [row for differs, row in rows if differs]
    same = [row[:3] for differs, row in rows if not differs]
    return together(
        table(head, different, class_="parameters differ")
        if different
        else element("p", "They are the same in all runs.", class_="soft"),
        element(
            "details",
            element("summary", f"{len(same)} that all runs share"),
            table(["name", "of", "value"], same, class_="parameters"),
        )
        if same
        else None,
    )


def _plain(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


# -- checkpoints -----------------------------------------------------------------------------------


def checkpoints(runs: Sequence[Run]) -> Markup | None:
    """Return a table of the checkpoints of each run: their metrics, which is best and last."""
    rows: list[list[object]] = []
    for index, run in enumerate(runs):
        roles = roles_of(run)
        first = [name for name, _ in run.ranking]
        for entry in run.checkpoints:
            shown: list[object] = [
                element("span", f"{name} ", number(entry.metrics[name]), class_="pair")
                for name in _key_metrics(entry, first)
            ]
            if (more := len(entry.metrics) - len(shown)) > 0:
                shown.append(element("small", f"+{more}", class_="soft"))
            rows.append(
                [
                    *([swatch(index, run.name)] if len(runs) > 1 else []),
                    element("th", element("code", entry.name)),
                    [element("b", role, class_="role") for role in roles.get(entry.name, ())],
                    shown or _NONE,
                    size_text(entry.size),
                    moment(entry.saved if math.isfinite(entry.saved) else None),
                    element("span", entry.state, class_="bad" if entry.is_bad else None),
                ]
            )
    if not rows:
        return None
    head: list[object] = [*(["run"] if len(runs) > 1 else []), "checkpoint", ""]
    return table([*head, "metrics", "size", "saved", "state"], rows, class_="checkpoints")


def _key_metrics(entry: Entry, first: Sequence[str]) -> list[str]:
    """Return the most important metrics of a checkpoint: those that rank it, then validation's."""
    order = sorted(entry.metrics, key=lambda name: (not name.startswith("val"), name))
    names = [*(name for name in first if name in entry.metrics), *order]
    return list(dict.fromkeys(names))[:_METRICS]


def roles_of(run: Run) -> dict[str, list[str]]:
    """Return which checkpoint is the last, and which the best by each metric that ranks them."""
    roles: dict[str, list[str]] = {}
    usable = [e for e in run.checkpoints if e.state == "sound" and is_step(e)]
    if usable:
        roles[usable[-1].name] = ["last"]
    for name, mode in dict.fromkeys(run.ranking):
        scored = [e for e in usable if math.isfinite(e.metrics.get(name, math.nan))]
        sign = 1 if mode == "min" else -1
        if scored:
            best = min(scored, key=lambda e: sign * e.metrics[name])  # the oldest of equal ones
            roles.setdefault(best.name, []).insert(0, f"best {name}")
    return roles


# -- what went wrong -------------------------------------------------------------------------------


def events(runs: Sequence[Run]) -> Markup | None:
    """Return errors, warnings, skipped updates, non-finite values and what cannot be read."""
    shown: list[Markup] = []
    for index, run in enumerate(runs):
        lines = list(_events_of(run))
        if lines and len(runs) > 1:
            shown.append(element("li", swatch(index, run.name), class_="head"))
        shown += lines[:_ROWS]
        if (more := len(lines) - _ROWS) > 0:
            shown.append(element("li", f"and {more} more", class_="soft"))
    return element("ul", shown, class_="events") if shown else None


def _events_of(run: Run) -> Iterator[Markup]:
    yield from _starts(run)
    for each in run.about.get("warnings", ()):
        text = f"{each.get('text')} ({each.get('logger')})"
        yield _event("warning", text, each.get("time"))
    if more := run.about.get("more_warnings"):
        yield _event("warning", f"{more} more warnings, which were not kept", None)
    yield from _skipped(run)
    for name, series in run.metrics.items():
        if found := list(stretches(series)):
            yield _event("not finite", f"{name} is {_where(found)}", None)
    for problem in run.problems:
        yield _event("file", problem, None)


def _starts(run: Run) -> Iterator[Markup]:
    for index, start in enumerate(run.starts):
        if index > 0:
            text = f"start {index + 1}, after update {start.get('step', 0)}"
            yield _event("start", text, start["begin"])
        status = start.get("status")
        if status in ("failed", "preempted"):
            yield _event(status, start.get("error") or "ended by a signal", start.get("end"))
        elif status == "running" and (index < len(run.starts) - 1 or run.status == "killed"):
            yield _event("killed", "ended without a message: killed, or the machine failed", None)


def _skipped(run: Run) -> Iterator[Markup]:
    """Yield an event that says when the count of skipped updates has grown."""
    series = run.metrics.get("skipped_updates")
    if series is None:
        return
    values, steps_of = series.values[series.finite], series.steps[series.finite]
    if not len(values):
        return
    grown = np.diff(values, prepend=0.0) > 0
    steps = [str(int(step)) for step in steps_of[grown]]
    more = f" and {len(steps) - _LISTED} later ones" if len(steps) > _LISTED else ""
    known = f"noticed at update {', '.join(steps[:_LISTED])}{more}"
    total = int(values.max())
    yield _event("skipped", f"{total} update{'s' * (total != 1)} skipped, {known}", None)


def _where(found: Sequence[Stretch]) -> str:
    """Return what is not finite, how often and when."""
    count = sum(each.size for each in found)
    kinds = ", ".join(dict.fromkeys(kind for each in found for kind in each.kinds))
    if len(found) > _STRETCHES:
        span = f"from update {found[0].first} to {found[-1].last}"
        return f"{kinds} {count} times, in {len(found)} places {span}"
    places = [f"{e.first}" if e.first == e.last else f"{e.first} to {e.last}" for e in found]
    times = f" {count} times" if count > 1 else ""
    return f"{kinds}{times}, at update {', '.join(places)}"


def _event(kind: str, text: str, when: Any) -> Markup:
    known = isinstance(when, (int, float)) and math.isfinite(when)
    return element(
        "li",
        element("b", kind, class_=f"kind {kind.replace(' ', '-')}"),
        element("span", text),
        element("small", moment(when), class_="soft") if known else None,
    )


# -- images ----------------------------------------------------------------------------------------


def images(runs: Sequence[Run]) -> Markup | None:
    """Return the images, those of a tag and a run side by side."""
    tags = sorted({tag for run in runs for tag in run.images})
    parts = []
    for tag in tags:
        rows = []
        for index, run in enumerate(runs):
            shown = [
                element(
                    "figure",
                    _image(image, f"{tag}, {run.name}, update {step}"),
                    element("figcaption", f"update {step}"),
                )
                for step, image in sorted(run.images.get(tag, {}).items())
            ]
            if shown:
                name = swatch(index, run.name) if len(runs) > 1 else None
                rows.append(element("div", name, shown, class_="strip"))
        parts.append(element("section", element("h3", tag), rows))
    return together(*parts) if parts else None


def _image(png: bytes, text: str) -> Markup:
    """Return an image, enlarged by a whole factor if it is small."""
    width, height = struct.unpack(">II", png[16:24])  # in its first chunk
    times = max(1, min(_SIDE // max(width, 1), _SIDE // 4 // max(height, 1)))
    source = f"data:image/png;base64,{base64.b64encode(png).decode()}"
    small = "small" if times > 1 else None
    return element("img", src=source, alt=text, width=times * width, class_=small)


# -- time ------------------------------------------------------------------------------------------


def moment(seconds: float | None) -> Markup | str:
    """Return a date and time, in UTC."""
    if seconds is None:
        return _NONE
    try:
        when = datetime.fromtimestamp(seconds, timezone.utc)
    except (OverflowError, ValueError, OSError):  # a user's own record, perhaps in milliseconds
        return number(seconds)
    text = when.strftime("%Y-%m-%d %H:%M:%S")
    return element("time", text, datetime=when.isoformat(), title="UTC")


def duration(seconds: float | None) -> str:
    """Return a duration such as ``2 h 05 min``."""
    if seconds is None:
        return _NONE
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours < 48 else f"{hours // 24} d {hours % 24:02d} h"
