"""Lightning's profilers."""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from torch.profiler import record_function

from callbacks import Profiler as _Profiler
from trainer.lightning.missing import getter


class PassThroughProfiler:
    """No profiler: the default; its arguments have no effect."""

    def __init__(self, dirpath: Any = None, filename: Any = None) -> None:
        pass

    def profile(self, action_name: str) -> AbstractContextManager[Any]:
        """Return a block that has a name in traces of torch's profiler."""
        return record_function(action_name)


class SimpleProfiler(PassThroughProfiler):
    """The Trainer's ``profile="simple"``; its arguments have no effect."""

    def __init__(self, dirpath: Any = None, filename: Any = None, extended: bool = True) -> None:
        pass


_SCHEDULE = "give wait=, warmup=, active= and repeat=, counted in updates"
_TORCHS = "pass profile=trainer.ProfileKwargs(...) to the Trainer, which is torch's profiler"
_INSTEAD = {
    "schedule": _SCHEDULE,
    "on_trace_ready": _TORCHS,
    "activities": _TORCHS,
    "with_modules": _TORCHS,
    "experimental_config": _TORCHS,
    "export_to_flame_graph": "read the trace in https://ui.perfetto.dev",
    "metric": "the table has all columns; sort_by_key= sorts it",
    "emit_nvtx": "run the program under nsys, with torch.autograd.profiler.emit_nvtx() around fit",
    "use_cpu": "the CPU is recorded, and CUDA where it is used",
    "use_cuda": "the CPU is recorded, and CUDA where it is used",
}
"""Arguments of Lightning's `PyTorchProfiler` that have no translation: what to do instead."""


class PyTorchProfiler(_Profiler, PassThroughProfiler):
    """A trace of torch's profiler; see `callbacks.Profiler`, which has further arguments.

    Args:
        dirpath: The folder, by default ``profile`` in the run's folder.
        filename: The prefix of file names.
        group_by_input_shapes: Group the table by shapes, if `record_shapes` is set.
        emit_nvtx: Must be False.
        export_to_chrome: Whether to write the trace in addition to the table.
        row_limit: The number of rows of the table; -1 for all.
        sort_by_key: The column by which the table is sorted, by default the total time.
        record_module_names: Has no effect.
        table_kwargs: Arguments of the table, such as ``max_name_column_width``.
        record_shapes: Record the shapes of inputs.
        **options: Arguments of `callbacks.Profiler`, such as `active` or `profile_memory`.

    Raises:
        ValueError: An argument has no translation; the message names the alternative.
    """

    def __init__(
        self,
        dirpath: str | Path | None = None,
        filename: str | None = None,
        group_by_input_shapes: bool = False,
        emit_nvtx: bool = False,
        export_to_chrome: bool = True,
        row_limit: int = 20,
        sort_by_key: str | None = None,
        record_module_names: bool = True,
        table_kwargs: dict[str, Any] | None = None,
        *,
        record_shapes: bool = False,
        **options: Any,
    ) -> None:
        options |= {"emit_nvtx": emit_nvtx} if emit_nvtx else {}
        if refused := [name for name in options if name in _INSTEAD]:
            name = refused[0]
            raise ValueError(
                f"PyTorchProfiler({name}={options[name]!r}) has no translation: {_INSTEAD[name]}."
            )
        rows = sys.maxsize if row_limit == -1 else row_limit
        options = {"record_shapes": record_shapes, "top_operators": rows} | options
        super().__init__(dirpath, **options)
        self._prefix, self._exports = f"{filename}-" if filename else "", export_to_chrome
        self._grouped = group_by_input_shapes and record_shapes
        self._table = {"sort_by": sort_by_key} if sort_by_key else {}
        self._table |= table_kwargs or {}


__getattr__ = getter(__name__)
