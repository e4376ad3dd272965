"""How long the processes of a pipeline wait for each other, and what they keep meanwhile.

Layers wait instead of computing, as a host does for its device, so that the processes may share
cores. `measure` runs on each of them.
"""

from __future__ import annotations

import tempfile
import time
from argparse import Namespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.ddp import process
from benchmarks.report import Column, Result, Row
from benchmarks.timing import is_chosen, quartiles
from callbacks import Callback
from trainer import ParallelismConfig, Trainer, TrainModule
from trainer.configuration.parallelism import PIPELINE_SCHEDULES

PROCESSES = 4
MICRO_BATCHES = (4, 16)
LAYERS, WIDTH = 8, 2**18  # of the model; the values of a sample, 1 MB
SECONDS = 0.02  # of a layer's forward pass; backward takes twice as long
GROUP = "stages of layers"
COLUMNS = (
    Column("idle", "idle, %"),
    Column("bubble", "bubble, %"),
    Column("kept", "activations, MB", 0),
)


class _Wait(torch.autograd.Function):
    """Takes its time forward and backward, and keeps its input."""

    @staticmethod
    def forward(ctx: Any, layer: Layer, x: Tensor, weight: Tensor) -> Tensor:
        ctx.layer = layer
        ctx.save_for_backward(x)
        layer.wait(SECONDS, x.nbytes)
        return x * weight

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor, Tensor]:
        (x,) = ctx.saved_tensors
        ctx.layer.wait(2 * SECONDS, -x.nbytes)
        return None, gradient, (gradient * x).sum()


class Layer(nn.Module):
    """A layer that takes its time.

    Attributes:
        busy: The seconds that layers of this process have taken.
        kept: The bytes that they keep for backward.
        most: The most that they have kept.
    """

    busy, kept, most = 0.0, 0, 0

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        """Return the input, scaled."""
        if type(x) is not Tensor:  # of shapes alone
            return x * 1
        return _Wait.apply(self, x, self.weight)  # type: ignore[no-any-return]

    def wait(self, seconds: float, nbytes: int) -> None:
        """Take a time, and keep bytes more or less."""
        begin = time.perf_counter()
        time.sleep(seconds)
        Layer.kept += nbytes
        Layer.most = max(Layer.most, Layer.kept)
        Layer.busy += time.perf_counter() - begin


class Model(TrainModule):
    """Layers that take as long as each other."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(*(Layer() for _ in range(LAYERS)))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Return a loss."""
        loss: Tensor = self.net(batch[0]).mean()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return SGD."""
        return torch.optim.SGD(self.parameters(), lr=0.0)


class _Share(Callback):
    """Notes the share of each step in which this process's layers do not run."""

    def __init__(self) -> None:
        self.idle: list[float] = []
        self.begin = self.busy = 0.0

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        dist.barrier()
        self.begin, self.busy = time.perf_counter(), Layer.busy

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        seconds = time.perf_counter() - self.begin
        self.idle.append(100 * (1 - (Layer.busy - self.busy) / seconds))


def names() -> list[str]:
    """Return the names of all rows."""
    return [_name(kind, number) for number in MICRO_BATCHES for kind in PIPELINE_SCHEDULES]


def _name(kind: str, number: int) -> str:
    return f"{kind}, {number} micro-batches"


def row(kind: str, number: int, repeats: int) -> Row:
    """Return the figures of a schedule, over all processes."""
    Layer.busy, Layer.kept, Layer.most = 0.0, 0, 0
    size, share = dist.get_world_size(), _Share()
    config = ParallelismConfig(pp_size=size, pp_schedule=kind, pp_microbatches=number)
    batches = DataLoader(TensorDataset(torch.zeros((repeats + 1) * number, WIDTH)), number)
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(
            cpu=True,
            parallelism_config=config,
            max_epochs=1,
            checkpointing=False,
            progress_bar=False,
            project_dir=folder,
            callbacks=[share],
        )
        trainer.fit(Model(), batches)
    of_ranks: list[Any] = [None] * size
    dist.all_gather_object(of_ranks, (share.idle[1:], Layer.most))  # the first looks for shapes
    steps = [sum(of_step) / size for of_step in zip(*(idle for idle, _ in of_ranks), strict=True)]
    passes = number * (config.pp_stages_per_rank or 1)
    return Row(
        name=_name(kind, number),
        group=GROUP,
        values={
            "idle": quartiles(steps),
            "bubble": 100 * (size - 1) / (passes + size - 1),
            "kept": max(most for _, most in of_ranks) / 1e6,
        },
        samples={"idle": steps},
    )


def measure(options: Namespace) -> Result:
    """Run the benchmark on this process, with its peers."""
    chosen = [
        row(kind, number, options.repeats)
        for number in MICRO_BATCHES
        for kind in PIPELINE_SCHEDULES
        if is_chosen(_name(kind, number), options.rows)
    ]
    return Result(benchmark="pipeline", title="", columns=COLUMNS, rows=chosen, settings={})


if __name__ == "__main__":
    process(measure)
