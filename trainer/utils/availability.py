"""What scripts ask about packages, devices, versions and settings."""

from __future__ import annotations

import operator
from importlib.util import find_spec

import torch
from torch.torch_version import TorchVersion

from trainer import environment

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
