"""An engine of a user's own, in the Trainer and in the Accelerator."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from callbacks import Callback
from trainer import Accelerator, Trainer, TrainModule
from trainer.distributed.step_sync import StepSync
from trainer.engines.base import EngineOptions
from trainer.engines.single import SingleDevice

X = torch.randn(48, 4, generator=torch.Generator().manual_seed(1))
Y = X.sum(1, keepdim=True).tanh()


class AveragesWeights(SingleDevice):
    """Averages the weights after every second update, instead of the gradients at each."""

    def __init__(self, options: EngineOptions) -> None:
        super().__init__(options)
        self.updates = 0
        self.states_taken = 0

    def prepare_module(self, module: nn.Module, **options: Any) -> nn.Module:
        for tensor in (*module.parameters(), *module.buffers()):
            dist.broadcast(tensor.data, 0)
        return super().prepare_module(module, **options)

    def start(self, module: nn.Module, step_sync: StepSync | None) -> None:
        super().start(self.prepare_module(module), step_sync)

    def prepare_optimizer(self, optimizer: Any) -> Any:
        optimizer.register_step_post_hook(self._average)
        return optimizer

    def _average(self, optimizer: Any, *_: Any) -> None:
        self.updates += 1
        if self.updates % 2 == 0:
            for parameter in optimizer.param_groups[0]["params"]:
                dist.all_reduce(parameter.data)
                parameter.data /= self.parallel.dp_size

    def state_dict(self) -> dict[str, Any]:
        self.states_taken += 1  # which may be collective
        return {"updates": self.updates}

    def load_state_dicts(self, saved: Any) -> None:
        self.updates = saved[0]["updates"]


class Net(TrainModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.net = nn.Linear(4, 1)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return nn.functional.mse_loss(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def reference(updates: int) -> list[float]:
    """Two replicas in one process: batch b is of replica b mod 2."""
    replicas = [Net(), Net()]
    optimizers = [replica.configure_optimizers() for replica in replicas]
    for update in range(updates):
        for rank, (replica, optimizer) in enumerate(zip(replicas, optimizers, strict=True)):
            first = 8 * update + 4 * rank
            replica.training_step((X[first : first + 4], Y[first : first + 4]), 0).backward()
            optimizer.step()
            optimizer.zero_grad()
        if update % 2:
            with torch.no_grad():
                mean = sum(replica.net.weight for replica in replicas) / 2
                bias = sum(replica.net.bias for replica in replicas) / 2
                for replica in replicas:
                    replica.net.weight.copy_(mean)
                    replica.net.bias.copy_(bias)
    return [*replicas[0].net.weight.flatten().tolist(), *replicas[0].net.bias.tolist()]


def weights(net: nn.Linear) -> list[float]:
    return [*net.weight.flatten().tolist(), *net.bias.tolist()]


def test_the_trainer_trains_saves_and_resumes_with_it(ranks2, tmp_path):
    class Begins(Callback):
        def on_train_start(self, trainer: Any, module: Any) -> None:
            assert trainer.accelerator.engine.states_taken == 0  # a resumed fit only restores it

    def fit(folder: Path, steps: int, resume: bool) -> list[float]:
        module = Net()
        trainer = Trainer(
            max_steps=steps,
            project_dir=folder,
            engine=AveragesWeights,
            cpu=True,
            progress_bar=False,
            callbacks=[Begins()],
        )
        trainer.fit(
            module, DataLoader(TensorDataset(X, Y), 4), ckpt_path="auto" if resume else None
        )
        return weights(module.net)

    assert ranks2(fit, tmp_path / "whole", 6, False) == [reference(6)] * 2
    ranks2(fit, tmp_path / "cut", 2, False)
    assert ranks2(fit, tmp_path / "cut", 6, True) == [reference(6)] * 2


def test_the_accelerator_trains_saves_and_resumes_with_it(ranks2, tmp_path):
    def train(first: int, last: int) -> list[float]:
        accelerator = Accelerator(cpu=True, engine=AveragesWeights)
        net = Net().net
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        loader = DataLoader(TensorDataset(X, Y), 4)
        net, optimizer, loader = accelerator.prepare(net, optimizer, loader)
        if first:
            accelerator.load_state(tmp_path / "state")
        for step, (x, y) in enumerate(accelerator.skip_first_batches(loader, first), first):
            if step == last:
                break
            accelerator.backward(nn.functional.mse_loss(net(x), y))
            optimizer.step()
            optimizer.zero_grad()
        accelerator.save_state(tmp_path / "state")
        return weights(accelerator.unwrap_model(net))

    assert ranks2(train, 0, 2) == [reference(2)] * 2
    assert ranks2(train, 2, 6) == [reference(6)] * 2


@pytest.mark.parametrize("kind", [Trainer, Accelerator])
def test_the_name_of_a_strategy_is_refused_as_an_engine(kind):
    with pytest.raises(TypeError, match=r"engine is 'fsdp'; it must be a class .* fsdp_plugin"):
        kind(cpu=True, engine="fsdp")
