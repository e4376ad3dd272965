import re

import pytest
import torch

from callbacks.device_peaks import _PEAKS, peak_flops

# Its units, their clock in GHz as the maker says it, and what a unit does in one tick in bf16:
# another way to the same number, which tells a dense peak from a sparse one.
CHIPS = [
    ("NVIDIA GH200 480GB", 132, 1.83, 4096),
    ("NVIDIA H200", 132, 1.83, 4096),
    ("NVIDIA H100 80GB HBM3", 132, 1.83, 4096),
    ("NVIDIA H100 PCIe", 114, 1.62, 4096),
    ("NVIDIA H100 NVL", 132, 1.545, 4096),
    ("NVIDIA B200", 148, 1.85, 8192),
    ("NVIDIA A100-SXM4-80GB", 108, 1.41, 2048),
    ("NVIDIA A100 80GB PCIe", 108, 1.41, 2048),
    ("NVIDIA A30", 56, 1.44, 2048),
    ("NVIDIA A10", 72, 1.695, 1024),
    ("NVIDIA A40", 84, 1.74, 1024),
    ("NVIDIA RTX A6000", 84, 1.8, 1024),
    ("NVIDIA L40S", 142, 2.52, 1024),
    ("NVIDIA L40", 142, 2.49, 512),
    ("NVIDIA L4", 58, 2.04, 1024),
    ("NVIDIA GeForce RTX 4090", 128, 2.52, 512),
    ("NVIDIA GeForce RTX 3090", 82, 1.695, 512),
    ("Tesla V100-SXM2-16GB", 80, 1.53, 1024),
    ("Tesla V100-PCIE-32GB", 80, 1.38, 1024),
    ("Tesla V100S-PCIE-32GB", 80, 1.597, 1024),
    ("Tesla T4", 40, 1.59, 1024),
    ("AMD Instinct MI300X", 304, 2.1, 2048),
    ("AMD Instinct MI325X", 304, 2.1, 2048),
    ("AMD Instinct MI250X", 110, 1.7, 1024),
]


@pytest.mark.parametrize(("name", "units", "gigahertz", "operations"), CHIPS)
def test_peaks_are_dense_and_what_the_units_can_do(name, units, gigahertz, operations):
    expected = units * gigahertz * operations * 1e9
    assert peak_flops(name, torch.float16) == pytest.approx(expected, rel=0.015)


@pytest.mark.parametrize("peak", _PEAKS, ids=lambda peak: peak.name)
def test_rows_agree_with_themselves(peak):
    assert peak.source
    if peak.tf32 is not None:  # no chip has another ratio
        assert peak.half / peak.tf32 == pytest.approx(2, rel=0.02)
        assert peak.tf32 >= peak.fp32
    assert peak.half >= 1.9 * peak.fp32


def test_every_row_is_checked():
    names = [name for name, *_ in CHIPS] + ["NVIDIA GB200"]  # of which no unit count is published
    first = {next(p.name for p in _PEAKS if re.search(p.name, name)) for name in names}
    assert first == {peak.name for peak in _PEAKS}


@pytest.mark.parametrize(
    ("name", "dtype", "tf32", "teraflops"),
    [
        ("NVIDIA GB200", torch.bfloat16, False, 2500.0),
        ("NVIDIA H100 80GB HBM3", torch.bfloat16, True, 989.5),
        ("NVIDIA H100 80GB HBM3", torch.float32, False, 67.0),
        ("NVIDIA A100-PCIE-40GB", torch.float32, False, 19.5),
        ("NVIDIA A100-PCIE-40GB", torch.float32, True, 156.0),
        ("Tesla T4", torch.float32, True, 8.1),
        ("AMD Instinct MI250X", torch.float32, False, 47.85),
    ],
)
def test_the_precision_decides(name, dtype, tf32, teraflops):
    assert peak_flops(name, dtype, tf32=tf32) == pytest.approx(teraflops * 1e12)


@pytest.mark.parametrize(
    "name",
    [
        "NVIDIA A10G",
        "NVIDIA A800-SXM4-80GB",
        "NVIDIA H800",
        "NVIDIA H200 NVL",
        "NVIDIA H100 64GB HBM2",
        "NVIDIA RTX A1000",
        "NVIDIA GeForce RTX 4090 D",
        "NVIDIA GeForce RTX 4090 Laptop GPU",
        "NVIDIA GeForce RTX 3090 Ti",
        "NVIDIA A100-SXM4-40GB MIG 1g.5gb",
        "GRID A100-20C",
        "NVIDIA A40-8Q",
        "AMD Instinct MI250X / MI250",
        "Something else",
    ],
)
def test_relatives_and_slices_are_unknown(name):
    assert peak_flops(name, torch.float16) is None


@pytest.mark.parametrize("name", ["Tesla V100-SXM2-16GB", "Tesla V100S-PCIE-32GB", "Tesla T4"])
def test_chips_without_bf16_have_no_peak_for_it(name):
    assert peak_flops(name, torch.bfloat16) is None
