"""Start a program again, in several processes."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from trainer import environment


def launch(processes: int, *, cpu: bool, gpu_ids: Sequence[str] | None = None) -> NoReturn:
    """Replace this process by ``trainer launch`` for the same program.

    Args:
        processes: The number of processes, each started with the options of this interpreter.
        cpu: Whether they use the CPU.
        gpu_ids: Their devices; None for the first ones.

    Raises:
        ValueError: There is no program to restart, for example in a notebook.
    """
    main = sys.modules["__main__"]
    spec, file = getattr(main, "__spec__", None), getattr(main, "__file__", None)
    if file is None:
        raise ValueError(
            f"devices={processes} needs a program that can be started again, but this is an "
            "interactive session: put the training into a function and call "
            f"trainer.notebook_launcher(function, num_processes={processes})."
        )
    name = spec.name.removesuffix(".__main__") if spec else "__main__"  # for `python folder`
    program = [file] if name == "__main__" else ["--module", name]
    options = ["--num_processes", str(processes), *(["--cpu"] if cpu else [])]
    options += ["--gpu_ids", ",".join(gpu_ids)] if gpu_ids else []
    flags, started = environment.interpreter_command(sys.orig_argv)
    # The program may have changed sys.argv, and a debugger passes arguments other than its own.
    as_module = started[:1] == ["-m"]
    found = ["--module", *started[1:2]] if as_module else [Path(p).name for p in started[:1]]
    is_program = found == (program if as_module else [Path(file).name])
    arguments = started[1 + as_module :] if is_program else sys.argv[1:]
    # Not `-m trainer`, which would run a `trainer.py` in the current folder instead.
    root = str(Path(__file__).parents[3])
    code = f"import sys; sys.path = [*filter(None, sys.path), {root!r}]; import trainer.__main__"
    command = [sys.executable, *flags, "-c", code, "launch", *options, *program, *arguments]
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(sys.executable, command)
