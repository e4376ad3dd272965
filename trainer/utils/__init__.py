"""The helpers of the documented API, under the names by which scripts import them.

Most are defined in other modules. Those that exist for scripts alone are in this package; no other
module of Cadence imports it.
"""

from __future__ import annotations

from typing import Any

from torch import Generator, nn

from trainer.big_models import (
    OffloadedWeightsLoader,
    PrefixedDataset,
    align_module_device,
    check_device_map,
    compute_module_sizes,
    extract_submodules_state_dict,
    find_tied_parameters,
    get_balanced_memory,
    get_max_layer_size,
    get_max_memory,
    has_offloaded_params,
    infer_auto_device_map,
    load_checkpoint_in_model,
    load_offloaded_weight,
    load_offloaded_weights,
    load_state_dict,
    named_module_tensors,
    offload_state_dict,
    offload_weight,
    retie_parameters,
    save_offload_index,
    set_module_tensor_to_device,
)
from trainer.checkpoint.objects import load, save
from trainer.checkpoint.weights import BIN_NAME as WEIGHTS_NAME
from trainer.checkpoint.weights import INDEX_SUFFIX
from trainer.checkpoint.weights import WEIGHTS_NAME as SAFE_WEIGHTS_NAME
from trainer.configuration import (
    AORecipeKwargs,
    AutocastKwargs,
    DataLoaderConfiguration,
    DistributedDataParallelKwargs,
    FP8RecipeKwargs,
    GradientAccumulationPlugin,
    GradScalerKwargs,
    InitProcessGroupKwargs,
    KwargsHandler,
    MSAMPRecipeKwargs,
    ProjectConfiguration,
    TERecipeKwargs,
)
from trainer.deepspeed_plugin import (
    DeepSpeedPlugin,
    DummyOptim,
    DummyScheduler,
    HfDeepSpeedConfig,
)
from trainer.distributed.collectives import broadcast, gather, pad_across_processes
from trainer.distributed.collectives import reduce as _reduce
from trainer.distributed.objects import broadcast_object_list, gather_object
from trainer.engines.model import unwrap_model
from trainer.enums import (
    DDPCommunicationHookType,
    DistributedType,
    DynamoBackend,
    FP8BackendType,
    LoggerType,
    PrecisionType,
    RNGType,
)
from trainer.environment import clear_environment, patch_environment
from trainer.errors import DistributedOperationException
from trainer.launchers import debug_launcher, notebook_launcher
from trainer.memory import find_executable_batch_size, release_memory
from trainer.parallelism import FullyShardedDataParallelPlugin, TorchTensorParallelPlugin
from trainer.plugins import MegatronLMPlugin, TorchDynamoPlugin
from trainer.rng import set_seed, synchronize_rng_states
from trainer.state import PartialState
from trainer.tree import concatenate, convert_to_fp32, send_to_device, slice_tensors
from trainer.tree import required_batch_size as find_batch_size
from trainer.utils.availability import (
    is_bf16_available,
    is_comet_ml_available,
    is_cuda_available,
    is_deepspeed_available,
    is_mps_available,
    is_npu_available,
    is_tensorboard_available,
    is_torch_version,
    is_torch_xla_available,
    is_wandb_available,
    is_xpu_available,
    parse_flag_from_env,
    str_to_bool,
)
from trainer.utils.containers import (
    convert_outputs_to_fp32,
    find_device,
    get_data_structure,
    honor_type,
    initialize_tensors,
    listify,
    merge_dicts,
    pad_input_tensors,
    recursively_apply,
)

__all__ = [
    "SAFE_WEIGHTS_INDEX_NAME",
    "SAFE_WEIGHTS_NAME",
    "WEIGHTS_INDEX_NAME",
    "WEIGHTS_NAME",
    "AORecipeKwargs",
    "AutocastKwargs",
    "DDPCommunicationHookType",
    "DataLoaderConfiguration",
    "DeepSpeedPlugin",
    "DistributedDataParallelKwargs",
    "DistributedOperationException",
    "DistributedType",
    "DummyOptim",
    "DummyScheduler",
    "DynamoBackend",
    "FP8BackendType",
    "FP8RecipeKwargs",
    "FullyShardedDataParallelPlugin",
    "GradScalerKwargs",
    "GradientAccumulationPlugin",
    "HfDeepSpeedConfig",
    "InitProcessGroupKwargs",
    "KwargsHandler",
    "LoggerType",
    "MSAMPRecipeKwargs",
    "MegatronLMPlugin",
    "OffloadedWeightsLoader",
    "PrecisionType",
    "PrefixedDataset",
    "ProjectConfiguration",
    "RNGType",
    "TERecipeKwargs",
    "TorchDynamoPlugin",
    "TorchTensorParallelPlugin",
    "align_module_device",
    "broadcast",
    "broadcast_object_list",
    "check_device_map",
    "clear_environment",
    "compute_module_sizes",
    "concatenate",
    "convert_outputs_to_fp32",
    "convert_to_fp32",
    "debug_launcher",
    "extract_model_from_parallel",
    "extract_submodules_state_dict",
    "find_batch_size",
    "find_device",
    "find_executable_batch_size",
    "find_tied_parameters",
    "gather",
    "gather_object",
    "get_balanced_memory",
    "get_data_structure",
    "get_max_layer_size",
    "get_max_memory",
    "has_offloaded_params",
    "honor_type",
    "infer_auto_device_map",
    "initialize_tensors",
    "is_bf16_available",
    "is_comet_ml_available",
    "is_cuda_available",
    "is_deepspeed_available",
    "is_mps_available",
    "is_npu_available",
    "is_tensorboard_available",
    "is_torch_version",
    "is_torch_xla_available",
    "is_wandb_available",
    "is_xpu_available",
    "listify",
    "load",
    "load_checkpoint_in_model",
    "load_offloaded_weight",
    "load_offloaded_weights",
    "load_state_dict",
    "merge_dicts",
    "named_module_tensors",
    "notebook_launcher",
    "offload_state_dict",
    "offload_weight",
    "pad_across_processes",
    "pad_input_tensors",
    "parse_flag_from_env",
    "patch_environment",
    "recursively_apply",
    "reduce",
    "release_memory",
    "retie_parameters",
    "save",
    "save_offload_index",
    "send_to_device",
    "set_module_tensor_to_device",
    "set_seed",
    "slice_tensors",
    "str_to_bool",
    "synchronize_rng_state",
    "synchronize_rng_states",
    "tqdm",
    "wait_for_everyone",
]

WEIGHTS_INDEX_NAME = WEIGHTS_NAME + INDEX_SUFFIX
SAFE_WEIGHTS_INDEX_NAME = SAFE_WEIGHTS_NAME + INDEX_SUFFIX


def reduce(tensor: Any, reduction: str = "mean", scale: float = 1.0) -> Any:
    """As `Accelerator.reduce`, except that the mean is the default."""
    return _reduce(tensor, reduction, scale)


def wait_for_everyone() -> None:
    """As `Accelerator.wait_for_everyone`."""
    PartialState().wait_for_everyone()


def synchronize_rng_state(rng_type: str | RNGType, generator: Generator | None = None) -> None:
    """As `synchronize_rng_states`, for one type."""
    synchronize_rng_states([rng_type], generator)


def extract_model_from_parallel(
    model: nn.Module,
    keep_fp32_wrapper: bool = True,
    keep_torch_compile: bool = True,
    recursive: bool = False,
) -> nn.Module:
    """As `Accelerator.unwrap_model`.

    Raises:
        NotImplementedError: `recursive` is True, to unwrap submodules too.
    """
    if recursive:
        raise NotImplementedError(
            "extract_model_from_parallel unwraps the model but not its submodules; call it for "
            "each of those, without recursive=True."
        )
    return unwrap_model(model, keep_fp32_wrapper, keep_torch_compile)


def tqdm(*args: Any, main_process_only: bool = True, **kwargs: Any) -> Any:
    """Return a ``tqdm.auto.tqdm`` that is shown on the local main process of each machine only.

    Args:
        *args: Arguments of ``tqdm``.
        main_process_only: False shows a bar on every process.
        **kwargs: Arguments of ``tqdm``.
    """
    from tqdm.auto import tqdm as bar

    hidden = main_process_only and not PartialState().is_local_main_process
    return bar(*args, **kwargs | {"disable": True if hidden else kwargs.get("disable", False)})
