"""Processes in different operations: all learn of it, and nobody waits in vain."""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from trainer import Accelerator
from trainer.checkpoint.accelerator_state import PreparedObjects, load_state, save_state
from trainer.checkpoint.save import run_on_all_ranks, writer_rank_of
from trainer.distributed import guards
from trainer.distributed.process_control import on_main
from trainer.errors import DistributedOperationException
from trainer.state import PartialState


def outcomes(pool: Any, function: Callable[[], object]) -> list[str]:
    """What each rank raised; afterwards all are in step."""

    def call() -> str:
        try:
            return f"returned {function()}"
        except Exception as error:  # noqa: BLE001 - whatever it is, the test looks at it
            return f"{type(error).__name__}: {error}"

    def in_step() -> list[int]:
        return [numbers[0] for numbers in guards.all_gather_ints([dist.get_rank()])]

    found: list[str] = pool(call)
    assert pool(in_step) == [list(range(pool.size))] * pool.size
    return found


def go_first(name: str) -> None:
    with getattr(PartialState(), name)():
        pass


def call(name: str) -> None:
    """Call an operation by its public name."""
    accelerator = Accelerator(cpu=True)
    {
        "save_state": lambda: accelerator.save_state("out"),
        "load_state": lambda: accelerator.load_state("out"),
        "wait_for_everyone": accelerator.wait_for_everyone,
        "main_process_first": lambda: go_first(name),
        "local_main_process_first": lambda: go_first(name),
        "gather": lambda: accelerator.gather(torch.ones(2)),
        "gather_object": lambda: accelerator.gather_for_metrics([1], use_gather_object=True),
        "on_main": lambda: on_main(lambda: None),
    }[name]()


PAIRS = [
    ("load_state", "save_state"),
    ("load_state", "wait_for_everyone"),
    ("wait_for_everyone", "gather"),
    ("main_process_first", "gather_object"),
    ("local_main_process_first", "on_main"),
    ("on_main", "save_state"),
]


@pytest.mark.parametrize(("name", "other"), PAIRS)
def test_different_operations_raise_on_all_ranks_and_are_named(ranks2, tmp_path, name, other):
    found = outcomes(ranks2, lambda: call(other if dist.get_rank() else name))
    assert found[0] == found[1]
    said = "The processes are waiting for each other in different operations:"
    assert found[0].startswith(f"DistributedOperationException: {said}")
    for rank, called in enumerate((name, other)):
        [line] = [line for line in found[0].splitlines() if line.startswith(f"  rank {rank}: ")]
        assert line.split()[2] == called
    assert f"Every process must call each of {' and '.join(sorted((name, other)))}" in found[0]
    assert not list(tmp_path.iterdir())  # nothing was begun


@pytest.mark.parametrize("name", ["main_process_first", "local_main_process_first"])
def test_a_collective_inside_main_process_first_raises(ranks3, name):
    def gather_first() -> None:
        os.environ["LOCAL_RANK"] = str(dist.get_rank())
        with getattr(PartialState(), name)():
            guards.check_collective("gather")

    found = outcomes(ranks3, gather_first)
    assert found == [found[0]] * 3
    assert "rank 0: gather\n" in found[0]
    assert f"rank 1: {name}\n" in found[0]


def test_an_error_inside_main_process_first_reaches_the_waiting_ranks(ranks2):
    def fail() -> None:
        with PartialState().main_process_first():
            raise DistributedOperationException("made up", ["gather", "reduce"])

    found = outcomes(ranks2, fail)
    assert found[0] == "DistributedOperationException: made up"
    assert found[1].startswith("RuntimeError: Rank 0 failed while the others waited for it: ")


# -- hooks of a state ----------------------------------------------------------------------------


def speak(*_: Any) -> None:
    """A hook that waits for its peers."""
    guards.check_collective("hook's own")


def refuse_on_1(*_: Any) -> None:
    if dist.get_rank() == 1:
        raise OSError("broken hook")


@pytest.mark.parametrize("function", [save_state, load_state])
def test_a_failing_state_hook_raises_before_the_next_hook_runs_a_collective(ranks3, function):
    def body() -> str:
        state = PartialState()
        save_state("out", PreparedObjects(), state, hooks=[speak])
        return str(function("out", PreparedObjects(), state, hooks=[refuse_on_1, speak]))

    for found in outcomes(ranks3, body):
        assert found.startswith("CheckpointError: ")
        assert found.endswith("failed on rank 1: OSError('broken hook').")
    assert os.listdir() == ["out"]


@pytest.mark.parametrize("function", [save_state, load_state])
def test_a_collective_in_a_hook_of_one_rank_alone_raises(ranks2, function):
    def body(*hooks: Any) -> str:
        state = PartialState()
        save_state("out", PreparedObjects(step=5), state)
        own = hooks if state.process_index == 0 else ()
        return str(function("out", PreparedObjects(step=5), state, hooks=own))

    assert len(set(outcomes(ranks2, lambda: body(lambda *_: None)))) == 1
    found = outcomes(ranks2, lambda: body(lambda *_: None, speak))
    assert found[0] == found[1]
    assert found[0].startswith("DistributedOperationException: ")
    assert "rank 0: hook's own" in found[0]
    assert f"rank 1: {function.__name__} (hook 2)" in found[0]
    assert os.listdir() == ["out"]


def test_a_result_that_cannot_be_pickled_raises_on_all(ranks2):
    found = outcomes(ranks2, lambda: run_on_all_ranks("Trying", lambda: lambda: 1, PartialState()))
    assert found[0] == found[1]
    assert found[0].startswith("CheckpointError: Trying failed on ranks 0, 1: ")


# -- long waits ----------------------------------------------------------------------------------


def until(condition: Callable[[], bool]) -> None:
    while not condition():
        time.sleep(0.001)


@pytest.mark.parametrize("own_group", [False, True])
def test_a_warning_names_the_ranks_that_are_waited_for(ranks3, own_group):
    def body() -> tuple[list[str], list[int], bool]:
        rank = dist.get_rank()
        group = dist.new_group() if own_group else None
        store = guards.store_of(group)
        heard = _Heard()
        logger = logging.getLogger("trainer.distributed.guards")
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(guards, "_ANNOUNCED_AFTER", 0.001)
            patch.setattr(guards, "_WARNED_AFTER", 0.002 if rank == 0 else 1000.0)
            logger.addHandler(heard)
            try:
                if rank == 0:
                    until(lambda: guards._waiting(store, 3) == [1])
                elif rank == 2:
                    until(Path("warned").exists)
                numbers = guards.check_collective("save_state (begin)", 10 + rank, group=group)
            finally:
                logger.removeHandler(heard)
        guards.check_collective("afterwards", group=group)
        left = guards._waiting(store, 3) == []
        guards.check_collective("the end", group=group)
        if group is not None:
            dist.destroy_process_group(group)
        return heard.texts, numbers, left

    text = "save_state has waited 0.002 seconds for rank 2. It ends when every process has called"
    for rank, (texts, numbers, left) in enumerate(ranks3(body)):
        assert [each[: len(text)] for each in texts] == ([text] if rank == 0 else [])
        assert numbers == [10, 11, 12]
        assert left


def test_the_missing_rank_is_named_when_the_group_times_out_first(ranks2):
    def body() -> tuple[list[str], str]:
        group = dist.new_group()
        group._get_backend(torch.device("cpu"))._set_default_timeout(timedelta(seconds=0.2))
        heard, said = _Heard(), ""
        logger = logging.getLogger("trainer.distributed.guards")
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(guards, "_ANNOUNCED_AFTER", 0.001)
            logger.addHandler(heard)
            try:
                if dist.get_rank() == 0:
                    guards.check_collective("save_state (begin)", group=group)
            except RuntimeError as error:
                said = str(error)
            finally:
                logger.removeHandler(heard)
        guards.check_collective("the end")
        dist.destroy_process_group(group)
        return heard.texts, said

    (texts, said), silent = ranks2(body)
    assert texts == ["save_state waited for rank 1 and failed."]
    assert "200ms" in said
    assert silent == ([], "")


class _Heard(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())
        Path("warned").touch()


def test_one_of_the_waiting_ranks_warns_if_a_rank_is_missing(caplog):
    guards._warn("gather", [1, 2], 4, rank=2)
    guards._warn("gather", [0, 1, 2, 3], 4, rank=0)
    assert caplog.text == ""
    guards._warn("gather", [1, 2], 4, rank=1)
    guards._warn("save_state", [0], 2, rank=0)
    some, main_alone = [record.getMessage() for record in caplog.records]
    assert some.startswith("gather has waited 30 seconds for rank 0, 3.")
    assert "is_main_process" not in some
    assert "inside `if accelerator.is_main_process:`" in main_alone


def test_a_wait_goes_on_if_the_store_is_gone(ranks2):
    class Gone:
        def __getattr__(self, name: str) -> Any:
            Path(name).touch()
            raise RuntimeError("the store's process has ended")

    def body() -> list[int]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(guards, "_ANNOUNCED_AFTER", 0.001)
            patch.setattr(guards, "_WARNED_AFTER", 0.002)
            patch.setattr(guards, "store_of", lambda group: Gone())
            if dist.get_rank() == 1:
                until(Path("check").exists)
            return guards.check_collective("gather", dist.get_rank())

    assert ranks2(body) == [[0, 1]] * 2


def test_sizes_are_exchanged_on_the_device_if_the_backend_has_no_cpu(monkeypatch):
    monkeypatch.setattr(dist, "get_backend_config", lambda group: "cuda:nccl")
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 1)
    assert guards.side_device() == torch.device("cuda", 1)
    monkeypatch.setattr(dist, "get_backend_config", lambda group: "cpu:gloo,cuda:nccl")
    assert guards.side_device() == torch.device("cpu")


# -- machines ------------------------------------------------------------------------------------


def node(host: str, local_rank: int) -> SimpleNamespace:
    """This rank as it would be there."""
    return SimpleNamespace(
        host=host,
        process_index=dist.get_rank(),
        local_process_index=local_rank,
        num_processes=dist.get_world_size(),
        is_main_process=dist.get_rank() == 0,
        is_local_main_process=local_rank == 0,
    )


@pytest.mark.parametrize(
    ("homes", "writers"),
    [
        ([("a", 0), ("a", 1), ("b", 0), ("b", 1)], [0, 0, 2, 2]),
        ([("a", 0), ("b", 0), ("a", 1), ("b", 1)], [0, 1, 0, 1]),  # SLURM's cyclic
        ([("a", 1), ("a", 0), ("b", 1), ("b", 0)], [1, 1, 3, 3]),
        ([("a", 0), ("a", 1), ("a", 0), ("a", 1)], [0, 0, 2, 2]),  # containers
    ],
)
def test_the_writer_rank_is_on_the_same_machine(ranks4, homes, writers):
    def body() -> tuple[int, int]:
        own = node(*homes[dist.get_rank()])
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(socket, "gethostname", lambda: own.host)
            return writer_rank_of(own, on_each_node=True), writer_rank_of(own, on_each_node=False)

    assert ranks4(body) == [(writer_rank, 0) for writer_rank in writers]


def test_a_machine_without_local_rank_0_raises_on_all(ranks2):
    def body() -> object:
        own = node("ab"[dist.get_rank()], dist.get_rank())
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(socket, "gethostname", lambda: own.host)
            return writer_rank_of(own, on_each_node=True)

    found = outcomes(ranks2, body)
    assert found[0] == found[1]
    assert found[0].startswith("CheckpointError: No process on b has the local rank 0")
    assert "LOCAL_RANK" in found[0]
