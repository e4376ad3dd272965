"""The time of an import, each in a new process."""

from __future__ import annotations

import json
import subprocess
import sys
from argparse import Namespace
from functools import partial

from benchmarks.report import Column, Result
from benchmarks.timing import MICROSECONDS, Contender, Lap, chosen, take_turns

REPEATS = 10

SCRIPT = """
import json, sys, time
wall, cpu = time.perf_counter(), time.process_time()
{statement}
wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
print(json.dumps([wall, cpu, len(sys.modules)]))
"""


def turn(statement: str, modules: dict[str, int]) -> Lap:
    """Time one import in a new process."""
    command = [sys.executable, "-c", SCRIPT.format(statement=statement)]
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


def rows(modules: dict[str, int]) -> list[Contender]:
    """Return the contenders, the reference first; each records how many modules it loads."""
    return [
        Contender(name=statement, run=partial(turn, statement, modules), needs=needs)
        for statement, needs in STATEMENTS.items()
    ]


def run(options: Namespace) -> Result:
    """Run the benchmark."""
    modules: dict[str, int] = {}
    found = take_turns(chosen(rows(modules), options.rows), options.repeats, unit=1e-3)
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
        notes=["Files are in the page cache after the first round, which is not counted."],
    )
