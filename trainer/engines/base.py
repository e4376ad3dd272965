"""The protocol of engines: how modules are placed and run, and how their gradients are reduced.

An `Accelerator` has one engine, which prepares models for custom loops. Each `Trainer.fit` has
another, which runs the steps of its module. Loops, optimizers and checkpoints use this protocol,
and never check which engine it is.

To write an engine, inherit from `trainer.engines.single.SingleDevice`, override what differs, and
pass the class as ``engine=`` to the `Trainer` or the `Accelerator`. With several processes,
`SingleDevice` only sums the step stats. So the engine must

- make weights and buffers equal in `start` and `prepare_module`, and buffers again in
  `begin_micro_batch` and `broadcast_buffers`;
- average the gradients of a window in `backward` if `stats` is given. They are already weighted by
  items, so this is a plain mean over all processes; a missing gradient counts as zero;
- average them in manual optimisation and in custom loops, where `backward` has no `stats`: by
  `Gradients.average`, or in hooks of the module, which `no_sync` turns off.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import timedelta
from operator import attrgetter
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from trainer.configuration import (
    DeepSpeedPlugin,
    DistributedDataParallelKwargs,
    FullyShardedDataParallelPlugin,
    MegatronLMPlugin,
    ParallelismConfig,
    TorchDynamoPlugin,
)
from trainer.distributed.parallel import Parallel
from trainer.distributed.step_sync import StepStats, StepSync
from trainer.fp8 import TorchAOLayers, TransformerEngineLayers
from trainer.names import bare_state_dict
from trainer.optim.clipping import clip_
from trainer.optim.finite import find_non_finite
from trainer.optim.optimizer import OptimizerDriver
from trainer.optim.weighting import scale_
from trainer.tree import gathered, is_sharded

_GRADIENT = attrgetter("grad")


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """The arguments of an engine.

    Attributes:
        device: The device of this process.
        rank: The global rank of this process.
        world_size: The number of processes.
        ddp_kwargs: Arguments of DDP, or None for its defaults.
        fsdp_plugin: How the model is sharded; None does not shard it.
        deepspeed_plugin: How DeepSpeed partitions a model and its optimizer; None without
            DeepSpeed.
        megatron_lm_plugin: How a model of megatron-core is divided; None without megatron-core.
        parallelism_config: The sizes of the dimensions over which it is sharded and split.
        mixed_precision: The precision of the forward pass: ``"no"``, ``"bf16"``, ``"fp16"`` or
            ``"fp8"``.
        fp8_layers: Converts linear layers to 8 bits, for the precision ``"fp8"``.
        sync_each_batch: Reduce gradients after every micro-batch, not only at the end of a window.
        dynamo_plugin: How the engine compiles parts of the module, such as repeated blocks.
        timeout: The time limit of a collective; None is torch's default.
        engine: The class of a custom engine; None selects a built-in one.
        mesh: The device mesh of all processes, if an earlier engine created it.
        run_backward: Runs the backward pass of a loss: ``Tensor.backward``, or the module's own
            ``backward``.
        checks_gradients: Whether the engine may check for non-finite gradients in the all-reduce of
            the step stats. True if no hook changes gradients after they are reduced.
    """

    device: torch.device
    rank: int
    world_size: int
    ddp_kwargs: DistributedDataParallelKwargs | None = None
    fsdp_plugin: FullyShardedDataParallelPlugin | None = None
    deepspeed_plugin: DeepSpeedPlugin | None = None
    megatron_lm_plugin: MegatronLMPlugin | None = None
    parallelism_config: ParallelismConfig | None = None
    mixed_precision: str = "no"
    fp8_layers: TorchAOLayers | TransformerEngineLayers | None = None
    dynamo_plugin: TorchDynamoPlugin | None = None
    sync_each_batch: bool = False
    timeout: timedelta | None = None
    engine: Callable[[EngineOptions], Engine] | None = None
    mesh: Any = None
    run_backward: Callable[..., Any] = Tensor.backward
    checks_gradients: bool = False


def gathered_on_first(named: Iterable[tuple[str, Any]], rank: int) -> dict[str, Any]:
    """Return whole tensors on the host of rank 0, and {} elsewhere; collective.

    Args:
        named: Tensors, perhaps sharded, by their names; those of tied weights are one object.
        rank: The rank of this process.
    """
    whole: dict[str, Any] = {}
    tied: dict[int, Any] = {}
    for name, value in named:
        weight = tied.get(id(value), value)
        if id(value) not in tied and (isinstance(value, Tensor) or is_sharded(value)):
            weight = gathered(value)
            copies = weight is value
            tied[id(value)] = weight = weight.detach().to("cpu", copy=copies) if rank == 0 else None
        if rank == 0:
            whole[name] = weight
    return whole


class Gradients:
    """The gradients of an update, in the parameters' ``grad``.

    Engines that store or shard them differently have a subclass.

    Attributes:
        average: Averages an optimizer's gradients over the processes when it steps, or when a
            custom loop clips them; None if backward has averaged them. It is read when the
            optimizer is prepared: in a fit after `Engine.start`, in a custom loop possibly before
            any module is prepared.
    """

    average: Callable[[Optimizer], None] | None = None

    def of(self, parameter: nn.Parameter) -> Tensor | None:
        """Return the gradient of a parameter for the update that is due; None without one.

        Do not modify it. If the engine keeps parts of gradients outside of ``p.grad``, the call is
        collective and returns the whole gradient. For a DTensor parameter it returns a DTensor.

        Raises:
            RuntimeError: It is not reduced yet: the window of micro-batches has not ended.
        """
        return parameter.grad

    def scale_(self, parameters: Iterable[Tensor], factor: float | Tensor) -> None:
        """Multiply all gradients by a number or a tensor of shape (), in place."""
        scale_(map(_GRADIENT, parameters), factor)

    def found_non_finite(self, parameters: Iterable[Tensor]) -> bool | Tensor | None:
        """Return whether a gradient is NaN or infinite, the same on all processes.

        The result is a bool on the CPU, and on an accelerator a float32 tensor of shape (), 1 or 0;
        it is None without gradients.
        """
        return find_non_finite(map(_GRADIENT, parameters))

    def clip_grad_norm_(
        self, parameters: Iterable[Tensor], max_norm: float, norm_type: float = 2.0
    ) -> Tensor:
        """Scale the gradients to a total norm of at most `max_norm`; return the norm before."""
        norm = clip_(parameters, max_norm=max_norm, norm_type=norm_type)
        assert norm is not None
        return norm

    def clip_grad_value_(self, parameters: Iterable[Tensor], max_value: float) -> None:
        """Limit the magnitude of each element of the gradients."""
        clip_(parameters, max_value=max_value)


class Weights:
    """The parameters and buffers of a module, unsharded on each process.

    Engines that shard them have a subclass.
    """

    def full_state_dict(self, module: nn.Module) -> dict[str, Any]:
        """Return whole tensors under the names of the user's module; collective."""
        return bare_state_dict(module)

    def exported_parts(self, module: nn.Module) -> Mapping[str, Any] | None:
        """Return this process's part of the weights for export, for example in 16 bits.

        `full_state_dict` returns them whole; see `parts` for the result.
        """
        return self.parts(module)

    # ARG002: an interface
    def parts(self, module: nn.Module, *, to_fill: bool = False) -> Mapping[str, Any] | None:  # noqa: ARG002
        """Return this process's part of the weights for a checkpoint.

        The call is collective if the processes have different layers.

        Args:
            module: The user's module.
            to_fill: Whether the caller will overwrite them and call `refresh`.

        Returns:
            Tensors, or `LocalShards`, by the names of the whole module's ``state_dict``; None if
                the module's own ``state_dict`` has them.
        """
        return None

    def refresh(self, module: nn.Module) -> None:
        """Copy the values written into `parts` to the module; collective."""

    def load_extra_states(self, module: nn.Module, states: Mapping[str, Any]) -> None:
        """Restore what ``get_extra_state`` of the submodules returned.

        Args:
            module: The user's module.
            states: The returned values, by their names in `parts`.
        """
        module.load_state_dict(states, strict=False)

    def reshard(self, module: nn.Module, *, drops_gradients: bool = False) -> None:
        """Release gathered parameters, before the state of a module is saved or loaded.

        Args:
            module: The user's module.
            drops_gradients: Forget gradients that are not in the parameters' ``grad``.

        Raises:
            RuntimeError: There are such gradients, and `drops_gradients` is False.
        """


class Engine(Protocol):
    """Places and runs modules, and reduces their gradients.

    Attributes:
        options: The arguments of the engine.
        parallel: Which part of the data and of the model this process has.
        driver: The library that makes the updates and holds the optimizers' state, such as
            DeepSpeed; None if torch's optimizers do.
        isolated: Returns a context that undoes the side effects of a dummy batch; a fit sets it.
    """

    options: EngineOptions
    parallel: Parallel
    driver: OptimizerDriver | None
    isolated: Callable[[], AbstractContextManager[None]]

    @property
    def gradients(self) -> Gradients:
        """The gradients of an update."""

    @property
    def weights(self) -> Weights:
        """The parameters and buffers of the modules."""

    def prepare_optimizer(self, optimizer: Optimizer) -> Optimizer:
        """Return the optimizer to use in its place, after the modules were prepared.

        An engine that replaces parameters also replaces them in the optimizer.
        """

    # -- models in custom loops --------------------------------------------------------------------

    def prepare_module(
        self,
        module: nn.Module,
        *,
        device: torch.device | None = None,
        evaluation_mode: bool = False,
    ) -> nn.Module:
        """Return the module, wrapped or sharded, to be called in its place.

        Args:
            module: The module.
            device: Where to put it; None leaves it where it is.
            evaluation_mode: Whether it is only evaluated: nothing is reduced.
        """

    def no_sync(self, module: nn.Module) -> AbstractContextManager[None]:
        """Return a context in which forward and backward do not reduce gradients."""

    def trigger_sync(self, module: nn.Module) -> AbstractContextManager[None]:
        """Return a context in which backward reduces, although forward was in `no_sync`."""

    # -- the steps of a fit ------------------------------------------------------------------------

    def start(self, module: nn.Module, step_sync: StepSync | None) -> None:
        """Prepare the module of a fit or an evaluation, before its optimizers are made.

        Args:
            module: The user's module, which is put on the device.
            step_sync: Receives the summed step stats of each window; None in an evaluation, where
                the loop calls the module's own methods.
        """

    def compiled_steps(
        self, module: nn.Module, names: Iterable[str]
    ) -> AbstractContextManager[None]:
        """Return a context in which steps of the user's module are compiled, if requested.

        An engine that compiles parts of the module in `start` does not compile whole steps.
        """

    def begin_epoch(self) -> None:
        """Handle parameters that were frozen or unfrozen, before an epoch's first window."""

    def begin_micro_batch(self, *, sync: bool, complete: bool = True, source: int = 0) -> None:
        """Announce a micro-batch, before the forward pass.

        Args:
            sync: Whether the next backward ends the window.
            complete: Whether every process has a batch; the same on all of them.
            source: The lowest rank with a batch, whose buffers are broadcast.
        """

    def forward(self, name: str, *args: Any) -> Any:
        """Call a method of the user's module by name, such as ``training_step``."""

    def backward(
        self, loss: Tensor | None, stats: StepStats | None = None, *args: Any, **kwargs: Any
    ) -> float | Tensor:
        """Accumulate the gradients of a micro-batch; `Accelerator.backward` calls it too.

        Args:
            loss: A tensor of shape (); None if the micro-batch has none: its gradients are zero.
            stats: This process's step stats if the micro-batch ends its window: the engine then
                averages the gradients of the window over the processes, and sums the stats; see
                `sync_stats`. None in manual optimisation and in loops of your own.
            *args: Further arguments of ``loss.backward``.
            **kwargs: Further arguments of ``loss.backward``.

        Returns:
            With `stats`, the number of items in the window over all processes; else 0.
        """

    def dummy(self) -> AbstractContextManager[None]:
        """Return a context for `forward` and `backward` of a dummy batch; its gradients are zero.

        A process without a batch, or with a batch without items, runs it so that it takes part in
        the collectives of the other processes; see `trainer.engines.lockstep`. `forward` may return
        None if no pass is collective.
        """

    def sync_stats(self, stats: StepStats) -> float | Tensor:
        """Sum only the step stats, without gradients; see `backward` for the result.

        The sum of all processes' `StepSync.sync_vector` goes to `StepSync.count`.
        """

    def evaluating(self) -> AbstractContextManager[None]:
        """Return a context for the batches of an evaluation."""

    def mark_step(self) -> None:
        """Announce the end of an update, or of a batch of an evaluation or a prediction.

        Devices that record operations start them here.
        """

    def check_unknown_parameters(self) -> None:
        """Check that no gradients were left out of the averaging.

        Raises:
            RuntimeError: Parameters that the engine does not know have gradients.
        """

    def broadcast_buffers(self) -> None:
        """Broadcast one process's buffers to all, before an evaluation or a save."""

    # -- the state of the engine itself ------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the state of this process's engine for a checkpoint; empty if it has none."""

    def load_state_dicts(self, saved: Sequence[Mapping[str, Any]]) -> None:
        """Restore the state from those of all processes that saved, in the order of their ranks.

        They may come from another engine: handle unknown and missing keys.
        """

    def close(self) -> None:
        """Release the module for other engines, also after a failed backward pass."""
