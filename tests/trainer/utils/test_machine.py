"""What scripts ask about the machine, against the machine or a driver's answers."""

from __future__ import annotations

import os
import socket
from types import SimpleNamespace

import pytest
import torch

from trainer import PartialState, utils
from trainer.state import affinity, group


@pytest.fixture
def smi(tmp_path, monkeypatch):
    """A driver: what `nvidia-smi` answers to each question."""
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    utils.check_cuda_fp8_capability.cache_clear()

    def answer(**answers):
        lines = "\n".join(f"*{what}*) printf '{text}' ;;" for what, text in answers.items())
        (tmp_path / "nvidia-smi").write_text(f'#!/bin/sh\ncase "$1" in\n{lines}\nesac\n')
        (tmp_path / "nvidia-smi").chmod(0o755)

    yield answer
    utils.check_cuda_fp8_capability.cache_clear()


def test_the_driver_is_asked(smi):
    smi(gpu="A\\nB\\n", driver_version="1.2\\n1.2\\n")
    smi(name="GPU A\\nGPU B\\n", driver_version="550.1\\n550.1\\n", compute_cap="8.0\\n")
    assert utils.get_gpu_info() == (["GPU A", "GPU B"], 2)
    assert utils.get_driver_version() == "550.1"
    assert utils.check_cuda_p2p_ib_support()
    assert not utils.check_cuda_fp8_capability()
    smi(name="RTX 4090\\nRTX 4090\\n", driver_version="550.1\\n", compute_cap="8.9\\n")
    assert not utils.check_cuda_p2p_ib_support()
    utils.check_cuda_fp8_capability.cache_clear()
    assert utils.check_cuda_fp8_capability()
    smi(name="RTX 4090\\nRTX 4090\\n", driver_version="550.40.07\\n")
    assert utils.check_cuda_p2p_ib_support()


def test_without_a_driver(monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(FileNotFoundError, match="no driver"):
        utils.get_gpu_info()
    assert utils.check_cuda_p2p_ib_support()


def test_the_place_of_this_process_is_the_launchers(monkeypatch):
    assert utils.get_cpu_distributed_information() == utils.CPUInformation()
    for name, value in (("RANK", 5), ("WORLD_SIZE", 8), ("LOCAL_RANK", 1), ("LOCAL_WORLD_SIZE", 4)):
        monkeypatch.setenv(name, str(value))
    found = utils.get_cpu_distributed_information()
    assert vars(found) == {
        "rank": 5,
        "world_size": 8,
        "local_rank": 1,
        "local_world_size": 4,
    }


def test_the_type_of_device_and_of_several_processes(monkeypatch):
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    assert utils.get_current_device_type() == ("cpu", "MULTI_CPU")


def test_a_process_runs_on_the_cores_near_its_device(tmp_path, monkeypatch):
    assert affinity.parse_cores("0-3,8,10-11\n") == {0, 1, 2, 3, 8, 10, 11}
    assert affinity.parse_cores("\n") == set()
    here, bound = os.sched_getaffinity(0), []
    device = SimpleNamespace(pci_domain_id=0, pci_bus_id=0x1A, pci_device_id=0)
    monkeypatch.setattr(affinity, "_PCI", tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: device)
    monkeypatch.setattr(os, "sched_setaffinity", lambda pid, cores: bound.append(cores))
    utils.override_numa_affinity(0)
    assert bound == []  # the bus is hidden
    (tmp_path / "0000:1a:00.0").mkdir()
    near = min(here)
    (tmp_path / "0000:1a:00.0" / "local_cpulist").write_text(f"{near},4000-4001\n")
    utils.override_numa_affinity(0, verbose=True)
    utils.set_numa_affinity.cache_clear()
    for _ in range(2):  # the second does nothing
        utils.set_numa_affinity(0)
    assert bound == [{near}] * 2
    monkeypatch.setenv("ACCELERATE_CPU_AFFINITY", "true")
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    PartialState(cpu=True)
    assert bound == [{near}] * 3


def test_without_devices_cores_stay_as_they_are(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    here = os.sched_getaffinity(0)
    utils.override_numa_affinity(0)
    assert os.sched_getaffinity(0) == here


def test_ports_are_free_or_in_use():
    port = utils.get_free_port()
    assert not utils.is_port_in_use(port)
    with socket.socket() as server:
        server.bind(("localhost", port))
        server.listen()
        assert utils.is_port_in_use(port)


def test_an_old_kernel_is_warned_of(monkeypatch, caplog):
    monkeypatch.setattr(group.platform, "release", lambda: "5.4.0-generic")
    utils.check_os_kernel()
    assert "below 5.5" in caplog.text


def test_bytes_in_the_largest_unit():
    texts = {512: "512 bytes", 2048: "2.0 KB", 3 * 2**20: "3.0 MB", 2**51: "2.0 PB"}
    assert {size: utils.convert_bytes(size) for size in texts} == texts
