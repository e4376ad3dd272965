"""The page. It has no script, and its content policy forbids the browser to fetch anything."""

from __future__ import annotations

import time
from collections.abc import Sequence
from importlib.resources import files

from trainer.cli.report import tables
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
from trainer.cli.report.folder import Run
from trainer.cli.report.tables import Markup, element, number, together

_POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
_SECTIONS = {
    "train": "Training and validation",
    "": "Other metrics",
    "throughput": "Throughput",
    "device": "System",
}
# Colours of the first runs, light and dark; those of more runs go round the colour circle.
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
_NAMED = 3  # runs that the title names
_GOLDEN_ANGLE = 137.5  # degrees: neighbours differ, however many there are


def page(runs: Sequence[Run], *, title: str | None = None) -> str:
    """Return the page about runs, as HTML."""
    axes, evaluated = axes_of(runs), any(run.evaluations for run in runs)
    charts: dict[str, list[Chart]] = {}  # by section
    for chart in charts_of(list(dict.fromkeys(name for run in runs for name in run.metrics))):
        charts.setdefault(chart.section, []).append(chart)
    if title is None:
        names = [run.name for run in runs]
        title = ", ".join(names) if len(names) <= _NAMED else f"{len(names)} runs"
    parts = [
        ("Runs", tables.overview(runs)),
        ("Warnings and events", tables.events(runs)),
        *(
            (
                _SECTIONS.get(name, name),
                element("div", [_figure(c, runs, axes) for c in own], class_="grid"),
            )
            for name, own in charts.items()
        ),
        ("Images", tables.images(runs)),
        ("Hyper-parameters", tables.parameters(runs)),
        ("Checkpoints", tables.checkpoints(runs)),
        ("Values", tables.values(runs) if charts else None),
        ("Evaluations", tables.values(runs, "evaluations") if evaluated else None),
    ]
    shown = [(f"part-{i}", name, part) for i, (name, part) in enumerate(parts) if part is not None]
    body = element(
        "body",
        element(
            "header",
            element("h1", title),
            element("nav", [element("a", name, href=f"#{key}") for key, name, _ in shown]),
        ),
        _controls(runs, axes) if charts else None,
        element(
            "main",
            [element("section", element("h2", name), part, id=key) for key, name, part in shown],
            element("p", "There are no metrics yet.", class_="soft") if not charts else None,
        ),
        element("footer", _sources(runs), class_="soft"),
    )
    return f"<!DOCTYPE html>\n{element('html', _head(title, len(runs)), body, lang='en')}\n"


def _head(title: str, count: int) -> Markup:
    style = (files(__package__) / "page.css").read_text(encoding="utf-8")
    return element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", http_equiv="Content-Security-Policy", content=_POLICY),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("meta", name="color-scheme", content="light dark"),
        element("title", title),
        element("style", Markup(style + _colors(count) + _switches())),
    )


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


def _controls(runs: Sequence[Run], axes: Sequence[Axis]) -> Markup:
    strengths = [("ema-0", "none"), *((class_of(each), f"{each:g}") for each in STRENGTHS)]
    return element(
        "div",
        element(
            "fieldset",
            element("legend", "smoothing"),
            [_radio("ema", key, text, key == class_of(STRENGTHS[0])) for key, text in strengths],
        ),
        element(
            "fieldset",
            element("legend", "over"),
            [_radio("axis", f"axis-{axis.name}", axis.label, axis.name == "step") for axis in axes],
        ),
        element("div", [tables.swatch(i, run.name) for i, run in enumerate(runs)], class_="runs"),
        class_="controls",
    )


def _radio(name: str, key: str, text: str, checked: bool) -> Markup:
    return element(
        "label", element("input", type="radio", name=name, id=key, checked=checked), text
    )


def _figure(chart: Chart, runs: Sequence[Run], axes: Sequence[Axis]) -> Markup:
    drawn = [run.metrics[name] for run in runs for name in chart.members if name in run.metrics]
    bad = sum(int((~series.finite).sum()) for series in drawn)
    keys = [
        element("small", element("i", class_=f"line {dash}"), name, class_="key")
        for name, dash in chart.dashes.items()
    ]
    return element(
        "figure",
        element(
            "figcaption",
            element("b", chart.title),
            keys if len(keys) > 1 else None,
            element("small", "logarithmic", class_="soft") if is_logarithmic(drawn) else None,
            element("small", "✕ ", number(bad), " not finite", class_="bad") if bad else None,
        ),
        [
            element("div", Markup(draw(chart, runs, axis)), class_=f"axis-{axis.name}")
            for axis in axes
        ],
        class_="chart",
    )


def _sources(runs: Sequence[Run]) -> Markup:
    when = tables.moment(time.time())
    places = [element("li", element("code", str(run.folder))) for run in runs]
    return together(
        element("p", "Made by trainer report, ", when, " UTC, from"),
        element("ul", places),
        element(
            "p",
            "Smoothing is an exponential moving average of all values, bias-corrected, with the "
            "weight w of the buttons, or w^(1000/n) for n > 1000 values. A metric with fewer than "
            f"{ENOUGH} values, or that seldom changes direction, is not smoothed. Charts keep the "
            f"smallest and the largest value of each of {COLUMNS} columns. Times are UTC; the time "
            "axis starts at a run's first record.",
        ),
    )
