"""What the parsers of all commands have in common."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence


class CommandError(Exception):
    """What ends a command with a message for the user, without a traceback.

    Attributes:
        code: The exit code of the process.
    """

    def __init__(self, message: str, code: int = 1) -> None:
        super().__init__(message)
        self.code = code


def command_parser(
    prog: str,
    description: str,
    *,
    examples: Sequence[tuple[str, str]] = (),
    codes: Mapping[int, str] | None = None,
) -> argparse.ArgumentParser:
    """A parser whose help ends with examples and the exit codes.

    Args:
        prog: What the user typed: ``"trainer checkpoints"``.
        description: What the command does.
        examples: What an example shows, and its arguments.
        codes: What each exit code says; 2 is a wrong usage and 130 Ctrl-C in all commands.
    """
    shown = [f"  # {what}\n  {prog} {line}".rstrip() for what, line in examples]
    meanings = {**(codes or {0: "done"}), 2: "wrong usage", 130: "Ctrl-C"}
    epilog = "examples:\n" + "\n".join(shown) + "\n\n" if shown else ""
    epilog += "exit codes:\n" + "\n".join(f"  {code:<4} {what}" for code, what in meanings.items())
    return argparse.ArgumentParser(
        prog=prog,
        description=description,
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )


def count(text: str) -> int:
    """A number of 1 or more.

    Raises:
        argparse.ArgumentTypeError: It is something else.
    """
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} must be a number of 1 or more")
    return int(text)
