"""Lightning's profilers."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from torch.profiler import record_function

from callbacks import Profiler as _Profiler
from trainer.lightning.missing import getter


class PassThroughProfiler:
    """No profiler: the default."""

    def profile(self, action_name: str) -> AbstractContextManager[Any]:
        """Return a block that has a name in traces of torch's profiler."""
        return record_function(action_name)


class SimpleProfiler(PassThroughProfiler):
    """``profile="simple"`` of the Trainer; its arguments have no effect."""

    def __init__(self, dirpath: Any = None, filename: Any = None, extended: bool = True) -> None:
        pass


class PyTorchProfiler(_Profiler, PassThroughProfiler):
    """A trace of torch's profiler; see `callbacks.Profiler` for its arguments."""


__getattr__ = getter(__name__)
