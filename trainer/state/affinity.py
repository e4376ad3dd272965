"""Bind a process to the cores that are near its GPU (NUMA affinity)."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from trainer.errors import module_logger

logger = module_logger(__name__)

_PCI = Path("/sys/bus/pci/devices")


def near_cores(index: int) -> set[int]:
    """Return the cores near a CUDA or ROCm device that this process may use.

    The kernel lists them by the device's PCI address, so no vendor library is needed. The set is
    empty if the kernel lists none.
    """
    device: Any = torch.cuda.get_device_properties(index)  # without stubs of these attributes
    pci_address = f"{device.pci_domain_id:04x}:{device.pci_bus_id:02x}:{device.pci_device_id:02x}.0"
    try:
        text = (_PCI / pci_address / "local_cpulist").read_text()
    except OSError:  # a virtual machine may hide the bus
        return set()
    return parse_cores(text) & os.sched_getaffinity(0)


def parse_cores(text: str) -> set[int]:
    """Return the numbers in a list in the kernel's format, such as ``0-3,8``."""
    cores: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        cores.update(range(int(first), int(last or first) + 1))
    return cores


def set_affinity(index: int, *, verbose: bool = False) -> None:
    """Bind this process to the cores near a device; without CUDA devices do nothing.

    Args:
        index: The number of the device.
        verbose: Log the cores.
    """
    if not torch.cuda.is_available() or not hasattr(os, "sched_setaffinity"):
        return
    cores = near_cores(index)
    if cores:
        os.sched_setaffinity(0, cores)
    if verbose:
        logger.info("The process of device %d runs on the cores %s.", index, sorted(cores) or "all")
