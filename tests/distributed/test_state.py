"""What each of several processes knows of itself."""

from __future__ import annotations

import os

import pytest
import torch
import torch.distributed as dist

from trainer.distributed import collectives
from trainer.state import AcceleratorState, PartialState


def describe() -> dict[str, object]:
    state = AcceleratorState("bf16", cpu=True, _from_accelerator=True)
    return {
        "type": state.distributed_type.value,
        "backend": state.backend,
        "device": str(state.device),
        "ranks": (state.process_index, state.local_process_index, state.num_processes),
        "main": (state.is_main_process, state.is_local_main_process, state.is_last_process),
        "distributed": state.use_distributed,
        "text": repr(state),
    }


def test_ranks_device_and_backend_of_each_process(ranks3):
    found = ranks3(describe)
    for rank, state in enumerate(found):
        assert state["type"] == "MULTI_CPU"
        assert (state["backend"], state["device"]) == ("gloo", "cpu")
        assert state["ranks"] == (rank, rank, 3)
        assert state["main"] == (rank == 0, rank == 0, rank == 2)
        assert state["distributed"]
        assert f"Num processes: 3\nProcess index: {rank}\n" in state["text"]


def test_ranks_come_from_the_process_group_without_launcher_variables(ranks2):
    def place() -> tuple[int, int, int]:
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
            del os.environ[name]
        state = PartialState()
        return state.process_index, state.local_process_index, state.num_processes

    assert ranks2(place) == [(0, 0, 2), (1, 1, 2)]


def test_the_local_rank_comes_from_the_launcher(ranks2):
    def local_mains() -> bool:
        os.environ["LOCAL_RANK"] = "0"  # one process on each of two machines
        return PartialState().is_local_main_process

    assert ranks2(local_mains) == [True, True]


def test_print_writes_on_the_local_main_process_only(ranks2, tmp_path):
    def speak() -> None:
        with open(f"said-{dist.get_rank()}", "w") as file:
            PartialState().print("hello", file=file)

    ranks2(speak)
    assert [(tmp_path / f"said-{rank}").read_text() for rank in (0, 1)] == ["hello\n", ""]


def test_wait_for_everyone_is_a_barrier(ranks3):
    def check_collective() -> list[str]:
        state = PartialState()
        open(f"here-{state.process_index}", "w").close()
        state.wait_for_everyone()
        return sorted(name for name in os.listdir() if name.startswith("here"))

    assert ranks3(check_collective) == [["here-0", "here-1", "here-2"]] * 3


@pytest.mark.parametrize("debug", ["", "1"])
def test_collectives_work_with_and_without_debug_mode(ranks2, debug):
    def total() -> tuple[float, bool, str]:
        os.environ["ACCELERATE_DEBUG_MODE"] = debug
        state = PartialState()  # on the CPU without a flag
        total = collectives.reduce(torch.ones(())).item()
        return total, state.debug, state.distributed_type.value

    assert ranks2(total) == [(2.0, bool(debug), "MULTI_CPU")] * 2
