"""On one process training is a plain PyTorch loop, to the last bit."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import OneCycleLR, StepLR
from torch.utils.data import DataLoader, TensorDataset

from tests.numerics.running import Watch, assert_same, copy_of, quiet_trainer
from trainer import Accelerator, TrainModule

SEED, EPOCHS, BATCH = 11, 3, 6


@dataclass(frozen=True)
class Variant:
    """What is done beside the plain update."""

    samples: int = 24
    dropout: float = 0.0
    accumulation: int = 1
    precision: str = "no"
    schedule: str | None = None
    max_grad_norm: float | None = None
    batch_norm: bool = False

    @property
    def updates(self) -> int:
        batches = -(-self.samples // BATCH)
        return EPOCHS * -(-batches // self.accumulation)

    def __str__(self) -> str:
        return "-".join(f"{name}={value}" for name, value in vars(self).items() if value)


VARIANTS = [
    Variant(),
    Variant(samples=23, dropout=0.5, batch_norm=True),  # a short last batch
    Variant(accumulation=2),
    Variant(accumulation=4, dropout=0.5, schedule="one_cycle", max_grad_norm=0.1),
    Variant(accumulation=2, precision="bf16", schedule="step"),
    Variant(samples=23, dropout=0.5, precision="bf16", schedule="one_cycle", max_grad_norm=0.1),
]
every_variant = pytest.mark.parametrize("variant", VARIANTS, ids=str)


class Classifier(TrainModule):
    def __init__(self, variant: Variant) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(5, 16),
            nn.BatchNorm1d(16) if variant.batch_norm else nn.Identity(),
            nn.ReLU(),
            nn.Dropout(variant.dropout),
            nn.Linear(16, 3),
        )
        self.schedule, self.total = variant.schedule, variant.updates

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("loss", loss)
        return loss

    def loss(self, batch: Any) -> Tensor:
        return cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        if self.schedule is None:
            return optimizer
        schedule: Any = StepLR(optimizer, 2, gamma=0.5)
        if self.schedule == "one_cycle":
            schedule = OneCycleLR(optimizer, max_lr=0.1, total_steps=self.total)
        return {"optimizer": optimizer, "scheduler": schedule, "interval": "step"}


def parts(variant: Variant) -> tuple[Classifier, DataLoader[Any]]:
    """The module and the data, made from the same seed every time; training has its own."""
    torch.manual_seed(4)
    data = TensorDataset(torch.randn(variant.samples, 5), torch.randint(3, (variant.samples,)))
    # A loader with a generator leaves the global one, which dropout draws from, alone.
    loader = DataLoader(data, batch_size=BATCH, generator=torch.Generator())
    module = Classifier(variant)
    torch.manual_seed(SEED)
    return module, loader


def plain_parts(module: Classifier) -> tuple[torch.optim.Optimizer, Any]:
    returned = module.configure_optimizers()
    if isinstance(returned, dict):
        return returned["optimizer"], returned["scheduler"]
    return returned, None


def plain_loop(variant: Variant) -> tuple[Classifier, Watch]:
    """What PyTorch's own tutorials do."""
    module, loader = parts(variant)
    optimizer, schedule = plain_parts(module)
    watch, k = Watch(), variant.accumulation
    for _ in range(EPOCHS):
        batches = iter(loader)
        while window := list(islice(batches, k)):
            losses = []
            for batch in window:
                with torch.autocast("cpu", torch.bfloat16, enabled=variant.precision == "bf16"):
                    loss = module.loss(batch)
                (loss / k).backward()
                losses.append(loss.detach())
            watch.on_before_optimizer_step(None, module, optimizer)
            if variant.max_grad_norm is not None:
                nn.utils.clip_grad_norm_(module.parameters(), variant.max_grad_norm)
            optimizer.step()
            if schedule is not None:
                schedule.step()
            optimizer.zero_grad()
            watch.losses.append(torch.stack(losses).double().mean().item())
    return module, watch


def with_trainer(variant: Variant) -> tuple[Classifier, Watch]:
    module, loader = parts(variant)
    watch = Watch()
    quiet_trainer(
        max_epochs=EPOCHS,
        seed=SEED,
        gradient_accumulation_steps=variant.accumulation,
        max_grad_norm=variant.max_grad_norm,
        mixed_precision=variant.precision,
        callbacks=[watch],
    ).fit(module, loader)
    return module, watch


def with_accelerator(variant: Variant) -> tuple[Classifier, Watch]:
    """A loop of one's own, as the documentation writes it."""
    module, source = parts(variant)
    accelerator = Accelerator(
        cpu=True,
        mixed_precision=variant.precision,
        gradient_accumulation_steps=variant.accumulation,
    )
    made = plain_parts(module)
    net, optimizer, schedule, loader = accelerator.prepare(module.net, *made, source)
    watch = Watch()
    losses: list[Tensor] = []
    for _ in range(EPOCHS):
        for x, y in loader:
            with accelerator.accumulate(net):
                with accelerator.autocast():
                    loss = cross_entropy(net(x), y)
                accelerator.backward(loss)
                losses.append(loss.detach())
                if accelerator.sync_gradients:
                    watch.on_before_optimizer_step(None, module, optimizer)
                    if variant.max_grad_norm is not None:
                        accelerator.clip_grad_norm_(net.parameters(), variant.max_grad_norm)
                    watch.losses.append(torch.stack(losses).double().mean().item())
                    losses.clear()
                optimizer.step()
                if schedule is not None:
                    schedule.step()
                optimizer.zero_grad()
    return module, watch


def assert_same_training(
    one: tuple[Classifier, Watch], other: tuple[Classifier, Watch], variant: Variant
) -> None:
    for _, watch in (one, other):
        assert len(watch.losses) == len(watch.gradients) == variant.updates
    assert_same(one[1].losses, other[1].losses)
    assert_same(one[1].rates, other[1].rates)
    assert_same(one[1].gradients, other[1].gradients)
    assert_same(copy_of(one[0]), copy_of(other[0]))


@every_variant
def test_trainer_is_a_plain_loop(variant):
    assert_same_training(with_trainer(variant), plain_loop(variant), variant)


@every_variant
def test_own_loop_with_accelerator_is_a_plain_loop(variant):
    assert_same_training(with_accelerator(variant), plain_loop(variant), variant)


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize(
    "where", ["on_train_start", "on_train_epoch_start", "training_step", "validation_step"]
)
def test_own_backward_passes_add_nothing_to_the_update(where, accumulation):
    class Own(TrainModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Linear(2, 1)

        def training_step(self, batch, batch_idx):
            return self.net(batch[0]).pow(2).mean()

        def validation_step(self, batch, batch_idx):
            """Nothing is logged."""

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    class Backward(Own):
        """Has a backward pass of its own, as for an adversarial example."""

    original = getattr(Own, where)

    def with_backward(self: Own, *args: Any) -> Any:
        if where != "training_step" or args[1] % accumulation == 0:
            with torch.enable_grad():
                self.net(torch.ones(3, 2)).sum().backward()
        return original(self, *args)

    setattr(Backward, where, with_backward)

    def weights(kind: type[Own]) -> dict[str, Tensor]:
        torch.manual_seed(SEED)
        module = kind()
        loader = DataLoader(TensorDataset(torch.randn(24, 2)), batch_size=BATCH)
        options = {"max_epochs": 2, "gradient_accumulation_steps": accumulation}
        quiet_trainer(project_dir=kind.__name__, **options).fit(module, loader, loader)
        return copy_of(module)

    assert_same(weights(Backward), weights(Own))
