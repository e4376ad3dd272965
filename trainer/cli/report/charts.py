"""Group metrics into charts, smooth them, and draw these as SVG, which the page's style colours.

Runs have the colours ``var(--run-0)`` and so on, and everything else has classes, so that one
drawing serves light and dark mode. The class of a line depends on its smoothing.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import numpy as np
from markupsafe import Markup, escape
from numpy.typing import NDArray

from trainer.cli.run_summary import thinned
from trainer.cli.runs import Floats, Run, Series

COLUMNS = 300  # columns of a chart, one or two pixels each
STRENGTHS = (0.6, 0.9, 0.99)  # of smoothing, for about this many values:
_USUAL = 1000
ENOUGH = 20  # smooth only with at least so many values, and at most so many per turn
DASHES = ("solid", "dashed", "dotted", "dashdot")  # of a chart's metrics; colours are for runs

_STAGE = re.compile(r"(train(?:ing)?|val(?:id(?:ation)?)?|test|eval)[/_](.+)")
_LAST = ("", "throughput", "device")  # sections that come last
_MARKS = 100  # maximum number of marks of non-finite values
_FEW = 40  # up to so many points, each gets a marker
_DRAWN = 1e150  # larger values are clipped, so that differences stay finite
_DECADES = 1e3  # from this ratio of largest to smallest value, the scale is logarithmic

_WIDTH, _HEIGHT = 331, 151  # of a chart, in units of about a pixel
_LEFT, _RIGHT, _TOP, _BOTTOM = 35, 6, 10, 18  # around the curves; more on the left if needed
_DIGIT = 4.6  # maximum width of a label's character, in units
_ACROSS, _UP = 0.01, 0.05  # margins in the frame, as fractions of the range
_STEPS = (1, 2, 2.5, 5, 10)  # between two grid lines, times a power of ten
_UNITS = ("", "k", "M", "G", "T")  # powers of 1000


@dataclass
class Chart:
    """Metrics that are drawn together.

    Attributes:
        title: The common part of their names.
        section: The section of the page.
        members: The names of the metrics; each has its own line style.
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
        label: The quantity, with its unit.
        place: Returns the positions of a run's series on the axis.
    """

    name: str
    label: str
    place: Callable[[Run, Series], Floats]


def charts_of(names: Sequence[str]) -> list[Chart]:
    """Group metrics that differ only by ``train`` and ``val``, or by ``_step`` and ``_epoch``.

    Returns:
        The charts by section: training and validation, then others by common prefix, those without
        a prefix, throughput, device.
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
    order.sort(
        key=lambda phase: (phase != "train", _LAST.index(phase) + 1 if phase in _LAST else 0)
    )
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
                # A user's own record may have no times. Nothing of it is then drawn.
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
    """Return the updates at which epochs end (extrapolated for a partial last one), and epochs."""
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
    # Charts of long and short runs are equally wide, so average over the same share of the width.
    share = min(1.0, _USUAL / len(series.values))
    return {strength: smoothed(series.values, strength**share) for strength in STRENGTHS}


def smoothed(values: Floats, strength: float) -> Floats:
    """Return an exponential moving average, with bias correction.

    With weight w: s = w·s + (1 - w)·x from s = 0, divided by 1 - wⁿ after n values. This is
    TensorBoard's smoothing of scalars (tensorboard pull request 639), but over all values rather
    than only those shown in a chart. Non-finite values are kept and not averaged.

    Args:
        values: Shape (values,).
        strength: w, from 0 to below 1.
    """
    finite = np.isfinite(values)
    present = values[finite].tolist()
    sums = accumulate(present, lambda s, x: s * strength + (1 - strength) * x, initial=0.0)
    result: Floats = values.copy()
    result[finite] = np.array(list(sums)[1:]) / (1 - strength ** np.arange(1, len(present) + 1))
    return result


def is_noisy(values: Floats) -> bool:
    """Return whether smoothing helps: there are enough values, and they often change direction."""
    present = values[np.isfinite(values)]
    ways = np.sign(np.diff(present / 2))  # halved, since a difference may overflow
    ways = ways[ways != 0]
    turns = int((ways[1:] != ways[:-1]).sum())
    return len(present) >= ENOUGH and turns * ENOUGH >= len(present)


@dataclass(frozen=True)
class _Scale:
    """A mapping from values to positions.

    Attributes:
        low: The value at the low end; its logarithm if the scale is logarithmic.
        high: The value at the high end, likewise.
        begin: The position of the low end.
        end: The position of the high end.
        log: Whether the scale is logarithmic.
    """

    low: float
    high: float
    begin: float
    end: float
    log: bool = False

    def __call__(self, values: Floats) -> Floats:
        """Return the positions of values."""
        scaled: Floats = np.log10(values) if self.log else values
        share: Floats = (scaled - self.low) / (self.high - self.low)
        return self.begin + share * (self.end - self.begin)


def ticks_of(low: float, high: float, most: int, *, whole: bool = False) -> list[tuple[float, str]]:
    """Return round values from low to high for grid lines, each with its label.

    Args:
        low: The lowest value.
        high: The highest value, above the lowest.
        most: The approximate maximum number.
        whole: Only whole numbers.
    """
    least = max((high - low) / most, 1.0 if whole else 0.0)
    power = 10.0 ** math.floor(math.log10(least))
    steps = [
        multiple * power for multiple in _STEPS if not whole or (multiple * power).is_integer()
    ]
    step = next((multiple for multiple in steps if multiple >= least * (1 - 1e-9)), 10 * power)
    numbers = range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)
    return [(number * step, _label(number * step, step)) for number in numbers]


def _label(value: float, step: float) -> str:
    """Return a short label that distinguishes a value from one that is a step away."""
    if value == 0:
        return "0"
    size = math.floor(math.log10(abs(value)))
    # One more digit for a step of 2.5; never fewer than the digits of 200, or of 200k.
    digits = max(1 + max(0, size) % 3, size - math.floor(math.log10(step)) + 2)
    unit = min(size // 3, len(_UNITS) - 1) if 3 <= size < 3 * len(_UNITS) else 0
    text = f"{value / 1000**unit:.{digits}g}{_UNITS[unit]}"
    return text.replace("e-0", "e-").replace("e+0", "e+").replace("-", "\N{MINUS SIGN}")


def _range(values: Floats, margin: float) -> tuple[float, float]:
    """Return the range of values with a margin, also for a single value."""
    low, high = (float(values.min()), float(values.max())) if len(values) else (0.0, 1.0)
    largest = max(abs(low), abs(high))
    if high - low <= max(1e-300, 1e-12 * largest):
        pad = 0.05 * largest or 0.5
        return low - pad, high + pad
    pad = margin * (high - low)
    return low - pad, high + pad


def draw(chart: Chart, runs: Sequence[Run], axis: Axis) -> Markup:
    """Return a chart as an SVG element for the page, without a title."""
    drawn = []
    for index, run in enumerate(runs):
        for name, dash in chart.dashes.items():
            if (series := run.metrics.get(name)) is not None:
                x = axis.place(run, series)
                finite = np.isfinite(x)
                drawn.append((index, dash, x[finite], series, finite))
    log = is_logarithmic([series for *_, series, _ in drawn])
    least = 1 / _DRAWN if log else -_DRAWN
    shown = [series.values[finite & series.finite] for *_, series, finite in drawn]
    heights = np.concatenate([*shown, np.empty(0)]).clip(least, _DRAWN)
    low, high = _range(np.log10(heights) if log else heights, _UP)
    rows = _decades(low, high) if log else ticks_of(low, high, 6)
    left = max(_LEFT, 6 + _DIGIT * max((len(label) for _, label in rows), default=0))
    up = _Scale(low, high, _HEIGHT - _BOTTOM, _TOP, log)
    widths = np.concatenate([*(x for _, _, x, _, _ in drawn), np.empty(0)])
    low, high = _range(widths, _ACROSS)
    across = _Scale(low, high, left, _WIDTH - _RIGHT)
    parts = _grid(rows, ticks_of(low, high, 6, whole=axis.name == "step"), across, up)
    for index, dash, x, series, finite in drawn:
        values = series.values[finite]
        clipped = np.where(np.isfinite(values), values.clip(least, _DRAWN), values)
        curves = {s: c[finite].clip(least, _DRAWN) for s, c in curves_of(series).items()}
        parts += _lines(across(x), clipped, curves, up, f"var(--run-{index})", dash)
    label = escape(f"{', '.join(chart.members)} over {axis.label}")
    size = f'viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{label}"'
    return Markup(f"<svg {size}>{''.join(parts)}</svg>")


def _decades(low: float, high: float) -> list[tuple[float, str]]:
    """Return powers of ten between two logarithms, for grid lines."""
    powers = range(math.ceil(low - 1e-9), math.floor(high + 1e-9) + 1)
    every = max(1, math.ceil(len(powers) / 6))
    return [(10.0**power, _label(10.0**power, 10.0**power)) for power in powers[::every]]


def _grid(
    rows: Sequence[tuple[float, str]],
    columns: Sequence[tuple[float, str]],
    across: _Scale,
    up: _Scale,
) -> list[str]:
    """Return the grid lines and their labels."""
    levels = up(np.array([value for value, _ in rows])).tolist()
    places = across(np.array([value for value, _ in columns])).tolist()
    lines = [f"M{across.begin:.1f} {y:.1f}H{across.end:.1f}" for y in levels]
    lines += [f"M{x:.1f} {up.begin}V{up.end}" for x in places]
    frame = f"M{across.begin:.1f} {up.begin}H{across.end:.1f}"
    texts = [
        f'<text x="{across.begin - 3:.1f}" y="{y + 2.7:.1f}" text-anchor="end">{label}</text>'
        for y, (_, label) in zip(levels, rows, strict=True)
    ]
    texts += [
        f'<text x="{x:.1f}" y="{up.begin + 11:.1f}" text-anchor="middle">{label}</text>'
        for x, (_, label) in zip(places, columns, strict=True)
    ]
    return [f'<path class="lines" d="{"".join([*lines, frame])}"/>', *texts]


def _lines(
    x: Floats, values: Floats, curves: dict[float, Floats], up: _Scale, color: str, dash: str
) -> list[str]:
    """Return a run's raw and smoothed lines for a metric, with marks at non-finite values.

    Args:
        x: Horizontal positions.
        values: The values, clipped to the drawable range.
        curves: The smoothed values by strength.
        up: The mapping from values to vertical positions.
        color: The run's colour.
        dash: The metric's line style.
    """
    finite = np.isfinite(values)
    y = np.where(finite, up(np.where(finite, values, 1.0)), np.nan)
    kind = "raw" if curves else "plain"
    parts = []
    if finite.any():
        paths = [_path("curve", _polyline(*thinned(x, y, COLUMNS)), color)]
        lonely = finite & ~np.roll(finite, 1) & ~np.roll(finite, -1)  # isolated points
        if (dots := finite if len(x) <= _FEW else lonely).any():
            paths.append(_path("dots", _marks(x[dots], y[dots], "h0"), color))
        parts.append(f'<g class="{kind} {dash}">{"".join(paths)}</g>')
    for strength, curve in curves.items():  # an average continues across a gap
        line = _polyline(*thinned(x[finite], up(curve[finite]), COLUMNS))
        parts.append(f'<g class="{class_of(strength)} {dash}">{_path("curve", line, color)}</g>')
    bottom, top = up.begin - 5, up.end + 5
    for shape, height, which in (
        ("m-2-2l4 4m0-4l-4 4", bottom, np.isnan(values)),
        ("m-2.2 2l2.2-4l2.2 4z", top, values == np.inf),
        ("m-2.2-2l2.2 4l2.2-4z", bottom, values == -np.inf),
    ):
        if which.any():
            columns = np.round((x[which] - x.min()) / max(np.ptp(x), 1e-300) * _MARKS)
            places = x[which][np.unique(columns, return_index=True)[1]]
            marks = _marks(places, np.full(len(places), height), shape)
            parts.append(f'<g class="bad"><path d="{marks}"/></g>')
    return parts


def _path(kind: str, d: str, color: str) -> str:
    return f'<path class="{kind}" style="stroke:{color}" d="{d}"/>'


def _polyline(x: Floats, y: Floats) -> str:
    """Return lines through points, with a gap at each that is NaN."""
    finite: NDArray[np.bool_] = np.isfinite(y)
    begins = finite & ~np.append(False, finite[:-1])
    points = zip(x[finite].tolist(), y[finite].tolist(), begins[finite].tolist(), strict=True)
    return "".join(f"{'M' if begin else 'L'}{a:.1f} {b:.1f}" for a, b, begin in points)


def _marks(x: Floats, y: Floats, shape: str) -> str:
    return "".join(f"M{a:.1f} {b:.1f}{shape}" for a, b in zip(x.tolist(), y.tolist(), strict=True))


def is_logarithmic(drawn: Sequence[Series]) -> bool:
    """Return whether the values need a logarithmic scale, because they are so far apart."""
    values = np.concatenate([series.values[series.finite] for series in drawn] or [np.empty(0)])
    return len(values) > 2 and values.min() > 0 and values.max() / _DECADES >= values.min()


def class_of(strength: float) -> str:
    """Return the CSS class of lines smoothed with this strength."""
    return f"ema-{strength:g}".replace(".", "")
