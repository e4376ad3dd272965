"""Modules that override parts of an update, or skip batches, train as a loop that does the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.optim.lr_scheduler import ReduceLROnPlateau, StepLR
from torch.utils.data import DataLoader, TensorDataset

from callbacks import Callback, LambdaCallback, ThroughputMonitor
from tests.numerics.running import copy_of, on_processes, quiet_trainer
from trainer import GradScalerKwargs, TrainModule
from trainer.hooks import HookTable

X = torch.randn(24, 3, generator=torch.Generator().manual_seed(1))
Y = X.sum(1, keepdim=True)


def loader(world: int = 1) -> DataLoader[Any]:
    return DataLoader(TensorDataset(X, Y), 4 // world)


class Net(TrainModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
        loss = mse_loss(self.net(batch[0]), batch[1])
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), 0.1)
        steps = {"scheduler": StepLR(optimizer, 2, 0.5), "interval": "step"}
        plateau = {"scheduler": ReduceLROnPlateau(optimizer, patience=0), "monitor": "loss"}
        return [optimizer], [steps, plateau]


class CallsSuper(Net):
    """Overrides everything, and does what is done without."""

    def __init__(self) -> None:
        super().__init__()
        self.called: list[str] = []

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        self.called.append("backward")
        super().backward(loss, *args, **kwargs)

    def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure=None):
        self.called.append("optimizer_step")
        super().optimizer_step(epoch, batch_idx, optimizer, optimizer_closure)

    def optimizer_zero_grad(self, epoch, batch_idx, optimizer):
        self.called.append("optimizer_zero_grad")
        super().optimizer_zero_grad(epoch, batch_idx, optimizer)

    def lr_scheduler_step(self, scheduler, metric):
        self.called.append("lr_scheduler_step")
        super().lr_scheduler_step(scheduler, metric)

    def configure_gradient_clipping(
        self, optimizer, gradient_clip_val=None, gradient_clip_algorithm=None
    ):
        self.called.append("configure_gradient_clipping")
        super().configure_gradient_clipping(optimizer, gradient_clip_val, gradient_clip_algorithm)


def fitted(kind: type[Net], world: int = 1, **options: Any) -> Any:
    module = kind()
    trainer = quiet_trainer(max_epochs=2, **options)
    trainer.fit(module, loader(world))
    return copy_of(module), getattr(module, "called", None), trainer


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize(
    "options",
    [
        {"max_grad_norm": 0.1},
        {"gradient_accumulation_steps": 4, "max_grad_value": 0.01},
        {"mixed_precision": "fp16", "max_grad_norm": 0.1},
    ],
    ids=["norm", "accumulated", "fp16"],
)
def test_overrides_that_call_super_change_no_bit(ranks, world, options):
    def both() -> Any:
        plain, _, _ = fitted(Net, world, **options)
        overridden, called, _ = fitted(CallsSuper, world, **options)
        torch.testing.assert_close(overridden, plain, rtol=0, atol=0)
        return {name: called.count(name) for name in set(called)}

    windows = options.get("gradient_accumulation_steps", 1)
    updates = 12 if windows == 1 else 4  # six batches an epoch, in windows of four and two
    for counts in on_processes(ranks, world, both):
        assert counts == {
            "backward": 12,
            "optimizer_step": updates,
            "optimizer_zero_grad": updates,
            "configure_gradient_clipping": updates,
            "lr_scheduler_step": updates + 2,
        }


class Doubled(Net):
    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        (2 * loss).backward(*args, **kwargs)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.05)


class Plain(Doubled):
    backward = TrainModule.backward

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1)


@pytest.mark.parametrize("world", [1, 2])
def test_a_backward_pass_of_ones_own_is_reduced_as_the_default(ranks, world):
    """With SGD, twice the gradient at half the rate is the same update."""
    expected, _, _ = fitted(Plain)
    for found in on_processes(ranks, world, lambda: fitted(Doubled, world)[0]):
        torch.testing.assert_close(found, expected)


class Manual(Doubled):
    automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        loss = super().training_step(batch, batch_idx)
        self.manual_backward(loss)
        self.optimizers().step()
        self.optimizers().zero_grad()


def test_manual_backward_runs_the_modules_backward():
    torch.testing.assert_close(fitted(Manual)[0], fitted(Plain)[0])


class EverySecond(Plain):
    """Updates at every second batch only; warms up by setting the rate."""

    def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure):
        if batch_idx % 2:
            return
        for group in optimizer.param_groups:
            group["lr"] = 0.01 * (1 + self.trainer.global_step)
        self.seen = optimizer_closure()
        optimizer.step()


def test_an_override_decides_about_updates_and_those_it_leaves_out_are_counted():
    found, _, trainer = fitted(EverySecond)
    module = Plain()
    optimizer = module.configure_optimizers()
    for update in range(0, 12, 2):
        x, y = list(loader())[update % 6]
        optimizer.param_groups[0]["lr"] = 0.01 * (1 + update)
        optimizer.zero_grad()
        mse_loss(module.net(x), y).backward()
        optimizer.step()
    torch.testing.assert_close(found, copy_of(module), rtol=0, atol=0)
    assert trainer.global_step == 12
    assert trainer.skipped_updates == 6


def test_in_fp16_the_gradients_after_an_update_left_out_are_unscaled():
    scale = GradScalerKwargs(init_scale=64.0)  # without overflows
    half = {"mixed_precision": "fp16", "max_skipped_in_row": 1, "kwargs_handlers": [scale]}
    found, _, trainer = fitted(EverySecond, **half)
    torch.testing.assert_close(found, fitted(EverySecond)[0], rtol=1e-2, atol=1e-3)
    assert trainer.skipped_updates == 6


class Twice(Plain):
    def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure):
        assert optimizer_closure().ndim == 0
        optimizer.step(optimizer_closure)


def test_the_closure_of_an_update_cannot_run_it_again():
    with pytest.raises(RuntimeError, match="automatic_optimization = False"):
        fitted(Twice)


class Warmup:
    """A schedule whose step wants the number of the epoch, as timm's do."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer

    def step(self, epoch: int, metric: float | None) -> None:
        self.optimizer.param_groups[0]["lr"] = 0.1 / (2 + epoch)

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


class OwnSchedule(Plain):
    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        return [optimizer], [Warmup(optimizer)]

    def lr_scheduler_step(self, scheduler, metric):
        scheduler.step(self.current_epoch, metric)


def test_a_schedule_with_another_step_is_advanced_by_the_module():
    _, _, trainer = fitted(OwnSchedule)
    assert trainer.optimizers[0].param_groups[0]["lr"] == 0.1 / 3


class OfTimm(Warmup):
    """A schedule with the methods of timm's."""

    def __init__(self, optimizer: Any, t_in_epochs: bool) -> None:
        super().__init__(optimizer)
        self.t_in_epochs, self.calls = t_in_epochs, []

    def step(self, epoch: int, metric: float | None = None) -> None:
        self.calls.append(("epoch", epoch, metric))

    def step_update(self, num_updates: int, metric: float | None = None) -> None:
        self.calls.append(("step", num_updates, metric))


class WithTimm(Plain):
    counts, interval = "step", "step"

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        self.schedule = OfTimm(optimizer, self.counts == "epoch")
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": self.schedule, "interval": self.interval},
        }


@pytest.mark.parametrize("unit", ["step", "epoch"])
def test_a_schedule_of_timm_is_given_the_number_of_the_update_or_epoch(unit):
    kind = type("Numbered", (WithTimm,), {"counts": unit, "interval": unit})
    _, _, trainer = fitted(kind)
    last = trainer.global_step if unit == "step" else trainer.max_epochs
    calls = [(unit, number, None) for number in range(1, last + 1)]
    assert trainer.module.schedule.calls == calls != []
    other = type("Other", (WithTimm,), {"counts": {"step": "epoch", "epoch": "step"}[unit]})
    other.interval = unit
    with pytest.raises(
        ValueError, match=f"with 'interval': '{unit}' would not change its learning rate"
    ):
        fitted(other)


class Skips(Net):
    """Skips batches by a feature of theirs; with two processes, one rank at a time."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
        loss = super().training_step(batch, batch_idx)
        return None if batch[0][0, 0] > 0 else loss


def test_a_batch_without_a_loss_is_skipped_as_if_it_were_not_there():
    found, _, _ = fitted(Skips)
    module = Skips()
    [optimizer], [steps, plateau] = module.configure_optimizers()
    del plateau
    for _ in range(2):
        for x, y in loader():
            optimizer.zero_grad()
            if not x[0, 0] > 0:
                mse_loss(module.net(x), y).backward()
            optimizer.step()
            steps["scheduler"].step()
    torch.testing.assert_close(found, copy_of(module), rtol=0, atol=0)


class Forgets(Net):
    def training_step(self, batch: Any, batch_idx: int) -> None:
        super().training_step(batch, batch_idx)


def test_a_forgotten_return_is_warned_of_and_ends_the_epoch(caplog):
    with pytest.raises(ValueError, match="No batch of epoch 1 had a loss"):
        fitted(Forgets)
    assert sum("returned None" in line for line in caplog.messages) == 1


class SkipsSgd(Skips):
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1)


def test_a_batch_that_one_process_skips_has_no_weight(ranks):
    module = SkipsSgd()
    optimizer = module.configure_optimizers()
    for _ in range(2):
        for x, y in loader():
            halves = [(x[:2], y[:2]), (x[2:], y[2:])]
            losses = [mse_loss(module.net(a), b) for a, b in halves if not a[0, 0] > 0]
            optimizer.zero_grad()
            if losses:
                (sum(losses) / len(losses)).backward()
            optimizer.step()
    # In some batches one process skips and the other does not.
    assert any(
        len({bool(a > 0), bool(b > 0)}) == 2 for a, b in zip(X[::4, 0], X[2::4, 0], strict=True)
    )
    for found in on_processes(ranks, 2, lambda: fitted(SkipsSgd, 2)[0]):
        torch.testing.assert_close(found, copy_of(module))


class EndsEpochs(Net):
    """Leaves out the rest of an epoch by the number of the batch and the rank."""

    def __init__(self, last: tuple[int, ...] = (3, 3)) -> None:
        super().__init__()
        self.last, self.ended = last, 0

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        return -1 if batch_idx == self.last[self.trainer.global_rank] else None

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        assert batch_idx < self.last[self.trainer.global_rank]

    def on_train_epoch_end(self) -> None:
        self.ended += 1


def short_epochs(world: int, last: tuple[int, ...] = (3, 3), **kwargs: Any) -> Any:
    module = EndsEpochs(last)
    trainer = quiet_trainer(max_epochs=3, **kwargs)
    trainer.fit(module, loader(world))
    return copy_of(module), trainer.global_step, module.ended


def loop_of_short_epochs(*whole: int, half: bool = False) -> Any:
    """A loop over so many batches of each epoch, and perhaps the first half of another one."""
    module = EndsEpochs()
    [optimizer], [steps, plateau] = module.configure_optimizers()
    for last in whole:
        batches = list(loader())[: last + half]
        for number, (x, y) in enumerate(batches):
            size = 2 if number == last else 4
            optimizer.zero_grad()
            loss = mse_loss(module.net(x[:size]), y[:size])
            loss.backward()
            optimizer.step()
            steps["scheduler"].step()
        plateau["scheduler"].step(loss.item())
    return copy_of(module)


def test_minus_1_at_the_start_of_a_batch_ends_the_epoch(ranks):
    found, steps, ended = short_epochs(1)
    assert (steps, ended) == (9, 3)
    torch.testing.assert_close(found, loop_of_short_epochs(3, 3, 3), rtol=0, atol=0)
    for weights, *counts in on_processes(ranks, 2, short_epochs, 2):
        assert counts == [9, 3]
        torch.testing.assert_close(weights, found)


def test_one_process_may_end_the_epoch_of_all(ranks):
    # The batch that the other one trains on at the same time counts, alone.
    for weights, *counts in on_processes(ranks, 2, short_epochs, 2, (9, 2)):
        assert counts == [9, 3]
        torch.testing.assert_close(weights, loop_of_short_epochs(2, 2, 2, half=True))


@pytest.mark.parametrize(("size", "windows"), [(2, [(0, 2), (2, 3)]), (5, [(0, 3)])])
def test_batches_left_out_inside_a_window_have_no_weight(size, windows):
    found, steps, _ = short_epochs(1, gradient_accumulation_steps=size)
    module = EndsEpochs()
    [optimizer], [schedule, plateau] = module.configure_optimizers()
    for _ in range(3):
        batches = list(loader())
        for window in (batches[slice(*each)] for each in windows):
            optimizer.zero_grad()
            for x, y in window:
                loss = mse_loss(module.net(x), y) / len(window)
                loss.backward()
            optimizer.step()
            schedule["scheduler"].step()
        plateau["scheduler"].step(loss.item())
    assert steps == 3 * len(windows)
    torch.testing.assert_close(found, copy_of(module))


def test_a_function_of_a_callback_may_end_an_epoch():
    def table(callback: Callback) -> HookTable:
        return HookTable(None, Net(), [callback], TrainModule)

    assert table(LambdaCallback(on_train_batch_start=lambda *_: -1)).may_end_epoch
    assert not table(ThroughputMonitor()).may_end_epoch


def test_a_callback_ends_the_epoch_of_a_manual_optimisation_and_a_resume_goes_on(tmp_path):
    class Ends(Callback):
        def on_train_batch_start(self, trainer, module, batch, batch_idx):
            return -1 if batch_idx == 2 else None

    class Manual(Net):
        automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> None:
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(mse_loss(self.net(batch[0]), batch[1]))
            optimizer.step()

    def fit(name: str, epochs: int) -> Any:
        module = Manual()
        trainer = quiet_trainer(
            max_epochs=epochs, callbacks=[Ends()], checkpointing=True, project_dir=tmp_path / name
        )
        trainer.fit(module, loader(), ckpt_path="auto")
        return trainer.global_step, copy_of(module)

    steps, whole = fit("whole", 3)
    assert (steps, fit("parts", 2)[0]) == (6, 4)
    torch.testing.assert_close(fit("parts", 3)[1], whole, rtol=0, atol=0)


def test_minus_1_is_refused_where_other_processes_would_wait(ranks2):
    class Manual(EndsEpochs):
        automatic_optimization = False

    def fit() -> None:
        quiet_trainer(max_epochs=1).fit(Manual(), loader(2))

    message = "returned -1 on rank . at batch 3, which cannot end an epoch with manual optimisation"
    with pytest.raises(Exception, match=message):
        ranks2(fit)
