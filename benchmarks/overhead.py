"""The overhead of a loop per step: Cadence and its peers against one written by hand."""

from __future__ import annotations

import operator
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from benchmarks import contestants, peers
from benchmarks.arguments import BACKEND, backend
from benchmarks.report import Result
from benchmarks.task import OPTIMIZERS, Task, nearly_equal
from benchmarks.timing import MICROSECONDS, Contender, Lap, chosen, take_turns

STEPS, REPEATS = 4000, 10  # long enough to include what trackers do a tenth of a second later
GROUPS = {
    "tensors": "TensorDataset",
    "own": "a custom dataset over tensors",
    "computed": "samples that are computed one by one",
    "batched": "a dataset that every loop reads a batch at a time",
    "compiled": "TensorDataset, compiled steps",
}
COMPILED = "compiled"
OURS: dict[str, Callable[[Any], None]] = {
    "PyTorch loop by hand": contestants.by_hand,
    "Cadence Trainer, everything off": contestants.barebones,
    "Cadence Trainer, no bar, no checkpoints": contestants.quiet,
    "Cadence Trainer, defaults": contestants.defaults,
    "Cadence Trainer, every step written": partial(contestants.defaults, log_every=1),
    "Cadence Accelerator": contestants.own_loop,
}


def add_arguments(parser: ArgumentParser) -> None:
    """Add the options of this benchmark."""
    parser.add_argument(
        "--groups",
        nargs="+",
        choices=GROUPS,
        default=[*GROUPS],
        help=f"one or more of {', '.join(f'{name}: {what}' for name, what in GROUPS.items())}",
    )
    parser.add_argument(
        "--optimizer", choices=OPTIMIZERS, default="sgd", help="of all rows; fused is SGD, fused"
    )
    parser.add_argument(
        "--backend",
        type=backend,
        default=BACKEND,
        help=f"the backend of torch.compile in the group {COMPILED}",
    )


def rows(
    steps: int, group: str = "tensors", optimizer: str = "sgd", backend: str = BACKEND
) -> list[Contender]:
    """Return the contenders, the reference first.

    Args:
        steps: The number of steps.
        group: A dataset, or ``"compiled"``: the `Trainer` compiles the step, others the model.
        optimizer: The optimizer of all.
        backend: The backend of ``torch.compile`` in ``"compiled"``.
    """

    def turn(train: Callable[[Task], None]) -> Lap:
        if group == COMPILED:
            torch.compiler.reset()  # torch stops compiling code that it has compiled a few times
        task = Task(steps, optimizer=optimizer, **settings)
        train(task)
        return task.lap()

    settings = {"backend": backend} if group == COMPILED else {"dataset": group}
    found = [Contender(name=name, run=partial(turn, train)) for name, train in OURS.items()]
    return found + [
        Contender(name=peer.name, run=partial(turn, peer.train), needs=peer.needs)
        for peer in peers.PEERS
    ]


def names() -> list[str]:
    """Return the names of all rows."""
    return [contender.name for contender in rows(STEPS)]


def run(options: Namespace) -> Result:
    """Run the benchmark."""
    found = []
    for group in options.groups:
        everyone = rows(options.steps, group, options.optimizer, options.backend)
        contenders = chosen(everyone, options.rows)
        agree = nearly_equal if group == COMPILED else operator.eq
        found += take_turns(contenders, options.repeats, group=GROUPS[group], agree=agree)
    return Result(
        benchmark="overhead",
        title="Time of a step: perceptron of 2,762 parameters, 8 samples",
        columns=MICROSECONDS,
        rows=found,
        settings={
            "steps": options.steps,
            "repeats": options.repeats,
            "optimizer": options.optimizer,
            "backend": options.backend,
        },
        notes=["All rows with figures reached the same weights, bit for bit; compiled, to 0.001."],
    )
