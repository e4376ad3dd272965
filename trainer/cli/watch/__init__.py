"""The command `trainer watch`: plot the metrics of runs in the terminal while they are running.

It writes no files, and does not affect runs. ``frame`` draws.
"""

from __future__ import annotations

import argparse
import io
import sys
import time
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from trainer.cli.parsing import CommandError, command_parser, named
from trainer.cli.runs import RECORD, Run

if TYPE_CHECKING:
    from rich.console import Console


def parser(prog: str) -> argparse.ArgumentParser:
    """Return the parser of `trainer watch`."""
    made = command_parser(
        prog,
        "Plot the metrics of runs in the terminal while they are running. Ctrl-C ends the "
        "command, not the runs.",
        examples=[
            ("follow a run", "runs/digits"),
            ("some metrics of two runs, in the same charts", "runs/a runs/b --metrics 'val/*',lr"),
            ("print one frame and exit; the default without a terminal", "runs/a --once"),
        ],
        codes={0: "done", 1: "--once, and a run has no record"},
    )
    add = made.add_argument
    add("runs", type=Path, nargs="+", metavar="RUN_DIR", help=f"a run's folder, or its {RECORD}")
    add("--metrics", type=_names, metavar="NAME,…", help="only these; * matches anything")
    text = "how often to check for new values (default: 1)"
    add("--interval", type=_seconds, default=1.0, metavar="SECONDS", help=text)
    add("--once", action="store_true", help="show the current state and exit")
    return made


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


def run(arguments: argparse.Namespace) -> int:
    """Carry out the command; without `--once`, on a terminal, it ends with `KeyboardInterrupt`.

    Returns:
        0, or 1 if a run has no record.

    Raises:
        CommandError: rich or plotext is not installed.
        argparse.ArgumentTypeError: A path is neither a folder nor a record.
        OSError: A record cannot be read.
    """
    if missing := [name for name in ("rich", "plotext") if find_spec(name) is None]:
        raise CommandError(
            f"needs {' and '.join(missing)}: pip install 'cadence-trainer[watch]'. Without it, "
            "`trackers.read_metrics` reads a record."
        )
    from rich.console import Console

    from trainer.cli.watch.frame import frame

    runs = [Run(path, name) for path, name in named(arguments.runs)]
    if isinstance(sys.stdout, io.TextIOWrapper):  # for terminals that lack some characters
        sys.stdout.reconfigure(errors="replace")
    console = Console()
    for followed in runs:
        followed.read()
    if not arguments.once and sys.stdout.isatty() and not console.is_dumb_terminal:
        try:
            _follow(runs, arguments.metrics, arguments.interval, console)
        finally:  # the alternate screen is closed, so print the last frame on the normal one
            console.print(frame(runs, arguments.metrics, console))
    console.print(frame(runs, arguments.metrics, console))
    return int(not all(followed.record.exists for followed in runs))


def _follow(
    runs: Sequence[Run], patterns: Sequence[str] | None, interval: float, console: Console
) -> None:
    """Redraw when something has changed, until Ctrl-C."""
    from rich.live import Live

    from trainer.cli.watch.frame import frame

    first = frame(runs, patterns, console, height=console.height)
    with Live(first, console=console, screen=True, auto_refresh=False) as live:
        size = console.size
        while True:
            time.sleep(interval)
            came = [followed.read() for followed in runs]
            if any(came) or console.size != size:
                size = console.size
                live.update(frame(runs, patterns, console, height=console.height), refresh=True)
