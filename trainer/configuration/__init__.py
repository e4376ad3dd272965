"""Configurations: keyword-only dataclasses that validate their values.

Fields may also declare an environment variable, a key in the file of `trainer config` or an option
of `trainer launch`; see `fields.setting`.
"""

from trainer.configuration.deepspeed import DeepSpeedPlugin
from trainer.configuration.dynamo import TorchDynamoPlugin
from trainer.configuration.fp8 import (
    AORecipeKwargs,
    FP8RecipeKwargs,
    MSAMPRecipeKwargs,
    TERecipeKwargs,
    recipe_of,
)
from trainer.configuration.fsdp import FullyShardedDataParallelPlugin
from trainer.configuration.handlers import (
    AutocastKwargs,
    DistributedDataParallelKwargs,
    GradientAccumulationPlugin,
    GradScalerKwargs,
    InitProcessGroupKwargs,
    KwargsHandler,
    ProfileKwargs,
)
from trainer.configuration.loaders import DataLoaderConfiguration
from trainer.configuration.megatron import MegatronLMPlugin
from trainer.configuration.parallelism import (
    DeepSpeedSequenceParallelConfig,
    ParallelismConfig,
    TorchContextParallelConfig,
    TorchTensorParallelConfig,
    TorchTensorParallelPlugin,
)
from trainer.configuration.project import ProjectConfiguration

__all__ = [
    "AORecipeKwargs",
    "AutocastKwargs",
    "DataLoaderConfiguration",
    "DeepSpeedPlugin",
    "DeepSpeedSequenceParallelConfig",
    "DistributedDataParallelKwargs",
    "FP8RecipeKwargs",
    "FullyShardedDataParallelPlugin",
    "GradScalerKwargs",
    "GradientAccumulationPlugin",
    "InitProcessGroupKwargs",
    "KwargsHandler",
    "MSAMPRecipeKwargs",
    "MegatronLMPlugin",
    "ParallelismConfig",
    "ProfileKwargs",
    "ProjectConfiguration",
    "TERecipeKwargs",
    "TorchContextParallelConfig",
    "TorchDynamoPlugin",
    "TorchTensorParallelConfig",
    "TorchTensorParallelPlugin",
    "recipe_of",
]
