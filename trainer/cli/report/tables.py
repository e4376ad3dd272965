"""The tables and lists of the page, and the HTML elements that they are made of."""

from __future__ import annotations

import base64
import json
import math
import struct
from collections.abc import Iterator, Sequence
from datetime import datetime, timezone
from html import escape
from typing import Any

import numpy as np

from trainer.cli.inventory import size_text
from trainer.cli.record import Series
from trainer.cli.report.folder import Run

_RUNS_OF_BAD = 4  # stretches of values that are not finite, up to which each is listed
_LISTED = 12  # updates at which skipped ones were noticed
_METRICS = 6  # of a checkpoint
_SIDE = 320  # pixels: an image is enlarged up to this width, and a quarter of it in height
_ROWS = 60  # events of a run
_LARGE = 1e9  # from which on numbers are shown with an exponent
_NONE = "–"  # noqa: RUF001 - a dash in a table


class Markup(str):
    """Text that is HTML already; other strings, such as the names of metrics, are escaped."""

    __slots__ = ()


def element(tag: str, *children: object, **attributes: Any) -> Markup:
    """Return an element with children: strings, elements, and lists of them; None is left out.

    Args:
        tag: Its name.
        children: Its content.
        attributes: ``class_`` for ``class``, ``data_x`` for ``data-x``; True writes the name alone,
            None and False omit the attribute.
    """
    given = "".join(
        f" {name.rstrip('_').replace('_', '-')}"
        + ("" if value is True else f'="{escape(str(value))}"')
        for name, value in attributes.items()
        if value is not None and value is not False
    )
    if tag in ("input", "img", "meta"):
        return Markup(f"<{tag}{given}>")
    return Markup(f"<{tag}{given}>{together(*children)}</{tag}>")


def together(*children: object) -> Markup:
    """Return children without an element around them."""
    texts: list[str] = []
    for child in children:
        if isinstance(child, (list, tuple)):
            texts.append(together(*child))
        elif child is not None:
            texts.append(child if isinstance(child, Markup) else escape(str(child)))
    return Markup("".join(texts))


def table(head: Sequence[object], rows: Sequence[Sequence[object]], **attributes: Any) -> Markup:
    """Return a table that scrolls sideways if too wide; cells may be ``td`` or ``th`` elements."""

    def row(cells: Sequence[object], tag: str) -> Markup:
        made = (str(each).startswith(("<td", "<th")) for each in cells)
        parts = zip(cells, made, strict=True)
        return element(
            "tr", [c if isinstance(c, Markup) and m else element(tag, c) for c, m in parts]
        )

    body = element("tbody", [row(each, "td") for each in rows])
    whole = element("table", element("thead", row(head, "th")), body, **attributes)
    return element("div", whole, class_="scroll")


def number(value: float, digits: int = 5) -> Markup:
    """Return a rounded number, with all its digits as the value of the element."""
    if not math.isfinite(value):
        return element("data", name := _name_of(value), value=name, class_="bad")
    exact = repr(value)
    whole = isinstance(value, int) or 10**digits <= abs(value) < _LARGE
    shown = f"{value:,.0f}" if whole else f"{value:.{digits}g}"
    return element("data", shown, value=exact, title=exact if exact != shown else None)


def _name_of(value: float) -> str:
    """Return NaN, Infinity or -Infinity, as the record writes them."""
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


def swatch(index: int, name: str) -> Markup:
    """Return the colour and the name of a run."""
    return element("span", element("i", style=f"background:var(--run-{index})"), name, class_="run")


def overview(runs: Sequence[Run]) -> Markup:
    """Return a table with a row about each run."""
    rows = [_about(index, run) for index, run in enumerate(runs)]
    names = [name for name in rows[0] if any(row[name] not in (None, _NONE) for row in rows)]
    cells = [[_NONE if row[name] is None else row[name] for name in names] for row in rows]
    return table(names, cells, class_="overview")


def _about(index: int, run: Run) -> dict[str, Any]:
    def count(value: int | None) -> object:
        return None if value is None else number(value)

    manifests = [entry.manifest for entry in reversed(run.checkpoints)]

    def newest(key: str) -> Any:
        """Return a field of `run.json`, else of the newest checkpoint that has it."""
        return next((each[key] for each in (run.about, *manifests) if each.get(key)), None)

    best = None
    if run.best is not None:
        name, mode, value, step = run.best
        where = element("small", f" {mode} {name}, update ", number(step), class_="soft")
        best = together(number(value), where)
    speed, commit = run.record.speed(), run.about.get("code")
    return {
        "run": swatch(index, run.name),
        "status": element("b", run.status, class_=f"status {run.status}"),
        "best": best,
        "updates": count(run.updates),
        "epochs": count(run.epochs),
        "began": moment(run.began),
        "ran for": duration(run.seconds),
        "updates/s": None if speed is None else number(speed, 3),
        "starts": count(len(run.starts) or None),
        "processes": newest("world_size"),
        "device": run.about.get("device"),
        "module": run.about.get("module"),
        "torch": dict(newest("versions") or {}).get("torch"),
        "code": element("code", str(commit)[:10], title=commit) if commit else None,
    }


# -- values ----------------------------------------------------------------------------------------


def values(runs: Sequence[Run], kind: str = "metrics") -> Markup:
    """Return a table of the last, smallest and largest value of each metric and run."""
    found = [getattr(run, kind) for run in runs]
    several = len(runs) > 1
    rows: list[list[object]] = []
    for name in dict.fromkeys(name for each in found for name in each):
        having = [(index, each[name]) for index, each in enumerate(found) if name in each]
        first = [element("th", name, rowspan=len(having), scope="rowgroup")]
        for index, series in having:
            row: list[object] = [*first, *([swatch(index, runs[index].name)] if several else [])]
            for pair in (series.at(-1), series.extreme("min"), series.extreme("max")):
                row += [number(each) for each in pair] if pair else [_NONE, _NONE]
            bad = int((~series.finite).sum())
            rows.append([*row, number(len(series.values)), number(bad)])
            first = []
    extremes = ("last", "update", "smallest", "update", "largest", "update")
    head = ["metric", *(["run"] if several else []), *extremes, "values", "not finite"]
    return table(head, rows, class_=kind)


# -- hyper-parameters ------------------------------------------------------------------------------


def parameters(runs: Sequence[Run]) -> Markup | None:
    """Return the hyper-parameters and Trainer arguments; for several runs, differences first."""
    same: list[list[str]] = []
    different: list[list[str]] = []
    for kind, title in (("hyper_parameters", "hyper-parameter"), ("configuration", "Trainer")):
        of_runs = [run.parameters(kind) for run in runs]
        for name in dict.fromkeys(name for each in of_runs for name in each):
            texts = [_plain(each[name]) if name in each else _NONE for each in of_runs]
            row = [element("th", name), element("td", title, class_="soft"), *texts]
            if len(set(texts)) > 1:
                different.append(row)
            else:
                same.append(row[:3])
    shared = table(["name", "of", "value"], same, class_="parameters") if same else None
    if len(runs) == 1 or not (same or different):
        return shared
    if shared:
        summary = element("summary", f"{len(same)} that all runs share")
        shared = element("details", summary, shared)
    if not different:
        return together(element("p", "They are the same in all runs.", class_="soft"), shared)
    head = ["name", "of", *(swatch(i, run.name) for i, run in enumerate(runs))]
    return together(table(head, different, class_="parameters differ"), shared)


def _plain(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


# -- checkpoints -----------------------------------------------------------------------------------


def checkpoints(runs: Sequence[Run]) -> Markup | None:
    """Return a table of the checkpoints of each run: their metrics, which is best and last."""
    rows: list[list[object]] = []
    several = len(runs) > 1
    for index, run in enumerate(runs):
        roles = roles_of(run)
        for entry in run.checkpoints:
            # First the metrics that rank checkpoints, then those of the validation.
            order = sorted(entry.metrics, key=lambda name: (not name.startswith("val"), name))
            ranking = [name for name, _ in run.ranking if name in entry.metrics]
            shown: list[object] = [
                element("span", f"{name} ", number(entry.metrics[name]), class_="pair")
                for name in list(dict.fromkeys(ranking + order))[:_METRICS]
            ]
            if (more := len(entry.metrics) - len(shown)) > 0:
                shown.append(element("small", f"+{more}", class_="soft"))
            rows.append(
                [
                    *([swatch(index, run.name)] if several else []),
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
    head = [*(["run"] if several else []), "checkpoint", "", "metrics", "size", "saved", "state"]
    return table(head, rows, class_="checkpoints")


def roles_of(run: Run) -> dict[str, list[str]]:
    """Return which checkpoint is the last, and which the best by each metric that ranks them."""
    usable = [e for e in run.checkpoints if e.state == "sound" and e.is_step]
    roles = {usable[-1].name: ["last"]} if usable else {}
    for name, mode in dict.fromkeys(run.ranking):
        scored = [e for e in usable if math.isfinite(e.metrics.get(name, math.nan))]
        if scored:
            sign = 1 if mode == "min" else -1
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
    for index, start in enumerate(run.starts):
        if index > 0:
            text = f"start {index + 1}, after update {start.get('step', 0)}"
            yield _event("start", text, start["begin"])
        status = start.get("status")
        if status in ("failed", "preempted"):
            yield _event(status, start.get("error") or "ended by a signal", start.get("end"))
        elif status == "running" and (index < len(run.starts) - 1 or run.status == "killed"):
            yield _event("killed", "ended without a message: killed, or the machine failed")
    for each in run.about.get("warnings", ()):
        yield _event("warning", f"{each.get('text')} ({each.get('logger')})", each.get("time"))
    if more := run.about.get("more_warnings"):
        yield _event("warning", f"{more} more warnings, which were not kept")
    if text := _skipped(run.metrics.get("skipped_updates")):
        yield _event("skipped", text)
    for name, series in run.metrics.items():
        if text := not_finite(series):
            yield _event("not finite", f"{name} is {text}")
    for problem in run.problems:
        yield _event("file", problem)


def _skipped(series: Series | None) -> str:
    """Return when the count of skipped updates has grown."""
    if series is None or not series.finite.any():
        return ""
    values = series.values[series.finite]
    grown = series.steps[series.finite][np.diff(values, prepend=0.0) > 0]
    steps = [f"{step:.0f}" for step in grown]
    more = f" and {len(steps) - _LISTED} later ones" if len(steps) > _LISTED else ""
    total = int(values.max())
    noticed = f"noticed at update {', '.join(steps[:_LISTED])}{more}"
    return f"{total} update{'s' * (total != 1)} skipped, {noticed}"


def not_finite(series: Series) -> str:
    """Return what is not finite, how often and at which updates; an empty text if all is."""
    bad = np.flatnonzero(~series.finite)
    if not len(bad):
        return ""
    kinds = ", ".join(dict.fromkeys(map(_name_of, series.values[bad])))
    stretches = np.split(series.steps[bad], np.flatnonzero(np.diff(bad) > 1) + 1)
    ends = [(f"{each[0]:.0f}", f"{each[-1]:.0f}") for each in stretches]
    if len(ends) > _RUNS_OF_BAD:
        span = f"from update {ends[0][0]} to {ends[-1][1]}"
        return f"{kinds} {len(bad)} times, in {len(ends)} places {span}"
    places = [first if first == last else f"{first} to {last}" for first, last in ends]
    times = f" {len(bad)} times" if len(bad) > 1 else ""
    return f"{kinds}{times}, at update {', '.join(places)}"


def _event(kind: str, text: str, when: float | None = None) -> Markup:
    return element(
        "li",
        element("b", kind, class_=f"kind {kind.replace(' ', '-')}"),
        element("span", text),
        element("small", moment(when), class_="soft") if when is not None else None,
    )


# -- images ----------------------------------------------------------------------------------------


def images(runs: Sequence[Run]) -> Markup | None:
    """Return the images, those of a tag and a run side by side."""
    parts = []
    for tag in sorted({tag for run in runs for tag in run.images}):
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
    when = datetime.fromtimestamp(seconds, timezone.utc)
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
