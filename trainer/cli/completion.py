"""The command `trainer completion`: print the completion script of a shell."""

from __future__ import annotations

import argparse
from importlib import import_module
from pathlib import Path

from trainer.cli import COMMANDS
from trainer.cli.parsing import CommandError, command_parser


def parser(prog: str) -> argparse.ArgumentParser:
    """Return the parser of `trainer completion`."""
    made = command_parser(
        prog,
        "Print the script with which a shell completes the commands of `trainer`, their options "
        "and choices, and file names.",
        examples=[
            ("bash, permanently", "bash > ~/.local/share/bash-completion/completions/trainer"),
            ("zsh: in a folder of your $fpath, before compinit", "zsh > ~/.zfunc/_trainer"),
            ("fish", "fish > ~/.config/fish/completions/trainer.fish"),
        ],
        codes={0: "done", 1: "shtab is not installed"},
    )
    made.add_argument("shell", choices=("bash", "zsh", "fish"))
    return made


def run(arguments: argparse.Namespace) -> int:
    """Print the script.

    Raises:
        CommandError: shtab is not installed.
    """
    try:
        import shtab
    except ImportError:
        raise CommandError("Completion needs shtab: pip install 'cadence-trainer[cli]'.") from None
    whole = argparse.ArgumentParser(prog="trainer")  # the parser of all commands
    whole.add_argument("--version", action="store_true", help="show the version")
    commands = whole.add_subparsers()
    for name, (module, what) in COMMANDS.items():
        own = import_module(f"trainer.cli.{module}").parser(f"trainer {name}")
        commands.add_parser(name, help=what, parents=[own], add_help=False)
    _offer_files(whole, shtab.FILE)
    print(shtab.complete(whole, arguments.shell))  # noqa: T201 - a shell reads it
    return 0


def _offer_files(parser: argparse.ArgumentParser, files: object) -> None:
    """Enable file completion for path options, and for positional arguments without choices."""
    for action in parser._actions:  # argparse has no public list of actions
        if isinstance(action, argparse._SubParsersAction):
            for each in action.choices.values():
                _offer_files(each, files)
        elif action.choices is None and (action.type is Path or not action.option_strings):
            action.complete = files  # type: ignore[attr-defined]  # shtab's own attribute
