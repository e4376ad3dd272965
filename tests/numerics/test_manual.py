"""Manual optimisation: a plain loop on one process, the mean of the gradients on several."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from tests.numerics.running import assert_same, copy_of, on_processes, quiet_trainer
from trainer import TrainModule

SEED, EPOCHS, BATCH = 3, 2, 4


def tensors(samples: int) -> TensorDataset:
    return TensorDataset(torch.randn(samples, 5, generator=torch.Generator().manual_seed(6)))


class Pair(nn.Module):
    """A generator and a discriminator; the first draws noise, the second drops units."""

    def __init__(self, noisy: bool) -> None:
        super().__init__()
        self.noisy = noisy
        torch.manual_seed(7)
        self.generator = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 5))
        self.discriminator = nn.Sequential(
            nn.Linear(5, 8), nn.Tanh(), nn.Dropout(0.3 if noisy else 0.0), nn.Linear(8, 1)
        )

    def fakes(self, real: Tensor) -> Tensor:
        return self.generator(torch.randn(len(real), 2) if self.noisy else real[:, :2])

    def losses(self, real: Tensor, which: str) -> Tensor:
        fake = self.fakes(real)
        if which == "generator":
            return -self.discriminator(fake).mean()
        return (self.discriminator(fake.detach()) - self.discriminator(real)).mean()

    def make_optimizers(self) -> list[torch.optim.Optimizer]:
        return [
            torch.optim.Adam(self.generator.parameters(), lr=1e-2),
            torch.optim.SGD(self.discriminator.parameters(), lr=0.1, momentum=0.9),
        ]


NAMES = ("generator", "discriminator")


class Adversarial(TrainModule):
    def __init__(self, noisy: bool, max_grad_norm: float | None = None) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.pair = Pair(noisy)
        self.max_grad_norm = max_grad_norm
        self.losses: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> None:
        for name, optimizer in zip(NAMES, self.optimizers(), strict=True):
            optimizer.zero_grad()
            loss = self.pair.losses(batch[0], name)
            self.manual_backward(loss)

            if self.max_grad_norm is not None:
                self.clip_gradients(optimizer, max_grad_norm=self.max_grad_norm)
            optimizer.step()

            self.losses.append(loss.item())

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        return self.pair.make_optimizers()


def manual_fit(samples: int, noisy: bool, max_grad_norm: float | None) -> dict[str, Any]:
    module = Adversarial(noisy, max_grad_norm)
    trainer = quiet_trainer(max_epochs=EPOCHS, seed=SEED)
    trainer.fit(module, DataLoader(tensors(samples), batch_size=BATCH))
    return {
        "losses": module.losses,
        "weights": copy_of(module.pair),
        "steps": trainer.global_step,
    }


def plain_loop(samples: int, noisy: bool, max_grad_norm: float | None) -> tuple[Any, list[float]]:
    pair = Pair(noisy)
    optimizers = pair.make_optimizers()
    torch.manual_seed(SEED)
    losses = []
    for _ in range(EPOCHS):
        for real in tensors(samples).tensors[0].split(BATCH):
            for name, optimizer in zip(NAMES, optimizers, strict=True):
                optimizer.zero_grad()
                loss = pair.losses(real, name)
                loss.backward()
                if max_grad_norm is not None:
                    nn.utils.clip_grad_norm_(optimizer.param_groups[0]["params"], max_grad_norm)
                optimizer.step()
                losses.append(loss.item())
    return copy_of(pair), losses


@pytest.mark.parametrize("max_grad_norm", [None, 0.05])
@pytest.mark.parametrize("noisy", [False, True])
def test_manual_optimisation_is_a_plain_loop(noisy, max_grad_norm):
    trained = manual_fit(18, noisy, max_grad_norm)
    weights, losses = plain_loop(18, noisy, max_grad_norm)
    assert_same(trained["losses"], losses)
    assert_same(trained["weights"], weights)
    assert trained["steps"] == EPOCHS * 5  # a training_step in which optimizers step is one update


def simulated(samples: int, world: int, max_grad_norm: float | None) -> dict[str, Tensor]:
    """The reference: in each round the mean of the gradients of its batches, over all ranks."""
    pair = Pair(noisy=False)
    optimizers = pair.make_optimizers()
    for _ in range(EPOCHS):
        batches = tensors(samples).tensors[0].split(BATCH)
        for start in range(0, len(batches), world):
            for name, optimizer in zip(NAMES, optimizers, strict=True):
                optimizer.zero_grad()
                for real in batches[start : start + world]:
                    (pair.losses(real, name) / world).backward()
                if max_grad_norm is not None:
                    nn.utils.clip_grad_norm_(optimizer.param_groups[0]["params"], max_grad_norm)
                optimizer.step()
    return copy_of(pair)


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("max_grad_norm", [None, 0.05])
def test_optimizers_step_with_the_mean_gradient_over_the_ranks(ranks, world, max_grad_norm):
    # 18 samples are 5 batches: in the last round one rank has none, and adds zero.
    weights = simulated(18, world, max_grad_norm)
    results = on_processes(ranks, world, manual_fit, 18, False, max_grad_norm)
    for result in results:
        assert result["steps"] == EPOCHS * -(-5 // world)
        assert_same(result["weights"], results[0]["weights"])
        torch.testing.assert_close(result["weights"], weights, rtol=1e-5, atol=1e-6)


class ClippedEachBatch(TrainModule):
    """Clips after every backward, and steps after every second one."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.net = Pair(False).discriminator

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        self.manual_backward(self.net(batch[0]).square().mean())
        self.clip_gradients(optimizer, max_grad_norm=0.05)
        if batch_idx % 2:
            optimizer.step()
            optimizer.zero_grad()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def clipped_fit() -> dict[str, Tensor]:
    module = ClippedEachBatch()
    quiet_trainer(max_epochs=1).fit(module, DataLoader(tensors(16), batch_size=BATCH // 2))
    return copy_of(module)


def test_gradients_accumulated_after_clipping_are_averaged(ranks):
    net = Pair(False).discriminator
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for index, batch in enumerate(tensors(16).tensors[0].split(BATCH)):  # those of two ranks
        net(batch).square().mean().backward()
        nn.utils.clip_grad_norm_(net.parameters(), 0.05)
        if index % 2:
            optimizer.step()
            optimizer.zero_grad()
    results = on_processes(ranks, 2, clipped_fit)
    assert_same(results[1], results[0])
    reference = {f"net.{name}": value for name, value in copy_of(net).items()}
    for name, value in results[0].items():
        torch.testing.assert_close(value, reference[name], rtol=1e-5, atol=1e-7)


class Weighed(TrainModule):
    """Logs its rank where a step is over, on processes without a batch too."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.layer = nn.Linear(5, 1)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        self.manual_backward(self.layer(batch[0]).mean())
        optimizer.step()
        optimizer.zero_grad()

    def on_train_step_end(self) -> None:
        self.log("rank", float(self.trainer.global_rank), on_step=False, on_epoch=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_a_rank_without_a_batch_has_no_weight_in_logged_values(ranks3):
    def logged() -> float:
        trainer = quiet_trainer(max_epochs=1)
        trainer.fit(Weighed(), DataLoader(tensors(4 * BATCH), batch_size=BATCH))
        return trainer.callback_metrics["rank"]

    assert ranks3(logged) == [pytest.approx((0 * 2 + 1 + 2) / 4)] * 3


class ByHand(TrainModule):
    """Draws from a generator of its own, which it forgets at the end of a validation."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.net = nn.Linear(5, 1)
        self.automatic_optimization = False
        self.generator = torch.Generator().manual_seed(1)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.net(batch[0]).square().mean())
        optimizer.step()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        torch.randn(1, generator=self.generator)

    def on_validation_end(self) -> None:
        self.generator = None

    def on_validation_start(self) -> None:
        self.generator = torch.Generator().manual_seed(1)

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(self.parameters(), lr=0.1)]


class ChosenLate(ByHand):
    """Chooses manual optimisation in a hook."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = True

    def on_fit_start(self) -> None:
        self.automatic_optimization = False


def test_a_hook_may_choose_manual_optimisation(caplog):
    found = []
    for module in (ByHand(), ChosenLate()):
        loader = DataLoader(tensors(8), BATCH)
        quiet_trainer(max_epochs=1, seed=SEED).fit(module, loader, loader)
        found.append(module.net.state_dict())
    torch.testing.assert_close(found[1], found[0], rtol=0, atol=0)
    assert "had random generators when" not in caplog.text  # nothing was resumed
