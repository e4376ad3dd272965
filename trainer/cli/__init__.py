"""The command `trainer`.

Each command is a module of this package with two functions: ``parser(prog)`` returns its argument
parser, ``run(arguments)`` does the work and returns the exit code. Only the module of the requested
command is imported.
"""

from __future__ import annotations

import argparse
import io
import os
import sys
from collections.abc import Sequence
from importlib import import_module

from trainer._siblings import version
from trainer.checks import choice_error
from trainer.cli.parsing import CommandError, Parser, UsageError, echo, sigint_default
from trainer.launch import LaunchError

# command: (its module in this package, a summary)
COMMANDS = {
    "config": ("config", "create the configuration file of trainer launch"),
    "launch": ("launch", "run a script in one or more processes, on one or more machines"),
    "test": ("test", "check this machine: start processes, and see that they work together"),
    "env": ("env", "show the versions, the devices, the configuration and the files in use"),
    "checkpoints": ("checkpoints", "list a folder's checkpoints, verify them or remove old ones"),
    "report": ("report", "write an HTML page about a run, or comparing several"),
    "watch": ("watch", "plot the metrics of runs in the terminal while they are running"),
    "fit": ("fit", "train a model described by configuration files and options"),
    "validate": ("fit", "evaluate such a model on its validation data"),
    "test-model": ("fit", "evaluate such a model on its test data (`test` checks the machine)"),
    "predict": ("fit", "write the predictions of such a model to files"),
    "estimate-memory": ("estimate_memory", "estimate how much memory training a model needs"),
    "merge-weights": ("merge_weights", "merge a checkpoint's shards into one safetensors file"),
    "migrate": (
        "migrate",
        "list the parts of a program for another library that Cadence does not support",
    ),
    "completion": ("completion", "print a completion script for bash, zsh or fish"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv`, by default the process's; return the exit code.

    Errors are printed, so the caller can continue; see `program` for a process that ends with them.

    Raises:
        SystemExit: Help or the version was shown; see also `trainer.cli.fit.run`.
    """
    try:
        return _run(sys.argv[1:] if argv is None else list(argv))
    except CommandError as error:
        echo(error, error=True)
        return error.code


def program() -> int:
    """Run the command line of a process that exits with the returned code.

    Raises:
        SystemExit: See `main`. Also raised for an error that ends the process; the error is
            reported once even if many processes end with it.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):  # unencodable characters must not fail
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        return _run(sys.argv[1:])
    except CommandError as error:
        from trainer.cli.error_reporting import (  # slow import, only needed for errors
            Reported,
            report,
        )

        report(str(error), error.code)
        raise Reported(error.code) from None


def _run(argv: list[str]) -> int:
    """Run a command line.

    Raises:
        CommandError: The command failed; the message is complete.
    """
    if not argv:
        _parser().print_help()
        return 1
    if argv[0] not in COMMANDS:
        if not argv[0].startswith("-"):
            _parser().error(choice_error("COMMAND", argv[0], COMMANDS))
        _parser().parse_args(argv[:1])  # shows the help or the version, or raises
    return _run_command(argv[0], argv[1:])


def _run_command(name: str, argv: list[str]) -> int:
    try:
        os.getcwd()
    except FileNotFoundError:  # importing torch would abort the process
        raise CommandError(
            f"trainer {name}: the current folder no longer exists; change to another one."
        ) from None
    with sigint_default():
        command = import_module(f"{__name__}.{COMMANDS[name][0]}")
        parser = command.parser(f"trainer {name}")
    try:
        code: int = command.run(parser.parse_args(argv))
        sys.stdout.flush()
    except UsageError:
        raise
    except argparse.ArgumentTypeError as error:
        parser.error(str(error))
    except (FileNotFoundError, IsADirectoryError, NotADirectoryError) as error:
        named = f"{error.filename}: {error.strerror}" if error.filename else error
        raise CommandError(f"trainer {name}: {named}", 2) from error
    except BrokenPipeError:  # the reader has closed the pipe, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # flushed again at exit
        return 128 + 13  # as if ended by SIGPIPE
    except OSError as error:
        raise CommandError(f"trainer {name}: {error}") from error
    except (CommandError, LaunchError) as error:
        raise CommandError(f"trainer {name}: {error}", error.code) from error
    except KeyboardInterrupt:
        return 130
    return code


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="trainer",
        description="Cadence, a PyTorch trainer.",
        epilog="See `trainer COMMAND --help` for details and examples.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"cadence {version()}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", dest="command")
    for name, (_, what) in COMMANDS.items():
        commands.add_parser(name, help=what, add_help=False)
    return parser
