"""Gradients that hold NaN or infinity: they stop the run, are left out, or nobody looks (P10)."""

import math
import os

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from callbacks import Callback, ModelCheckpoint
from tests.helpers.requires import requires_cuda
from trackers import read_metrics
from trainer import GradScalerKwargs, Trainer, TrainModule
from trainer.optim.finite import FiniteGuard, find_non_finite
from trainer.state import PartialState

BAD = {"nan": math.nan, "inf": math.inf}


class Net(TrainModule):
    """Whose samples at `bad` updates have no finite loss, on one process of them."""

    def __init__(self, bad=(), value=math.nan, rank=0, optimizer=None):
        super().__init__()
        torch.manual_seed(0)
        self.body = torch.nn.Linear(2, 3)
        self.head = torch.nn.Linear(3, 1)
        self.bad, self.value, self.rank = set(bad), value, rank
        self.optimizer = optimizer or (lambda p: torch.optim.AdamW(p, lr=0.1))

    def training_step(self, batch, batch_idx):
        loss = self.head(self.body(batch[0])).square().mean()
        here = self.trainer.accelerator.process_index == self.rank
        if here and self.global_step in self.bad:
            loss = loss * self.value
        self.log("loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val", self.head.weight.sum())

    def configure_optimizers(self):
        optimizer = self.optimizer(self.parameters())
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
        return {"optimizer": optimizer, "scheduler": schedule, "interval": "step"}


class Keep(Callback):
    """The weights after each update."""

    def __init__(self):
        self.weights = []

    def on_boundary(self, trainer, module):
        self.weights.append([p.detach().clone() for p in module.parameters()])


def loader(batches=6):
    generator = torch.Generator().manual_seed(0)
    return DataLoader(TensorDataset(torch.randn(4 * batches, 2, generator=generator)), 4)


def fit(module, *callbacks, folder="run", val=None, **arguments):
    arguments = {"max_epochs": 1, "log_every": 1, "num_sanity_val_steps": 0} | arguments
    trainer = Trainer(
        callbacks=list(callbacks), project_dir=folder, progress_bar=False, **arguments
    )
    trainer.fit(module, loader(), val, ckpt_path="auto")
    return trainer


class Large(TrainModule):
    """In float16, where the sum of two of its losses is infinite."""

    def __init__(self, losses):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones((), dtype=torch.float16))
        self.losses = losses

    def training_step(self, batch, batch_idx):
        return self.weight * 1e-3 + self.losses[batch_idx % len(self.losses)]

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.mark.parametrize("last", [4e4, -4e4, math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("place", [0, 1, 2])
def test_losses_of_a_window_are_looked_at_one_by_one(last, place):
    losses = [4e4, 4e4]
    losses.insert(place, last)
    trainer = fit(Large(losses), gradient_accumulation_steps=3, non_finite="skip")
    assert trainer.skipped_updates == (0 if math.isfinite(last) else trainer.global_step)
    assert trainer.global_step == 2


@pytest.mark.parametrize("value", BAD.values(), ids=BAD)
@pytest.mark.parametrize("accumulation", [1, 2])
def test_the_run_stops_before_a_bad_update_and_says_what_it_was(value, accumulation):
    module, keep = Net(bad=[2], value=value), Keep()
    with pytest.raises(FloatingPointError) as caught:
        fit(
            module,
            keep,
            ModelCheckpoint(every=1),
            cpu=True,
            gradient_accumulation_steps=accumulation,
        )
    text = str(caught.value)
    assert "The gradients of update 3 hold NaN or infinity (the update was not made), of: " in text
    assert "body.weight, body.bias, head.weight, head.bias." in text
    assert f"The loss on rank 0 was {value:g}" in text
    assert "non_finite='skip'" in text
    for kept, now in zip(keep.weights[-1], module.parameters(), strict=True):
        assert torch.equal(kept, now)
    assert os.listdir("run/checkpoints") == ["step-00000002"]
    trainer = fit(Net(), cpu=True, gradient_accumulation_steps=accumulation)  # it goes on
    assert trainer.global_step == 6 // accumulation


def test_only_the_parameters_concerned_are_named():
    class Half(Net):
        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            broken = math.nan if self.global_step == 1 else 0.0
            return loss + broken * self.head.bias.sum()

    module = Half()
    module.rest = torch.nn.Linear(1, 1)  # has no gradient
    with pytest.raises(FloatingPointError, match=r"of: head\.bias\. The loss"):
        fit(module, cpu=True)


class Constant(Net):
    """Whose bad losses have gradients that are finite: a constant is added to them."""

    def training_step(self, batch, batch_idx):
        loss = self.head(self.body(batch[0])).square().mean()
        here = self.trainer.accelerator.process_index == self.rank
        if here and self.global_step in self.bad and (self.rank or batch_idx % 2 == 0):
            loss = loss + self.value
        self.log("loss", loss)
        return loss


@pytest.mark.parametrize("value", BAD.values(), ids=BAD)
@pytest.mark.parametrize("accumulation", [1, 2])
def test_a_bad_loss_counts_though_its_gradients_are_finite(value, accumulation):
    arguments = {"cpu": True, "gradient_accumulation_steps": accumulation, "max_epochs": 2}
    module = Constant(bad=[2, 4], value=value)
    with pytest.raises(FloatingPointError, match="A loss of update 3 is NaN or infinite") as caught:
        fit(module, **arguments)
    assert "rank 0 was" in str(caught.value)
    assert "hold NaN" not in str(caught.value)
    skipping = fit(Constant([2, 4], value), non_finite="skip", folder="skip", **arguments)
    assert skipping.skipped_updates == 2


class Early(Constant):
    """Whose bad losses are not the last ones of their windows, on the second process."""

    def training_step(self, batch, batch_idx):
        before, self.rank = self.rank, 1 if batch_idx % 2 == 0 else -1
        loss = super().training_step(batch, batch_idx)
        self.rank = before
        return loss


# Of which the gradients are bad, or finite, or the loss of an earlier micro-batch is bad.
@pytest.mark.parametrize("kind", [Net, Constant, Early])
def test_all_processes_do_the_same_though_one_has_the_bad_loss(ranks3, kind):
    def body(policy):
        module = kind([1], rank=1)
        try:
            options = {"gradient_accumulation_steps": 1 + (kind is Early), "max_epochs": 4}
            trainer = fit(module, non_finite=policy, folder=policy, cpu=True, **options)
        except FloatingPointError as error:
            return "of update 2" in str(error), "The loss on rank 1 was nan." in str(error)
        return trainer.skipped_updates, [p.tolist() for p in module.parameters()]

    assert ranks3(body, "stop") == [(True, True)] * 3
    first, *others = ranks3(body, "skip")
    assert first[0] == 1
    assert others == [first, first]


class ByHand(Net):
    """The same by hand, in two optimizers."""

    automatic_optimization = False

    def training_step(self, batch, batch_idx):
        for optimizer in self.optimizers():
            optimizer.zero_grad()
        self.manual_backward(super().training_step(batch, batch_idx))
        for optimizer in self.optimizers():
            optimizer.step()

    def configure_optimizers(self):
        parts = self.body, self.head
        return [torch.optim.AdamW(part.parameters(), lr=0.1) for part in parts]


def test_manual_optimisation_stops_too(ranks2):
    def body():
        module, keep = ByHand([2], rank=1), Keep()
        with pytest.raises(FloatingPointError, match=r"of update 3 .*'ignore'") as caught:
            fit(module, keep, cpu=True, max_epochs=2)
        now = list(module.parameters())
        kept = all(torch.equal(a, b) for a, b in zip(keep.weights[-1], now, strict=True))
        return kept, "of: body.weight, body.bias" in str(caught.value)

    assert ranks2(body) == [(True, True)] * 2
    with pytest.raises(ValueError, match="non_finite is 'skip', but in manual optimisation"):
        fit(ByHand(), cpu=True, folder="skip", non_finite="skip")
    ignoring = ByHand([2])
    fit(ignoring, cpu=True, folder="ignore", non_finite="ignore")
    assert ignoring.head.weight.isnan().all()


def plain(bad, updates=6):
    """The same training without a Trainer, and without the bad updates."""
    module = Net()
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    for number, (batch,) in enumerate(loader(updates)):
        module.head(module.body(batch)).square().mean().backward()
        if number not in bad:
            optimizer.step()
        else:
            optimizer._opt_called = True
        schedule.step()
        optimizer.zero_grad()
    return list(module.parameters())


@pytest.mark.parametrize("value", BAD.values(), ids=BAD)
@pytest.mark.parametrize("bad", [[0], [3], [1, 2, 5]])
def test_skipped_updates_change_nothing_but_the_count_and_the_schedule(value, bad):
    module = Net(bad, value)
    trainer = fit(module, non_finite="skip", cpu=True)
    for one, other in zip(module.parameters(), plain(set(bad)), strict=True):
        assert torch.equal(one, other)
    assert trainer.global_step == 6
    assert trainer.skipped_updates == len(bad)
    recorded = {r["step"]: r.get("skipped_updates", 0.0) for r in read_metrics("run/metrics.jsonl")}
    assert recorded == {s: sum(b < s for b in bad) for s in range(1, 7)}


def test_max_skipped_in_row_ends_the_run():
    with pytest.raises(FloatingPointError, match=r"of 3 updates in a row, up to update 5, held"):
        fit(Net([0, 2, 3, 4]), non_finite="skip", max_skipped_in_row=3, cpu=True)


def test_skipped_updates_are_counted_on_after_a_resume():
    fit(Net([0, 5]), non_finite="skip", cpu=True)
    with pytest.raises(FloatingPointError, match="of 2 updates in a row, up to update 7"):
        fit(Net([6]), non_finite="skip", max_skipped_in_row=2, max_epochs=2, cpu=True)
    trainer = fit(Net(), non_finite="skip", max_epochs=2, cpu=True)
    assert trainer.skipped_updates == 2


def test_ignore_checks_nothing():
    module = Net([2])
    trainer = fit(module, non_finite="ignore", cpu=True)
    assert trainer.global_step == 6
    assert trainer.skipped_updates == 0
    assert all(parameter.isnan().all() for parameter in module.parameters())


def test_clipping_does_not_hide_non_finite_gradients():
    with pytest.raises(FloatingPointError, match="update 3"):
        fit(Net([2], math.inf), max_grad_norm=1.0, max_grad_value=0.5, cpu=True)


def test_overflows_of_fp16_are_counted_as_skipped_and_end_a_run_that_makes_no_progress():
    scaler = [GradScalerKwargs(init_scale=2.0**40)]
    trainer = fit(Net(), mixed_precision="fp16", kwargs_handlers=scaler, max_epochs=8, cpu=True)
    assert 0 < trainer.skipped_updates < trainer.global_step
    PartialState._reset_state()
    with pytest.raises(FloatingPointError, match="of 4 updates in a row, up to update 4"):
        fit(
            Net(range(99)),
            folder="other",
            mixed_precision="fp16",
            max_skipped_in_row=4,
            cpu=True,
        )


def test_gradients_of_every_kind_are_looked_at():
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64):
        good = torch.ones(3, dtype=dtype)
        before = good.clone()
        assert not find_non_finite([good, None, torch.ones(2)])
        assert torch.equal(good, before)
        bad = good.clone()
        bad[1] = math.inf
        assert find_non_finite([good, bad, None])
        # Two kinds that are bad are not twice as bad: a fused optimizer takes 2 for a no.
        assert find_non_finite([bad, torch.full((2,), math.nan, dtype=torch.float64)]) == 1.0
        assert find_non_finite([torch.ones(2, dtype=torch.float64), bad])
    table = torch.nn.Embedding(4, 2, sparse=True)
    (table(torch.tensor([1])).sum() * math.nan).backward()
    assert find_non_finite([table.weight.grad])
    assert find_non_finite([None]) is None


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_gradients_are_looked_at_under_any_default_type(dtype):
    torch.set_default_dtype(dtype)
    try:
        assert find_non_finite([torch.ones(2)]) == 0.0
        assert find_non_finite([torch.tensor([1.0, math.nan])]) == 1.0
        assert find_non_finite([torch.ones(2).half(), torch.tensor([math.inf])]) == 1.0
    finally:
        torch.set_default_dtype(torch.float32)


def test_wrong_choices_are_refused():
    with pytest.raises(ValueError, match="non_finite is 'halt'; it must be one of"):
        Trainer(max_epochs=1, non_finite="halt")
    with pytest.raises(ValueError, match="max_skipped_in_row is 0"):
        Trainer(max_epochs=1, max_skipped_in_row=0)
    with pytest.raises(ValueError, match=r"max_skipped_in_row is 2\.5"):
        Trainer(max_epochs=1, max_skipped_in_row=2.5)


@requires_cuda
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("policy", ["stop", "skip"])
def test_on_a_device_a_bad_update_is_never_saved(fused, policy):
    module = Net([2], optimizer=lambda p: torch.optim.AdamW(p, lr=0.1, fused=fused))
    saver = ModelCheckpoint(every=1, save_top_k=-1)
    if policy == "stop":
        with pytest.raises(FloatingPointError, match="update 3"):
            fit(module, saver, non_finite=policy)
        assert sorted(os.listdir("run/checkpoints")) == ["step-00000001", "step-00000002"]
    else:
        assert fit(module, saver, non_finite=policy).skipped_updates == 1
        assert all(parameter.isfinite().all() for parameter in module.parameters())


@requires_cuda
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.complex64])
def test_on_a_device_gradients_of_every_kind_are_looked_at(dtype):
    good, other = (torch.ones(3, dtype=each, device="cuda") for each in (dtype, torch.float32))
    assert find_non_finite([good, None, other]) == 0.0
    for number in (math.nan, math.inf, -math.inf):
        bad = good.clone()
        bad[1] = number
        assert find_non_finite([good, bad, None, other]) == 1.0
        assert find_non_finite([other * number, bad]) == 1.0


# -- determinism, anomalies ------------------------------------------------------------------------


@pytest.mark.parametrize("mode", [True, "warn"])
def test_torch_is_deterministic_while_the_trainer_works(mode):
    seen = []

    class Look(Callback):
        def on_train_step_start(self, trainer, module):
            seen.append(
                (
                    torch.are_deterministic_algorithms_enabled(),
                    torch.is_deterministic_algorithms_warn_only_enabled(),
                    os.environ.get("CUBLAS_WORKSPACE_CONFIG"),
                )
            )

    fit(Net(), Look(), deterministic=mode, cpu=True)
    assert set(seen) == {(True, mode == "warn", ":4096:8")}
    assert not torch.are_deterministic_algorithms_enabled()
    assert "CUBLAS_WORKSPACE_CONFIG" not in os.environ
    with pytest.raises(ValueError, match="deterministic is 'maybe'"):
        Trainer(max_epochs=1, deterministic="maybe")


@pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled", "ignore:Error detected in")
def test_anomalies_are_named_by_the_operation_that_made_them():
    class Root(Net):
        def training_step(self, batch, batch_idx):
            return (self.head(self.body(batch[0])) * 0.0).sqrt().sum()

    with pytest.raises(RuntimeError, match="returned nan values"):
        fit(Root(), detect_anomaly=True, cpu=True)
    assert not torch.is_anomaly_enabled()


def test_an_update_that_the_scaler_made_ends_the_row():
    guard = FiniteGuard("skip", 3, optimizers=[], named_parameters=list)
    for step, skipped in enumerate([True, True, False, True, True], 1):
        guard.count_scaled([skipped], step)
    assert (guard.skipped, guard.in_row) == (4, 2)
