"""Enumerations of strings: the choices of configurations, environment variables and commands."""

from __future__ import annotations

import warnings
from enum import Enum, EnumMeta
from typing import Any

from trainer.checks import choice_error


class _Choices(EnumMeta):
    """Makes ``"fp16" in PrecisionType`` work on Python 3.10 and 3.11, where it raises."""

    def __contains__(cls, value: object) -> bool:
        try:
            cls(value)
        except ValueError:
            return False
        return True


class Choice(str, Enum, metaclass=_Choices):
    """A string enumeration: members compare, print and are looked up as their values."""

    def __str__(self) -> str:
        return str(self.value)

    @classmethod
    def list(cls) -> list[str]:
        """Return all values."""
        return [member.value for member in cls]

    @classmethod
    def parse(cls, value: object, what: str) -> str:
        """Return `value` as a string if it is the value of a member.

        Raises:
            ValueError: No member has this value; the message lists the choices.
        """
        if str(value) not in cls.list():
            raise ValueError(choice_error(what, value, cls.list()))
        return str(value)


class _Renamed:
    """Deprecated alias of an enumeration member."""

    def __init__(self, earlier: str, now: str) -> None:
        self.earlier, self.now = earlier, now

    def __get__(self, instance: Any, owner: Any) -> Any:
        warnings.warn(
            f"{owner.__name__}.{self.earlier} is the earlier name of {owner.__name__}.{self.now}; "
            "use the new name.",
            FutureWarning,
            stacklevel=2,
        )
        return getattr(owner, self.now)


class DistributedType(Choice):
    """The kind of distributed run: the device type of its processes, or ``NO`` with one process.

    Cadence uses ``MULTI_CPU``, ``MULTI_GPU``, ``MULTI_XPU``, ``FSDP``, ``DEEPSPEED`` and ``NO``;
    the others are names of the documented API that scripts compare with.
    """

    NO = "NO"
    MULTI_CPU = "MULTI_CPU"
    MULTI_GPU = "MULTI_GPU"
    MULTI_NPU = "MULTI_NPU"
    MULTI_MLU = "MULTI_MLU"
    MULTI_SDAA = "MULTI_SDAA"
    MULTI_MUSA = "MULTI_MUSA"
    MULTI_XPU = "MULTI_XPU"
    MULTI_HPU = "MULTI_HPU"
    MULTI_NEURON = "MULTI_NEURON"
    DEEPSPEED = "DEEPSPEED"
    FSDP = "FSDP"
    XLA = "XLA"
    MEGATRON_LM = "MEGATRON_LM"
    TPU = _Renamed("TPU", "XLA")

    def __str__(self) -> str:
        return f"{type(self).__name__}.{self.name}"  # printed like this in the documented API


class PrecisionType(Choice):
    """The precision of the forward pass."""

    NO = "no"
    FP8 = "fp8"
    FP16 = "fp16"
    BF16 = "bf16"


class FP8BackendType(Choice):
    """The library of ``mixed_precision="fp8"``: torchao, TransformerEngine or MS-AMP."""

    NO = "NO"
    MSAMP = "MSAMP"
    TE = "TE"
    AO = "AO"


class RNGType(Choice):
    """A random number generator whose state can be synchronised across processes."""

    TORCH = "torch"
    CUDA = "cuda"
    MLU = "mlu"
    NPU = "npu"
    SDAA = "sdaa"
    MUSA = "musa"
    HPU = "hpu"
    NEURON = "neuron"
    XLA = "xla"
    XPU = "xpu"
    MPS = "mps"
    GENERATOR = "generator"


class LoggerType(Choice):
    """An experiment tracker of the documented API."""

    ALL = "all"
    AIM = "aim"
    TENSORBOARD = "tensorboard"
    WANDB = "wandb"
    COMETML = "comet_ml"
    MLFLOW = "mlflow"
    CLEARML = "clearml"
    DVCLIVE = "dvclive"
    SWANLAB = "swanlab"
    TRACKIO = "trackio"


class DynamoBackend(Choice):
    """A backend of ``torch.compile``; ``NO`` does not compile the model."""

    NO = "NO"
    EAGER = "EAGER"
    AOT_EAGER = "AOT_EAGER"
    INDUCTOR = "INDUCTOR"
    AOT_TS_NVFUSER = "AOT_TS_NVFUSER"
    NVPRIMS_NVFUSER = "NVPRIMS_NVFUSER"
    CUDAGRAPHS = "CUDAGRAPHS"
    OFI = "OFI"
    FX2TRT = "FX2TRT"
    ONNXRT = "ONNXRT"
    TENSORRT = "TENSORRT"
    AOT_TORCHXLA_TRACE_ONCE = "AOT_TORCHXLA_TRACE_ONCE"
    TORCHXLA_TRACE_ONCE = "TORCHXLA_TRACE_ONCE"
    IPEX = "IPEX"
    HPU_BACKEND = "HPU_BACKEND"
    NEURON = "NEURON"
    TVM = "TVM"


class DDPCommunicationHookType(Choice):
    """The compression of gradients in ``DistributedDataParallel``; ``NO`` does not compress.

    ``FP16`` and ``BF16`` cast to 16 bits; ``POWER_SGD`` sends a low-rank approximation of each
    layer's gradient, ``BATCHED_POWER_SGD`` of each bucket's.
    """

    NO = "no"
    FP16 = "fp16"
    BF16 = "bf16"
    POWER_SGD = "power_sgd"
    BATCHED_POWER_SGD = "batched_power_sgd"


class SchedulerTick(Choice):
    """How often a prepared scheduler advances per update."""

    PROCESS = "process"
    UPDATE = "update"
