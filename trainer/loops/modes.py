"""How torch works while the Trainer does: deterministically, or looking for anomalies."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Literal

import torch

from trainer.environment import defaulting

# Without it cuBLAS is not deterministic: https://docs.nvidia.com/cuda/cublas/#results-reproducibility
_CUBLAS = ("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


@contextmanager
def deterministic(mode: bool | Literal["warn"]) -> Iterator[None]:
    """Inside, operations without a deterministic form are refused, or told with ``"warn"``.

    What was chosen before is chosen again afterwards; False changes nothing.
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
