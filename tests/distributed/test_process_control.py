"""Who runs what, and in which order."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest
import torch.distributed as dist

from tests.helpers.ranks import RankError
from trainer.distributed import guards
from trainer.distributed.process_control import exchange, on_all, on_main, run_where
from trainer.state import PartialState


def note() -> None:
    """Write down that this rank was here, and who had been before."""
    rank = PartialState().process_index
    before = ",".join(sorted(name[-1] for name in os.listdir() if name.startswith("rank-")))
    with open(f"rank-{rank}", "w") as file:
        file.write(before)


@pytest.mark.parametrize("method", ["main_process_first", "local_main_process_first"])
def test_the_first_process_runs_before_the_others(ranks3, tmp_path, method):
    def run() -> None:
        with getattr(PartialState(), method)():
            note()

    ranks3(run)
    assert (tmp_path / "rank-0").read_text() == ""
    for rank in (1, 2):
        assert "0" in (tmp_path / f"rank-{rank}").read_text()


def test_the_first_process_of_each_machine_runs_first(ranks4, tmp_path):
    def on_two_machines() -> None:
        os.environ["LOCAL_RANK"] = str(dist.get_rank() % 2)
        with PartialState().local_main_process_first():
            note()

    ranks4(on_two_machines)
    for rank in (0, 2):
        assert not set((tmp_path / f"rank-{rank}").read_text()) & set("13")
    for rank in (1, 3):
        assert set((tmp_path / f"rank-{rank}").read_text()) >= set("02")


def test_one_process_goes_first_though_there_are_two_machines(ranks4, tmp_path):
    def on_two_machines() -> None:
        os.environ["LOCAL_RANK"] = str(dist.get_rank() % 2)
        with PartialState().main_process_first():
            note()

    ranks4(on_two_machines)
    assert (tmp_path / "rank-0").read_text() == ""
    assert all("0" in (tmp_path / f"rank-{rank}").read_text() for rank in (1, 2, 3))


@pytest.mark.parametrize("method", ["main_process_first", "local_main_process_first"])
def test_an_error_in_the_first_process_releases_the_others_with_it(ranks3, tmp_path, method):
    def fail_first() -> None:
        with getattr(PartialState(), method)():
            if dist.get_rank() == 0:
                raise LookupError("no such data set")
            note()

    with pytest.raises(RankError) as caught:
        ranks3(fail_first)
    failures = caught.value.failures
    assert "LookupError: no such data set" in failures[0]
    for rank in (1, 2):
        assert (
            "RuntimeError: Rank 0 failed while the others waited for it: "
            "LookupError: no such data set" in failures[rank]
        )
    assert not list(tmp_path.glob("rank-*"))  # the others did not run
    assert ranks3(dist.get_rank) == [0, 1, 2]


def test_an_error_in_the_first_process_of_one_machine_is_raised_on_all(ranks4, tmp_path):
    def fail_on_the_second_machine() -> None:
        os.environ["LOCAL_RANK"] = str(dist.get_rank() % 2)
        with PartialState().local_main_process_first():
            note()
            if dist.get_rank() == 2:
                raise LookupError("no disk")

    with pytest.raises(RankError) as caught:
        ranks4(fail_on_the_second_machine)
    failures = caught.value.failures
    assert "LookupError: no disk" in failures[2].splitlines()[-1]
    for rank in (0, 1, 3):
        assert (
            "Rank 2 failed while the others waited for it: LookupError: no disk" in failures[rank]
        )
    assert sorted(path.name for path in tmp_path.glob("rank-*")) == ["rank-0", "rank-2"]


def test_an_interrupt_of_the_first_process_releases_the_others_too(ranks2):
    def interrupt() -> None:
        with PartialState().main_process_first():
            raise KeyboardInterrupt

    with pytest.raises(RankError) as caught:
        ranks2(interrupt)
    assert "\nKeyboardInterrupt" in caught.value.failures[0]
    assert "Rank 0 failed while the others waited for it" in caught.value.failures[1]


def fail_on_0(wait: Callable[[], object]) -> Callable[[], None]:
    """What a hook does that makes something on rank 0, for which the others wait."""

    def work() -> None:
        if dist.get_rank() == 0:
            raise LookupError("no such data set")
        wait()

    return work


def test_an_error_is_not_hidden_by_those_who_wait_in_another_operation(ranks3):
    with pytest.raises(RankError) as caught:
        ranks3(lambda: on_all(fail_on_0(PartialState().wait_for_everyone), "fit"))
    failures = caught.value.failures
    assert failures[0].splitlines()[-1] == "LookupError: no such data set"
    for rank in (1, 2):
        assert "DistributedOperationException: The processes are waiting" in failures[rank]
    assert ranks3(dist.get_rank) == [0, 1, 2]


def test_an_error_does_not_wait_for_those_who_wait_where_nothing_is_compared(ranks2):
    def body() -> str:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(guards, "_WARNED_AFTER", 0.1)
            try:
                on_all(fail_on_0(dist.barrier), "fit")
            except LookupError as error:
                dist.barrier()  # the end of this process would free the other one
                exchange(None, "fit")
                return str(error)
        return "nothing"

    assert ranks2(body, timeout=30) == ["no such data set", "nothing"]


def test_an_error_in_another_process_stays_there(ranks2):
    def fail_second() -> None:
        with PartialState().main_process_first():
            if dist.get_rank() == 1:
                raise LookupError("mine")

    with pytest.raises(RankError) as caught:
        ranks2(fail_second)
    assert list(caught.value.failures) == [1]


def test_leaving_the_block_early_releases_the_others(ranks2):
    def leave() -> list[int]:
        seen = []
        for turn in range(3):
            with PartialState().main_process_first():
                if turn == 1:
                    continue
                seen.append(turn)
        return seen

    assert ranks2(leave) == [[0, 2], [0, 2]]


def test_one_process_just_runs_the_block():
    calls = []
    with PartialState(cpu=True).main_process_first():
        calls.append(1)
    assert calls == [1]
    with pytest.raises(IndexError), PartialState().local_main_process_first():
        [][1]


def test_rank_0_runs_alone_and_the_others_wait_for_it(ranks3):
    def run() -> list[str]:
        on_main(note)
        return sorted(name for name in os.listdir() if name.startswith("rank-"))

    assert ranks3(run) == [["rank-0"]] * 3


def test_an_error_of_rank_0_is_raised_on_all(ranks2):
    def fail() -> None:
        raise LookupError("full")

    with pytest.raises(RankError) as caught:
        ranks2(lambda: on_main(fail))
    assert caught.value.failures[0].splitlines()[-1] == "LookupError: full"
    assert "Rank 0 failed while the others waited for it" in caught.value.failures[1]


def test_alone_a_process_is_rank_0():
    calls = []
    on_main(lambda: calls.append(1))
    assert calls == [1]
    with pytest.raises(LookupError, match="full"):
        exchange(LookupError("full"), "test")


def test_a_function_that_is_not_due_gives_nothing_and_keeps_its_name():
    due = False

    def double(value: int) -> int:
        """Twice."""
        return 2 * value

    wrapped = run_where(lambda: due, double)
    assert wrapped(2) is None
    due = True  # asked at each call
    assert wrapped(value=2) == 4
    assert (wrapped.__name__, wrapped.__doc__, wrapped.__wrapped__) == ("double", "Twice.", double)
