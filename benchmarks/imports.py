"""The time of an import, each in a new process, with compiled modules in a cache."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from argparse import Namespace
from functools import partial

from benchmarks.report import Column, Result
from benchmarks.timing import MICROSECONDS, Contender, Lap, chosen, take_turns
from trainer.environment import patch_environment

REPEATS = 10

SCRIPT = """
import json, sys, time
wall, cpu = time.perf_counter(), time.process_time()
{statement}
wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
print(json.dumps([wall, cpu, len(sys.modules)]))
"""


def turn(statement: str, modules: dict[str, int], cache: str) -> Lap:
    """Time one import in a new process."""
    script = SCRIPT.format(statement=statement)
    command = [sys.executable, "-X", f"pycache_prefix={cache}", "-c", script]
    with patch_environment(PYTHONDONTWRITEBYTECODE=""):
        output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    wall, cpu, modules[statement] = json.loads(output.splitlines()[-1])
    return Lap(wall=wall, cpu=cpu)


STATEMENTS = {
    "import torch": (),
    "import trainer": (),
    "from trainer import Trainer, TrainModule": (),
    "from ignite.engine import Engine": ("ignite",),
    "from accelerate import Accelerator": ("accelerate",),
    "from lightning.pytorch import Trainer": ("lightning",),
    "from transformers import Trainer": ("transformers", "accelerate"),
}


def names() -> list[str]:
    """Return the names of all rows."""
    return list(STATEMENTS)


def rows(modules: dict[str, int], cache: str) -> list[Contender]:
    """Return the contenders, the reference first; each records how many modules it loads."""
    return [
        Contender(name=statement, run=partial(turn, statement, modules, cache), needs=needs)
        for statement, needs in STATEMENTS.items()
    ]


def run(options: Namespace) -> Result:
    """Run the benchmark."""
    modules: dict[str, int] = {}
    with tempfile.TemporaryDirectory() as cache:  # filled by the first round, not by anyone before
        found = take_turns(chosen(rows(modules, cache), options.rows), options.repeats, unit=1e-3)
    for row in found:
        if row.void is None:
            row.values["modules"] = float(modules[row.name])
    columns = [Column(c.key, c.title.replace("µs", "ms"), c.digits) for c in MICROSECONDS]
    return Result(
        benchmark="import",
        title="Import time, including that of torch if it is loaded",
        columns=[*columns, Column("modules", "modules", 0)],
        rows=found,
        settings={"repeats": options.repeats},
        notes=["Modules are compiled and cached in the first round, which is not counted."],
    )
