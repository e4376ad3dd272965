"""One frame of `trainer watch`: a line about each run and a chart for each metric."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from datetime import datetime, timedelta
from fnmatch import fnmatchcase
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.panel import Panel
from rich.style import Style
from rich.table import Table
from rich.text import Text

from trainer.cli.watch.follow import Run, Series
from trainer.errors import printable

_COLOURS = (6, 3, 5, 2, 4, 1)  # of the terminal's own palette, which suits its background
_WIDTH = 46  # minimum columns of a chart, if the terminal has as many
_LOWEST, _HIGHEST = 5, 16  # minimum and maximum lines of a curve
_STATES = {
    "running": "green",
    "finished": "green",
    "preempted": "yellow",
    "killed": "red",
    "failed": "red",
}


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
    """Draw what was read of some runs.

    Args:
        runs: Each has its own colour, the same in every chart.
        patterns: Names of metrics, in which ``*`` matches anything; None for all.
        console: Its full width is used.
        height: The number of lines; charts that do not fit are left out and named. None for no
            limit.

    Returns:
        Something for rich to print.
    """
    plain = console.options.ascii_only
    names, notes = _chosen(runs, patterns)
    head = Group(*(_about(run, _COLOURS[i % len(_COLOURS)]) for i, run in enumerate(runs)), *notes)
    across = max(1, min(len(names), console.width // _WIDTH))
    width = console.width // across
    around = 2 + len(runs)  # the frame of a chart, and a line for each run
    curve, shown = 9, len(names)
    if height is not None:
        # One line stays free for the names of what is left out.
        room = height - len(console.render_lines(head)) - 1
        down = max(1, min(math.ceil(len(names) / across), room // (_LOWEST + around)))
        curve = max(3, min(_HIGHEST, room // down - around))
        shown = down * across
    grid = Table.grid(expand=False)
    for _ in range(across):
        grid.add_column(width=width)
    charts = [_chart(name, runs, width, curve, plain=plain) for name in names[:shown]]
    for first in range(0, len(charts), across):
        grid.add_row(*charts[first : first + across])
    parts: list[RenderableType] = [head, grid]
    if left := names[shown:]:
        text = f"No room for {', '.join(left)}; choose with --metrics."
        parts.append(_Text(text, style="dim", overflow="ellipsis", no_wrap=True))
    return Group(*parts)


def _chosen(
    runs: Sequence[Run], patterns: Sequence[str] | None
) -> tuple[list[str], list[RenderableType]]:
    """Return the names of the metrics to show, and a note about patterns without a match."""
    known = list(dict.fromkeys(name for run in runs for name in run.series))
    if patterns is None:
        return known, []
    hits = {pattern: [n for n in known if fnmatchcase(n, pattern)] for pattern in patterns}
    chosen = list(dict.fromkeys(name for found in hits.values() for name in found))
    without = [pattern for pattern, found in hits.items() if not found]
    if not (without and known):
        return chosen, []
    text = f"Not recorded so far: {', '.join(without)}. There are: {', '.join(known)}."
    return chosen, [_Text(text, style="yellow")]


def _about(run: Run, colour: int) -> Text:
    """Return the progress of a run."""
    text = _Text.assemble(("● ", f"color({colour})"), (run.name, "bold"))
    if run.state:
        text.append(f"  {run.state}", _STATES.get(run.state, "dim"))
    if not run.has_record:
        text.append(f"  for {run.path}", "dim")
        if run.below:
            text.append(f"\n  Runs in that folder: {', '.join(run.below)}.")
        return text
    facts = [
        f"step {run.step}" if run.step is not None else "",
        f"epoch {run.epoch}" if run.epoch is not None else "",
        f"{run.rate:.3g} steps/s" if run.rate is not None else "",
        f"{timedelta(seconds=round(run.seconds))}" if run.seconds else "",
        f"last record {_clock(run.time)}" if run.time is not None else "nothing recorded yet",
        f"checkpoint {run.checkpoint}" if run.checkpoint else "",
    ]
    text.append("  " + " · ".join(fact for fact in facts if fact))
    if run.error:
        text.append(f"\n  {run.error.splitlines()[-1]}", "red")
    if run.damaged:
        lines = "1 line was" if len(run.damaged) == 1 else f"{len(run.damaged)} lines were"
        text.append(f"\n  {lines} skipped as damaged. {run.damaged[0]}", "red")
    return text


def _clock(seconds: float) -> str:
    when, now = datetime.fromtimestamp(seconds).astimezone(), datetime.now().astimezone()
    return when.strftime("%H:%M:%S" if when.date() == now.date() else "%Y-%m-%d %H:%M")


def _chart(name: str, runs: Sequence[Run], width: int, height: int, *, plain: bool) -> Panel:
    lines: list[tuple[Series, int]] = []
    below = []
    for number, run in enumerate(runs):
        colour = _COLOURS[number % len(_COLOURS)]
        series = run.series.get(name)
        if series is not None and len(series.values):
            lines.append((series, colour))
        label = f"{run.name}  " if len(runs) > 1 else ""
        below.append(_values(label, series, colour, plain=plain))
    if lines:
        curve = _curve(lines, width - 4, height, plain=plain)
    else:
        curve = Text("\n" * (height - 1))
    return Panel(Group(curve, *below), title=_Text(name, style="bold"), title_align="left")


def _values(label: str, series: Series | None, colour: int, *, plain: bool) -> Text:
    """Return the last value of a run, its lowest and its highest."""
    text = _Text(no_wrap=True, overflow="ellipsis").append(label, f"color({colour})")
    if series is None:
        return text.append("-", "dim")
    down, up = ("min", "max") if plain else ("↓", "↑")
    text.append(f"{series.last:.5g}", "bold" if math.isfinite(series.last) else "bold red")
    if series.not_finite:
        text.append(f"  {series.not_finite} not finite", "red")
    if series.lowest and series.highest:
        text.append(f"  {down} {series.lowest[0]:.4g} @{series.lowest[1]:.0f}")
        text.append(f"  {up} {series.highest[0]:.4g} @{series.highest[1]:.0f}")
    return text


def _curve(lines: Sequence[tuple[Series, int]], width: int, height: int, *, plain: bool) -> Text:
    import plotext

    low = min(series.lowest[0] for series, _ in lines if series.lowest)
    high = max(series.highest[0] for series, _ in lines if series.highest)
    first = min(series.steps[0] for series, _ in lines)
    last = max(series.steps[-1] for series, _ in lines)
    plotext.clear_figure()
    plotext.theme("clear")
    plotext.limit_size(False, False)
    plotext.plotsize(width, height)
    plotext.xaxes(True, False)
    plotext.yaxes(True, False)
    for series, colour in lines:
        steps, values = _thinned(series, 2 * width)
        # Heights between 0 and 1: plotext cannot draw values near the limits of floats.
        heights = [_share(value, low, high) for value in values]
        plotext.plot(steps, heights, marker="*" if plain else "braille", color=colour)
    plotext.ylim(0, 1)
    middle = low / 2 + high / 2
    ticks = {_share(value, low, high): f"{value:.4g}" for value in (low, middle, high)}
    plotext.yticks(list(ticks), list(ticks.values()))
    steps = list(dict.fromkeys((first, (first + last) // 2, last)))
    plotext.xticks(steps, [f"{step:.0f}" for step in steps])
    drawn = Text.from_ansi(plotext.build().rstrip())
    if plain:
        drawn = Text(drawn.plain.translate(str.maketrans("┤┬─│┌┐└┘┼├┴", "++-|+++++++")))
    drawn.no_wrap = True
    return drawn


def _share(value: float, low: float, high: float) -> float:
    """Return the position of a value between the lowest (0) and highest (1); 0.5 if both agree."""
    span = high / 2 - low / 2  # in halves: the whole span may overflow
    return (value / 2 - low / 2) / span if span else 0.5


def _thinned(series: Series, parts: int) -> tuple[list[float], list[float]]:
    """Return as many points as can be seen: the lowest and highest of each part, in order."""
    count = len(series.values)
    if count <= 2 * parts:
        return list(series.steps), list(series.values)
    kept = list(_extremes(series, parts))
    return [series.steps[i] for i in kept], [series.values[i] for i in kept]


def _extremes(series: Series, parts: int) -> Iterator[int]:
    count = len(series.values)
    for part in range(parts):
        places = range(part * count // parts, (part + 1) * count // parts)
        value = series.values.__getitem__
        yield from sorted({min(places, key=value), max(places, key=value)})
