"""The state that a test must leave unchanged: how it is compared and restored.

Used by the autouse fixture of `tests/conftest.py` and by the ranks of `tests/helpers/ranks.py`.
"""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import random
import select
import signal
import sys
import threading
from dataclasses import dataclass, field
from pathlib import Path

import numpy
import torch
import torch.distributed as dist

WATCHED_SIGNALS = tuple(
    getattr(signal, name)
    for name in ("SIGINT", "SIGTERM", "SIGUSR1", "SIGUSR2")
    if hasattr(signal, name)
)

# Variables set by pytest, and by libraries when they are first imported.
FOREIGN_VARIABLES = {
    "PYTEST_CURRENT_TEST",
    "KMP_INIT_AT_FORK",  # scikit-learn and threadpoolctl
    "_RJEM_MALLOC_CONF",  # polars
    "KMP_DUPLICATE_LIB_OK",
    "TF2_BEHAVIOR",  # tensorboard
    "_MLFLOW_TELEMETRY_SESSION_ID",
    "TORCHINDUCTOR_CACHE_DIR",  # torch.compile
    "TRITON_CACHE_DIR",
    "_TORCHINDUCTOR_PYOBJECT_TENSOR_DATA_PTR",
}

# Processes that serve the whole session: the ranks of the pools.
SESSION_PROCESSES: set[int] = set()

# Processes that Python, and torch for its traces of C++, start on first use and keep.
INTERPRETER_HELPERS = (
    "multiprocessing.resource_tracker",
    "multiprocessing.forkserver",
    "addr2line",
)

PATIENCE = 2.0  # seconds that a thread or process may take to end


@dataclass(frozen=True)
class Snapshot:
    """The state of this process that tests may not change."""

    environ: dict[str, str] = field(default_factory=lambda: dict(os.environ))
    threads: frozenset[threading.Thread] = field(
        default_factory=lambda: frozenset(threading.enumerate())
    )
    children: frozenset[int] = field(default_factory=lambda: frozenset(child_processes()))
    handlers: dict[int, object] = field(
        default_factory=lambda: {number: signal.getsignal(number) for number in WATCHED_SIGNALS}
    )


def child_processes() -> dict[int, str]:
    """Return the living children of this process, each with its command line."""
    pids = {process.pid for process in multiprocessing.active_children() if process.pid}
    for path in Path("/proc/self/task").glob("*/children"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # the thread has ended
            pids.update(int(pid) for pid in path.read_text().split())
    return {pid: command for pid in pids if (command := _command(pid))}


def _command(pid: int) -> str:
    if not Path("/proc").is_dir():
        return "unknown"
    try:
        command = Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ").strip()
        # Empty for a zombie, and briefly while a process starts its program.
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return ""
    return "" if state in "ZX" else command or "a program that has not begun"


def _await_end(pid: int) -> None:
    if not hasattr(os, "pidfd_open"):
        return
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        select.select([descriptor], [], [], PATIENCE)
    finally:
        os.close(descriptor)


def open_files(folder: Path) -> list[str]:
    """Return the files below `folder` that this process holds open."""
    root = str(folder.resolve())
    found = []
    for link in Path("/proc/self/fd").glob("*"):
        with contextlib.suppress(OSError):  # the descriptor of the listing itself
            target = os.readlink(link)
            if target.startswith(root + os.sep) and link.is_file():
                found.append(target)
    return sorted(found)


def leaked_environment(before: Snapshot) -> list[str]:
    """Restore the environment; return one line for each variable that had changed."""
    now = dict(os.environ)
    names = (now.keys() | before.environ.keys()) - FOREIGN_VARIABLES
    changed = sorted(name for name in names if now.get(name) != before.environ.get(name))
    for name in changed:
        if name in before.environ:
            os.environ[name] = before.environ[name]
        else:
            del os.environ[name]
    return [
        f"environment variable {name}: {before.environ.get(name)!r} became {now.get(name)!r}"
        for name in changed
    ]


def leaked_handlers(before: Snapshot) -> list[str]:
    """Restore the signal handlers; return one line for each that had changed."""
    lines = []
    for number, handler in before.handlers.items():
        now = signal.getsignal(number)
        if now is not handler and now != handler:
            signal.signal(number, handler)
            lines.append(f"signal handler of {signal.Signals(number).name}: now {now!r}")
    return lines


def leaked_threads(before: Snapshot) -> list[str]:
    """Return one line for each new thread that has not ended."""
    lines = []
    for thread in set(threading.enumerate()) - before.threads:
        thread.join(PATIENCE)
        if thread.is_alive():
            lines.append(f"thread {thread.name!r} (daemon: {thread.daemon})")
    return sorted(lines)


def leaked_processes(before: Snapshot) -> list[str]:
    """Kill the new child processes that have not ended; return one line for each."""
    for pid in _new_children(before):
        _await_end(pid)
    lines = []
    for pid, command in _new_children(before).items():
        os.kill(pid, signal.SIGKILL)
        lines.append(f"child process {pid}: {command[:200]}")
    return lines


def _new_children(before: Snapshot) -> dict[int, str]:
    return {
        pid: command
        for pid, command in child_processes().items()
        if pid not in before.children
        and pid not in SESSION_PROCESSES
        and not any(helper in command for helper in INTERPRETER_HELPERS)
    }


def leaks(before: Snapshot, folder: Path | None = None) -> list[str]:
    """Return a line for each difference from `before` and each open file below `folder`.

    What can be restored is restored, so that the next test starts clean.
    """
    if (
        _new_children(before)
        or set(threading.enumerate()) - before.threads
        or (folder is not None and open_files(folder))
    ):
        gc.collect()  # objects in reference cycles release their resources when collected
    return [
        *leaked_environment(before),
        *leaked_handlers(before),
        *leaked_threads(before),
        *leaked_processes(before),
        *(f"open file {name}" for name in (open_files(folder) if folder is not None else ())),
    ]


def reset_trainer_state() -> None:
    """Reset the process-wide state of `trainer`, if it was imported."""
    state = sys.modules.get("trainer.state")
    if state is not None:
        for name in ("AcceleratorState", "GradientState", "PartialState"):
            getattr(state, name)._reset_state()


def reset_torch() -> None:
    """Set torch to the settings and the seed that every test starts from."""
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float32)
    torch.set_default_device(None)
    vars(torch._GLOBAL_DEVICE_CONTEXT).pop("device_context")  # None, which torch 2.9 trips over
    torch.set_grad_enabled(True)
    torch.use_deterministic_algorithms(False)
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.deterministic = False
    torch.backends.cudnn.benchmark = False
    torch.autograd.set_detect_anomaly(False)
    seed(0)


def seed(value: int) -> None:
    """Seed the generators of Python, numpy and torch."""
    random.seed(value)
    numpy.random.seed(value)
    torch.default_generator.manual_seed(value)
    if torch.accelerator.is_available():
        torch.manual_seed(value)  # of devices too, for each of which it formats the call stack


def destroy_process_group() -> None:
    """Destroy the process group that a test left behind, if any."""
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()
