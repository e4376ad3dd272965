"""The task that all contenders train: model, data and optimizer, recreated from fixed seeds."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Dataset, TensorDataset

from benchmarks.timing import Clock, Lap

BATCH = 8
OPTIMIZERS = ("sgd", "adamw", "fused")


class Mlp(nn.Module):
    """A perceptron, by default of 2,762 parameters, about the smallest model that anybody trains.

    Args:
        clock: Counts the forward passes.
        hidden: The widths of its hidden layers.
    """

    def __init__(self, clock: Clock, hidden: Sequence[int] = (64,)) -> None:
        super().__init__()
        widths = [32, *hidden]
        layers = [part for pair in pairwise(widths) for part in (nn.Linear(*pair), nn.ReLU())]
        self.layers = nn.Sequential(*layers, nn.Linear(widths[-1], 10))
        self.clock = clock

    def forward(self, x: Tensor) -> Tensor:
        """Return scores of 10 classes, (batch, 10), for vectors of shape (batch, 32)."""
        self.clock.tick()
        return self.layers(x)


class OwnTensors(Dataset[Any]):
    """A class of one's own over tensors, as most write it."""

    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.x, self.y = x, y

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        return self.x[index], self.y[index]


class ComputedSamples(OwnTensors):
    """Samples that take some work each, as decoding or augmentation does."""

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        x, y = super().__getitem__(index)
        return (x - x.mean()) / x.std(), y


class BatchedTensors(Dataset[Any]):
    """Tensors of which any loader reads a whole batch at once, through ``__getitems__``."""

    def __init__(self, *tensors: Tensor) -> None:
        self.tensors = tensors

    def __len__(self) -> int:
        return len(self.tensors[0])

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        return tuple(tensor[index] for tensor in self.tensors)

    def __getitems__(self, indices: list[int]) -> list[Tensor]:
        return [tensor[indices] for tensor in self.tensors]


DATASETS: dict[str, Callable[..., Dataset[Any]]] = {
    "tensors": TensorDataset,
    "own": OwnTensors,
    "computed": ComputedSamples,
    "batched": BatchedTensors,
}


def as_it_is(batch: Any) -> Any:
    """Return the batch unchanged; the ``collate_fn`` of `BatchedTensors`."""
    return batch


class Task:
    """The task of training the perceptron in one pass with one batch per step.

    Args:
        steps: The number of steps.
        dataset: ``"tensors"`` is a `TensorDataset` and ``"own"`` a class that does the same, which
            loaders read sample by sample unless they optimise this; the samples of ``"computed"``
            take some work each; ``"batched"`` is read a batch at a time by every loader.
        optimizer: ``"sgd"`` or ``"adamw"``, with torch's defaults; ``"fused"`` is SGD that updates
            all parameters in one operation.
        hidden: The widths of the perceptron's hidden layers.
        rank: The rank of this process, which gets every ``world_size``-th batch.
        world_size: The number of processes.
    """

    precision = "no"
    device = "cpu"

    def __init__(
        self,
        steps: int,
        *,
        dataset: str = "tensors",
        optimizer: str = "sgd",
        hidden: Sequence[int] = (64,),
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        generator = torch.Generator().manual_seed(1)
        number = steps * world_size * BATCH
        x = torch.randn(number, 32, generator=generator)
        y = torch.randint(10, (number,), generator=generator)
        self.clock = Clock(steps)
        torch.manual_seed(2)
        self.model: nn.Module = Mlp(self.clock, hidden)
        self.dataset: Dataset[Any] = DATASETS[dataset](x, y)
        settings: dict[str, Any] = {"collate_fn": as_it_is} if dataset == "batched" else {}
        self._optimizer = optimizer
        self.whole: DataLoader[Any] = DataLoader(self.dataset, batch_size=BATCH, **settings)
        """The loader with the batches of all processes, for trainers that shard it themselves."""
        self.loader = self.whole
        """The loader with the batches of this process."""
        if world_size > 1:
            own = list(self.whole.batch_sampler)[rank::world_size]
            self.loader = DataLoader(self.dataset, batch_sampler=own, **settings)

    def optimizer(self) -> torch.optim.Optimizer:
        """Return an optimizer of the model's parameters."""
        if self._optimizer == "adamw":
            return torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        fused = self._optimizer == "fused" or None  # None: torch decides
        return torch.optim.SGD(self.model.parameters(), lr=1e-2, fused=fused)

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        """Return the mean loss over a batch; the model may be wrapped."""
        x, y = batch
        return cross_entropy(model(x), y)

    def lap(self) -> Lap:
        """Return the time per step, with a digest of the final weights."""
        return self.clock.lap(digest(self.model))


def digest(model: nn.Module) -> str:
    """Return a hash of all weights, to the last bit."""
    found = hashlib.sha256()
    for parameter in model.parameters():
        found.update(parameter.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()
