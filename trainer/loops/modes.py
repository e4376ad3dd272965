"""The modes of torch during a run: deterministic algorithms and anomaly detection."""

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

_threads: list[threading.Thread] = []  # those that are running a Trainer


@contextmanager
def sharing_the_process() -> Iterator[None]:
    """Warn if another thread runs a Trainer too: both change the process's settings of torch."""
    own = threading.current_thread()  # whose hooks may run another Trainer
    _threads.append(own)
    if any(each is not own and each.is_alive() for each in _threads):  # a forked process has none
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
    """Inside, operations without a deterministic form raise, or only warn with ``"warn"``.

    The previous settings are restored afterwards; False changes nothing.
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
    """Inside, autograd names the forward operation whose gradient is NaN; False changes nothing."""
    with torch.autograd.set_detect_anomaly(True) if enabled else nullcontext():
        yield
