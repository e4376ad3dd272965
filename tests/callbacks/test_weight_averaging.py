"""The moving average of the weights, against torch's own and against runs without it."""

from __future__ import annotations

import copy
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, TensorDataset

from callbacks import EMA, Callback, ModelCheckpoint, StochasticWeightAveraging, WeightAveraging
from callbacks.averages import Averages
from tests.numerics.running import Watch, assert_same, copy_of, on_processes, quiet_trainer
from trainer import TrainModule
from trainer.errors import Preempted


class Net(TrainModule):
    """Batch normalisation, dropout, a tied and a frozen weight, in float64."""

    def __init__(self, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        self.first = nn.Linear(3, 4)
        self.norm = nn.BatchNorm1d(4)
        self.second = nn.Linear(4, 4)
        self.tied = nn.Linear(4, 4, bias=False)
        self.tied.weight = self.second.weight
        self.frozen = nn.Parameter(torch.ones(4), requires_grad=False)
        self.register_buffer("scratch", torch.zeros(2), persistent=False)
        for parameter in self.parameters():
            if parameter.requires_grad:
                nn.init.normal_(parameter, generator=generator)
        self.to(dtype)

    def forward(self, x: Any) -> Any:
        x = torch.dropout(self.norm(self.first(x.to(self.frozen.dtype))), 0.3, self.training)
        return self.tied(self.second(x).tanh() * self.frozen)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = (self(batch[0]) - 1).square().mean()
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val/loss", (self(batch[0]) - 1).square().mean())

    test_step = validation_step

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD((p for p in self.parameters() if p.requires_grad), 0.05, 0.9)


class Manual(Net):
    """Steps at every second batch only."""

    automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        if batch_idx % 2 == 0:
            self.manual_backward(self(batch[0]).square().mean())
            self.optimizers().step()
            self.optimizers().zero_grad()


class Seen(Callback):
    """The weights that each validation sees, by the update."""

    def __init__(self) -> None:
        self.weights: dict[int, dict[str, Any]] = {}

    def on_validation_batch_start(self, trainer: Any, module: Any, *_: Any) -> None:
        self.weights[trainer.global_step] = copy_of(module)


def data(samples: int = 26) -> TensorDataset:
    return TensorDataset(torch.randn(samples, 3, generator=torch.Generator().manual_seed(5)))


def train(
    *callbacks: Callback,
    module: Net | None = None,
    folder: str | Path = "run",
    ckpt_path: Any = None,
    held_out: Any = None,
    **options: Any,
) -> Net:
    """Fit on seven batches of four samples, the last of two."""
    module = module or Net()
    trainer = quiet_trainer(
        callbacks=list(callbacks), project_dir=folder, seed=1, **({"max_epochs": 3} | options)
    )
    held_out = held_out or DataLoader(data(10), batch_size=4)
    trainer.fit(module, DataLoader(data(), batch_size=4, shuffle=True), held_out, None, ckpt_path)
    return module


def averages_by_hand(
    weights: list[dict[str, Any]], steps: list[int], decay: float, *, buffers: bool = True
) -> dict[int, dict[str, Any]]:
    """Torch's average after each of these updates, given the weights after every update."""
    module = Net()
    averaged = AveragedModel(
        module, multi_avg_fn=get_ema_multi_avg_fn(decay), use_buffers=buffers
    ).double()
    after = {}
    for step, now in enumerate(weights, 1):
        module.load_state_dict(now)
        if step in steps:
            averaged.update_parameters(module)
        if averaged.n_averaged:
            state = {n: t.clone() for n, t in averaged.module.state_dict().items()}
            # a count is no average; without buffers torch's are those of the last update
            kept = [n for n in now if "tracked" in n or (not buffers and "running" in n)]
            after[step] = state | {name: now[name] for name in kept}
    return after


@pytest.mark.parametrize(
    ("arguments", "options", "steps"),
    [
        ({}, {}, range(1, 22)),
        ({"use_buffers": False}, {}, range(1, 22)),
        ({"update_every_n_steps": 4}, {}, range(4, 22, 4)),
        ({"update_every_n_steps": 2, "update_starting_at_step": 5}, {}, range(6, 22, 2)),
        ({"update_starting_at_epoch": 1}, {}, range(8, 22)),
        ({"update_starting_at_epoch": 1, "update_starting_at_step": 10}, {}, range(10, 22)),
        ({}, {"gradient_accumulation_steps": 3}, range(1, 10)),
    ],
)
def test_the_average_is_torchs_to_the_last_bit(arguments, options, steps):
    watch, seen = Watch(), Seen()
    average = WeightAveraging(0.8, **arguments)
    module = train(average, seen, watch, val_every=1, **options)
    by_hand = averages_by_hand(
        watch.weights, list(steps), 0.8, buffers=arguments.get("use_buffers", True)
    )
    assert average.num_updates == len(steps)
    assert list(seen.weights) == list(range(1, len(watch.weights) + 1))
    for step, weights in seen.weights.items():
        assert_same(weights, by_hand.get(step, watch.weights[step - 1]))
    assert_same(copy_of(module), by_hand[len(watch.weights)])


def test_a_warm_up_forgets_early_weights():
    watch = Watch()
    module = train(WeightAveraging(0.6, decay_warmup=True), watch)
    expected = watch.weights[0]["first.weight"].clone()
    for number, weights in enumerate(watch.weights[1:], 1):
        decay = min(0.6, (1 + number) / (10 + number))
        expected.lerp_(weights["first.weight"], 1 - decay)
    assert_same(module.first.weight.detach(), expected)


def test_training_goes_on_as_without_it():
    plain, watch, alone = Watch(), Watch(), Watch()
    module = train(WeightAveraging(0.8, final_weights="trained"), watch, val_every=2)
    assert_same(copy_of(module), copy_of(train(plain, val_every=2)))
    assert_same(watch.weights, plain.weights)
    train(EMA(0.8), alone, val_every=2)
    assert_same(alone.weights, plain.weights)


def test_manual_optimisation_counts_updates():
    watch, average = Watch(), WeightAveraging(0.5)
    module = train(average, watch, module=Manual(), max_epochs=1)
    assert average.num_updates == 4
    assert_same(copy_of(module), averages_by_hand(watch.weights[:4], [1, 2, 3, 4], 0.5)[4])


def test_16_bit_weights_are_averaged_in_float32():
    watch = Watch()
    average = WeightAveraging(0.99)
    module = train(average, watch, module=Net(torch.bfloat16))
    expected = watch.weights[0]["second.weight"].float()
    for weights in watch.weights[1:]:
        expected.lerp_(weights["second.weight"].float(), 1 - 0.99)
    assert module.second.weight.dtype == torch.bfloat16
    assert_same(module.second.weight.detach(), expected.bfloat16())
    assert_same(average.state_dict()["exact"]["second.weight"], expected)
    assert not torch.equal(module.second.weight.detach(), watch.weights[0]["second.weight"])


def test_frozen_and_tied_weights_are_not_copied():
    average = WeightAveraging()
    train(average, max_epochs=1)
    assert sorted(average.state_dict()["names"]) == [
        *("first.bias", "first.weight", "norm.bias", "norm.running_mean", "norm.running_var"),
        *("norm.weight", "second.bias", "second.weight"),
    ]


def test_a_weight_that_is_trained_later_is_averaged_from_then_on():
    module = nn.ParameterList([torch.zeros(1), torch.zeros(1)])
    module[1].requires_grad_(False)
    averages = Averages(use_buffers=False)
    averages.update(module, 0.5)
    assert list(averages.values) == ["0"]
    module[1].requires_grad_(True)
    for _ in range(2):
        with torch.no_grad():
            for parameter in module:
                parameter += 1
        averages.update(module, 0.5)
    assert_same(
        averages.full_precision(module), {"0": torch.tensor([1.25]), "1": torch.tensor([1.5])}
    )


def test_a_tensor_of_another_shape_is_averaged_anew():
    module = nn.Module()
    module.register_buffer("seen", torch.zeros(1))
    averages = Averages(use_buffers=True)
    averages.update(module, 0.5)
    module.seen = torch.ones(2)
    for value in (1.0, 3.0):
        module.seen.fill_(value)
        averages.update(module, 0.5)
    assert_same(averages.full_precision(module), {"seen": torch.tensor([2.0, 2.0])})


@pytest.mark.filterwarnings("ignore:Lazy modules are a new feature")
def test_a_lazy_layer_that_is_never_used_is_left_out():
    module = nn.ModuleDict({"used": nn.Linear(1, 1, bias=False), "lazy": nn.LazyBatchNorm1d()})
    averages = Averages(use_buffers=True)
    averages.update(module, 0.5)
    averages.swap_in(module, keep_buffers=True)
    averages.swap_out(module)
    assert list(averages.values) == ["used.weight"]


class Fails(Callback):
    """Something goes wrong inside a validation."""

    def __init__(self, error: BaseException | None, step: int = 4) -> None:
        self.error, self.step = error, step

    def on_validation_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == self.step:
            if self.error is None:
                signal.raise_signal(signal.SIGTERM)
            else:
                raise self.error


@pytest.mark.parametrize("error", [RuntimeError("broken"), KeyboardInterrupt()])
def test_weights_are_put_back_when_a_validation_raises(error):
    module, watch = Net(), Watch()
    failing = [WeightAveraging(0.5), Fails(error), ModelCheckpoint(on_exception=True)]
    with pytest.raises(type(error)):
        train(*failing, watch, module=module, val_every=4)
    whole = Watch()
    train(whole, val_every=4)
    assert_same(copy_of(module), whole.weights[3])
    if isinstance(error, Exception):
        (saved,) = Path("run/checkpoints").glob("exception-*")
        saved = load_file(saved / "model.safetensors")
        assert_same(saved["first.weight"], whole.weights[3]["first.weight"])


def test_a_signal_in_a_validation_changes_nothing_but_the_time():
    whole, watch = Watch(), Watch()
    expected = train(WeightAveraging(0.7), whole, ModelCheckpoint(), val_every=4, folder="whole")
    parts = [WeightAveraging(0.7), Fails(None), ModelCheckpoint()]
    with pytest.raises(Preempted):
        train(*parts, val_every=4)
    (folder,) = Path("run/checkpoints").glob("step-*")
    assert_same(
        load_file(folder / "trained.safetensors")["norm.bias"], whole.weights[3]["norm.bias"]
    )
    module = train(WeightAveraging(0.7), watch, ModelCheckpoint(), val_every=4, ckpt_path="auto")
    assert_same(copy_of(module), copy_of(expected))
    assert_same(watch.weights, whole.weights[3:])


def test_checkpoints_hold_what_was_validated():
    watch = Watch()
    best = ModelCheckpoint(monitor="val/loss", save_top_k=-1)
    module = train(EMA(0.9), watch, best)
    by_hand = averages_by_hand(watch.weights, list(range(1, 22)), 0.9)
    assert len(best.best_k_models) == 3
    for path, score in best.best_k_models.items():
        step = int(path.name.removeprefix("step-"))
        loaded = Net.load_from_checkpoint(path)
        assert_same(copy_of(loaded), by_hand[step])
        trained = load_file(path / "trained.safetensors")
        assert_same(trained, {name: watch.weights[step - 1][name] for name in trained})
        assert set(trained) == set(load_file(path / "model.safetensors"))
        trainer = quiet_trainer()
        (result,) = trainer.test(Net(), DataLoader(data(10), batch_size=4), ckpt_path=path)
        assert result["val/loss"] == score
    (result,) = quiet_trainer().test(module, DataLoader(data(10), batch_size=4))
    assert result["val/loss"] == best.best_k_models[path.parent / "step-00000021"]


def test_before_the_first_average_checkpoints_hold_the_weights():
    train(EMA(update_starting_at_epoch=2), ModelCheckpoint(save_top_k=-1))
    saved = sorted(Path("run/checkpoints").glob("step-*/trained.safetensors"))
    assert [path.parent.name for path in saved] == ["step-00000021"]


@pytest.mark.parametrize(
    ("arguments", "averages"),
    [
        ({"update_starting_at_epoch": 2}, False),
        ({"update_starting_at_step": 7}, False),
        ({"update_every_n_steps": 7}, False),
        ({"update_starting_at_step": 6}, True),
    ],
)
def test_a_run_that_ends_before_the_first_average_warns(caplog, arguments, averages):
    average = EMA(**arguments)
    train(average, max_epochs=2, max_steps=6)
    logged = [each for each in caplog.messages if "averaged no weights" in each]
    assert (bool(average.num_updates), len(logged)) == (averages, not averages)


def test_weights_alone_are_the_averages():
    watch = Watch()
    train(EMA(0.9), watch, ModelCheckpoint(save_weights_only=True, save_last=1))
    (folder,) = Path("run/checkpoints").glob("step-*")
    assert not (folder / "trained.safetensors").exists()
    by_hand = averages_by_hand(watch.weights, list(range(1, 22)), 0.9)
    assert_same(load_file(folder / "model.safetensors")["norm.bias"], by_hand[21]["norm.bias"])


@pytest.mark.parametrize("final", ["average", "trained"])
def test_a_save_after_the_fit_holds_both(final):
    watch, module = Watch(), Net()
    trainer = quiet_trainer(callbacks=[EMA(0.9, final_weights=final), watch], max_epochs=1, seed=1)
    trainer.fit(module, DataLoader(data(), batch_size=4))
    path = trainer.save_checkpoint("mine")
    average = averages_by_hand(watch.weights, list(range(1, 8)), 0.9)[7]
    assert_same(copy_of(Net.load_from_checkpoint(path)), average)
    trained = load_file(path / "trained.safetensors")
    assert_same(trained["first.bias"], watch.weights[-1]["first.bias"])
    assert_same(copy_of(module), average if final == "average" else watch.weights[-1])


def resumable(folder: str, options: dict[str, Any], average: bool = True) -> dict[str, Any]:
    options = dict(options)
    dtype = options.pop("dtype", torch.float64)
    torch.manual_seed(options.pop("begin", 7))
    watch, seen = Watch(), Seen()
    ema = WeightAveraging(0.9, decay_warmup=True, update_every_n_steps=2)
    saver = ModelCheckpoint(every=options.pop("every", 1), save_top_k=-1)
    callbacks = [*([ema] if average else []), watch, seen, saver]
    module = train(*callbacks, module=Net(dtype), folder=folder, ckpt_path="auto", **options)
    return {
        "weights": watch.weights,
        "final": copy_of(module),
        "validated": seen.weights,
        "updates": ema.num_updates,
    }


def cut(whole: str, parts: str, step: int) -> None:
    shutil.copytree(whole, parts)
    for path in (Path(parts) / "checkpoints").glob("step-*"):
        if int(path.name.removeprefix("step-")) > step:
            shutil.rmtree(path)


@pytest.mark.parametrize(
    ("world", "step", "dtype"),
    [
        (1, 1, torch.float64),
        (1, 10, torch.float64),
        (1, 14, torch.bfloat16),
        (2, 5, torch.float64),
        (3, 4, torch.float64),
    ],
)
def test_resumed_is_uninterrupted(ranks, tmp_path, world, step, dtype):
    whole, parts = str(tmp_path / "whole"), str(tmp_path / "parts")
    options = {"dtype": dtype, "val_every": 2}
    expected = on_processes(ranks, world, resumable, whole, options)
    cut(whole, parts, step)
    resumed = on_processes(ranks, world, resumable, parts, options | {"begin": 9})
    for one, other in zip(expected, resumed, strict=True):
        assert_same(other["weights"], one["weights"][step:])
        later = {at: weights for at, weights in one["validated"].items() if at > step}
        assert_same(other["validated"], later)
        assert len(later) > 1
        assert_same(other["final"], one["final"])
        assert other["updates"] == one["updates"]


def test_a_finished_run_is_extended_from_the_trained_weights(tmp_path):
    expected = resumable(str(tmp_path / "whole"), {"max_epochs": 4})
    parts = str(tmp_path / "parts")
    resumable(parts, {"max_epochs": 2, "every": "1 epoch"})
    resumed = resumable(parts, {"max_epochs": 4})
    assert_same(resumed["weights"], expected["weights"][14:])
    assert_same(resumed["final"], expected["final"])
    again = resumable(parts, {"max_epochs": 4})
    assert again["weights"] == []
    assert_same(again["final"], expected["final"])


@pytest.mark.parametrize("first", [True, False])
def test_a_resumed_run_may_leave_it_out_or_take_it_in(tmp_path, first):
    expected = resumable(str(tmp_path / "whole"), {}, average=False)
    parts = str(tmp_path / "parts")
    resumable(parts, {"max_epochs": 1}, average=first)
    resumed = resumable(parts, {}, average=not first)
    assert_same(resumed["weights"], expected["weights"][7:])
    assert resumed["updates"] == (0 if first else 7)


def test_a_second_fit_begins_anew():
    average = EMA(0.9)
    module = train(average, folder="one")
    watch = Watch()
    train(average, watch, module=module, folder="two", max_epochs=1)
    expected = averages_by_hand(watch.weights, list(range(1, 8)), 0.9)[7]
    assert_same(copy_of(module), expected)


def fit_on_ranks(folder: str) -> dict[str, Any]:
    seen = Seen()
    module = train(EMA(0.7), seen, folder=folder)
    return {"final": copy_of(module), "seen": seen.weights}


def test_all_processes_evaluate_and_end_with_the_same(ranks3, tmp_path):
    results = ranks3(fit_on_ranks, str(tmp_path / "run"))
    for other in results[1:]:
        assert_same(other, results[0])


def test_two_averages_are_refused():
    with pytest.raises(ValueError, match="not both"):
        train(EMA(), StochasticWeightAveraging(0.1))

    class Greedy(Callback):
        def weights_to_save(self, trainer: Any, module: Any) -> Any:
            return module.state_dict(), module.state_dict()

    with pytest.raises(Exception, match="Greedy and WeightAveraging both return weights_to_save"):
        train(Greedy(), EMA(), ModelCheckpoint(background=False))


def test_a_copy_of_the_module_keeps_its_weights():
    module = train(average := EMA(0.9), max_epochs=1)
    other = copy.deepcopy(module)
    before = copy_of(other)
    trainer = quiet_trainer(callbacks=[average])
    trainer.validate(other, DataLoader(data(10), batch_size=4))
    assert_same(copy_of(other), before)
