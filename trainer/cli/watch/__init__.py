"""The command `trainer watch`: plot the metrics of runs in the terminal while they are running.

``follow`` reads what a run appends to its record, ``frame`` draws it. Nothing is written, and runs
are not affected.
"""

from __future__ import annotations

import argparse
import io
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from trainer.cli.parsing import CommandError, command_parser, named
from trainer.cli.watch.follow import Run

if TYPE_CHECKING:
    from rich.console import Console


def parser(prog: str) -> argparse.ArgumentParser:
    """Return the parser of `trainer watch`."""
    made = command_parser(
        prog,
        "Plot the metrics of runs in the terminal while they are running. Ctrl-C ends the command "
        "and leaves the runs alone.",
        examples=[
            ("follow a run", "runs/digits"),
            ("some metrics of two runs, in the same charts", "runs/a runs/b --metrics 'val/*',lr"),
            ("print one frame and exit, as is done without a terminal", "runs/a --once"),
        ],
        codes={0: "done", 1: "--once, and a run has no record"},
    )
    made.add_argument(
        "runs",
        type=Path,
        nargs="+",
        metavar="RUN_DIR",
        help="the folder of a run, whose metrics.jsonl is followed; or such a file",
    )
    made.add_argument(
        "--metrics",
        type=_names,
        metavar="NAME,…",
        help="only these, in this order; * matches anything",
    )
    made.add_argument(
        "--interval",
        type=_seconds,
        default=1.0,
        metavar="SECONDS",
        help="how often to check for new values (default: 1)",
    )
    made.add_argument("--once", action="store_true", help="show the current state and exit")
    return made


def run(arguments: argparse.Namespace) -> int:
    """Carry out the command; without `--once`, on a terminal, it ends with `KeyboardInterrupt`.

    Returns:
        0, or 1 if a run has no record.

    Raises:
        CommandError: rich or plotext is not installed.
        argparse.ArgumentTypeError: A path is neither a folder nor a record.
        OSError: A record cannot be read.
    """
    _check_installed()
    from rich.console import Console

    runs = [Run(path, name) for path, name in named(arguments.runs)]
    if isinstance(sys.stdout, io.TextIOWrapper):  # for terminals without such characters
        sys.stdout.reconfigure(errors="replace")
    console = Console()
    if arguments.once or not sys.stdout.isatty() or console.is_dumb_terminal:
        return _once(runs, arguments.metrics, console)
    return _follow(runs, arguments.metrics, arguments.interval, console)


def _once(runs: Sequence[Run], patterns: Sequence[str] | None, console: Console) -> int:
    from trainer.cli.watch.frame import frame

    for each in runs:
        each.read()
    console.print(frame(runs, patterns, console))
    return int(not all(each.has_record for each in runs))


def _follow(
    runs: Sequence[Run], patterns: Sequence[str] | None, interval: float, console: Console
) -> int:
    from rich.live import Live

    from trainer.cli.watch.frame import frame

    for each in runs:
        each.read()
    try:
        with Live(
            frame(runs, patterns, console, height=console.height),
            console=console,
            screen=True,
            auto_refresh=False,
        ) as live:
            size = console.size
            while True:
                time.sleep(interval)
                came = [each.read() for each in runs]
                if any(came) or console.size != size:
                    size = console.size
                    shown = frame(runs, patterns, console, height=console.height)
                    live.update(shown, refresh=True)
    finally:  # the alternate screen is closed: leave the last frame on the normal one
        console.print(frame(runs, patterns, console))


def _names(text: str) -> list[str]:
    return [name for name in (part.strip() for part in text.split(",")) if name]


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0.05 <= value <= 3600:
        raise argparse.ArgumentTypeError(f"{text!r} must be a number of seconds from 0.05 to 3600")
    return value


def _check_installed() -> None:
    from importlib.util import find_spec

    missing = [name for name in ("rich", "plotext") if find_spec(name) is None]
    if missing:
        raise CommandError(
            f"needs {' and '.join(missing)}: pip install 'cadence-trainer[watch]'. Without it, "
            "`trackers.read_metrics` reads a record."
        )
