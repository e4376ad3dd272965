"""The task that all contenders train: model, data and optimizer, recreated from fixed seeds."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.utils import parameters_to_vector
from torch.utils.data import DataLoader, Dataset, TensorDataset

from benchmarks.timing import Clock, Lap

BATCH = 8
OPTIMIZERS = ("sgd", "adamw", "fused")


def perceptron(hidden: Sequence[int] = (64,)) -> nn.Sequential:
    """Return a perceptron, by default of 2,762 parameters, about the smallest that anybody trains.

    It maps vectors of shape (batch, 32) to scores of 10 classes, (batch, 10).

    Args:
        hidden: The widths of its hidden layers.
    """
    widths = [32, *hidden]
    layers = [part for pair in pairwise(widths) for part in (nn.Linear(*pair), nn.ReLU())]
    return nn.Sequential(*layers, nn.Linear(widths[-1], 10))


class Ticking(nn.Module):
    """Call a model, and count the calls outside of it, as it may be compiled."""

    def __init__(self, model: nn.Module, clock: Clock) -> None:
        super().__init__()
        self.model, self.clock = model, clock

    def forward(self, x: Tensor) -> Tensor:
        """Count the call and return what the model does."""
        self.clock.tick()
        return self.model(x)


class OwnTensors(Dataset[Any]):
    """A custom dataset over tensors, as most people write it."""

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
        backend: The backend of ``torch.compile``, for loops that compile; None trains uncompiled.
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
        backend: str | None = None,
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
        self.backend = backend
        self.bare = perceptron(hidden)
        """The model, for loops that compile it or a part of theirs."""
        forward = torch.compile(self.bare, backend=backend) if backend else self.bare
        self.model: nn.Module = Ticking(forward, self.clock)
        """The same, compiled at its first call if it is to be, and counting the calls."""
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
            return torch.optim.AdamW(self.bare.parameters(), lr=1e-3)
        fused = self._optimizer == "fused" or None  # None: torch decides
        return torch.optim.SGD(self.bare.parameters(), lr=1e-2, fused=fused)

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        """Return the mean loss over a batch; the model may be wrapped."""
        x, y = batch
        return cross_entropy(model(x), y)

    def lap(self) -> Lap:
        """Return the time per step, with a digest of the final weights; if compiled, with them."""
        return self.clock.lap(digest(self.bare) if self.backend is None else weights(self.bare))


def weights(model: nn.Module) -> Tensor:
    """Return a copy of all weights, in one dimension."""
    return parameters_to_vector(model.parameters()).detach()


def digest(model: nn.Module) -> str:
    """Return a hash of all weights, to the last bit."""
    found = weights(model).cpu().view(torch.uint8).numpy()
    return hashlib.sha256(found.tobytes()).hexdigest()


def nearly_equal(one: Tensor, other: Tensor) -> bool:
    """Return whether weights differ by rounding only, as compiled code may round otherwise."""
    return torch.allclose(one, other, rtol=1e-3, atol=1e-5)
