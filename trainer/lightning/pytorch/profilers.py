"""Lightning's profilers."""

from __future__ import annotations

from typing import Any

from callbacks import Profiler as _Profiler
from trainer.lightning.missing import getter


class SimpleProfiler:
    """``profile="simple"`` of the Trainer; its arguments have no effect."""

    def __init__(self, dirpath: Any = None, filename: Any = None, extended: bool = True) -> None:
        pass


class PyTorchProfiler(_Profiler):
    """A trace of torch's profiler; see `callbacks.Profiler` for its arguments."""


__getattr__ = getter(__name__)
