"""Cadence: a PyTorch trainer that resumes, accumulates and evaluates exactly.

Public names are imported lazily, on first use: a script that only needs the `Accelerator` does not
load the `Trainer`, and ``import trainer`` costs next to nothing compared with ``import torch``.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from trainer._siblings import check_siblings, conflicts, version

check_siblings()

if TYPE_CHECKING:
    from trainer.accelerator import Accelerator
    from trainer.big_models import (
        cpu_offload,
        cpu_offload_with_hook,
        disk_offload,
        dispatch_model,
        infer_auto_device_map,
        init_empty_weights,
        init_on_device,
        load_checkpoint_and_dispatch,
        load_checkpoint_in_model,
    )
    from trainer.big_models.pipeline import PipelineParallel, prepare_pippy
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
    )
    from trainer.data.combined import CombinedLoader
    from trainer.data.prepare import skip_first_batches
    from trainer.datamodule import DataModule
    from trainer.distributed.objects import gather_object
    from trainer.enums import (
        DDPCommunicationHookType,
        DistributedType,
        DynamoBackend,
        FP8BackendType,
        LoggerType,
        PrecisionType,
        RNGType,
    )
    from trainer.errors import (
        CheckpointError,
        DistributedOperationException,
        MetricError,
        Preempted,
    )
    from trainer.launch.notebook import debug_launcher, notebook_launcher
    from trainer.local_sgd import LocalSGD
    from trainer.logging import get_logger
    from trainer.memory import find_executable_batch_size, release_memory
    from trainer.module import TrainModule
    from trainer.rng import set_seed, synchronize_rng_states
    from trainer.state import AcceleratorState, GradientState, PartialState
    from trainer.trainer import Trainer
    from trainer.tuning import Tuner

_HOME = {
    "Accelerator": "accelerator",
    "AcceleratorState": "state",
    "AutocastKwargs": "configuration",
    "CheckpointError": "errors",
    "CombinedLoader": "data.combined",
    "DDPCommunicationHookType": "enums",
    "DataLoaderConfiguration": "configuration",
    "DataModule": "datamodule",
    "DeepSpeedPlugin": "configuration",
    "DistributedDataParallelKwargs": "configuration",
    "DistributedOperationException": "errors",
    "DistributedType": "enums",
    "DynamoBackend": "enums",
    "FP8RecipeKwargs": "configuration",
    "AORecipeKwargs": "configuration",
    "MSAMPRecipeKwargs": "configuration",
    "TERecipeKwargs": "configuration",
    "FP8BackendType": "enums",
    "FullyShardedDataParallelPlugin": "configuration",
    "ParallelismConfig": "configuration",
    "TorchTensorParallelPlugin": "configuration",
    "GradScalerKwargs": "configuration",
    "GradientAccumulationPlugin": "configuration",
    "GradientState": "state",
    "InitProcessGroupKwargs": "configuration",
    "KwargsHandler": "configuration",
    "LoggerType": "enums",
    "MegatronLMPlugin": "configuration",
    "MetricError": "errors",
    "PartialState": "state",
    "PipelineParallel": "big_models.pipeline",
    "PrecisionType": "enums",
    "LocalSGD": "local_sgd",
    "Preempted": "errors",
    "ProfileKwargs": "configuration",
    "ProjectConfiguration": "configuration",
    "RNGType": "enums",
    "TorchDynamoPlugin": "configuration",
    "TrainModule": "module",
    "Trainer": "trainer",
    "Tuner": "tuning",
    "cpu_offload": "big_models",
    "cpu_offload_with_hook": "big_models",
    "debug_launcher": "launch.notebook",
    "disk_offload": "big_models",
    "dispatch_model": "big_models",
    "find_executable_batch_size": "memory",
    "gather_object": "distributed.objects",
    "get_logger": "logging",
    "infer_auto_device_map": "big_models",
    "init_empty_weights": "big_models",
    "init_on_device": "big_models",
    "load_checkpoint_and_dispatch": "big_models",
    "load_checkpoint_in_model": "big_models",
    "notebook_launcher": "launch.notebook",
    "prepare_pippy": "big_models.pipeline",
    "release_memory": "memory",
    "set_seed": "rng",
    "skip_first_batches": "data.prepare",
    "synchronize_rng_states": "rng",
}

# Available after ``import trainer`` alone.
_MODULES = ("big_models", "launchers", "local_sgd", "logging", "state", "tracking", "utils")

__all__ = [
    "AORecipeKwargs",
    "Accelerator",
    "AcceleratorState",
    "AutocastKwargs",
    "CheckpointError",
    "CombinedLoader",
    "DDPCommunicationHookType",
    "DataLoaderConfiguration",
    "DataModule",
    "DeepSpeedPlugin",
    "DistributedDataParallelKwargs",
    "DistributedOperationException",
    "DistributedType",
    "DynamoBackend",
    "FP8BackendType",
    "FP8RecipeKwargs",
    "FullyShardedDataParallelPlugin",
    "GradScalerKwargs",
    "GradientAccumulationPlugin",
    "GradientState",
    "InitProcessGroupKwargs",
    "KwargsHandler",
    "LocalSGD",
    "LoggerType",
    "MSAMPRecipeKwargs",
    "MegatronLMPlugin",
    "MetricError",
    "ParallelismConfig",
    "PartialState",
    "PipelineParallel",
    "PrecisionType",
    "Preempted",
    "ProfileKwargs",
    "ProjectConfiguration",
    "RNGType",
    "TERecipeKwargs",
    "TorchDynamoPlugin",
    "TorchTensorParallelPlugin",
    "TrainModule",
    "Trainer",
    "Tuner",
    "cpu_offload",
    "cpu_offload_with_hook",
    "debug_launcher",
    "disk_offload",
    "dispatch_model",
    "find_executable_batch_size",
    "gather_object",
    "get_logger",
    "infer_auto_device_map",
    "init_empty_weights",
    "init_on_device",
    "load_checkpoint_and_dispatch",
    "load_checkpoint_in_model",
    "notebook_launcher",
    "prepare_pippy",
    "release_memory",
    "set_seed",
    "skip_first_batches",
    "synchronize_rng_states",
]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return import_module(f"trainer.{name}")
    if name == "__version__":
        return version()
    if name not in _HOME:
        raise AttributeError(f"module 'trainer' has no attribute {name!r}")
    try:
        value = globals()[name] = getattr(import_module(f"trainer.{_HOME[name]}"), name)
    except (ImportError, AttributeError) as error:
        if known := conflicts():
            raise ImportError(" ".join(known)) from error
        raise
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
