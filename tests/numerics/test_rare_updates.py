"""Updates out of the ordinary, against a plain loop: sparse, without items, with closures."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from tests.numerics.running import Watch, on_processes, quiet_trainer
from trainer import DistributedDataParallelKwargs, TrainModule

DOUBLE = torch.float64
EXACT = {"rtol": 0.0, "atol": 1e-12}


class Lookup(nn.Module):
    """Words and a line; batches of a `flag` of 0 leave the words alone. `spare` is never used."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.line = nn.Linear(3, 2, dtype=DOUBLE)
        self.words = nn.Embedding(5, 2, sparse=True, dtype=DOUBLE)
        self.spare = nn.Linear(2, 2, dtype=DOUBLE)

    def loss(self, x: Tensor, word: Tensor, flag: Tensor) -> Tensor:
        out = self.line(x)
        if flag.any():
            out = out + self.words(word)
        return out.square().mean()

    def make_optimizers(self) -> list[torch.optim.Optimizer]:
        dense = [*self.line.parameters(), *self.spare.parameters()]
        return [
            torch.optim.AdamW(dense, lr=0.05, weight_decay=0.1),
            torch.optim.SparseAdam(list(self.words.parameters()), lr=0.05),
        ]


def rows(flags: Sequence[int], items: Sequence[int]) -> list[tuple[Tensor, ...]]:
    """One batch of a single sample for each flag; `items` of it count."""
    generator = torch.Generator().manual_seed(9)
    x = torch.randn(len(flags), 3, generator=generator, dtype=DOUBLE)
    words = torch.arange(len(flags)) % 5
    return [(x[i], words[i], torch.tensor(flags[i]), torch.tensor(items[i])) for i in range(len(x))]


class Words(TrainModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = Lookup()

    def count_items(self, batch: Any) -> Tensor:
        return batch[3].sum()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.net.loss(*batch[:3])

    def configure_optimizers(self) -> Any:
        return self.net.make_optimizers()


def words_fit(data: list[tuple[Tensor, ...]], accumulation: int) -> list[dict[str, Tensor]]:
    watch = Watch()
    searching = DistributedDataParallelKwargs(find_unused_parameters=True)
    trainer = quiet_trainer(
        max_epochs=2,
        gradient_accumulation_steps=accumulation,
        kwargs_handlers=[searching],
        callbacks=[watch],
    )
    trainer.fit(Words(), DataLoader(data, batch_size=1))
    return watch.weights


def words_plainly(data: list[tuple[Tensor, ...]], window: int) -> list[dict[str, Tensor]]:
    net = Lookup()
    optimizers = net.make_optimizers()
    weights = []
    for start in [*range(0, len(data), window)] * 2:
        net.zero_grad()
        parts = data[start : start + window]
        total = sum(part[3].item() for part in parts)
        for part in parts:
            if part[3]:
                x, word, flag = (tensor[None] for tensor in part[:3])
                (net.loss(x, word, flag) * part[3] / total).backward()
        if not total:  # a gradient of zero, which has no rows where it is sparse
            for parameter in net.parameters():
                parameter.grad = torch.zeros_like(parameter)
            net.words.weight.grad = net.words.weight.detach().mul(0).to_sparse(1)
        for optimizer in optimizers:
            optimizer.step()
        weights.append({f"net.{name}": w.clone() for name, w in net.state_dict().items()})
    return weights


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize(
    ("flags", "items"),
    [
        ([1, 1, 1, 1, 1], [1, 1, 1, 1, 1]),  # the last window lacks a batch on some processes
        ([1, 0, 0, 0, 0, 0, 0, 1, 1, 1], [1] * 10),  # looked up by some processes, or by none
        ([1] * 18, [2, 1, 3, 1, 1, 1, *[0] * 9, 4, 1, 1]),  # windows without an item
    ],
    ids=["short", "branches", "silent"],
)
def test_sparse_words_among_parameters_that_not_every_loss_uses(
    ranks, world, accumulation, flags, items
):
    data = rows(flags, items)
    expected = words_plainly(data, world * accumulation)
    for weights in on_processes(ranks, world, words_fit, data, accumulation):
        torch.testing.assert_close(weights, expected, **EXACT)


# -- closures --------------------------------------------------------------------------------


class Curve(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).to(DOUBLE)

    def loss(self, x: Tensor) -> Tensor:
        return (self.net(x) - x.sum(-1, keepdim=True).sin()).square().mean()

    def make_optimizer(self) -> torch.optim.Optimizer:
        # Whose line search goes by the losses, and by how they change.
        return torch.optim.LBFGS(self.parameters(), max_iter=5, line_search_fn="strong_wolfe")


class Searching(TrainModule):
    def __init__(self, clips: bool) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.curve = Curve()
        self.clips = clips

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = self.curve.loss(batch[0])
            self.manual_backward(loss)
            if self.clips:
                self.clip_gradients(optimizer, max_grad_norm=0.5)
            return loss

        optimizer.step(closure)

    def configure_optimizers(self) -> Any:
        return self.curve.make_optimizer()


def points() -> Tensor:
    return torch.randn(10, 3, generator=torch.Generator().manual_seed(2), dtype=DOUBLE)


def search(clips: bool) -> list[dict[str, Tensor]]:
    watch = Watch()
    trainer = quiet_trainer(max_epochs=2, callbacks=[watch])
    trainer.fit(Searching(clips), DataLoader(TensorDataset(points()), batch_size=2))
    return watch.weights


def search_plainly(world: int, clips: bool) -> list[dict[str, Tensor]]:
    curve = Curve()
    optimizer = curve.make_optimizer()
    batches, weights = points().split(2), []
    for start in [*range(0, len(batches), world)] * 2:

        def closure(parts: Any = batches[start : start + world]) -> Tensor:
            optimizer.zero_grad()
            loss = sum(curve.loss(part) for part in parts) / world
            loss.backward()
            if clips:
                nn.utils.clip_grad_norm_(curve.parameters(), 0.5)
            return loss

        optimizer.step(closure)
        weights.append({f"curve.{name}": w.clone() for name, w in curve.state_dict().items()})
    return weights


@pytest.mark.parametrize("clips", [False, True])
@pytest.mark.parametrize("world", [1, 2, 3])
def test_closures_have_the_mean_gradient_and_the_mean_loss(ranks, world, clips):
    # Of five batches the last finds only one process at work; the others' count as zero.
    expected = search_plainly(world, clips)
    for weights in on_processes(ranks, world, search, clips):
        torch.testing.assert_close(weights, expected, rtol=0, atol=1e-9)


def stepped_apart() -> tuple[Any, Tensor]:
    """A closure with a number, and one with nothing, for an optimizer that calls it twice."""
    returned: list[Any] = []

    class Calling(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            closure()
            returned.append(closure())
            super().step()

    class Module(Searching):
        def training_step(self, batch: Any, batch_idx: int) -> None:
            optimizer = self.optimizers()
            for value in (self.global_rank + 1.0, None):

                def closure(value: Any = value) -> Any:
                    self.zero_grad()
                    self.curve.loss(batch[0]).backward()
                    return value

                optimizer.step(closure)

        def configure_optimizers(self) -> Any:
            return Calling(self.curve.parameters(), lr=0.1)

    module = Module(False)
    quiet_trainer(max_epochs=1).fit(module, DataLoader(TensorDataset(points()[:4]), batch_size=2))
    return returned, module.curve.net[0].weight.detach()


def test_closures_may_return_a_number_or_nothing(ranks):
    (first, here), (second, there) = on_processes(ranks, 2, stepped_apart)
    assert [None if each is None else float(each) for each in first] == [1.5, None]
    assert list(map(str, first)) == list(map(str, second))
    torch.testing.assert_close(here, there, rtol=0, atol=0)


# -- parameters that come from elsewhere, and later -------------------------------------------


class Growing(TrainModule):
    """Gets a second part before its second epoch."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(6)
        self.first, self.second = nn.Linear(3, 3, dtype=DOUBLE), None
        self.hidden = [nn.Parameter(torch.ones(3, dtype=DOUBLE))]
        self.hides = False

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        out = self.first(batch[0]) * self.hidden[0]
        return (out if self.second is None else self.second(out)).square().mean()

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            self.second = nn.Linear(3, 3, dtype=DOUBLE)
            self.second.weight.data.fill_(0.5)
            self.second.bias.data.fill_(0.5)
            self.optimizers().add_param_group({"params": list(self.second.parameters())})

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([*self.parameters(), *self.hidden[: self.hides]], lr=0.1)


def grow(batch_size: int, accumulation: int) -> dict[str, Tensor]:
    module = Growing()
    trainer = quiet_trainer(
        max_epochs=2, gradient_accumulation_steps=accumulation, max_grad_norm=0.1
    )
    trainer.fit(module, DataLoader(TensorDataset(points()), batch_size=batch_size))
    return module.state_dict()


def test_a_part_that_is_added_later_is_weighted_and_clipped_with_the_rest():
    torch.testing.assert_close(grow(2, 3), grow(6, 1), **EXACT)


def test_an_optimizers_parameters_are_the_modules():
    module = Growing()
    module.hides = True
    with pytest.raises(ValueError, match=r"shapes \(3,\), that Growing does not have.*Parameter"):
        quiet_trainer(max_epochs=1).fit(module, DataLoader(TensorDataset(points())))
    assert torch.equal(module.hidden[0], torch.ones(3, dtype=DOUBLE))  # nothing was updated


class Mean(TrainModule):
    """The mean of squares of what comes last in a batch."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.line = nn.Linear(1, 1, dtype=DOUBLE)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.line(batch[-1]).square().mean()
        self.log("loss", loss, on_step=False, on_epoch=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fitted(batches: list[list[int]], accumulation: int, boxes: int | None) -> list[Tensor]:
    """The weights, the samples seen and the epoch's loss of `Mean`."""

    def collate(samples: list[Tensor]) -> list[Tensor]:
        x = torch.stack(samples) if samples else torch.zeros(0, 1, dtype=DOUBLE)
        return [x] if boxes is None else [torch.zeros(boxes, 4), x]

    module = Mean()
    trainer = quiet_trainer(max_epochs=1, gradient_accumulation_steps=accumulation)
    data: Any = torch.arange(6.0, dtype=DOUBLE)[:, None]
    trainer.fit(module, DataLoader(data, batch_sampler=batches, collate_fn=collate))
    seen = torch.tensor(trainer.samples_seen)
    return [*module.state_dict().values(), seen, trainer.callback_metrics["loss"]]


def test_a_batch_without_samples_counts_for_nothing() -> None:
    whole = fitted([[0, 1, 2, 3]], 1, None)
    torch.testing.assert_close(fitted([[0], [], [1, 2, 3]], 3, None), whole, **EXACT)
    apart = fitted([[0, 1], [2, 3]], 1, None)
    torch.testing.assert_close(fitted([[0, 1], [], [2, 3]], 1, None), apart, rtol=0, atol=0)


def test_a_batch_whose_first_tensor_is_no_row_a_sample_counts_for_its_samples() -> None:
    expected = fitted([[0, 1], [2, 3, 4]], 2, None)
    torch.testing.assert_close(fitted([[0, 1], [2, 3, 4]], 2, 0), expected, rtol=0, atol=0)
