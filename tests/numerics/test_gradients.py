"""The gradient is that of the big batch, however it is split (P4).

The reference is a plain loop over whole batches: the samples of every window joined into one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss
from torch.utils.data import DataLoader, TensorDataset

from tests.numerics.running import Watch, assert_same, copy_of, on_processes, watched_fit
from trainer import TrainModule

IGNORED = -100
ADAMW, SGD = "adamw", "sgd"
WORLDS = (1, 2, 3)


class Regression(TrainModule):
    """Two layers on four numbers; the loss is a mean over samples."""

    features, targets = 4, 2

    def __init__(self, optimizer: str, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.net = nn.Sequential(nn.Linear(self.features, 8), nn.Tanh(), nn.Linear(8, self.targets))
        self.to(dtype)
        self.kind = optimizer

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        return mse_loss(self.net(x), y)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        if self.kind == ADAMW:
            return torch.optim.AdamW(self.parameters(), lr=1e-2, weight_decay=0.1)
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)

    @classmethod
    def data(cls, samples: int, dtype: torch.dtype) -> TensorDataset:
        generator = torch.Generator().manual_seed(2)
        shapes = ((samples, cls.features), (samples, cls.targets))
        return TensorDataset(
            *(torch.randn(shape, generator=generator, dtype=dtype) for shape in shapes)
        )


class Language(Regression):
    """Predicts tokens; the loss is a mean over those that are not ignored."""

    features, targets, words, length = 6, 5, 5, 7

    def __init__(self, optimizer: str, dtype: torch.dtype) -> None:
        super().__init__(optimizer, dtype)
        self.net = nn.Sequential(
            nn.Embedding(self.words, 6), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, self.words)
        )
        self.to(dtype)

    def loss(self, batch: Any) -> Tensor:
        tokens, labels = batch
        return cross_entropy(self.net(tokens).flatten(0, 1), labels.flatten(), ignore_index=IGNORED)

    def count_items(self, batch: Any) -> int:
        return int((batch[1] != IGNORED).sum())

    @classmethod
    def data(cls, samples: int, dtype: torch.dtype) -> TensorDataset:
        """Of every three sequences one has no token that counts; of the others 1 to 6 count."""
        generator = torch.Generator().manual_seed(3)
        tokens = torch.randint(cls.words, (samples, cls.length), generator=generator)
        labels = torch.randint(cls.words, (samples, cls.length), generator=generator)
        for number in range(samples):
            labels[number, 1 + (number * 5) % 6 if number % 3 else 0 :] = IGNORED
        return TensorDataset(tokens, labels)


class Sizes:
    """Batches of these sizes, in the order of the dataset."""

    def __init__(self, sizes: tuple[int, ...]) -> None:
        self.sizes = sizes

    def __iter__(self) -> Iterator[list[int]]:
        start = 0
        for size in self.sizes:
            yield list(range(start, start + size))
            start += size

    def __len__(self) -> int:
        return len(self.sizes)


@dataclass(frozen=True)
class Case:
    """What is trained, with batches of these sizes."""

    sizes: tuple[int, ...]
    kind: type[Regression] = Regression
    optimizer: str = ADAMW
    dtype: torch.dtype = torch.float64
    epochs: int = 2
    max_grad_norm: float | None = 0.2

    @property
    def data(self) -> TensorDataset:
        return self.kind.data(sum(self.sizes), self.dtype)


def equal(samples: int, size: int) -> tuple[int, ...]:
    """The sizes of equal batches, the last one short if it must be."""
    return tuple(min(size, samples - start) for start in range(0, samples, size))


def split_fit(case: Case, accumulation: int) -> tuple[Watch, dict[str, Tensor]]:
    """Train on this process, with its peers."""
    module = case.kind(case.optimizer, case.dtype)
    sizes = case.sizes
    if sizes == equal(sum(sizes), sizes[0]):
        loader = DataLoader(case.data, batch_size=sizes[0])
    else:
        loader = DataLoader(case.data, batch_sampler=Sizes(sizes))
    watch = watched_fit(
        module,
        loader,
        max_epochs=case.epochs,
        gradient_accumulation_steps=accumulation,
        max_grad_norm=case.max_grad_norm,
    )
    return watch, copy_of(module)


def big_batches(case: Case, window: int) -> tuple[Watch, dict[str, Tensor]]:
    """The reference: every `window` batches joined into one."""
    module = case.kind(case.optimizer, case.dtype)
    optimizer = module.configure_optimizers()
    watch = Watch()
    for _ in range(case.epochs):
        batches = list(Sizes(case.sizes))
        for start in range(0, len(batches), window):
            indices = [index for batch in batches[start : start + window] for index in batch]
            optimizer.zero_grad()
            loss = module.loss(case.data[indices])
            loss.backward()
            watch.on_before_optimizer_step(None, module, optimizer)
            if case.max_grad_norm is not None:
                nn.utils.clip_grad_norm_(module.parameters(), case.max_grad_norm)
            optimizer.step()
            watch.losses.append(loss.item())
    return watch, copy_of(module)


def assert_equal_to_big_batches(ranks: Any, case: Case, *, world: int, accumulation: int) -> None:
    expected, weights = big_batches(case, world * accumulation)
    exact = case.dtype == torch.float64
    tolerance = {"rtol": 0.0, "atol": 1e-12} if exact else {"rtol": 1e-4, "atol": 1e-6}
    for watch, trained in on_processes(ranks, world, split_fit, case, accumulation):
        assert len(watch.losses) == len(expected.losses)
        torch.testing.assert_close(watch.gradients, expected.gradients, **tolerance)
        torch.testing.assert_close(watch.losses, expected.losses, **tolerance)
        torch.testing.assert_close(trained, weights, **tolerance)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
@pytest.mark.parametrize("optimizer", [ADAMW, SGD])
@pytest.mark.parametrize(
    ("world", "accumulation", "size"), [(1, 1, 8), (1, 4, 2), (2, 1, 4), (2, 2, 2)]
)
def test_a_batch_of_eight_split_over_ranks_and_micro_batches(
    ranks, world, accumulation, size, optimizer, dtype
):
    case = Case(equal(32, size), optimizer=optimizer, dtype=dtype)
    assert_equal_to_big_batches(ranks, case, world=world, accumulation=accumulation)


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("accumulation", [1, 2, 3])
@pytest.mark.parametrize("samples", [7, 13, 20])
def test_short_last_windows_and_ranks_without_data(ranks, world, accumulation, samples):
    # 7 samples are 3 batches and one of 1: with 3 processes two of them have nothing in the end.
    case = Case(equal(samples, 2))
    assert_equal_to_big_batches(ranks, case, world=world, accumulation=accumulation)


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("accumulation", [1, 2, 4])
@pytest.mark.parametrize("optimizer", [ADAMW, SGD])
def test_unequal_micro_batches(ranks, world, accumulation, optimizer):
    case = Case((1, 3, 2, 2, 5, 1, 1, 4, 2, 1, 3), optimizer=optimizer)
    assert_equal_to_big_batches(ranks, case, world=world, accumulation=accumulation)


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("accumulation", [2, 4])
@pytest.mark.parametrize("optimizer", [ADAMW, SGD])
def test_token_weighted_losses(ranks, world, accumulation, optimizer):
    # Batches of one sequence: every third has no token at all, the first one too.
    case = Case(equal(16, 1), Language, optimizer)
    assert_equal_to_big_batches(ranks, case, world=world, accumulation=accumulation)


@pytest.mark.parametrize("world", [2, 3])
def test_token_weighted_losses_with_a_rank_without_tokens(ranks, world):
    case = Case((1, 2, 1, 2, 2, 1, 1, 1, 3), Language, max_grad_norm=None)
    assert_equal_to_big_batches(ranks, case, world=world, accumulation=1)


@pytest.mark.parametrize("optimizer", [ADAMW, SGD])
def test_a_window_without_tokens_has_zero_gradients(ranks, optimizer):
    case = Case((1, 1, 1, 1, 1, 1), SilentWindow, optimizer, epochs=1)
    results = [
        value
        for world, accumulation in [(1, 2), (2, 1)]
        for value in on_processes(ranks, world, split_fit, case, accumulation)
    ]
    for watch, _ in results:
        assert all(not gradient.any() for gradient in watch.gradients[1].values())
        assert watch.losses[1] == watch.losses[0]  # nothing was logged: the value before stands
    torch.testing.assert_close(
        [weights for _, weights in results], [results[0][1]] * len(results), rtol=0, atol=1e-12
    )


class SilentWindow(Language):
    """Of six sequences those in the middle have no token."""

    @classmethod
    def data(cls, samples: int, dtype: torch.dtype) -> TensorDataset:
        tokens, labels = super().data(samples + 1, dtype)[1:]
        labels[2:4] = IGNORED
        labels[[0, 1, 4, 5], 0] = 1
        return TensorDataset(tokens, labels)


def shuffled_fit(accumulation: int, size: int) -> tuple[Watch, dict[str, Tensor]]:
    module = Regression(ADAMW, torch.float64)
    loader = DataLoader(Regression.data(26, torch.float64), batch_size=size, shuffle=True)
    watch = watched_fit(
        module,
        loader,
        seed=5,
        max_epochs=2,
        gradient_accumulation_steps=accumulation,
        max_grad_norm=0.2,
    )
    return watch, copy_of(module)


def test_shuffled_training_on_any_number_of_ranks(ranks):
    expected, weights = shuffled_fit(1, 12)
    for world, accumulation, size in [(1, 4, 3), (2, 2, 3), (2, 1, 6), (3, 2, 2), (3, 1, 4)]:
        for watch, trained in on_processes(ranks, world, shuffled_fit, accumulation, size):
            torch.testing.assert_close(watch.losses, expected.losses, rtol=0, atol=1e-12)
            torch.testing.assert_close(watch.gradients, expected.gradients, rtol=0, atol=1e-12)
            torch.testing.assert_close(trained, weights, rtol=0, atol=1e-12)


@pytest.mark.parametrize("world", [2, 3])
def test_ranks_stay_bit_identical(ranks, world):
    case = Case((1, 3, 2, 2, 5, 1, 1), dtype=torch.float32)
    (first, weights), *others = on_processes(ranks, world, split_fit, case, 2)
    for watch, trained in others:
        assert_same(watch.gradients, first.gradients)
        assert_same(watch.losses, first.losses)
        assert_same(trained, weights)
