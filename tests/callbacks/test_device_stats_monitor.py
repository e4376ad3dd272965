import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from callbacks import DeviceStatsMonitor, device_stats_monitor
from tests.helpers.line import Line, loader
from tests.helpers.requires import requires_cuda
from tests.numerics.running import quiet_trainer
from trackers import read_metrics

GIB = 2.0**30


def fit(monitor, **options):
    """Ten updates."""
    trainer = quiet_trainer(**{"max_epochs": 1, "log_every": 2, "callbacks": [monitor]} | options)
    trainer.fit(Line(), loader(20))
    return trainer.callback_metrics


def recorded(name):
    return {r["step"]: r[name] for r in read_metrics("run/metrics.jsonl") if name in r}


def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def test_cpu_and_memory_are_recorded_at_log_intervals():
    metrics = fit(DeviceStatsMonitor())
    assert metrics.keys() == {"device/cpu_percent", "device/process_memory_gib"}
    for name in metrics:
        assert list(recorded(name)) == [2, 4, 6, 8, 10]
    assert metrics["device/process_memory_gib"] == pytest.approx(resident() / GIB, rel=0.2)


def test_the_percentage_is_processor_time_by_time_since_the_last_record(monkeypatch):
    clock = SimpleNamespace(wall=50.0, cpu=7.0)
    monkeypatch.setattr(device_stats_monitor.time, "monotonic", lambda: clock.wall)
    monkeypatch.setattr(device_stats_monitor.time, "process_time", lambda: clock.cpu)
    logged = []

    class Module:
        def log(self, name, value, **options):
            logged.append((name, value))

    trainer = SimpleNamespace(log_due=True, accelerator=SimpleNamespace(device=torch.device("cpu")))
    monitor = DeviceStatsMonitor()
    monitor.on_train_start(trainer, Module())
    for due, wall, cpu in ((True, 4.0, 1.0), (False, 1.0, 1.0), (True, 1.0, 3.0)):
        trainer.log_due = due
        clock.wall += wall
        clock.cpu += cpu
        monitor.on_train_step_end(trainer, Module())
    assert [value for name, value in logged if "percent" in name] == [25.0, 200.0]


def test_missing_psutil_names_the_extra(monkeypatch):
    monkeypatch.setattr(device_stats_monitor, "_STATM", Path("/nowhere"))
    monkeypatch.setitem(sys.modules, "psutil", None)
    with pytest.raises(ImportError, match=r"cadence-trainer\[psutil\]"):
        fit(DeviceStatsMonitor())
    assert fit(DeviceStatsMonitor(cpu_stats=False), project_dir="other") == {}


def uneven():
    sizes = [None, None]
    dist.all_gather_object(sizes, resident())  # earlier tests leave unlike amounts
    ballast = torch.ones((max(sizes) - sizes[1]) // 4 + 100_000_000) if dist.get_rank() else None
    metrics = fit(DeviceStatsMonitor(), log_every=1)
    own = device_stats_monitor._resident_memory() / GIB
    del ballast
    return own, metrics["device/process_memory_gib"]


def test_of_several_processes_the_largest_memory_is_recorded(ranks2):
    (small, first), (large, second) = ranks2(uneven)
    assert first == second == pytest.approx(large, rel=0.1)
    assert large > small + 0.3


def test_device_memory_reads_the_counters_of_the_allocator(monkeypatch):
    stats = {
        "allocated_bytes.all.current": 1 * GIB,
        "allocated_bytes.all.peak": 3 * GIB,
        "reserved_bytes.all.current": 4 * GIB,
        "num_alloc_retries": 5,
    }
    for device in ("cuda", "xpu"):
        backend = SimpleNamespace(
            memory_stats=lambda device: stats, mem_get_info=lambda device: (2 * GIB, 8 * GIB)
        )
        monkeypatch.setattr(torch, device, backend)
        expected = {"allocated": 1, "allocated_peak": 3, "reserved": 4, "alloc_retries": 5}
        if device == "cuda":
            expected["free"] = 2
        assert device_stats_monitor.device_memory(torch.device(device, 0)) == expected
    assert device_stats_monitor.device_memory(torch.device("cpu")) == {}


@requires_cuda
def test_cuda_memory_is_recorded():
    metrics = fit(DeviceStatsMonitor(), cpu=False)
    assert metrics["device/allocated_gib"] * GIB >= 512
    assert metrics["device/free_gib"] > 0
