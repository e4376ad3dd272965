"""Parts shared by the parsers of all commands."""

from __future__ import annotations

import argparse
import importlib
import os
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from textwrap import fill
from typing import Any, NoReturn

from trainer.checks import choice_error
from trainer.errors import echo as echo
from trainer.launch import sigint_default as sigint_default
from trainer.launch.settings import count as count
from trainer.launch.settings import truth as truth


def aligned(rows: Sequence[Sequence[str]], right: Sequence[int] = ()) -> str:
    """Return rows of texts as a table, with some columns aligned on the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]

    def line(row: Sequence[str]) -> str:
        pads = (str.rjust if at in right else str.ljust for at in range(len(widths)))
        return "  ".join(p(t, w) for p, t, w in zip(pads, row, widths, strict=True)).rstrip()

    return "\n".join(map(line, rows))


class CommandError(Exception):
    """An error that ends a command with a message for the user and no traceback.

    Attributes:
        code: The exit code of the process.
    """

    def __init__(self, message: str, code: int = 1) -> None:
        super().__init__(message)
        self.code = code


class UsageError(CommandError):
    """An invalid command line; the message is complete and starts with the usage."""


class Parser(argparse.ArgumentParser):
    """A parser that raises its errors, and names the known option nearest to an unknown one.

    Argparse itself would print them in every process.
    """

    def error(self, message: str) -> NoReturn:
        """Raise a usage error.

        Raises:
            UsageError: Always, with argparse's message.
        """
        unknown = re.match(r"unrecognized arguments: (-[^\s=]*)", message)
        near = get_close_matches(unknown[1], self._option_string_actions, n=1) if unknown else []
        hint = f". Did you mean {near[0]}?" if near else ""
        raise UsageError(f"{self.format_usage()}{self.prog}: error: {message}{hint}", 2)


def command_parser(
    prog: str,
    description: str,
    *,
    examples: Sequence[tuple[str, str]],
    codes: Mapping[int, str],
) -> argparse.ArgumentParser:
    """Return a parser whose help ends with examples and exit codes.

    Args:
        prog: The command as typed, such as ``"trainer checkpoints"``.
        description: A description of the command.
        examples: Pairs of an example's description and its arguments.
        codes: The meaning of each exit code; 2 is wrong usage and 130 Ctrl-C in all commands.
    """
    meanings = {**codes, 2: "wrong usage", 130: "Ctrl-C"}
    lines = ["examples:"]
    lines += [f"  # {meaning}\n  {prog} {line}".rstrip() for meaning, line in examples]
    lines += ["", "exit codes:"]
    lines += [f"  {code:<4} {meaning}" for code, meaning in sorted(meanings.items())]
    return Parser(
        prog=prog,
        description="\n".join(
            line if line.startswith(" ") else fill(line, 80) for line in description.splitlines()
        ),
        epilog="\n".join(lines),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )


def named(paths: Iterable[Path]) -> list[tuple[Path, str]]:
    """Return each distinct path with a unique name, made of as many last parts as needed."""
    expanded = [path.expanduser() for path in paths]
    # Only the file system knows where a `..` after a symbolic link leads.
    absolute = [path.resolve() if ".." in path.parts else path.absolute() for path in expanded]
    whole = list(dict.fromkeys(absolute))
    for length in range(1, max(len(path.parts) for path in whole) + 1):
        names = ["/".join(path.parts[-length:]).replace("//", "/") for path in whole]
        if len(set(names)) == len(names):
            break
    return list(zip(whole, names, strict=True))


def import_from_here() -> None:
    """Make modules in the current folder importable, as ``python -m`` does.

    For an installed command, ``sys.path`` starts with the folder of its script instead.
    """
    folder = os.getcwd()
    if folder not in sys.path and "" not in sys.path:
        sys.path.insert(0, folder)


def import_named(path: str) -> Any:
    """Import and return ``module:name``; the name may contain dots.

    Raises:
        CommandError: The module, or the name in it, does not exist. Errors raised inside the module
            propagate unchanged.
    """
    module, _, name = path.partition(":")
    try:
        value: Any = importlib.import_module(module)
    except (ModuleNotFoundError, TypeError, ValueError) as error:  # others: for ".x" and ""
        missing = getattr(error, "name", None) or module
        if not f"{module}.".startswith(f"{missing}."):
            raise
        near = module.removeprefix("./").removesuffix(".py").replace(os.sep, ".")
        is_file = near != module and all(map(str.isidentifier, near.split(".")))
        hint = f" Did you mean {f'{near}:{name}'!r}?" if is_file else ""
        raise CommandError(
            f"There is no module {missing!r}, neither installed nor in the current folder, "
            f"{os.getcwd()}.{hint}"
        ) from None
    for part in name.split("."):
        if not hasattr(value, part):
            where = getattr(value, "__name__", path)
            names = (attribute for attribute in vars(value) if attribute[0] != "_")
            raise CommandError(choice_error(f"A name in {where}", part, names))
        value = getattr(value, part)
    return value
