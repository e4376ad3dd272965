"""XLA devices (such as TPUs), by torch_xla; see `trainer.xla`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from trainer import xla
from trainer.distributed.collectives import broadcast
from trainer.distributed.step_sync import StepStats, StepSync
from trainer.engines.averaging import average_gradients, average_gradients_of
from trainer.engines.base import EngineOptions
from trainer.engines.ddp import Replicas
from trainer.engines.single import SingleDevice
from trainer.enums import DynamoBackend


class XLADevice(SingleDevice):
    """Modules on an XLA device: a graph ends with each update, and each batch of an evaluation."""

    def __init__(self, options: EngineOptions) -> None:
        super().__init__(options)
        compiler = options.dynamo_plugin
        if compiler is not None and compiler.backend != DynamoBackend.NO and not compiler.disable:
            raise ValueError(
                f"dynamo_backend is {str(compiler.backend).lower()!r}, but an XLA device already "
                "compiles each graph of operations: leave it out."
            )

    def prepare_module(
        self,
        module: nn.Module,
        *,
        device: torch.device | None = None,
        evaluation_mode: bool = False,
    ) -> nn.Module:
        """Return the module itself, on the device, with the parameters that it had."""
        if device is not None:
            xla.move(module, device)
        return super().prepare_module(module, device=device, evaluation_mode=evaluation_mode)

    def start(self, module: nn.Module, step_sync: StepSync | None) -> None:
        """Put the module on the device, with the parameters that it had."""
        xla.move(module, self.options.device)
        super().start(module, step_sync)

    def mark_step(self) -> None:
        """Start the recorded operations."""
        xla.sync()


class XLAReplicas(XLADevice, Replicas):
    """A replica of the module on the XLA device of each of several processes.

    DDP knows no XLA devices. So gradients are averaged in one all-reduce, with the step stats,
    after the last backward of a window; or in manual optimisation and in loops of your own when an
    optimizer steps. The all-reduce ends the graph of the window, and the update is another one.

    Args:
        options: The process and the user's options.
        in_backward: Whether `backward` averages the gradients, if it ends a window.

    Raises:
        NotImplementedError: Models are to be sharded, or gradients compressed.
    """

    def __init__(self, options: EngineOptions, *, in_backward: bool) -> None:
        super().__init__(options)
        asked = {
            "fsdp_plugin": options.fsdp_plugin is not None,
            "parallelism_config": options.parallelism_config is not None,
            "comm_hook": self._kwargs is not None and self._kwargs.comm_hook != "no",
        }
        if refused := [name for name, given in asked.items() if given]:
            raise NotImplementedError(
                f"{' and '.join(refused)} cannot be used on {options.device}, where each process "
                "has the whole model and gradients are averaged uncompressed: leave it out."
            )
        self._in_backward = in_backward
        self.gradients.average = average_gradients

    def prepare_module(
        self,
        module: nn.Module,
        *,
        device: torch.device | None = None,
        evaluation_mode: bool = False,
    ) -> nn.Module:
        """Return the module itself, on the device, with rank 0's parameters and buffers."""
        if device is not None:
            xla.move(module, device)
        SingleDevice.prepare_module(self, module, device=device)
        if not evaluation_mode:
            broadcast([*module.parameters(), *module.buffers()])
        return module

    def start(self, module: nn.Module, step_sync: StepSync | None) -> None:
        """Put the module on the device, and broadcast rank 0's weights."""
        super().start(module, step_sync)
        if self._in_backward:
            self.gradients.average = None

    def backward(
        self, loss: Tensor | None, stats: StepStats | None = None, *args: Any, **kwargs: Any
    ) -> float | Tensor:
        """Run backward; the last one of a window averages the gradients, and sums the stats."""
        if loss is not None:
            self._run_backward(loss, *args, **kwargs)
        if stats is None:
            return 0.0
        processes, trained = self.parallel.dp_size, list(self.module.parameters())
        dtype = self.step_sync.dtype_beside(trained, processes)
        # A mean of gradients is the sum of vectors that each process has multiplied.
        vector = nn.Parameter(self.step_sync.sync_vector(stats, dtype, times=processes))
        vector.grad = vector.detach()
        average_gradients_of([*trained, vector])
        return self.step_sync.count(vector.grad)

    def _send_buffers(self) -> None:
        if next(self.module.buffers(), None) is not None:
            self.broadcast_buffers()
