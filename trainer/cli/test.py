"""The command `trainer test`: check that several processes work together on this machine."""

from __future__ import annotations

import argparse
from pathlib import Path

from trainer._siblings import shadows
from trainer.cli import launch
from trainer.cli.parsing import CommandError, command_parser, count


def parser(prog: str) -> argparse.ArgumentParser:
    """Return the parser of `trainer test`."""
    made = command_parser(
        prog,
        "Start processes as `trainer launch` would, and check that they work together: "
        "collectives, data order, accumulation, checkpoints and metrics. `trainer test-model` "
        "tests a model.",
        examples=[
            ("with the settings saved by `trainer config`", ""),
            ("two processes on the CPU", "--cpu --num_processes 2"),
            ("another file", "--config_file four.yaml"),
        ],
        codes={0: "all checks passed", 1: "a check or a process failed"},
    )
    add = made.add_argument
    add("--config_file", "--config-file", metavar="FILE", help="a file of `trainer config`")
    add("--cpu", action="store_true", help="use the CPU even if there is an accelerator")
    add("files", nargs="*", help=argparse.SUPPRESS)  # for users who mean another command
    what = "processes on all machines together"
    add("--num_processes", "--num-processes", type=count, metavar="N", help=what)
    return made


def run(arguments: argparse.Namespace) -> int:
    """Run the checks in all processes; return the exit code.

    Raises:
        CommandError: A model file was passed, the configuration file is invalid, or a file in this
            folder shadows our packages.
    """
    if arguments.files:
        file = arguments.files[0]
        other = f"launch {file}` runs a script" if file.endswith(".py") else ""
        other = other or f"test-model {file}` tests the model of a configuration"
        raise CommandError(
            "this checks that processes work together on this machine, and takes no file: "
            f"`trainer {other}.",
            code=2,
        )
    if in_the_way := shadows(Path.cwd()):  # python -m would import it
        raise CommandError(
            f"{in_the_way[0]} is imported instead of Cadence's package by scripts in this folder; "
            "start the test in another folder."
        )
    given = ["--cpu"] if arguments.cpu else []
    for name in ("config_file", "num_processes"):
        value = getattr(arguments, name)
        if value is not None:
            given += [f"--{name}", str(value)]
    command = [*given, "--module", "trainer.cli.selftest"]
    return launch.run(launch.parser("trainer test").parse_args(command))
