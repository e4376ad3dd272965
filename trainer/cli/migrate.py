"""The command `trainer migrate`: what of a program for another library will not carry over."""

from __future__ import annotations

import argparse
import ast
from contextlib import suppress
from importlib import import_module
from inspect import isclass, signature
from pathlib import Path
from typing import Any, NamedTuple

from trainer.cli.parsing import CommandError, command_parser, echo, ended_at_once
from trainer.cli.parsing import count as parsed_count
from trainer.errors import CheckpointError

MOVED = {
    "accelerate": "trainer.accelerate",
    "lightning": "trainer.lightning",
    "pytorch_lightning": "trainer.lightning.pytorch",
}
"""Package: where its names are here."""

_FABRIC = "use trainer.Accelerator, for a loop of your own"
_REFUSED = {"lightning.fabric": _FABRIC, "lightning_fabric": _FABRIC}
_LISTED = ("lightning_fabric", "transformers")  # their imports are not changed
_PAGE = "see docs/migrating.md"
_HUGGING_FACE = {
    "Trainer": "write a trainer.TrainModule with a training_step, and use trainer.Trainer",
    "Seq2SeqTrainer": "write a trainer.TrainModule with a training_step, and use trainer.Trainer",
    "TrainingArguments": "pass its arguments to trainer.Trainer, by its names for them",
    "Seq2SeqTrainingArguments": "pass its arguments to trainer.Trainer, by its names for them",
    "TrainerCallback": "inherit from callbacks.Callback",
}


class Finding(NamedTuple):
    """One thing that will not carry over."""

    line: int
    text: str


def parser(prog: str) -> argparse.ArgumentParser:
    """Return the parser of `trainer migrate`."""
    made = command_parser(
        prog,
        "List what of programs for Lightning, Accelerate or the Hugging Face Trainer will not "
        "carry over, with the line and what to use. The programs are read, not run.",
        examples=[
            ("what is to be done", "train.py model.py"),
            ("change the import lines", "train.py --write"),
            ("convert a checkpoint of Lightning", "last.ckpt --output runs/digits/from-lightning"),
        ],
        codes={0: "nothing is left to do", 1: "something is listed, or a file cannot be read"},
    )
    what = "a Python program, or a .ckpt file of Lightning, which is converted to a checkpoint"
    made.add_argument("files", type=Path, nargs="+", metavar="FILE", help=what)
    what = "change the import lines, to those of trainer.lightning and trainer.accelerate"
    made.add_argument("--write", action="store_true", help=what)
    add = made.add_argument_group("checkpoints").add_argument
    what = "the new folder; by default that of the .ckpt file, without the suffix"
    add("--output", type=Path, metavar="DIR", help=what)
    what = "how many processes the run had, for a position inside an epoch (default: 1)"
    add("--num_processes", type=parsed_count, metavar="N", default=1, help=what)
    return made


def run(arguments: argparse.Namespace) -> int:
    """List what will not carry over.

    Returns:
        0 if there is nothing, else 1.

    Raises:
        CommandError: A file is not Python.
        OSError: A file cannot be read or written.
    """
    with ended_at_once():
        import torch  # noqa: F401 - slow, and imported by all modules that are asked for names
    count = 0
    checkpoints = [path for path in arguments.files if path.suffix == ".ckpt"]
    if arguments.output is not None and len(checkpoints) != 1:
        raise argparse.ArgumentTypeError("--output belongs to one .ckpt file.")
    for path in checkpoints:
        _convert(path, arguments.output, arguments.num_processes)
    for path in arguments.files:
        if path in checkpoints:
            continue
        text = path.read_bytes()
        try:
            changed, findings = examine(text, write=arguments.write)
        except (SyntaxError, UnicodeDecodeError) as error:
            raise CommandError(f"{path} cannot be read as Python in UTF-8: {error}") from None
        if changed != text:
            path.write_bytes(changed)
        for finding in findings:
            echo(f"{path}:{finding.line}: {finding.text}")
        count += len(findings)
    return 1 if count else 0


def _convert(path: Path, output: Path | None, num_processes: int) -> None:
    from trainer.lightning.checkpoint import convert_checkpoint

    try:
        made = convert_checkpoint(path, output, num_processes=num_processes)
    except CheckpointError as error:
        raise CommandError(str(error)) from None
    use = "load_from_checkpoint" if made.weights_only else "fit"
    call = f"Module.{use}({str(made.path)!r})"
    if not made.weights_only:
        call = f"trainer.fit(module, ckpt_path={str(made.path)!r})"
    echo(f"{made.path}: {call}")
    for note in made.notes:
        echo(f"  {note}")


def examine(text: bytes, *, write: bool = False) -> tuple[bytes, list[Finding]]:
    """Return a program, with its import lines changed if asked, and what will not carry over.

    Args:
        text: The program, in UTF-8.
        write: Change the import lines; else they are findings too.

    Raises:
        SyntaxError: It is not Python.
        UnicodeDecodeError: It is not UTF-8.
    """
    tree = ast.parse(text.decode())
    program = _Program()
    for node in ast.walk(tree):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            program.see_import(node)
    if not program.known:
        return text, []
    if write:
        text = _edited(text, program.edits)
    else:
        program.findings += [
            Finding(edit.line, f"write {edit.new.strip()!r}, or pass --write")
            for edit in program.edits
        ]
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            program.see_class(node)
        elif isinstance(node, ast.Call):
            program.see_call(node)
        elif isinstance(node, ast.Attribute):
            program.see_attribute(node)
    return text, sorted(set(program.findings))


class _Edit(NamedTuple):
    """Bytes of a line to replace; the line counts from 1."""

    line: int
    start: int
    end: int
    new: str


def _edited(text: bytes, edits: list[_Edit]) -> bytes:
    lines = text.splitlines(keepends=True)
    for edit in sorted(edits, reverse=True):
        line = lines[edit.line - 1]
        lines[edit.line - 1] = line[: edit.start] + edit.new.encode() + line[edit.end :]
    return b"".join(lines)


def _package(module: str) -> str | None:
    """The package of `MOVED` that a module is of, also if it is written with its new name."""
    for package, new in MOVED.items():
        if f"{module}.".startswith((f"{package}.", f"{new}.")):
            return package
    return None


def _moved(path: str) -> str:
    """The new path of a module, or of a name in one."""
    for package, new in MOVED.items():
        if f"{path}.".startswith(f"{package}."):
            return new + path.removeprefix(package)
    return path


class _Program:
    """What is known of a program, and what of it will not carry over.

    Attributes:
        known: Name in the program: the dotted path of what was imported under it.
        edits: The changes of its import lines.
        findings: What will not carry over.
    """

    def __init__(self) -> None:
        self.known: dict[str, str] = {}
        self.edits: list[_Edit] = []
        self.findings: list[Finding] = []
        self._inner: set[int] = set()  # ids of nodes that are parts of a path that was checked

    def see_import(self, node: ast.Import | ast.ImportFrom) -> None:
        """Keep what is imported, and the change of the line."""
        if isinstance(node, ast.ImportFrom):
            self._see_from(node)
            return
        for alias in node.names:
            package = _package(alias.name)
            top = alias.name.partition(".")[0]
            if package is None and top not in _LISTED:
                continue
            self.known[alias.asname or top] = alias.name if alias.asname else top
            self._check(alias.lineno, alias.name)
            if package and (new := _moved(alias.name)) != alias.name:
                whole = f"{new} as {alias.asname}" if alias.asname else f"{MOVED[package]} as {top}"
                self.edits.append(
                    _Edit(alias.lineno, alias.col_offset, alias.end_col_offset or 0, whole)
                )

    def _see_from(self, node: ast.ImportFrom) -> None:
        module = node.module or ""
        if node.level or (_package(module) is None and module.partition(".")[0] not in _LISTED):
            return
        for alias in node.names:
            self.known[alias.asname or alias.name] = f"{module}.{alias.name}"
            self._check(alias.lineno, f"{module}.{alias.name}")
        if (new := _moved(module)) != module:
            start = node.col_offset
            end = start + len(f"from {module}")  # `from` and the module are on one line, as usual
            self.edits.append(_Edit(node.lineno, start, end, f"from {new}"))

    def see_class(self, node: ast.ClassDef) -> None:
        """List the hooks that nobody will call."""
        from trainer.migration.refusals import uncalled_hooks

        for base in filter(None, map(self._path, node.bases)):
            kind, bases = _kind(base)
            if kind is None:
                continue
            refused = uncalled_hooks(kind, bases)
            for each in node.body:
                if isinstance(each, ast.FunctionDef) and each.name in refused:
                    what = f"{node.name}.{each.name} is never called: {refused[each.name]}"
                    self.findings.append(Finding(each.lineno, what))

    def see_call(self, node: ast.Call) -> None:
        """List arguments of a Trainer, or of ``self.log``, that have no meaning here."""
        from trainer.metrics.log_arguments import log_arguments
        from trainer.migration.refusals import argument_refusals
        from trainer.migration.table import LOG_ARGUMENTS
        from trainer.trainer import Trainer

        given = {each.arg: each for each in node.keywords if each.arg is not None}
        path = self._path(node.func) or ""
        native = signature(Trainer).parameters
        if path.startswith("transformers.") and path.rpartition(".")[2] in _HUGGING_FACE:
            known: set[str] = set()
        elif _package(path) not in (None, "accelerate") and path.endswith(".Trainer"):
            known = {*native, *signature(_value(_moved(path))).parameters} - {"others"}
        elif ast.unparse(node.func) == "self.log" and self.known:
            for name, each in given.items():
                value = _literal(each.value)
                if name in LOG_ARGUMENTS and value is not ...:
                    try:
                        log_arguments("...", {name: value})
                    except ValueError as error:
                        self.findings.append(Finding(each.value.lineno, str(error)))
            return
        else:
            return
        unknown = {name: _literal(each.value) for name, each in given.items() if name not in known}
        if unknown:
            for name, said in argument_refusals(unknown, native).items():
                if said != f"Trainer has no argument {name!r}." or known:
                    self.findings.append(Finding(given[name].value.lineno, said))

    def see_attribute(self, node: ast.Attribute) -> None:
        """List names of a package, and attributes of a Trainer, that are not here."""
        path = self._path(node)
        if path is not None and _package(path):
            if id(node) not in self._inner:
                self._check(node.lineno, path)
            self._inner.add(id(node.value))  # ast.walk comes from outside to inside
        elif ast.unparse(node.value) in ("trainer", "self.trainer"):
            from trainer.lightning.pytorch.trainer import Trainer
            from trainer.migration.refusals import trainer_attribute_hint

            hint = trainer_attribute_hint(node.attr)
            if ": " in hint and not hasattr(Trainer, node.attr):
                self.findings.append(Finding(node.lineno, hint))

    def _path(self, node: ast.expr) -> str | None:
        """The dotted path of a name that was imported; None for anything else."""
        parts: list[str] = []
        while isinstance(node, ast.Attribute):
            parts.append(node.attr)
            node = node.value
        if isinstance(node, ast.Name) and node.id in self.known:
            return ".".join([self.known[node.id], *reversed(parts)])
        return None

    def _check(self, line: int, path: str) -> None:
        """List a module, or a name in one, that is not here."""
        for refused, reason in _REFUSED.items():
            if f"{path}.".startswith(f"{refused}."):
                self.findings.append(Finding(line, f"{path} is not in Cadence: {reason}."))
                return
        owner, _, name = path.rpartition(".")
        if owner.partition(".")[0] == "transformers":
            if instead := _HUGGING_FACE.get(name):
                self.findings.append(Finding(line, f"{path}: {instead} ({_PAGE})."))
            return
        try:
            _value(_moved(path))
        except ImportError as error:
            text = str(error) if "not in Cadence" in str(error) else ""
            self.findings.append(Finding(line, text or f"{path} is not in Cadence; {_PAGE}."))
        except AttributeError:
            self.findings.append(Finding(line, f"{path} is not in Cadence; {_PAGE}."))


def _value(path: str) -> Any:
    """Return a module, a name in one, or an attribute of that.

    Raises:
        ImportError: There is no such module, or a name is refused by name.
        AttributeError: There is no such name.
    """
    parts = path.split(".")
    found: Any = import_module(parts[0])
    for at, name in enumerate(parts[1:], start=2):
        try:
            found = getattr(found, name)
        except AttributeError:
            if isclass(found) or not hasattr(found, "__path__"):
                raise
            found = import_module(".".join(parts[:at]))
        if isclass(found) or not hasattr(found, "__spec__"):
            return found  # attributes of classes and instances are not looked at
    return found


def _kind(base: str) -> tuple[str | None, tuple[type, ...]]:
    """The kind of a base class for `uncalled_hooks`, and the classes that it is made of here."""
    import callbacks
    from trainer.datamodule import DataModule
    from trainer.module import TrainModule

    if base.startswith("transformers."):
        kinds = {"TrainerCallback": "callback", "Trainer": "trainer", "Seq2SeqTrainer": "trainer"}
        return kinds.get(base.rpartition(".")[2]), ()
    found = None
    with suppress(ImportError, AttributeError):
        found = _value(_moved(base))
    if isclass(found):
        owners = (("module", TrainModule), ("datamodule", DataModule))
        for kind, owner in (*owners, ("callback", callbacks.Callback)):
            if issubclass(found, owner):
                return kind, found.__mro__
    return None, ()


def _literal(node: ast.expr) -> Any:
    """The value of an expression, or ``...`` if only the running program knows it."""
    try:
        return ast.literal_eval(node)
    except ValueError:
        return ...
