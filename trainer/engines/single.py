"""One process: modules as they are. Other engines inherit from it what they do not change."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from trainer.distributed.parallel import Parallel
from trainer.distributed.step_sync import StepStats, StepSync
from trainer.distributed.transport import sum_numbers
from trainer.engines.averaging import give_nothing
from trainer.engines.base import EngineOptions, Gradients, Weights
from trainer.engines.compile import compile_blocks, compiled_steps, release_blocks
from trainer.engines.lockstep import zero_gradients
from trainer.optim.optimizer import OptimizerDriver
from trainer.tree import own_memory

STEPS = ("training_step", "validation_step", "test_step", "predict_step")


class SingleDevice:
    """Modules on one device; see `trainer.engines.base.Engine` for the methods.

    Args:
        options: The process and the user's options.
    """

    driver: OptimizerDriver | None = None
    isolated: Callable[[], AbstractContextManager[None]] = nullcontext
    _in_dummy = False
    module: nn.Module
    step_sync: StepSync

    def __init__(self, options: EngineOptions) -> None:
        self.options = options
        self._run_backward = options.run_backward
        self._compiled_blocks: list[nn.Module] = []
        self._compiler = options.dynamo_plugin
        self.gradients = Gradients()
        self.weights = Weights()
        self.parallel = Parallel(dp_rank=options.rank, dp_size=options.world_size)

    def prepare_optimizer(self, optimizer: Optimizer) -> Optimizer:
        """Return the optimizer itself: its parameters are still the module's."""
        return optimizer

    # -- the models of a loop of your own ----------------------------------------------------------

    def prepare_module(
        self,
        module: nn.Module,
        *,
        device: torch.device | None = None,
        evaluation_mode: bool = False,  # noqa: ARG002 - an interface
    ) -> nn.Module:
        """Return the module itself, on the device."""
        if device is not None:
            module.to(device)
        own_memory(module)
        return module

    def no_sync(self, module: nn.Module) -> AbstractContextManager[None]:
        """Do nothing, unless the module is a wrapper that reduces gradients by itself."""
        no_sync = getattr(module, "no_sync", None)
        return nullcontext() if no_sync is None else no_sync()

    def trigger_sync(self, module: nn.Module) -> AbstractContextManager[None]:  # noqa: ARG002 - an interface
        """Do nothing: there is nothing to reduce."""
        return nullcontext()

    # -- the steps of a fit ------------------------------------------------------------------------

    def start(self, module: nn.Module, step_sync: StepSync | None) -> None:
        """Put the module on the device, and compile its repeated blocks if requested."""
        self.module = module.to(self.options.device)
        own_memory(module)
        if self._compiler is not None and self._compiler.compiles_regions:
            self._compiled_blocks = compile_blocks(module, self._compiler)
        if step_sync is not None:
            self.step_sync = step_sync

    def compiled_steps(
        self, module: nn.Module, names: Iterable[str]
    ) -> AbstractContextManager[None]:
        """Compile the steps, unless the module's repeated blocks are compiled."""
        if self._compiler is None:
            return nullcontext()
        whole = () if self._compiler.compiles_regions else names
        return compiled_steps(module, whole, self._compiler, self.options.device)

    def begin_epoch(self) -> None:
        """Do nothing: any parameter may be trained."""

    def begin_micro_batch(self, *, sync: bool, complete: bool = True, source: int = 0) -> None:
        """Do nothing: there is nothing to reduce."""

    def forward(self, name: str, *args: Any) -> Any:
        """Call a method of the user's module by name."""
        return getattr(self.module, name)(*args)

    def backward(
        self, loss: Tensor | None, stats: StepStats | None = None, *args: Any, **kwargs: Any
    ) -> float | Tensor:
        """Accumulate the gradients of a micro-batch; a window without items gives zeros."""
        if loss is not None:
            self._run_backward(loss, *args, **kwargs)
        if stats is None:
            return 0.0
        if not stats.items:
            give_nothing(self.module)
        return self.sync_stats(stats)

    @contextmanager
    def dummy(self) -> Iterator[None]:
        """Make the gradients of all parameters zero in backward passes inside the block."""
        self._in_dummy = True
        try:
            with zero_gradients(self.module.parameters()):
                yield
        finally:
            self._in_dummy = False

    def sync_stats(self, stats: StepStats) -> float | Tensor:
        """Record the step stats, summed over the processes if an engine has several."""
        if self.options.world_size == 1:
            self.step_sync.count_alone(stats)
            return stats.items
        total = self.step_sync.sync_vector(stats)
        sum_numbers(total)
        return self.step_sync.count(total)

    def evaluating(self) -> AbstractContextManager[None]:
        """Do nothing: a step changes nothing that the engine has to put back."""
        return nullcontext()

    def mark_step(self) -> None:
        """Do nothing: the device runs each operation at once."""

    def check_unknown_parameters(self) -> None:
        """Do nothing: there are no other processes to average with."""

    def broadcast_buffers(self) -> None:
        """Do nothing: there are no other processes."""

    # -- the state of the engine itself ------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return an empty state."""
        return {}

    def load_state_dicts(self, saved: Sequence[Mapping[str, Any]]) -> None:
        """Do nothing: there is no state."""

    def close(self) -> None:
        """Release compiled blocks; the module was not wrapped."""
        release_blocks(self._compiled_blocks)


def attribute_restorer(module: nn.Module, name: str) -> Callable[[], Any]:
    """Return a function that puts a module's own attribute back, or removes a later one."""
    attributes = vars(module)
    if name in attributes:
        return partial(attributes.update, {name: attributes[name]})
    return partial(attributes.pop, name)
