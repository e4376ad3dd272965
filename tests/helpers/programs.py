"""Scripts and commands in processes that live: here, or in a pool of ranks.

A process of its own takes seconds to import torch, and each library again. How real processes are
launched and end is for tests of their own.
"""

from __future__ import annotations

import contextlib
import io
import os
import runpy
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from unittest import mock

from tests.helpers import isolation
from tests.helpers.ranks import RankPool
from trainer.cli import main
from trainer.launch.plan import configure, launch_command_parser, make_plan


def run_script(script: str, *arguments: object, variables: Mapping[str, str] | None = None) -> str:
    """Run a script as ``python script arguments`` does, but in this process; return its output.

    Args:
        script: Its path. What it imports from its folder is imported anew by the next one.
        *arguments: Its arguments.
        variables: Environment variables that it sees.
    """
    isolation.reset_trainer_state()
    isolation.reset_torch()
    path = [str(Path(script).resolve().parent), *sys.path]
    with (
        mock.patch.dict(os.environ, variables or {}),
        mock.patch.object(sys, "argv", [script, *map(str, arguments)]),
        mock.patch.object(sys, "path", path),
        contextlib.redirect_stdout(io.StringIO()) as output,
    ):
        runpy.run_path(script, run_name="__main__")
    isolation.reset_trainer_state()
    forget_modules_in(Path.cwd())
    return output.getvalue()


def run_on_ranks(pool: RankPool, script: str, *arguments: object, **options: object) -> str:
    """Run a script on each rank of a pool, as a launcher does; return all that they printed."""
    return "".join(pool(lambda: run_script(script, *arguments, **options), timeout=280))


def run_command(ranks: Callable[[int], RankPool], words: list[str]) -> str:
    """Run ``trainer`` or ``python`` with arguments, and the processes of ``trainer launch``."""
    program, *words = words
    if program == "python":
        return run_script(*words)
    assert program == "trainer"
    if words[0] == "launch" and "--dry_run" not in words:
        arguments = launch_command_parser().parse_args(words[1:])
        plan = make_plan(arguments, configure(arguments))
        if plan.processes == 1:
            return run_script(*arguments.words, variables=plan.variables)
        return run_on_ranks(ranks(plan.processes), *arguments.words, variables=plan.variables)
    with contextlib.redirect_stdout(io.StringIO()) as output:
        code = main(words)
    forget_modules_in(Path.cwd())
    assert code == 0, output.getvalue()
    return output.getvalue()


def forget_modules_in(folder: Path) -> None:
    """Let the next import of what is below a folder read it again."""
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if name != "__main__" and file and Path(file).is_relative_to(folder):
            del sys.modules[name]
