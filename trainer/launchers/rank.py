"""A call that runs in new processes: how it gets there, and what they leave behind.

The launcher and its processes share a folder, which only their user can read and which is gone
after the call. In it are ``call``, the function and its arguments, ``value``, what rank 0 returned,
and for each rank the file that torch's launcher reads where a process has failed.

The processes are new interpreters, not forks: a fork of a process whose OpenMP has worked hangs in
its first parallel operation, and CUDA cannot be used in one at all. So functions that a notebook
has defined travel by value, with all that they use.
"""

from __future__ import annotations

import io
import linecache
import logging
import os
import pickle
import sys
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from trainer import environment
from trainer.cli.launch import entry

logger = logging.getLogger(__name__)

_CALL, _VALUE = "call", "value"
# What knows of this process and its peers, or was prepared for them: wrong in another process.
_BOUND = {
    "trainer.state.shared": "Shared",  # each `Accelerator` has it
    "trainer.data.loader": "PreparedLoader",
    "trainer.optim.optimizer": "AcceleratedOptimizer",
    "trainer.optim.scheduler": "AcceleratedScheduler",
}


def write_call(folder: Path, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    """Put a call into the folder.

    Raises:
        ValueError: It uses something that cannot be sent, or an `Accelerator` of this process.
        ImportError: cloudpickle is not installed.
    """
    name = getattr(function, "__name__", repr(function))
    try:
        packed = _pack((function, args, _lines_without_files()))
    except _OfThisProcessError as error:
        raise ValueError(
            f"{name} uses {error}. That of this process is alone: make it inside the function, so "
            "that each process has its own."
        ) from None
    except Exception as error:  # noqa: BLE001  # whatever refuses to be pickled, in its own words
        raise ValueError(
            f"{name} runs in new processes, and something that it uses cannot be sent there: "
            f"{error}. Make it inside the function."
        ) from None
    (folder / _CALL).write_bytes(packed)


def command(folder: Path) -> list[str]:
    """The arguments of a Python interpreter that runs the call as one rank."""
    # The path first: a notebook may have found Cadence by a folder that it added itself.
    start = f"import sys; sys.path[:] = {sys.path!r}; from {__name__} import work; "
    return ["-c", f"{start}work({str(folder)!r}, {os.getpid()})"]


def read_value(folder: Path) -> Any:
    """What rank 0 returned; None where it was not on this machine, or could not be sent."""
    path = folder / _VALUE
    return _unpack(path) if path.exists() else None


class _OfThisProcessError(Exception):
    """Something describes this process and would be wrong in another."""


def _pack(value: object) -> bytes:
    """Pickle `value`, with the functions and classes of a notebook in it."""
    try:
        import cloudpickle
    except ImportError as error:
        raise ImportError(
            "Functions are sent to new processes with cloudpickle: "
            "pip install 'cadence-trainer[notebook]'."
        ) from error

    class Pickler(cloudpickle.Pickler):  # type: ignore[misc]  # its base has no types
        def persistent_id(self, value: object) -> None:
            if isinstance(value, bound):
                raise _OfThisProcessError(
                    "an `Accelerator`, which a `Trainer` has too, or what one has prepared "
                    f"(found: {type(value).__name__})"
                )

    # What was not loaded, and torch perhaps neither, takes seconds and can be in no value.
    loaded = ((sys.modules.get(module), name) for module, name in _BOUND.items())
    bound = tuple(getattr(module, name) for module, name in loaded if module is not None)
    buffer = io.BytesIO()
    Pickler(buffer).dump(value)
    return buffer.getvalue()


def _unpack(path: Path) -> Any:
    # No file of a user: our own other half wrote it a moment ago, into a folder of ours.
    with path.open("rb") as file:
        return pickle.load(file)  # noqa: S301


def _lines_without_files() -> Mapping[str, Any]:
    """The source of notebook cells, without which their tracebacks would show no code."""
    return {
        name: (entry[0], None, *entry[2:])  # without a time, which would have the file looked at
        for name, entry in list(linecache.cache.items())
        if len(entry) == 4 and not Path(name).exists()
    }


# The rest runs in the new processes.


def work(folder: str, parent: int) -> None:
    """Be one rank: run the call in the folder, and leave there what became of it."""
    entry.end_with_the_launcher()
    if sys.platform == "linux" and os.getppid() != parent:
        sys.exit("The process that started this one has gone.")
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True, write_through=False)  # whole lines, at once
    place = Path(folder)
    try:
        value = _call(place)
        if environment.read_int("RANK") == 0:
            _leave_value(place, value)
    except SystemExit as end:
        if end.code:
            entry.note("SystemExit", f"SystemExit: exit code {end.code}")
        raise
    except BaseException as error:  # noqa: BLE001  # whatever ends a function; the launcher says it
        frames = error.__traceback__
        while frames is not None and frames.tb_frame.f_code.co_filename == __file__:
            frames = frames.tb_next
        kind = type(error)
        entry.note(kind.__name__, "".join(traceback.format_exception(kind, error, frames)))
        sys.exit(1)


def _call(place: Path) -> Any:
    function, args, lines = _unpack(place / _CALL)
    linecache.cache.update(lines)
    # Classes of a notebook are looked up in `__main__` when objects of them are pickled.
    names = getattr(function, "__globals__", {}) if function.__module__ == "__main__" else {}
    own = {name: value for name, value in names.items() if not name.startswith("__")}
    vars(sys.modules["__main__"]).update(own)
    return function(*args)


def _leave_value(place: Path, value: object) -> None:
    if value is None:
        return
    try:
        (place / _VALUE).write_bytes(_pack(value))
    except Exception as error:  # noqa: BLE001  # the work is done; scripts return what they like
        logger.warning("What rank 0 returned cannot be sent to the launcher: %s", error)
