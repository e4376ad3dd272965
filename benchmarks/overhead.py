"""The overhead of a loop per step: Cadence and its peers against one written by hand."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from functools import partial

from benchmarks import contestants, peers
from benchmarks.report import Result
from benchmarks.task import DATASETS, OPTIMIZERS, Task
from benchmarks.timing import MICROSECONDS, Contender, Lap, chosen, take_turns

STEPS, REPEATS = 4000, 10  # long enough to include what trackers do a tenth of a second later
GROUPS = {
    "tensors": "TensorDataset",
    "own": "a class of one's own over tensors",
    "computed": "samples that are computed one by one",
    "batched": "a dataset that every loop reads a batch at a time",
}


def add_arguments(parser: ArgumentParser) -> None:
    """Add the options of this benchmark."""
    parser.add_argument(
        "--datasets",
        nargs="+",
        choices=DATASETS,
        default=[*DATASETS],
        help=f"one or more of {', '.join(f'{name}: {what}' for name, what in GROUPS.items())}",
    )
    parser.add_argument(
        "--optimizer", choices=OPTIMIZERS, default="sgd", help="of all rows; fused is SGD, fused"
    )


def rows(steps: int, dataset: str = "tensors", optimizer: str = "sgd") -> list[Contender]:
    """Return the contenders, the reference first."""

    def turn(train: Callable[[Task], None]) -> Lap:
        task = Task(steps, dataset=dataset, optimizer=optimizer)
        train(task)
        return task.lap()

    ours = {
        "PyTorch loop by hand": contestants.by_hand,
        "Cadence Trainer, everything off": contestants.barebones,
        "Cadence Trainer, defaults": contestants.defaults,
        "Cadence Trainer, every step written": partial(contestants.defaults, log_every=1),
        "Cadence Accelerator": contestants.own_loop,
    }
    found = [Contender(name=name, run=partial(turn, train)) for name, train in ours.items()]
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
    for dataset in options.datasets:
        contenders = chosen(rows(options.steps, dataset, options.optimizer), options.rows)
        found += take_turns(contenders, options.repeats, group=GROUPS[dataset])
    return Result(
        benchmark="overhead",
        title="Time of a step: perceptron of 2,762 parameters, 8 samples",
        columns=MICROSECONDS,
        rows=found,
        settings={
            "steps": options.steps,
            "repeats": options.repeats,
            "optimizer": options.optimizer,
        },
        notes=["All rows with figures reached the same weights, bit for bit."],
    )
