"""The mean over the last epochs, against torch's own pieces put together by hand."""

from __future__ import annotations

import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.optim.lr_scheduler import StepLR
from torch.optim.swa_utils import SWALR, AveragedModel, update_bn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset
from torchmetrics import MeanMetric

from callbacks import (
    BackboneFinetuning,
    Callback,
    EarlyStopping,
    ModelCheckpoint,
    StochasticWeightAveraging,
)
from tests.numerics.running import Watch, assert_same, copy_of, on_processes, quiet_trainer
from trackers import read_metrics
from trainer import TrainModule


class Net(TrainModule):
    """Batch normalisation, a metric object, a counter and a schedule; in float64."""

    def __init__(self, interval: str = "epoch", dropout: float = 0.0) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        self.net = nn.Sequential(
            nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(dropout), nn.Linear(4, 2)
        )
        self.fixed = nn.BatchNorm1d(2)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.seen = MeanMetric()
        self.interval = interval
        for parameter in self.parameters():
            nn.init.normal_(parameter, generator=generator)
        self.double()
        self.fixed.eval()

    def forward(self, x: Any) -> Any:
        return self.fixed(self.net(x))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.calls += 1
        loss = (self(batch[0]) - 1).square().mean()
        self.log("loss", loss)
        self.seen.update(loss.detach())
        self.log("seen", self.seen, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val/loss", (self(batch[0]) - 1).square().mean())
        self.log("val/flat", 1.0)

    test_step = validation_step

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(
            [
                {"params": self.net.parameters(), "lr": 0.02},
                {"params": self.fixed.parameters(), "lr": 0.04},
            ],
            momentum=0.9,
        )
        return {
            "optimizer": optimizer,
            "scheduler": StepLR(optimizer, 1, 0.9),
            "interval": self.interval,
        }


class Rates(Callback):
    """The rates of each update."""

    def __init__(self) -> None:
        self.rates: list[list[float]] = []

    def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
        self.rates.append([float(group["lr"]) for group in optimizer.param_groups])


def data(samples: int = 24) -> TensorDataset:
    values = torch.randn(samples, 3, generator=torch.Generator().manual_seed(5))
    return TensorDataset(values.double())


def train(
    *callbacks: Callback,
    module: Net | None = None,
    folder: str | Path = "run",
    ckpt_path: Any = None,
    loader: Any = None,
    **options: Any,
) -> Net:
    """Fit on six batches of four samples."""
    module = module or Net()
    trainer = quiet_trainer(
        callbacks=list(callbacks), project_dir=folder, seed=1, **({"max_epochs": 6} | options)
    )
    if loader is None:
        loader = DataLoader(data(), batch_size=4, shuffle=True)
    trainer.fit(module, loader, DataLoader(data(10), batch_size=4), None, ckpt_path)
    return module


def mean_by_hand(weights: list[dict[str, Any]], last: dict[str, Any]) -> Net:
    """Torch's mean of these weights, with the buffers of the last ones."""
    module = Net()
    averaged = AveragedModel(module)
    for each in weights:
        module.load_state_dict(each)
        averaged.update_parameters(module)
    result = Net()
    result.load_state_dict(last)
    with torch.no_grad():
        for name, parameter in result.named_parameters():
            parameter.copy_(averaged.module.get_parameter(name))
    return result


def with_statistics(module: Net, batches: list[Any]) -> dict[str, Any]:
    """Torch's statistics for these weights."""
    module.net.train()
    update_bn(batches, module.net)
    return module.state_dict()


class Batches(Callback):
    """The batches of the epoch at hand."""

    def on_train_epoch_start(self, *_: Any) -> None:
        self.seen: list[Any] = []

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        self.seen.append(batch[0])


def close(actual: Any, expected: Any) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-14)


def parameters_of(state: dict[str, Any]) -> dict[str, Any]:
    return {name: tensor for name, tensor in state.items() if name.endswith(("weight", "bias"))}


@pytest.mark.parametrize(("start", "first"), [(1, 0), (4, 3), (6, 5), (0.5, 2), (0.0, 0), (1.0, 5)])
def test_the_mean_equals_torchs(start, first):
    watch, batches = Watch(), Batches()
    average = StochasticWeightAveraging(0.05, start)
    module = train(watch, average, batches)
    ends = watch.weights[5::6]
    assert average.num_averaged == 6 - first
    by_hand = mean_by_hand(ends[first:], ends[-1])
    close(parameters_of(copy_of(module)), parameters_of(copy_of(by_hand)))
    close(copy_of(module), with_statistics(by_hand, batches.seen))
    assert int(module.net[1].num_batches_tracked) == 6
    assert module.net[1].momentum == 0.1


@pytest.mark.parametrize("strategy", ["cos", "linear"])
@pytest.mark.parametrize(
    ("annealing", "interval", "swa_lrs"),
    [(0, "epoch", [0.05, 0.01]), (3, "step", 0.05), (3, "epoch", [0.05, 0.01]), (10, "step", 0.05)],
)
def test_rates_equal_torchs(strategy, annealing, interval, swa_lrs):
    rates = Rates()
    average = StochasticWeightAveraging(swa_lrs, 3, annealing, strategy, update_batch_norm=False)
    train(average, rates, module=Net(interval))
    ticks = {"epoch": [epoch for epoch in range(2) for _ in range(6)], "step": range(12)}
    before = [[0.02 * 0.9**tick, 0.04 * 0.9**tick] for tick in ticks[interval]]
    done = 2 if interval == "epoch" else 12
    groups = [
        {"params": [nn.Parameter(torch.zeros(1))], "lr": lr * 0.9**done} for lr in (0.02, 0.04)
    ]
    optimizer = torch.optim.SGD(groups)
    schedule = SWALR(optimizer, swa_lrs, anneal_epochs=annealing, anneal_strategy=strategy)
    for _ in range(4):
        before += [[float(group["lr"]) for group in optimizer.param_groups]] * 6
        optimizer.step()
        schedule.step()
    close(torch.tensor(rates.rates).double(), torch.tensor(before).double())


def test_the_schedule_stands_still_from_its_start_on():
    module = Net()
    seen = []

    class Look(Callback):
        def on_boundary(self, trainer: Any, module: Any) -> None:
            seen.append(trainer.schedulers[0].scheduler.last_epoch)

    train(StochasticWeightAveraging(0.05, 3), Look(), module=module)
    assert seen[5::6] == [1, 2, 2, 2, 2, 2]


def test_a_rate_in_a_tensor_is_set_in_place():
    class Captured(Net):
        def configure_optimizers(self) -> Any:
            self.rate = torch.tensor(0.1)
            return torch.optim.AdamW(self.parameters(), lr=self.rate, foreach=False)

    rates = Rates()
    train(StochasticWeightAveraging(0.5, 2, 0), rates, module=Captured(), max_epochs=2)
    assert [rate for (rate,) in rates.rates[::6]] == pytest.approx([0.1, 0.5])


def drawn() -> tuple[Any, ...]:
    return torch.rand(3), random.random()


def test_the_pass_over_the_data_leaves_no_trace():
    states = []
    for update in (False, True):
        average = StochasticWeightAveraging(0.05, 4, update_batch_norm=update)
        module = train(average, module=Net(dropout=0.4), folder=f"run-{update}")
        states.append((int(module.calls), parameters_of(copy_of(module)), drawn()))
        records = read_metrics(f"run-{update}/metrics.jsonl")
        states[-1] += ([{k: v for k, v in record.items() if k != "time"} for record in records],)
        assert module.seen.update_count == 0
        assert not module.fixed.training
        assert module.net.training
    assert_same(states[0], states[1])


def test_metric_objects_keep_their_state():
    module = Net()
    module.seen.update(torch.tensor(3.0))
    counts = []

    class Ends(Callback):
        def on_boundary(self, trainer: Any, module: Any) -> None:
            if trainer.ending:
                counts.append((module.seen.update_count, float(module.seen.compute())))

    train(Ends(), StochasticWeightAveraging(0.05, 1), Ends(), module=module, max_steps=9)
    assert len(counts) == 2
    assert counts[0] == counts[1]
    assert counts[0][0] == 3


def test_the_last_checkpoint_holds_the_mean():
    watch = Watch()
    saver = ModelCheckpoint(save_top_k=-1)
    module = train(watch, saver, StochasticWeightAveraging(0.05, 4))
    folders = sorted(Path("run/checkpoints").glob("step-*"))
    assert len(folders) == 6
    for folder, trained in zip(folders, watch.weights[5::6], strict=True):
        if folder is not folders[-1]:
            assert_same(copy_of(Net.load_from_checkpoint(folder)), trained)
            assert not (folder / "trained.safetensors").exists()
    assert_same(copy_of(Net.load_from_checkpoint(folders[-1])), copy_of(module))
    kept = load_file(folders[-1] / "trained.safetensors")
    before = load_file(folders[-2] / "model.safetensors")
    assert kept.keys() == before.keys()
    assert int(kept["net.1.num_batches_tracked"]) == 36
    assert int(kept["calls"]) == 36


@pytest.mark.parametrize("killed", [False, True])
def test_a_second_saver_holds_the_mean_too(killed):
    def start() -> dict[str, Any]:
        savers = ModelCheckpoint(), ModelCheckpoint(dirpath="run/second")
        train(StochasticWeightAveraging(0.05, 4), *savers, ckpt_path="auto")
        (folder,) = Path("run/second").iterdir()
        return {path.name: load_file(path) for path in folder.glob("*.safetensors")}

    whole = start()
    assert "trained.safetensors" in whole
    if killed:  # behind the first of the two saves
        shutil.rmtree("run/second")
    assert_same(start(), whole)


def test_a_run_that_is_stopped_early_ends_with_the_mean():
    watch = Watch()
    stop = EarlyStopping("val/flat", patience=3)
    module = train(watch, stop, StochasticWeightAveraging(0.05, 2), ModelCheckpoint())
    assert len(watch.weights) == 24
    ends = watch.weights[5::6]
    by_hand = copy_of(mean_by_hand(ends[1:], ends[-1]))
    close(parameters_of(copy_of(module)), parameters_of(by_hand))
    (folder,) = Path("run/checkpoints").glob("step-00000024")
    assert_same(copy_of(Net.load_from_checkpoint(folder)), copy_of(module))


def test_inside_an_epoch_the_mean_is_that_of_the_whole_ones():
    watch = Watch()
    module = train(watch, StochasticWeightAveraging(0.05, 1), max_steps=15)
    ends = watch.weights[5:12:6]
    by_hand = copy_of(mean_by_hand(ends, ends[-1]))
    close(parameters_of(copy_of(module)), parameters_of(by_hand))


@pytest.mark.parametrize(("start", "logged"), [(3, 1), (2, 0)])
def test_a_run_that_ends_before_the_start_warns(caplog, start, logged):
    plain = train(folder="plain", max_epochs=2)
    module = train(StochasticWeightAveraging(0.05, start), max_epochs=2)
    assert caplog.text.count("begins in epoch 3, after the end of the run") == logged
    if start == 3:
        assert_same(copy_of(module), copy_of(plain))


def resumable(folder: str, begin: int, options: dict[str, Any]) -> dict[str, Any]:
    options = dict(options)
    torch.manual_seed(begin)
    watch, rates = Watch(), Rates()
    average = StochasticWeightAveraging(0.05, 3, 2)
    saver = ModelCheckpoint(every=options.pop("every", 1), save_top_k=-1)
    module = train(
        watch,
        average,
        rates,
        saver,
        module=Net("step", 0.3),
        folder=folder,
        ckpt_path="auto",
        **options,
    )
    return {
        "final": copy_of(module),
        "state": average.state_dict(),
        "weights": watch.weights,
        "rates": rates.rates,
        "drawn": torch.rand(2),
    }


@pytest.mark.parametrize(("world", "step"), [(1, 11), (1, 12), (1, 20), (1, 35), (2, 8), (3, 7)])
def test_resumed_is_uninterrupted(ranks, tmp_path, world, step):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    expected = on_processes(ranks, world, resumable, str(whole), 1, {})
    shutil.copytree(whole, parts)
    for path in (parts / "checkpoints").glob("step-*"):
        if int(path.name.removeprefix("step-")) > step:
            shutil.rmtree(path)
    resumed = on_processes(ranks, world, resumable, str(parts), 9, {})
    for one, other in zip(expected, resumed, strict=True):
        assert one["state"]["num_averaged"] == 4
        for name in ("weights", "rates"):
            assert_same(other[name], one[name][step:])
        for name in ("final", "state", "drawn"):
            assert_same(other[name], one[name])


def test_a_finished_run_can_be_extended(tmp_path):
    expected = resumable(str(tmp_path / "whole"), 1, {})
    parts = str(tmp_path / "parts")
    options = {"every": "1 epoch", "max_epochs": 4}
    ended = resumable(parts, 1, options)
    again = resumable(parts, 9, options)  # nothing is left to do
    assert again["weights"] == []
    close(again["final"], ended["final"])
    resumed = resumable(parts, 9, {})
    assert_same(resumed["final"], expected["final"])
    assert_same(resumed["weights"], expected["weights"][24:])
    assert_same(resumed["rates"], expected["rates"][24:])


class Noisy(Net):
    """Its inputs are noisy, with numbers of a generator of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.own = torch.Generator().manual_seed(3)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        noise = torch.randn(3, generator=self.own, dtype=torch.float64)
        return super().training_step([batch[0] + noise + torch.randn(3)], batch_idx)


def test_restarting_a_finished_run_keeps_its_statistics(tmp_path):
    def fit(folder: str, **arguments: Any) -> tuple[Any, ...]:
        average = StochasticWeightAveraging(0.05, 2, **arguments)
        module = train(
            average,
            ModelCheckpoint(),
            module=Noisy(),
            folder=tmp_path / folder,
            ckpt_path="auto",
            max_epochs=3,
        )
        return copy_of(module), torch.rand(2, generator=module.own), torch.rand(2)

    ended, *drawn = fit("run")
    again, *drawn_again = fit("run")
    assert_same(again, ended)
    assert_same(drawn_again, drawn)
    _, *drawn_without = fit("without", update_batch_norm=False)
    assert_same(drawn_without, drawn)


class Penalised(Net):
    """A gradient penalty, and normalisation that the step does not use."""

    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.BatchNorm1d(2, affine=False)
        self.unused.running_mean.fill_(3)
        self.unused.num_batches_tracked.fill_(7)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x = batch[0].clone().requires_grad_()
        loss = super().training_step([x], batch_idx)
        (slope,) = torch.autograd.grad(loss, x, create_graph=True)
        return loss + slope.square().sum()


def fit_on_ranks(folder: str, make: type[Net]) -> dict[str, Any]:
    loader = DataLoader(data(22), batch_size=4)  # six batches, of which four processes have two
    average = StochasticWeightAveraging(0.05, 1)
    module = train(average, module=make(), folder=folder, loader=loader, max_epochs=1)
    assert all(parameter.grad is None for parameter in module.parameters())
    return copy_of(module)


@pytest.mark.parametrize(("world", "make"), [(1, Penalised), (2, Penalised), (2, Net), (4, Net)])
def test_statistics_are_those_of_one_process(ranks, tmp_path, world, make):
    results = on_processes(ranks, world, fit_on_ranks, str(tmp_path / "run"), make)
    unused = {n: t for n, t in make().state_dict().items() if "unused" in n}
    assert_same({name: results[0][name] for name in unused}, unused)
    module = make()
    module.load_state_dict(results[0])
    module.net.train()
    update_bn([batch for (batch,) in DataLoader(data(22), batch_size=4)], module.net)
    for result in results:
        assert_same(result, results[0])
        close(
            {n: t for n, t in result.items() if n.startswith("net")},
            {n: t for n, t in module.state_dict().items() if n.startswith("net")},
        )


class Endless(IterableDataset):
    def __iter__(self):
        yield from data()


def test_invalid_combinations_are_refused_before_the_first_update():
    module = Net()
    before = copy_of(module)
    with pytest.raises(ValueError, match="swa_lrs has 3 rates for 2 parameter groups"):
        train(StochasticWeightAveraging([0.1, 0.1, 0.1]), module=module, folder="a")
    with pytest.raises(ValueError, match="a fraction, but the Trainer has no max_epochs"):
        train(
            StochasticWeightAveraging(0.1), module=module, folder="b", max_epochs=None, max_steps=3
        )
    stream = DataLoader(Endless(), batch_size=4)
    with pytest.raises(ValueError, match=r"stream.*update_batch_norm=False"):
        train(StochasticWeightAveraging(0.1), module=module, folder="c", loader=stream)
    module.automatic_optimization = False
    with pytest.raises(ValueError, match="manual optimisation"):
        train(StochasticWeightAveraging(0.1), module=module, folder="d")
    assert_same(copy_of(module), before)
    module.automatic_optimization = True
    average = StochasticWeightAveraging(0.1, 1, update_batch_norm=False)
    train(average, module=module, folder="e", loader=stream, max_epochs=2)
    assert average.num_averaged == 2


class Late(Net):
    """A part is trained later, in a parameter group of its own."""

    def configure_optimizers(self) -> Any:
        trained = [parameter for parameter in self.parameters() if parameter.requires_grad]
        return torch.optim.SGD(trained, lr=0.2)


def test_a_parameter_group_that_joins_goes_to_the_same_rate():
    rates = Rates()
    thawing = BackboneFinetuning(2, lambda epoch: 1.0, 0.5, backbone="net")
    train(StochasticWeightAveraging(0.1, 2, 4, "linear"), thawing, rates, module=Late())
    by_epoch = rates.rates[::6]
    assert [len(each) for each in by_epoch] == [1, 1, 2, 2, 2, 2]
    wanted = [0.2, 0.2, 0.175, 0.15, 0.125, 0.1]
    assert [each[0] for each in by_epoch] == pytest.approx(wanted)
    assert by_epoch[5][1] == pytest.approx(0.1)
    thawing = BackboneFinetuning(2, backbone="net")
    with pytest.raises(ValueError, match="swa_lrs has 1 rates for 2 parameter groups"):
        train(thawing, StochasticWeightAveraging([0.1], 2, 4), module=Late(), folder="other")
