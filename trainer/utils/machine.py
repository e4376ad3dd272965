"""Query the machine: devices, cores, ports and the kernel."""

from __future__ import annotations

import functools
import shutil
import socket
import subprocess
from dataclasses import dataclass

import torch
from torch.torch_version import TorchVersion

from trainer import environment
from trainer.state.affinity import set_affinity
from trainer.state.group import default_device, distributed_type, warn_of_old_kernel

_FIRST_DRIVER = TorchVersion("550.40.07")  # first with peer-to-peer copies between RTX 40 GPUs


@dataclass
class CPUInformation:
    """The rank of this process among the launcher's processes."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1


def get_cpu_distributed_information() -> CPUInformation:
    """Return this process's rank and world size, from the launcher's variables."""
    launch = environment.detect_launch()
    names = ("rank", "world_size", "local_rank", "local_world_size")
    return CPUInformation(**{name: getattr(launch, name) for name in names})


def get_current_device_type() -> tuple[str, str]:
    """Return the type of the default device, and the `DistributedType` of several processes."""
    device = default_device()
    return device.type, distributed_type(device, 2).value


def _nvidia_smi(query: str) -> list[str]:
    """Return nvidia-smi's answer for each GPU; the query does not initialise a device."""
    program = shutil.which("nvidia-smi")
    if program is None:
        raise FileNotFoundError("nvidia-smi is not installed: there is no driver for NVIDIA GPUs.")
    command = [program, f"--query-gpu={query}", "--format=csv,noheader"]
    result = subprocess.run(command, check=True, capture_output=True, text=True)
    return [line.strip() for line in result.stdout.splitlines() if line.strip()]


def get_gpu_info() -> tuple[list[str], int]:
    """Return the names and the number of NVIDIA GPUs.

    Raises:
        FileNotFoundError: No NVIDIA driver is installed.
    """
    names = _nvidia_smi("name")
    return names, len(names)


def get_driver_version() -> str:
    """Return the version of the NVIDIA driver.

    Raises:
        FileNotFoundError: No NVIDIA driver is installed.
    """
    return _nvidia_smi("driver_version")[0]


def check_cuda_p2p_ib_support() -> bool:
    """Return False if there are several RTX 40 GPUs whose driver cannot copy between them."""
    try:
        names, count = get_gpu_info()
        if count > 1 and any("RTX 40" in name for name in names):
            return bool(TorchVersion(get_driver_version()) >= _FIRST_DRIVER)
    except (FileNotFoundError, subprocess.CalledProcessError):
        pass  # no GPUs
    return True


@functools.lru_cache
def check_cuda_fp8_capability() -> bool:
    """Return whether the first GPU supports fp8 (compute capability 8.9 or above).

    Raises:
        RuntimeError: There is no GPU.
    """
    try:
        major, _, minor = _nvidia_smi("compute_cap")[0].partition(".")
        return (int(major), int(minor)) >= (8, 9)
    except (FileNotFoundError, subprocess.CalledProcessError):
        return torch.cuda.get_device_capability() >= (8, 9)


def override_numa_affinity(local_process_index: int, verbose: bool | None = None) -> None:
    """Bind this process to the cores near its GPU; without GPUs do nothing.

    Args:
        local_process_index: The number of the GPU.
        verbose: Log the cores; None does so in debug mode (``ACCELERATE_DEBUG_MODE``).
    """
    if verbose is None:
        verbose = environment.read_flag("ACCELERATE_DEBUG_MODE")
    set_affinity(local_process_index, verbose=verbose)


@functools.lru_cache
def set_numa_affinity(local_process_index: int, verbose: bool | None = None) -> None:
    """Call `override_numa_affinity`, but only once per process."""
    override_numa_affinity(local_process_index, verbose)


def is_port_in_use(port: int | None = None) -> bool:
    """Return whether a process listens on a port of this machine; None is torchrun's default."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        return probe.connect_ex(("localhost", port or environment.DEFAULT_PORT)) == 0


def get_free_port() -> int:
    """Return a free port; another process may take it at any time."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


def check_os_kernel() -> None:
    """Warn if the Linux kernel is older than 5.5, where distributed runs may hang."""
    warn_of_old_kernel()


def convert_bytes(size: float) -> str:
    """Return a number of bytes in the largest unit of 1024: ``convert_bytes(2048) == "2.0 KB"``."""
    for unit in ("bytes", "KB", "MB", "GB", "TB"):
        if size < 1024:
            return f"{round(size, 2)} {unit}"
        size /= 1024
    return f"{round(size, 2)} PB"
