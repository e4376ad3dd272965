from __future__ import annotations

import math
import shutil

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from callbacks import Callback, GradientNormMonitor
from tests.numerics.running import on_processes, quiet_trainer
from trackers import read_metrics
from trainer import GradScalerKwargs, TrainModule


class Net(TrainModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.scale = nn.Parameter(torch.ones(()))
        self.net = nn.Sequential(nn.Linear(4, 6), nn.Sequential(nn.Tanh(), nn.Linear(6, 6)))
        self.head = nn.Linear(6, 1)

    def training_step(self, batch, batch_idx):
        x, y = batch
        return (self.scale * self.head(self.net(x)) - y).square().mean()

    def configure_optimizers(self):
        groups = [
            {"params": self.net.parameters(), "name": "body"},
            {"params": [self.scale, *self.head.parameters()], "lr": 0.05},
        ]
        return torch.optim.SGD(groups, lr=0.1)


class Two(Net):
    def configure_optimizers(self):
        rest = [self.scale, *self.head.parameters()]
        return [torch.optim.SGD(self.net.parameters(), 0.1), torch.optim.SGD(rest, 0.05)]


def loader(samples=22, batch_size=4):
    generator = torch.Generator().manual_seed(1)
    x, y = (torch.randn(samples, n, generator=generator) for n in (4, 1))
    return DataLoader(TensorDataset(x, y), batch_size=batch_size)


class Reference(Callback):
    """What each update's gradients are, computed from them all."""

    def __init__(self, order):
        self.order = order
        self.norms = []

    def on_before_optimizer_step(self, trainer, module, optimizer):
        if optimizer is not trainer.optimizers[-1]:
            return

        def norm(*prefixes):
            values = [
                p.grad.double().flatten()
                for name, p in module.named_parameters()
                if name.startswith(prefixes)
            ]
            return torch.linalg.vector_norm(torch.cat(values), self.order).item()

        parts = ("net", "net.0", "net.1", "head")
        norms = {
            "grad_norm": norm(""),
            **{part: norm(part) for part in parts},
            "rest": norm("head", "scale"),
            **{name: norm(name) for name, _ in module.named_parameters()},
        }
        self.norms.append(norms)


def logged(make=Net, *, order=2.0, options=None, **arguments):
    options = options or {}
    reference = Reference(order)
    monitor = GradientNormMonitor(norm_type=order, **arguments)
    trainer = quiet_trainer(
        **{"max_epochs": 2, "callbacks": [monitor, reference], "project_dir": "run", **options}
    )
    trainer.fit(make(), loader())
    if not trainer.accelerator.is_main_process:
        return None
    found = {
        r["step"]: {name: r[name] for name in r if name.startswith("grad_norm")}
        for r in read_metrics(trainer.metrics_path)
    }
    return {step: values for step, values in found.items() if values}, reference.norms


SETTINGS = {
    "plain": {},
    "accumulated": {"gradient_accumulation_steps": 4},
    "clipped": {"max_grad_norm": 1e-3, "gradient_accumulation_steps": 2},
    "fp16": {
        "mixed_precision": "fp16",
        "kwargs_handlers": [GradScalerKwargs(init_scale=2.0**12)],
        "gradient_accumulation_steps": 2,
    },
}


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("setting", SETTINGS)
def test_the_norm_is_that_of_the_update_before_clipping(ranks, world, setting):
    found, expected = on_processes(ranks, world, lambda: logged(options=SETTINGS[setting]))[0]
    assert list(found) == list(range(1, len(expected) + 1))
    for step, values in found.items():
        assert values == {"grad_norm": pytest.approx(expected[step - 1]["grad_norm"], rel=1e-6)}


def test_one_process_and_accumulation_see_the_norm_of_the_big_batch():
    whole, _ = logged(options={"max_epochs": 1, "max_steps": 1, "gradient_accumulation_steps": 6})
    module = Net()
    x, y = loader().dataset.tensors
    module.training_step((x, y), 0).backward()
    expected = torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0).item()
    assert whole[1]["grad_norm"] == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(
    ("make", "arguments", "parts"),
    [
        (Net, {"per": "module"}, {"scale": "scale", "net": "net", "head": "head"}),
        (
            Net,
            {"per": "module", "depth": 2},
            {"scale": "scale", "net.0": "net.0", "net.1": "net.1", "head": "head"},
        ),
        (Net, {"per": "group"}, {"body": "net", "pg2": "rest"}),
        (Two, {"per": "group"}, {"SGD/pg1": "net", "SGD-1/pg1": "rest"}),
        (Two, {"per": "optimizer"}, {"SGD": "net", "SGD-1": "rest"}),
        (Net, {"per": "optimizer"}, {"SGD": "grad_norm"}),
        (Net, {"per": "parameter"}, {name: name for name, _ in Net().named_parameters()}),
    ],
)
@pytest.mark.parametrize("order", [2.0, math.inf])
def test_the_parts_are_named_and_make_the_whole(make, arguments, parts, order):
    found, expected = logged(make, order=order, options={"max_epochs": 1}, **arguments)
    names = {"grad_norm": "grad_norm"} | {f"grad_norm/{k}": v for k, v in parts.items()}
    for step, values in found.items():
        norms = expected[step - 1]
        assert values == {name: pytest.approx(norms[of], rel=1e-6) for name, of in names.items()}


def test_nothing_is_computed_where_nothing_is_recorded(monkeypatch):
    computed = []
    real = torch._foreach_norm
    monkeypatch.setattr(torch, "_foreach_norm", lambda *a, **k: computed.append(1) or real(*a, **k))
    found, _ = logged(Two, options={"max_epochs": 2, "log_every": 5})
    assert list(found) == [5, 10]
    assert len(computed) == 2


def test_frozen_parameters_are_passed_over():
    class Frozen(Net):
        def __init__(self):
            super().__init__()
            self.net.requires_grad_(False)

    trainer = quiet_trainer(max_epochs=1, callbacks=GradientNormMonitor("module"))
    trainer.fit(Frozen(), loader())
    records = read_metrics(trainer.metrics_path)
    assert all("grad_norm/net" not in r and "grad_norm/head" in r for r in records)


def test_the_device_is_not_synchronised(monkeypatch):
    """On an accelerator `item` and the like wait for it."""

    def refuse(*_):
        raise AssertionError("a value was read")

    class Guard(Callback):
        def on_before_optimizer_step(self, trainer, module, optimizer):
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(module, "log", lambda name, value, **_: given.append((name, value)))
                for name in ("item", "tolist", "__bool__", "__float__", "cpu", "numpy"):
                    patch.setattr(torch.Tensor, name, refuse)
                monitor.on_before_optimizer_step(trainer, module, optimizer)

    given: list[tuple[str, torch.Tensor]] = []
    monitor = GradientNormMonitor("module")
    quiet_trainer(max_epochs=1, callbacks=Guard()).fit(Net(), loader())
    assert {name for name, _ in given} >= {"grad_norm", "grad_norm/net"}
    assert all(type(value) is torch.Tensor for _, value in given)


def test_manual_optimisation_is_refused():
    class Manual(Net):
        automatic_optimization = False

    with pytest.raises(ValueError, match="manual optimisation"):
        quiet_trainer(max_epochs=1, callbacks=GradientNormMonitor()).fit(Manual(), loader())


def test_a_sparse_gradient_has_the_norm_of_its_rows():
    class Table(TrainModule):
        def __init__(self, sparse):
            super().__init__()
            torch.manual_seed(0)
            self.table = nn.Embedding(5, 3, sparse=sparse)
            self.head = nn.Linear(3, 1)

        def training_step(self, batch, batch_idx):
            return self.head(self.table(batch)).square().mean()

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    norms = []
    for sparse in (False, True):
        trainer = quiet_trainer(max_epochs=1, log_every=1, callbacks=[GradientNormMonitor()])
        trainer.fit(Table(sparse), DataLoader(torch.tensor([1, 1, 2, 4]), 4))  # a row twice
        norms.append(trainer.callback_metrics["grad_norm"])
        shutil.rmtree("run")
    assert norms[1] == pytest.approx(norms[0], rel=1e-6)
