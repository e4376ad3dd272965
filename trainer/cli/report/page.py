"""The HTML page. It has no script, and its content policy prevents all network access."""

from __future__ import annotations

import base64
import math
import struct
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from importlib.resources import files
from typing import Any

from jinja2 import Environment, StrictUndefined  # torch requires jinja2
from markupsafe import Markup

from trainer.cli import run_summary
from trainer.cli.inventory import size_text
from trainer.cli.report.charts import (
    COLUMNS,
    ENOUGH,
    STRENGTHS,
    Axis,
    Chart,
    axes_of,
    charts_of,
    class_of,
    draw,
    is_logarithmic,
)
from trainer.cli.runs import Run, Series

_SECTIONS = {
    "train": "Training and validation",
    "": "Other metrics",
    "throughput": "Throughput",
    "device": "System",
}
# Colours of the first runs, light and dark; further runs go round the colour circle.
_COLORS = (
    ("#1f6fd6", "#6cb0ff"),
    ("#d1500f", "#ff9e66"),
    ("#0c8559", "#4fd39b"),
    ("#a62d96", "#f08be0"),
    ("#806600", "#dcc04a"),
    ("#007f94", "#4ccbe0"),
    ("#6741d9", "#b197fc"),
    ("#c2255c", "#ff8fab"),
)
_FILES = ("page.html", "page.css")
_NAMED = 3  # maximum number of runs in the title
_GOLDEN_ANGLE = 137.5  # degrees, so that neighbours differ for any number of runs
_ROWS = 60  # maximum number of events shown for a run
_SIDE = 320  # pixels: images are enlarged up to this width, and a quarter of it in height


def page(runs: Sequence[Run], *, title: str | None = None) -> str:
    """Return the page about runs, as HTML."""
    names = [run.name for run in runs]
    if title is None:
        title = ", ".join(names) if len(names) <= _NAMED else f"{len(names)} runs"
    has_metrics = any(run.metrics for run in runs)
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters.update(short=run_summary.short, exact=run_summary.exact)
    environment.tests["not_finite"] = lambda value: not math.isfinite(value)
    texts = {name: (files(__package__) / name).read_text("utf-8") for name in _FILES}
    axes = axes_of(runs) if has_metrics else []
    return environment.from_string(texts["page.html"]).render(
        title=title,
        runs=runs,
        parts=list(_parts(runs, axes)),
        axes=axes,
        style=Markup(texts["page.css"] + _colors(len(runs)) + _switches()),
        strengths={
            "ema-0": "none",
            **{class_of(strength): f"{strength:g}" for strength in STRENGTHS},
        },
        kinds=defaultdict(str, run_summary.KINDS),
        now=run_summary.moment(time.time()),
        columns=COLUMNS,
        enough=ENOUGH,
    )


def _parts(runs: Sequence[Run], axes: Sequence[Axis]) -> Iterator[dict[str, Any]]:
    """Return the sections of the page: the title, the macro that shows it, and its arguments."""

    def part(title: str, macro: str, *data: Any) -> dict[str, Any]:
        return {"title": title, "macro": macro, "data": data}

    yield part("Runs", "overview", _facts(runs))
    if (trials := run_summary.trials(runs)) is not None:
        yield part("Trials", "trials", trials)
    if events := list(_events(runs)):
        yield part("Warnings and events", "events", events)
    sections: dict[str, list[Chart]] = defaultdict(list)
    for chart in charts_of(list(dict.fromkeys(name for run in runs for name in run.metrics))):
        sections[chart.section].append(chart)
    for name, charts in sections.items():
        figures = [_figure(chart, runs, axes) for chart in charts]
        yield part(_SECTIONS.get(name, name), "charts", figures)
    if tags := sorted({tag for run in runs for tag in run.images}):
        yield part("Images", "images", {tag: _images(tag, runs) for tag in tags})
    different, same = run_summary.parameters(runs)
    if different or same:
        yield part("Hyper-parameters", "parameters", different, same)
    if rows := list(_checkpoints(runs)):
        yield part("Checkpoints", "checkpoints", rows)
    for title, kind in (("Values", "metrics"), ("Evaluations", "evaluations")):
        if values := _values([getattr(run, kind) for run in runs]):
            yield part(title, "values", kind, values)


def _facts(runs: Sequence[Run]) -> dict[str, list[Any]]:
    """Return the facts known about any run, by name, with a value for each run."""
    of_runs = [run_summary.overview(run) for run in runs]
    columns = {name: [facts[name] for facts in of_runs] for name in of_runs[0]}
    return {
        name: values
        for name, values in columns.items()
        if any(value not in (None, "") for value in values)
    }


def _events(runs: Sequence[Run]) -> Iterator[dict[str, Any]]:
    for index, run in enumerate(runs):
        if events := list(run_summary.events_of(run)):
            yield {"index": index, "shown": events[:_ROWS], "more": len(events[_ROWS:])}


def _figure(chart: Chart, runs: Sequence[Run], axes: Sequence[Axis]) -> dict[str, Any]:
    drawn = [run.metrics[name] for run in runs for name in chart.members if name in run.metrics]
    return {
        "title": chart.title,
        "dashes": chart.dashes,
        "logarithmic": is_logarithmic(drawn),
        "bad": sum(int((~series.finite).sum()) for series in drawn),
        "drawings": {axis.name: draw(chart, runs, axis) for axis in axes},
    }


def _images(tag: str, runs: Sequence[Run]) -> dict[int, dict[int, Any]]:
    """Return the images of a tag by run number and step."""
    return {
        index: {step: _image(png) for step, png in sorted(run.images[tag].items())}
        for index, run in enumerate(runs)
        if run.images.get(tag)
    }


def _image(png: bytes) -> dict[str, Any]:
    """Return an image, enlarged by a whole factor if it is small."""
    width, height = struct.unpack(">II", png[16:24])  # PNG stores it in the first chunk
    times = max(1, min(_SIDE // max(width, 1), _SIDE // 4 // max(height, 1)))
    source = f"data:image/png;base64,{base64.b64encode(png).decode()}"
    return {"source": source, "width": times * width, "enlarged": times > 1}


def _checkpoints(runs: Sequence[Run]) -> Iterator[dict[str, Any]]:
    for index, run in enumerate(runs):
        roles = run_summary.roles_of(run)
        for entry in run.checkpoints:
            metrics = run_summary.checkpoint_metrics(run, entry.metrics)
            saved = entry.saved if math.isfinite(entry.saved) else None
            yield {
                "index": index,
                "entry": entry,
                "roles": roles.get(entry.name, ()),
                "metrics": metrics,
                "more": len(entry.metrics) - len(metrics),
                "size": size_text(entry.size),
                "saved": run_summary.moment(saved),
            }


def _values(of_runs: Sequence[dict[str, Series]]) -> dict[str, dict[int, run_summary.Summary]]:
    """Return the summaries of values, by metric and run number."""
    names = dict.fromkeys(name for values in of_runs for name in values)
    return {
        name: {
            index: run_summary.summary_of(values[name])
            for index, values in enumerate(of_runs)
            if name in values
        }
        for name in names
    }


def _colors(count: int) -> str:
    hues = [f"{index * _GOLDEN_ANGLE % 360:.0f}" for index in range(len(_COLORS), count)]
    pairs = [*_COLORS, *((f"hsl({hue} 55% 27%)", f"hsl({hue} 90% 85%)") for hue in hues)][:count]
    light, dark = ("".join(f"--run-{i}:{p[k]};" for i, p in enumerate(pairs)) for k in (0, 1))
    return f":root{{{light}}}\n@media(prefers-color-scheme:dark){{:root{{{dark}}}}}\n"


def _switches() -> str:
    """Return the style rules by which the buttons show and hide elements."""
    names = [*map(class_of, STRENGTHS), "axis-step", "axis-time", "axis-epoch"]
    hide = [f"body:not(:has(#{name}:checked)) .{name}{{display:none}}" for name in names]
    return "\n".join(["body:has([name=ema]:not(#ema-0):checked) .raw{opacity:.28}", *hide])
