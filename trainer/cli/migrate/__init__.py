"""The command `trainer migrate`: find the parts of another library's program that need changes."""

from __future__ import annotations

import argparse
import re
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple
from warnings import catch_warnings, simplefilter

from trainer.cli.parsing import CommandError, command_parser, count, echo, sigint_default
from trainer.errors import CheckpointError

IMPORTS = "import lines and class paths are Lightning's or Accelerate's: pass --write"
"""The cause of what `--write` changes."""
_YAML = (".yaml", ".yml")
_SHOWN = 3  # number of places shown for a cause


class Finding(NamedTuple):
    """Code that will not work unchanged.

    Attributes:
        line: The line number.
        text: A description, and what to do.
        cause: The text without names specific to this place, shared with other findings.
    """

    line: int
    text: str
    cause: str


def parser(prog: str) -> argparse.ArgumentParser:
    """Return the parser of `trainer migrate`."""
    made = command_parser(
        prog,
        "List the parts of programs for Lightning, Accelerate or the Hugging Face Trainer that "
        "Cadence does not support, with line and replacement. Programs are read, not run.",
        examples=[
            ("list what to change", "train.py model.py"),
            ("change the import lines of a folder's programs, and class paths", ". --write"),
            ("each line of a folder's findings", ". --all"),
            ("convert a checkpoint of Lightning", "last.ckpt --output runs/digits/from-lightning"),
        ],
        codes={0: "nothing is left to do", 1: "something is listed, or a file cannot be read"},
    )
    text = (
        "a Python program; a YAML file of LightningCLI, for its class paths; a folder of these; or "
        "a .ckpt file of Lightning, which is converted to a checkpoint"
    )
    made.add_argument("files", type=Path, nargs="+", metavar="FILE", help=text)
    text = "change imports and class paths, to those of trainer.lightning and trainer.accelerate"
    made.add_argument("--write", action="store_true", help=text)
    text = "for a folder, show every finding with its line instead of counts by cause"
    made.add_argument("--all", action="store_true", help=text)
    add = made.add_argument_group("checkpoints").add_argument
    text = "the new folder (default: the .ckpt file's path without the suffix)"
    add("--output", type=Path, metavar="DIR", help=text)
    text = "processes of the saved run, to resume inside an epoch (default: 1)"
    add("--num_processes", type=count, metavar="N", default=1, help=text)
    return made


def run(arguments: argparse.Namespace) -> int:
    """List code that will not work unchanged, or convert a checkpoint.

    Returns:
        0 if there are no findings, else 1.

    Raises:
        CommandError: A file is neither Python nor a checkpoint, or libcst is not installed.
        OSError: A file cannot be read or written.
    """
    for path in arguments.files:
        path.stat()  # raises if it is missing, before any file is changed
    checkpoints = [path for path in arguments.files if path.suffix == ".ckpt"]
    if arguments.output is not None and len(checkpoints) != 1:
        raise argparse.ArgumentTypeError("--output needs one .ckpt file.")
    for path in checkpoints:
        _convert(path, arguments.output, arguments.num_processes)
    files = [file for path in arguments.files if path not in checkpoints for file in _files(path)]
    findings: list[tuple[Path, Finding]] = []
    unread: dict[str, None] = {}
    for path in files:
        try:
            findings += [(path, finding) for finding in _migrate(path, arguments)]
        except CommandError as error:  # the other files are examined all the same
            unread[str(error)] = None
    if arguments.all or not any(path.is_dir() for path in arguments.files):
        for path, finding in findings:
            echo(f"{path}:{finding.line}: {finding.text}")
    else:
        _echo_causes(findings)
    if unread:
        raise CommandError("\n".join(unread))
    if files and not findings:
        echo("Nothing is left to do.", error=True)
    return 1 if findings else 0


def _echo_causes(findings: Sequence[tuple[Path, Finding]]) -> None:
    """Show each cause with its number of findings and first places, most frequent first."""
    places: dict[str, list[str]] = defaultdict(list)
    for path, finding in findings:
        places[finding.cause].append(f"{path}:{finding.line}")
    for cause, lines in sorted(places.items(), key=lambda item: -len(item[1])):
        more = [f"{len(lines) - _SHOWN} more"] if len(lines) > _SHOWN else []
        echo(f"{len(lines)} x {cause}\n    {', '.join(lines[:_SHOWN] + more)}")
    if findings:
        files = len({path for path, _ in findings})
        echo(f"{len(findings)} findings in {files} files; --all shows each with its line.")


def _files(path: Path) -> list[Path]:
    """Return the programs and configurations in a folder, or the file itself.

    Raises:
        CommandError: There are no such files.
    """
    if not path.is_dir():
        return [path]
    scripts = [
        script
        for script in sorted(path.rglob("*"))
        if script.suffix in (".py", *_YAML)
        and script.is_file()
        and not any(
            part.startswith(".") or part == "site-packages"
            for part in script.relative_to(path).parts
        )
    ]
    if not scripts:
        raise CommandError(f"{path} has neither Python programs nor YAML files.", code=2)
    return scripts


def _migrate_classes(path: Path, arguments: argparse.Namespace) -> list[Finding]:
    """Examine and change the class paths of a configuration."""
    from trainer.cli.migrate.names import value_of
    from trainer.lightning.modules import CLASS_PATH, with_class_paths

    findings: list[Finding] = []
    try:
        text = path.read_bytes().decode()
    except UnicodeDecodeError as error:
        raise CommandError(f"{path} cannot be read as YAML in UTF-8: {error}") from None

    def change(match: re.Match[str]) -> str:
        new = with_class_paths(match[0])
        line = text.count("\n", 0, match.start()) + 1
        try:
            value_of(new)
        except (ImportError, AttributeError) as error:
            findings.append(Finding(line, str(error), str(error)))
            return match[0]
        if new != match[0] and not arguments.write:
            findings.append(Finding(line, f"write {new!r}, or pass --write", IMPORTS))
        return new

    changed = CLASS_PATH.sub(change, text)
    if arguments.write:
        _rewrite(path, text.encode(), changed.encode())
    return findings


def _rewrite(path: Path, text: bytes, changed: bytes) -> None:
    if changed != text:
        path.write_bytes(changed)
        echo(f"{path}: rewritten", error=True)


def _migrate(path: Path, arguments: argparse.Namespace) -> list[Finding]:
    """Examine and change a program."""
    if path.suffix in _YAML:
        return _migrate_classes(path, arguments)
    try:
        with sigint_default():
            import torch  # noqa: F401 - slow, and imported by all modules that are asked for names
            from libcst import ParserSyntaxError, parse_module
    except ModuleNotFoundError as error:
        if error.name != "libcst":
            raise
        raise CommandError(
            "migrate needs libcst, which is not installed: pip install 'cadence-trainer[migrate]'."
        ) from None
    from trainer.cli.migrate.findings import find
    from trainer.cli.migrate.rewriting import with_imports

    text = path.read_bytes()
    try:
        program = parse_module(text)
    except (ParserSyntaxError, UnicodeDecodeError) as error:
        raise CommandError(f"{path} cannot be read as Python in UTF-8: {error}") from None
    if arguments.write:
        program = with_imports(program)
    if (changed := program.bytes) != text:
        try:
            with catch_warnings():
                simplefilter("ignore")  # warnings of the program
                compile(changed, path, "exec", dont_inherit=True)
        except SyntaxError as error:
            raise CommandError(
                f"{path} is not changed; the rewritten file would fail with {error}"
            ) from None
        _rewrite(path, text, changed)
    return find(program, path, imports=not arguments.write)


def _convert(path: Path, output: Path | None, num_processes: int) -> None:
    from trainer.checkpoint.resolve import WORDS
    from trainer.lightning.checkpoint import convert_checkpoint

    try:
        made = convert_checkpoint(path, output, num_processes=num_processes)
    except CheckpointError as error:
        raise CommandError(str(error)) from None
    call = f"Module.load_from_checkpoint({str(made.path)!r})"
    if not made.weights_only:
        shown = f"./{made.path}" if str(made.path) in WORDS else str(made.path)
        call = f"trainer.fit(module, ckpt_path={shown!r})"
    echo(f"{made.path}: {call}")
    for note in made.notes:
        echo(f"  {note}")
