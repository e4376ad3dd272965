"""The command `trainer`.

Each command is a module of this package with two functions: ``parser(prog)`` makes its argument
parser, ``run(arguments)`` does the work and returns the exit code. Only the module of the command
that was asked for is loaded.
"""

from __future__ import annotations

import argparse
import io
import os
import sys
from collections.abc import Sequence
from importlib import import_module

from trainer.cli.parsing import CommandError, Parser, UsageError, ended_at_once
from trainer.cli.version import version
from trainer.errors import choose

# command: (its module in this package, what it does)
COMMANDS = {
    "config": ("config", "answer questions about how scripts are started, for launch"),
    "launch": ("launch", "start a script on one or more processes and machines"),
    "test": ("test", "start processes and check that they work together"),
    "env": ("env", "show the versions, the devices, the configuration and the files in use"),
    "checkpoints": (
        "checkpoints",
        "list the checkpoints in a folder, verify them, remove old ones",
    ),
    "report": ("report", "write one HTML page about a run, or comparing several"),
    "watch": ("watch", "show the curves of runs in the terminal while they are trained"),
    "fit": ("fit", "train what configuration files and options describe"),
    "validate": ("fit", "validate it"),
    "test-model": ("fit", "test it"),
    "predict": ("fit", "predict with it, into files"),
    "estimate-memory": ("estimate_memory", "say how much memory the training of a model needs"),
    "merge-weights": ("merge_weights", "write the shards of a checkpoint as one safetensors file"),
    "completion": ("completion", "let bash, zsh or fish complete what is typed"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv`, by default that of the process; return the exit code.

    Errors are printed: who calls this may go on. See `program` for what ends with them.

    Raises:
        SystemExit: Help or the version was shown; see also `trainer.cli.fit.run`.
    """
    try:
        return _run(sys.argv[1:] if argv is None else list(argv))
    except CommandError as error:
        print(error, file=sys.stderr, flush=True)
        return error.code


def program() -> int:
    """Run the command line of the process, which is about to exit with the code returned.

    Raises:
        SystemExit: As in `main`; or an error ends the process, which is told once however many
            processes end with it.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):  # what a terminal cannot show is no failure
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        return _run(sys.argv[1:])
    except CommandError as error:
        from trainer.cli.telling import Told, tell  # modules of launch, which only an error needs

        tell(str(error), error.code)
        raise Told(error.code) from None


def _run(argv: list[str]) -> int:
    """Run a command line.

    Raises:
        CommandError: With all that is to be said.
    """
    if not argv:
        _parser().print_help()
        return 1
    if argv[0] not in COMMANDS:
        if not argv[0].startswith("-"):
            _parser().error(choose("COMMAND", argv[0], COMMANDS))
        _parser().parse_args(argv[:1])  # shows the help or the version, or says what is wrong
    return _run_command(argv[0], argv[1:])


def _run_command(name: str, argv: list[str]) -> int:
    _check_folder(name)
    with ended_at_once():
        command = import_module(f"{__name__}.{COMMANDS[name][0]}")
        parser = command.parser(f"trainer {name}")
    try:
        code: int = command.run(parser.parse_args(argv))
        print(end="", flush=True)
    except UsageError:
        raise
    except (argparse.ArgumentTypeError, FileNotFoundError, NotADirectoryError) as error:
        parser.error(str(error))  # what was named is not there
    except BrokenPipeError:  # who reads the output has seen enough, as `head` has
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes it again
        return 128 + 13  # as of a program that SIGPIPE has ended
    except OSError as error:
        raise CommandError(f"trainer {name}: {error}") from error
    except CommandError as error:
        raise CommandError(f"trainer {name}: {error}", error.code) from error
    except KeyboardInterrupt:
        return 130
    return code


def _check_folder(name: str) -> None:
    try:
        os.getcwd()
    except FileNotFoundError:  # without which torch ends the process while it is loaded
        raise CommandError(
            f"trainer {name}: the current folder is not there any more; change to one that is."
        ) from None


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="trainer",
        description="Cadence, a PyTorch trainer.",
        epilog="`trainer COMMAND --help` says more, with examples.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"cadence {version()}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", dest="command")
    for name, (_, what) in COMMANDS.items():
        commands.add_parser(name, help=what, add_help=False)
    return parser
