"""The commands `trainer fit`, `validate`, `test-model` and `predict`.

Configuration files and options describe the `Trainer`, the module and the data; the command creates
them in this order, and calls the corresponding method of the Trainer.
"""

from __future__ import annotations

import argparse
import importlib
import os
import re
import sys
import traceback
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from trainer.cli.parsing import (
    CommandError,
    Parser,
    aligned,
    echo,
    import_from_here,
    sigint_default,
)

if TYPE_CHECKING:
    from trainer.cli.fit.configured import Made

_METHODS = {"fit": "fit", "validate": "validate", "test-model": "test", "predict": "predict"}
_PACKAGES = Path(__file__).parents[3]
_OURS = tuple(f"{_PACKAGES / name}{os.sep}" for name in ("trainer", "callbacks", "trackers"))
_LIBRARIES = ("contextlib", "jsonargparse", "torch")  # whose frames may be between ours
_OPTIONS = {  # patterns of arguments in messages, and the options for them
    r"\bfit\(ckpt_path='(\w+)'\)": r"--ckpt_path \1",
    r"\bckpt_path='(\w+)'": r"--ckpt_path \1",
    r"\b(another) (project_dir)\b": r"\1 --trainer.\2",
}
_HINTS = {
    (" ckpt_path", "Trainer("): "--ckpt_path auto, --trainer.project_dir runs/other, ...",
    ("has no data",): "--data CLASS, a DataModule with such a loader, or --data Loaders with a "
    "loader for each stage; see --data.help Loaders",
    ("overwrite=True",): "--trainer.callbacks+=PredictionWriter "
    "--trainer.callbacks.overwrite true, or --trainer.callbacks.dirpath FOLDER",
}
_REPORTED = (ArithmeticError, ImportError, OSError, RuntimeError, TypeError, ValueError)


def parser(prog: str) -> argparse.ArgumentParser:
    """Return the parser of one of the commands.

    It only collects the words, since the valid options depend on the classes that they name.
    """
    # No argument can begin with this character, so options and --help are collected too.
    made = Parser(prog=prog, prefix_chars="\0", add_help=False)
    made.add_argument("words", nargs="*", metavar="CONFIG.yaml | --KEY=VALUE")
    made.set_defaults(stage=prog.split()[-1], prog=prog)
    return made


def run(arguments: argparse.Namespace) -> int:
    """Carry out the command.

    Returns:
        0.

    Raises:
        CommandError: The configuration is invalid, or no run can be created from it.
        SystemExit: Help or the configuration was printed; or the run was saved and ended
            (`Preempted`); or the user's code failed, in which case the message is the traceback.
    """
    import_from_here()
    try:
        with sigint_default():
            importlib.import_module("jsonargparse")
    except ImportError:
        raise CommandError(
            f"{arguments.prog} reads configurations with jsonargparse, which is not installed: "
            "pip install 'cadence-trainer[cli]'."
        ) from None
    with sigint_default():
        from trainer.cli.fit import configured

    line = configured.ConfiguredLine(arguments.prog, arguments.stage)
    config = line.parse(arguments.words)
    made: Made | None = None
    try:
        made = line.make(config)
        _work(arguments.stage, made)
    except CommandError:
        raise
    except Exception as error:  # noqa: BLE001 - whatever it is, it is reported
        if _is_ours(error):
            code = 2 if made is None else 1
            raise CommandError(_on_the_command_line(str(error)), code) from None
        # Not re-raised, since the caller treats a missing file as wrong usage. Python prints the
        # message of an exit; `trainer launch` prints it once for all processes.
        shortened = _without_our_way(error.__traceback__)
        raise SystemExit(
            "".join(traceback.format_exception(type(error), error, shortened))
        ) from None
    return 0


def _work(stage: str, made: Made) -> None:
    from callbacks import PredictionWriter  # imports torch, which wrong usage does not need

    method = getattr(made.trainer, _METHODS[stage])
    result = method(made.module, datamodule=made.data, ckpt_path=made.ckpt_path)
    if not made.trainer.is_global_zero:
        return
    for number, metrics in enumerate(result if stage in ("validate", "test-model") else ()):
        if len(result) > 1:
            echo(f"loader {number}")
        if metrics:
            echo(aligned([(name, f"{value:.6g}") for name, value in metrics.items()]))
    for callback in made.trainer.callbacks if stage == "predict" else ():
        if isinstance(callback, PredictionWriter):
            echo(f"The predictions are in {', '.join(map(str, callback.directories))}.")


def _on_the_command_line(text: str) -> str:
    """Return the text of an error, with command-line options instead of argument names."""
    for pattern, option in _OPTIONS.items():
        text = re.sub(pattern, option, text)
    hints = [hint for words, hint in _HINTS.items() if any(word in text for word in words)]
    return "\n".join([text, *(f"(On the command line: {hint})" for hint in hints)])


def _is_ours(error: Exception) -> bool:
    """Return whether our own code raised the error, with no user code in its traceback.

    Its message is then enough; an error inside the user's code needs the traceback.
    """
    files = [frame.f_code.co_filename for frame, _ in traceback.walk_tb(error.__traceback__)]
    libraries = (str(sys.modules[name].__file__).removesuffix("__init__.py") for name in _LIBRARIES)
    prefixes = (*_OURS, *libraries, "<string>")  # the last prefix is for generated methods
    others = [file for file in files if not file.startswith(prefixes)]
    return isinstance(error, _REPORTED) and not others and files[-1].startswith(_OURS)


def _without_our_way(frames: TracebackType | None) -> TracebackType | None:
    """Return the traceback, starting at the call of the Trainer or of the user's class."""
    at: Any = frames
    skipped = (str(Path(__file__).parents[1]), "jsonargparse")
    while at is not None and any(part in at.tb_frame.f_code.co_filename for part in skipped):
        at = at.tb_next
    return at or frames
