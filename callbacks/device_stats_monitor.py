"""Log what a run takes of the machine: processor, memory, the accelerator's memory."""

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
    """A function that gives the resident memory of this process in bytes.

    Raises:
        ImportError: Nothing here tells it.
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
        "DeviceStatsMonitor finds no way to read the memory of a process on this system. Install "
        "psutil: pip install 'cadence-trainer[psutil]'."
    )


def _peak_memory() -> float:
    """The largest resident memory so far in bytes, where the present one is not to be had."""
    import resource

    unit = 1 if sys.platform == "darwin" else 1024
    return float(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss) * unit


def device_memory(device: torch.device) -> dict[str, float]:
    """What torch's allocator has of the accelerator's memory, without waiting for the device.

    Returns:
        In GiB, under names from ``allocated`` to ``free``; and ``alloc_retries``, how often memory
        was found only after the cache was emptied. Nothing for a CPU.
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
        if device.type == "cuda":  # of all processes on it
            values["free"] = torch.cuda.mem_get_info(device)[0] / _GIB
        return values
    if device.type == "mps":
        return {
            "allocated": torch.mps.current_allocated_memory() / _GIB,
            "reserved": torch.mps.driver_allocated_memory() / _GIB,
        }
    return {}


class DeviceStatsMonitor(Callback):
    """Log processor and memory use whenever the update's values are recorded.

    =================================  ============================================================
    ``device/cpu_percent``             this process's threads since the last record; 100 is one core
    ``device/process_memory_gib``      resident memory of the process, without loader workers
    ``device/allocated_gib``           of the accelerator, by tensors
    ``device/allocated_peak_gib``      the largest of these since the start
    ``device/reserved_gib``            held by torch's allocator
    ``device/free_gib``                CUDA: what no process has
    ``device/alloc_retries``           the memory nearly ran out so many times
    =================================  ============================================================

    Among several processes the mean of ``cpu_percent`` is recorded, the smallest ``free_gib``, and
    the largest of everything else. Nothing is asked of the device but the allocator's own counters.

    Memory is read with psutil where it is installed, and else from ``/proc``; where there is
    neither it is the largest so far.

    Args:
        cpu_stats: Log the first two. None logs them on every device.

    Raises:
        ImportError: In ``fit``, on a system where only psutil can read the memory.
    """

    def __init__(self, cpu_stats: bool | None = None) -> None:
        self.cpu_stats = cpu_stats is not False
        self._read_memory: Callable[[], float] | None = None
        self._since = (0.0, 0.0)

    def on_train_start(self, trainer: Trainer, module: TrainModule) -> None:
        """Find out how to read, and begin to count."""
        if self.cpu_stats:
            self._read_memory = _memory_reader()
        self._since = time.monotonic(), time.process_time()

    def on_train_step_end(self, trainer: Trainer, module: TrainModule) -> None:
        """Log, where the values of this update will be recorded."""
        if not trainer.log_due:
            return
        if self._read_memory is not None:
            wall, processor = self._since
            self._since = now, used = time.monotonic(), time.process_time()
            percent = 100.0 * (used - processor) / max(now - wall, 1e-9)
            # One of each process, however many items its last batch had.
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
