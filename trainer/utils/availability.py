"""Query installed packages, devices, versions and settings."""

from __future__ import annotations

import functools
import operator
import sys
from collections.abc import Callable, Sequence
from importlib import import_module, metadata
from importlib.util import find_spec
from typing import ParamSpec, TypeVar

import torch
import torch.distributed as dist
from torch.torch_version import TorchVersion

from trainer import environment, xla

P = ParamSpec("P")
R = TypeVar("R")

_OPERATIONS = {
    ">": operator.gt,
    ">=": operator.ge,
    "==": operator.eq,
    "!=": operator.ne,
    "<=": operator.le,
    "<": operator.lt,
}


def _installed(*modules: str) -> Callable[[], bool]:
    """Return a function that returns whether a package with one of these modules is installed."""

    def probe() -> bool:
        return any(find_spec(name) is not None for name in modules)

    probe.__doc__ = f"Return whether {' or '.join(modules)} is installed."
    return probe


is_aim_available = _installed("aim")
is_amdsmi_available = _installed("amdsmi")
is_boto3_available = _installed("boto3")
is_clearml_available = _installed("clearml")
is_comet_ml_available = _installed("comet_ml")
is_datasets_available = _installed("datasets")
is_deepspeed_available = _installed("deepspeed")
is_dvclive_available = _installed("dvclive")
is_import_timer_available = _installed("import_timer")
is_lomo_available = _installed("lomo_optim")
is_matplotlib_available = _installed("matplotlib")
is_mlflow_available = _installed("mlflow")
is_msamp_available = _installed("msamp")
is_pandas_available = _installed("pandas")
is_peft_available = _installed("peft")
is_pynvml_available = _installed("pynvml")
is_pytest_available = _installed("pytest")
is_sagemaker_available = _installed("sagemaker")
is_schedulefree_available = _installed("schedulefree")
is_swanlab_available = _installed("swanlab")
is_tensorboard_available = _installed("tensorboard", "tensorboardX")
is_timm_available = _installed("timm")
is_torchao_available = _installed("torchao")
is_torchdata_available = _installed("torchdata")
is_torchvision_available = _installed("torchvision")
is_trackio_available = _installed("trackio")
is_transformer_engine_available = _installed("transformer_engine")
is_transformers_available = _installed("transformers")
is_triton_available = _installed("triton")
is_wandb_available = _installed("wandb")


def is_bnb_available(min_version: str | None = None) -> bool:
    """Return whether bitsandbytes is installed, in that version or a later one."""
    if find_spec("bitsandbytes") is None:
        return False
    return min_version is None or compare_versions("bitsandbytes", ">=", min_version)


def is_4bit_bnb_available() -> bool:
    """Return whether bitsandbytes is installed and has 4-bit layers."""
    return is_bnb_available("0.39.0")


def is_8bit_bnb_available() -> bool:
    """Return whether bitsandbytes is installed and has 8-bit layers."""
    return is_bnb_available("0.37.2")


def is_bitsandbytes_multi_backend_available() -> bool:
    """Return whether bitsandbytes is installed and works on devices other than CUDA."""
    if not is_bnb_available():
        return False
    return "multi_backend" in getattr(import_module("bitsandbytes"), "features", set())


def is_torchdata_stateful_dataloader_available() -> bool:
    """Return whether torchdata is installed and has a ``StatefulDataLoader``.

    Cadence does not need it: prepared loaders have their own ``state_dict``.
    """
    return is_torchdata_available() and compare_versions("torchdata", ">=", "0.8.0")


def is_rich_available() -> bool:
    """Return whether rich is installed and ``ACCELERATE_ENABLE_RICH`` is true."""
    return find_spec("rich") is not None and environment.read_flag("ACCELERATE_ENABLE_RICH")


def is_weights_only_available() -> bool:
    """Return whether ``torch.load`` has the argument `weights_only`: always True."""
    return True


def is_pippy_available() -> bool:
    """Return whether torch has pipeline parallelism: always True."""
    return True


def is_fp8_available() -> bool:
    """Return whether a library of ``mixed_precision="fp8"`` is installed."""
    return is_torchao_available() or is_transformer_engine_available()


def is_transformer_engine_mxfp8_available() -> bool:
    """Return whether TransformerEngine is installed and this device has MXFP8."""
    if not is_transformer_engine_available():
        return False
    return bool(import_module("transformer_engine.pytorch.fp8").check_mxfp8_support()[0])


def is_megatron_lm_available() -> bool:
    """Return whether Megatron-LM is installed and ``ACCELERATE_USE_MEGATRON_LM`` is true."""
    return environment.read_flag("ACCELERATE_USE_MEGATRON_LM") and find_spec("megatron") is not None


def is_torch_xla_available(check_is_tpu: bool = False, check_is_gpu: bool = False) -> bool:
    """Return whether torch_xla is installed and ``PJRT_DEVICE`` selects its devices.

    Args:
        check_is_tpu: Also require TPUs.
        check_is_gpu: Also require GPUs.

    Raises:
        ValueError: Both are True.
    """
    if check_is_tpu and check_is_gpu:
        raise ValueError("Pass check_is_tpu or check_is_gpu, not both.")
    kinds = ("TPU",) * check_is_tpu + ("CUDA", "GPU") * check_is_gpu
    return xla.is_available() and (not kinds or environment.read("PJRT_DEVICE") in kinds)


def is_npu_available(check_device: bool = False) -> bool:
    """Return whether devices of this kind can be used: always False, they are not supported yet.

    `is_mlu_available`, `is_musa_available`, `is_sdaa_available` and `is_neuron_available` are the
    same function; each of these devices needs a package in addition to torch.
    """
    del check_device
    return False


is_mlu_available = is_musa_available = is_sdaa_available = is_neuron_available = is_npu_available


def is_hpu_available(init_hccl: bool = False) -> bool:
    """Return whether Gaudi devices can be used: always False, they are not supported yet."""
    del init_hccl
    return False


def is_habana_gaudi1() -> bool:
    """Return whether the device is a first-generation Gaudi: always False."""
    return False


def is_rocm_available() -> bool:
    """Return whether there is an AMD device."""
    return torch.version.hip is not None and torch.cuda.is_available()


def is_xccl_available() -> bool:
    """Return whether this torch build has XCCL, the backend for Intel GPUs."""
    return dist.is_available() and dist.is_xccl_available()


def is_fp16_available() -> bool:
    """Return whether the default device supports float16: always True."""
    return True


def torchao_required(func: Callable[P, R]) -> Callable[P, R]:
    """Decorator: calls raise an ``ImportError`` unless torchao is installed."""
    return _required(func, is_torchao_available, "pip install torchao")


def deepspeed_required(func: Callable[P, R]) -> Callable[P, R]:
    """Decorator: calls raise an ``ImportError`` unless DeepSpeed is installed."""
    return _required(func, is_deepspeed_available, "pip install deepspeed")


def _required(func: Callable[P, R], probe: Callable[[], bool], fix: str) -> Callable[P, R]:
    @functools.wraps(func)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if not probe():
            raise ImportError(f"{func.__name__} needs a package that is not installed: {fix}.")
        return func(*args, **kwargs)

    return call


def is_cuda_available() -> bool:
    """Return whether there is a CUDA device."""
    return torch.cuda.is_available()


def is_xpu_available(check_device: bool = False) -> bool:
    """Return whether there is an XPU device."""
    del check_device
    return torch.xpu.is_available()


def is_mps_available(min_version: str = "1.12") -> bool:
    """Return whether there is an MPS device; every supported torch is newer than `min_version`."""
    del min_version
    return torch.backends.mps.is_available()


def is_bf16_available(ignore_tpu: bool = False) -> bool:
    """Return whether the default device supports bfloat16."""
    del ignore_tpu
    return not torch.cuda.is_available() or torch.cuda.is_bf16_supported()


def compare_versions(library_or_version: object, operation: str, requirement_version: str) -> bool:
    """Compare versions: ``compare_versions("numpy", ">=", "1.25")``.

    Args:
        library_or_version: The name of an installed package, or an object whose text is a version.
        operation: One of ``> >= == != <= <``.
        requirement_version: The version to compare with.

    Raises:
        ValueError: The operation is none of these.
        importlib.metadata.PackageNotFoundError: The package is not installed.
    """
    if operation not in _OPERATIONS:
        raise ValueError(f"operation is {operation!r}; it must be one of {', '.join(_OPERATIONS)}.")
    # torch.__version__ is a subclass of str, but is a version.
    package = type(library_or_version) is str
    installed = metadata.version(str(library_or_version)) if package else str(library_or_version)
    return bool(_OPERATIONS[operation](TorchVersion(installed), TorchVersion(requirement_version)))


def is_torch_version(operation: str, version: str) -> bool:
    """Compare torch's version: ``is_torch_version(">=", "2.4")``.

    Raises:
        ValueError: The operation is not one of ``> >= == != <= <``.
    """
    # Drop the local version after "+", which describes the build.
    release = TorchVersion(torch.__version__.partition("+")[0])
    return compare_versions(release, operation, version)


def str_to_bool(value: str, to_bool: bool = False) -> int | bool:
    """Return 1 for a true value such as ``"yes"``, 0 for a false one such as ``"no"``.

    Args:
        value: The text.
        to_bool: Return True and False instead.

    Raises:
        ValueError: The value is neither.
    """
    if value.lower() in environment.TRUE:
        return True if to_bool else 1
    if value and value.lower() in environment.FALSE:
        return False if to_bool else 0
    raise ValueError(f"value is {value!r}; it must be a bool, such as 'true', 'no' or '0'.")


def parse_choice_from_env(key: str, default: str = "no") -> str:
    """Return an environment variable; `default` if it is not set."""
    value = environment.read(key)
    return str(default) if value is None else value


def get_int_from_env(env_keys: Sequence[str], default: int) -> int:
    """Return the first of these variables that is an integer of at least 0, else `default`."""
    values = (environment.read_int(key) for key in env_keys)
    return next((value for value in values if value is not None and value >= 0), default)


def are_libraries_initialized(*library_names: str) -> list[str]:
    """Return the modules among these that have been imported."""
    return [name for name in library_names if name in sys.modules]


def parse_flag_from_env(key: str, default: bool = False) -> bool:
    """Return an environment variable as a bool; `default` if it is not set.

    Raises:
        ValueError: The variable is neither a true nor a false value.
    """
    return environment.read_flag(key, default)
