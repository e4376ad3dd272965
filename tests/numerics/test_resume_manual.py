"""Gradients that wait for an update at a boundary of manual optimisation outlast a resume."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from callbacks import Callback, ModelCheckpoint
from tests.numerics.running import assert_same, copy_of, cut_back, on_processes, quiet_trainer
from trainer import GradScalerKwargs, TrainModule
from trainer.checkpoint.serialization import load_tree
from trainer.checkpoint.storage import rank_stem

BATCHES = 8  # of each process, in an epoch


class Rare(TrainModule):
    """Two parts; the first one's optimizer steps after every `often` batches, the other's of 3."""

    automatic_optimization = False

    def __init__(self, often: int, sparse: bool = False) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.often, self.sparse, self.losses = often, sparse, []
        self.table = nn.Embedding(7, 5, sparse=sparse)
        self.first = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Dropout(0.3))
        self.second = nn.Linear(6, 1)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        loss = self.second(self.first(self.table(batch[0]))).square().mean()
        self.losses.append(loss.item())
        self.manual_backward(loss)
        for every, optimizer in zip((self.often, 3), self.optimizers(), strict=True):
            if batch_idx % every == every - 1:
                optimizer.step()
                optimizer.zero_grad()

    def configure_optimizers(self) -> list[Any]:
        words = torch.optim.SparseAdam if self.sparse else torch.optim.Adam
        parameters = self.table.parameters() if self.sparse else self.first.parameters()
        rest = [
            *self.second.parameters(),
            *(self.first if self.sparse else self.table).parameters(),
        ]
        return [words(list(parameters), lr=0.05), torch.optim.SGD(rest, lr=0.1, momentum=0.9)]


class Keep(Callback):
    """Keeps the gradients and the optimizers as they are when a fit begins and when it ends."""

    def on_train_start(self, trainer: Any, module: Any) -> None:
        self.first = gradients_of(module)

    def on_train_end(self, trainer: Any, module: Any) -> None:
        self.last = gradients_of(module)
        self.optimizers = copy.deepcopy([each.state_dict() for each in trainer.optimizers])


def gradients_of(module: nn.Module) -> dict[str, Tensor]:
    return {
        name: parameter.grad.detach().to_dense().clone()
        for name, parameter in module.named_parameters()
        if parameter.grad is not None
    }


def rare_fit(folder: str, often: int, epochs: int, options: dict[str, Any]) -> dict[str, Any]:
    options = dict(options)
    keep, module = Keep(), Rare(often, options.pop("sparse", False))
    saver = ModelCheckpoint(every=options.pop("every", 1), save_top_k=-1)
    samples = options.pop("samples", 2 * BATCHES)
    trainer = quiet_trainer(
        max_epochs=epochs, seed=3, project_dir=folder, callbacks=[keep, saver], **options
    )
    data = TensorDataset(torch.arange(samples) * 5 % 7)
    trainer.fit(module, DataLoader(data, batch_size=2, shuffle=True), ckpt_path="auto")
    return {
        "weights": copy_of(module),
        "optimizers": keep.optimizers,
        "scaler": trainer.accelerator.precision.state_dict(),
        "losses": module.losses,
        "first": keep.first,
        "last": keep.last,
        "steps": trainer.global_step,
    }


def assert_ends_alike(whole: list[Any], resumed: list[Any]) -> None:
    for one, other in zip(whole, resumed, strict=True):
        assert other["losses"]
        assert_same(other["losses"], one["losses"][-len(other["losses"]) :])
        for name in ("weights", "optimizers", "scaler", "last", "steps"):
            assert_same(other[name], one[name])


@pytest.mark.parametrize("world", [1, 2])
def test_resume_between_the_steps_of_an_optimizer(ranks, tmp_path, world):
    options = {"samples": 2 * BATCHES * world}
    whole = on_processes(ranks, world, rare_fit, str(tmp_path / "whole"), 1, 2, options)
    assert whole[0]["steps"] == 2 * BATCHES
    for step in range(1, 2 * BATCHES, 1 if world == 1 else 4):
        folder = cut_back(tmp_path / "whole", tmp_path / str(step), step)
        resumed = on_processes(ranks, world, rare_fit, str(folder), 1, 2, options)
        assert len(resumed[0]["losses"]) == 2 * BATCHES - step
        waits = step % BATCHES % 3 != 0
        assert ("second.weight" in resumed[0]["first"]) == (waits or step == BATCHES)
        assert_ends_alike(whole, resumed)


@pytest.mark.parametrize("world", [1, 2])
def test_resume_with_gradients_left_open_by_an_epoch(ranks, tmp_path, world):
    # Every third of 8 batches: two of them wait when the epoch ends.
    options = {"samples": 2 * BATCHES * world, "every": "1 epoch"}
    whole = on_processes(ranks, world, rare_fit, str(tmp_path / "whole"), 3, 3, options)
    for epochs in (1, 2, 3):
        parts = on_processes(ranks, world, rare_fit, str(tmp_path / "parts"), 3, epochs, options)
        assert (epochs > 1) == bool(parts[0]["first"])
    assert_ends_alike(whole, parts)
    own = [part["last"]["second.weight"] for part in parts]
    assert world == 1 or not torch.equal(*own)  # each process's own, not reduced yet


class Centred(TrainModule):
    """Trains on what is left of a batch without a mean that it moves: a buffer."""

    automatic_optimization = False

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.net, self.losses = nn.Linear(3, 1), []
        self.register_buffer("centre", torch.zeros(3))

    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.centre.mul_(0.9).add_(batch[0].mean(0), alpha=0.1)
        loss = self.net(batch[0] - self.centre).square().mean()
        self.losses.append(loss.item())
        self.manual_backward(loss)
        self.optimizers().step()
        self.optimizers().zero_grad()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class SaveInBetween(Callback):
    def on_train_step_start(self, trainer: Any, module: Any) -> None:
        if trainer.global_step == 2:
            trainer.save_checkpoint(trainer.project_dir / "named")


def centred_fit(folder: str, *callbacks: Callback, **options: Any) -> list[Any]:
    data = TensorDataset(torch.randn(64, 3, generator=torch.Generator().manual_seed(0)))
    trainer = quiet_trainer(
        **{"max_epochs": 1, "seed": 1, "project_dir": folder, "checkpointing": True} | options,
        callbacks=list(callbacks),
    )
    module = Centred()
    trainer.fit(module, DataLoader(data, batch_size=4, shuffle=True), ckpt_path="auto")
    return [module.losses, copy_of(module.net)]


def test_saving_does_not_change_buffers(ranks2, tmp_path):
    whole = ranks2(centred_fit, str(tmp_path / "whole"))
    assert_same(ranks2(centred_fit, str(tmp_path / "saved"), SaveInBetween()), whole)
    ranks2(lambda: centred_fit(str(tmp_path / "parts"), max_steps=3, max_epochs=None))
    parts = ranks2(centred_fit, str(tmp_path / "parts"))
    for (losses, weights), (all_losses, all_weights) in zip(parts, whole, strict=True):
        assert_same(losses, all_losses[3:])
        assert_same(weights, all_weights)


@pytest.mark.parametrize(
    ("world", "options"),
    [
        (1, {"sparse": True}),
        (2, {"sparse": True}),
        (1, {"mixed_precision": "fp16"}),
        (2, {"mixed_precision": "fp16"}),
    ],
)
def test_resume_with_sparse_or_scaled_gradients(ranks, tmp_path, world, options):
    if "mixed_precision" in options:  # the scale grows while gradients wait
        scaler = GradScalerKwargs(init_scale=2.0**8, growth_interval=2)
        options = {**options, "kwargs_handlers": [scaler]}
    options = {**options, "samples": 2 * BATCHES * world}
    whole = on_processes(ranks, world, rare_fit, str(tmp_path / "whole"), 2, 2, options)
    for step in (1, 2, 4):  # the scale grows at the last two
        folder = cut_back(tmp_path / "whole", tmp_path / str(step), step)
        resumed = on_processes(ranks, world, rare_fit, str(folder), 2, 2, options)
        assert_ends_alike(whole, resumed)


@pytest.mark.parametrize(("saved", "here"), [(2, 1), (1, 2), (3, 2)])
def test_resume_on_another_number_of_ranks_starts_with_the_mean(ranks, tmp_path, saved, here):
    options = {"samples": 2 * BATCHES * saved, "every": "1 epoch"}
    before = on_processes(ranks, saved, rare_fit, str(tmp_path), 3, 1, options)
    after = on_processes(ranks, here, rare_fit, str(tmp_path), 3, 2, options)
    for name in before[0]["last"]:
        mean = torch.stack([each["last"][name] for each in before]).double().mean(0).float()
        for each in after:
            torch.testing.assert_close(each["first"][name], mean, rtol=1e-6, atol=1e-8)


def test_no_gradients_are_saved_between_windows(tmp_path):
    class Auto(Rare):
        automatic_optimization = True

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return self.second(self.first(self.table(batch[0]))).square().mean()

    trainer = quiet_trainer(
        max_epochs=1, project_dir=tmp_path / "auto", callbacks=ModelCheckpoint()
    )
    loader = DataLoader(TensorDataset(torch.arange(6)), batch_size=2)
    trainer.fit(Auto(1), loader)
    assert "gradients" not in load_tree(newest(tmp_path / "auto"), rank_stem(0))

    rare_fit(str(tmp_path / "rare"), 3, 1, {"samples": 12})
    assert load_tree(newest(tmp_path / "rare"), rank_stem(0))["gradients"] == {}  # 6 batches


def newest(folder: Path) -> Path:
    return max((folder / "checkpoints").iterdir())
