"""The chart of CPU time relative to the loop written by hand, from the JSON of `overhead`."""

from __future__ import annotations

from pathlib import Path

from benchmarks.report import Result, Unavailable


def draw(folder: Path) -> Path:
    """Draw ``overhead.svg`` next to its JSON.

    Raises:
        Unavailable: matplotlib is not installed, or ``overhead.json`` does not exist.
    """
    path = folder / "overhead.json"
    if not path.exists():
        raise Unavailable(f"{path} does not exist: run python -m benchmarks overhead first.")
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise Unavailable("The chart needs matplotlib: pip install matplotlib.") from error
    result = Result.load(path)
    group = result.rows[0].group
    rows = [row for row in result.rows if row.void is None and row.group == group][::-1]
    bars = [row.values["cpu_ratio"] for row in rows]
    figure = Figure(figsize=(8, 0.8 + 0.34 * len(rows)), layout="constrained")
    axes = figure.add_subplot()
    middles = [bar[0] for bar in bars]
    spread = [[bar[0] - bar[1] for bar in bars], [bar[2] - bar[0] for bar in bars]]
    colours = ["#1f77b4" if row.name.startswith("Cadence") else "#b0b0b0" for row in rows]
    drawn = axes.barh([row.name for row in rows], middles, xerr=spread, color=colours)
    axes.bar_label(drawn, labels=[f"{middle:.2f}" for middle in middles], padding=4, fontsize=8)
    axes.axvline(1, color="black", linewidth=0.8)
    axes.set_xlabel("CPU time of a step, as a multiple of the loop by hand (median and quartiles)")
    axes.set_title(f"{result.title}, {group}", fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)
    axes.margins(x=0.1)
    drawing = folder / "overhead.svg"
    figure.savefig(drawing, metadata={"Date": None})
    return drawing
