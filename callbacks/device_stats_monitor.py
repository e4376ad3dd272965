"""Log the CPU use, the process's memory and the accelerator's memory of a run."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from callbacks.base import Callback

if TYPE_CHECKING:
    from trainer import Trainer, TrainModule

_GIB = 2.0**30
_STATM = Path("/proc/self/statm")


def _resident_memory() -> float:
    """Return the resident memory of this process, in bytes.

    Raises:
        ImportError: Only psutil can read it on this system, and it is not installed.
    """
    if _STATM.is_file():
        return float(_STATM.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    try:
        import psutil
    except ImportError as error:
        raise ImportError(
            "DeviceStatsMonitor needs psutil on this system: pip install 'cadence-trainer[psutil]'."
        ) from error
    return float(psutil.Process().memory_info().rss)


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

    The process's memory is read from ``/proc``, or with psutil on systems without it.

    Example::

        trainer = Trainer(max_epochs=10, callbacks=[DeviceStatsMonitor()])

    Args:
        cpu_stats: Log the first two values. None is the same as True, on every device.

    Raises:
        ImportError: In ``fit``, on a system where only psutil can read the memory.
    """

    def __init__(self, cpu_stats: bool | None = None) -> None:
        self.cpu_stats = cpu_stats is not False
        self._since = (0.0, 0.0)

    def on_train_start(self, trainer: Trainer, module: TrainModule) -> None:
        """Start measuring."""
        if self.cpu_stats:
            _resident_memory()  # raises here if it cannot be read
        self._since = time.monotonic(), time.process_time()

    def on_train_step_end(self, trainer: Trainer, module: TrainModule) -> None:
        """Log if this update's values will be recorded."""
        if not trainer.log_due:
            return
        if self.cpu_stats:
            wall, processor = self._since
            self._since = now, used = time.monotonic(), time.process_time()
            percent = 100.0 * (used - processor) / max(now - wall, 1e-9)
            # Each process has weight 1, whatever the number of items in its last batch.
            module.log("device/cpu_percent", percent, on_step=True, on_epoch=False, batch_size=1)
            module.log(
                "device/process_memory_gib",
                _resident_memory() / _GIB,
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
