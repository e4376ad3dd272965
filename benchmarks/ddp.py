"""The overhead of the loop over DistributedDataParallel, on two processes of one machine.

`run` starts the processes with ``torchrun``; each runs this module as a script.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from benchmarks import contestants
from benchmarks.arguments import at_least
from benchmarks.report import Result
from benchmarks.task import Task
from benchmarks.timing import MICROSECONDS, Contender, Lap, chosen, take_turns
from trainer.environment import patch_environment, read_int, share_of_cores

STEPS, REPEATS = 500, 10
PROCESSES = 2
# The widths of the hidden layers, and by how much the number of steps is divided.
GROUPS: dict[str, tuple[tuple[int, ...], int]] = {
    "2,762 parameters": ((64,), 1),
    "1.1 million parameters": ((1024, 1024), 5),
    "9.6 million parameters": ((3072, 3072), 10),
}


def add_arguments(parser: ArgumentParser) -> None:
    """Add the options of this benchmark."""
    parser.add_argument(
        "--processes", type=at_least(1), default=PROCESSES, help="how many to start"
    )


def by_hand(task: Task) -> None:
    """Train with the loop of PyTorch's DDP tutorial."""
    model, optimizer = DistributedDataParallel(task.model), task.optimizer()
    model.train()
    for batch in task.loader:
        loss = task.loss(model, batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


@contextmanager
def shared_folder(parent: Path | None = None) -> Iterator[Path]:
    """Make one temporary folder for all processes."""
    with tempfile.TemporaryDirectory(dir=parent) as folder:
        shared = [folder]
        dist.broadcast_object_list(shared)
        yield Path(shared[0])
        dist.barrier()


def defaults(task: Task, **settings: Any) -> None:
    """Train with a default `Trainer`, in one folder for all processes."""
    with shared_folder() as folder:
        contestants.defaults(task, project_dir=f"{folder}/run", **settings)


def rows(steps: int, *hidden: int) -> list[Contender]:
    """Return the contenders, the reference first, for hidden layers of these widths."""

    def turn(train: Callable[[Task], None]) -> Lap:
        rank, world_size = dist.get_rank(), dist.get_world_size()
        task = Task(steps, hidden=hidden, rank=rank, world_size=world_size)
        dist.barrier()
        train(task)
        return task.lap()

    kinds: dict[str, Callable[[Any], None]] = {
        "DDP loop by hand": by_hand,
        "Cadence Trainer, everything off": contestants.barebones,
        "Cadence Trainer, defaults": defaults,
        "Cadence Accelerator": contestants.own_loop,
    }
    return [Contender(name=name, run=partial(turn, train)) for name, train in kinds.items()]


def names() -> list[str]:
    """Return the names of all rows."""
    return [contender.name for contender in rows(STEPS)]


def measure(options: Namespace) -> Result:
    """Run the benchmark as one of the processes; each has its own clock."""
    groups = {
        name: rows(max(5, options.steps // fewer), *hidden)
        for name, (hidden, fewer) in GROUPS.items()
    }
    return Result(
        benchmark="ddp",
        title=f"Time per step on {dist.get_world_size()} processes with gloo, on the first one",
        columns=MICROSECONDS,
        rows=[
            row
            for group, contenders in groups.items()
            for row in take_turns(chosen(contenders, options.rows), options.repeats, group=group)
        ],
        settings={
            "steps": options.steps,
            "repeats": options.repeats,
            "processes": dist.get_world_size(),
        },
        notes=["All rows with figures reached the same weights, bit for bit."],
    )


def run(options: Namespace) -> Result:
    """Start the processes, wait for them and load their result."""
    return run_on_processes("ddp", options)


def run_on_processes(benchmark: str, options: Namespace) -> Result:
    """Start processes that run a benchmark's module as a script; load their result."""
    with tempfile.TemporaryDirectory() as folder:
        command = [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
            *("--nproc-per-node", str(options.processes), "-m", f"benchmarks.{benchmark}", folder),
            *("--steps", str(options.steps), "--repeats", str(options.repeats)),
            *("--rows", *options.rows),
        ]
        # torchrun and the trainer choose, and tell so, where the variable is not set
        with patch_environment(OMP_NUM_THREADS=1):
            subprocess.run(command, check=True, cwd=Path(__file__).parents[1])
        return Result.load(Path(folder) / f"{benchmark}.json")


def _take_a_share_of_the_cores() -> None:
    """Keep this process, its threads included, on cores of its own, where there are enough.

    Processes that the system moves from core to core differ from turn to turn by more than what is
    measured here.
    """
    if hasattr(os, "sched_setaffinity"):  # Linux has it
        rank, processes = read_int("LOCAL_RANK") or 0, read_int("LOCAL_WORLD_SIZE") or 1
        cores, share = sorted(os.sched_getaffinity(0)), share_of_cores(processes)
        if len(cores) >= processes:
            os.sched_setaffinity(0, cores[rank * share : (rank + 1) * share])


def process(measure: Callable[[Namespace], Result]) -> None:
    """Run a benchmark as one of the processes; the first one saves the result."""
    parser = ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--repeats", type=int)
    parser.add_argument("--rows", nargs="*")
    options = parser.parse_args()
    torch.set_num_threads(1)
    _take_a_share_of_the_cores()
    dist.init_process_group("gloo")
    result = measure(options)
    if dist.get_rank() == 0:
        result.save(options.folder)
    dist.destroy_process_group()


if __name__ == "__main__":
    process(measure)
