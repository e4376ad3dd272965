"""Group metrics into charts, smooth them, and draw these: SVG by matplotlib, coloured by the page.

matplotlib gets a placeholder colour for each role, which becomes a variable of the page's style
sheet, so that one drawing serves light and dark mode. Lines get classes by their smoothing.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from html import escape
from itertools import accumulate, count
from typing import TYPE_CHECKING, Any

import numpy as np

from trainer.cli.record import Floats, Series, thinned
from trainer.cli.report.folder import Run

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLUMNS = 300  # of a chart: a pixel or two each
STRENGTHS = (0.6, 0.9, 0.99)  # of smoothing, for up to so many values:
_USUAL = 1000
ENOUGH = 20  # minimum of values, and maximum per turn, for which smoothing makes sense
DASHES = ("solid", "dashed", "dotted", "dashdot")  # of a chart's metrics; runs have colours

_STAGE = re.compile(r"(train(?:ing)?|val(?:id(?:ation)?)?|test|eval)[/_](.+)")
_LAST = ("", "throughput", "device")  # sections after the others
_MARKS = 100  # of non-finite values, side by side
_FEW = 40  # points, up to which each gets a marker
_DRAWN = 1e150  # matplotlib fails if an axis, with its margins, reaches the limits of floats
_DECADES = 1e3  # ratio of largest to smallest value from which on the scale is logarithmic

_INK, _GRID, _BAD = "#200000", "#200001", "#200002"
_ROLES = {_INK: "var(--soft)", _GRID: "var(--grid)", _BAD: "var(--bad)"}
_SETTINGS: dict[Any, Any] = {
    "svg.fonttype": "none",  # text stays text
    "font.size": 8.0,
    "text.color": _INK,
    "axes.labelcolor": _INK,
    "xtick.color": _INK,
    "ytick.color": _INK,
    "axes.edgecolor": _GRID,
    "grid.color": _GRID,
    "grid.linewidth": 0.6,
    "path.simplify": True,
    "axes.unicode_minus": True,
}
_SIZE = (4.6, 2.1)  # inches of 72 units
_FRAME = (0.105, 0.12, 0.875, 0.80)
_figures = count()


@dataclass
class Chart:
    """Metrics that are drawn together.

    Attributes:
        title: What they have in common.
        section: The section of the page.
        members: Their names; each has its own line style.
    """

    title: str
    section: str
    members: list[str] = field(default_factory=list)

    @property
    def dashes(self) -> dict[str, str]:
        """The line style of each member."""
        return {name: DASHES[i % len(DASHES)] for i, name in enumerate(self.members)}


@dataclass(frozen=True)
class Axis:
    """A horizontal axis.

    Attributes:
        name: ``"step"``, ``"time"`` or ``"epoch"``.
        label: What is counted, with its unit.
        place: Returns the positions of a run's series on the axis.
    """

    name: str
    label: str
    place: Callable[[Run, Series], Floats]


def charts_of(names: Sequence[str]) -> list[Chart]:
    """Group metrics that differ only by ``train`` and ``val``, or by ``_step`` and ``_epoch``.

    Returns:
        The charts by section: training and validation, then others by common prefix, those without
        one, throughput, device.
    """
    charts: dict[tuple[str, str], Chart] = {}
    prefixes = [name.partition("/")[0] for name in names if "/" in name]
    for name in names:
        stage = _STAGE.fullmatch(name)
        prefix = name.partition("/")[0]
        if stage:
            section, title = "train", stage[2]
        elif prefixes.count(prefix) > 1 or prefix in _LAST:
            section, title = prefix, name.removeprefix(f"{prefix}/")
        else:
            section, title = "", name
        for suffix, other in (("_step", "_epoch"), ("_epoch", "_step")):
            if name.endswith(suffix) and name.removesuffix(suffix) + other in names:
                title = title.removesuffix(suffix)
        charts.setdefault((section, title), Chart(title, section)).members.append(name)
    order = list(dict.fromkeys(chart.section for chart in charts.values()))
    order.sort(key=lambda each: (each != "train", _LAST.index(each) + 1 if each in _LAST else 0))
    for chart in charts.values():
        chart.members.sort(key=lambda name: not name.startswith("train"))
    return sorted(charts.values(), key=lambda chart: order.index(chart.section))


def axes_of(runs: Sequence[Run]) -> list[Axis]:
    """Return the horizontal axes for these runs."""
    axes = [Axis("step", "updates", lambda _, series: series.steps)]
    spans = [times[-1] - times[0] for run in runs if len(times := run.times)]
    if spans and max(spans) > 0:
        unit, seconds = next(
            (u, s)
            for u, s in (("d", 86400), ("h", 3600), ("min", 60), ("s", 1))
            if max(spans) >= 2 * s or s == 1
        )
        begins = {id(run): run.times[0] for run in runs if len(run.times)}
        axes.append(
            Axis(
                "time",
                f"time in {unit}",
                # A user's own record may have no times: then nothing of it is drawn.
                lambda run, series: (series.times - begins.get(id(run), np.nan)) / seconds,
            )
        )
    drawn = [run for run in runs if run.metrics]
    if drawn and all((run.epochs or 0) > 1 for run in drawn):
        ends = {id(run): _epoch_ends(run) for run in drawn}
        axes.append(
            Axis("epoch", "epochs", lambda run, series: np.interp(series.steps, *ends[id(run)]))
        )
    return axes


def _epoch_ends(run: Run) -> tuple[Floats, Floats]:
    """Return the updates at which epochs end, extrapolated for a partial last one, and epochs."""
    steps = np.concatenate([series.steps for series in run.metrics.values()])
    epochs = np.concatenate([series.epochs for series in run.metrics.values()])
    numbers = np.unique(epochs[np.isfinite(epochs)])
    ends = np.array([steps[epochs == number].max() for number in numbers])
    if len(ends) > 1:
        before = ends[-3] if len(ends) > 2 else 0.0
        ends[-1] = max(ends[-1], ends[-2] + (ends[-2] - before))
    return np.append(0.0, ends), np.append(0.0, numbers + 1)


def curves_of(series: Series) -> dict[float, Floats]:
    """Return the smoothed values by strength; empty where smoothing would not help."""
    if not is_noisy(series.values):
        return {}
    # Charts of long and short runs are equally wide: average over the same share of the width.
    share = min(1.0, _USUAL / len(series.values))
    return {strength: smoothed(series.values, strength**share) for strength in STRENGTHS}


def smoothed(values: Floats, strength: float) -> Floats:
    """Return an exponential moving average, without the bias towards its start.

    With weight w: s = w·s + (1 - w)·x from s = 0, divided by 1 - wⁿ after n values. That is the
    smoothing of TensorBoard's scalars (tensorboard pull request 639), over all values rather than
    those that a chart shows. Non-finite values are kept and not averaged.

    Args:
        values: Shape (values,).
        strength: w, from 0 to below 1.
    """
    finite = np.isfinite(values)
    kept = values[finite].tolist()
    sums = accumulate(kept, lambda s, x: s * strength + (1 - strength) * x, initial=0.0)
    result: Floats = values.copy()
    result[finite] = np.array(list(sums)[1:]) / (1 - strength ** np.arange(1, len(kept) + 1))
    return result


def is_noisy(values: Floats) -> bool:
    """Return whether smoothing helps: there are enough values, and they often change direction."""
    kept = values[np.isfinite(values)]
    ways = np.sign(np.diff(kept / 2))  # in halves: a difference may overflow
    ways = ways[ways != 0]
    turns = int((ways[1:] != ways[:-1]).sum())
    return len(kept) >= ENOUGH and turns * ENOUGH >= len(kept)


def draw(chart: Chart, runs: Sequence[Run], axis: Axis) -> str:
    """Return a chart as an SVG element for the page, without a title."""
    import matplotlib
    from matplotlib.figure import Figure

    # The salt makes ids unique on the page, and the same for the same runs.
    with matplotlib.rc_context({**_SETTINGS, "svg.hashsalt": f"report {next(_figures)}"}):
        figure = Figure(figsize=_SIZE, facecolor="none")
        axes = figure.add_axes(_FRAME, facecolor="none")
        _set_up(
            axes,
            [run.metrics[name] for run in runs for name in chart.members if name in run.metrics],
            whole=axis.name == "step",
        )
        for index, run in enumerate(runs):
            for name, dash in chart.dashes.items():
                if name in run.metrics:
                    series = run.metrics[name]
                    _line(axes, axis.place(run, series), series, _color_of(index), dash)
        axes.margins(x=0.01)
        text = io.StringIO()
        figure.savefig(text, format="svg", metadata={"Date": None})
    return _for_page(text.getvalue(), f"{', '.join(chart.members)} over {axis.label}")


def _set_up(axes: Axes, drawn: Sequence[Series], *, whole: bool) -> None:
    """Set up the frame of a chart; with `whole`, its horizontal axis has only whole numbers."""
    from matplotlib.ticker import EngFormatter, FuncFormatter, LogLocator, MaxNLocator, NullLocator

    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.tick_params(length=0, pad=3)
    axes.grid(visible=True)
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=whole))
    large = EngFormatter(sep="")  # below 1 it would write m for thousandths, as in 400m hours
    axes.xaxis.set_major_formatter(
        FuncFormatter(lambda value, _: large(value) if abs(value) >= 1000 else f"{value:g}")
    )
    if is_logarithmic(drawn):
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(numticks=6))
        axes.yaxis.set_minor_locator(NullLocator())
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    else:
        axes.yaxis.set_major_locator(MaxNLocator(5))
        axes.ticklabel_format(axis="y", scilimits=(-3, 4), useOffset=False)


def is_logarithmic(drawn: Sequence[Series]) -> bool:
    """Return whether values are so far apart that only a logarithmic scale shows them."""
    values = np.concatenate([series.values[series.finite] for series in drawn] or [np.empty(0)])
    return len(values) > 2 and values.min() > 0 and values.max() / _DECADES >= values.min()


def _line(axes: Axes, x: Floats, series: Series, color: str, dash: str) -> None:
    """Draw a metric of a run: raw and smoothed, with marks where it is not finite."""
    known = np.isfinite(x)
    x, values = x[known], series.values[known]
    finite = np.isfinite(values)
    least = 1 / _DRAWN if axes.get_yscale() == "log" else -_DRAWN
    values = np.where(finite, values.clip(least, _DRAWN), values)
    curves = curves_of(series)
    kind = "raw" if curves else "plain"
    style: dict[str, Any] = {"color": color, "linestyle": dash, "solid_joinstyle": "round"}
    if finite.any():
        marker: dict[str, Any] = {"marker": "o", "markersize": 2.2} if len(x) <= _FEW else {}
        axes.plot(*thinned(x, values, COLUMNS), gid=kind, linewidth=1.1, **style, **marker)
        alone = finite & ~np.roll(finite, 1) & ~np.roll(finite, -1)  # no line would show them
        if alone.any():
            axes.plot(x[alone], values[alone], ".", gid=kind, color=color, markersize=2)
    for strength, curve in curves.items():  # an average continues across a gap
        line = thinned(x[finite], curve[known][finite].clip(least, _DRAWN), COLUMNS)
        axes.plot(*line, gid=class_of(strength), linewidth=1.5, **style)
    for mark, height, which in (
        ("x", 0.04, np.isnan(values)),
        ("^", 0.96, values == np.inf),
        ("v", 0.04, values == -np.inf),
    ):
        if which.any():
            across = (x[which] - x.min()) / max(np.ptp(x), 1e-300)
            places = x[which][np.unique(np.round(across * _MARKS), return_index=True)[1]]
            heights = np.full(len(places), height)
            place = axes.get_xaxis_transform()
            axes.plot(places, heights, mark, gid="bad", color=_BAD, markersize=4, transform=place)


def class_of(strength: float) -> str:
    """Return the class of lines that are smoothed with this strength."""
    return f"ema-{strength:g}".replace(".", "")


def _color_of(index: int) -> str:
    return f"#10{index:04x}"


# -- from matplotlib's file to an element of the page ----------------------------------------------

_CLASSES = {"raw", "plain", "bad", *map(class_of, STRENGTHS)}
_LEFT_OUT = re.compile(r"(?s)<metadata>.*?</metadata>|<style.*?</style>|<!--.*?-->|>\s+(?=<)")
_GROUP = re.compile(r'<g id="([^"]*)"')
_FONT = re.compile(r"font-family: [^;\"]*;? ?|font: ")
_COLOR = re.compile(r"#(?:10|20)[0-9a-f]{4}")
_NUMBER = re.compile(r"(?<![\w.])-?\d+\.\d+")


def _for_page(svg: str, label: str) -> str:
    """Return a file of matplotlib as an element, with the page's colours and rounded numbers."""

    def group(match: re.Match[str]) -> str:
        return f'<g class="{match[1]}"' if match[1] in _CLASSES else "<g"

    def tag(match: re.Match[str]) -> str:
        styled = _COLOR.sub(_variable, _FONT.sub("", _GROUP.sub(group, match[0])))
        return _NUMBER.sub(lambda each: f"{float(each[0]):.1f}".removesuffix(".0"), styled)

    svg = _LEFT_OUT.sub(lambda match: ">" if match[0].startswith(">") else "", svg)
    _, size, rest = re.split(r'<svg[^>]*?(viewBox="[^"]*")[^>]*', svg.strip(), maxsplit=1)
    label = escape(label)
    return f'<svg {size} role="img" aria-label="{label}"{re.sub("<[^>]*>", tag, rest)}'


def _variable(match: re.Match[str]) -> str:
    return _ROLES.get(match[0]) or f"var(--run-{int(match[0][3:], 16)})"
