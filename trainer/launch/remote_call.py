"""Send a call to new processes, run it there and return its result.

The launcher and its processes share a folder, which only their user can read and which is deleted
after the call. It contains ``call``, the function and its arguments; ``value``, rank 0's return
value; and for each rank the file that torch's launcher reads if a process has failed.

The processes are new interpreters, not forks. A fork of a process that has used OpenMP hangs in its
first parallel operation, and a fork of one that has used CUDA cannot use CUDA. So functions defined
in a notebook are pickled by value, with everything they use.
"""

from __future__ import annotations

import io
import linecache
import os
import pickle
import sys
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from types import CodeType
from typing import Any

from trainer import environment
from trainer.errors import TIMEOUT_EXIT_CODE, Preempted, module_logger
from trainer.launch import entry

logger = module_logger(__name__)

_CALL, _VALUE = "call", "value"
# Objects that belong to this process and its peers, and are invalid in another process.
_BOUND = {
    "trainer.trainer": "Trainer",
    "trainer.state.shared": "Shared",  # part of every `Accelerator`
    "trainer.data.dataloader": "PreparedLoader",
    "trainer.optim.optimizer": "AcceleratedOptimizer",
    "trainer.optim.scheduler": "AcceleratedScheduler",
}


def write_call(folder: Path, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    """Write a call to the folder.

    Raises:
        ValueError: The call uses something that cannot be sent, or an `Accelerator` of this
            process.
        ImportError: cloudpickle is not installed.
    """
    name = getattr(function, "__name__", repr(function))
    try:
        packed = _pack((function, args, _lines_without_files()))
    except _OfThisProcessError as error:
        raise ValueError(
            f"{name} uses {error}. It cannot be used in other processes: create it inside the "
            "function, so that each process creates one."
        ) from None
    except Exception as error:  # noqa: BLE001  # pickling may raise anything
        raise ValueError(
            f"{name} runs in new processes, and something that it uses cannot be sent there: "
            f"{error}. Create it inside the function."
        ) from None
    (folder / _CALL).write_bytes(packed)


def command(folder: Path) -> list[str]:
    """Return the arguments of a Python interpreter that runs the call as one rank."""
    # sys.path first: the notebook may have added the folder in which it finds Cadence.
    start = f"import sys; sys.path[:] = {sys.path!r}; from {__name__} import work; "
    return ["-c", f"{start}work({str(folder)!r}, {os.getpid()})"]


def read_value(folder: Path) -> Any:
    """Return rank 0's result; None if rank 0 was on another machine or the value was not sent."""
    path = folder / _VALUE
    return _unpack(path) if path.exists() else None


class _OfThisProcessError(Exception):
    """An object belongs to this process and would be invalid in another."""


def _pack(value: object) -> bytes:
    """Pickle `value`, including a notebook's functions and classes."""
    try:
        import cloudpickle
    except ImportError as error:
        raise ImportError(
            "Functions are sent to new processes with cloudpickle: "
            "pip install 'cadence-trainer[notebook]'."
        ) from error

    class Pickler(cloudpickle.Pickler):  # type: ignore[misc]  # its base has no types
        dispatch_table = with_files(cloudpickle.Pickler.dispatch_table)

        def persistent_id(self, value: object) -> None:
            if isinstance(value, bound):
                raise _OfThisProcessError(
                    "an `Accelerator`, a `Trainer` or an object that one of them has prepared "
                    f"(found: {type(value).__name__})"
                )

    # A module that is not imported has no objects in `value`, and importing it may take seconds.
    loaded = ((sys.modules.get(module), name) for module, name in _BOUND.items())
    bound = tuple(getattr(module, name) for module, name in loaded if module is not None)
    buffer = io.BytesIO()
    Pickler(buffer).dump(value)
    return buffer.getvalue()


def with_files(reducers: Mapping[Any, Any]) -> Mapping[Any, Any]:
    """Return cloudpickle reducers that keep the file names of code.

    Since 3.1.3, cloudpickle replaces them, so that tracebacks show no lines of code.
    """
    reduce = reducers[CodeType]

    def reduce_code(code: CodeType) -> tuple[Any, ...]:
        build, args, *_ = reduce(code)
        return _build_code, (build, args, code.co_filename)

    return {**reducers, CodeType: reduce_code}


def _build_code(build: Callable[..., CodeType], args: tuple[Any, ...], file: str) -> CodeType:
    return build(*args).replace(co_filename=file)


def _unpack(path: Path) -> Any:
    with path.open("rb") as file:
        # Not a user's file: our own processes have just written it to our own folder.
        return pickle.load(file)  # noqa: S301


def _lines_without_files() -> Mapping[str, Any]:
    """Return the source of notebook cells, without which their tracebacks would show no code."""
    return {
        name: (entry[0], None, *entry[2:])  # with a time, linecache would check the file
        for name, entry in list(linecache.cache.items())
        if len(entry) == 4 and not Path(name).exists()
    }


# The rest runs in the new processes.


def work(folder: str, parent: int) -> None:
    """Run the call in the folder as one rank, and write its result or error there."""
    entry.end_with_the_launcher(parent)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True, write_through=False)  # whole lines, at once
    place = Path(folder)
    try:
        value = _call(place)
        if environment.read_int("RANK") == 0:
            _leave_value(place, value)
    except SystemExit as end:
        if isinstance(end, Preempted) and end.code == TIMEOUT_EXIT_CODE:
            return  # all ranks end this way with the run saved, so it is no failure
        if end.code:
            entry.write_error_file("SystemExit", f"SystemExit: exit code {end.code}")
        raise
    except BaseException as error:  # noqa: BLE001  # the launcher reports whatever it is
        frames = error.__traceback__
        while frames is not None and frames.tb_frame.f_code.co_filename == __file__:
            frames = frames.tb_next
        kind = type(error)
        text = "".join(traceback.format_exception(kind, error, frames))
        entry.write_error_file(kind.__name__, text, message=entry.message_of(error))
        sys.exit(1)


def _call(place: Path) -> Any:
    function, args, lines = _unpack(place / _CALL)
    linecache.cache.update(lines)
    # Pickle looks up a notebook's classes in `__main__`.
    names = getattr(function, "__globals__", {}) if function.__module__ == "__main__" else {}
    own = {name: value for name, value in names.items() if not name.startswith("__")}
    vars(sys.modules["__main__"]).update(own)
    return function(*args)


def _leave_value(place: Path, value: object) -> None:
    if value is None:
        return
    try:
        (place / _VALUE).write_bytes(_pack(value))
    except Exception as error:  # noqa: BLE001  # the work is done, so only warn
        logger.warning("The return value of rank 0 cannot be sent to the launcher: %s", error)
