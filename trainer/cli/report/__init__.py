"""The command `trainer report`: an HTML page about one or more runs, which needs no network."""

from __future__ import annotations

import argparse
from pathlib import Path

from trainer.cli.parsing import CommandError, aligned, command_parser, echo

_PRINTED = 20  # maximum number of best trials to print


def parser(prog: str) -> argparse.ArgumentParser:
    """Return the parser of `trainer report`."""
    made = command_parser(
        prog,
        "Write an HTML page about a run, or comparing several: curves, hyper-parameters, "
        "checkpoints, speed, images, warnings. Neither the command nor the page uses the network.",
        examples=[
            ("a run", "runs/digits"),
            ("three runs, compared", "runs/seed-0 runs/seed-1 runs/seed-2 --output seeds.html"),
            ("all trials of a sweep", "runs/sweep"),
        ],
        codes={0: "the page is written", 1: "a folder has no run"},
    )
    text = "the folder of a run (project_dir) or of runs, or a record (.jsonl)"
    made.add_argument("folders", type=Path, nargs="+", metavar="RUN_DIR", help=text)
    text, default = "the page, replaced if it exists (default: %(default)s)", Path("report.html")
    made.add_argument("-o", "--output", type=Path, metavar="FILE", default=default, help=text)
    made.add_argument("--title", help="the page's title; by default the runs' names")
    return made


def run(arguments: argparse.Namespace) -> int:
    """Write the page; print the best runs if their parameters differ.

    Raises:
        CommandError: A folder neither is nor contains a run.
        OSError: A record cannot be read, or the page cannot be written.
    """
    from trainer.checkpoint.storage import write_whole
    from trainer.cli.inventory import size_text
    from trainer.cli.report.page import page
    from trainer.cli.run_summary import short, trials
    from trainer.cli.runs import read_runs

    runs = read_runs(arguments.folders)
    text = page(runs, title=arguments.title)
    output: Path = arguments.output.expanduser()
    if output.is_dir():
        raise CommandError(f"--output {output} is a folder; give the name of a file in it.")
    output.parent.mkdir(parents=True, exist_ok=True)
    # A name may contain a lone surrogate, from a path that is not UTF-8 for example.
    content = text.encode(errors="replace")
    write_whole(output, lambda file: file.write_bytes(content))
    if (found := trials(runs)) is not None:
        rows = [["run", f"{found.mode} {found.metric}" if found.metric else "", *found.names]]
        rows += [
            [runs[index].name, short(score[0]) if score else "-", *(text or "-" for text in texts)]
            for index, score, texts in found.rows[:_PRINTED]
        ]
        echo(aligned(rows))
    echo(f"{output} ({size_text(len(content))})")
    return 0
