"""One frame of `trainer watch`: a line about each run and a chart for each metric."""

from __future__ import annotations

import math
from collections.abc import Sequence
from datetime import datetime
from fnmatch import fnmatchcase
from typing import Any

import numpy as np
from rich.console import Console, Group, RenderableType
from rich.panel import Panel
from rich.style import Style
from rich.table import Table
from rich.text import Text

from trainer.cli import run_summary
from trainer.cli.run_summary import thinned
from trainer.cli.runs import RECORD, Run, Series
from trainer.errors import printable

_COLOURS = (6, 3, 5, 2, 4, 1)  # of the terminal's own palette, to match its background
_WIDTH = 46  # minimum columns of a chart, if the terminal has that many
_LOWEST, _HIGHEST = 5, 16  # minimum and maximum lines of a curve
_RATE_OVER = 20  # intervals between records
_STYLES = {run_summary.GOOD: "green", run_summary.WARNING: "yellow", run_summary.BAD: "red"}


class _Text(Text):
    """A text of rich in which control characters appear as escapes."""

    def __init__(self, text: str = "", *args: Any, **kwargs: Any) -> None:
        super().__init__(printable(text), *args, **kwargs)

    def append(self, text: Text | str, style: str | Style | None = None) -> Text:
        """Add text."""
        return super().append(printable(text) if isinstance(text, str) else text, style)


def frame(
    runs: Sequence[Run],
    patterns: Sequence[str] | None,
    console: Console,
    *,
    height: int | None = None,
) -> RenderableType:
    """Draw the data read from some runs.

    Args:
        runs: Each has its own colour, the same in every chart.
        patterns: Names of metrics, in which ``*`` matches any text; None for all.
        console: Its full width is used.
        height: The number of lines; charts that do not fit are left out and named. None for no
            limit.

    Returns:
        An object that rich can print.
    """
    plain = console.options.ascii_only
    series = [run.metrics for run in runs]
    metrics = list(dict.fromkeys(name for one_series in series for name in one_series))
    names, parts = metrics, [_about(run, _COLOURS[i % len(_COLOURS)]) for i, run in enumerate(runs)]
    if patterns is not None:
        hits = {pattern: [n for n in metrics if fnmatchcase(n, pattern)] for pattern in patterns}
        names = list(dict.fromkeys(name for matches in hits.values() for name in matches))
        if metrics and (without := [pattern for pattern, matches in hits.items() if not matches]):
            text = f"Not recorded so far: {', '.join(without)}. There are: {', '.join(metrics)}."
            parts.append(_Text(text, style="yellow"))
    head = Group(*parts)
    across = max(1, min(len(names), console.width // _WIDTH))
    width = console.width // across
    around = 2 + len(runs)  # the frame of a chart, and a line for each run
    curve, shown = 9, len(names)
    if height is not None:
        # One line stays free for the names of omitted charts.
        room = height - len(console.render_lines(head)) - 1
        down = max(1, min(math.ceil(len(names) / across), room // (_LOWEST + around)))
        curve = max(3, min(_HIGHEST, room // down - around))
        shown = down * across
    grid = Table.grid(expand=False)
    for _ in range(across):
        grid.add_column(width=width)
    of_runs = [
        (run.name if len(runs) > 1 else "", one_series)
        for run, one_series in zip(runs, series, strict=True)
    ]
    charts = [_chart(name, of_runs, width, curve, plain=plain) for name in names[:shown]]
    for first in range(0, len(charts), across):
        grid.add_row(*charts[first : first + across])
    if not (left := names[shown:]):
        return Group(head, grid)
    text = f"No room for {', '.join(left)}; choose with --metrics."
    return Group(head, grid, _Text(text, style="dim", overflow="ellipsis", no_wrap=True))


def _about(run: Run, colour: int) -> Text:
    """Return the progress of a run."""
    record = run.record
    text = _Text.assemble(("● ", f"color({colour})"), (run.name, "bold"))
    style = _STYLES.get(run_summary.KINDS.get(run.status, ""), "dim")
    text.append(f"  {run.status}", style)
    if not record.exists:
        text.append(f"  for {record.path}", "dim")
        if below := sorted(path.parent.name for path in record.path.parent.glob(f"*/{RECORD}")):
            text.append(f"\n  Runs in that folder: {', '.join(below)}.")
        return text
    steps, times, epochs = (column[np.isfinite(column)] for column in record.columns())
    rate = record.speed(_RATE_OVER)
    facts = [f"step {steps[-1]:.0f}"] if len(steps) else []
    facts += [f"epoch {epochs[-1] + 1:.0f}"] if len(epochs) else []
    facts += [f"{rate:.3g} steps/s"] if rate is not None else []
    facts += [f"ran for {run_summary.duration(run.seconds)}"] if run.seconds else []
    facts.append(f"last record {_clock(times[-1])}" if len(times) else "nothing recorded yet")
    facts += [f"checkpoint {run.checkpoint}"] if run.checkpoint else []
    text.append("  " + ", ".join(facts))
    if run.error:
        text.append(f"\n  {run.error.strip().splitlines()[-1]}", "red")
    if (damage := record.damage) is not None:
        text.append(f"\n  {damage}", "red")
    return text


def _clock(seconds: float) -> str:
    when, now = datetime.fromtimestamp(seconds).astimezone(), datetime.now().astimezone()
    return when.strftime("%H:%M:%S" if when.date() == now.date() else "%Y-%m-%d %H:%M")


def _chart(
    name: str,
    runs: Sequence[tuple[str, dict[str, Series]]],
    width: int,
    height: int,
    *,
    plain: bool,
) -> Panel:
    lines: list[tuple[Series, int]] = []
    below = []
    for number, (label, metrics) in enumerate(runs):
        colour, series = _COLOURS[number % len(_COLOURS)], metrics.get(name)
        if series is not None and series.finite.any():
            lines.append((series, colour))
        below.append(_values(label and f"{label}  ", series, colour, plain=plain))
    curve = _curve(lines, width - 4, height, plain=plain) if lines else Text("\n" * (height - 1))
    return Panel(Group(curve, *below), title=_Text(name, style="bold"), title_align="left")


def _values(label: str, series: Series | None, colour: int, *, plain: bool) -> Text:
    """Return the last value of a run, its lowest and its highest."""
    text = _Text(no_wrap=True, overflow="ellipsis").append(label, f"color({colour})")
    if series is None:
        return text.append("-", "dim")
    summary = run_summary.summary_of(series)
    last, _ = summary.last
    text.append(f"{last:.5g}", "bold" if math.isfinite(last) else "bold red")
    if summary.bad:
        text.append(f"  {summary.bad} not finite", "red")
    marks = ("min", "max") if plain else ("↓", "↑")
    for mark, value in zip(marks, (summary.low, summary.high), strict=True):
        if value:
            text.append(f"  {mark} {value[0]:.4g} @{value[1]}")
    return text


def _curve(lines: Sequence[tuple[Series, int]], width: int, height: int, *, plain: bool) -> Text:
    import plotext

    points = [(s.steps[s.finite], s.values[s.finite], colour) for s, colour in lines]
    low = min(float(values.min()) for _, values, _ in points)
    high = max(float(values.max()) for _, values, _ in points)
    first = min(float(steps[0]) for steps, _, _ in points)
    last = max(float(steps[-1]) for steps, _, _ in points)

    def share(values: Any) -> Any:
        """Return positions between the lowest (0) and highest (1); 0.5 if both are equal."""
        span = high / 2 - low / 2  # halved, since the whole span may overflow
        return (values / 2 - low / 2) / span if span else values * 0 + 0.5

    plotext.clear_figure()
    plotext.theme("clear")
    plotext.limit_size(False, False)
    plotext.plotsize(width, height)
    plotext.xaxes(True, False)
    plotext.yaxes(True, False)
    for steps, values, colour in points:
        x, y = thinned(steps, values, 2 * width)
        # Heights between 0 and 1: plotext cannot draw values near the limits of floats.
        marker = "*" if plain else "braille"
        plotext.plot(x.tolist(), share(y).tolist(), marker=marker, color=colour)
    plotext.ylim(0, 1)
    ticks = {share(value): f"{value:.4g}" for value in (low, low / 2 + high / 2, high)}
    plotext.yticks(list(ticks), list(ticks.values()))
    marks = list(dict.fromkeys((first, (first + last) // 2, last)))
    plotext.xticks(marks, [f"{step:.0f}" for step in marks])
    drawn = Text.from_ansi(plotext.build().rstrip())
    if plain:
        drawn = Text(drawn.plain.translate(str.maketrans("┤┬─│┌┐└┘┼├┴", "++-|+++++++")))
    drawn.no_wrap = True
    return drawn
