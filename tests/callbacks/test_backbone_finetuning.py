from __future__ import annotations

import contextlib
import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader, TensorDataset

from callbacks import BackboneFinetuning, BaseFinetuning, Callback
from tests.numerics.running import Watch, assert_same, copy_of, on_processes, quiet_trainer
from trainer import CheckpointError, TrainModule

EPOCH_UPDATES = 3


class Net(TrainModule):
    """A backbone of which the user has frozen a part and put another into evaluation mode."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.backbone = nn.Sequential(
            nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 8)
        )
        self.backbone[4].bias.requires_grad = False
        self.fixed = nn.Dropout(0.5).eval()
        self.head = nn.Linear(8, 2)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        logits = self.head(self.fixed(self.backbone(batch[0])))
        loss = nn.functional.cross_entropy(logits, batch[1])
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=0.02)


def loader() -> DataLoader:
    generator = torch.Generator().manual_seed(4)
    x = torch.randn(12 * EPOCH_UPDATES, 4, generator=generator)
    return DataLoader(TensorDataset(x, (x.sum(1) > 0).long()), batch_size=6, shuffle=True)


class Looking(Callback):
    """What each update has: rates, which parameters move, which parts are in training mode."""

    def __init__(self) -> None:
        self.rates: list[list[float]] = []
        self.moved: list[set[str]] = []
        self.training: list[set[str]] = []

    def on_train_step_start(self, trainer, module):
        self.before = copy_of(module)

    def on_before_optimizer_step(self, trainer, module, optimizer):
        self.rates.append([group["lr"] for group in trainer.optimizers[0].param_groups])

    def on_train_step_end(self, trainer, module):
        self.training.append({name for name, part in module.named_modules() if part.training})
        now = copy_of(module)
        self.moved.append({n for n, value in now.items() if not value.equal(self.before[n])})


def fit(callback: Callback, make: type[TrainModule] = Net, **options: Any) -> Looking:
    looking = Looking()
    options = {"max_epochs": 4, "gradient_accumulation_steps": 2} | options
    quiet_trainer(callbacks=[callback, looking], **options).fit(make(), loader())
    return looking


HEAD = {"head.weight", "head.bias"}
NORM = {"backbone.1.weight", "backbone.1.bias"}
STATISTICS = {f"backbone.1.{name}" for name in ("running_mean", "running_var")}
COUNT = {"backbone.1.num_batches_tracked"}
BODY = {"backbone.0.weight", "backbone.0.bias", "backbone.4.weight"}


def test_the_backbone_is_frozen_until_its_epoch():
    looking = fit(BackboneFinetuning(2))
    assert looking.moved[: 2 * EPOCH_UPDATES] == [HEAD] * 2 * EPOCH_UPDATES
    everything = HEAD | NORM | STATISTICS | COUNT | BODY
    assert looking.moved[2 * EPOCH_UPDATES :] == [everything] * 2 * EPOCH_UPDATES
    others = {"", "head", "backbone", *(f"backbone.{index}" for index in (0, 2, 3, 4))}
    assert looking.training == [others] * 6 + [others | {"backbone.1"}] * 6


class Sampling(Net):
    """Its own code switches modes, as around samples that it draws while it trains."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.eval()
        self.train()
        return super().training_step(batch, batch_idx)


class Seeding(Callback):
    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        torch.manual_seed(trainer.global_step)


@pytest.mark.parametrize("make", [Net, Sampling])
def test_a_frozen_run_is_that_of_a_loop_over_the_head(make):
    """Frozen batch normalisation uses its statistics; dropout in the backbone stays on."""
    data = DataLoader(loader().dataset, batch_size=12)
    watch, net = Watch(), make()
    twin = copy.deepcopy(net)
    quiet_trainer(max_epochs=2, callbacks=[Seeding(), BackboneFinetuning(9), watch]).fit(net, data)

    twin.backbone.requires_grad_(False)
    twin.backbone[1].eval()
    twin.fixed.train(make is Sampling)
    optimizer, losses = twin.configure_optimizers(), []
    for step, (x, y) in enumerate([*data, *data]):
        torch.manual_seed(step)
        loss = nn.functional.cross_entropy(twin.head(twin.fixed(twin.backbone(x))), y)
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert watch.losses == losses
    assert_same(watch.weights[-1], copy_of(twin))


def test_train_bn_keeps_batch_norms_training():
    looking = fit(BackboneFinetuning(2, train_bn=True))
    trained = HEAD | NORM | STATISTICS | COUNT
    assert looking.moved[: 2 * EPOCH_UPDATES] == [trained] * 2 * EPOCH_UPDATES
    assert looking.moved[-1] == trained | BODY
    assert {"backbone.1", "backbone.3"} < looking.training[0]


def test_train_bn_concerns_batch_normalisation_alone():
    trained: list[bool] = []
    parts = nn.Sequential(nn.BatchNorm1d(2), nn.InstanceNorm1d(2, affine=True), nn.LayerNorm(2))

    class Freezing(BaseFinetuning):
        def freeze_before_training(self, module):
            self.freeze(module.unused, train_bn=True)
            trained.extend(part.weight.requires_grad for part in parts)

    class Normed(Net):
        def __init__(self) -> None:
            super().__init__()
            self.unused = parts

    fit(Freezing(), Normed, max_epochs=1)
    assert trained == [True, False, False]


@pytest.mark.parametrize(
    ("arguments", "fractions"),
    [
        ({}, [0.1, 0.2, 0.4, 0.8, 1.0, 1.0]),
        ({"should_align": False}, [0.1, 0.2, 0.4, 0.8, 1.6, 3.2]),
        ({"backbone_initial_ratio_lr": 0.5, "lambda_func": lambda epoch: 1.0}, [0.5] * 6),
        ({"backbone_initial_lr": 0.005}, [0.25, 0.5, 1.0, 1.0, 1.0, 1.0]),
        (
            {"lambda_func": lambda epoch: 1 + epoch / 10},
            [0.1, 0.12, 0.156, 0.2184, 0.32760, 0.52416],
        ),
    ],
)
def test_the_learning_rate_of_the_backbone_grows_each_epoch(arguments, fractions):
    looking = fit(BackboneFinetuning(1, **arguments), max_epochs=7)
    assert looking.rates[:EPOCH_UPDATES] == [[0.02]] * EPOCH_UPDATES
    expected = [[0.02, pytest.approx(0.02 * f)] for f in fractions for _ in range(EPOCH_UPDATES)]
    assert looking.rates[EPOCH_UPDATES:] == expected


SCHEDULES = {
    "StepLR": lambda o: lr_scheduler.StepLR(o, 4, 0.5),
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda step: 1 / (1 + step)),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, 20),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=30),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1, 4, cycle_momentum=False),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, 0.1, 1.0, 5), lr_scheduler.ExponentialLR(o, 0.9)], [5]
    ),
    "ChainedScheduler": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.LinearLR(o, 0.1, 1.0, 5), lr_scheduler.ExponentialLR(o, 0.9)]
    ),
}


def scheduled(name: str) -> type[Net]:
    class Scheduled(Net):
        def configure_optimizers(self) -> Any:
            optimizer = super().configure_optimizers()
            return {
                "optimizer": optimizer,
                "scheduler": SCHEDULES[name](optimizer),
                "interval": "step",
            }

    return Scheduled


def rates_of_a_loop(name: str) -> list[float]:
    """The head's rates, as torch's own schedule sets them."""
    optimizer = torch.optim.AdamW([nn.Parameter(torch.zeros(1))], lr=0.02)
    schedule, rates = SCHEDULES[name](optimizer), []
    for _ in range(12):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    return rates


@pytest.mark.parametrize("name", SCHEDULES)
def test_both_groups_follow_the_schedule(name):
    looking = fit(BackboneFinetuning(1), scheduled(name))
    head = rates_of_a_loop(name)
    assert [rates[0] for rates in looking.rates] == pytest.approx(head, rel=1e-12)
    fractions = [f for f in (0.1, 0.2, 0.4) for _ in range(EPOCH_UPDATES)]
    expected = [f * rate for f, rate in zip(fractions, head[EPOCH_UPDATES:], strict=True)]
    assert [rates[1] for rates in looking.rates[EPOCH_UPDATES:]] == pytest.approx(expected, 1e-9)


def whole_and_resumed(name: str | None, stop: int, callback: Any) -> tuple[Any, Any]:
    """The weights after each update of a run, and of one that was stopped, from there on."""

    def run(folder: str, **options: Any) -> tuple[Any, ...]:
        watch, looking = Watch(), Looking()
        trainer = quiet_trainer(
            callbacks=[callback(), watch, looking],
            **{"max_epochs": 4, "project_dir": folder, "checkpointing": True, "seed": 7} | options,
        )
        trainer.fit(scheduled(name)() if name else Sampling(), loader(), ckpt_path="auto")
        return watch.weights, looking.rates, looking.training

    whole = run(f"whole{stop}")
    run(f"cut{stop}", max_steps=stop)
    rest = run(f"cut{stop}")
    return tuple(each[stop:] for each in whole), rest


@pytest.mark.parametrize("stop", [5, 12, 15, 20])
@pytest.mark.parametrize("name", [None, "OneCycleLR", "SequentialLR"])
def test_a_resumed_run_is_exact(name, stop):
    """Stopped before the unfreezing at update 12, at it, after it, and at a growth."""
    whole, rest = whole_and_resumed(name, stop, lambda: BackboneFinetuning(2))
    assert_same(rest[0], whole[0])
    assert rest[1:] == whole[1:]


@pytest.mark.parametrize("world", [2, 3])
def test_a_resumed_run_of_several_processes_is_exact(ranks, world):
    found = on_processes(
        ranks,
        world,
        lambda: [whole_and_resumed(None, n, lambda: BackboneFinetuning(1)) for n in (3, 5)],
    )
    for both in found:
        for whole, rest in both:
            assert len(rest[0]) > 0
            assert_same(rest[0], whole[0])
            assert rest[1:] == whole[1:]
    ends = [both[0][0][0][-1] for both in found]
    parameters = [name for name, _ in Net().named_parameters()]  # statistics are each rank's own
    assert_same(*[[end[name] for name in parameters] for end in ends[:2]])


def test_a_run_resumes_from_a_checkpoint_saved_after_the_fit():
    trainer = quiet_trainer(max_epochs=2, callbacks=BackboneFinetuning(1), seed=7)
    trainer.fit(Net(), loader())
    trainer.save_checkpoint("after")
    watches = Watch(), Watch()
    quiet_trainer(
        max_epochs=3, callbacks=[BackboneFinetuning(1), watches[0]], seed=7, project_dir="whole"
    ).fit(Net(), loader())
    quiet_trainer(
        max_epochs=3, callbacks=[BackboneFinetuning(1), watches[1]], seed=7, project_dir="rest"
    ).fit(Net(), loader(), ckpt_path="after")
    assert_same(watches[1].weights, watches[0].weights[12:])


def test_a_run_resumes_from_a_checkpoint_of_an_earlier_release(monkeypatch):
    """There everything in a frozen part was in evaluation mode, dropout too."""

    def sleep(self: Any, trainer: Any, module: Any) -> None:
        module.backbone.eval()

    def earlier(self: Any) -> dict[str, Any]:
        return {"epoch": 0, "frozen": list(BODY | NORM), "asleep": asleep} | unfreezing

    names = [name for name, _ in Net().named_modules()]
    asleep = [name for name in names if name.startswith("backbone")]
    unfreezing = {"unfrozen": False, "group": None, "fraction": None}
    with monkeypatch.context() as patched:
        patched.setattr(BackboneFinetuning, "state_dict", earlier)
        patched.setattr(BackboneFinetuning, "on_train_epoch_start", sleep)
        fit(BackboneFinetuning(2), max_epochs=1, project_dir="run", checkpointing=True)
    looking, module = Looking(), Net()
    quiet_trainer(max_epochs=3, callbacks=[BackboneFinetuning(2), looking], project_dir="run").fit(
        module, loader(), ckpt_path="last"
    )
    others = set(names) - {"backbone.1", "fixed"}
    assert looking.training == [others] * 6 + [others | {"backbone.1"}] * 6
    assert [name for name, part in module.named_modules() if not part.training] == ["fixed"]


@pytest.mark.parametrize("epochs", [1, 3])
@pytest.mark.parametrize("fails", [False, True])
def test_the_module_is_left_as_it_was_found(epochs, fails):
    class Ending(Callback):
        def on_train_end(self, trainer, module):
            if fails:
                raise ZeroDivisionError

    module = Net()

    def found() -> Any:
        trains = {name: p.requires_grad for name, p in module.named_parameters()}
        return trains, {name: part.training for name, part in module.named_modules()}

    before = found()
    trainer = quiet_trainer(max_epochs=epochs, callbacks=[BackboneFinetuning(2), Ending()])
    with pytest.raises(ZeroDivisionError) if fails else contextlib.nullcontext():
        trainer.fit(module, loader())
    assert found() == before


def test_a_callback_is_reusable_in_a_second_run():
    callback = BackboneFinetuning(1)
    runs = [fit(callback, max_epochs=2, project_dir=f"run{number}", seed=0) for number in (1, 2)]
    assert runs[0].rates == runs[1].rates
    assert runs[0].moved == runs[1].moved
    assert runs[1].moved[0] == HEAD


def test_a_separate_backbone_group_keeps_its_learning_rate():
    class Grouped(Net):
        def configure_optimizers(self) -> Any:
            groups = [
                {"params": self.head.parameters(), "lr": 0.02},
                {"params": self.backbone.parameters(), "lr": 0.003},
            ]
            return torch.optim.SGD(groups)

    looking = fit(BackboneFinetuning(1), Grouped, max_epochs=3)
    assert looking.rates == [[0.02, 0.003]] * 3 * EPOCH_UPDATES
    assert looking.moved[0] == HEAD
    assert looking.moved[EPOCH_UPDATES] >= {"backbone.0.weight", "backbone.4.weight"}


def test_a_backbone_in_a_common_group_is_refused():
    class Common(Net):
        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    with pytest.raises(ValueError, match="parameters of backbone and others into one group"):
        fit(BackboneFinetuning(1), Common)


@pytest.mark.parametrize(
    ("parts", "rates"),
    [
        (("head.weight", "head.bias"), [[0.02, pytest.approx(0.004)], [0.01]]),
        (("head", "backbone"), [[0.02], [0.01]]),  # which another optimizer has already
    ],
)
def test_of_several_optimizers_the_first_takes_the_backbone(parts, rates):
    class Two(Net):
        def configure_optimizers(self) -> Any:
            named = [
                [p for n, p in self.named_parameters() if n.startswith(part)] for part in parts
            ]
            return [torch.optim.SGD(named[0], lr=0.02), torch.optim.SGD(named[1], lr=0.01)]

    trainer = quiet_trainer(max_epochs=3, callbacks=BackboneFinetuning(1))
    trainer.fit(Two(), loader())
    assert [[group["lr"] for group in each.param_groups] for each in trainer.optimizers] == rates


def test_the_new_group_takes_the_options_of_the_first():
    class Named(Net):
        def configure_optimizers(self) -> Any:
            parameters = [(n, p) for n, p in self.named_parameters() if p.requires_grad]
            groups = [{"params": parameters, "name": "head", "weight_decay": 0.25}]
            return torch.optim.AdamW(groups, lr=0.02)

    trainer = quiet_trainer(max_epochs=2, callbacks=BackboneFinetuning(1))
    trainer.fit(Named(), loader())
    _, second = trainer.optimizers[0].param_groups
    assert second["weight_decay"] == 0.25
    assert "name" not in second
    assert set(second["param_names"]) == BODY | NORM


def test_another_configuration_of_the_optimizer_is_refused_on_resume():
    class All(Net):
        def configure_optimizers(self) -> Any:
            self.backbone.requires_grad_(True)
            return torch.optim.AdamW(self.parameters(), lr=0.02)

    fit(BackboneFinetuning(1), max_epochs=2, checkpointing=True)
    trainer = quiet_trainer(max_epochs=3, callbacks=BackboneFinetuning(1))
    with pytest.raises(
        CheckpointError, match=r"backbone\.0\.weight, which the optimizer already has"
    ):
        trainer.fit(All(), loader(), ckpt_path="auto")


def test_another_name_of_the_backbone_and_verbose_rates(capsys):
    class Nested(Net):
        def __init__(self) -> None:
            super().__init__()
            self.model = nn.ModuleDict({"encoder": self.backbone})
            del self.backbone

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return self.head(self.model["encoder"](batch[0])).square().mean()

    fit(BackboneFinetuning(1, verbose=True, backbone="model.encoder"), Nested, max_epochs=3)
    lines = capsys.readouterr().out.splitlines()
    assert lines == [
        "BackboneFinetuning: epoch 2, learning rates 0.02, 0.002",
        "BackboneFinetuning: epoch 3, learning rates 0.02, 0.004",
    ]
    with pytest.raises(ValueError, match=r"no submodule 'backbone'.* are fixed, head, model\."):
        fit(BackboneFinetuning(1), Nested)


def test_the_whole_module_is_no_backbone():
    with pytest.raises(ValueError, match=r"is '', .* name the submodule to freeze, such as"):
        BackboneFinetuning(backbone="")


def test_a_learning_rate_of_zero_cannot_be_scaled():
    class Still(Net):
        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.head.parameters(), lr=0.0)

    with pytest.raises(ValueError, match=r"is 0, so its schedule cannot be scaled to 0\.01"):
        fit(BackboneFinetuning(1, backbone_initial_lr=0.01), Still)


class Gradual(BaseFinetuning):
    """As written for Lightning: one layer after the other."""

    def freeze_before_training(self, module):
        self.freeze([module.backbone[0], [module.backbone[1], module.backbone[4]]])

    def finetune_function(self, module, epoch, optimizer):
        if epoch == 1:
            self.unfreeze_and_add_param_group(module.backbone[4], optimizer)
        if epoch == 3:
            self.unfreeze_and_add_param_group(
                modules=[module.backbone[0], module.backbone[1]],
                optimizer=optimizer,
                lr=1e-3,
                train_bn=False,
            )


def test_own_policies_unfreeze_one_part_after_the_other():
    looking = fit(Gradual())
    assert looking.rates[0] == [0.02]
    assert looking.rates[EPOCH_UPDATES] == pytest.approx([0.02, 0.002])
    assert looking.rates[3 * EPOCH_UPDATES] == pytest.approx([0.02, 0.002, 0.001])
    assert looking.moved[0] == HEAD
    assert looking.moved[EPOCH_UPDATES] == HEAD | {"backbone.4.weight"}
    assert looking.moved[-1] == HEAD | BODY


def test_own_policies_resume_exactly():
    whole, rest = whole_and_resumed(None, 8, Gradual)
    assert_same(rest[0], whole[0])
    assert rest[1:] == whole[1:]


@pytest.mark.parametrize("factor", ["x", -1])
def test_an_invalid_factor_is_refused_with_its_epoch(factor):
    with pytest.raises((TypeError, ValueError), match=r"lambda_func\(1\) is .*; it must be"):
        fit(BackboneFinetuning(0, lambda_func=lambda epoch: factor))
