"""XLA devices (such as TPUs) in one process, by torch_xla; see `trainer.xla`."""

from __future__ import annotations

import torch
from torch import nn

from trainer import xla
from trainer.distributed.step_sync import StepSync
from trainer.engines.base import EngineOptions
from trainer.engines.single import SingleDevice
from trainer.enums import DynamoBackend


class XLADevice(SingleDevice):
    """Modules on an XLA device: a graph ends with each update, and each batch of an evaluation."""

    def __init__(self, options: EngineOptions) -> None:
        super().__init__(options)
        compiler = options.dynamo_plugin
        if compiler is not None and compiler.backend != DynamoBackend.NO and not compiler.disable:
            raise ValueError(
                f"dynamo_backend is {str(compiler.backend).lower()!r}, but an XLA device compiles "
                "each graph of operations by itself: leave it out."
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
