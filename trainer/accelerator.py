"""The `Accelerator`: process state, prepared objects and collectives for custom training loops.

Its methods are short; the modules that they call do the work and document it in detail.
"""

from __future__ import annotations

import math
import os
import reprlib
import warnings
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast, overload

import torch
from torch import Tensor, nn
from torch.distributed.algorithms.join import Joinable
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torch.utils.data import DataLoader
from torch.utils.hooks import RemovableHandle

from trackers import GeneralTracker
from trainer.checkpoint import accelerator_state as states
from trainer.checkpoint.accelerator_state import PreparedObjects
from trainer.checkpoint.objects import save
from trainer.checkpoint.save import run_on_all_ranks
from trainer.checkpoint.weights import parse_size, write_model
from trainer.checks import (
    check_bools,
    check_counts,
    check_numbers,
    check_type,
    given,
    suggest_arguments,
)
from trainer.configuration import (
    AORecipeKwargs,
    AutocastKwargs,
    DataLoaderConfiguration,
    DeepSpeedPlugin,
    DistributedDataParallelKwargs,
    FP8RecipeKwargs,
    FullyShardedDataParallelPlugin,
    GradientAccumulationPlugin,
    GradScalerKwargs,
    InitProcessGroupKwargs,
    KwargsHandler,
    MegatronLMPlugin,
    MSAMPRecipeKwargs,
    ParallelismConfig,
    ProfileKwargs,
    ProjectConfiguration,
    TERecipeKwargs,
    TorchDynamoPlugin,
    TorchTensorParallelPlugin,
    recipe_of,
)
from trainer.configuration.dummy_optimizers import (
    DummyScheduler,
    MegatronLMDummyScheduler,
    is_deepspeed_schedule,
)
from trainer.data.dataloader import PreparedLoader
from trainer.data.prepare import prepare_data_loader, skip_first_batches
from trainer.distributed import collectives
from trainer.distributed.collectives import Trigger
from trainer.distributed.guards import call_counts
from trainer.distributed.metrics import gather_for_metrics
from trainer.engines import join
from trainer.engines import model as models
from trainer.engines.base import Engine, EngineOptions, Weights
from trainer.engines.choose import choose_engine
from trainer.engines.ddp import communication_of
from trainer.enums import DistributedType, FP8BackendType, RNGType, SchedulerTick
from trainer.memory import release_memory
from trainer.optim.clipping import as_list
from trainer.optim.lomo import is_lomo, lomo_backward
from trainer.optim.optimizer import AcceleratedOptimizer, parameters_of
from trainer.optim.scheduler import AcceleratedScheduler
from trainer.precision import Precision
from trainer.rng import as_types
from trainer.state import AcceleratorState, GradientState, PartialState, is_initialized
from trainer.state.group import warn_of_old_kernel
from trainer.tracking import RunTrackers

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

T = TypeVar("T")
T1 = TypeVar("T1")
T2 = TypeVar("T2")
T3 = TypeVar("T3")
T4 = TypeVar("T4")
T5 = TypeVar("T5")
ModuleT = TypeVar("ModuleT", bound=nn.Module)

_STEPS = attrgetter("steps")
_DUMMY_SCHEDULERS = (DummyScheduler, MegatronLMDummyScheduler)
_SCHEDULERS = (LRScheduler, ReduceLROnPlateau, *_DUMMY_SCHEDULERS)
_RECIPES = (AORecipeKwargs, TERecipeKwargs, MSAMPRecipeKwargs, FP8RecipeKwargs)
_HANDLERS = (
    AutocastKwargs,
    DistributedDataParallelKwargs,
    GradScalerKwargs,
    InitProcessGroupKwargs,
    ProfileKwargs,
    *_RECIPES,
)
_KINDS = {
    "model": "a torch.nn.Module",
    "prepared model": "a torch.nn.Module; prepare returns objects in the order of its arguments",
    "optimizer": "an optimizer of torch.optim, or one with its attributes",
    "scheduler": "a scheduler of torch.optim.lr_scheduler, or one with its attributes",
    "loss": "a tensor with a graph, which loss.item() and float(loss) lack",
    "hook": "a function",
    "joinable": "a model or an optimizer, as prepare returned it",
}


class Accelerator:
    """Runs a custom training loop on any device and any number of processes.

    Example::

        accelerator = Accelerator(mixed_precision="bf16", gradient_accumulation_steps=4)
        model, optimizer, train_loader = accelerator.prepare(model, optimizer, train_loader)
        for inputs, targets in train_loader:
            with accelerator.accumulate(model):
                accelerator.backward(torch.nn.functional.cross_entropy(model(inputs), targets))
                optimizer.step()
                optimizer.zero_grad()

    Args:
        device_placement: Put models, batches and optimizer states on the device.
        split_batches: See `DataLoaderConfiguration`; a value here overrides `dataloader_config`.
        mixed_precision: ``"no"``, ``"bf16"``, ``"fp16"`` or ``"fp8"``; None takes
            ``ACCELERATE_MIXED_PRECISION``, else ``"no"``.
        gradient_accumulation_steps: Micro-batches per update, with `accumulate`; None takes
            ``ACCELERATE_GRADIENT_ACCUMULATION_STEPS``, else 1.
        cpu: Use the CPU even if an accelerator is available, for any number of processes.
        dataloader_config: How loaders divide the data among the processes.
        deepspeed_plugin: Partitions a model and its optimizer with DeepSpeed; None does so if
            ``ACCELERATE_USE_DEEPSPEED`` is set. A dict of several plugins by name is allowed; the
            first is active until `AcceleratorState.select_deepspeed_plugin` selects another.
        fsdp_plugin: Shards models over the processes (FSDP); None does so if
            ``ACCELERATE_USE_FSDP`` is set.
        torch_tp_plugin: Splits layers over processes; ``ParallelismConfig(tp_size=...)`` does the
            same.
        megatron_lm_plugin: Splits a megatron-core model over the processes; None does so if
            ``ACCELERATE_USE_MEGATRON_LM`` is set.
        rng_types: Random number generators that are set to rank 0's state at the beginning of each
            epoch of a prepared loader: ``"torch"``, ``"cuda"``, ``"xpu"``, ``"mps"``,
            ``"generator"`` (the loader's own), or a list of them; None is ``["generator"]``.
        log_with: Trackers for `init_trackers`: a name, class or instance, or a list of them, or
            ``"all"``.
        project_dir: Folder of trackers and numbered checkpoints, if `project_config` has none.
        project_config: Settings for saving states.
        gradient_accumulation_plugin: Replaces `gradient_accumulation_steps`, with more options.
        dispatch_batches: See `DataLoaderConfiguration`; a value here overrides `dataloader_config`.
        even_batches: See `DataLoaderConfiguration`; a value here overrides `dataloader_config`.
        use_seedable_sampler: See `DataLoaderConfiguration`; a value here overrides
            `dataloader_config`.
        step_scheduler_with_optimizer: False advances a prepared scheduler once per call of its
            ``step()``, even if the optimizer did not step.
        kwargs_handlers: Arguments of the objects created here, at most one handler of each type.
        dynamo_backend: Compile prepared models with ``torch.compile`` and this backend; None takes
            ``ACCELERATE_DYNAMO_BACKEND``, else ``"no"``.
        dynamo_plugin: Replaces `dynamo_backend`, with more options.
        scheduler_tick: How often a prepared scheduler advances per update: ``"process"``, once for
            each process, as scripts for the documented API expect; or ``"update"``, once. A
            schedule of DeepSpeed or megatron-core always advances once.
        parallelism_config: The dimensions over which models are replicated, sharded and split; None
            reads them from the environment if ``ACCELERATE_USE_PARALLELISM_CONFIG`` is set.
        deepspeed_plugins: Another name of `deepspeed_plugin`.
        engine: A custom engine: a class with the methods of `trainer.engines.base.Engine`, called
            with `EngineOptions`. None selects the engine by the plugins and the number of
            processes.

    Attributes:
        state: The process, its peers and the precision.
        gradient_state: The position in the gradient accumulation window.
        step: Micro-batches counted by `accumulate` in the current window.
        dynamo_plugin: The settings for compiling prepared models.
        engine: Places models and reduces gradients.

    Raises:
        ValueError: An argument is not one of its choices, or contradicts another argument or an
            earlier `Accelerator`.
        TypeError: An argument has the wrong type.
        NotImplementedError: The requested engine or precision is not supported yet.
        ImportError: The package of a tracker is not installed.
    """

    _run_engine: Engine | None = None  # the engine of a Trainer's running fit or evaluation

    @suggest_arguments(
        fp16='mixed_precision="fp16"',
        bf16='mixed_precision="bf16"',
        logging_dir="project_config=ProjectConfiguration(logging_dir=...)",
        device_specific_seed="set_seed(seed, device_specific=True)",
        non_blocking="dataloader_config=DataLoaderConfiguration(non_blocking=True)",
        gradient_clipping="accelerator.clip_grad_norm_(parameters, max_norm)",
    )
    def __init__(
        self,
        device_placement: bool = True,
        split_batches: bool | None = None,
        mixed_precision: str | None = None,
        gradient_accumulation_steps: int | None = None,
        cpu: bool = False,
        dataloader_config: DataLoaderConfiguration | None = None,
        deepspeed_plugin: DeepSpeedPlugin | Mapping[str, DeepSpeedPlugin] | None = None,
        fsdp_plugin: FullyShardedDataParallelPlugin | None = None,
        torch_tp_plugin: TorchTensorParallelPlugin | None = None,
        megatron_lm_plugin: MegatronLMPlugin | None = None,
        rng_types: Sequence[str] | str | None = None,
        log_with: Any = None,
        project_dir: str | os.PathLike[str] | None = None,
        project_config: ProjectConfiguration | None = None,
        gradient_accumulation_plugin: GradientAccumulationPlugin | None = None,
        dispatch_batches: bool | None = None,
        even_batches: bool | None = None,
        use_seedable_sampler: bool | None = None,
        step_scheduler_with_optimizer: bool = True,
        kwargs_handlers: Sequence[KwargsHandler] | None = None,
        dynamo_backend: str | None = None,
        dynamo_plugin: TorchDynamoPlugin | None = None,
        scheduler_tick: str = "process",
        parallelism_config: ParallelismConfig | None = None,
        deepspeed_plugins: DeepSpeedPlugin | Mapping[str, DeepSpeedPlugin] | None = None,
        engine: Callable[[EngineOptions], Engine] | None = None,
    ) -> None:
        check_bools(
            device_placement=device_placement,
            cpu=cpu,
            step_scheduler_with_optimizer=step_scheduler_with_optimizer,
        )
        fsdp_plugin = FullyShardedDataParallelPlugin.requested(fsdp_plugin)
        self.parallelism_config = ParallelismConfig.requested(parallelism_config, torch_tp_plugin)
        check_type("dataloader_config", dataloader_config, DataLoaderConfiguration)
        check_type("project_config", project_config, ProjectConfiguration)
        handlers = _by_type(kwargs_handlers or [])
        self.autocast_handler: AutocastKwargs | None = handlers.get(AutocastKwargs)
        self.ddp_handler: DistributedDataParallelKwargs | None = handlers.get(
            DistributedDataParallelKwargs
        )
        self.init_handler: InitProcessGroupKwargs | None = handlers.get(InitProcessGroupKwargs)
        self.scaler_handler: GradScalerKwargs | None = handlers.get(GradScalerKwargs)
        self.profile_handler: ProfileKwargs | None = handlers.get(ProfileKwargs)
        self.device_placement, self.step_scheduler_with_optimizer = (
            device_placement,
            step_scheduler_with_optimizer,
        )
        self.scheduler_tick = SchedulerTick.parse(scheduler_tick, "scheduler_tick")
        self.rng_types = [
            RNGType.parse(kind, "rng_types") for kind in as_types(rng_types or [RNGType.GENERATOR])
        ]
        self.dataloader_config = _with_options(
            dataloader_config,
            split_batches=split_batches,
            dispatch_batches=dispatch_batches,
            even_batches=even_batches,
            use_seedable_sampler=use_seedable_sampler,
        )
        self.project_configuration = project_config or ProjectConfiguration(project_dir=project_dir)
        if project_dir is not None and self.project_configuration.project_dir is None:
            self.project_configuration.set_directories(project_dir)
        self._tracking = RunTrackers(log_with, self.project_configuration.logging_dir)
        self.dynamo_plugin = _chosen_dynamo(dynamo_backend, dynamo_plugin)
        before = AcceleratorState._leave_to_trainer(mixed_precision)
        is_first = not is_initialized()
        of_deepspeed = _chosen_deepspeed(
            deepspeed_plugin, deepspeed_plugins, fsdp_plugin or self.parallelism_config, is_first
        )
        of_megatron = _chosen_megatron(
            megatron_lm_plugin, fsdp_plugin or self.parallelism_config or of_deepspeed, is_first
        )
        window = _chosen_window(
            gradient_accumulation_steps, gradient_accumulation_plugin, of_deepspeed
        )
        try:
            self.state = AcceleratorState(
                DeepSpeedPlugin.precision_of(of_deepspeed, mixed_precision),
                cpu,
                dynamo_plugin=self.dynamo_plugin if is_first else None,
                fsdp_plugin=fsdp_plugin if is_first else None,
                torch_tp_plugin=torch_tp_plugin if is_first else None,
                parallelism_config=self.parallelism_config if is_first else None,
                deepspeed_plugin=of_deepspeed,
                megatron_lm_plugin=of_megatron if is_first else None,
                _from_accelerator=True,
                **(self.init_handler.to_kwargs() if self.init_handler is not None else {}),
            )
            if self.state.is_main_process:
                _warn_of_surroundings(window)
            self.precision = Precision(
                self.state.mixed_precision,
                self.state.device,
                autocast=self.autocast_handler,
                scaler=self.scaler_handler,
                recipe=_chosen_recipe(self.state.mixed_precision, handlers),
            )
            self.gradient_state = GradientState(window)
        except BaseException:
            if is_first:  # so that the next Accelerator may have other settings
                AcceleratorState._reset_state()
            AcceleratorState._shared_state = before
            raise
        self.ddp_kwargs = self.ddp_handler
        self.engine = choose_engine(
            EngineOptions(
                device=self.device,
                rank=self.state.process_index,
                world_size=self.state.num_processes,
                ddp_kwargs=self.ddp_handler,
                fsdp_plugin=fsdp_plugin,
                deepspeed_plugin=self.state.deepspeed_plugin,
                megatron_lm_plugin=of_megatron,
                parallelism_config=self.parallelism_config,
                mixed_precision=self.precision.mode,
                fp8_layers=self.precision.layers,
                dynamo_plugin=self.dynamo_plugin,
                sync_each_batch=window.sync_each_batch,
                timeout=None if self.init_handler is None else self.init_handler.timeout,
                engine=engine,
            )
        )
        self.step, self._several = 0, self.use_distributed
        self._accumulating = False  # inside a block of `accumulate`
        self._accumulated: set[int] = set()  # the models of the current micro-batch, by id
        self._trigger = Trigger()
        self._models: list[nn.Module] = []
        self._optimizers: list[AcceleratedOptimizer] = []
        self._steps_at_backward: list[int] = []  # update counts at the last backward pass
        self._schedulers: list[AcceleratedScheduler] = []
        self._dataloaders: list[PreparedLoader] = []
        self._custom_objects: list[Any] = []
        self._save_hooks: OrderedDict[int, Callable[..., None]] = OrderedDict()
        self._load_hooks: OrderedDict[int, Callable[..., None]] = OrderedDict()

    # -- process -------------------------------------------------------------------------------

    @property
    def device(self) -> torch.device:
        """The device of this process."""
        return self.state.device

    @property
    def distributed_type(self) -> DistributedType:
        """The type of device and whether there are several processes, such as ``MULTI_GPU``.

        It is ``FSDP`` if models are sharded over the processes, ``DEEPSPEED`` with DeepSpeed, and
        ``MEGATRON_LM`` with `megatron_lm_plugin`.
        """
        return self.engine.parallel.distributed_type or PartialState().distributed_type

    @property
    def deepspeed_plugin(self) -> DeepSpeedPlugin | None:
        """The settings of DeepSpeed in use; None without DeepSpeed."""
        return self.state.deepspeed_plugin

    @property
    def multi_device(self) -> bool:
        """Whether there are several processes on accelerators whose models are not sharded."""
        kind = self.distributed_type.name
        return kind.startswith("MULTI_") and kind != "MULTI_CPU"

    @property
    def num_processes(self) -> int:
        """The number of processes."""
        return self.state.num_processes

    @property
    def process_index(self) -> int:
        """The global rank of this process."""
        return self.state.process_index

    @property
    def local_process_index(self) -> int:
        """The rank of this process on its machine."""
        return self.state.local_process_index

    @property
    def is_main_process(self) -> bool:
        """Whether this process is global rank 0."""
        return self.state.is_main_process

    @property
    def is_local_main_process(self) -> bool:
        """Whether this process is rank 0 of its machine."""
        return self.state.is_local_main_process

    @property
    def is_last_process(self) -> bool:
        """Whether this process has the highest global rank."""
        return self.state.is_last_process

    @property
    def use_distributed(self) -> bool:
        """Whether there are several processes."""
        return self.state.use_distributed

    # -- the device mesh -----------------------------------------------------------------------

    @property
    def is_fsdp2(self) -> bool:
        """Whether models are sharded over the processes."""
        return self.distributed_type == DistributedType.FSDP

    @property
    def is_composable_parallelism_enabled(self) -> bool:
        """The same as `is_fsdp2`."""
        return self.is_fsdp2

    @property
    def torch_device_mesh(self) -> DeviceMesh | None:
        """The mesh of all processes, with dimensions such as ``"tp"``; None if nothing is split."""
        config = self.parallelism_config
        mesh: DeviceMesh | None = None if config is None else config.device_mesh
        return self.engine.parallel.mesh if mesh is None else mesh

    @property
    def should_save_model(self) -> bool:
        """Whether this process calls `save_model`: all do for sharded models, which are gathered.

        Else the first process of each machine does.
        """
        return self.is_fsdp2 or self.engine.driver is not None or self.is_local_main_process

    @property
    def tensor_parallel_rank(self) -> int:
        """The rank among the processes that share each layer; 0 if layers are not split.

        Raises:
            RuntimeError: There is no `parallelism_config`; the same applies to the ranks below.
        """
        return self._rank_in("tp")

    @property
    def data_parallel_rank(self) -> int:
        """The rank among the replicas; 0 with one. For data use `engine.parallel.dp_rank`."""
        return self._rank_in("dp_replicate")

    @property
    def data_parallel_shard_rank(self) -> int:
        """The rank among the processes that share one replica; 0 if it is not sharded."""
        return self._rank_in("dp_shard")

    @property
    def context_parallel_rank(self) -> int:
        """The rank among the processes that share each sequence; 0 if sequences are not split."""
        return self._rank_in("cp")

    @property
    def pipeline_parallel_rank(self) -> int:
        """The rank among the processes that have layers of one model; 0 without stages."""
        return self._rank_in("pp")

    def _rank_in(self, dimension: str) -> int:
        if self.parallelism_config is None:
            raise RuntimeError(
                f"There is no {dimension} rank without parallelism_config: pass a "
                "ParallelismConfig to the Accelerator."
            )
        mesh = self.torch_device_mesh
        if mesh is None or dimension not in (mesh.mesh_dim_names or ()):
            return 0
        return int(mesh.get_local_rank(dimension))

    @property
    def mixed_precision(self) -> str:
        """``"no"``, ``"bf16"``, ``"fp16"`` or ``"fp8"``."""
        return self.state.mixed_precision

    @property
    def native_amp(self) -> bool:
        """Whether forward passes run in mixed precision; set it to disable or enable autocast.

        Setting it does not affect the gradient scaler of fp16.
        """
        return self.precision.autocasts

    @native_amp.setter
    def native_amp(self, value: bool) -> None:
        if value and self.mixed_precision == "no":
            raise ValueError(
                "native_amp=True needs a precision: pass mixed_precision='bf16' or 'fp16' to the "
                "Accelerator."
            )
        self.precision.autocasts = bool(value)

    @property
    def fp8_recipe_handler(self) -> AORecipeKwargs | TERecipeKwargs | None:
        """The recipe of fp8, if it is in use."""
        return self.precision.recipe

    @property
    def ao_recipe_handler(self) -> AORecipeKwargs | None:
        """The recipe of fp8 with torchao, if it is in use."""
        recipe = self.precision.recipe
        return recipe if isinstance(recipe, AORecipeKwargs) else None

    @property
    def te_recipe_handler(self) -> TERecipeKwargs | None:
        """The recipe of fp8 with TransformerEngine, if it is in use."""
        recipe = self.precision.recipe
        return recipe if isinstance(recipe, TERecipeKwargs) else None

    @property
    def fp8_backend(self) -> FP8BackendType:
        """The library of ``mixed_precision="fp8"``, or `FP8BackendType.NO`."""
        if self.ao_recipe_handler is not None:
            return FP8BackendType.AO
        return FP8BackendType.NO if self.te_recipe_handler is None else FP8BackendType.TE

    @property
    def use_fp16(self) -> bool:
        """Whether the precision is ``"fp16"``: an earlier name of the documented API."""
        warnings.warn(
            "use_fp16 is an earlier name; compare mixed_precision == 'fp16'.",
            FutureWarning,
            stacklevel=2,
        )
        return self.mixed_precision == "fp16"

    # -- configuration -------------------------------------------------------------------------

    @property
    def split_batches(self) -> bool:
        """See `DataLoaderConfiguration`."""
        return self.dataloader_config.split_batches

    @property
    def dispatch_batches(self) -> bool | None:
        """See `DataLoaderConfiguration`."""
        return self.dataloader_config.dispatch_batches

    @property
    def even_batches(self) -> bool:
        """See `DataLoaderConfiguration`; a value set here applies to loaders prepared later."""
        return self.dataloader_config.even_batches

    @even_batches.setter
    def even_batches(self, even_batches: bool) -> None:
        self.dataloader_config = replace(self.dataloader_config, even_batches=even_batches)

    @property
    def use_seedable_sampler(self) -> bool:
        """See `DataLoaderConfiguration`."""
        return self.dataloader_config.use_seedable_sampler

    @property
    def non_blocking(self) -> bool:
        """See `DataLoaderConfiguration`."""
        return self.dataloader_config.non_blocking

    @property
    def use_stateful_dataloader(self) -> bool:
        """See `DataLoaderConfiguration`."""
        return self.dataloader_config.use_stateful_dataloader

    @property
    def project_dir(self) -> str | os.PathLike[str] | None:
        """The folder of the run."""
        return self.project_configuration.project_dir

    @property
    def logging_dir(self) -> str | os.PathLike[str] | None:
        """The folder of the trackers that write files."""
        return self.project_configuration.logging_dir

    @property
    def save_iteration(self) -> int:
        """The number of the next numbered checkpoint, from ``project_configuration.iteration``."""
        return self.project_configuration.iteration

    @property
    def log_with(self) -> list[Any]:
        """The trackers that `init_trackers` starts: instances and classes."""
        return self._tracking.log_with

    @property
    def trackers(self) -> list[GeneralTracker]:
        """The running trackers."""
        return self._tracking.trackers

    # -- running code on some processes --------------------------------------------------------

    def on_main_process(self, function: Callable[..., Any] | None = None) -> Callable[..., Any]:
        """Decorator: run the function on rank 0 only."""
        return self.state.on_main_process(function)

    def on_local_main_process(
        self, function: Callable[..., Any] | None = None
    ) -> Callable[..., Any]:
        """Decorator: run the function on rank 0 of each machine only."""
        return self.state.on_local_main_process(function)

    def on_last_process(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Decorator: run the function on the highest rank only."""
        return self.state.on_last_process(function)

    def on_process(
        self, function: Callable[..., Any] | None = None, process_index: int | None = None
    ) -> Callable[..., Any]:
        """Decorator: run the function on rank `process_index` only."""
        return self.state.on_process(function, process_index)

    def on_local_process(
        self, function: Callable[..., Any] | None = None, local_process_index: int | None = None
    ) -> Callable[..., Any]:
        """Decorator: run the function on rank `local_process_index` of each machine only."""
        return self.state.on_local_process(function, local_process_index)

    def main_process_first(self) -> AbstractContextManager[None]:
        """Return a context whose block rank 0 finishes before the other ranks enter it."""
        return self.state.main_process_first()

    def local_main_process_first(self) -> AbstractContextManager[None]:
        """Like `main_process_first`, with local rank 0 of each machine before its other ranks."""
        return self.state.local_main_process_first()

    def split_between_processes(
        self, inputs: Any, apply_padding: bool = False
    ) -> AbstractContextManager[Any]:
        """Return this process's part of the inputs; see `PartialState.split_between_processes`."""
        return self.state.split_between_processes(inputs, apply_padding=apply_padding)

    def wait_for_everyone(self) -> None:
        """Wait until every process has called this method.

        After 30 seconds a warning names the missing ranks.

        Raises:
            DistributedOperationException: On all processes, if one is in another collective.
        """
        self.state.wait_for_everyone()

    def print(self, *args: Any, **kwargs: Any) -> None:
        """``print``, on the local main process of each machine only."""
        self.state.print(*args, **kwargs)

    def set_trigger(self) -> None:
        """Make the next `check_trigger` return True on every process."""
        self._trigger.set()

    def check_trigger(self) -> bool:
        """Return whether any process called `set_trigger` since the last check; collective."""
        return self._trigger.check()

    # -- prepare -------------------------------------------------------------------------------

    @overload
    def prepare(self, obj: T, /, *, device_placement: Sequence[bool] | None = None) -> T: ...

    @overload
    def prepare(
        self,
        obj1: T1,
        obj2: T2,
        /,
        *,
        device_placement: Sequence[bool] | None = None,
    ) -> tuple[T1, T2]: ...

    @overload
    def prepare(
        self,
        obj1: T1,
        obj2: T2,
        obj3: T3,
        /,
        *,
        device_placement: Sequence[bool] | None = None,
    ) -> tuple[T1, T2, T3]: ...

    @overload
    def prepare(
        self,
        obj1: T1,
        obj2: T2,
        obj3: T3,
        obj4: T4,
        /,
        *,
        device_placement: Sequence[bool] | None = None,
    ) -> tuple[T1, T2, T3, T4]: ...

    @overload
    def prepare(
        self,
        obj1: T1,
        obj2: T2,
        obj3: T3,
        obj4: T4,
        obj5: T5,
        /,
        *,
        device_placement: Sequence[bool] | None = None,
    ) -> tuple[T1, T2, T3, T4, T5]: ...

    @overload
    def prepare(self, *args: Any, device_placement: Sequence[bool] | None = None) -> Any: ...

    def prepare(self, *args: Any, device_placement: Sequence[bool] | None = None) -> Any:
        """Prepare models, optimizers, schedulers and loaders; return other objects unchanged.

        Args:
            *args: The objects, in any order and number.
            device_placement: One value per object; overrides the constructor's.

        Returns:
            The prepared objects in the same order, as a tuple; the bare object if there is one.
            For type checkers, up to five objects keep their types.

        Raises:
            ValueError: Nothing was passed, or `device_placement` has a different length.
            TypeError: `device_placement` is not a list of bools.
        """
        if not args:
            raise ValueError("prepare() was called without anything to prepare.")
        if device_placement is None:
            device_placement = [self.device_placement] * len(args)
        elif not isinstance(device_placement, Sized):
            raise TypeError(
                f"device_placement is {device_placement!r}; it must be a list with True or False "
                f"for each object: {[True] * len(args)}."
            )
        elif len(device_placement) != len(args):
            raise ValueError(
                f"device_placement has {len(device_placement)} elements for {len(args)} objects; "
                "give one for each."
            )
        for number, place in enumerate(device_placement):
            check_bools(**given(**{f"device_placement[{number}]": place}))
        self._fill_deepspeed(args)
        # Models first: an engine may replace their parameters, which optimizers hold. Schedulers
        # last: they need their prepared optimizers.
        placed = list(zip(args, device_placement, strict=True))
        models = [
            self.prepare_model(obj, device_placement=place) if isinstance(obj, nn.Module) else obj
            for obj, place in placed
        ]
        prepared = tuple(
            self.prepare_scheduler(obj)
            if isinstance(obj, _SCHEDULERS) or is_deepspeed_schedule(obj)
            else obj
            for obj in [
                self._prepare_one(obj, place)
                for obj, (_, place) in zip(models, placed, strict=True)
            ]
        )
        return prepared[0] if len(prepared) == 1 else prepared

    def _fill_deepspeed(self, objects: Sequence[Any]) -> None:
        """Set the ``"auto"`` values of the active plugin's configuration to the run's values."""
        plugin = self.state.deepspeed_plugin
        if plugin is None:
            return
        if plugin is not self.engine.options.deepspeed_plugin and not self._models:
            self.engine = choose_engine(replace(self.engine.options, deepspeed_plugin=plugin))
        sizes = [loader.batch_size for loader in objects if isinstance(loader, DataLoader)]
        prepared_sizes = [
            size // (self.num_processes if self.split_batches else 1) for size in sizes if size
        ]
        if prepared_sizes:
            chosen = min(prepared_sizes) if plugin.is_train_batch_min else max(prepared_sizes)
            plugin.run_values["train_micro_batch_size_per_gpu"] = chosen

    def _prepare_one(self, obj: Any, place: bool) -> Any:
        if isinstance(obj, DataLoader):
            return self.prepare_data_loader(obj, device_placement=place)
        if isinstance(obj, Optimizer):
            return self.prepare_optimizer(obj, device_placement=place)
        return obj

    def _placed(self, device_placement: bool | None) -> torch.device | None:
        check_bools(**given(device_placement=device_placement))
        chosen = self.device_placement if device_placement is None else device_placement
        return self.device if chosen else None

    def prepare_model(
        self,
        model: nn.Module,
        device_placement: bool | None = None,
        evaluation_mode: bool = False,
    ) -> nn.Module:
        """Move a model to the device, add autocast, wrap it in DDP (several processes), compile it.

        Args:
            model: The model; preparing it again returns the same prepared model.
            device_placement: Overrides the constructor's.
            evaluation_mode: The model is only evaluated, so DDP is not used.

        Raises:
            TypeError: `model` is not a module.
        """
        _check_argument("prepare_model", "model", model, isinstance(model, nn.Module))
        for earlier in self._models:
            if model is earlier or models.unwrap_model(earlier) is model:
                return earlier
        prepared = models.prepare_model(
            model,
            self.engine,
            precision=self.precision,
            device=self._placed(device_placement),
            dynamo_plugin=self.dynamo_plugin,
            evaluation_mode=evaluation_mode,
        )
        # Not if the model is compiled: the hook would split the graph.
        if self._collects and self._several and model._compiled_call_impl is None:
            prepared.register_forward_pre_hook(_note_forward, prepend=True)
        self._models.append(prepared)
        return prepared

    def prepare_optimizer(
        self, optimizer: Optimizer, device_placement: bool | None = None
    ) -> AcceleratedOptimizer:
        """Wrap an optimizer to step only at the end of a window, and if gradients are finite.

        Raises:
            TypeError: `optimizer` is not an optimizer.
        """
        _check_argument(
            "prepare_optimizer", "optimizer", optimizer, hasattr(optimizer, "param_groups")
        )
        if isinstance(optimizer, AcceleratedOptimizer):
            return optimizer
        for earlier in self._optimizers:
            if optimizer is earlier.optimizer:
                return earlier
        prepared = AcceleratedOptimizer(
            self.engine.prepare_optimizer(optimizer),
            self._placed(device_placement) is not None,
            precision=self.precision,
            reduce=self.engine.gradients.average,
            driver=self.engine.driver,
        )
        self._optimizers.append(prepared)
        return prepared

    def prepare_scheduler(
        self,
        scheduler: LRScheduler | DummyScheduler | MegatronLMDummyScheduler | AcceleratedScheduler,
    ) -> AcceleratedScheduler:
        """Wrap a scheduler to advance with its optimizer's updates; see `scheduler_tick`.

        Raises:
            TypeError: `scheduler` is not a scheduler.
        """
        fits = hasattr(scheduler, "optimizer") and not isinstance(scheduler, AcceleratedOptimizer)
        _check_argument("prepare_scheduler", "scheduler", scheduler, fits)
        if isinstance(scheduler, AcceleratedScheduler):
            return scheduler
        for earlier in self._schedulers:
            if scheduler is earlier.scheduler:
                return earlier
        if isinstance(scheduler, _DUMMY_SCHEDULERS) and not (
            self.scheduler_tick == "update" or self.split_batches
        ):
            scheduler = scheduler.per_update(self.engine.parallel.dp_size)
        driver = self.engine.driver
        used: Any = scheduler if driver is None else driver.prepare_scheduler(scheduler)
        optimizers = [
            optimizer
            for optimizer in self._optimizers
            if scheduler.optimizer in (optimizer, optimizer.optimizer)
        ]
        prepared = AcceleratedScheduler(
            used,
            optimizers or list(self._optimizers),
            step_with_optimizer=self.step_scheduler_with_optimizer,
            split_batches=self.split_batches,
            tick=None if driver and used in driver.schedules else self.scheduler_tick,
            processes=self.engine.parallel.dp_size,
        )
        self._schedulers.append(prepared)
        return prepared

    def prepare_data_loader(
        self,
        data_loader: DataLoader[Any],
        device_placement: bool | None = None,
        slice_fn_for_dispatch: Callable[..., Any] | None = None,
    ) -> PreparedLoader:
        """Return a loader of this rank's shard of the data, with its batches on the device.

        Args:
            data_loader: The loader.
            device_placement: Overrides the constructor's.
            slice_fn_for_dispatch: Divides the batches that rank 0 reads for all; see
                `trainer.utils.slice_tensors` for its arguments.
        """
        device, dispatch = self._placed(device_placement), self.dispatch_batches
        if dispatch is None and self.engine.parallel.dp_size != self.num_processes:
            dispatch = False  # rank 0 can only send different batches
        prepared = prepare_data_loader(
            data_loader,
            device,
            self.engine.parallel.dp_size,
            self.engine.parallel.dp_rank,
            put_on_device=device is not None,
            rng_types=self.rng_types,
            split_batches=self.split_batches,
            dispatch_batches=dispatch,
            even_batches=self.even_batches,
            slice_fn_for_dispatch=slice_fn_for_dispatch,
            use_seedable_sampler=self.use_seedable_sampler,
            data_seed=self.dataloader_config.data_seed,
            non_blocking=self.non_blocking,
            use_stateful_dataloader=self.use_stateful_dataloader,
            presharded=self.dataloader_config.presharded,
            _from_accelerator=True,
        )
        if not any(prepared is loader for loader in self._dataloaders):
            self._dataloaders.append(prepared)
        return prepared

    def skip_first_batches(self, dataloader: DataLoader[Any], num_batches: int = 0) -> Any:
        """Return a loader that skips `num_batches`; see `trainer.data.skip_first_batches`."""
        return skip_first_batches(dataloader, num_batches)

    def join_uneven_inputs(
        self, joinables: Sequence[Any], even_batches: bool | None = None
    ) -> AbstractContextManager[None]:
        """Allow different numbers of batches per process in a block; see `trainer.engines.join`.

        Raises:
            TypeError: `joinables` is not a list of models and optimizers (checked even with one
                process).
        """
        check_bools(**given(even_batches=even_batches))
        if isinstance(joinables, (str, nn.Module)) or not isinstance(joinables, Iterable):
            raise TypeError(
                f"joinables is {reprlib.repr(joinables)}; it must be a list of models and "
                "optimizers: join_uneven_inputs([model])."
            )
        joinables = list(joinables)
        for joinable in joinables:
            fits = isinstance(joinable, (nn.Module, Joinable)) or hasattr(joinable, "param_groups")
            _check_argument("join_uneven_inputs", "joinable", joinable, fits)
        return join.join_uneven_inputs(joinables, self._dataloaders, even_batches, self)

    def verify_device_map(self, model: nn.Module) -> bool:
        """Return whether a device map has already spread the model over several devices.

        Several processes refuse to prepare such a model, unless ``ACCELERATE_BYPASS_DEVICE_MAP`` is
        true.
        """
        _check_argument("verify_device_map", "model", model, isinstance(model, nn.Module))
        return models.verify_device_map(model)

    def unwrap_model(
        self, model: ModuleT, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True
    ) -> ModuleT:
        """Return the user's module from a prepared model, without DDP and other wrappers."""
        return cast("ModuleT", models.unwrap_model(model, keep_fp32_wrapper, keep_torch_compile))

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, Any]:
        """Return the model's state dict, with the wrappers' key prefixes if `unwrap` is False.

        For sharded models (FSDP) it is collective: rank 0 gets whole tensors in host memory, the
        others {}.
        """
        if self._collects:  # raises instead of waiting if a rank is elsewhere
            operation, name = "Gathering the weights", "get_state_dict"
            run_on_all_ranks(operation, lambda: None, self.state, operation=name)
        elif not unwrap:
            return model.state_dict()
        return self._weights.full_state_dict(model)

    def free_memory(self, *objects: Any) -> list[None]:
        """Drop the references to all prepared objects, and empty the device's cache.

        Args:
            *objects: Objects to release. Assign the result to the same variables:
                ``a, b = accelerator.free_memory(a, b)``.

        Returns:
            None for each object.
        """
        for group in (self._models, self._optimizers, self._schedulers, self._dataloaders):
            group.clear()
        self.engine = choose_engine(self.engine.options)
        self._steps_at_backward.clear()
        self.step = 0
        self._accumulated = set()
        self.sync_gradients = True  # an incomplete window must not delay a later update
        self.precision.begin()
        if self.scaler is not None:  # its state is keyed by id(optimizer), and ids are reused
            self.scaler._per_optimizer_states.clear()
        return release_memory(*objects)

    def clear(self, *objects: Any) -> list[None]:
        """Alias of `free_memory`."""
        return self.free_memory(*objects)

    # -- training step -------------------------------------------------------------------------

    @property
    def gradient_accumulation_steps(self) -> int:
        """Micro-batches per update; may be set during training."""
        return self.gradient_state.num_steps

    @gradient_accumulation_steps.setter
    def gradient_accumulation_steps(self, steps: int) -> None:
        check_counts(1, gradient_accumulation_steps=steps)
        self.gradient_state.plugin = replace(self.gradient_state.plugin, num_steps=steps)

    @property
    def sync_gradients(self) -> bool:
        """Whether this micro-batch ends its window: gradients are all-reduced and applied."""
        return self.gradient_state.sync_gradients

    @sync_gradients.setter
    def sync_gradients(self, sync: bool) -> None:
        check_bools(sync_gradients=sync)
        self.gradient_state.sync_gradients = sync

    @property
    def optimizer_step_was_skipped(self) -> bool:
        """Whether the last update was skipped because gradients overflowed."""
        return any(optimizer.step_was_skipped for optimizer in self._optimizers)

    @property
    def scaler(self) -> torch.amp.GradScaler | None:
        """The gradient scaler of fp16; None in other precisions.

        After ``optimizer.step()``, its `get_scale` and `state_dict` return the scale for the next
        loss. Both synchronise with the device.

        It can be set, preferably before `prepare`. `backward` and the prepared optimizers then use
        it in any precision; None disables loss scaling.

        Raises:
            TypeError: It is set to a value other than torch's ``GradScaler`` or None.
        """
        return self.precision.scaler

    @scaler.setter
    def scaler(self, scaler: torch.amp.GradScaler | None) -> None:
        self.precision.use_scaler(scaler)

    @contextmanager
    def accumulate(self, *models: nn.Module) -> Iterator[None]:
        """Gradient accumulation: a context for one micro-batch.

        Gradients are all-reduced in the block only if the micro-batch ends its accumulation window.
        The last batch of the prepared loader also ends the window. Inside `join_uneven_inputs`,
        where ranks may have different numbers of batches, only the last batch over all ranks does.

        Several blocks with different models, nested or one after another, count as one micro-batch.
        The next micro-batch begins when a model is passed again, or when no model is passed.

        With DDP's ``static_graph``, the first micro-batch of a process is also all-reduced. The sum
        is the same up to rounding. A resumed run on several processes then equals an uninterrupted
        run only up to rounding.
        """
        state, ids, nested = self.gradient_state, {*map(id, models)}, self._accumulating
        if state._data_end_window:
            self.step = 0
            self._accumulated = set()
        elif nested or (ids and self._accumulated and not ids & self._accumulated):
            self._accumulated |= ids
        else:
            self.step += 1
            self._accumulated = ids
        state.sync_gradients = self.step % state.num_steps == 0
        self._accumulating = True
        try:
            # A rank that has run out of batches (`join_uneven_inputs`) takes part only in the
            # all-reduce at the end of a window, so there is no all-reduce within it.
            if state.sync_gradients or (state.sync_each_batch and not state._joins):
                yield
                return
            with ExitStack() as stack:
                for model in models:
                    _check_argument(
                        "accumulate", "prepared model", model, isinstance(model, nn.Module)
                    )
                    stack.enter_context(self.engine.no_sync(model))
                yield
        finally:
            self._accumulating = nested

    @contextmanager
    def no_sync(self, model: nn.Module | None = None) -> Iterator[None]:
        """Disable the gradient all-reduce for backward passes in the block.

        Args:
            model: The model; None means all prepared models.
        """
        with ExitStack() as stack:
            for module in self._models if model is None else [model]:
                _check_argument("no_sync", "prepared model", module, isinstance(module, nn.Module))
                stack.enter_context(self.engine.no_sync(module))
            yield

    def trigger_sync_in_backward(self, model: nn.Module) -> AbstractContextManager[None]:
        """Enable the gradient all-reduce in backward although forward ran under `no_sync`."""
        return self.engine.trigger_sync(model)

    def deepspeed_ulysses_dl_adapter(self, dl: Any, model: nn.Module) -> Any:  # noqa: ARG002 - as in accelerate
        """Return the loader unchanged: sequence parallelism of DeepSpeed is not supported."""
        return dl

    @contextmanager
    def maybe_context_parallel(
        self,
        buffers: Sequence[Tensor] | None = None,
        buffer_seq_dims: Sequence[int] | None = None,
        no_restore_buffers: Collection[Tensor] | None = None,
    ) -> Iterator[None]:
        """Split sequences over ``cp_size`` processes; does nothing if ``cp_size`` is 1.

        Args:
            buffers: Tensors to split along the sequence inside the block, such as token ids, labels
                and positions. They must have the same values on these processes.
            buffer_seq_dims: The sequence dimension of each buffer.
            no_restore_buffers: Buffers that stay split after the block. Pass all buffers if
                backward runs after the block, as in ``training_step``.

        Raises:
            ValueError: See `trainer.engines.context_parallel.context_parallel`; also for attention
                inside the block.
        """
        config = self.parallelism_config
        if config is None or not config.cp_enabled:
            yield
            return
        from trainer.engines.context_parallel import context_parallel

        mesh = config.get_device_mesh(self.device.type)["cp"]
        dims = buffer_seq_dims or ()
        with context_parallel(mesh, buffers or (), dims, no_restore_buffers or ()):
            yield

    def autocast(
        self, autocast_handler: AutocastKwargs | None = None
    ) -> AbstractContextManager[Any]:
        """Return an autocast context for the `Accelerator`'s mixed precision."""
        fix = (
            "Pass AutocastKwargs(enabled=False) to compute in full precision; the precision itself "
            "is the Accelerator's mixed_precision."
        )
        check_type("autocast_handler", autocast_handler, AutocastKwargs, fix)
        return self.precision.autocast(autocast_handler)

    @contextmanager
    def profile(self, profile_handler: ProfileKwargs | None = None) -> Iterator[Any]:
        """Profile a block with ``torch.profiler``; collective if a trace is written.

        Args:
            profile_handler: What to record; None takes the one in `kwargs_handlers`, else the
                defaults.

        Yields:
            The profiler. With a schedule, call its ``step()`` after each step of the loop.
        """
        check_type("profile_handler", profile_handler, ProfileKwargs)
        handler = profile_handler or self.profile_handler or ProfileKwargs()
        with handler.build(rank=self.process_index) as profiler:
            yield profiler
        if handler.output_trace_dir is not None:
            self.wait_for_everyone()

    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        """Run backward on the loss, divided by the accumulation steps and scaled for fp16.

        Args:
            loss: A tensor of one element with a graph.
            **kwargs: Arguments of ``loss.backward``; `learning_rate` for a prepared LOMO optimizer.

        Raises:
            RuntimeError: With several processes, parameters were unfrozen after `prepare`.
            TypeError: `loss` is not a tensor.
        """
        if loss is None:  # to an engine, None is a batch without a loss
            _check_argument("backward", "loss", loss, False)
        if self.sync_gradients:
            self.engine.check_unknown_parameters()
            if self._several and not self.gradient_state._joins:
                call_counts.note("backward")
        steps = self.gradient_state.num_steps
        self._steps_at_backward = list(map(_STEPS, self._optimizers))
        try:
            scaled = loss if steps == 1 else loss / steps
            if "learning_rate" in kwargs and any(map(is_lomo, self._optimizers)):
                self.lomo_backward(scaled, **kwargs)
            else:
                self.engine.backward(self.precision.scale(scaled), **kwargs)
        # The type is only checked after a failure.
        except (AssertionError, AttributeError, TypeError, ValueError):
            _check_argument("backward", "loss", loss, hasattr(loss, "backward"))
            raise

    def lomo_backward(self, loss: Tensor, learning_rate: float) -> None:
        """Run backward with the update fused into it (LOMO); see `trainer.optim.lomo`."""
        lomo_backward(loss, learning_rate, self._optimizers)

    def unscale_gradients(self, optimizer: Optimizer | Sequence[Optimizer] | None = None) -> None:
        """Undo the loss scaling of fp16 in the gradients; does nothing in other precisions.

        Raises:
            ValueError: Called inside an accumulation window, where later micro-batches would add
                scaled gradients to unscaled ones.
            TypeError: `optimizer` is neither an optimizer nor a list of them.
        """
        chosen = self._optimizers if optimizer is None else optimizer
        single = isinstance(chosen, (Optimizer, nn.Module, str))
        ours: list[Any] = [chosen] if single or not isinstance(chosen, Iterable) else list(chosen)
        for one in ours:
            _check_argument("unscale_gradients", "optimizer", one, hasattr(one, "param_groups"))
        scaled = self.scaler is not None and self.scaler.is_enabled()
        if scaled and not self.sync_gradients:
            raise ValueError(
                "Gradients cannot be unscaled or clipped in the middle of a window of "
                "micro-batches: the next micro-batch adds gradients that carry the fp16 scale. "
                "Do it under `if accelerator.sync_gradients:`."
            )
        for one in ours:
            self.precision.unscale(one.optimizer if isinstance(one, AcceleratedOptimizer) else one)

    def clip_grad_norm_(
        self,
        parameters: Tensor | Iterable[Tensor],
        max_norm: float,
        norm_type: float | str = 2,
    ) -> Tensor:
        """Unscale the gradients, then clip them as ``torch.nn.utils.clip_grad_norm_`` does.

        Returns:
            The norm before clipping.

        Raises:
            ValueError: `max_norm` is negative or NaN, or `norm_type` is 0.
            TypeError: `max_norm` or `norm_type` is not a number.
        """
        _check_limit("max_norm", max_norm)
        check_numbers(norm_type=math.inf if norm_type == "inf" else norm_type)
        if norm_type == 0:
            raise ValueError(
                f"norm_type is {norm_type!r}, which counts the elements that are not zero: scaling "
                "does not change their number. Use another order, such as 2 or 'inf'."
            )
        parameters = self._unscaled(parameters)
        return self.engine.gradients.clip_grad_norm_(parameters, max_norm, float(norm_type))

    def clip_grad_value_(self, parameters: Tensor | Iterable[Tensor], clip_value: float) -> None:
        """Unscale the gradients, then clip each of their elements.

        Raises:
            ValueError: `clip_value` is negative or NaN.
            TypeError: `clip_value` is not a number.
        """
        _check_limit("clip_value", clip_value)
        self.engine.gradients.clip_grad_value_(self._unscaled(parameters), clip_value)

    def _unscaled(self, parameters: Tensor | Iterable[Tensor]) -> list[Tensor]:
        """Unscale the gradients of the optimizers that own a parameter; return the parameters.

        Gradients of other optimizers stay scaled, because a later backward pass may add scaled
        gradients to them.
        """
        chosen = as_list(parameters)
        if self.scaler is not None or self.engine.gradients.average is not None:
            ids = set(map(id, chosen))
            owners = [
                optimizer
                for optimizer in self._optimizers
                if not ids.isdisjoint(map(id, parameters_of([optimizer])))
            ]
            if self.sync_gradients:
                for optimizer in owners:
                    optimizer.synchronize()
            self.unscale_gradients(owners)
        return chosen

    # -- collectives ---------------------------------------------------------------------------

    def gather(self, tensor: T) -> T:
        """Gather tensors of all processes, concatenated along the first dimension; collective.

        Args:
            tensor: Tensors in nested containers, each of the same shape on every process.

        Returns:
            The same containers. A tensor of shape (N, …) becomes (num_processes * N, …), a 0-d
            tensor (num_processes,).

        Raises:
            TypeError: There are several processes, and a leaf is not a dense tensor.
            DistributedOperationException: The processes' calls do not match.
        """
        return cast("T", collectives.gather(tensor))

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """Gather, and drop the duplicates that `even_batches` added to the last batches."""
        copies = self.num_processes // self.engine.parallel.dp_size
        return gather_for_metrics(input_data, use_gather_object, copies)

    def reduce(self, tensor: T, reduction: str = "sum", scale: float = 1.0) -> T:
        """All-reduce each tensor in nested containers, and return the results; collective.

        Args:
            tensor: Tensors, each of the same shape on every process; they are not changed.
            reduction: ``"sum"``, ``"mean"``, or ``"none"`` for the local values.
            scale: A factor for the result.

        Raises:
            ValueError: The reduction is unknown.
            TypeError: A leaf is not a dense tensor, or the mean of integers is requested.
            DistributedOperationException: The processes' calls do not match.
        """
        return cast("T", collectives.reduce(tensor, reduction, scale))

    def pad_across_processes(
        self, tensor: Any, dim: int = 0, pad_index: int = 0, pad_first: bool = False
    ) -> Any:
        """Pad dimension `dim` of each tensor to its largest size over the processes; collective.

        Args:
            tensor: Tensors in nested containers.
            dim: The dimension to pad. A tensor without it is returned unchanged.
            pad_index: The value to pad with.
            pad_first: Pad at the beginning instead of the end.

        Raises:
            TypeError: A leaf is not a tensor.
            DistributedOperationException: The processes' calls do not match.
        """
        return collectives.pad_across_processes(tensor, dim, pad_index, pad_first)

    # -- saving --------------------------------------------------------------------------------

    def save(self, obj: Any, f: str | os.PathLike[str], safe_serialization: bool = False) -> None:
        """Save an object on the main process only (with `save_on_each_node`, on each machine's).

        Args:
            obj: Any object that ``torch.save`` takes; with `safe_serialization`, a dict of tensors.
            f: The file, written atomically.
            safe_serialization: Write safetensors, a format that cannot contain code, instead of
                using ``torch.save``.
        """
        save(obj, f, self.project_configuration.save_on_each_node, safe_serialization)

    def save_model(
        self,
        model: nn.Module,
        save_directory: str | os.PathLike[str],
        max_shard_size: int | str = "10GB",
        safe_serialization: bool = True,
    ) -> None:
        """Write a model's weights under its unwrapped names; see `checkpoint.save_model`.

        For sharded models (FSDP, DeepSpeed, Megatron-LM) it is collective: call it on all
        processes. Tensors are gathered one at a time.

        Raises:
            TypeError: `model` is not a module; raised on every process.
            ValueError: `max_shard_size` is not a size; raised on every process.
        """
        _check_argument("save_model", "model", model, isinstance(model, nn.Module))
        check_bools(safe_serialization=safe_serialization)
        parse_size(max_shard_size, "max_shard_size")  # a bad size raises on every rank
        options = _bare(model), save_directory, max_shard_size, safe_serialization
        operation = f"Saving the model to {os.fspath(save_directory)}"
        write = partial(write_model, *options, parts=self._weights.exported_parts)
        if self._collects:
            run = partial(run_on_all_ranks, operation, state=self.state, operation="save_model")
            write(writes=self._writes, step=lambda work: run(work=work))
        elif self._writes:
            write()

    def save_state(
        self,
        output_dir: str | os.PathLike[str] | None = None,
        safe_serialization: bool = True,
        **save_model_func_kwargs: Any,
    ) -> Path:
        """Save all prepared and registered objects and each process's RNG states.

        Every process calls it. The main process may also call it alone, inside
        ``if accelerator.is_main_process:``, if the state is replicated (one device, DDP);
        `load_state` then derives the random states of the other processes. For sharded models this
        raises an error.

        Args:
            output_dir: The folder; not needed with `automatic_checkpoint_naming` of
                `ProjectConfiguration`.
            safe_serialization: Save weights as safetensors instead of with ``torch.save``.
            **save_model_func_kwargs: Not supported; reserved for other engines.

        Returns:
            The folder.

        Raises:
            ValueError: There is no `output_dir` or it is "", or the next numbered folder exists.
            CheckpointError: A process could not write its part; raised on every process.
            DistributedOperationException: Models are sharded, and another process continued without
                calling it.
            TypeError: Further arguments were passed.
        """
        if save_model_func_kwargs:
            raise TypeError(
                f"save_state got {', '.join(save_model_func_kwargs)}, arguments of an engine that "
                "this release does not support. Remove them."
            )
        check_bools(safe_serialization=safe_serialization)
        if output_dir == "" and not self.project_configuration.automatic_checkpoint_naming:
            raise ValueError(
                "output_dir is ''; it must be a folder. Pass '.' for the current one, or a name."
            )
        hooks = self._save_hooks.values()
        return states.save_state(
            output_dir,
            self._prepared(),
            self.state,
            self.project_configuration,
            safe_serialization=safe_serialization,
            hooks=hooks,
        )

    def load_state(
        self,
        input_dir: str | os.PathLike[str] | None = None,
        load_kwargs: Mapping[str, Any] | None = None,
        **load_model_func_kwargs: Any,
    ) -> None:
        """Restore all prepared and registered objects from a `save_state` folder; collective.

        Folders written by accelerate can be loaded too. The folder is checked before any object
        changes.

        Args:
            input_dir: The folder; None takes the newest intact one with
                `automatic_checkpoint_naming`.
            load_kwargs: Arguments of ``torch.load``; only ``{"weights_only": True}`` is accepted,
                and it is always in effect.
            **load_model_func_kwargs: Arguments of the models' ``load_state_dict`` such as `strict`,
                and `map_location`: None, ``"cpu"`` or ``"on_device"``.

        Raises:
            ValueError: There is no such folder.
            CheckpointError: The state of a prepared object is missing, damaged or does not match.
            TypeError: `map_location` has another value, or `load_kwargs` another argument.
        """
        if dict(load_kwargs or {}) not in ({}, {"weights_only": True}):
            raise TypeError(
                f"load_kwargs is {load_kwargs!r}, but files are never unpickled; it may only be "
                "{'weights_only': True}. Pass map_location to load_state itself."
            )
        self.step = states.load_state(
            input_dir,
            self._prepared(),
            self.state,
            self.project_configuration,
            hooks=self._load_hooks.values(),
            **load_model_func_kwargs,
        )
        self._accumulated = set()
        # Resume inside the saved accumulation window, so that restored gradients are not zeroed.
        self.sync_gradients = self.step % self.gradient_state.num_steps == 0
        self._steps_at_backward = [
            optimizer.steps if any(p.grad is not None for p in parameters_of([optimizer])) else -1
            for optimizer in self._optimizers
        ]

    def register_for_checkpointing(self, *objects: Any) -> None:
        """Include these objects in `save_state` and `load_state`, in this order.

        Raises:
            ValueError: An object lacks ``state_dict`` or ``load_state_dict``.
        """
        lacking = [
            f"number {number}, a {type(owner).__name__}"
            for number, owner in enumerate(objects)
            if not all(hasattr(owner, name) for name in ("state_dict", "load_state_dict"))
        ]
        if lacking:
            raise ValueError(
                "register_for_checkpointing takes objects with state_dict and load_state_dict; "
                f"these lack one: {'; '.join(lacking)}."
            )
        self._custom_objects.extend(objects)

    def register_save_state_pre_hook(self, hook: Callable[..., None]) -> RemovableHandle:
        """Call ``hook(models, weights, output_dir)`` before a save; `weights` are state dicts.

        Files that the hook writes to `output_dir` become part of the checkpoint; it is a temporary
        folder until the save is complete. State dicts that the hook removes from `weights` are not
        saved. Hooks run on all processes in the same order and may communicate.
        """
        _check_argument("register_save_state_pre_hook", "hook", hook, callable(hook))
        handle = RemovableHandle(self._save_hooks)
        self._save_hooks[handle.id] = hook
        return handle

    def register_load_state_pre_hook(self, hook: Callable[..., None]) -> RemovableHandle:
        """Call ``hook(models, input_dir)`` before a load; models that it removes are skipped."""
        _check_argument("register_load_state_pre_hook", "hook", hook, callable(hook))
        handle = RemovableHandle(self._load_hooks)
        self._load_hooks[handle.id] = hook
        return handle

    @property
    def _collects(self) -> bool:
        """Whether all processes take part in collecting a model's weights."""
        return self.engine.parallel.divides_state

    @property
    def _weights(self) -> Weights:
        """The running engine's view of its models' weights."""
        return (self._run_engine or self.engine).weights

    @property
    def _writes(self) -> bool:
        """Whether this process is a writer rank: it writes the files that are not per rank."""
        if self.project_configuration.save_on_each_node:
            return self.is_local_main_process
        return self.is_main_process

    @property
    def _waiting(self) -> list[AcceleratedOptimizer]:
        """The optimizers that have not stepped since the last backward."""
        then = zip(self._optimizers, self._steps_at_backward, strict=False)
        return [optimizer for optimizer, steps in then if optimizer.steps == steps]

    def _prepared(self) -> PreparedObjects:
        return PreparedObjects(
            models=[_bare(model) for model in self._models],
            optimizers=self._optimizers,
            schedulers=self._schedulers,
            dataloaders=self._dataloaders,
            custom_objects=self._custom_objects,
            scaler=None if self.scaler is None else self.precision,
            step=self.step,
            window_open=not self.sync_gradients,
            waiting=self._waiting,
            communication=[hook for hook in map(communication_of, self._models) if hook],
            engine=self.engine,
        )

    # -- tracking ------------------------------------------------------------------------------

    def init_trackers(
        self,
        project_name: str,
        config: Any = None,
        init_kwargs: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        """Start the runs of the trackers in `log_with`.

        Call it on every process, or only on the main process.

        Args:
            project_name: The name of the run or project.
            config: Hyper-parameters to store with it: a dict, a namespace or a dataclass.
            init_kwargs: Constructor arguments, by tracker name.
        """
        self._tracking.init_trackers(project_name, config, init_kwargs or {})

    def get_tracker(self, name: str, unwrap: bool = False) -> Any:
        """Return the running tracker of that name or, with `unwrap`, its SDK's own run object."""
        return self._tracking.get_tracker(name, unwrap)

    def log(
        self,
        values: Mapping[str, Any],
        step: int | None = None,
        log_kwargs: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        """Record values; `log_kwargs` holds further arguments by tracker name."""
        self._tracking.log(values, step, log_kwargs)

    def log_images(
        self,
        values: Mapping[str, Any],
        step: int | None = None,
        log_kwargs: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        """Record images: names mapped to tensors or arrays."""
        self._tracking.log(values, step, log_kwargs, method="log_images")

    def log_table(
        self,
        table_name: str,
        columns: list[str] | None = None,
        data: list[list[Any]] | None = None,
        dataframe: Any = None,
        step: int | None = None,
        log_kwargs: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        """Record a table, given as columns and rows or as a data frame."""
        if data is None and dataframe is None:
            raise ValueError(
                f"log_table({table_name!r}) has no rows: give `data`, a list of them, or a "
                "`dataframe`."
            )
        table = {"columns": columns, "data": data, "dataframe": dataframe, "step": step}
        self._tracking.record("log_table", table_name, log_kwargs=log_kwargs, **table)

    def log_histogram(
        self,
        values: Mapping[str, Any],
        step: int | None = None,
        log_kwargs: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        """Record histograms: names mapped to tensors or arrays of numbers."""
        self._tracking.log(values, step, log_kwargs, method="log_histogram")

    def log_figure(
        self,
        values: Mapping[str, Any],
        step: int | None = None,
        log_kwargs: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        """Record matplotlib figures, rendered at once: names mapped to figures."""
        self._tracking.log(values, step, log_kwargs, method="log_figure")

    def log_text(
        self,
        values: Mapping[str, Any],
        step: int | None = None,
        log_kwargs: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        """Record texts, such as generated samples: names mapped to texts."""
        self._tracking.log(values, step, log_kwargs, method="log_text")

    def log_artifact(
        self,
        path: str | os.PathLike[str],
        name: str | None = None,
        kind: str = "artifact",
        step: int | None = None,
        log_kwargs: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        """Record a file or folder. It is read asynchronously, so keep it for a while."""
        self._tracking.record(
            "log_artifact", os.fspath(path), name, kind, step=step, log_kwargs=log_kwargs
        )

    def log_model(
        self,
        path: str | os.PathLike[str],
        name: str | None = None,
        step: int | None = None,
        log_kwargs: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        """Record weights or a checkpoint as a version of a model; see `log_artifact`."""
        self._tracking.record("log_model", os.fspath(path), name, step=step, log_kwargs=log_kwargs)

    def end_training(self) -> None:
        """Flush pending records and end the trackers' runs; the process group stays up."""
        self._tracking.end_training()

    def __deepcopy__(self, memo: dict[int, Any]) -> Accelerator:
        # It represents the process group, which cannot be copied.
        return self

    def __repr__(self) -> str:
        return f"Accelerator(\n{self.state})"


def _check_argument(method: str, kind: str, value: object, fits: bool) -> None:
    if not fits:
        raise TypeError(
            f"{method} was given {reprlib.repr(value)} of type {type(value).__name__} as its "
            f"{kind}; it must be {_KINDS[kind]}."
        )


def _note_forward(model: nn.Module, _: Any) -> None:
    if model.training and torch.is_grad_enabled():  # evaluations may have uneven batches
        call_counts.note("forward")


def _bare(model: nn.Module) -> nn.Module:
    return models.unwrap_model(model)


def _with_options(
    config: DataLoaderConfiguration | None, **options: bool | None
) -> DataLoaderConfiguration:
    """Return a copy of the configuration with the options that are not None replaced."""
    options_passed = {name: value for name, value in options.items() if value is not None}
    return replace(config or DataLoaderConfiguration(), **options_passed)


def _chosen_deepspeed(
    plugin: Any, several: Any, other: object, is_first: bool
) -> dict[str, DeepSpeedPlugin] | None:
    """Return the plugins from the arguments, the environment or the first `Accelerator`."""
    if plugin is None and several is None and not is_first:  # it may be for another model
        plugins = AcceleratorState().deepspeed_plugins
    else:
        plugins = DeepSpeedPlugin.requested(plugin, several)
    if plugins is not None and other is not None:
        raise ValueError(
            "deepspeed_plugin (--use_deepspeed) cannot be combined with fsdp_plugin (--use_fsdp) "
            "or parallelism_config (--use_parallelism_config): each divides the model over the "
            "processes. Pass one."
        )
    return plugins


def _warn_of_surroundings(window: GradientAccumulationPlugin) -> None:
    warn_of_old_kernel()
    window.warn_of_variable()


def _chosen_recipe(
    mixed_precision: str, handlers: dict[type, Any]
) -> AORecipeKwargs | TERecipeKwargs | None:
    """Return the recipe of fp8; None in another precision.

    Raises:
        ValueError: There is a recipe, but the precision is not ``"fp8"``.
    """
    if mixed_precision == "fp8":
        return recipe_of(list(handlers.values()))
    if recipes := [kind.__name__ for kind in _RECIPES if kind in handlers]:
        raise ValueError(
            f"kwargs_handlers holds {recipes[0]}, but mixed_precision is {mixed_precision!r}: pass "
            "mixed_precision='fp8', or leave the recipe out."
        )
    return None


def _chosen_megatron(argument: Any, other: object, is_first: bool) -> MegatronLMPlugin | None:
    """Return the plugin from the argument, the environment or the first `Accelerator`."""
    plugin = MegatronLMPlugin.requested(argument)
    if plugin is not None and other:
        raise ValueError(
            "megatron_lm_plugin (--use_megatron_lm) cannot be combined with fsdp_plugin "
            "(--use_fsdp), parallelism_config (--use_parallelism_config) or deepspeed_plugin "
            "(--use_deepspeed): each divides the model over the processes. Pass one."
        )
    if plugin is None and not is_first:
        first: MegatronLMPlugin | None = AcceleratorState().megatron_lm_plugin
        return first
    return plugin


def _chosen_window(
    steps: int | None,
    plugin: GradientAccumulationPlugin | None,
    of_deepspeed: Mapping[str, DeepSpeedPlugin] | None,
) -> GradientAccumulationPlugin:
    for deepspeed in (of_deepspeed or {}).values():
        of_plugin = deepspeed.gradient_accumulation_steps
        number = steps if plugin is None else plugin.num_steps
        if isinstance(of_plugin, int) and number not in (None, 1, of_plugin):
            raise ValueError(
                f"gradient_accumulation_steps is {number}, but the DeepSpeed configuration has "
                f"{of_plugin}: set it to 'auto' there."
            )
        if isinstance(of_plugin, int) and plugin is None:
            steps = of_plugin
    check_type("gradient_accumulation_plugin", plugin, GradientAccumulationPlugin)
    if plugin is None:
        if steps is not None:
            check_counts(1, gradient_accumulation_steps=steps)
        return GradientAccumulationPlugin(num_steps=steps)
    if steps not in (None, 1):
        raise ValueError(
            "Pass gradient_accumulation_steps or gradient_accumulation_plugin, not both; the "
            f"plugin has num_steps={plugin.num_steps}, the argument is {steps}."
        )
    return plugin


def _chosen_dynamo(backend: str | None, plugin: TorchDynamoPlugin | None) -> TorchDynamoPlugin:
    """Return the plugin from the arguments or the environment, never another `Accelerator`'s."""
    fix = f"Pass dynamo_backend={plugin!r}." if isinstance(plugin, str) else ""
    check_type("dynamo_plugin", plugin, TorchDynamoPlugin, fix)
    if plugin is None:
        return TorchDynamoPlugin(backend=backend)
    if backend is not None:
        raise ValueError(
            "Pass dynamo_backend or dynamo_plugin, not both; the plugin has "
            f"backend={plugin.backend}, the argument is {backend}."
        )
    return plugin


def _check_limit(name: str, limit: Any) -> None:
    """Raise for an invalid limit; a tensor is not read, since that would wait for the device."""
    if isinstance(limit, Tensor):
        return
    check_numbers(**{name: limit})
    if limit < 0:
        raise ValueError(f"{name} is {limit!r}; it must be 0 or more.")


def _by_type(handlers: Sequence[KwargsHandler]) -> dict[type, Any]:
    if isinstance(handlers, str) or not isinstance(handlers, Iterable):
        one = isinstance(handlers, KwargsHandler)
        shown = f"{type(handlers).__name__}(...)" if one else repr(handlers)
        raise TypeError(f"kwargs_handlers is {shown}; it must be a list: [{shown}].")
    by_type: dict[type, Any] = {}
    for handler in handlers:
        if type(handler) not in _HANDLERS:
            raise TypeError(
                f"kwargs_handlers holds {handler!r}; it takes "
                f"{', '.join(kind.__name__ for kind in _HANDLERS)}."
            )
        if type(handler) in by_type:
            raise ValueError(f"kwargs_handlers holds two {type(handler).__name__}; give one.")
        by_type[type(handler)] = handler
    return by_type
