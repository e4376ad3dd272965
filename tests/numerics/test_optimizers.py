"""Several optimizers on one loss: each with its own limits, schedule and name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.optim.lr_scheduler import ExponentialLR, StepLR
from torch.utils.data import DataLoader, TensorDataset

from callbacks import Callback, GradientNormMonitor, LearningRateMonitor, ModelCheckpoint
from tests.numerics.running import assert_same, copy_of, on_processes, quiet_trainer
from trackers import read_metrics
from trainer import GradScalerKwargs, TrainModule
from trainer.errors import CheckpointError

SAMPLES, EPOCHS = 24, 3
PARTS = ("body", "head", "rest")


class Three(TrainModule):
    """Three parts with an optimizer each, of which the second stops moving at large gradients."""

    def __init__(self, limits: dict[str, dict[str, float]] | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.head, self.rest = nn.Linear(4, 6), nn.Linear(6, 2), nn.Linear(2, 1)
        self.limits = limits or {}
        self.bad: dict[str, Any] = {}  # what the gradients of a part hold in the second update

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return mse_loss(self.rest(self.head(self.body(x).tanh())), y) * 10

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss(*batch)

    def on_after_backward(self) -> None:
        if self.trainer.global_step == 1:
            for part, value in self.bad.items():
                getattr(self, part).weight.grad.view(-1)[0] = value

    def optimizers_and_schedules(self) -> tuple[list[Any], list[Any]]:
        body = torch.optim.SGD(self.body.parameters(), lr=0.1, momentum=0.9)
        head = torch.optim.Adam(self.head.parameters(), lr=0.02)
        rest = torch.optim.SGD(self.rest.parameters(), lr=0.05)
        return [body, head, rest], [StepLR(body, 2, 0.8), ExponentialLR(head, 0.5)]

    def configure_optimizers(self) -> Any:
        (body, head, rest), (by_step, by_epoch) = self.optimizers_and_schedules()
        return [
            {
                "optimizer": body,
                "scheduler": by_step,
                "interval": "step",
                "frequency": 2,
                "name": "body",
                **self.limits.get("body", {}),
            },
            {
                "optimizer": head,
                "scheduler": by_epoch,
                "name": "head",
                **self.limits.get("head", {}),
            },
            {"optimizer": rest, "name": "rest", **self.limits.get("rest", {})},
        ]


def loader() -> Any:
    generator = torch.Generator().manual_seed(3)
    x, y = (torch.randn(SAMPLES, n, generator=generator) for n in (4, 1))
    return DataLoader(TensorDataset(x, y), batch_size=4)


LIMITS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "none": ({}, {}),
    "of all": ({"max_grad_norm": 0.3, "max_grad_value": 0.2}, {}),
    "own norms": ({}, {"body": {"max_grad_norm": 0.1}, "head": {"max_grad_norm": 0.7}}),
    "own norm, the others together": ({"max_grad_norm": 0.2}, {"body": {"max_grad_norm": 5.0}}),
    "own value above that of all": (
        {"max_grad_value": 0.03},
        {"body": {"max_grad_value": 0.06}, "head": {"max_grad_norm": 1.0}},
    ),
    "everything": (
        {"max_grad_norm": 0.2, "max_grad_value": 0.1},
        {"body": {"max_grad_norm": 0.1, "max_grad_value": 0.02}, "rest": {"max_grad_norm": 0.3}},
    ),
}


def clip(module: Three, trainers: dict[str, Any]) -> None:
    """As the documentation says it: by value first, then the norms; a part's own goes first."""
    parts = {name: list(getattr(module, name).parameters()) for name in PARTS}
    for name, parameters in parts.items():
        value = module.limits.get(name, {}).get("max_grad_value", trainers.get("max_grad_value"))
        if value is not None:
            nn.utils.clip_grad_value_(parameters, value)
    together = []
    for name, parameters in parts.items():
        if "max_grad_norm" in module.limits.get(name, {}):
            nn.utils.clip_grad_norm_(parameters, module.limits[name]["max_grad_norm"])
        else:
            together += parameters
    if "max_grad_norm" in trainers:
        nn.utils.clip_grad_norm_(together, trainers["max_grad_norm"])


def plain_loop(module: Three, trainers: dict[str, Any], scaler: Any = None) -> dict[str, Tensor]:
    """The same training, without a Trainer."""
    optimizers, (by_step, by_epoch) = module.optimizers_and_schedules()
    updates = 0
    for _ in range(EPOCHS):
        for batch in loader():
            with torch.autocast("cpu", torch.float16, enabled=scaler is not None):
                loss = module.loss(*batch)
            (loss if scaler is None else scaler.scale(loss)).backward()
            for optimizer in optimizers if scaler else []:
                scaler.unscale_(optimizer)
            clip(module, trainers)
            for optimizer in optimizers:
                optimizer.step() if scaler is None else scaler.step(optimizer)
                optimizer.zero_grad()
            if scaler is not None:
                scaler.update()
            updates += 1
            if updates % 2 == 0:
                by_step.step()
        by_epoch.step()
    return copy_of(module)


@pytest.mark.parametrize(
    ("setting", "precision"), [*((setting, "no") for setting in LIMITS), ("everything", "fp16")]
)
def test_clipping_is_that_of_a_plain_loop(setting, precision):
    trainers, limits = LIMITS[setting]
    module, scaler, options = Three(limits), None, dict(trainers)
    if precision == "fp16":
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8)
        options["kwargs_handlers"] = [GradScalerKwargs(init_scale=2.0**8)]
    trainer = quiet_trainer(max_epochs=EPOCHS, mixed_precision=precision, **options)
    trainer.fit(module, loader())
    assert_same(copy_of(module), plain_loop(Three(limits), trainers, scaler))


def test_two_ranks_clip_as_one_with_the_whole_batch(ranks2):
    trainers, limits = LIMITS["everything"]

    def trained(accumulation: int) -> dict[str, Tensor]:
        module = Three(limits)
        options = {"gradient_accumulation_steps": accumulation, **trainers}
        quiet_trainer(max_epochs=EPOCHS, **options).fit(module, loader())
        return copy_of(module)

    (one,) = on_processes(lambda _: ranks2, 1, trained, 2)
    two = ranks2(trained, 1)
    assert_same(*two)
    torch.testing.assert_close(two[0], one)


class Skipped(Callback):
    """The weights after each update."""

    def __init__(self) -> None:
        self.weights: list[dict[str, Tensor]] = []

    def on_boundary(self, trainer: Any, module: Any) -> None:
        self.weights.append(copy_of(module))


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("value", [float("inf"), float("nan")])
@pytest.mark.parametrize("precision", ["no", "fp16"])
def test_non_finite_gradients_of_one_optimizer_skip_all(part, value, precision):
    module, seen = Three(), Skipped()
    module.bad = {part: value}
    trainer = quiet_trainer(
        max_steps=3,
        mixed_precision=precision,
        non_finite="skip",
        max_grad_norm=1.0,
        callbacks=seen,
        kwargs_handlers=[GradScalerKwargs(init_scale=2.0**8)] if precision == "fp16" else None,
    )
    trainer.fit(module, loader())
    first, second, third = seen.weights
    assert trainer.skipped_updates == 1
    assert_same(second, first)
    assert all(tensor.isfinite().all() for tensor in third.values())
    for name in PARTS:
        assert not torch.equal(third[f"{name}.weight"], second[f"{name}.weight"])


def test_records_carry_the_optimizer_names():
    monitors = [LearningRateMonitor(), GradientNormMonitor(per="optimizer")]
    trainer = quiet_trainer(max_epochs=EPOCHS, callbacks=monitors)
    trainer.fit(Three(), loader())
    assert trainer.optimizer_names == ["body", "head", "rest"]
    last = read_metrics(trainer.metrics_path)[-1]
    assert {f"lr-{name}" for name in PARTS} < last.keys()
    assert {f"grad_norm/{name}" for name in PARTS} < last.keys()
    assert last["lr-body"] == pytest.approx(0.1 * 0.8**4)  # 9 ticks, of which every 2nd counts
    assert last["lr-head"] == pytest.approx(0.02 * 0.5**2)
    assert last["lr-rest"] == 0.05


def test_resume_of_several_optimizers():
    _, limits = LIMITS["everything"]
    whole = Three(limits)
    quiet_trainer(max_epochs=EPOCHS).fit(whole, loader())
    for epochs in (1, EPOCHS):
        module = Three(limits)
        trainer = quiet_trainer(max_epochs=epochs, project_dir="parts", callbacks=ModelCheckpoint())
        trainer.fit(module, loader(), ckpt_path="auto")
    assert_same(copy_of(module), copy_of(whole))


def test_resume_with_reordered_optimizers_raises():
    class Otherwise(Three):
        order = (1, 0, 2)

        def configure_optimizers(self) -> Any:
            returned = super().configure_optimizers()
            return [returned[number] for number in self.order]

    saves = {"project_dir": "run", "callbacks": ModelCheckpoint()}
    quiet_trainer(max_epochs=1, **saves).fit(Three(), loader())
    with pytest.raises(CheckpointError, match=r"'body', 'head', 'rest', but .* 'head', 'body', 'r"):
        quiet_trainer(max_epochs=2, **saves).fit(Otherwise(), loader(), ckpt_path="auto")
