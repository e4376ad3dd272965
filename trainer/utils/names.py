"""Names for ported scripts, and functions whose defaults differ from ours."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Generator

from trainer.checkpoint.weights import BIN_NAME as WEIGHTS_NAME
from trainer.checkpoint.weights import INDEX_SUFFIX
from trainer.checkpoint.weights import WEIGHTS_NAME as SAFE_WEIGHTS_NAME
from trainer.configuration.handlers import TRACE_NAME as PROFILE_PATTERN_NAME
from trainer.distributed.collectives import reduce as _reduce
from trainer.enums import Choice, RNGType
from trainer.rng import synchronize_rng_states
from trainer.state import PartialState
from trainer.tree import find_batch_size as ignorant_find_batch_size
from trainer.tree import required_batch_size as find_batch_size

__all__ = [
    "MODEL_NAME",
    "PROFILE_PATTERN_NAME",
    "SAFE_MODEL_NAME",
    "SAFE_WEIGHTS_INDEX_NAME",
    "SAFE_WEIGHTS_NAME",
    "SAFE_WEIGHTS_PATTERN_NAME",
    "WEIGHTS_INDEX_NAME",
    "WEIGHTS_NAME",
    "WEIGHTS_PATTERN_NAME",
    "ComputeEnvironment",
    "SageMakerDistributedType",
    "find_batch_size",
    "ignorant_find_batch_size",
    "reduce",
    "synchronize_rng_state",
    "tqdm",
    "wait_for_everyone",
]

WEIGHTS_INDEX_NAME = WEIGHTS_NAME + INDEX_SUFFIX
SAFE_WEIGHTS_INDEX_NAME = SAFE_WEIGHTS_NAME + INDEX_SUFFIX
MODEL_NAME, SAFE_MODEL_NAME = Path(WEIGHTS_NAME).stem, Path(SAFE_WEIGHTS_NAME).stem
# Name patterns for several files, to be formatted with a `suffix`.
WEIGHTS_PATTERN_NAME = f"{MODEL_NAME}{{suffix}}{Path(WEIGHTS_NAME).suffix}"
SAFE_WEIGHTS_PATTERN_NAME = f"{SAFE_MODEL_NAME}{{suffix}}{Path(SAFE_WEIGHTS_NAME).suffix}"


def reduce(tensor: Any, reduction: str = "mean", scale: float = 1.0) -> Any:
    """Same as `Accelerator.reduce`, with the mean as the default."""
    return _reduce(tensor, reduction, scale)


def wait_for_everyone() -> None:
    """Same as `Accelerator.wait_for_everyone`."""
    PartialState().wait_for_everyone()


def synchronize_rng_state(rng_type: str | RNGType, generator: Generator | None = None) -> None:
    """Same as `synchronize_rng_states`, for one type."""
    synchronize_rng_states([rng_type], generator)


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


class ComputeEnvironment(Choice):
    """The environment of a launch; `trainer launch` rejects ``AMAZON_SAGEMAKER``."""

    LOCAL_MACHINE = "LOCAL_MACHINE"
    AMAZON_SAGEMAKER = "AMAZON_SAGEMAKER"


class SageMakerDistributedType(Choice):
    """The kind of distributed run on Amazon SageMaker, which has its own launcher."""

    NO = "NO"
    DATA_PARALLEL = "DATA_PARALLEL"
    MODEL_PARALLEL = "MODEL_PARALLEL"
