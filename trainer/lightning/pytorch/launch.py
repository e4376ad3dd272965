"""Start a program again, in several processes."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn


def launch(processes: int, *, cpu: bool, gpu_ids: Sequence[str] | None = None) -> NoReturn:
    """Replace this process by ``trainer launch`` for the same program.

    Args:
        processes: How many processes run it.
        cpu: Whether they use the CPU.
        gpu_ids: Their devices; None for the first ones.

    Raises:
        ValueError: It is not a program, as in a notebook.
    """
    main = sys.modules["__main__"]
    spec, file = getattr(main, "__spec__", None), getattr(main, "__file__", None)
    if file is None:
        raise ValueError(
            f"devices={processes} needs a program that can be started again, but this is an "
            "interactive session: put the training into a function and call "
            f"trainer.notebook_launcher(function, num_processes={processes})."
        )
    program = ["--module", spec.name.removesuffix(".__main__")] if spec else [file]
    options = ["--num_processes", str(processes), *(["--cpu"] if cpu else [])]
    options += ["--gpu_ids", ",".join(gpu_ids)] if gpu_ids else []
    # By its path: with `-m`, a `trainer.py` beside the program would be run instead.
    command = str(Path(sys.executable).with_name("trainer"))
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(command, [command, "launch", *options, *program, *sys.argv[1:]])
