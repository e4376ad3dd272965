"""The helpers of the documented API, under the names by which scripts import them.

Most are defined in other modules; those about the availability of packages and devices, and some
for nested containers, are here, for scripts. No other module of Cadence imports this one.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch
from torch import Generator, Tensor, nn
from torch.torch_version import TorchVersion

from trainer import environment
from trainer.checkpoint.loading import load_checkpoint_in_model
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
from trainer.tree import (
    children,
    concatenate,
    convert_to_fp32,
    leaves,
    map_tree,
    rebuild,
    send_to_device,
    slice_tensors,
)
from trainer.tree import required_batch_size as find_batch_size

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
    "PrecisionType",
    "ProjectConfiguration",
    "RNGType",
    "TERecipeKwargs",
    "TorchDynamoPlugin",
    "TorchTensorParallelPlugin",
    "broadcast",
    "broadcast_object_list",
    "clear_environment",
    "concatenate",
    "convert_outputs_to_fp32",
    "convert_to_fp32",
    "debug_launcher",
    "extract_model_from_parallel",
    "find_batch_size",
    "find_device",
    "find_executable_batch_size",
    "gather",
    "gather_object",
    "get_data_structure",
    "honor_type",
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
    "merge_dicts",
    "notebook_launcher",
    "pad_across_processes",
    "pad_input_tensors",
    "parse_flag_from_env",
    "patch_environment",
    "recursively_apply",
    "reduce",
    "release_memory",
    "save",
    "send_to_device",
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


# -- packages, devices, versions, settings ---------------------------------------------------------

_OPERATIONS = {
    ">": operator.gt,
    ">=": operator.ge,
    "==": operator.eq,
    "!=": operator.ne,
    "<=": operator.le,
    "<": operator.lt,
}


def is_tensorboard_available() -> bool:
    """Return whether TensorBoard or tensorboardX is installed."""
    return find_spec("tensorboard") is not None or find_spec("tensorboardX") is not None


def is_wandb_available() -> bool:
    """Return whether wandb is installed."""
    return find_spec("wandb") is not None


def is_comet_ml_available() -> bool:
    """Return whether comet_ml is installed."""
    return find_spec("comet_ml") is not None


def is_deepspeed_available() -> bool:
    """Return whether DeepSpeed is installed."""
    return find_spec("deepspeed") is not None


def is_torch_xla_available(check_is_tpu: bool = False, check_is_gpu: bool = False) -> bool:
    """Return whether XLA devices can be used: always False, they are not supported yet."""
    del check_is_tpu, check_is_gpu
    return False


def is_npu_available(check_device: bool = False) -> bool:
    """Return whether NPUs can be used: always False, they are not supported yet."""
    del check_device
    return False


def is_cuda_available() -> bool:
    """Return whether there is a CUDA device."""
    return torch.cuda.is_available()


def is_xpu_available(check_device: bool = False) -> bool:
    """Return whether there is an XPU device."""
    del check_device
    return torch.xpu.is_available()


def is_mps_available() -> bool:
    """Return whether there is an MPS device."""
    return torch.backends.mps.is_available()


def is_bf16_available(ignore_tpu: bool = False) -> bool:
    """Return whether the default device supports bfloat16."""
    del ignore_tpu
    return not torch.cuda.is_available() or torch.cuda.is_bf16_supported()


def is_torch_version(operation: str, version: str) -> bool:
    """Compare torch's version: ``is_torch_version(">=", "2.4")``.

    Raises:
        ValueError: The operation is not one of ``> >= == != <= <``.
    """
    if operation not in _OPERATIONS:
        raise ValueError(f"operation is {operation!r}; it must be one of {', '.join(_OPERATIONS)}.")
    # Drop the local version after "+", which describes the build.
    found = TorchVersion(torch.__version__.partition("+")[0])
    return bool(_OPERATIONS[operation](found, TorchVersion(version)))


def str_to_bool(value: str) -> int:
    """Return 1 for a true value such as ``"yes"``, 0 for a false one such as ``"no"``.

    Raises:
        ValueError: The value is neither.
    """
    if value.lower() in environment.TRUE:
        return 1
    if value and value.lower() in environment.FALSE:
        return 0
    raise ValueError(f"value is {value!r}; it must be a bool, such as 'true', 'no' or '0'.")


def parse_flag_from_env(key: str, default: bool = False) -> bool:
    """Return an environment variable as a bool; `default` if it is not set.

    Raises:
        ValueError: The variable is neither a true nor a false value.
    """
    return environment.read_flag(key, default)


# -- nested containers -----------------------------------------------------------------------------


@dataclass
class TensorInformation:
    """The shape and dtype of a tensor, without its values."""

    shape: torch.Size
    dtype: torch.dtype


def is_tensor(value: Any) -> bool:
    """Return whether a value is a tensor."""
    return isinstance(value, Tensor)


def honor_type(obj: Any, generator: Iterable[Any]) -> Any:
    """Return a generator's items in a list or tuple with the class and attributes of `obj`."""
    return rebuild(obj, list(generator))


def recursively_apply(
    func: Callable[..., Any],
    data: Any,
    *args: Any,
    test_type: Callable[[Any], bool] = is_tensor,
    error_on_other_type: bool = False,
    **kwargs: Any,
) -> Any:
    """Apply a function to the objects that pass a test in nested lists, tuples and mappings.

    Args:
        func: Called with each such object, `args` and `kwargs`.
        data: The containers; they are not changed. Containers that pass the test are not entered.
        *args: Further arguments of `func`.
        test_type: The test; by default whether the object is a tensor.
        error_on_other_type: Raise for other objects; by default they are returned unchanged.
        **kwargs: Further arguments of `func`.

    Raises:
        TypeError: There is another object and `error_on_other_type` is True.
    """
    if isinstance(data, (list, tuple, Mapping)) and not test_type(data):

        def again(value: Any) -> Any:
            return recursively_apply(
                func,
                value,
                *args,
                test_type=test_type,
                error_on_other_type=error_on_other_type,
                **kwargs,
            )

        return rebuild(data, [again(value) for _, value in children(data) or ()])
    if test_type(data):
        return func(data, *args, **kwargs)
    if error_on_other_type:
        raise TypeError(
            f"{getattr(func, '__name__', func)} found a {type(data).__name__}, which "
            f"{getattr(test_type, '__name__', test_type)} does not accept."
        )
    return data


def find_device(data: Any) -> torch.device | None:
    """Return the device of the first tensor in nested containers; None without a tensor."""
    return next((leaf.device for leaf in leaves(data) if isinstance(leaf, Tensor)), None)


def listify(data: Any) -> Any:
    """Return the containers with each tensor as a number or nested lists of numbers."""
    return map_tree(lambda leaf: leaf.detach().tolist() if is_tensor(leaf) else leaf, data)


def get_data_structure(data: Any) -> Any:
    """Return the containers with each tensor replaced by its `TensorInformation`."""
    return map_tree(
        lambda leaf: TensorInformation(leaf.shape, leaf.dtype) if is_tensor(leaf) else leaf, data
    )


def initialize_tensors(data_structure: Any) -> Any:
    """Return uninitialised tensors for a result of `get_data_structure`."""
    return recursively_apply(
        lambda each: torch.empty(each.shape, dtype=each.dtype),
        data_structure,
        test_type=lambda value: isinstance(value, TensorInformation),
    )


def pad_input_tensors(tensor: Any, batch_size: int, num_processes: int, dim: int = 0) -> Any:
    """Pad every tensor with zeros so that it can be divided evenly among the processes.

    Args:
        tensor: Tensors in nested containers.
        batch_size: Their size along `dim`.
        num_processes: The padded size is a multiple of this number.
        dim: The dimension to pad.

    Raises:
        TypeError: A leaf is not a tensor.
    """

    def pad(leaf: Tensor) -> Tensor:
        shape = list(leaf.shape)
        shape[dim] = -batch_size % num_processes
        return torch.cat([leaf, leaf.new_zeros(shape)], dim=dim)

    return recursively_apply(pad, tensor, error_on_other_type=True)


def convert_outputs_to_fp32(model_forward: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function to convert float16 and bfloat16 tensors in its result to float32."""

    @functools.wraps(model_forward)
    def forward(*args: Any, **kwargs: Any) -> Any:
        return convert_to_fp32(model_forward(*args, **kwargs))

    return forward


def merge_dicts(source: Mapping[str, Any], destination: dict[str, Any]) -> dict[str, Any]:
    """Merge `source` recursively into `destination`, which is changed and returned."""
    for key, value in source.items():
        if isinstance(value, dict):
            merge_dicts(value, destination.setdefault(key, {}))
        else:
            destination[key] = value
    return destination
