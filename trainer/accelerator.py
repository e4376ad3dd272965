"""The `Accelerator`: process state, prepared objects and collectives behind one object."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from trainer import environment
from trainer.configuration import (
    AutocastKwargs,
    DataLoaderConfiguration,
    DistributedDataParallelKwargs,
    DistributedType,
    GradientAccumulationPlugin,
    GradScalerKwargs,
    InitProcessGroupKwargs,
    KwargsHandler,
    SchedulerTick,
)
from trainer.data.loader import DataLoaderShard
from trainer.distributed import collectives
from trainer.optim.clipping import clip_
from trainer.optim.optimizer import AcceleratedOptimizer
from trainer.optim.scheduler import AcceleratedScheduler
from trainer.precision import Precision
from trainer.state import AcceleratorState, GradientState
from trainer.strategies import ddp

_HANDLERS = (
    AutocastKwargs,
    DistributedDataParallelKwargs,
    GradScalerKwargs,
    InitProcessGroupKwargs,
)


class Accelerator:
    """Runs a training loop of your own on whatever devices and processes there are.

    Args:
        device_placement: Put models and batches on the device.
        mixed_precision: ``"no"``, ``"bf16"`` or ``"fp16"``; None takes
            ``ACCELERATE_MIXED_PRECISION``, else ``"no"``.
        gradient_accumulation_steps: Micro-batches for one update, with `accumulate`; None takes
            ``ACCELERATE_GRADIENT_ACCUMULATION_STEPS``, else 1.
        cpu: Use the CPU though an accelerator is there. Several CPU processes work together too.
        dataloader_config: How loaders share the data out.
        gradient_accumulation_plugin: In place of `gradient_accumulation_steps`, for more options.
        step_scheduler_with_optimizer: False advances a prepared scheduler once a call, whatever
            its optimizer did.
        kwargs_handlers: Arguments for objects that are made here, one of each type at most.
        scheduler_tick: How often a prepared scheduler advances for one update: ``"process"``, once
            a process, as scripts for the documented API expect; or ``"update"``, once.

    Raises:
        ValueError: An argument is outside its choices, or contradicts another or an earlier
            `Accelerator`.
        TypeError: A kwargs handler is none.
    """

    def __init__(
        self,
        device_placement: bool = True,
        mixed_precision: str | None = None,
        gradient_accumulation_steps: int | None = None,
        cpu: bool = False,
        dataloader_config: DataLoaderConfiguration | None = None,
        gradient_accumulation_plugin: GradientAccumulationPlugin | None = None,
        step_scheduler_with_optimizer: bool = True,
        kwargs_handlers: Sequence[KwargsHandler] | None = None,
        scheduler_tick: str = "process",
    ) -> None:
        handlers = _by_type(kwargs_handlers or [])
        if gradient_accumulation_plugin is None:
            if gradient_accumulation_steps is None:
                named = environment.read_int("ACCELERATE_GRADIENT_ACCUMULATION_STEPS")
                gradient_accumulation_steps = 1 if named is None else named
            gradient_accumulation_plugin = GradientAccumulationPlugin(
                num_steps=gradient_accumulation_steps
            )
        elif gradient_accumulation_steps not in (None, 1):
            raise ValueError(
                "Pass gradient_accumulation_steps or gradient_accumulation_plugin, not both; the "
                f"plugin says {gradient_accumulation_plugin.num_steps}, the argument "
                f"{gradient_accumulation_steps}."
            )
        init = handlers.get(InitProcessGroupKwargs)
        self.state = AcceleratorState(
            mixed_precision, cpu, **(init.to_kwargs() if init is not None else {})
        )
        self.precision = Precision(
            self.state.mixed_precision,
            self.state.device,
            autocast=handlers.get(AutocastKwargs),
            scaler=handlers.get(GradScalerKwargs),
        )
        self.gradient_state = GradientState(gradient_accumulation_plugin)
        self.device_placement = device_placement
        self.dataloader_config = dataloader_config or DataLoaderConfiguration()
        self.step_scheduler_with_optimizer = step_scheduler_with_optimizer
        self.scheduler_tick = SchedulerTick.parse(scheduler_tick, "scheduler_tick")
        self.ddp_kwargs: DistributedDataParallelKwargs | None = handlers.get(
            DistributedDataParallelKwargs
        )
        self.step = 0
        self._models: list[nn.Module] = []
        self._optimizers: list[AcceleratedOptimizer] = []
        self._schedulers: list[AcceleratedScheduler] = []
        self._dataloaders: list[DataLoaderShard] = []

    # -- what this process is ------------------------------------------------------------------

    @property
    def device(self) -> torch.device:
        """The device of this process."""
        return self.state.device

    @property
    def distributed_type(self) -> DistributedType:
        """The kind of processes that work together."""
        return self.state.distributed_type

    @property
    def num_processes(self) -> int:
        """How many processes there are."""
        return self.state.num_processes

    @property
    def process_index(self) -> int:
        """The rank of this one among all."""
        return self.state.process_index

    @property
    def local_process_index(self) -> int:
        """Its rank on this machine."""
        return self.state.local_process_index

    @property
    def is_main_process(self) -> bool:
        """This is rank 0 of all."""
        return self.state.is_main_process

    @property
    def is_local_main_process(self) -> bool:
        """This is rank 0 of its machine."""
        return self.state.is_local_main_process

    @property
    def is_last_process(self) -> bool:
        """This is the highest rank of all."""
        return self.state.is_last_process

    @property
    def use_distributed(self) -> bool:
        """Several processes work together."""
        return self.state.use_distributed

    @property
    def mixed_precision(self) -> str:
        """``"no"``, ``"bf16"`` or ``"fp16"``."""
        return self.state.mixed_precision

    @property
    def gradient_accumulation_steps(self) -> int:
        """Micro-batches for one update; may be set during training."""
        return self.gradient_state.num_steps

    @gradient_accumulation_steps.setter
    def gradient_accumulation_steps(self, steps: int) -> None:
        self.gradient_state.plugin = GradientAccumulationPlugin(
            num_steps=steps, sync_with_dataloader=self.gradient_state.sync_with_dataloader
        )

    @property
    def sync_gradients(self) -> bool:
        """This micro-batch ends its window: gradients are synchronised and used."""
        return self.gradient_state.sync_gradients

    @sync_gradients.setter
    def sync_gradients(self, sync: bool) -> None:
        self.gradient_state.sync_gradients = sync

    @property
    def optimizer_step_was_skipped(self) -> bool:
        """The last update was left out because gradients overflowed; the schedule should wait."""
        return any(optimizer.step_was_skipped for optimizer in self._optimizers)

    # -- prepare -------------------------------------------------------------------------------

    def prepare(self, *args: Any, device_placement: Sequence[bool] | None = None) -> Any:
        """Prepare models, optimizers, schedulers and loaders; other objects stay as they are.

        Args:
            *args: In any order and number.
            device_placement: For each of them, in place of the constructor's.

        Returns:
            The prepared objects in the same order; the object itself for one.

        Raises:
            ValueError: Nothing was passed, or `device_placement` has another length.
        """
        if not args:
            raise ValueError("prepare() was called without anything to prepare.")
        if device_placement is None:
            device_placement = [self.device_placement] * len(args)
        elif len(device_placement) != len(args):
            raise ValueError(
                f"device_placement has {len(device_placement)} elements for {len(args)} objects; "
                "give one for each."
            )
        first = [
            self._prepare_one(obj, place) for obj, place in zip(args, device_placement, strict=True)
        ]
        prepared = tuple(  # schedulers last, when their optimizers are there
            self.prepare_scheduler(obj) if isinstance(obj, LRScheduler) else obj for obj in first
        )
        return prepared[0] if len(prepared) == 1 else prepared

    def _prepare_one(self, obj: Any, place: bool) -> Any:
        if isinstance(obj, DataLoader):
            return self.prepare_data_loader(obj, device_placement=place)
        if isinstance(obj, nn.Module):
            return self.prepare_model(obj, device_placement=place)
        if isinstance(obj, Optimizer):
            return self.prepare_optimizer(obj)
        return obj

    def prepare_model(
        self,
        model: nn.Module,
        device_placement: bool | None = None,
        evaluation_mode: bool = False,
    ) -> nn.Module:
        """Put a model on the device, under autocast, and in DDP among several processes.

        Args:
            model: Preparing it a second time returns it as it is.
            device_placement: In place of the constructor's.
            evaluation_mode: It is only evaluated: no DDP.
        """
        if any(model is known or ddp.unwrap(known) is model for known in self._models):
            return next(k for k in self._models if model is k or ddp.unwrap(k) is model)
        if self.device_placement if device_placement is None else device_placement:
            model = model.to(self.device)
        self.precision.wrap_forward(model)
        trains = any(parameter.requires_grad for parameter in model.parameters())
        if self.use_distributed and trains and not evaluation_mode:
            model = ddp.wrap(model, self.ddp_kwargs)
        self._models.append(model)
        return model

    def prepare_optimizer(self, optimizer: Optimizer) -> AcceleratedOptimizer:
        """Let an optimizer step only when its window is full and its gradients are finite."""
        if isinstance(optimizer, AcceleratedOptimizer):
            return optimizer
        prepared = AcceleratedOptimizer(optimizer, precision=self.precision)
        self._optimizers.append(prepared)
        return prepared

    def prepare_scheduler(self, scheduler: LRScheduler) -> AcceleratedScheduler:
        """Let a scheduler follow the updates of its optimizer; see `scheduler_tick`."""
        own = [
            optimizer
            for optimizer in self._optimizers
            if scheduler.optimizer in (optimizer, optimizer.optimizer)
        ]
        prepared = AcceleratedScheduler(
            scheduler,
            own or list(self._optimizers),
            step_with_optimizer=self.step_scheduler_with_optimizer,
            tick=self.scheduler_tick,
        )
        self._schedulers.append(prepared)
        return prepared

    def prepare_data_loader(
        self, data_loader: DataLoader[Any], device_placement: bool | None = None
    ) -> DataLoaderShard:
        """Give this process its part of a loader, its batches on the device."""
        if isinstance(data_loader, DataLoaderShard):
            return data_loader
        place = self.device_placement if device_placement is None else device_placement
        prepared = DataLoaderShard(
            data_loader,
            rank=self.process_index,
            world_size=self.num_processes,
            # All processes must shuffle alike, also where each was seeded differently.
            seed=collectives.broadcast_object(torch.initial_seed()),
            even_batches=self.dataloader_config.even_batches,
            device=self.device if place else None,
            non_blocking=self.dataloader_config.non_blocking,
        )
        self._dataloaders.append(prepared)
        return prepared

    # -- the step ------------------------------------------------------------------------------

    @contextmanager
    def accumulate(self, *models: nn.Module) -> Iterator[None]:
        """Count a micro-batch; inside, gradients are synchronised only if it ends its window.

        The window also ends with the prepared loader that is being read.
        """
        state = self.gradient_state
        if state.sync_with_dataloader and state.end_of_dataloader:
            self.step = 0
            state.sync_gradients = True
        else:
            self.step += 1
            state.sync_gradients = self.step % state.num_steps == 0
        with ExitStack() as stack:
            for model in models:
                if not state.sync_gradients:
                    stack.enter_context(self.no_sync(model))
            yield

    @contextmanager
    def no_sync(self, model: nn.Module) -> Iterator[None]:
        """Inside, backward does not average the model's gradients over the processes."""
        context = getattr(model, "no_sync", None)
        if context is None:
            yield
        else:
            with context():
                yield

    def autocast(
        self, autocast_handler: AutocastKwargs | None = None
    ) -> AbstractContextManager[Any]:
        """Inside, operations compute in the mixed precision."""
        return self.precision.autocast(autocast_handler)

    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        """Backward on the loss divided by the accumulation steps; for ``loss.backward()``."""
        steps = self.gradient_state.num_steps
        scaled = loss if steps == 1 else loss / steps
        self.precision.scale(scaled).backward(**kwargs)

    def unscale_gradients(self, optimizer: Optimizer | Sequence[Optimizer] | None = None) -> None:
        """Undo the loss scaling of fp16 in the gradients; nothing in other precisions."""
        chosen = self._optimizers if optimizer is None else optimizer
        for one in [chosen] if isinstance(chosen, Optimizer) else chosen:
            self.precision.unscale(one.optimizer if isinstance(one, AcceleratedOptimizer) else one)

    def clip_grad_norm_(
        self, parameters: Iterable[nn.Parameter], max_norm: float, norm_type: float = 2.0
    ) -> Tensor:
        """Clip the norm of the gradients, unscaled first; for ``torch.nn.utils.clip_grad_norm_``.

        Returns:
            The norm before clipping.
        """
        self.unscale_gradients()
        norm = clip_(parameters, max_norm=max_norm, norm_type=norm_type)
        assert norm is not None
        return norm

    def clip_grad_value_(self, parameters: Iterable[nn.Parameter], clip_value: float) -> None:
        """Clip each element of the gradients, unscaled first."""
        self.unscale_gradients()
        clip_(parameters, max_value=clip_value)

    # -- together ------------------------------------------------------------------------------

    def gather(self, tensor: Any) -> Any:
        """See `trainer.distributed.collectives.gather`."""
        return collectives.gather(tensor)

    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        """See `trainer.distributed.collectives.reduce`."""
        return collectives.reduce(tensor, reduction, scale)

    def wait_for_everyone(self) -> None:
        """Wait until every process has come here."""
        self.state.wait_for_everyone()

    def print(self, *args: Any, **kwargs: Any) -> None:
        """``print``, once a machine."""
        self.state.print(*args, **kwargs)

    def __repr__(self) -> str:
        return f"Accelerator(\n{self.state})"


def _by_type(handlers: Sequence[KwargsHandler]) -> dict[type, Any]:
    found: dict[type, Any] = {}
    for handler in handlers:
        if type(handler) not in _HANDLERS:
            raise TypeError(
                f"kwargs_handlers holds {handler!r}; it takes "
                f"{', '.join(kind.__name__ for kind in _HANDLERS)}."
            )
        if type(handler) in found:
            raise ValueError(f"kwargs_handlers holds two {type(handler).__name__}; give one.")
        found[type(handler)] = handler
    return found
