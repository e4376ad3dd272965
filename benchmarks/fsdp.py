"""The overhead of the loop over FSDP2, and sharded checkpoints, on two processes of one machine.

`run` starts the processes with ``torchrun``; each runs this module as a script.
"""

from __future__ import annotations

import os
import shutil
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset

from benchmarks import contestants
from benchmarks.arguments import at_least
from benchmarks.checkpoint import WIDTH, AtTheBoundary
from benchmarks.ddp import PROCESSES, defaults, process, run_on_processes, shared_folder
from benchmarks.report import Column, Result, Row
from benchmarks.task import Task, digest
from benchmarks.timing import (
    MICROSECONDS,
    Contender,
    Lap,
    chosen,
    is_chosen,
    quartiles,
    take_turns,
    timed,
    unseen,
)
from trainer import Accelerator, FullyShardedDataParallelPlugin, Trainer, TrainModule
from trainer.state import AcceleratorState

STEPS, REPEATS = 100, 8
LAYERS = 24  # of the model that is saved, of a million parameters each
COLUMNS = (
    *MICROSECONDS,
    Column("save", "saved, MB/s", 0),
    Column("load", "loaded, MB/s", 0),
    Column("stall", "training waits, ms"),
)
SAVED = (
    "plain files",
    "torch.distributed.checkpoint",
    "torch.distributed.checkpoint, async_save",
    "Cadence Accelerator, save_state and load_state",
    "Cadence Trainer, waiting",
    "Cadence Trainer, in the background",
)
# The widths of the hidden layers, and by how much the number of steps is divided.
GROUPS: dict[str, tuple[tuple[int, ...], int]] = {
    "1.1 million parameters": ((1024, 1024), 1),
    "9.6 million parameters": ((3072, 3072), 4),
}


def add_arguments(parser: ArgumentParser) -> None:
    """Add the options of this benchmark."""
    parser.add_argument(
        "--processes", type=at_least(1), default=PROCESSES, help="how many to start"
    )


# -- a step ----------------------------------------------------------------------------------------


def is_unit(part: nn.Module) -> bool:
    """Return whether a layer gathers its parameters by itself: all but the last one."""
    return isinstance(part, nn.Linear) and part.out_features > 10


def plugin() -> FullyShardedDataParallelPlugin:
    """Return the settings that shard a model as `by_hand` does."""
    return FullyShardedDataParallelPlugin(auto_wrap_policy=is_unit)


class ShardedTask(Task):
    """A task whose model is sharded in place."""

    def lap(self) -> Lap:
        """Return the time per step, with a digest of the whole final weights."""
        whole: list[Any] = [each.detach() for each in self.bare.parameters()]
        return self.clock.lap(digest(nn.ParameterList(each.full_tensor() for each in whole)))


def by_hand(task: Task) -> None:
    """Train with the loop of PyTorch's FSDP2 tutorial."""
    for layer in filter(is_unit, task.bare.modules()):
        fully_shard(layer)
    model = fully_shard(task.model)
    optimizer = task.optimizer()
    model.train()
    for batch in task.loader:
        loss = task.loss(model, batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def rows(steps: int, *hidden: int) -> list[Contender]:
    """Return the contenders, the reference first, for hidden layers of these widths."""

    def turn(train: Callable[[Task], None]) -> Lap:
        rank, world_size = dist.get_rank(), dist.get_world_size()
        task = ShardedTask(steps, hidden=hidden, rank=rank, world_size=world_size)
        dist.barrier()
        train(task)
        return task.lap()

    kinds: dict[str, Callable[[Any], None]] = {
        "FSDP2 loop by hand": by_hand,
        "Cadence Trainer, everything off": partial(contestants.barebones, fsdp_plugin=plugin()),
        "Cadence Trainer, defaults": partial(defaults, fsdp_plugin=plugin()),
        "Cadence Accelerator": partial(contestants.own_loop, fsdp_plugin=plugin()),
    }
    return [Contender(name=name, run=partial(turn, train)) for name, train in kinds.items()]


# -- a checkpoint ----------------------------------------------------------------------------------


class Stack(TrainModule):
    """Layers of about a million parameters."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers)))

    def forward(self, x: Tensor) -> Tensor:
        """Return what the layers give, of shape (batch, WIDTH)."""
        return self.layers(x)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Return a loss that gives every parameter a gradient."""
        return self(batch[0]).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return AdamW, whose state is twice as large as the weights."""
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


@dataclass(kw_only=True)
class Way:
    """One way to save and load.

    Attributes:
        save: Saves to a path that does not exist yet; training waits for this call.
        finish: Waits until the save is on the disk.
        load: Loads what was saved there; None where another row shows it.
    """

    save: Callable[[Path], object]
    finish: Callable[[], object] = dist.barrier
    load: Callable[[Path], object] | None = None


def write_plain(data: Tensor, path: Path) -> None:
    """Write this process's bytes to a plain file and sync it: the best that the disk can do."""
    path.mkdir(exist_ok=True)
    with (path / str(dist.get_rank())).open("wb") as file:
        file.write(data.numpy())
        file.flush()
        os.fsync(file.fileno())


def read_plain(data: Tensor, path: Path) -> None:
    """Read them back."""
    with (path / str(dist.get_rank())).open("rb") as file:
        file.readinto(data.numpy())


class Distributed:
    """``torch.distributed.checkpoint``, as its documentation shows it."""

    def __init__(self, model: nn.Module, optimizer: Any) -> None:
        self.model, self.optimizer = model, optimizer
        self.group = dist.new_group(backend="gloo")
        self.saved: Any = None

    def state(self) -> dict[str, Any]:
        """Return the state, which refers to the tensors that are trained."""
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer}

    def save(self, path: Path) -> None:
        """Save, and wait."""
        dcp.save(self.state(), checkpoint_id=path)

    def save_aside(self, path: Path) -> None:
        """Copy the state to the host and save it on a thread."""
        self.saved = dcp.async_save(self.state(), checkpoint_id=path, process_group=self.group)

    def finish(self) -> None:
        """Wait for the thread, on all processes."""
        self.saved.result()
        dist.barrier()

    def load(self, path: Path) -> None:
        """Load into the tensors that there are."""
        state = self.state()
        dcp.load(state, checkpoint_id=path)
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )


def loop_of(accelerator: Accelerator, layers: int) -> None:
    """Prepare a model for `save_state`, and make one step."""
    stack = Stack(layers)
    model, optimizer = accelerator.prepare(stack, stack.configure_optimizers())
    accelerator.backward(model(torch.ones(1, WIDTH)).square().mean())
    optimizer.step()
    optimizer.zero_grad()


def ways_of(trainer: Trainer, accelerator: Accelerator) -> dict[str, Way]:
    """Return the ways to save and load, the reference first."""
    model, optimizer = trainer.module, trainer.optimizers[0].optimizer
    torchs = Distributed(model, optimizer)
    parts: list[Any] = list(model.parameters())
    parts += [each for state in optimizer.state.values() for each in state.values() if each.ndim]
    size = sum(part.to_local().nbytes for part in parts)
    data = torch.ones(size, dtype=torch.uint8)
    ways = (
        Way(save=partial(write_plain, data), load=partial(read_plain, data)),
        Way(save=torchs.save, load=torchs.load),
        Way(save=torchs.save_aside, finish=torchs.finish),
        Way(save=accelerator.save_state, load=accelerator.load_state),
        Way(save=trainer.save_checkpoint),
        Way(
            save=partial(trainer.save_checkpoint, background=True),
            finish=trainer.wait_for_save,
        ),
    )
    return dict(zip(SAVED, ways, strict=True))


def turn(way: Way, path: Path) -> dict[str, float]:
    """Save and load once; return the seconds."""
    if dist.get_rank() == 0:
        os.sync()  # earlier writes that are still pending must not count for this save
    dist.barrier()
    stall = timed(lambda: way.save(path)).wall
    seconds = {"stall": stall, "save": stall + timed(way.finish).wall}
    if way.load is not None:
        load = way.load
        dist.barrier()
        seconds["load"] = timed(lambda: (load(path), dist.barrier())).wall
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(path)
    return seconds


def checkpoints(layers: int, repeats: int, only: list[str]) -> list[Row]:
    """Measure the ways to save and load."""
    times: dict[str, list[dict[str, float]]] = {}

    def measure(trainer: Trainer) -> None:
        ways = ways_of(trainer, accelerator)
        for number in range(repeats + 1):
            for name, way in ways.items():
                if name == next(iter(ways)) or is_chosen(name, only):
                    times.setdefault(name, []).append(turn(way, folder / f"save-{number}"))

    AcceleratorState._reset_state()
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin())
    loop_of(accelerator, layers)
    with shared_folder() as folder, unseen():
        trainer = Trainer(
            accelerator=accelerator,
            max_steps=1,
            checkpointing=False,
            progress_bar=False,
            project_dir=folder / "run",
            callbacks=[AtTheBoundary(measure)],
        )
        batches = TensorDataset(torch.ones(dist.get_world_size(), WIDTH))
        trainer.fit(Stack(layers), DataLoader(batches))
    size = 3 * 4 * layers * WIDTH**2  # weights and two values of AdamW, in float32
    return [
        Row(
            name=name,
            group=f"a checkpoint of {size / 1e6:,.0f} MB",
            values={key: quartiles(values) for key, values in samples.items()},
            samples=samples,
        )
        for name, turns in times.items()
        # the first round, which allocates what later ones reuse, is not counted
        if (samples := _samples(turns[1:], size))
    ]


def _samples(turns: list[dict[str, float]], size: int) -> dict[str, list[float]]:
    found = {"stall": [1e3 * each["stall"] for each in turns]}
    for key in ("save", "load"):
        if key in turns[0]:
            found[key] = [size / 1e6 / each[key] for each in turns]
    return found


# -- both ------------------------------------------------------------------------------------------


def names() -> list[str]:
    """Return the names of all rows."""
    return [*(contender.name for contender in rows(STEPS)), *SAVED]


def measure(options: Namespace) -> Result:
    """Run the benchmark as one of the processes; each has its own clock."""
    found = [
        row
        for group, (hidden, fewer) in GROUPS.items()
        for row in take_turns(
            chosen(rows(max(5, options.steps // fewer), *hidden), options.rows),
            options.repeats,
            group=group,
        )
    ]
    return Result(
        benchmark="fsdp",
        title=f"A step and a checkpoint on {dist.get_world_size()} processes with gloo, on the "
        "first one",
        columns=COLUMNS,
        rows=found + checkpoints(LAYERS, options.repeats, options.rows),
        settings={
            "steps": options.steps,
            "repeats": options.repeats,
            "processes": dist.get_world_size(),
        },
        notes=[
            "All rows with steps reached the same weights, bit for bit.",
            "Every save is synced to the disk before it counts as saved; loads read from the page "
            "cache. Cadence also writes hashes, and checks them when it loads.",
        ],
    )


def run(options: Namespace) -> Result:
    """Start the processes, wait for them and load their result."""
    return run_on_processes("fsdp", options)


if __name__ == "__main__":
    process(measure)
