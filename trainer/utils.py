"""The helpers of the documented API under the name that scripts import them by.

Each is at home in another module; nothing of Cadence imports this one.
"""

from trainer.checkpoint import load_checkpoint_in_model
from trainer.checkpoint.objects import load, save
from trainer.configuration import (
    AutocastKwargs,
    DataLoaderConfiguration,
    DistributedDataParallelKwargs,
    DistributedType,
    DynamoBackend,
    FP8RecipeKwargs,
    GradientAccumulationPlugin,
    GradScalerKwargs,
    InitProcessGroupKwargs,
    KwargsHandler,
    LoggerType,
    PrecisionType,
    ProjectConfiguration,
    RNGType,
)
from trainer.distributed.collectives import (
    broadcast,
    broadcast_object_list,
    gather,
    gather_object,
    pad_across_processes,
    reduce,
)
from trainer.environment import clear_environment, patch_environment
from trainer.errors import DistributedOperationException
from trainer.memory import find_executable_batch_size, release_memory
from trainer.plugins import (
    DeepSpeedPlugin,
    FullyShardedDataParallelPlugin,
    MegatronLMPlugin,
    TorchDynamoPlugin,
)
from trainer.rng import set_seed, synchronize_rng_states
from trainer.tree import (
    concatenate,
    convert_to_fp32,
    find_batch_size,
    send_to_device,
    slice_tensors,
)

__all__ = [
    "AutocastKwargs",
    "DataLoaderConfiguration",
    "DeepSpeedPlugin",
    "DistributedDataParallelKwargs",
    "DistributedOperationException",
    "DistributedType",
    "DynamoBackend",
    "FP8RecipeKwargs",
    "FullyShardedDataParallelPlugin",
    "GradScalerKwargs",
    "GradientAccumulationPlugin",
    "InitProcessGroupKwargs",
    "KwargsHandler",
    "LoggerType",
    "MegatronLMPlugin",
    "PrecisionType",
    "ProjectConfiguration",
    "RNGType",
    "TorchDynamoPlugin",
    "broadcast",
    "broadcast_object_list",
    "clear_environment",
    "concatenate",
    "convert_to_fp32",
    "find_batch_size",
    "find_executable_batch_size",
    "gather",
    "gather_object",
    "load",
    "load_checkpoint_in_model",
    "pad_across_processes",
    "patch_environment",
    "reduce",
    "release_memory",
    "save",
    "send_to_device",
    "set_seed",
    "slice_tensors",
    "synchronize_rng_states",
]
