"""Process-wide settings of torch during a run: deterministic algorithms, anomaly detection."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Literal

import torch

from trainer.environment import defaulting

# Without it cuBLAS is not deterministic: https://docs.nvidia.com/cuda/cublas/#results-reproducibility
_CUBLAS = ("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

logger = logging.getLogger(__name__)

_threads: list[threading.Thread] = []  # the threads that run a Trainer at present


@contextmanager
def sharing_the_process() -> Iterator[None]:
    """Warn if another thread runs a Trainer, since both change process-wide settings of torch."""
    own = threading.current_thread()  # its hooks may run another Trainer: no warning for that
    _threads.append(own)
    if any(each is not own and each.is_alive() for each in _threads):  # dead in a forked process
        logger.warning(
            "Another thread of this process runs a Trainer too. Both draw from the same random "
            "generators and change the same modes of torch, so that neither run can be repeated "
            "or resumed exactly. Run each in its own process: with Optuna, start several with "
            "n_jobs=1; with joblib, pass backend='loky'."
        )
    try:
        yield
    finally:
        _threads.remove(own)


@contextmanager
def deterministic(mode: bool | Literal["warn"]) -> Iterator[None]:
    """Use deterministic algorithms inside; restore the previous settings on exit.

    Operations without a deterministic implementation raise, or with ``"warn"`` only warn.

    Args:
        mode: True, ``"warn"``, or False to change nothing.
    """
    if not mode:
        yield
        return
    before = torch.are_deterministic_algorithms_enabled()
    warned = torch.is_deterministic_algorithms_warn_only_enabled()
    benchmark = torch.backends.cudnn.benchmark
    with defaulting(*_CUBLAS):
        torch.use_deterministic_algorithms(True, warn_only=mode == "warn")
        torch.backends.cudnn.benchmark = False
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(before, warn_only=warned)
            torch.backends.cudnn.benchmark = benchmark


@contextmanager
def detecting_anomalies(enabled: bool) -> Iterator[None]:
    """Enable autograd's anomaly detection inside: it names the operation whose gradient is NaN.

    Args:
        enabled: False changes nothing.
    """
    with torch.autograd.set_detect_anomaly(True) if enabled else nullcontext():
        yield
