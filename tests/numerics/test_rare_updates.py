"""Updates out of the ordinary, against a plain loop: sparse, without items, with closures."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from tests.helpers import isolation
from tests.numerics.running import Watch, on_processes, quiet_trainer
from trainer import DistributedDataParallelKwargs, PartialState, TrainModule

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
def test_sparse_gradients_beside_unused_parameters(ranks, world, accumulation, flags, items):
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
def test_closures_get_the_mean_gradient_and_loss(ranks, world, clips):
    # Of five batches the last finds only one process at work; the others' count as zero.
    expected = search_plainly(world, clips)
    for weights in on_processes(ranks, world, search, clips):
        torch.testing.assert_close(weights, expected, rtol=0, atol=1e-9)


def values_of(rank: int) -> list[Any]:
    """What closures return: numbers, a tensor, nothing."""
    return [0.1 + 1e-12 * rank, rank, torch.tensor([rank + 1.0]), None]


def stepped_apart() -> tuple[list[Any], Tensor]:
    """What an optimizer, or `training_step`, sees of a closure with each of these values."""
    returned: list[Any] = []

    class Calling(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            closure()  # it may be called as often as the optimizer likes
            returned.append(closure())
            super().step()

    class Module(Searching):
        def training_step(self, batch: Any, batch_idx: int) -> None:
            optimizer = self.optimizers()
            for value in values_of(self.global_rank):

                def closure(value: Any = value) -> Any:
                    self.zero_grad()
                    self.curve.loss(batch[0]).backward()
                    return value

                optimizer.step(closure)

        def configure_optimizers(self) -> Any:
            return Calling(self.curve.parameters(), lr=0.1)

    module = Module(False)
    data = DataLoader(TensorDataset(points()[: 2 * PartialState().num_processes]), batch_size=2)
    quiet_trainer(max_epochs=1).fit(module, data)
    return returned, module.curve.net[0].weight.detach()


def test_the_mean_of_what_closures_return(ranks):
    (first, here), (second, there) = on_processes(ranks, 2, stepped_apart)
    number, whole, tensor, none = first
    assert number == pytest.approx(0.1 + 0.5e-12, rel=0, abs=1e-16)
    assert (whole, none) == (0.5, None)
    torch.testing.assert_close(tensor, torch.tensor([1.5]), rtol=0, atol=0)
    assert list(map(str, first)) == list(map(str, second))
    torch.testing.assert_close(here, there, rtol=0, atol=0)


def test_closures_on_one_process():
    isolation.reset_trainer_state()
    returned, _ = stepped_apart()
    assert list(map(str, returned)) == list(map(str, values_of(0)))


# -- parameters that come from elsewhere, and later -------------------------------------------


class Growing(TrainModule):
    """Gets a second part before its second epoch; a factor that it `hides` it trains, if asked."""

    def __init__(self, hides: Tensor | None = None, *, manual: bool = False) -> None:
        super().__init__()
        torch.manual_seed(6)
        self.automatic_optimization = not manual
        self.first, self.second = nn.Linear(3, 3, dtype=DOUBLE), None
        self.hidden = [] if hides is None else [hides]

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        out = self.first(batch[0])
        for factor in self.hidden:
            out = out * factor
        loss = (out if self.second is None else self.second(out)).square().mean()
        if not self.automatic_optimization:
            self.manual_backward(loss)
            self.optimizers().step()
            self.optimizers().zero_grad()
        return loss

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            self.second = nn.Linear(3, 3, dtype=DOUBLE)
            self.second.weight.data.fill_(0.5)
            self.second.bias.data.fill_(0.5)
            self.optimizers().add_param_group({"params": list(self.second.parameters())})

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([*self.parameters(), *self.hidden], lr=0.1)


def grow(module: TrainModule, batch_size: int, accumulation: int) -> list[Tensor]:
    trainer = quiet_trainer(
        max_epochs=2, gradient_accumulation_steps=accumulation, max_grad_norm=0.1
    )
    trainer.fit(module, DataLoader(TensorDataset(points()), batch_size=batch_size))
    return [*module.state_dict().values(), *getattr(module, "hidden", [])]


def test_a_layer_added_later_is_weighted_and_clipped():
    torch.testing.assert_close(grow(Growing(), 2, 3), grow(Growing(), 6, 1), **EXACT)


def factor(kind: str) -> Tensor:
    ones = torch.ones(3, dtype=DOUBLE)
    return nn.Parameter(ones) if kind == "parameter" else ones.requires_grad_()


@pytest.mark.parametrize("kind", ["parameter", "tensor"])
def test_unregistered_parameters_train_on_one_process_with_a_warning(kind, caplog):
    one, many = (Growing(factor(kind)) for _ in range(2))
    torch.testing.assert_close(grow(many, 2, 3), grow(one, 6, 1), **EXACT)
    assert not torch.equal(one.hidden[0], torch.ones(3, dtype=DOUBLE))
    assert caplog.text.count("shapes (3,) that Growing does not have: no checkpoint") == 2
    assert ("in nn.Parameter first" in caplog.text) == (kind == "tensor")


def unregistered_fit(kind: str) -> str:
    """What a fit says that trains what is not the module's, or did before its module changed."""

    class Left(Growing):
        def on_fit_start(self) -> None:
            self.hidden.clear()  # it stays in the optimizer

    manual = kind == "manual"
    module = (Left if kind == "left" else Growing)(factor("parameter"), manual=manual)
    try:
        data = DataLoader(TensorDataset(points()), batch_size=2)
        quiet_trainer(max_epochs=1).fit(module, data)
    except ValueError as error:
        assert torch.equal(module.hidden[0], torch.ones(3, dtype=DOUBLE))  # nothing was updated
        return str(error)
    return "fitted"


@pytest.mark.parametrize("kind", ["trained", "left", "manual"])
def test_unregistered_parameters_are_refused_on_several_processes(ranks2, kind):
    for text in ranks2(unregistered_fit, kind):  # in manual optimisation optimizers average theirs
        refused = "averaged over the processes nor saved" in text
        assert refused if kind == "trained" else text == "fitted"


# -- what a window asks of the device ---------------------------------------------------------


@pytest.mark.parametrize("at", [0, 1, 2])
def test_a_loss_of_minus_infinity_anywhere_in_the_window_raises(at):
    class Falling(Growing):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return super().training_step(batch, batch_idx) - (torch.inf if batch_idx == at else 0)

    trainer = quiet_trainer(max_epochs=1, gradient_accumulation_steps=3)
    with pytest.raises(FloatingPointError, match="A loss of update 1"):
        trainer.fit(Falling(), DataLoader(TensorDataset(points()), batch_size=2))


# -- tied weights -----------------------------------------------------------------------------


class Tied(TrainModule):
    """Words, and the line that tells them apart by the same weights."""

    def __init__(self, sparse: bool, words_first: bool) -> None:
        super().__init__()
        torch.manual_seed(4)
        line = nn.Linear(3, 5, bias=False, dtype=DOUBLE)
        words = nn.Embedding(5, 3, sparse=sparse, dtype=DOUBLE)
        words.weight = line.weight
        parts = {"words": words, "line": line} if words_first else {"line": line, "words": words}
        for name, part in parts.items():
            self.add_module(name, part)

    def count_items(self, batch: Any) -> float:
        return float((batch >= 0).sum())

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return nn.functional.cross_entropy(self.line(self.words(batch.relu())), batch.relu())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.1)


def tied_fit(sparse: bool, words_first: bool) -> Tensor:
    module = Tied(sparse, words_first)
    quiet_trainer(max_epochs=1).fit(module, DataLoader(torch.tensor([1, 2, -1, -1, 3]), 1))
    return module.line.weight.detach()


@pytest.mark.parametrize("words_first", [True, False])
@pytest.mark.parametrize("world", [1, 2])
def test_a_sparse_embedding_tied_to_a_linear_layer(ranks, world, words_first):
    expected = on_processes(ranks, world, tied_fit, False, words_first)
    found = on_processes(ranks, world, tied_fit, True, words_first)
    torch.testing.assert_close(found, expected, **EXACT)


# -- batches without samples ------------------------------------------------------------------


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


def fitted(
    batches: list[list[int]], accumulation: int, boxes: int | None, **options: Any
) -> list[Tensor]:
    """The weights, the samples seen and the epoch's loss of `Mean`."""

    def collate(samples: list[Tensor]) -> list[Tensor]:
        x = torch.stack(samples) if samples else torch.zeros(0, 1, dtype=DOUBLE)
        return [x] if boxes is None else [torch.zeros(boxes, 4), x]

    module = Mean()
    options |= {"max_epochs": 1, "gradient_accumulation_steps": accumulation}
    trainer = quiet_trainer(**options)
    data: Any = torch.arange(6.0, dtype=DOUBLE)[:, None]
    trainer.fit(module, DataLoader(data, batch_sampler=batches, collate_fn=collate))
    seen = torch.tensor(trainer.samples_seen)
    return [*module.state_dict().values(), seen, trainer.callback_metrics["loss"]]


def test_an_empty_batch_has_no_weight() -> None:
    whole = fitted([[0, 1, 2, 3]], 1, None)
    torch.testing.assert_close(fitted([[0], [], [1, 2, 3]], 3, None), whole, **EXACT)
    apart = fitted([[0, 1], [2, 3]], 1, None)
    torch.testing.assert_close(fitted([[0, 1], [], [2, 3]], 1, None), apart, rtol=0, atol=0)


def test_a_batch_whose_first_tensor_has_no_rows() -> None:
    expected = fitted([[0, 1], [2, 3, 4]], 2, None)
    torch.testing.assert_close(fitted([[0, 1], [2, 3, 4]], 2, 0), expected, rtol=0, atol=0)


def test_a_first_window_without_samples_in_fp16() -> None:
    expected = fitted([[0, 1], [2, 3]], 1, None, mixed_precision="fp16")
    after_nothing = fitted([[], [0, 1], [2, 3]], 1, None, mixed_precision="fp16")
    torch.testing.assert_close(after_nothing, expected, rtol=0, atol=0)
