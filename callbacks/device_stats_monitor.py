"""Log the CPU use, the process's memory and the accelerator's memory of a run."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from callbacks.base import Callback

if TYPE_CHECKING:
    from trainer import Trainer, TrainModule

_GIB = 2.0**30
_STATM = Path("/proc/self/statm")


def _memory_reader() -> Callable[[], float]:
    """Return a function that reads the resident memory of this process, in bytes.

    Raises:
        ImportError: Only psutil can read it on this system, and it is not installed.
    """
    if find_spec("psutil") is not None:
        import psutil

        process = psutil.Process()
        return lambda: float(process.memory_info().rss)
    if _STATM.is_file():
        page = os.sysconf("SC_PAGE_SIZE")
        return lambda: float(_STATM.read_text().split()[1]) * page
    if find_spec("resource") is not None:
        return _peak_memory
    raise ImportError(
        "DeviceStatsMonitor needs the package psutil to read the memory of a process on this "
        "system. Install it with pip install 'cadence-trainer[psutil]'."
    )


def _peak_memory() -> float:
    """Return the peak resident memory in bytes, where the current value is not available."""
    import resource

    unit = 1 if sys.platform == "darwin" else 1024
    return float(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss) * unit


def device_memory(device: torch.device) -> dict[str, float]:
    """Return the accelerator's memory use, without waiting for the device.

    Returns:
        Values in GiB, with names from ``allocated`` to ``free``, and ``alloc_retries``, the number
        of times that torch's allocator emptied its cache and retried. Empty for a CPU.
    """
    if device.type in ("cuda", "xpu"):
        backend = getattr(torch, device.type)
        stats = backend.memory_stats(device)
        values = {
            "allocated": stats.get("allocated_bytes.all.current", 0) / _GIB,
            "allocated_peak": stats.get("allocated_bytes.all.peak", 0) / _GIB,
            "reserved": stats.get("reserved_bytes.all.current", 0) / _GIB,
            "alloc_retries": float(stats.get("num_alloc_retries", 0)),
        }
        if device.type == "cuda":  # counts all processes on the device
            values["free"] = torch.cuda.mem_get_info(device)[0] / _GIB
        return values
    if device.type == "mps":
        return {
            "allocated": torch.mps.current_allocated_memory() / _GIB,
            "reserved": torch.mps.driver_allocated_memory() / _GIB,
        }
    return {}


class DeviceStatsMonitor(Callback):
    """Log CPU and memory use at updates whose values are logged (``log_every``).

    =================================  ============================================================
    ``device/cpu_percent``             this process's threads since the last record; 100 is one core
    ``device/process_memory_gib``      resident memory of the process, without loader workers
    ``device/allocated_gib``           accelerator memory held by tensors
    ``device/allocated_peak_gib``      the peak of this since the start
    ``device/reserved_gib``            accelerator memory held by torch's allocator
    ``device/free_gib``                CUDA: memory that no process holds
    ``device/alloc_retries``           allocations retried after emptying torch's cache
    =================================  ============================================================

    With several processes, the mean of ``cpu_percent``, the minimum of ``free_gib`` and the maximum
    of all other values are logged. Nothing waits for the device.

    The process's memory is read with psutil if it is installed, else from ``/proc``. If neither
    exists, the peak so far is logged.

    Args:
        cpu_stats: Log the first two values. None is the same as True, on every device.

    Raises:
        ImportError: In ``fit``, on a system where only psutil can read the memory.
    """

    def __init__(self, cpu_stats: bool | None = None) -> None:
        self.cpu_stats = cpu_stats is not False
        self._read_memory: Callable[[], float] | None = None
        self._since = (0.0, 0.0)

    def on_train_start(self, trainer: Trainer, module: TrainModule) -> None:
        """Choose how to read the memory, and start measuring."""
        if self.cpu_stats:
            self._read_memory = _memory_reader()
        self._since = time.monotonic(), time.process_time()

    def on_train_step_end(self, trainer: Trainer, module: TrainModule) -> None:
        """Log if this update's values will be recorded."""
        if not trainer.log_due:
            return
        if self._read_memory is not None:
            wall, processor = self._since
            self._since = now, used = time.monotonic(), time.process_time()
            percent = 100.0 * (used - processor) / max(now - wall, 1e-9)
            # Each process has weight 1, whatever the number of items in its last batch.
            module.log("device/cpu_percent", percent, on_step=True, on_epoch=False, batch_size=1)
            module.log(
                "device/process_memory_gib",
                self._read_memory() / _GIB,
                on_step=True,
                on_epoch=False,
                reduce="max",
            )
        for name, value in device_memory(trainer.accelerator.device).items():
            module.log(
                f"device/{name}" if name == "alloc_retries" else f"device/{name}_gib",
                value,
                on_step=True,
                on_epoch=False,
                reduce="min" if name == "free" else "max",
            )
