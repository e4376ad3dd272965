"""The Tuner finds what it should, and leaves no trace."""

from __future__ import annotations

import dataclasses
import gc
import hashlib
import inspect
import json
import math
import random
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from callbacks import Callback, ModelCheckpoint
from tests.numerics.running import Watch, assert_same, copy_of, on_processes, quiet_trainer
from trainer import CombinedLoader, Trainer, TrainModule, Tuner
from trainer.rng import next_seed, rng_state
from trainer.tuning import LearningRateTest


def data(samples: int = 24) -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    return TensorDataset(
        torch.randn(samples, 3, generator=generator), torch.randn(samples, 1, generator=generator)
    )


class Line(TrainModule):
    def __init__(self, lr: float = 0.1):
        super().__init__()
        torch.manual_seed(1)
        self.layer = torch.nn.Linear(3, 1)
        self.lr = lr

    def training_step(self, batch, batch_idx):
        x, y = batch
        return torch.nn.functional.mse_loss(self.layer(x), y)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.lr)


def find(module: TrainModule | None = None, loader: Any = None, trainer: Any = None, **kwargs: Any):
    trainer = trainer or quiet_trainer(max_epochs=1)
    loader = DataLoader(data(), batch_size=4) if loader is None else loader
    return Tuner(trainer).lr_find(module or Line(), loader, **kwargs)


@pytest.mark.parametrize("method", [Tuner.lr_find, Tuner.scale_batch_size])
def test_tuner_methods_take_what_fit_takes(method):
    names = [*inspect.signature(Trainer.fit).parameters][:-1]  # without **unknown
    assert list(inspect.signature(method).parameters)[: len(names)] == names


def test_a_range_test_begins_with_the_weights_of_a_checkpoint():
    trained = quiet_trainer(max_epochs=5)
    module = Line()
    trained.fit(module, DataLoader(data(), batch_size=4))
    path = trained.save_checkpoint("trained", weights_only=True)
    loaders = {"train_dataloaders": DataLoader(data(), 4), "val_dataloaders": DataLoader(data(), 4)}
    fresh, tuner = Line(), Tuner(quiet_trainer(max_epochs=1))
    found = tuner.lr_find(fresh, **loaders, ckpt_path=path, num_training=12)
    assert found.losses == tuner.lr_find(module, **loaders, num_training=12).losses
    assert found.losses != tuner.lr_find(fresh, **loaders, num_training=12).losses


# -- no trace ------------------------------------------------------------------------------------


class Everything(TrainModule):
    """Randomness, buffers, states of its own, a schedule: whatever a trial could leave behind."""

    def __init__(self):
        super().__init__()
        self.net = torch.nn.Sequential(
            torch.nn.Linear(3, 8), torch.nn.BatchNorm1d(8), torch.nn.Dropout(0.3)
        )
        self.head = None
        self.batch_size = 2
        self.history: list[int] = []
        self.register_buffer("seen", torch.zeros(1), persistent=False)

    def configure_model(self):
        assert self.head is None
        self.head = torch.nn.Linear(8, 1)

    def training_step(self, batch, batch_idx):
        x, y = batch
        self.history.append(batch_idx)
        self.seen += random.random() + float(np.random.rand())
        loss = torch.nn.functional.mse_loss(self.head(self.net(x)), y) + self.seen.sum()
        self.log("loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val", self.head(self.net(batch[0])).mean() + torch.rand(()))

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        schedule = torch.optim.lr_scheduler.OneCycleLR(
            optimizer, 0.1, total_steps=self.trainer.estimated_stepping_batches or 20
        )
        return {"optimizer": optimizer, "scheduler": schedule, "interval": "step"}


class Noisy(Dataset):
    """Samples with noise from generators of the dataset's own, which go on from read to read."""

    def __init__(self):
        self.x, self.y = data().tensors
        self.torch = torch.Generator().manual_seed(4)
        self.numpy = np.random.default_rng(4)
        self.reads = 0

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        self.reads += 1
        noise = torch.rand(3, generator=self.torch) + float(self.numpy.random())
        return self.x[index] + noise, self.y[index] + self.reads


class Stream(IterableDataset):
    """Goes on where it was left, pass after pass."""

    def __init__(self):
        self.at = 0

    def __iter__(self):
        for _ in range(24):
            self.at += 1
            yield torch.full((3,), float(self.at % 7)), torch.tensor([float(self.at % 5)])

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


def loader_of(kind: str) -> DataLoader:
    if kind == "stream":
        return DataLoader(Stream(), batch_size=3)
    generator = torch.Generator().manual_seed(7)
    return DataLoader(Noisy(), batch_size=3, shuffle=True, generator=generator)


def files_in(folder: Path) -> dict[str, str]:
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def written(tree: Any) -> Any:
    """The tree with its tensors written out, to be compared to the last bit."""
    if isinstance(tree, torch.Tensor):
        return str(tree.dtype), tree.shape, tree.reshape(-1).view(torch.uint8).tolist()
    if isinstance(tree, dict):
        return {key: written(value) for key, value in tree.items()}
    return [written(each) for each in tree] if isinstance(tree, (list, tuple)) else tree


def state_of(module: Any, loader: Any) -> dict[str, Any]:
    dataset = loader.dataset
    assert not module.hparams  # asked for the first time, they are made
    rng = rng_state()
    return {
        "weights": copy_of(module),
        "gradients": [parameter.grad for parameter in module.parameters()],
        "history": list(module.history),
        "seen": module.seen.clone(),
        "training": [part.training for part in module.modules()],
        "names": sorted(vars(module)),
        "head": module.head is None,
        "batch_size": module.batch_size,
        "python": rng["python"],
        "torch": rng["torch"],
        "numpy": repr(rng["numpy"]),
        "seed": torch.initial_seed(),
        "generator": None if loader.generator is None else loader.generator.get_state(),
        "at": getattr(dataset, "at", None),
        "reads": getattr(dataset, "reads", None),
        "iterator": loader._iterator,
    }


def files_of_all(trainer: Trainer) -> dict[str, str]:
    """What lies on the disk that the processes share, while none of them writes."""
    trainer.accelerator.wait_for_everyone()
    files = files_in(Path())
    trainer.accelerator.wait_for_everyone()
    return files


def train(kind: str, tune: bool, seed: int | None, earlier: bool) -> dict[str, Any]:
    folder = Path(f"{kind}-{tune}-{seed}-{earlier}")
    torch.manual_seed(5)
    random.seed(5)
    np.random.seed(5)
    watch = Watch()

    def make(folder: Path) -> Trainer:
        return quiet_trainer(
            project_dir=folder,
            max_epochs=2,
            seed=seed,
            gradient_accumulation_steps=2,
            callbacks=[watch, ModelCheckpoint()],
        )

    trainer = make(folder)
    module, loader, val = Everything(), loader_of(kind), DataLoader(data(7), batch_size=3)
    trace: dict[str, Any] = {}
    if earlier:  # the trials of a run that has begun
        trainer.fit(Everything(), loader, val)
        trainer = make(Path(f"{folder}-second"))
    next_seed()  # of an accelerator made before
    before, files = state_of(module, loader), files_of_all(trainer)
    if tune:
        tuner = Tuner(trainer)
        tuner.lr_find(module, loader, num_training=15)
        tuner.scale_batch_size(module, loader, val, mode="binsearch", max_val=5)
        trace["same"] = (before, state_of(module, loader))
        trace["files"] = (files, files_of_all(trainer))
        trace["counters"] = (trainer.global_step, trainer.samples_seen, trainer.module is None)
    trace["next_seed"] = next_seed()
    trainer.fit(module, loader, val)
    record = [json.loads(line) for line in trainer.metrics_path.read_text().splitlines()]
    for each in record:
        del each["time"]
    saved = files_in(max(trainer.checkpoint_dir.glob("step-*")))
    return trace | {
        "losses": watch.losses,
        "weights": watch.weights,
        "rates": watch.rates,
        "record": record,
        "saved": {name: saved[name] for name in saved if name.endswith(".safetensors")},
        "history": module.history,
        "after": {k: v for k, v in state_of(module, loader).items() if k != "names"},
    }


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize(
    ("kind", "seed", "earlier"),
    [("map", None, False), ("map", 3, False), ("stream", None, False), ("map", 3, True)],
)
def test_a_fit_after_tuning_equals_a_fit_without(ranks, world, kind, seed, earlier):
    tuned = on_processes(ranks, world, train, kind, True, seed, earlier)
    plain = on_processes(ranks, world, train, kind, False, seed, earlier)
    for one, other in zip(tuned, plain, strict=True):
        before, after = one.pop("same")
        assert written(after) == written(before)
        before, after = one.pop("files")
        assert after == before
        assert one.pop("counters") == (0, 0, True)
        assert len(other["losses"]) == 8 // world * (1 + earlier)
        assert other["saved"]
        assert written(one) == written(other)


def test_trials_leave_the_gradient_scaler_as_it_was():
    def run(tune: bool) -> tuple[dict[str, Any], dict[str, Any]]:
        trainer = quiet_trainer(max_epochs=1, mixed_precision="fp16", project_dir=f"run{tune}")
        trainer.fit(Line(), DataLoader(data(), batch_size=4))
        stepped = set(trainer.accelerator.precision._stepped)
        if tune:
            find(trainer=trainer, max_lr=1e12, num_training=20, early_stop_threshold=None)
            assert trainer.accelerator.precision._stepped == stepped != set()
        trainer.fit(Line(), DataLoader(data(), batch_size=4))
        precision = trainer.accelerator.precision
        return precision.state_dict(), copy_of(trainer.module)

    torch.manual_seed(0)
    first = run(False)
    assert_same(run(True), first)


def test_trials_call_no_callback_and_write_no_file_beside_an_earlier_run():
    class Loud(Callback):
        def setup(self, trainer, module, stage):
            raise AssertionError("called")

    trainer = quiet_trainer(max_epochs=1, callbacks=[ModelCheckpoint()])
    trainer.fit(Line(), DataLoader(data(), batch_size=4))
    before = files_in(Path())
    trainer = quiet_trainer(max_epochs=1, callbacks=[Loud()])
    find(trainer=trainer, num_training=3)
    Tuner(trainer).scale_batch_size(Line(), DataLoader(data()))
    assert files_in(Path()) == before != {}
    assert isinstance(trainer.callbacks[0], Loud)


@pytest.mark.parametrize("hook", ["on_train_batch_end", "on_train_epoch_end", "on_train_end"])
def test_save_checkpoint_writes_nothing_in_a_trial(hook):
    def save(module, *_):
        assert module.trainer.save_checkpoint("mine") == Path("mine").absolute()

    module = type("Saving", (Line,), {hook: save})()
    trainer = quiet_trainer(max_epochs=1)
    find(module, trainer=trainer, num_training=12)
    Tuner(trainer).scale_batch_size(module, DataLoader(data(), batch_size=4), max_trials=1)
    assert not Path("mine").exists()
    trainer.fit(module, DataLoader(data(), batch_size=4))
    assert Path("mine/manifest.json").exists()


def test_a_failed_trial_leaves_no_trace_either():
    class Failing(Line):
        def training_step(self, batch, batch_idx):
            self.lr = -1.0
            if self.global_step == 2:
                raise ZeroDivisionError("here")
            torch.rand(3)
            return super().training_step(batch, batch_idx)

    module = Failing()
    before = rng_state()["torch"], copy_of(module)
    with pytest.raises(ZeroDivisionError, match="here"):
        find(module)
    assert_same((rng_state()["torch"], copy_of(module)), before)
    assert module.lr == 0.1


def test_large_data_are_shared_and_their_counters_are_copied(tmp_path):
    np.arange(30.0, dtype=np.float32).tofile(tmp_path / "tokens")
    mapped = np.memmap(tmp_path / "tokens", dtype=np.float32)

    class Mapped(Dataset):
        read: list[int] = []

        def __init__(self):
            self.mapped, self.tensor = mapped, torch.zeros(10, 1)
            self.reads = [0]
            self.lock = threading.Lock()  # cannot be copied

        def __len__(self):
            return 10

        def __getitem__(self, index):
            with self.lock:
                self.reads[0] += 1
            self.read += [self.mapped.ctypes.data, self.tensor.data_ptr()]
            x = torch.from_numpy(self.mapped[3 * index : 3 * index + 3].copy())
            return x / 30, self.tensor[index]

    dataset = Mapped()
    find(loader=DataLoader(dataset, batch_size=5), num_training=4)
    assert set(Mapped.read) == {mapped.ctypes.data, dataset.tensor.data_ptr()}
    assert dataset.reads == [0]


def test_copies_of_module_and_data_share_what_the_originals_share():
    class Sharing(Line):
        def __init__(self):
            super().__init__()
            self.counts = [0]

        def training_step(self, batch, batch_idx):
            assert self.counts[0] > 0
            return super().training_step(batch, batch_idx)

    class Counting(Dataset):
        def __init__(self, counts):
            self.counts, self.inner = counts, data()

        def __len__(self):
            return 24

        def __getitem__(self, index):
            self.counts[0] += 1
            return self.inner[index]

    module = Sharing()
    find(module, DataLoader(Counting(module.counts), batch_size=4), num_training=3)
    assert module.counts == [0]


def test_data_that_can_be_read_only_once_are_refused_before_they_are_read():
    batches = (batch for batch in DataLoader(data(), batch_size=4))
    with pytest.raises(ValueError, match="a generator, which can be read only once"):
        find(loader=batches)
    assert len(list(batches)) == 6


def test_a_module_that_cannot_be_copied_is_refused():
    class Generating(Line):
        def __init__(self):
            super().__init__()
            self.endless = (number for number in range(3))

    with pytest.raises(TypeError, match=r"A Generating cannot be copied.*generator.*in setup\(\)"):
        find(Generating())


# -- the range test ------------------------------------------------------------------------------


def plain_losses(lrs: list[float], batches: list[list[Any]]) -> list[float]:
    """The loop by hand: each update's micro-batches are one list."""
    module = Line()
    losses = []
    for step, lr in enumerate(lrs):
        x, y = (torch.cat(parts) for parts in zip(*batches[step % len(batches)], strict=True))
        loss = torch.nn.functional.mse_loss(module.layer(x), y)
        module.zero_grad()
        loss.backward()
        with torch.no_grad():
            for parameter in module.parameters():
                parameter -= lr * parameter.grad
        losses.append(loss.item())
    return losses


def smoothed(losses: list[float], past: float) -> list[float]:
    """The bias-corrected moving average as the weighted mean that it is."""
    result = []
    for end in range(1, len(losses) + 1):
        weights = [past ** (end - 1 - i) for i in range(end)]
        total = math.fsum(w * x for w, x in zip(weights, losses[:end], strict=True))
        result.append(total / math.fsum(weights))
    return result


@pytest.mark.parametrize(
    ("mode", "smoothing", "rates"),
    [
        ("exponential", {"smoothing": 0.9}, np.geomspace(1e-4, 0.1, 16)),
        ("linear", {}, np.linspace(1e-4, 0.1, 16)),
    ],
)
def test_a_sweep_equals_a_handwritten_loop(mode, smoothing, rates):
    result = find(min_lr=1e-4, max_lr=0.1, num_training=16, mode=mode, **smoothing)
    batches = [[batch] for batch in DataLoader(data(), batch_size=4)]
    assert result.lrs == pytest.approx(rates.tolist())
    assert result.raw_losses == pytest.approx(plain_losses(rates.tolist(), batches), rel=1e-5)
    past = smoothing.get("smoothing", 0.98)
    assert result.losses == pytest.approx(smoothed(result.raw_losses, past))
    assert not result.diverged


def accumulated(world: int) -> tuple[list[float], list[float], list[float]]:
    trainer = quiet_trainer(max_epochs=1, gradient_accumulation_steps=2)
    loader = DataLoader(data(22), batch_size=4 // world)  # the last window is short
    result = find(trainer=trainer, loader=loader, min_lr=1e-3, max_lr=0.1, num_training=9)
    return result.lrs, result.raw_losses, result.losses


@pytest.mark.parametrize("world", [1, 2])
def test_losses_are_those_of_the_whole_batch(ranks, world):
    answers = on_processes(ranks, world, accumulated, world)
    lrs = np.geomspace(1e-3, 0.1, 9).tolist()
    samples = [tuple(part[i : i + 1] for part in data(22).tensors) for i in range(22)]
    batches = [samples[:8], samples[8:16], samples[16:]]
    for got, raw, _ in answers:
        assert got == pytest.approx(lrs)
        assert raw == pytest.approx(plain_losses(lrs, batches), rel=1e-4)
    assert all(answer == answers[0] for answer in answers)


class Groups(Line):
    """Two optimizers, three groups, and a warm-up that begins with a rate of 0."""

    def __init__(self):
        super().__init__()
        self.other = torch.nn.Linear(3, 1)
        self.manual = False

    def configure_optimizers(self):
        first = torch.optim.SGD(
            [{"params": [self.layer.weight], "lr": 0.02}, {"params": [self.layer.bias], "lr": 0.1}]
        )
        second = torch.optim.SGD(self.other.parameters(), lr=torch.tensor(0.05))
        warm_up = torch.optim.lr_scheduler.LambdaLR(first, lambda step: 0.0 * step)
        return [{"optimizer": first, "scheduler": warm_up, "interval": "step"}, second]

    def training_step(self, batch, batch_idx):
        x, y = batch
        return torch.nn.functional.mse_loss(self.layer(x) + self.other(x), y)

    seen: list[list[float]] = []

    def on_before_optimizer_step(self, optimizer):
        self.seen.append([float(group["lr"]) for group in optimizer.param_groups])


@pytest.mark.parametrize(
    ("groups", "scales"),
    [
        ("scaled", [0.2, 1.0, 0.5]),
        ("same", [1.0, 1.0, 1.0]),
        (1, [None, 1.0, None]),
        (2, [None, None, 1.0]),
    ],
)
def test_parameter_groups(groups, scales):
    Groups.seen = []
    result = find(Groups(), min_lr=0.01, max_lr=0.04, num_training=3, groups=groups)
    assert result.scales == pytest.approx(scales)
    untouched = [0.0, 0.0, 0.05]  # the first two as the warm-up left them
    for number, lr in enumerate([0.01, 0.02, 0.04]):
        rates = Groups.seen[2 * number] + Groups.seen[2 * number + 1]
        expected = [
            rate if scale is None else lr * scale
            for scale, rate in zip(scales, untouched, strict=True)
        ]
        assert rates == pytest.approx(expected)


def test_a_range_test_ticks_no_schedule_and_validates_nothing():
    class Short(Line):
        def configure_optimizers(self):
            optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
            schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=3)
            return {"optimizer": optimizer, "scheduler": schedule, "interval": "step"}

        def validation_step(self, batch, batch_idx):
            raise AssertionError("validated")

        def val_dataloader(self):
            return DataLoader(data(), batch_size=4)

    assert len(find(Short(), num_training=12).lrs) == 12


def test_a_range_test_is_as_long_as_asked_and_the_module_sees_the_lengths_of_the_run():
    class Asking(Line):
        def configure_optimizers(self):
            seen.append((self.trainer.max_epochs, self.trainer.estimated_stepping_batches))
            return super().configure_optimizers()

    seen: list[Any] = []
    trainer = quiet_trainer(max_epochs=2, min_epochs=1, max_time="1 hour")
    assert len(find(Asking(), trainer=trainer, num_training=20).lrs) == 20
    assert seen == [(2, 12)]
    for endless in (quiet_trainer(), quiet_trainer(max_time="1 second")):
        assert len(find(trainer=endless, num_training=8).lrs) == 8


def test_limits_of_the_training_data_hold():
    trainer = quiet_trainer(max_epochs=1, limit_train_batches=2)
    result = find(trainer=trainer, min_lr=1e-4, max_lr=0.1, num_training=6)
    batches = [[batch] for batch in DataLoader(data(), batch_size=4)][:2]
    assert result.raw_losses == pytest.approx(plain_losses(result.lrs, batches), rel=1e-5)


def test_a_diverging_loss_ends_the_test_unless_there_is_no_threshold():
    sweep: dict[str, Any] = {"max_lr": 1e4, "min_lr": 1e-3, "num_training": 50, "smoothing": 0.5}
    result = find(**sweep)
    assert result.diverged
    assert len(result.lrs) == len(result.losses) == len(result.raw_losses) < 50
    settled = result.losses[10:]
    assert settled[-1] > 4 * min(settled[:-1])
    assert all(loss <= 4 * min(settled[: i + 1]) for i, loss in enumerate(settled[:-1]))
    result = find(**sweep | {"max_lr": 10.0}, early_stop_threshold=None)
    assert len(result.lrs) == 50
    assert max(result.losses) > 4 * min(result.losses)


@pytest.mark.parametrize("non_finite", [float("nan"), float("inf")])
def test_a_loss_that_is_not_finite_ends_the_test_and_is_left_out(non_finite):
    class Exploding(Line):
        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            return loss * non_finite if self.global_step == 4 else loss

    result = find(Exploding(), early_stop_threshold=None, max_lr=0.1)
    assert len(result.lrs) == len(result.losses) == 4
    assert result.diverged


def test_losses_below_zero_are_compared_by_their_distance():
    class Below(Line):
        def training_step(self, batch, batch_idx):
            return self.layer.weight.sum() * 0 - 1.0 + 0.25 * max(0, self.global_step - 10)

    result = find(Below(), smoothing=0.0, num_training=40)
    assert result.raw_losses == [-1.0] * 10 + [-1.0 + 0.25 * step for step in range(14)]  # > 2.0
    assert result.diverged


class Manual(Line):
    automatic_optimization = False
    returns = False

    def training_step(self, batch, batch_idx):
        x, y = batch
        optimizer = self.optimizers()
        optimizer.zero_grad()
        losses = [torch.nn.functional.mse_loss(self.layer(x), y), self.layer.bias.square().sum()]
        for loss in losses:
            self.manual_backward(loss)
        if batch_idx % 2 == 0:
            optimizer.step()
        self.values.append(sum(float(loss.detach()) for loss in losses))
        return {"loss": losses[0].detach() * 0 + 7.0} if self.returns else None

    values: list[float] = []


def test_manual_optimisation_is_judged_by_the_loss_it_returns_or_else_goes_back_from():
    class Returning(Manual):
        returns = True

    Manual.values = []
    result = find(Manual(), min_lr=1e-3, max_lr=0.1, num_training=5)
    assert len(result.lrs) == 5
    assert result.raw_losses == pytest.approx(Manual.values[::2][:5])
    assert find(Returning(), num_training=3).raw_losses == [7.0] * 3


def test_a_manual_step_without_any_loss_is_refused():
    class Silent(Manual):
        def training_step(self, batch, batch_idx):
            self.optimizers().step()

    with pytest.raises(ValueError, match="lr_find found no loss"):
        find(Silent())


def made(losses: list[float], mode: str = "exponential") -> LearningRateTest:
    lrs = [10.0**i for i in range(len(losses))]
    return LearningRateTest(
        mode=mode, lrs=lrs, losses=losses, raw_losses=losses, scales=[1.0], diverged=False
    )


@pytest.mark.parametrize("noise", [0.0, 0.1, 0.3])
def test_the_suggestion_is_half_the_rate_of_half_the_fall(noise):
    """A curve that is known: flat, falling from 1e-3 on, exploding from 1 on."""
    for seed in range(10):
        rates = np.geomspace(1e-8, 10, 120)
        curve = 1 - 0.9 / (1 + (1e-2 / rates) ** 2) + (rates / 2) ** 3
        losses = curve * np.random.default_rng(seed).normal(1, noise, 120)
        test = dataclasses.replace(made(losses.tolist()), lrs=rates.tolist())
        assert 2e-3 <= test.suggestion() <= 3e-2
        assert test.suggestion() == test.suggestion(skip_begin=10, skip_end=1)
        shifted = dataclasses.replace(test, raw_losses=(losses * 50 - 80).tolist())
        assert shifted.suggestion() == test.suggestion()


def test_there_is_no_suggestion_without_enough_losses_or_a_clear_fall(caplog):
    assert made([3.0, 2.0, 1.0]).suggestion() is None
    assert "of 3 updates, skip_begin=10 and skip_end=1 leave 0" in caplog.text
    assert made([5.0, 4.0, 2.0, 1.0, 0.0]).suggestion(0, 7) is None
    assert "of 5 updates, skip_begin=0 and skip_end=7 leave 0" in caplog.text
    with pytest.raises(ValueError, match="skip_begin is -1"):
        made([1.0]).suggestion(-1)
    noise = np.random.default_rng(0).exponential(size=100)
    for losses in ([1.0, 2.0, 3.0, 4.0], [1.0] * 30, noise.tolist(), np.geomspace(1, 99).tolist()):
        caplog.clear()
        assert made(losses).suggestion(0, 0) is None
        assert "the loss falls nowhere by more than its noise" in caplog.text


class Regression(Line):
    """8 → 32 → 1."""

    def __init__(self, optimizer: type[torch.optim.Optimizer], seed: int, lr: float = 1e-9):
        super().__init__(lr)
        torch.manual_seed(seed)
        self.optimizer = optimizer
        self.layer = torch.nn.Sequential(
            torch.nn.Linear(8, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1)
        )

    def configure_optimizers(self):
        return self.optimizer(self.parameters(), self.lr)


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.Adam])
@pytest.mark.parametrize("batch_size", [8, 64])
def test_the_suggestion_trains(optimizer, batch_size):
    for seed in range(3):
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(512, 8, generator=generator)
        y = x @ torch.randn(8, 1, generator=generator)
        loader = DataLoader(TensorDataset(x, y), batch_size=batch_size, shuffle=True)
        trainer = quiet_trainer(max_steps=100, seed=seed)
        suggestion = find(Regression(optimizer, seed), loader, trainer).suggestion()
        module = Regression(optimizer, seed, suggestion)
        trainer.fit(module, loader)
        with torch.no_grad():
            assert torch.nn.functional.mse_loss(module.layer(x), y) < 0.5 * y.square().mean()


class Attributes(Line):
    def __init__(self, learning_rate: float = 0.5, width: int = 3):
        super().__init__()
        self.save_hyperparameters()
        del self.lr

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.hparams.learning_rate)


def test_update_attr_sets_the_attribute():
    module = Attributes()
    loader = DataLoader(data(), batch_size=24)
    kwargs = {"loader": loader, "min_lr": 1e-4, "max_lr": 0.2, "num_training": 30}
    result = find(module, **kwargs)
    assert module.hparams.learning_rate == 0.5
    find(module, update_attr=True, **kwargs)
    assert module.hparams.learning_rate == result.suggestion() != 0.5
    line = Line()
    find(line, update_attr=True, **kwargs)
    assert line.lr != 0.1
    find(module, update_attr=True, attr_name="width", **kwargs)
    assert module.hparams.width == result.suggestion()


def test_a_missing_attribute_is_refused_before_anything_runs():
    class Without(Attributes):
        def training_step(self, batch, batch_idx):
            raise AssertionError("ran")

    with pytest.raises(ValueError, match="has an attribute 'rate'"):
        find(Without(), update_attr=True, attr_name="rate")


def test_without_a_suggestion_the_attribute_stays(caplog):
    module = Line()
    find(module, update_attr=True, num_training=3)
    assert module.lr == 0.1
    assert "lr is left unchanged" in caplog.text


@pytest.mark.parametrize(
    ("kwargs", "text"),
    [
        ({"mode": "linaer"}, "mode is 'linaer'.*'linear'"),
        ({"min_lr": 0.0}, "min_lr is 0.0"),
        ({"min_lr": 1.0}, "max_lr must be larger"),
        ({"max_lr": math.inf}, "max_lr is inf"),
        ({"num_training": 1}, "num_training is 1; .* at least 2"),
        ({"early_stop_threshold": 1.0}, "early_stop_threshold is 1.0"),
        ({"smoothing": 1.0}, "smoothing is 1.0"),
        ({"groups": "all"}, "groups is 'all'"),
        ({"groups": -1}, "groups is -1"),
        ({"module": Groups(), "groups": 3}, "groups is 3, but there are 3 parameter groups"),
    ],
)
def test_wrong_arguments_of_lr_find(kwargs, text):
    with pytest.raises(ValueError, match=text):
        find(**kwargs)


def test_wrong_objects_are_refused():
    with pytest.raises(TypeError, match="trainer is None; it must be a Trainer"):
        Tuner(None)
    with pytest.raises(TypeError, match="needs an instance of a subclass"):
        find(torch.nn.Linear(1, 1))
    with pytest.raises(TypeError, match="got the class Line; it needs an instance"):
        find(Line)
    with pytest.raises(TypeError, match="does not define validation_step"):
        Tuner(quiet_trainer()).scale_batch_size(Line(), method="validate")


def test_trials_of_a_batch_size_do_not_ask_for_a_validation(caplog):
    class Validating(Line):
        def validation_step(self, batch, batch_idx):
            self.log("never", 0.0)

    trainer = quiet_trainer(max_epochs=1)
    Tuner(trainer).scale_batch_size(Validating(), DataLoader(data()), max_val=4)
    assert "no validation data" not in caplog.text
    trainer.fit(Validating(), DataLoader(data()))
    assert "no validation data" in caplog.text


def test_a_plot_without_matplotlib_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)
    with pytest.raises(ImportError, match=r"cadence-trainer\[plot\]"):
        made([1.0]).plot()


def test_the_plot_shows_the_curve_and_marks_the_suggestion():
    import matplotlib.pyplot

    matplotlib.use("agg")
    losses = [5.0] * 12 + [4.0, 2.0, 1.9, 1.8]
    assert made(losses).results == {"lr": [10.0**i for i in range(16)], "loss": losses}
    figure = made(losses).plot(True)
    (axes,) = figure.axes
    curve, mark = axes.lines
    assert curve.get_xydata().tolist() == [[10.0**i, loss] for i, loss in enumerate(losses)]
    assert mark.get_xydata().tolist() == [[made(losses).suggestion(), 2.0]]
    assert axes.get_xscale() == "log"
    other, axes = matplotlib.pyplot.subplots()
    assert made(losses, "linear").plot(ax=axes) is other
    assert (len(axes.lines), axes.get_xscale()) == (1, "linear")
    matplotlib.pyplot.close("all")


# -- the batch size ------------------------------------------------------------------------------


def out_of_memory() -> None:
    """As torch says it on the CPU; a request for more than there can be."""
    torch.empty(2**60, dtype=torch.uint8)


class Hungry(Line):
    """Runs out of memory above a number of samples."""

    def __init__(self, limit: int, batch_size: int = 1):
        super().__init__()
        self.limit, self.batch_size = limit, batch_size

    def eat(self, batch: Any) -> None:
        if len(batch[0]) > self.limit:
            out_of_memory()

    def training_step(self, batch, batch_idx):
        self.eat(batch)
        return super().training_step(batch, batch_idx)


def scale(module: TrainModule, samples: int = 100, trainer: Any = None, **kwargs: Any):
    if "datamodule" not in kwargs and "dataloaders" not in kwargs:
        kwargs.setdefault("train_dataloaders", DataLoader(data(samples), batch_size=1))
    return Tuner(trainer or quiet_trainer(max_epochs=1)).scale_batch_size(module, **kwargs)


@pytest.mark.parametrize(("limit", "found"), [(1, 1), (2, 2), (3, 2), (16, 16), (31, 16)])
def test_the_power_search(limit, found):
    result = scale(Hungry(limit))
    assert result.batch_size == found
    assert result.gradient_accumulation_steps == 1
    powers = [2**k for k in range(1, 7)]
    expected = {size: size <= limit for size in powers if size / 2 <= limit or size == 2}
    assert result.trials == expected | ({1: True} if limit == 1 else {})


def test_a_found_size_is_reported_unless_it_is_set(caplog):
    module = Making(16)
    assert scale(module, train_dataloaders=None).batch_size == 16
    assert module.batch_size == 1
    assert "The largest batch_size is 16, and the attribute is unchanged" in caplog.text
    caplog.clear()
    scale(module, train_dataloaders=None, update_attr=True)
    assert (module.batch_size, caplog.text) == (16, "")


@pytest.mark.parametrize("limit", [3, 17, 32, 63])
def test_the_binary_search_finds_the_edge(limit):
    result = scale(Hungry(limit), mode="binsearch", margin=0.0)
    assert result.batch_size == limit
    assert all(fits == (size <= limit) for size, fits in result.trials.items())
    assert len(result.trials) <= 12


@pytest.mark.parametrize(
    ("limit", "margin", "found"),
    [(40, {}, 38), (1, {}, 1), (40, {"margin": 0.5}, 20), (500, {}, 100)],  # the last by the data
)
def test_a_margin_is_given_back_at_the_edge_alone(limit, margin, found):
    assert scale(Hungry(limit), mode="binsearch", **margin).batch_size == found


def test_the_data_and_max_val_limit_the_size():
    assert scale(Hungry(500), samples=50).trials == {2**k: True for k in range(1, 6)} | {50: True}
    assert scale(Hungry(500), max_val=12).trials == {2: True, 4: True, 8: True, 12: True}
    assert scale(Hungry(500), max_val=1).batch_size == 1
    assert scale(Hungry(500), samples=50, init_val=64).trials == {50: True}
    subset = torch.utils.data.SubsetRandomSampler(range(10))
    for drop_last in (False, True):  # of which nothing would be left in a batch of 16
        loader = DataLoader(data(50), batch_size=1, sampler=subset, drop_last=drop_last)
        assert scale(Hungry(500), train_dataloaders=loader).batch_size == 10


def test_a_first_size_that_does_not_fit_is_halved():
    tried = scale(Hungry(5), init_val=80).trials
    assert tried == {80: False, 40: False, 20: False, 10: False, 5: True}
    assert scale(Hungry(7), init_val=80, mode="binsearch", margin=0.0).batch_size == 7


def test_max_trials_ends_the_search():
    assert scale(Hungry(500), max_trials=3).trials == {2: True, 4: True, 8: True}


def test_nothing_fits():
    with pytest.raises(RuntimeError, match="No batch size fits into memory; tried 2, 1 samples"):
        scale(Hungry(0))


def limited(limits: list[int], **kwargs: Any) -> tuple[int, int, dict[int, bool], bool]:
    from trainer import PartialState

    rank = PartialState(cpu=True).process_index
    module = Hungry(limits[rank])
    before = copy_of(module)
    result = scale(module, **kwargs)
    same = all(torch.equal(before[name], value) for name, value in copy_of(module).items())
    return result.batch_size, result.gradient_accumulation_steps, result.trials, same


@pytest.mark.parametrize("limits", [[40, 9], [9, 40]])
def test_the_smallest_size_of_all_processes_counts(ranks2, limits):
    assert (
        ranks2(limited, limits, timeout=60)
        == [(8, 1, {2: True, 4: True, 8: True, 16: False}, True)] * 2
    )


def test_the_effective_size_is_kept_among_several_processes(ranks2):
    def effective() -> Any:
        return limited([40, 9], effective_batch_size=96, mode="binsearch", margin=0.0)

    first, second = ranks2(effective, timeout=60)
    assert first == second
    assert first[:2] == (8, 6)  # of at most 9: 2 processes × 8 × 6 = 96


def fail_on_rank_1() -> None:
    from trainer import PartialState

    class Failing(Line):
        def training_step(self, batch, batch_idx):
            if PartialState().process_index == 1 and len(batch[0]) == 4:
                raise KeyError("mistake")
            return super().training_step(batch, batch_idx)

    scale(Failing())


def test_another_error_on_one_process_is_raised_on_all(ranks2):
    with pytest.raises(Exception, match=r"2 of 2 ranks failed") as caught:
        ranks2(fail_on_rank_1, timeout=30)
    assert "KeyError: 'mistake'" in caught.value.failures[1]
    assert "Rank 1 failed while the others waited for it: KeyError" in caught.value.failures[0]


def count_reserved() -> list[int]:
    class Counting(Line):
        def __init__(self):
            super().__init__()
            self.marked = torch.nn.Parameter(torch.zeros(37, 41))
            self.frozen = torch.nn.Parameter(torch.zeros(37, 41), requires_grad=False)

        def training_step(self, batch, batch_idx):
            if self.global_step == 0:
                found = [
                    each
                    for each in gc.get_objects()
                    if type(each) is torch.Tensor and each.shape == (37, 41)
                ]
                counts.append(len(found))
            return super().training_step(batch, batch_idx) + self.marked.sum()

    counts: list[int] = []
    Counting.counts = counts
    scale(Counting(), max_val=4)
    return counts


@pytest.mark.parametrize("world", [1, 2])
def test_memory_for_the_reduction_of_gradients_is_set_aside(ranks, world):
    for counts in on_processes(ranks, world, count_reserved):
        assert counts == [world - 1] * 2


def test_torchmetrics_do_not_wait_for_ranks_that_are_out_of_memory(ranks2):
    def limits() -> int:
        from torchmetrics import MeanMetric

        from trainer import PartialState

        class Measured(Hungry):
            def __init__(self):
                super().__init__([40, 9][PartialState(cpu=True).process_index])
                self.mean = MeanMetric()

            def validation_step(self, batch, batch_idx):
                self.mean.update(self.layer(batch[0]))
                self.log("mean", self.mean)

        return scale(Measured(), val_dataloaders=DataLoader(data(8), batch_size=4)).batch_size

    assert ranks2(limits, timeout=180) == [8, 8]


def test_memory_of_later_updates_and_of_the_validation_counts():
    class Later(Hungry):
        def training_step(self, batch, batch_idx):
            return Line.training_step(self, batch, batch_idx)

        def on_train_batch_end(self, outputs, batch, batch_idx):
            if self.global_step == 2:
                self.eat(batch)

    assert scale(Later(9)).batch_size == 8
    assert scale(Later(9), steps_per_trial=1).batch_size == 100

    class Validating(Later):
        def on_train_batch_end(self, outputs, batch, batch_idx):
            self.size = len(batch[0])

        def validation_step(self, batch, batch_idx):
            assert len(batch[0]) == 5
            validated.append(batch_idx)
            if self.size > self.limit:
                out_of_memory()

    validated: list[int] = []
    val = DataLoader(data(60), batch_size=5)
    assert scale(Validating(9), val_dataloaders=val).batch_size == 8
    assert validated == [0, 1, 2] * 3 + [0]
    trainer = quiet_trainer(max_epochs=1, limit_val_batches=0)
    assert scale(Validating(9), val_dataloaders=val, trainer=trainer).batch_size == 100


def test_out_of_memory_in_backward_counts():
    class Bomb(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, armed):
            ctx.armed = armed
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            if ctx.armed:
                out_of_memory()
            return gradient, None

    class Backward(Line):
        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            return Bomb.apply(loss, len(batch[0]) > 9)

    assert scale(Backward()).batch_size == 8


def test_memory_of_accumulated_gradients_counts():
    class Waiting(Hungry):
        def training_step(self, batch, batch_idx):
            if self.layer.weight.grad is not None:
                self.eat(batch)
            return Line.training_step(self, batch, batch_idx)

    assert scale(Waiting(9)).batch_size == 100
    accumulating = quiet_trainer(max_epochs=1, gradient_accumulation_steps=8)
    result = scale(Waiting(9), trainer=accumulating)
    assert (result.batch_size, result.gradient_accumulation_steps) == (8, 8)
    result = scale(Waiting(9), effective_batch_size=32)
    assert (result.batch_size, result.gradient_accumulation_steps) == (8, 4)


@pytest.mark.parametrize(
    ("effective", "limit", "size", "steps"),
    [(64, 20, 16, 4), (60, 19, 15, 4), (7, 6, 1, 7), (12, 500, 12, 1), (36, 33, 18, 2)],
)
def test_the_effective_size_is_kept_by_accumulation(effective, limit, size, steps):
    result = scale(
        Hungry(limit), effective_batch_size=effective, mode="binsearch", init_val=32, margin=0.0
    )
    assert (result.batch_size, result.gradient_accumulation_steps) == (size, steps)
    assert max(result.trials) <= effective


class Making(Hungry):
    """Makes its own loaders from an attribute."""

    def train_dataloader(self):
        return DataLoader(data(50), batch_size=self.batch_size, drop_last=True)


class KeptSize(Hungry):
    def __init__(self, batch_size: int = 1):
        super().__init__(9)
        self.save_hyperparameters()
        del self.batch_size

    def train_dataloader(self):
        return DataLoader(data(50), batch_size=self.hparams.batch_size)


class Data:
    def __init__(self, samples: int = 50):
        self.size, self.samples, self.set_up = 1, samples, 0

    def setup(self, stage):
        self.set_up += 1

    def train_dataloader(self):
        return DataLoader(data(self.samples), batch_size=self.size, drop_last=True)


def test_the_size_is_found_through_the_attribute_that_loaders_are_made_from():
    kept = KeptSize()
    assert scale(kept, train_dataloaders=None, update_attr=True).batch_size == 8
    assert kept.hparams.batch_size == 8
    source = Data()
    result = scale(Hungry(9), datamodule=source, batch_arg_name="size")
    assert (result.batch_size, source.size, source.set_up) == (8, 1, 0)
    scale(Hungry(9), datamodule=source, batch_arg_name="size", update_attr=True)
    assert source.size == 8
    small = Data(samples=20)  # where the data end, the search does
    assert scale(Hungry(500), datamodule=small, batch_arg_name="size").batch_size == 20


def test_an_attribute_that_changes_nothing_ends_the_search():
    class Fixed(Making):
        def train_dataloader(self):
            return DataLoader(data(50), batch_size=6)

    assert scale(Fixed(500), train_dataloaders=None).trials == {2: True, 4: True, 6: True}


class Graphs:
    """A batch of which nothing tells the size."""

    def __init__(self, samples):
        self.samples = samples


def test_batches_of_unknown_size_count_as_requested():
    class Opaque(Hungry):
        def training_step(self, batch, batch_idx):
            samples = torch.utils.data.default_collate(batch.samples)
            return super().training_step(samples, batch_idx)

    loader = DataLoader(data(50), batch_size=1, collate_fn=Graphs)
    assert scale(Opaque(9), train_dataloaders=loader).batch_size == 8


@pytest.mark.parametrize("method", ["validate", "test", "predict"])
def test_evaluations_are_sized_too(method):
    class Evaluating(Hungry):
        def validation_step(self, batch, batch_idx):
            assert batch_idx < 3
            self.eat(batch)
            return batch[0]

        test_step = predict_step = validation_step

    loaders = [DataLoader(data(90), batch_size=1), DataLoader(data(70), batch_size=1)]
    assert scale(Evaluating(9), dataloaders=loaders[0], method=method).batch_size == 8
    assert scale(Evaluating(500), dataloaders=loaders[0], method=method).batch_size == 90

    class Indexed(Evaluating):
        def validation_step(self, batch, batch_idx, dataloader_idx):
            self.eat(batch)

        test_step = predict_step = validation_step

    assert scale(Indexed(9), dataloaders=loaders, method=method).batch_size == 8


class Endless(Hungry):
    """Takes every batch, and looks at none."""

    def training_step(self, batch, batch_idx):
        return self.layer(torch.ones(1, 3)).sum()

    def validation_step(self, batch, batch_idx):
        pass

    test_step = predict_step = validation_step


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("method", ["fit", "validate", "test", "predict"])
def test_the_search_ends_with_the_data(method, drop_last):
    class Streamed(IterableDataset):
        def __iter__(self):
            return iter(data(50))

    def largest(dataset, **kwargs):
        loader = DataLoader(dataset, batch_size=1, drop_last=drop_last, **kwargs)
        name = "train_dataloaders" if method == "fit" else "dataloaders"
        return max(scale(Endless(0), method=method, init_val=16, **{name: loader}).trials)

    assert largest(data(50)) == 50
    assert largest(data(50), collate_fn=Graphs) == 50
    # a stream ends with its first batch, of 64; of those that are dropped there is none of 64
    assert largest(Streamed(), collate_fn=Graphs) == (32 if drop_last else 64)
    assert largest(Streamed()) == (32 if drop_last else 50)


def test_scale_batch_size_keeps_collate_fn_and_drop_last():
    def collate(samples):
        return [torch.stack(part) + 1 for part in zip(*samples, strict=True)]

    class Looking(Hungry):
        def training_step(self, batch, batch_idx):
            assert batch[0].min() > 0
            seen.append(len(batch[0]))
            return super().training_step(batch, batch_idx)

    class Several(Line):
        def training_step(self, batch, batch_idx):
            while not isinstance(batch[0] if isinstance(batch, list) else None, torch.Tensor):
                (batch,) = batch.values() if isinstance(batch, dict) else batch
            seen.append(len(batch[0]))
            return super().training_step(batch, batch_idx)

    seen: list[int] = []
    positive = TensorDataset(torch.rand(10, 3), torch.rand(10, 1))
    loader = DataLoader(positive, batch_size=1, collate_fn=collate, drop_last=True)
    scale(Looking(4), train_dataloaders=loader)
    assert seen == [2] * 3 + [4, 4, 4] + [8]
    seen.clear()
    for given in ([loader], {"a": [loader]}, CombinedLoader({"a": loader}, "min_size")):
        scale(Several(), train_dataloaders=given, max_val=2)
    assert seen == [2] * 9
    stream = DataLoader(Stream(), batch_size=1)  # of no known length
    assert scale(Hungry(4), train_dataloaders=stream).trials == {2: True, 4: True, 8: False}


@pytest.mark.parametrize(
    "loader",
    [
        [torch.zeros(2, 3)],
        DataLoader(data(), batch_size=None),
        DataLoader(data(), batch_sampler=[[0, 1], [2]]),
    ],
    ids=["batches", "none", "sampler"],
)
def test_loaders_without_a_batch_size_are_refused(loader):
    with pytest.raises(ValueError, match="cannot be given another batch size"):
        scale(Hungry(4), train_dataloaders=loader)


@pytest.mark.parametrize(
    ("kwargs", "text"),
    [
        ({"mode": "binary"}, "mode is 'binary'.*'binsearch'"),
        ({"method": "train"}, "method is 'train'"),
        ({"init_val": 0}, "init_val is 0"),
        ({"max_trials": 0}, "max_trials is 0"),
        ({"max_val": 0}, "max_val is 0"),
        ({"margin": 1.0}, "margin is 1.0"),
        ({"effective_batch_size": 0}, "effective_batch_size is 0"),
        ({"update_attr": True, "batch_arg_name": "size"}, "no attribute 'size'"),
        ({"train_dataloaders": None, "batch_arg_name": "size"}, "an attribute 'size'"),
        ({"train_dataloaders": None, "dataloaders": [0]}, "dataloaders.*method='fit' does not use"),
    ],
)
def test_wrong_arguments_of_scale_batch_size(kwargs, text):
    with pytest.raises(ValueError, match=text):
        scale(Hungry(4), **kwargs)


def test_an_effective_size_needs_updates_of_the_trainer():
    with pytest.raises(ValueError, match="training_step controls in manual optimisation"):
        scale(Manual(), effective_batch_size=4)
    loader = DataLoader(data(), batch_size=1)
    with pytest.raises(ValueError, match="and validate makes none"):
        scale(Endless(0), dataloaders=loader, method="validate", effective_batch_size=4)


def test_manual_optimisation_is_sized_too():
    class Eating(Manual):
        def training_step(self, batch, batch_idx):
            if len(batch[0]) > 9:
                out_of_memory()
            return super().training_step(batch, batch_idx)

    assert scale(Eating()).batch_size == 8


def test_a_signal_in_a_trial_is_sent_again_after_it():
    import signal

    class Interrupted(Line):
        def training_step(self, batch, batch_idx):
            if self.global_step == 1:
                signal.raise_signal(signal.SIGINT)
            return super().training_step(batch, batch_idx)

    module = Interrupted()
    before = copy_of(module)
    with pytest.raises(KeyboardInterrupt):
        scale(module)
    assert_same(copy_of(module), before)


def test_the_trainer_fits_after_a_search():
    trainer: Trainer = quiet_trainer(max_epochs=1)
    module = Hungry(9)
    size = scale(module, trainer=trainer).batch_size
    trainer.fit(module, DataLoader(data(), batch_size=size))
    assert trainer.global_step == 3
