"""What the parsers of all commands have in common."""

from __future__ import annotations

import argparse
import importlib
import os
import re
import signal
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NoReturn

from trainer.errors import choose


class CommandError(Exception):
    """What ends a command with a message for the user, without a traceback.

    Attributes:
        code: The exit code of the process.
    """

    def __init__(self, message: str, code: int = 1) -> None:
        super().__init__(message)
        self.code = code


class UsageError(CommandError):
    """A command line that makes no sense; the message is whole, with the usage before it."""


class Parser(argparse.ArgumentParser):
    """Raises what is wrong, and says which option comes nearest to one that nobody knows.

    Argparse prints it instead: each of several processes would.
    """

    def error(self, message: str) -> NoReturn:
        """Refuse the command line.

        Raises:
            UsageError: Always, with the text of argparse.
        """
        unknown = re.match(r"unrecognized arguments: (-[^\s=]*)", message)
        near = get_close_matches(unknown[1], self._option_string_actions, n=1) if unknown else []
        hint = f". Did you mean {near[0]}?" if near else ""
        raise UsageError(f"{self.format_usage()}{self.prog}: error: {message}{hint}", 2)


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
    epilog += "exit codes:\n" + "\n".join(
        f"  {code:<4} {what}" for code, what in sorted(meanings.items())
    )
    return Parser(
        prog=prog,
        description=description,
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )


def named(paths: Iterable[Path]) -> list[tuple[Path, str]]:
    """Each path once, with as many of its last parts as tell it from the others."""
    given = [path.expanduser() for path in paths]
    # What is behind a link and `..` only the disk knows.
    known = [path.resolve() if ".." in path.parts else path.absolute() for path in given]
    whole = list(dict.fromkeys(known))
    for length in range(1, max(len(path.parts) for path in whole) + 1):
        names = ["/".join(path.parts[-length:]).replace("//", "/") for path in whole]
        if len(set(names)) == len(names):
            break
    return list(zip(whole, names, strict=True))


def count(text: str) -> int:
    """A number of 1 or more.

    Raises:
        argparse.ArgumentTypeError: It is something else.
    """
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} must be a number of 1 or more")
    return int(text)


@contextmanager
def ended_at_once() -> Iterator[None]:
    """Inside, Ctrl-C ends the process without a word; for where torch may be loaded.

    That takes seconds in which ``KeyboardInterrupt`` is taken for something else and forgotten, by
    C code that imports numpy, and the command would go on.
    """
    usual = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if not usual or threading.current_thread() is not threading.main_thread():
        yield
        return
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def import_from_here() -> None:
    """Let modules of the working folder be imported, as ``python -m`` does.

    A command that is a script has the script's folder in that place.
    """
    here = os.getcwd()
    if here not in sys.path and "" not in sys.path:
        sys.path.insert(0, here)


def import_named(path: str) -> Any:
    """What ``module:name`` stands for; the name may have dots.

    Raises:
        CommandError: There is no such module or no such name in it. What goes wrong inside the
            module is raised as it is.
    """
    module_name, _, name = path.partition(":")
    try:
        if module_name[:1] in ("", "."):  # which is another error there
            raise ModuleNotFoundError(name=module_name)
        found: Any = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise
        file = os.path.relpath(module_name or ".").removesuffix(".py").replace(os.sep, ".")
        is_file = file != module_name and all(part.isidentifier() for part in file.split("."))
        near = f" Did you mean {f'{file}:{name}'!r}?" if is_file else ""
        raise CommandError(
            f"There is no module {error.name!r}. Modules are looked for among the installed ones "
            f"and in the current folder, {os.getcwd()}.{near}"
        ) from None
    for part in name.split("."):
        if not hasattr(found, part):
            where = getattr(found, "__name__", path)
            raise CommandError(
                choose(f"A name in {where}", part, (each for each in vars(found) if each[0] != "_"))
            )
        found = getattr(found, part)
    return found
