"""What each of several processes knows of itself."""

from __future__ import annotations

import os
import pickle

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


def test_each_process_knows_its_place(ranks3):
    found = ranks3(describe)
    for rank, state in enumerate(found):
        assert state["type"] == "MULTI_CPU"
        assert (state["backend"], state["device"]) == ("gloo", "cpu")
        assert state["ranks"] == (rank, rank, 3)
        assert state["main"] == (rank == 0, rank == 0, rank == 2)
        assert state["distributed"]
        assert state["text"].startswith(
            "Distributed environment: DistributedType.MULTI_CPU  Backend: gloo\nNum processes: 3\n"
            f"Process index: {rank}\n"
        )


def test_cpu_processes_form_without_a_flag(ranks2):
    assert ranks2(lambda: PartialState().distributed_type.value) == ["MULTI_CPU", "MULTI_CPU"]


def test_a_group_without_a_launchers_names_says_who_we_are(ranks2):
    def place() -> tuple[int, int, int]:
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
            del os.environ[name]
        state = PartialState()
        return state.process_index, state.local_process_index, state.num_processes

    assert ranks2(place) == [(0, 0, 2), (1, 1, 2)]


def test_the_local_rank_is_the_launchers(ranks2):
    def local_mains() -> bool:
        os.environ["LOCAL_RANK"] = "0"  # one process on each of two machines
        return PartialState().is_local_main_process

    assert ranks2(local_mains) == [True, True]


def test_print_is_heard_once_a_machine(ranks2, tmp_path):
    def speak() -> None:
        rank = dist.get_rank()
        with open(f"said-{rank}", "w") as file:
            PartialState().print("hello", file=file)

    ranks2(speak)
    assert [(tmp_path / f"said-{rank}").read_text() for rank in (0, 1)] == ["hello\n", ""]


def test_nobody_passes_before_everyone_has_come(ranks3):
    def check_collective() -> list[str]:
        state = PartialState()
        open(f"here-{state.process_index}", "w").close()
        state.wait_for_everyone()
        return sorted(name for name in os.listdir() if name.startswith("here"))

    assert ranks3(check_collective) == [["here-0", "here-1", "here-2"]] * 3


@pytest.mark.parametrize("debug", ["", "1"])
def test_collectives_ask_the_state(ranks2, debug):
    def total() -> tuple[float, bool]:
        os.environ["ACCELERATE_DEBUG_MODE"] = debug
        state = PartialState()
        return collectives.reduce(torch.ones(())).item(), state.debug

    assert ranks2(total) == [(2.0, bool(debug))] * 2


def test_decorated_functions_run_on_their_processes(ranks4):
    def where() -> dict[str, bool]:
        os.environ.update(LOCAL_RANK=str(dist.get_rank() % 2), LOCAL_WORLD_SIZE="2")
        state = PartialState()
        decorators = {
            "main": state.on_main_process,
            "local main": state.on_local_main_process,
            "last": state.on_last_process,
            "2": state.on_process(process_index=2),
            "local 1": state.on_local_process(local_process_index=1),
        }
        return [name for name, decorator in decorators.items() if decorator(lambda: True)()]

    assert ranks4(where) == [
        ["main", "local main"],
        ["local 1"],
        ["local main", "2"],
        ["last", "local 1"],
    ]


def test_a_process_that_does_not_exist_is_refused_everywhere(ranks2):
    def refused() -> str:
        try:
            PartialState().on_process(print, 2)
        except ValueError as error:
            return str(error)

    text = "process_index is 2; it must be at least 0 and below 2."
    assert ranks2(refused) == [text, text]


def test_a_pickled_state_is_the_live_one_among_processes(ranks2):
    def same() -> bool:
        state = PartialState()
        return vars(pickle.loads(pickle.dumps(state))) is vars(state)

    assert ranks2(same) == [True, True]
