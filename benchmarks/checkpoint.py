"""The cost of a checkpoint: how long training waits, and how fast it reaches the disk."""

from __future__ import annotations

import math
import os
import shutil
import sys
import tempfile
import threading
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.arguments import at_least, folder_at
from benchmarks.report import Column, Result, Row
from benchmarks.timing import apart, is_chosen, quartiles, resident, timed, unseen
from callbacks import Callback
from trainer import Trainer, TrainModule
from trainer.environment import patch_environment

REPEATS = 5
WIDTH = 1024
COLUMNS = (
    Column("stall", "training waits, ms"),
    Column("total", "until on disk, ms"),
    Column("rate", "MB/s", 0),
    Column("disk", "of the disk's rate", 2),
    Column("memory", "extra memory, MB", 0),
)


def add_arguments(parser: ArgumentParser) -> None:
    """Add the options of this benchmark."""
    parser.add_argument(
        "--parameters",
        type=at_least(1),
        default=25_000_000,
        help="number of model parameters; AdamW stores two more values for each",
    )
    parser.add_argument("--folder", type=folder_at, help="a folder on the disk to measure")


class Stack(TrainModule):
    """A model of about as many parameters as requested, in layers of about a million."""

    def __init__(self, parameters: int) -> None:
        super().__init__()
        number = math.ceil(parameters / WIDTH**2)
        width = round(math.sqrt(parameters / number))
        self.layers = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(number))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Return a cheap loss that gives every parameter a gradient."""
        return sum(layer.weight.square().mean() for layer in self.layers) + batch[0].sum()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return AdamW, whose state is twice as large as the weights."""
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


@dataclass(kw_only=True)
class Way:
    """One way to save.

    Attributes:
        save: Saves to a path that does not exist yet; training waits for this call.
        finish: Waits until the save is on the disk.
    """

    save: Callable[[Path], object]
    finish: Callable[[], object] = lambda: None


def written(data: bytes, path: Path) -> None:
    """Write a plain file and sync it: the best that the disk can do."""
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def torch_saved(state: Any, path: Path, *, sync: bool) -> None:
    """Save with `torch.save` as most loops do, syncing to the disk or not."""
    with path.open("wb") as file:
        torch.save(state, file)
        if sync:
            file.flush()
            os.fsync(file.fileno())


def state_of(trainer: Trainer) -> dict[str, Any]:
    """Return what a Trainer has trained, as most loops save it."""
    module, optimizer = trainer.module, trainer.optimizers[0]
    return {"model": module.state_dict(), "optimizer": optimizer.state_dict()}


WAYS: dict[str, Callable[[Trainer], Way]] = {
    "plain file, synced": lambda trainer: Way(
        save=partial(written, bytes(size_of(state_of(trainer))))
    ),
    "torch.save": lambda trainer: Way(save=partial(torch_saved, state_of(trainer), sync=False)),
    "torch.save, synced": lambda trainer: Way(
        save=partial(torch_saved, state_of(trainer), sync=True)
    ),
    "Cadence, waiting": lambda trainer: Way(save=trainer.save_checkpoint),
    "Cadence, in the background": lambda trainer: Way(
        save=partial(trainer.save_checkpoint, background=True), finish=trainer.wait_for_save
    ),
}


def names() -> list[str]:
    """Return the names of all rows."""
    return list(WAYS)


def size_of(state: Any) -> int:
    """Return the bytes of all tensors in a nested state."""
    if isinstance(state, Tensor):
        return state.nbytes
    if isinstance(state, dict):
        return sum(map(size_of, state.values()))
    return sum(map(size_of, state)) if isinstance(state, (list, tuple)) else 0


def turn(way: Way, path: Path) -> dict[str, float]:
    """Make one save; return its times in milliseconds."""
    os.sync()  # earlier writes that are still pending must not count for this save
    stall = timed(lambda: way.save(path)).wall
    rest = timed(way.finish).wall
    _remove(path)
    return {"stall": 1e3 * stall, "total": 1e3 * (stall + rest)}


def _remove(path: Path) -> None:
    shutil.rmtree(path) if path.is_dir() else path.unlink()


def memory_of(way: Way, path: Path) -> float:
    """Return by how many MB one save raises the peak resident memory, sampled every ms."""
    over = threading.Event()
    before = highest = resident()

    def watch() -> None:
        nonlocal highest
        while not over.wait(0.001):
            highest = max(highest, resident())

    watcher = threading.Thread(target=watch, name="watch memory")
    watcher.start()
    try:
        way.save(path)
        way.finish()
    finally:
        over.set()
        watcher.join()
    _remove(path)
    return (highest - before) / 1e6


class AtTheBoundary(Callback):
    """Call a function at the boundary of an update, where runs are saved with optimizer state.

    After a fit there is no training for a save to overlap with, so none runs in the background.
    """

    def __init__(self, call: Callable[[Trainer], object]) -> None:
        self.call = call

    def on_boundary(self, trainer: Trainer, module: TrainModule) -> None:
        """Call the function."""
        self.call(trainer)


def train(model: Stack, folder: Path, call: Callable[[Trainer], object]) -> None:
    """Make one update of a model and call a function at its boundary."""
    trainer = Trainer(
        max_steps=1,
        cpu=True,
        checkpointing=False,
        progress_bar=False,
        project_dir=folder,
        callbacks=[AtTheBoundary(call)],
    )
    with unseen():
        trainer.fit(model, DataLoader(TensorDataset(torch.zeros(1, 1))))


def _memory_apart(name: str, parameters: int, folder: Path) -> float:
    """Return `memory_of` one way in a process of its own: no other save left memory to reuse."""
    # at a boundary the gradients are free, but soon needed again; a save would seem to take less if
    # it reused their memory, which glibc keeps unless it is told to map each tensor by itself
    with patch_environment(MALLOC_MMAP_THRESHOLD_=2**16):
        return float(apart("benchmarks.checkpoint", name, parameters, folder))


def run(options: Namespace) -> Result:
    """Run the benchmark."""
    resident()  # before anything else is done in vain
    if options.folder is not None:
        options.folder.mkdir(parents=True, exist_ok=True)
    reference, *others = WAYS
    chosen = [reference, *(each for each in others if is_chosen(each, options.rows))]
    times: dict[str, list[dict[str, float]]] = {each: [] for each in chosen}
    model = Stack(options.parameters)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        folder = Path(name).resolve()  # of another process, which has another working folder
        memory = {each: _memory_apart(each, options.parameters, folder) for each in chosen}

        def measure(trainer: Trainer) -> None:
            ways = {each: WAYS[each](trainer) for each in chosen}
            for number in range(options.repeats + 1):
                for each, way in ways.items():
                    times[each].append(turn(way, folder / f"save-{number}"))

        train(model, folder / "run", measure)
    size = 3 * 4 * parameters  # weights and two values of AdamW, in float32
    return Result(
        benchmark="checkpoint",
        title=f"A save of {size / 1e6:,.0f} MB: weights and the state of AdamW",
        columns=COLUMNS,
        # the first round, which allocates what later ones reuse, is not counted
        rows=_rows({each: turns[1:] for each, turns in times.items()}, memory, size),
        settings={"parameters": parameters, "repeats": options.repeats},
        notes=[
            "Plain torch.save returns before anything is on disk; Cadence syncs and hashes.",
            "The extra memory of each row is that of a process of its own.",
        ],
    )


def _rows(
    times: dict[str, list[dict[str, float]]], memory: dict[str, float], size: int
) -> list[Row]:
    found = []
    best = [each["total"] for each in next(iter(times.values()))]
    for name, turns in times.items():
        totals = [each["total"] for each in turns]
        samples = {
            "stall": [each["stall"] for each in turns],
            "total": totals,
            "rate": [size / 1e3 / total for total in totals],
            "disk": [one / other for one, other in zip(best, totals, strict=True)],
        }
        values: dict[str, Any] = {key: quartiles(each) for key, each in samples.items()}
        if (
            name == "torch.save"
        ):  # its file may still be in the page cache, so these figures would mean nothing
            for key in ("total", "rate", "disk"):
                del values[key], samples[key]
        found.append(Row(name=name, values=values | {"memory": memory[name]}, samples=samples))
    return found


def _process() -> None:
    """Print the extra memory of the way, in MB, that the command line names."""
    torch.set_num_threads(1)
    name, parameters, parent = sys.argv[1:]
    found: list[float] = []
    with tempfile.TemporaryDirectory(dir=parent) as made:
        folder = Path(made)

        def measure(trainer: Trainer) -> None:
            found.append(memory_of(WAYS[name](trainer), folder / "save"))

        train(Stack(int(parameters)), folder / "run", measure)
    print(found[0])


if __name__ == "__main__":
    _process()
