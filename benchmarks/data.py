"""The time per batch of a prepared loader, against the plain loader that it was made from."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, TensorDataset

from benchmarks.report import Result
from benchmarks.task import BatchedTensors, ComputedSamples, OwnTensors, as_it_is
from benchmarks.timing import MICROSECONDS, Clock, Contender, Lap, chosen, take_turns
from trainer import Accelerator

STEPS, REPEATS = 2000, 10
BATCH = 32


class Drawing(ComputedSamples):
    """Samples that each draw a random number, multiplied by 0 so that all passes are equal."""

    def __getitem__(self, index: int) -> tuple[torch.Tensor, ...]:
        x, y = super().__getitem__(index)
        return x + 0 * torch.rand(()), y


KINDS: dict[str, tuple[Callable[..., Dataset[Any]], dict[str, Any]]] = {
    "TensorDataset": (TensorDataset, {}),
    "a class over tensors": (OwnTensors, {}),
    "samples": (ComputedSamples, {}),
    "samples that draw": (Drawing, {}),
    "batched": (BatchedTensors, {"collate_fn": as_it_is}),
}


def plain(loader: DataLoader[Any]) -> Iterable[Any]:
    """Return the loader unchanged."""
    return loader


def prepared(loader: DataLoader[Any]) -> Iterable[Any]:
    """Return the loader as `Accelerator.prepare` returns it."""
    return Accelerator(cpu=True).prepare(loader)


def read(prepare: Callable[..., Iterable[Any]], kind: str, workers: int, steps: int) -> Lap:
    """Make one pass; return the time per batch, without the start of the workers."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(steps * BATCH, 64, generator=generator)
    make, settings = KINDS[kind]
    dataset = make(x, torch.arange(len(x)))
    loader = prepare(DataLoader(dataset, batch_size=BATCH, num_workers=workers, **settings))
    clock = Clock(steps)
    total, batch = 0, None
    for batch in loader:
        clock.tick()
        total += len(batch[0])
    assert batch is not None
    return clock.lap((total, batch[1].tolist(), batch[0].sum().item()))


def rows(kind: str, workers: int, steps: int) -> list[Contender]:
    """Return the contenders for one kind of data, the reference first."""
    loaders = {"DataLoader": plain, "prepared by Cadence": prepared}
    return [
        Contender(name=name, run=partial(read, prepare, kind, workers, steps))
        for name, prepare in loaders.items()
    ]


def names() -> list[str]:
    """Return the names of all rows, which all groups have."""
    kind, *_ = KINDS
    return [contender.name for contender in rows(kind, 0, STEPS)]


def run(options: Namespace) -> Result:
    """Run the benchmark."""
    found = []
    for kind in KINDS:
        for workers in (0, 2):
            contenders = chosen(rows(kind, workers, options.steps), options.rows)
            group = f"{kind}, {workers} workers"
            found += take_turns(contenders, options.repeats, group=group)
    return Result(
        benchmark="data",
        title="Time per batch: 32 samples of 64 numbers, reading only",
        columns=MICROSECONDS,
        rows=found,
        settings={"steps": options.steps, "repeats": options.repeats},
        notes=[
            "CPU time does not include the workers; with workers, look at the wall time.",
            "All rows with figures read the same batches.",
        ],
    )
