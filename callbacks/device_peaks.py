"""How many operations a second accelerators can do at best, by their data sheets."""

from __future__ import annotations

import re

import torch

# Dense peaks in TFLOP/s: data sheets often give twice as much, for matrices of which half is zero.
# "fp32" are ordinary units, "tf32" and "half" (bf16 and fp16) matrix units.
# The first pattern that is in the device's name counts. Sources:
#   NVIDIA data sheets: GB200 NVL72 and HGX B200 (a 72nd and an 8th of what they say), H200,
#   H100 (SXM, PCIe, NVL), A100, A800/H800 (the same chips), L40S, L40, L4, A40, A30, A10, V100, T4;
#   NVIDIA Ada and Ampere GA102 architecture white papers, appendices: RTX 4090, 3090.
#   AMD data sheets: Instinct MI250X, MI300X, MI325X.
_PEAKS: tuple[tuple[str, dict[str, float]], ...] = (
    (r"\bGB200", {"fp32": 80.0, "tf32": 1250.0, "half": 2500.0}),
    (r"\bB200", {"fp32": 75.0, "tf32": 1125.0, "half": 2250.0}),
    (r"H200", {"fp32": 67.0, "tf32": 494.5, "half": 989.5}),
    (r"H[18]00.*PCIe", {"fp32": 51.0, "tf32": 378.0, "half": 756.5}),
    (r"H100.*NVL", {"fp32": 60.0, "tf32": 417.5, "half": 835.5}),
    (r"GH200|H[18]00", {"fp32": 67.0, "tf32": 494.5, "half": 989.5}),
    (r"\bA[18]00\b", {"fp32": 19.5, "tf32": 156.0, "half": 312.0}),
    (r"\bL40S\b", {"fp32": 91.6, "tf32": 183.0, "half": 362.05}),
    (r"\bL40\b", {"fp32": 90.5, "tf32": 90.5, "half": 181.05}),
    (r"\bL4\b", {"fp32": 30.3, "tf32": 60.0, "half": 121.0}),
    (r"RTX A6000", {"fp32": 38.7, "tf32": 77.4, "half": 154.8}),
    (r"\bA40\b", {"fp32": 37.4, "tf32": 74.8, "half": 149.7}),
    (r"\bA30\b", {"fp32": 10.3, "tf32": 82.0, "half": 165.0}),
    (r"\bA10\b", {"fp32": 31.2, "tf32": 62.5, "half": 125.0}),
    (r"V100S", {"fp32": 16.4, "half": 130.0}),
    (r"V100.*SXM", {"fp32": 15.7, "half": 125.0}),
    (r"V100", {"fp32": 14.0, "half": 112.0}),
    (r"\bT4\b", {"fp32": 8.1, "half": 65.0}),
    (r"RTX 4090\b(?! D| Laptop)", {"fp32": 82.6, "tf32": 82.6, "half": 165.2}),
    (r"RTX 3090\b(?! Ti)", {"fp32": 35.6, "tf32": 35.6, "half": 71.0}),
    (r"MI325X", {"fp32": 163.4, "tf32": 653.7, "half": 1307.4}),
    (r"MI300X", {"fp32": 163.4, "tf32": 653.7, "half": 1307.4}),
    (r"MI250X", {"fp32": 47.9, "half": 383.0}),  # two devices for torch: halved below
)
_HALVED = r"MI250X"


def peak_flops(device_name: str, dtype: torch.dtype, *, tf32: bool = False) -> float | None:
    """The dense peak of a device as its data sheet says.

    Args:
        device_name: As ``torch.cuda.get_device_name`` says it.
        dtype: In which matrices are multiplied: float32, bfloat16 or float16.
        tf32: Matrices of float32 may be multiplied in TF32.

    Returns:
        Operations a second, an addition and a multiplication counted as two; None if unknown.
    """
    if "MIG" in device_name:
        return None  # a slice of it
    kind = "half" if dtype in (torch.bfloat16, torch.float16) else "fp32"
    if dtype is torch.bfloat16 and re.search(r"V100|\bT4\b", device_name):
        return None  # they have no units for it
    for pattern, peaks in _PEAKS:
        if re.search(pattern, device_name):
            peak = peaks.get("tf32", peaks["fp32"]) if kind == "fp32" and tf32 else peaks[kind]
            halved = 0.5 if re.search(_HALVED, device_name) else 1.0
            return peak * 1e12 * halved
    return None
