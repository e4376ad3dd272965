"""What there is: packages, devices, versions, settings; by the names that scripts ask with."""

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
    """Whether TensorBoard, or tensorboardX, is installed."""
    return find_spec("tensorboard") is not None or find_spec("tensorboardX") is not None


def is_wandb_available() -> bool:
    """Whether wandb is installed."""
    return find_spec("wandb") is not None


def is_comet_ml_available() -> bool:
    """Whether comet_ml is installed."""
    return find_spec("comet_ml") is not None


def is_deepspeed_available() -> bool:
    """Whether DeepSpeed can be used: the package is installed, but no engine of it is here yet."""
    return False


def is_torch_xla_available(check_is_tpu: bool = False, check_is_gpu: bool = False) -> bool:
    """Whether XLA devices can be used: not yet."""
    del check_is_tpu, check_is_gpu
    return False


def is_npu_available(check_device: bool = False) -> bool:
    """Whether NPUs can be used: not yet."""
    del check_device
    return False


def is_cuda_available() -> bool:
    """Whether there is a CUDA device."""
    return torch.cuda.is_available()


def is_xpu_available(check_device: bool = False) -> bool:
    """Whether there is an XPU device."""
    del check_device
    return torch.xpu.is_available()


def is_mps_available() -> bool:
    """Whether there is an MPS device."""
    return torch.backends.mps.is_available()


def is_bf16_available(ignore_tpu: bool = False) -> bool:
    """Whether the device that would be chosen computes in bfloat16."""
    del ignore_tpu
    return not torch.cuda.is_available() or torch.cuda.is_bf16_supported()


def is_torch_version(operation: str, version: str) -> bool:
    """Compare torch's version: ``is_torch_version(">=", "2.4")``.

    Raises:
        ValueError: The operation is none of ``> >= == != <= <``.
    """
    if operation not in _OPERATIONS:
        raise ValueError(f"operation is {operation!r}; it must be one of {', '.join(_OPERATIONS)}.")
    # Without what is behind a plus, which says how this build was made.
    found = TorchVersion(torch.__version__.partition("+")[0])
    return bool(_OPERATIONS[operation](found, TorchVersion(version)))


def str_to_bool(value: str) -> int:
    """1 for a text that means yes, 0 for one that means no.

    Raises:
        ValueError: It means neither.
    """
    if value.lower() in environment.TRUE:
        return 1
    if value and value.lower() in environment.FALSE:
        return 0
    raise ValueError(f"value is {value!r}; it must be a yes or no, such as 'true' or '0'.")


def parse_flag_from_env(key: str, default: bool = False) -> bool:
    """An environment variable as a yes or no.

    Raises:
        ValueError: It is set to something that means neither.
    """
    return environment.read_flag(key, default)
