"""Peak floating-point operations per second of accelerators, from their data sheets."""

from __future__ import annotations

import re
from typing import NamedTuple

import torch


class _Peak(NamedTuple):
    """A device's dense peaks in TFLOP/s.

    Data sheets often quote twice as much, for sparse matrices (half of their entries are zero);
    such numbers are halved here.

    Attributes:
        name: A pattern for the result of ``torch.cuda.get_device_name``; the first match is used.
        fp32: Products in full float32.
        tf32: Products of float32 rounded to TF32 by matrix units; None for devices without TF32.
        half: Products in bf16 and fp16, accumulated in float32.
        source: The data sheet.
    """

    name: str
    fp32: float
    tf32: float | None
    half: float
    source: str


# A device is listed only if its vendor publishes its numbers. Variants of a chip with another clock
# or fewer units have other peaks and are not matched (H800, H20, A10G, laptop GPUs).
_PEAKS = (
    _Peak(r"\bGB200\b", 80.0, 1250.0, 2500.0, "NVIDIA Blackwell data sheet, GB200 NVL72, per GPU"),
    # The sheet's 2.2 sparse PFLOPS for TF32 is rounded; half of the 4.5 for fp16 is exact.
    _Peak(r"\bB200\b", 75.0, 1125.0, 2250.0, "NVIDIA Blackwell data sheet, HGX B200, per GPU"),
    _Peak(r"\bGH200\b", 67.0, 494.5, 989.5, "NVIDIA GH200 Grace Hopper Superchip data sheet"),
    _Peak(r"\bH200$", 67.0, 494.5, 989.5, "NVIDIA H200 data sheet, SXM"),
    _Peak(r"\bH100 NVL\b", 60.0, 417.5, 835.5, "NVIDIA H100 data sheet, NVL, per GPU"),
    _Peak(r"\bH100 (PCIe|80GB HBM2e)\b", 51.0, 378.0, 756.5, "NVIDIA H100 data sheet, PCIe"),
    _Peak(r"\bH100 80GB HBM3$", 67.0, 494.5, 989.5, "NVIDIA H100 data sheet, SXM"),
    _Peak(r"\bA100\b", 19.5, 156.0, 312.0, "NVIDIA A100 data sheet (SXM and PCIe alike)"),
    _Peak(r"\bL40S\b", 91.6, 183.0, 362.05, "NVIDIA L40S data sheet"),
    _Peak(r"\bL40\b", 90.5, 90.5, 181.05, "NVIDIA L40 data sheet"),
    _Peak(r"\bL4\b", 30.3, 60.0, 121.0, "NVIDIA L4 data sheet"),
    _Peak(r"\bRTX A6000\b", 38.7, 77.4, 154.8, "NVIDIA Ampere GA102 white paper, appendix C"),
    _Peak(r"\bA40\b", 37.4, 74.8, 149.7, "NVIDIA A40 data sheet"),
    _Peak(r"\bA30\b", 10.3, 82.0, 165.0, "NVIDIA A30 data sheet"),
    _Peak(r"\bA10\b", 31.2, 62.5, 125.0, "NVIDIA A10 data sheet"),
    _Peak(r"\bV100S-PCIE\b", 16.4, None, 130.0, "NVIDIA V100 data sheet"),
    _Peak(r"\bV100-SXM2\b", 15.7, None, 125.0, "NVIDIA V100 data sheet"),
    _Peak(r"\bV100-PCIE\b", 14.0, None, 112.0, "NVIDIA V100 data sheet"),
    _Peak(r"\bT4\b", 8.1, None, 65.0, "NVIDIA T4 data sheet"),
    _Peak(r"\bRTX 4090$", 82.6, 82.6, 165.2, "NVIDIA Ada white paper, appendix A"),
    _Peak(r"\bRTX 3090$", 35.6, 35.6, 71.0, "NVIDIA Ampere GA102 white paper, appendix A"),
    _Peak(r"\bMI3(00|25)X\b", 163.4, 653.7, 1307.4, "AMD Instinct MI300X and MI325X data sheets"),
    # One half of a module, since torch shows two devices. Its matrix units use full float32, not
    # TF32.
    _Peak(r"\bMI250X$", 47.85, None, 191.5, "AMD Instinct MI200 series data sheet, halved"),
)
_SLICE = r"MIG|-\d+[A-Z]$"  # a MIG partition or a vGPU: only a part of the device


def peak_flops(device_name: str, dtype: torch.dtype, *, tf32: bool = False) -> float | None:
    """Return the dense peak of a device according to its data sheet.

    Args:
        device_name: The name that ``torch.cuda.get_device_name`` returns.
        dtype: The dtype in which matrices are multiplied: float32, bfloat16 or float16.
        tf32: Whether float32 matrices may be multiplied in TF32.

    Returns:
        Operations per second, an addition and a multiplication counted as two; None if unknown.
    """
    if re.search(_SLICE, device_name):
        return None
    peak = next((peak for peak in _PEAKS if re.search(peak.name, device_name)), None)
    if peak is None:
        return None
    if dtype is torch.bfloat16 and re.search(r"V100|\bT4\b", device_name):
        return None  # no matrix units for bf16
    if dtype in (torch.bfloat16, torch.float16):
        return peak.half * 1e12
    return (peak.tf32 if tf32 and peak.tf32 is not None else peak.fp32) * 1e12
