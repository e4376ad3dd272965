"""An engine of a user's own, written from `trainer.engines.base` and `trainer.engines.single`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from trainer.distributed.step_sync import StepStats, StepSync
from trainer.engines.single import SingleDevice


class AverageAfterBackward(SingleDevice):
    """Data parallel without a wrapper: one all-reduce per gradient, at the end of a window."""

    source = 0  # the rank whose buffers are sent

    def start(self, module: Any, step_sync: StepSync | None) -> None:
        super().start(module, step_sync)
        send_from(0, (*module.parameters(), *module.buffers()))
        if step_sync is not None and not module.automatic_optimization:
            self.gradients.average = average_gradients

    def prepare_module(self, module: nn.Module, **options: Any) -> nn.Module:
        module = super().prepare_module(module, **options)
        if not options.get("evaluation_mode"):
            send_from(0, (*module.parameters(), *module.buffers()))
            self.gradients.average = average_gradients  # there is no window: when optimizers step
        return module

    def backward(
        self, loss: Tensor | None, stats: StepStats | None = None, *args: Any, **kwargs: Any
    ) -> float | Tensor:
        items = super().backward(loss, stats, *args, **kwargs)
        if stats is not None:
            average(self.module.parameters())
        return items

    def begin_micro_batch(self, *, sync: bool, complete: bool = True, source: int = 0) -> None:
        self.source = source

    def broadcast_buffers(self) -> None:
        send_from(self.source, self.module.buffers())


def send_from(rank: int, tensors: Iterable[Tensor]) -> None:
    for tensor in tensors:
        dist.broadcast(tensor.data, rank)


def average_gradients(optimizer: Optimizer) -> None:
    average(p for group in optimizer.param_groups for p in group["params"])


def average(parameters: Iterable[nn.Parameter]) -> None:
    for parameter in parameters:
        if parameter.requires_grad:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()
