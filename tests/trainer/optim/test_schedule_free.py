"""Schedule-free optimizers in a fit: where they train, evaluate, and what is saved.

The reference is a loop written by hand with the published recurrence (Defazio et al., 2024).
"""

from __future__ import annotations

import copy

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from callbacks import ModelCheckpoint
from tests.helpers.line import loader
from tests.numerics.running import assert_same, copy_of, quiet_trainer
from trainer import Accelerator, FullyShardedDataParallelPlugin, TrainModule
from trainer.tree import gathered

RATE, BETA = 0.1, 0.9


class ScheduleFreeSGD(torch.optim.Optimizer):
    """As the package ``schedulefree`` has it: parameters are y in training, x in evaluation."""

    def __init__(self, params, lr=RATE, beta=BETA):
        super().__init__(params, {"lr": lr, "beta": beta, "k": 0, "train_mode": False})

    def _move(self, weight, train):
        for group in self.param_groups:
            if group["train_mode"] is not train:
                for parameter in group["params"]:
                    if parameter in self.state:
                        end = self.state[parameter]["z"]
                        parameter.data.lerp_(end, weight(group["beta"]))
                group["train_mode"] = train

    def eval(self):
        self._move(lambda beta: 1 - 1 / beta, False)

    def train(self):
        self._move(lambda beta: 1 - beta, True)

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            assert group["train_mode"], "a step with the weights of the evaluation"
            group["k"] += 1
            for y in group["params"]:
                z = self.state[y].setdefault("z", y.clone())
                y.lerp_(z, 1 / group["k"])
                y.add_(y.grad, alpha=group["lr"] * (group["beta"] * (1 - 1 / group["k"]) - 1))
                z.sub_(y.grad, alpha=group["lr"])


class Free(TrainModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(5)
        self.layer = nn.Linear(2, 1)
        self.validated = []

    def loss(self, batch):
        return (self.layer(batch[0]) - 1).square().mean()

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        self.validated.append(self.layer.weight.detach().clone())

    def configure_optimizers(self):
        return ScheduleFreeSGD(self.parameters())


def by_hand(batches):
    """The weights y of training and x of evaluation after each update, of exact arithmetic."""
    module = Free().double()
    z = [p.detach().clone() for p in module.parameters()]
    x = copy.deepcopy(z)
    found = []
    for number, (batch,) in enumerate(batches):
        y = [(1 - BETA) * a + BETA * b for a, b in zip(z, x, strict=True)]
        with torch.no_grad():
            for parameter, value in zip(module.parameters(), y, strict=True):
                parameter.copy_(value)
        module.zero_grad()
        module.loss([batch.double()]).backward()
        z = [a - RATE * p.grad for a, p in zip(z, module.parameters(), strict=True)]
        x = [b + (a - b) / (number + 1) for a, b in zip(z, x, strict=True)]
        found.append([(1 - BETA) * a + BETA * b for a, b in zip(z, x, strict=True)])
        found[-1] = found[-1], x
    return found


def fit(module, steps, *callbacks, **options):
    trainer = quiet_trainer(max_steps=steps, callbacks=list(callbacks), **options)
    trainer.fit(module, loader(12), loader(4), ckpt_path="auto" if callbacks else None)
    return trainer


def test_it_trains_at_some_weights_and_evaluates_at_others():
    module = Free()
    fit(module, 6, val_every=2, num_sanity_val_steps=1)
    expected = by_hand(loader(12))
    own = list(module.parameters())
    torch.testing.assert_close(own, [p.float() for p in expected[5][1]])  # after the fit: x
    for number, step in ((1, 2), (2, 4), (3, 6)):  # two batches each, after that of the check
        x = expected[step - 1][1][0].float()
        torch.testing.assert_close(module.validated[2 * number - 1], x)


def test_validations_and_saves_do_not_change_the_training():
    quiet, busy = Free(), Free()
    fit(quiet, 6, val_every=100, num_sanity_val_steps=0)
    fit(busy, 6, ModelCheckpoint(every=1), val_every=1, project_dir="busy")
    assert_same(copy_of(quiet), copy_of(busy))


def test_a_checkpoint_has_the_weights_of_the_evaluation_and_resumes_with_the_others(tmp_path):
    whole, parts = Free(), Free()
    fit(whole, 6, ModelCheckpoint(every=2), project_dir="whole")
    fit(parts, 4, ModelCheckpoint(every=2), project_dir="parts")
    (folder,) = tmp_path.cwd().glob("parts/checkpoints/step-00000004")
    y, x = by_hand(loader(12))[3]
    for file, values in (("model", x), ("trained", y)):
        saved = load_file(folder / f"{file}.safetensors")
        torch.testing.assert_close(saved["layer.weight"], values[0].float())
    again = Free()
    fit(again, 6, ModelCheckpoint(every=2), project_dir="parts")
    assert_same(copy_of(whole), copy_of(again))


def test_a_checkpoint_saved_after_the_fit_resumes_at_the_weights_of_the_training():
    trained, again = Free(), Free()
    trainer = fit(trained, 4, val_every=100)
    weights = copy_of(trained)
    trainer.save_checkpoint("after")
    assert_same(copy_of(trained), weights)
    after = quiet_trainer(max_steps=6, val_every=100)
    after.fit(again, loader(12), loader(4), ckpt_path="after")
    expected = [p.float() for p in by_hand(loader(12))[5][1]]
    torch.testing.assert_close(list(again.parameters()), expected)


@pytest.mark.parametrize("prepared", [False, True])
def test_a_loop_of_ones_own_switches_the_prepared_optimizer(prepared):
    module = Free()
    optimizer = module.configure_optimizers()
    if prepared:
        optimizer = Accelerator(cpu=True).prepare(optimizer)
    optimizer.train()
    for batch in loader(12):
        optimizer.zero_grad()
        module.loss(batch).backward()
        optimizer.step()
    y, x = by_hand(loader(12))[5]
    torch.testing.assert_close(list(module.parameters()), [p.float() for p in y])
    optimizer.eval()
    torch.testing.assert_close(list(module.parameters()), [p.float() for p in x])


class Both(Free):
    """Muon for the matrices, AdamW for the rest, as torch's documentation advises."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Sequential(nn.Linear(2, 4), nn.Linear(4, 1))

    def validation_step(self, batch, batch_idx):
        pass

    def configure_optimizers(self):
        matrices = [p for p in self.parameters() if p.ndim == 2]
        others = [p for p in self.parameters() if p.ndim != 2]
        return [torch.optim.Muon(matrices, lr=0.05), torch.optim.AdamW(others, lr=0.05)]


class Alone(Both):
    """The same by hand."""

    automatic_optimization = False

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.manual_backward(loss)
        for optimizer in self.optimizers():
            optimizer.step()
            optimizer.zero_grad()


def test_muon_trains_as_by_hand_and_resumes():
    module, plain = Alone(), Both()
    start = copy.deepcopy(plain.state_dict())
    module.load_state_dict(start)
    fit(module, 6, ModelCheckpoint(every=3), project_dir="whole")
    optimizers = plain.configure_optimizers()
    for batch in loader(12):
        plain.loss(batch).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert_same(copy_of(module), copy_of(plain))
    for steps in (3, 6):
        parts = Alone()
        parts.load_state_dict(start)
        fit(parts, steps, ModelCheckpoint(every=3), project_dir="parts")
    assert_same(copy_of(parts), copy_of(plain))


@pytest.mark.parametrize("kind", ["muon", "schedule-free"])
def test_sharded_matrices_are_updated_as_whole_ones(ranks2, kind):
    def train(sharded):
        plugin = FullyShardedDataParallelPlugin(auto_wrap_policy="no_wrap") if sharded else None
        accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 5, bias=False), nn.Tanh(), nn.Linear(5, 3, bias=False))
        parameters = model.parameters()
        optimizer = (
            torch.optim.Muon(parameters, lr=0.1) if kind == "muon" else ScheduleFreeSGD(parameters)
        )
        model, optimizer = accelerator.prepare(model, optimizer)
        optimizer.train()
        generator = torch.Generator().manual_seed(accelerator.process_index)
        for _ in range(3):
            optimizer.zero_grad()
            rows = torch.randn(8, 6, generator=generator)
            accelerator.backward(model(rows).square().mean())
            optimizer.step()
        optimizer.eval()
        return [gathered(p).detach() for p in model.parameters()]

    whole, sharded = ranks2(train, False), ranks2(train, True)
    # Muon orthogonalises in bfloat16, which rounds the sums of shards differently.
    error = 2e-2 if kind == "muon" else 1e-6
    torch.testing.assert_close(sharded, whole, rtol=0, atol=error)
