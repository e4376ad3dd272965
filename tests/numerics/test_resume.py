"""A run that was interrupted and resumed is one that was not, to the last bit (P1)."""

from __future__ import annotations

import copy
import json
import random
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import (
    DataLoader,
    Dataset,
    RandomSampler,
    SequentialSampler,
    TensorDataset,
)
from torchmetrics import MeanMetric, SumMetric

from callbacks import Callback, EarlyStopping, ModelCheckpoint
from tests.numerics.running import (
    Watch,
    assert_same,
    copy_of,
    cut_back,
    on_processes,
    quiet_trainer,
)
from trackers import read_metrics
from trainer import CombinedLoader, GradScalerKwargs, TrainModule
from trainer.checkpoint.storage import commit, open_staging, read_manifest
from trainer.errors import Preempted

CLASSES, FEATURES = 3, 5
every_world = pytest.mark.parametrize("world", [1, 2, 3])


class Augmented(Dataset[Any]):
    """Every sample is noisy, with noise from all three generators and one of its own."""

    def __init__(self, samples: int) -> None:
        generator = torch.Generator().manual_seed(8)
        self.values = torch.randn(samples, FEATURES, generator=generator)
        self.labels = torch.randint(CLASSES, (samples,), generator=generator)
        self.own = numpy.random.default_rng(8)

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        noise = torch.randn(FEATURES) * (1 + random.random()) + float(numpy.random.rand())
        noise += self.own.random(dtype=numpy.float32)
        return self.values[index] + 0.3 * noise, self.labels[index]


class Noisy(TrainModule):
    """Dropout, batch normalisation, momentum and a schedule: state of every kind."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(FEATURES, 16),
            nn.BatchNorm1d(16, track_running_stats=True),
            nn.ReLU(),
            nn.Dropout(0.4),
            nn.Linear(16, CLASSES),
        )
        self.seen = MeanMetric()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = cross_entropy(self.net(batch[0]), batch[1])
        self.log("loss", loss)
        self.log("epoch/loss", loss, on_step=False, on_epoch=True)
        self.seen.update(loss.detach(), weight=float(len(batch[0])))
        self.log("epoch/seen", self.seen, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val/loss", cross_entropy(self.net(batch[0]), batch[1]))
        # Never better than in the first epoch, so that it ends the run where one asks for that.
        self.log("val/epoch", float(self.trainer.current_epoch))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        return {"optimizer": optimizer, "scheduler": StepLR(optimizer, 3, 0.9), "interval": "step"}


class End(Callback):
    """Keeps the state of the optimizer and of its schedule, which are gone after the fit."""

    def on_train_end(self, trainer: Any, module: Any) -> None:
        self.optimizer = copy.deepcopy(trainer.optimizers[0].state_dict())
        self.schedule = copy.deepcopy(trainer.schedulers[0].scheduler.state_dict())
        self.scaler = trainer.accelerator.precision.state_dict()


class Average(Callback):
    """A moving average of the weights, taken in at each update."""

    def __init__(self) -> None:
        self.weights: dict[str, Tensor] = {}

    def on_train_step_end(self, trainer: Any, module: Any) -> None:
        for name, weight in module.named_parameters():
            now = weight.detach()
            self.weights[name] = 0.9 * self.weights.get(name, now) + 0.1 * now

    def state_dict(self) -> dict[str, Any]:
        return self.weights

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.weights = state


class SignalAt(Callback):
    """Sends SIGTERM to one rank, once, at a hook of an update."""

    def __init__(self, hook: str, step: int, rank: int = 0) -> None:
        def send(trainer: Any, *_: Any) -> None:
            here = trainer.accelerator.process_index == rank
            if here and trainer.global_step == step and not self.signals:
                self.signals = True
                signal.raise_signal(signal.SIGTERM)

        self.signals = False
        setattr(self, hook, send)


def noisy_fit(folder: str, begin: int, options: dict[str, Any]) -> dict[str, Any]:
    """Train on this process, or go on; `begin` seeds what a resumed run must not depend on.

    Returns:
        What may not differ at the end.
    """
    options = dict(options)
    every, patience = options.pop("every", "1 epoch"), options.pop("patience", 50)
    workers, signals = options.pop("workers"), options.pop("signals", None)
    monitor = options.pop("monitor", None)
    random.seed(begin)
    numpy.random.seed(begin)
    torch.manual_seed(begin)
    watch, end, average = Watch(), End(), Average()
    ranked = ModelCheckpoint(monitor=monitor or "val/loss", every=every, save_top_k=-1)
    early = EarlyStopping(monitor or "val/epoch", patience=patience)
    trainer = quiet_trainer(
        project_dir=folder,
        callbacks=[watch, end, average, early, ranked, *([SignalAt(*signals)] if signals else [])],
        num_sanity_val_steps=1,
        **options,
    )
    module = Noisy()
    train = DataLoader(Augmented(26), batch_size=4, shuffle=True, num_workers=workers)
    held_out = Augmented(10)
    validation = DataLoader(TensorDataset(held_out.values, held_out.labels), batch_size=3)
    try:
        trainer.fit(module, train, validation, ckpt_path="auto")
    except Preempted as preempted:
        return {"code": preempted.code, "step": trainer.global_step}
    return {
        "weights": copy_of(module),
        "optimizer": end.optimizer,
        "schedule": end.schedule,
        "scaler": end.scaler,
        "average": average.weights,
        "callbacks": [early.state_dict(), ranked.state_dict()],
        "counters": (trainer.global_step, trainer.current_epoch, trainer.samples_seen),
        "items": trainer.items_seen,
        "drawn": (torch.rand(3), random.random(), numpy.random.rand()),
        "losses": watch.losses,
        "rates": watch.rates,
        "gradients": watch.gradients,
    }


PER_UPDATE = ("losses", "rates", "gradients")


def assert_resumed(
    whole: dict[str, Any],
    resumed: dict[str, Any],
    *,
    after: int,
    boundaries_after: int | None = None,
) -> None:
    """The end is the same, and so is every update that the resumed run made.

    `boundaries_after` is less by one where the last update's boundary is the resumed run's.
    """
    for name in PER_UPDATE:
        first = boundaries_after if name == "losses" and boundaries_after is not None else after
        assert len(whole[name]) > first
        assert_same(resumed[name], whole[name][first:])
    assert whole.keys() == resumed.keys()
    for name in whole.keys() - set(PER_UPDATE):
        if name == "callbacks":
            assert resumed[name] == whole[name]
        else:
            assert_same(resumed[name], whole[name])


def assert_same_record(one: Path, other: Path) -> None:
    records = [
        [{key: value for key, value in record.items() if key != "time"} for record in records]
        for records in (read_metrics(path / "metrics.jsonl") for path in (one, other))
    ]
    assert len(records[0]) > 0
    assert records[0] == records[1]


def interrupted_at_epoch_two(ranks: Any, world: int, folder: Path, **options: Any) -> None:
    """Compare four epochs with two and two, the second two in new processes' stead."""
    whole = on_processes(
        ranks, world, noisy_fit, str(folder / "whole"), 1, {"max_epochs": 4, **options}
    )
    parts = str(folder / "parts")
    on_processes(ranks, world, noisy_fit, parts, 1, {"max_epochs": 2, **options})
    resumed = on_processes(ranks, world, noisy_fit, parts, 99, {"max_epochs": 4, **options})
    for one, other in zip(whole, resumed, strict=True):
        half = len(one["losses"]) - len(other["losses"])
        assert half == 2 * len(one["losses"]) // 4
        assert_resumed(one, other, after=half)
    assert_same_record(folder / "whole", folder / "parts")


@pytest.mark.parametrize(("world", "workers"), [(1, 0), (1, 2), (2, 0), (2, 2)])
def test_resume_between_epochs(ranks, tmp_path, world, workers):
    interrupted_at_epoch_two(ranks, world, tmp_path, workers=workers)


@pytest.mark.parametrize(
    ("world", "options"),
    [
        (2, {"seed": 5, "gradient_accumulation_steps": 2, "max_grad_norm": 0.5}),
        (1, {"mixed_precision": "bf16"}),
    ],
)
def test_resume_between_epochs_with_options(ranks, tmp_path, world, options):
    interrupted_at_epoch_two(ranks, world, tmp_path, workers=0, **options)


@pytest.mark.filterwarnings("ignore:This DataLoader will create 3 worker processes")
@pytest.mark.parametrize(
    ("world", "workers", "accumulation"),
    [(1, 0, 1), (1, 1, 1), (1, 3, 1), (1, 0, 2), (2, 0, 2), (2, 2, 1), (3, 0, 1)],
)
def test_resume_inside_an_epoch(ranks, tmp_path, world, workers, accumulation):
    interrupted_inside(ranks, world, tmp_path, workers, gradient_accumulation_steps=accumulation)


@pytest.mark.parametrize("world", [1, 2])
def test_resume_inside_an_epoch_in_fp16(ranks, tmp_path, world):
    scaler = GradScalerKwargs(init_scale=2.0**14, growth_interval=2)  # it overflows, and grows
    options = {"mixed_precision": "fp16", "kwargs_handlers": [scaler]}
    whole = interrupted_inside(ranks, world, tmp_path, 0, **options)
    assert whole["scaler"]["scale"] != 2.0**14


def test_several_resumes_inside_one_epoch_in_fp16(tmp_path):
    # Between the scale's growth and its overflow, with a validation and a log in between.
    scaler = GradScalerKwargs(init_scale=2.0**14, growth_interval=2)
    options = {"max_epochs": 2, "workers": 0, "val_every": 2, "log_every": 3, "every": 3}
    options |= {"mixed_precision": "fp16", "kwargs_handlers": [scaler]}
    (whole,) = on_processes(None, 1, noisy_fit, str(tmp_path / "whole"), 1, options)
    assert whole["counters"][0] == 14
    folder, steps = str(tmp_path / "signals"), [0, 2, 4, 5, 9]
    for begin, step in enumerate(steps, 1):
        signals = {"signals": ("on_train_step_start", step)}
        (ended,) = on_processes(None, 1, noisy_fit, folder, begin, options | signals)
        assert ended["step"] == step + 1
    (resumed,) = on_processes(None, 1, noisy_fit, folder, 99, options)
    assert_resumed(whole, resumed, after=10, boundaries_after=9)
    assert_same_record(tmp_path / "whole", tmp_path / "signals")


def interrupted_inside(
    ranks: Any, world: int, tmp_path: Path, workers: int, **more: Any
) -> dict[str, Any]:
    """Compare a run with ones that were killed inside an epoch, and begin in another place."""
    options = {"max_epochs": 3, "workers": workers, "every": 1 if world > 1 else 3, **more}
    whole = on_processes(ranks, world, noisy_fit, str(tmp_path / "whole"), 1, options)
    updates = whole[0]["counters"][0]
    each = updates // 3  # an epoch is 7 batches
    middle = {1: 3, 2: 1, 3: 1}[world]
    steps = [middle, middle + (3 if world == 1 else each)]
    for step in steps:
        folder = tmp_path / f"from-{step}"
        cut_back(tmp_path / "whole", folder, step)
        resumed = on_processes(ranks, world, noisy_fit, str(folder), 99, options)
        for one, other in zip(whole, resumed, strict=True):
            assert_resumed(one, other, after=step)
        assert_same_record(tmp_path / "whole", folder)
    return whole[0]


@pytest.mark.parametrize("world", [1, 2])
def test_resume_of_decisions_by_unrecorded_step_metrics(ranks, tmp_path, world):
    whole = interrupted_inside(ranks, world, tmp_path, 0, monitor="loss", log_every=50)
    early, ranked = whole["callbacks"]
    assert len(ranked["scores"]) == whole["counters"][0] // (3 if world == 1 else 1)
    assert early["best_score"] == min(ranked["scores"].values())


@pytest.mark.parametrize("world", [1, 2])
def test_resume_of_a_decision_that_a_signal_left_due(ranks, tmp_path, world):
    options = {"max_epochs": 2, "workers": 0, "log_every": 50, "every": 1, "monitor": "loss"}
    whole = on_processes(ranks, world, noisy_fit, str(tmp_path / "whole"), 1, options)
    signals = options | {"signals": ("on_train_step_start", 2)}
    on_processes(ranks, world, noisy_fit, str(tmp_path / "signals"), 1, signals)
    resumed = on_processes(ranks, world, noisy_fit, str(tmp_path / "signals"), 99, options)
    for one, other in zip(whole, resumed, strict=True):
        after = len(one["rates"]) - len(other["rates"])
        assert_resumed(one, other, after=after, boundaries_after=after - 1)


class Narrow(TrainModule):
    """Weights in bfloat16, whose optimizer keeps a product in float32."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.line = nn.Linear(FEATURES, CLASSES).to(torch.bfloat16)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return cross_entropy(self.line(batch[0].to(torch.bfloat16)), batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.NAdam(self.parameters(), lr=0.05)


def narrow_fit(folder: str, epochs: int) -> tuple[Any, Any]:
    """Train, or go on, on this process."""
    module, product = Narrow(), None

    class Look(Callback):
        def on_train_end(self, trainer: Any, module: Any) -> None:
            nonlocal product
            (optimizer,) = trainer.optimizers
            product = copy.deepcopy(optimizer.state[module.line.weight]["mu_product"])

    trainer = quiet_trainer(
        max_epochs=epochs, seed=1, project_dir=folder, callbacks=[Look(), ModelCheckpoint()]
    )
    trainer.fit(module, DataLoader(Augmented(12), batch_size=4), ckpt_path="auto")
    return copy_of(module), product


def test_float32_optimizer_state_of_bf16_weights_is_not_rounded(tmp_path):
    whole = narrow_fit(str(tmp_path / "whole"), 9)
    for epochs in (3, 5, 9):
        parts = narrow_fit(str(tmp_path / "parts"), epochs)
    assert parts[1].dtype == torch.float32
    assert_same(parts, whole)


class Again(RandomSampler):
    """Shuffles the list of the epoch before, which a new process does not have."""

    def __iter__(self) -> Iterator[int]:
        self.order = getattr(self, "order", list(range(len(self))))
        random.shuffle(self.order)
        return iter(self.order)


@pytest.mark.parametrize(("sampler", "step", "signals"), [
    (Again, 1, False), (Again, 3, False), (Again, 4, True), (RandomSampler, 4, False),
])  # fmt: skip  # a table
@pytest.mark.parametrize("several", [False, True])
def test_a_sampler_that_depends_on_earlier_epochs_warns(
    tmp_path, caplog, sampler, step, signals, several
):
    """An epoch is of 3 updates; the sampler's second order depends on its first."""
    data = TensorDataset(torch.randn(12, FEATURES), torch.arange(12) % CLASSES)
    for max_steps in (step, 6):
        trainer = quiet_trainer(
            max_steps=max_steps, seed=1, project_dir=tmp_path, callbacks=[ModelCheckpoint(every=1)]
        )
        loader: Any = DataLoader(data, batch_size=4, sampler=sampler(data))
        if several:
            loader = CombinedLoader([loader], "sequential")
        trainer.fit(Noisy(), loader, ckpt_path="auto")
    assert ("the order of its Again depend on the global generators" in caplog.text) == signals
    assert ("differs from before the resume" in caplog.text) == signals


class Lazy(TrainModule):
    """Knows the shapes of its parameters when it has seen a batch."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.net = nn.Sequential(nn.LazyLinear(8), nn.LazyBatchNorm1d(), nn.LazyLinear(CLASSES))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=0.05)


@pytest.mark.filterwarnings("ignore:Lazy modules are a new feature")
def test_resume_of_lazy_modules(tmp_path):
    def fit(folder: str, epochs: int) -> dict[str, Tensor]:
        module = Lazy()
        trainer = quiet_trainer(
            max_epochs=epochs, seed=1, project_dir=tmp_path / folder, callbacks=[ModelCheckpoint()]
        )
        loader = DataLoader(Augmented(12), batch_size=4, shuffle=True)
        trainer.fit(module, loader, ckpt_path="auto")
        return copy_of(module)

    whole = fit("whole", 3)
    fit("parts", 1)
    assert_same(fit("parts", 3), whole)


class Permuted(SequentialSampler):
    """Draws an order from the generator that it is given."""

    def __init__(self, generator: torch.Generator) -> None:
        super().__init__(range(12))
        self.generator = generator

    def __iter__(self) -> Any:
        return iter(torch.randperm(12, generator=self.generator).tolist())


class Drawing(TrainModule):
    """Draws from generators of every kind that it keeps, wherever it is called; one is a loader's.

    Args:
        late: Whether it makes one of them only when it is needed.
    """

    def __init__(self, *, late: bool = False) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.net = nn.Sequential(nn.Linear(FEATURES, 8), nn.ReLU(), nn.Linear(8, CLASSES))
        self.noise = torch.Generator().manual_seed(3)
        self.mix = {"beta": numpy.random.default_rng(3), "normal": numpy.random.RandomState(3)}
        self.flip = None if late else random.Random(3)
        self.order = torch.Generator().manual_seed(3)

    def drawn(self) -> Tensor:
        self.flip = self.flip or random.Random(3)
        numbers = [each.standard_normal() for each in self.mix.values()]
        return torch.randn(FEATURES, generator=self.noise) + sum(numbers) + self.flip.random()

    def on_train_start(self) -> None:
        self.drawn()

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return [batch[0] + 0.1 * self.drawn(), batch[1]]

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return cross_entropy(self.net(batch[0] + 0.1 * self.drawn()), batch[1])

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.drawn()

    def train_dataloader(self) -> Any:
        return DataLoader(Augmented(12), batch_size=2, sampler=Permuted(self.order))

    def val_dataloader(self) -> Any:
        return DataLoader(Augmented(4), batch_size=2)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05)


def drawing_fit(folder: str, steps: int, options: dict[str, Any], late: bool = False) -> Any:
    module = Drawing(late=late)
    trainer = quiet_trainer(
        max_steps=steps, seed=1, project_dir=folder, callbacks=[ModelCheckpoint()], **options
    )
    trainer.fit(module, ckpt_path="auto")
    module.drawn()
    return {"weights": copy_of(module), "own": module.drawn()}


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("options", [{}, {"val_every": 2, "gradient_accumulation_steps": 2}])
def test_resume_of_generators_of_the_module(ranks, tmp_path, world, options):
    whole = on_processes(ranks, world, drawing_fit, str(tmp_path / "whole"), 8, options)
    on_processes(ranks, world, drawing_fit, str(tmp_path / "parts"), 2, options)
    on_processes(ranks, world, drawing_fit, str(tmp_path / "parts"), 5, options)
    resumed = on_processes(ranks, world, drawing_fit, str(tmp_path / "parts"), 8, options)
    assert_same(resumed, whole)


def test_a_lazy_generator_of_the_module_warns(tmp_path, caplog):
    drawing_fit(str(tmp_path), 2, {}, late=True)
    assert "random generators when" not in caplog.text
    drawing_fit(str(tmp_path), 4, {}, late=False)
    assert "random generators when" not in caplog.text
    drawing_fit(str(tmp_path / "other"), 2, {"num_sanity_val_steps": 0}, late=True)
    module = Drawing(late=True)
    module.on_train_start = lambda: None
    module.on_after_batch_transfer = lambda batch, dataloader_idx: batch
    options = {"num_sanity_val_steps": 0, "callbacks": [ModelCheckpoint()], "seed": 1}
    trainer = quiet_trainer(max_steps=4, project_dir=tmp_path / "other", **options)
    trainer.fit(module, ckpt_path="auto")
    assert "Drawing had random generators when" in caplog.text
    assert "(module.flip) that no longer exist" in caplog.text


class Switching(Noisy):
    """At one update, and never again, layers are frozen, unfrozen and put into evaluation mode."""

    def __init__(self) -> None:
        super().__init__()
        self.net[0].requires_grad_(False)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.global_step == 3:
            self.net[0].requires_grad_(True)
            self.net[4].bias.requires_grad_(False)
            self.net[1].eval()

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def switching_fit(folder: Path, steps: int, module: Noisy | None = None) -> Noisy:
    torch.manual_seed(0)
    module = module or Switching()
    trainer = quiet_trainer(
        max_steps=steps, seed=1, project_dir=folder, callbacks=[ModelCheckpoint()]
    )
    data = Augmented(24)
    trainer.fit(module, DataLoader(data, batch_size=2, shuffle=True), ckpt_path="auto")
    return module


def test_resume_of_frozen_and_evaluated_layers(tmp_path, caplog):
    whole = switching_fit(tmp_path / "whole", 10)
    switching_fit(tmp_path / "parts", 6)
    resumed = switching_fit(tmp_path / "parts", 10)
    assert_same(copy_of(resumed), copy_of(whole))
    assert not resumed.net[1].training
    assert "freezes different" not in caplog.text


class Still(Switching):
    """Has a layer whose statistics are to stay from the beginning."""

    def __init__(self) -> None:
        super().__init__()
        self.net[1].eval()


def test_changes_to_a_module_after_its_fit_are_not_saved(tmp_path):
    module = Still()
    trainer = quiet_trainer(max_steps=2, seed=1, project_dir=tmp_path / "a")
    loader = DataLoader(Augmented(24), batch_size=2)
    trainer.fit(module, loader)
    module.eval().requires_grad_(False)
    trainer.save_checkpoint(tmp_path / "a" / "final")
    again = Still()
    longer = quiet_trainer(max_steps=4, seed=1, project_dir=tmp_path / "b")
    longer.fit(again, loader, ckpt_path=tmp_path / "a" / "final")
    assert [part.training for part in again.net[:2]] == [True, False]
    assert torch.equal(again.net[1].running_mean, torch.zeros(16))


def test_a_script_that_changes_what_it_freezes(tmp_path, caplog):
    switching_fit(tmp_path, 6)
    module = Switching()
    module.net[0].requires_grad_(True)
    module.net[4].requires_grad_(False)
    before = copy_of(switching_fit(tmp_path, 8, module))
    assert "saved; the script's choice is used: net.4.weight." in caplog.text
    assert not module.net[1].training  # as it was saved, which the script has not changed
    caplog.clear()
    again = Switching()
    again.net[0].requires_grad_(True)
    again.net[4].requires_grad_(False)
    after = copy_of(switching_fit(tmp_path, 10, again))
    assert "freezes different" not in caplog.text
    assert torch.equal(after["net.4.bias"], before["net.4.bias"])
    assert not torch.equal(after["net.0.bias"], before["net.0.bias"])


HOOKS = ["on_before_optimizer_step", "on_validation_batch_end", "on_train_epoch_end", "on_boundary"]


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("hook", HOOKS)
def test_resume_after_signals_in_every_hook(ranks, tmp_path, world, hook):
    options = {"max_epochs": 3, "workers": 0, "val_every": 2, "log_every": 3, "every": 3}
    whole = on_processes(ranks, world, noisy_fit, str(tmp_path / "whole"), 1, options)
    folder = str(tmp_path / "signals")
    at = {"on_train_epoch_end": 7 if world == 1 else 4}.get(hook, 2)
    starts = [(hook, at, world - 1), (hook, 2 * at, 0), None]
    for begin, signals in enumerate(starts, 1):
        results = on_processes(
            ranks, world, noisy_fit, folder, begin, options | {"signals": signals}
        )
        if signals is not None:
            (code,) = {result["code"] for result in results[world - 1 :][:1]}
            assert code == 128 + signal.SIGTERM
            (step,) = {result["step"] for result in results}
            assert 0 <= step - signals[1] <= 2  # within two updates
    for one, other in zip(whole, results, strict=True):
        assert_resumed(one, other, after=step, boundaries_after=step - 1)
    assert_same_record(tmp_path / "whole", tmp_path / "signals")


class Evaluating(TrainModule):
    """Counts the validation's samples in a metric object and in a buffer."""

    def __init__(self, logs_object: bool) -> None:
        super().__init__()
        self.net = nn.Linear(1, 1)
        self.seen = SumMetric()
        self.logs_object = logs_object
        self.register_buffer("evaluated", torch.zeros(()))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.net(batch[0]).square().mean()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.seen.update(len(batch[0]))
        self.evaluated = self.evaluated + len(batch[0])  # another tensor

    def on_validation_epoch_end(self) -> None:
        self.log("val/evaluated", self.evaluated)
        if self.logs_object:
            self.log("val/samples", self.seen)
        else:
            self.log("val/samples", self.seen.compute())
            self.seen.reset()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.mark.parametrize("logs_object", [True, False])
def test_a_validation_interrupted_by_a_signal_counts_once(tmp_path, logs_object):
    class Signal(Callback):
        def on_validation_batch_end(self, trainer: Any, module: Any, *rest: Any) -> None:
            if trainer.global_step == 4 and not (tmp_path / "signals").exists():
                (tmp_path / "signals").touch()
                signal.raise_signal(signal.SIGTERM)

    def fit(folder: str, *callbacks: Callback) -> list[dict[str, Any]]:
        loader = DataLoader(TensorDataset(torch.ones(10, 1)), batch_size=3)
        trainer = quiet_trainer(
            max_epochs=3, project_dir=tmp_path / folder, checkpointing=True, callbacks=callbacks
        )
        trainer.fit(Evaluating(logs_object), loader, loader, ckpt_path="auto")
        return [each for each in read_metrics(trainer.metrics_path) if "val/samples" in each]

    def values(records: list[dict[str, Any]]) -> list[tuple[Any, ...]]:
        return [(each["step"], each["val/samples"], each["val/evaluated"]) for each in records]

    assert values(fit("whole")) == [(4, 10, 10), (8, 10, 20), (12, 10, 30)]
    with pytest.raises(Preempted):
        fit("parts", Signal())
    assert values(fit("parts", Signal())) == [(4, 10, 10), (8, 10, 20), (12, 10, 30)]


def test_metric_objects_start_empty_after_the_sanity_check(tmp_path):
    class Late(Evaluating):
        """Never logs or resets its object in the validation."""

        def on_validation_epoch_end(self) -> None:
            assert self.seen.compute() == 10 * (self.trainer.current_epoch + 1)

        def on_train_start(self) -> None:
            assert self.seen.update_count == 0

    loader = DataLoader(TensorDataset(torch.ones(10, 1)), batch_size=10)
    trainer = quiet_trainer(max_epochs=2, project_dir=tmp_path, num_sanity_val_steps=1)
    trainer.fit(Late(True), loader, loader)


class DrawingFirst(Noisy):
    """Draws whenever an epoch begins."""

    def on_train_epoch_start(self) -> None:
        torch.rand(())


@pytest.mark.parametrize("length", [{"max_epochs": 2}, {"max_steps": 10}])
def test_draws_in_on_train_epoch_start_are_made_once(tmp_path, length):
    def weights(folder: str, *lengths: dict[str, int]) -> dict[str, Tensor]:
        for begin, each in enumerate(lengths, 1):
            torch.manual_seed(begin)
            module = DrawingFirst()
            trainer = quiet_trainer(project_dir=str(tmp_path / folder), checkpointing=True, **each)
            trainer.fit(module, DataLoader(Augmented(26), batch_size=4), ckpt_path="auto")
        return copy_of(module)

    end = {"max_epochs": 3}
    assert_same(weights("parts", length, end), weights("whole", end))


class Changing(TrainModule):
    """Changes something whenever an epoch begins."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.what, self.beta, self.rates = what, 1.0, [1.0]
        self.net, self.head = nn.Linear(3, 3), nn.Linear(3, 1)
        self.head.scale, self.shift = 1.0, torch.tensor(0.0)
        self.register_buffer("epochs", torch.zeros(()))

    def change(self) -> None:
        with torch.no_grad():
            match self.what:
                case "weights":
                    self.head.weight.add_(torch.randn_like(self.head.weight))
                case "buffer":
                    self.epochs += 1
                case "attributes":
                    self.beta = self.beta / 2 + 0.1 * self.current_epoch
                    self.rates.append(self.beta)
                    self.outputs = []
                    self.head.scale = 1.0 + self.current_epoch
                    self.shift = torch.tensor(0.1 * self.current_epoch)
                case "rate":
                    self.trainer.optimizers[0].param_groups[0]["lr"] *= 0.5
                case "accumulation":
                    self.trainer.gradient_accumulation_steps = 1 + self.current_epoch % 2
                case "group" if self.current_epoch == 1:
                    self.net.requires_grad_(True)
                    group = {"params": [*self.net.parameters()], "lr": 0.01}
                    self.trainer.optimizers[0].add_param_group(group)

    def on_train_epoch_start(self) -> None:
        self.change()

    def on_validation_start(self) -> None:
        self.epochs += 0.1 * (self.what == "validation")

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        shown = self.head(self.net(batch[0]).tanh()) - 1 - self.epochs
        loss = (shown - self.shift).square().mean() * self.head.scale
        if self.what == "attributes":
            self.outputs.append(loss.detach())
        return loss * self.beta * len(self.rates)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("shown", self.head(self.net(batch[0])).mean())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        if self.what == "group":
            self.net.requires_grad_(False)
        return torch.optim.Adam([p for p in self.parameters() if p.requires_grad], 0.05)


class ByCallback(Callback):
    def on_train_epoch_start(self, trainer: Any, module: Any) -> None:
        with torch.no_grad():
            module.head.weight.mul_(0.5)


class Interrupted(Callback):
    """Sends a signal inside an epoch, in its last update, or in a validation."""

    def __init__(self, where: str) -> None:
        self.where = where

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.current_epoch == 1 and batch_idx == {"inside": 2, "end": 5}.get(self.where):
            signal.raise_signal(signal.SIGTERM)

    def on_validation_batch_start(self, trainer: Any, *_: Any) -> None:
        if self.where == "validation" and trainer.current_epoch == 1:
            signal.raise_signal(signal.SIGTERM)


@pytest.mark.parametrize("where", ["inside", "end", "validation"])
@pytest.mark.parametrize(
    "what",
    ["weights", "buffer", "attributes", "rate", "accumulation", "group", "callback", "validation"],
)
def test_what_an_epochs_start_changes_is_changed_once(tmp_path, what, where):
    def fit(folder: str, *callbacks: Callback) -> dict[str, Tensor]:
        torch.manual_seed(0)
        module = Changing(what)
        trainer = quiet_trainer(
            project_dir=tmp_path / folder,
            checkpointing=True,
            max_epochs=3,
            callbacks=[*callbacks, *([ByCallback()] if what == "callback" else [])],
            seed=1,
        )
        numbers = torch.randn(24, 3, generator=torch.Generator().manual_seed(2))
        loader = DataLoader(TensorDataset(numbers), 4, shuffle=True)
        trainer.fit(module, loader, loader, ckpt_path="auto")
        return copy_of(module)

    whole = fit("whole")
    with pytest.raises(Preempted):
        fit("parts", Interrupted(where))
    assert_same(fit("parts"), whole)


class ScaledByEpoch(Noisy):
    """Sets the scale of its loss when an epoch begins; signals arrive in updates."""

    def __init__(self, signalled: int | None) -> None:
        super().__init__()
        self.signalled, self.scale = signalled, 1.0

    def on_train_epoch_start(self) -> None:
        self.scale = 2.0 + self.current_epoch

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if self.global_step == self.signalled:
            signal.raise_signal(signal.SIGTERM)
        return super().training_step(batch, batch_idx) * self.scale


def test_the_checkpoint_of_an_earlier_release_lacks_what_an_epochs_start_has_set(tmp_path):
    def fit(folder: str, signalled: int | None = None) -> dict[str, Tensor]:
        torch.manual_seed(0)
        module = ScaledByEpoch(signalled)
        trainer = quiet_trainer(
            project_dir=tmp_path / folder, checkpointing=True, max_epochs=2, seed=1
        )
        trainer.fit(module, DataLoader(Augmented(24), 4, shuffle=True), ckpt_path="auto")
        return copy_of(module)

    whole = fit("whole")
    with pytest.raises(Preempted):
        fit("parts", 7)
    saved = max((tmp_path / "parts" / "checkpoints").glob("step-*[0-9]"))
    staging, manifest = open_staging(saved), read_manifest(saved)
    shutil.copytree(saved, staging, dirs_exist_ok=True)
    (staging / "manifest.json").unlink()
    document = json.loads((staging / "trainer.json").read_text())
    del document["tree"]["epoch_start"]
    (staging / "trainer.json").write_text(json.dumps(document))
    of_files = ("format_version", "files", "sha256")
    commit(staging, saved, {k: v for k, v in manifest.items() if k not in of_files})
    with pytest.raises(Preempted):  # the hook is called again, and the next checkpoint has it
        fit("parts", 9)
    assert_same(fit("parts"), whole)


class Counting(Noisy):
    """Has batches of unequal items, the first of which all others are weighed by."""

    def __init__(self) -> None:
        super().__init__()
        self.counted: list[int] = []

    def count_items(self, batch: Any) -> int:
        self.counted.append(int((batch[1] + 1).sum()))
        return self.counted[-1]


def test_losses_are_scaled_by_the_items_of_the_first_start(tmp_path):
    def fits(folder: str, *lengths: int) -> list[Counting]:
        modules = []
        for begin, length in enumerate(lengths, 1):
            torch.manual_seed(begin)
            modules.append(Counting())
            trainer = quiet_trainer(
                project_dir=str(tmp_path / folder),
                checkpointing=True,
                max_steps=length,
                gradient_accumulation_steps=2,
            )
            trainer.fit(modules[-1], DataLoader(Augmented(26), batch_size=4), ckpt_path="auto")
        return modules

    first, resumed = fits("parts", 2, 6)
    (whole,) = fits("whole", 6)
    assert first.counted[0] == whole.counted[0] != resumed.counted[0]
    assert_same(copy_of(resumed), copy_of(whole))


def test_a_script_that_changes_what_it_evaluates(tmp_path):
    switching_fit(tmp_path, 6)
    module = Switching()
    module.net[3].eval()
    switching_fit(tmp_path, 8, module)
    assert [part.training for part in (module.net[1], module.net[3])] == [True, False]
