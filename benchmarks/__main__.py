"""``python -m benchmarks``: run a benchmark, print its table and write its JSON."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType

import torch

from benchmarks import (
    chart,
    checkpoint,
    data,
    ddp,
    fsdp,
    gpu,
    imports,
    logs,
    memory,
    overhead,
    page,
    scale,
    transformer,
)
from benchmarks.arguments import at_least, folder_at, make, part_of_one
from benchmarks.report import Result, Unavailable, say
from benchmarks.timing import LEAST_STEPS, is_chosen

RESULTS = Path(__file__).with_name("results")
BENCHMARKS: dict[str, ModuleType] = {
    "overhead": overhead,
    "data": data,
    "checkpoint": checkpoint,
    "logging": logs,
    "ddp": ddp,
    "fsdp": fsdp,
    "import": imports,
    "memory": memory,
    "transformer": transformer,
    "scale": scale,
}
NOT_HERE = 3  # the exit code when a requirement of a benchmark is missing


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    made = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description="Measure what Cadence costs. benchmarks/README.md says how to read it.",
        epilog="exit codes: 0 done, 1 a section of gpu failed, 2 wrong arguments, "
        "3 a requirement is missing",
        allow_abbrev=False,
    )
    commands = made.add_subparsers(dest="command", required=True, metavar="benchmark")
    for name, module in BENCHMARKS.items():
        summary = _summary(module)
        one = commands.add_parser(name, help=summary, description=summary, allow_abbrev=False)
        _add_common(one, module.names)
        if hasattr(module, "STEPS"):
            one.add_argument(
                "--steps", type=at_least(LEAST_STEPS), default=module.STEPS, help="steps per turn"
            )
        one.add_argument(
            "--repeats", type=at_least(1), default=module.REPEATS, help="number of rounds"
        )
        if hasattr(module, "add_arguments"):
            module.add_arguments(one)
    everything = commands.add_parser(
        "all",
        help="Run all with their defaults; draw the chart, write the README.",
        allow_abbrev=False,
    )
    _add_common(everything, _all_names)
    one = commands.add_parser(
        "gpu", help=_summary(gpu), description=_summary(gpu), allow_abbrev=False
    )
    one.add_argument(
        "--output", type=folder_at, default=gpu.RUNS, help="folder of gpu.json; default runs/gpu"
    )
    gpu.add_arguments(one)
    for name, summary in (
        ("chart", "Draw the chart of the README from the JSON."),
        ("readme", "Write the figures of the README from the JSON."),
    ):
        _add_output(
            commands.add_parser(name, help=summary, description=summary, allow_abbrev=False)
        )
    return made


def _summary(module: ModuleType) -> str:
    return (module.__doc__ or "").partition("\n")[0]


def _all_names() -> list[str]:
    return list(dict.fromkeys(name for each in BENCHMARKS.values() for name in each.names()))


def _add_output(one: argparse.ArgumentParser) -> None:
    one.add_argument(
        "--output",
        type=folder_at,
        help=f"folder of the JSON; if nothing else is given, {RESULTS.parent.name}/{RESULTS.name}",
    )


def _add_common(one: argparse.ArgumentParser, names: Callable[[], Sequence[str]]) -> None:
    _add_output(one)
    one.add_argument(
        "--rows",
        type=part_of_one(names),
        nargs="+",
        default=[],
        metavar="TEXT",
        help="only the reference and rows whose name contains a TEXT",
    )


def measure(module: ModuleType, options: argparse.Namespace) -> Result:
    """Run one benchmark, print its result and save it."""
    # a trial, or a result with some rows, must not replace a whole one
    usual = vars(options) == vars(parser().parse_args([options.command]))
    folder = options.output or (RESULTS if usual else None)
    result = module.run(options)
    print(f"\n{result.title}\n\n{result.table()}\n")
    for note in result.notes:
        print(note)
    print(result.about())
    if folder is not None:
        say(f"Written: {result.save(folder)}")
    return result


def run_all(made: argparse.ArgumentParser, options: argparse.Namespace) -> int:
    """Run in turn all benchmarks that have such rows; those that cannot run here are reported."""
    code = 0
    output = ["--output", str(options.output)] if options.output else []
    for name, module in BENCHMARKS.items():
        names = module.names()
        rows = [text for text in options.rows if any(is_chosen(each, [text]) for each in names)]
        if options.rows and not rows:
            continue
        chosen = ["--rows", *rows] if rows else []
        say(f"-- {name}")
        try:
            measure(module, made.parse_args([name, *output, *chosen]))
        except Unavailable as reason:
            say(str(reason))
            code = NOT_HERE
    if not options.rows:
        say(f"Written: {chart.draw(options.output or RESULTS)}")
    if not options.rows and options.output in (None, RESULTS):
        say(f"Written: {page.write(RESULTS)}")
    return code


def _make_folders(made: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """Make the folders before anything is measured, which would else be in vain."""
    for name in ("output", "folder"):
        folder = getattr(options, name, None)
        try:
            if folder is not None:
                make(folder)
        except OSError as error:
            made.error(f"argument --{name}: {folder}: {error.strerror}; choose another folder.")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the program.

    Args:
        arguments: The command-line arguments, by default those of the process.

    Returns:
        The exit code.
    """
    made = parser()
    options = made.parse_args(arguments)
    if options.command in (*BENCHMARKS, "all", "gpu"):
        _make_folders(made, options)
    torch.set_num_threads(1)  # the model is too small for more, whose overhead would be measured
    try:
        if options.command == "all":
            return run_all(made, options)
        if options.command == "chart":
            say(f"Written: {chart.draw(options.output or RESULTS)}")
        elif options.command == "gpu":
            return 1 if gpu.run(options) else 0
        elif options.command == "readme":
            say(f"Written: {page.write(options.output or RESULTS)}")
        else:
            measure(BENCHMARKS[options.command], options)
    except Unavailable as reason:
        say(str(reason))
        return NOT_HERE
    return 0


if __name__ == "__main__":
    sys.exit(main())
