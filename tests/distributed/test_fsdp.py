"""Sharded training equals that of one process on the whole batches, and resumes on any layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, TensorDataset

from callbacks import Callback
from tests.helpers.ranks import RankError
from trainer import (
    Accelerator,
    FullyShardedDataParallelPlugin,
    Trainer,
    TrainModule,
)

SAMPLES = 44  # with batches of 4, two processes have 6 and 5 batches
X = torch.randn(SAMPLES, 8, generator=torch.Generator().manual_seed(1))
Y = (X.sum(1) > 0).long()


class Block(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.first, self.second = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.second(torch.relu(self.first(self.norm(x))))


class Net(TrainModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(8, 16)
        self.blocks = nn.Sequential(Block(), Block(), Block())
        self.last = nn.Linear(16, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.blocks(self.first(x)))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = nn.functional.cross_entropy(self(batch[0]), batch[1])
        self.log("train/loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val/loss", nn.functional.cross_entropy(self(batch[0]), batch[1]))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def plugin(**options: Any) -> FullyShardedDataParallelPlugin:
    return FullyShardedDataParallelPlugin(
        **{"transformer_cls_names_to_wrap": ["Block"], "auto_wrap_policy": None, **options}
    )


def whole(module: nn.Module) -> dict[str, Tensor]:
    state = module.state_dict()
    return {
        name: (v.full_tensor() if isinstance(v, DTensor) else v).detach().clone()
        for name, v in state.items()
    }


def fit(
    folder: Path, module: type[Net] = Net, *, batch: int = 8, **options: Any
) -> tuple[dict[str, Tensor], dict[str, float]]:
    """Train two epochs on batches that are as large over all processes, in any layout."""
    world = dist.get_world_size() if dist.is_initialized() else 1
    ckpt_path, shuffle = options.pop("ckpt_path", None), options.pop("shuffle", False)
    options = {"max_epochs": 2, "checkpointing": False, "log_every": 1, **options}
    trainer = Trainer(cpu=True, seed=3, progress_bar=False, project_dir=folder, **options)
    data = TensorDataset(X, Y)
    model = module()
    trainer.fit(
        model,
        DataLoader(data, batch // world, shuffle=shuffle),
        DataLoader(data, batch // world),
        ckpt_path=ckpt_path,
    )
    return whole(model), {name: float(value) for name, value in trainer.callback_metrics.items()}


def assert_close(found: list[Any], expected: Any, tolerance: float = 1e-6) -> None:
    for weights, metrics in found:
        for name, value in expected[0].items():
            torch.testing.assert_close(weights[name], value, rtol=0, atol=tolerance)
        assert metrics == pytest.approx(expected[1], abs=tolerance)


WRAPPED: dict[str, dict[str, Any]] = {
    "released after backward": {"sharding_strategy": "SHARD_GRAD_OP"},
    "activations recomputed": {"activation_checkpointing": True},
    "their inputs offloaded": {
        "activation_checkpointing": True,
        "activation_checkpointing_offload": True,
    },
    "offloaded": {"cpu_offload": True},
    "by size": {
        "auto_wrap_policy": "size_based_wrap",
        "min_num_params": 300,
        "transformer_cls_names_to_wrap": None,
    },
    "whole": {"auto_wrap_policy": "no_wrap"},
    "by a function": {"auto_wrap_policy": lambda part: isinstance(part, nn.Linear)},
    "prefetched": {"forward_prefetch": True},
}


@pytest.mark.parametrize("options", WRAPPED)
def test_every_wrap_policy_trains_the_same(ranks2, options, tmp_path):
    expected = fit(tmp_path / "one")
    given = plugin(**WRAPPED[options])
    assert_close(ranks2(lambda: fit(tmp_path / "two", fsdp_plugin=given)), expected)


class SetsUnits(Callback):
    """Sets what torch sets unit by unit, by torch's own methods."""

    def on_fit_start(self, trainer: Trainer, module: TrainModule) -> None:
        first, second, *_ = units = [unit for unit in module.modules() if isinstance(unit, Block)]
        units[-1].set_reshard_after_forward(False)
        first.set_modules_to_forward_prefetch([second])
        second.set_modules_to_backward_prefetch([first])


def test_units_have_the_methods_of_torch(ranks2, tmp_path):
    expected = fit(tmp_path / "one")
    options: dict[str, Any] = {"fsdp_plugin": plugin(), "callbacks": [SetsUnits()]}
    assert_close(ranks2(lambda: fit(tmp_path / "two", **options)), expected)


class NoValidation(Net):
    validation_step = TrainModule.validation_step


def test_no_step_is_made_up(ranks2, tmp_path):
    def overridden() -> list[bool]:
        from trainer.hooks import is_overridden

        trainer = Trainer(
            cpu=True, max_steps=1, progress_bar=False, project_dir=tmp_path, fsdp_plugin=plugin()
        )
        module = NoValidation()
        trainer.fit(module, DataLoader(TensorDataset(X, Y), 4))
        names = ("training_step", "validation_step", "test_step")
        return [is_overridden(module, name, TrainModule) for name in names]

    assert ranks2(overridden) == [[True, False, False]] * 2


class OnMeta(Net):
    """Rank 1 has no weights of its own."""

    def __init__(self) -> None:
        with torch.device("meta" if dist.get_rank() else "cpu"):
            super().__init__()


def test_processes_without_weights_receive_rank_0s(ranks2, tmp_path):
    expected = fit(tmp_path / "one")
    found = ranks2(lambda: fit(tmp_path / "two", OnMeta, fsdp_plugin=plugin()))
    assert_close(found, expected)


class Branches(Net):
    """Each rank leaves out another layer of a block."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        block = self.blocks[1]
        x = self.blocks[0](self.first(batch[0]))
        x = block(x) if False else x + (block.first, block.second)[dist.get_rank()](x)
        return nn.functional.cross_entropy(self.last(x), batch[1])


def test_ranks_may_take_different_branches_within_a_unit(ranks2, tmp_path):
    given = plugin(auto_wrap_policy="no_wrap")
    found = ranks2(lambda: fit(tmp_path / "two", Branches, fsdp_plugin=given))
    assert all(torch.equal(found[0][0][name], found[1][0][name]) for name in found[0][0])


def test_trained_parameters_that_would_not_be_averaged_are_refused(ranks2, tmp_path):
    given = plugin(ignored_modules="last")
    with pytest.raises(
        RankError, match=r"last.weight, last.bias are trained, but .*ignored_modules.*Freeze"
    ):
        ranks2(lambda: fit(tmp_path / "two", fsdp_plugin=given))


def test_a_process_holds_its_part_of_parameters_gradients_and_optimizer_state(ranks2, tmp_path):
    def local_bytes() -> tuple[int, int]:
        accelerator = Accelerator(cpu=True, fsdp_plugin=plugin())
        model = Net()
        total = sum(p.nbytes for p in model.parameters())
        model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
        accelerator.backward(nn.functional.cross_entropy(model(X), Y))
        optimizer.step()
        held: list[Any] = list(model.parameters())
        held += [p.grad for p in model.parameters()]
        held += [v for s in optimizer.state.values() for v in s.values() if v.ndim]
        return total * 4, sum(t.to_local().nbytes for t in held)

    found = ranks2(local_bytes)
    assert found[0][0] == sum(local for _, local in found)
    assert all(abs(local / total - 0.5) < 0.03 for total, local in found)


# -- checkpoints -------------------------------------------------------------------------------


@pytest.mark.parametrize(("saved", "resumed"), [("fsdp", "ddp"), ("ddp", "fsdp")])
def test_a_run_resumes_on_another_engine(ranks2, saved, resumed, tmp_path):
    def run(kind: str, folder: str, **options: Any) -> Any:
        sharded = {"fsdp_plugin": plugin()} if kind == "fsdp" else {}
        options = {"checkpointing": True, **sharded, **options}
        return ranks2(lambda: fit(tmp_path / folder, **options))

    expected = run(saved, "whole")[0]
    run(saved, "cut", max_epochs=1)
    assert_close(run(resumed, "cut", ckpt_path="auto"), expected, 1e-5)
