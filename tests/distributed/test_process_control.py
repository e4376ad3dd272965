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


def as_on_two_machines() -> None:
    os.environ["LOCAL_RANK"] = str(dist.get_rank() % 2)


@pytest.mark.parametrize(
    ("method", "first"), [("main_process_first", {0}), ("local_main_process_first", {0, 2})]
)
def test_the_first_process_runs_before_the_others(ranks4, tmp_path, method, first):
    def run() -> None:
        as_on_two_machines()
        with getattr(PartialState(), method)():
            note()

    ranks4(run)
    for rank in range(4):
        before = set(map(int, filter(None, (tmp_path / f"rank-{rank}").read_text().split(","))))
        assert before <= first if rank in first else before >= first


@pytest.mark.parametrize(
    ("method", "failing", "ran"),
    [("main_process_first", 0, []), ("local_main_process_first", 2, ["rank-0"])],
)
def test_an_error_in_the_first_process_is_raised_on_all(ranks4, tmp_path, method, failing, ran):
    def fail_first() -> None:
        as_on_two_machines()
        with getattr(PartialState(), method)():
            if dist.get_rank() == failing:
                raise LookupError("no such data set")
            note()

    with pytest.raises(RankError) as caught:
        ranks4(fail_first)
    failures = caught.value.failures
    assert "LookupError: no such data set" in failures.pop(failing).splitlines()[-1]
    assert len(failures) == 3
    for text in failures.values():
        assert f"Rank {failing} failed while the others waited for it: LookupError" in text
    assert sorted(path.name for path in tmp_path.glob("rank-*")) == ran
    assert ranks4(dist.get_rank) == [0, 1, 2, 3]


def test_an_interrupt_of_the_first_process_releases_the_others(ranks2):
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


def test_an_error_is_raised_although_the_others_wait_in_another_operation(ranks3):
    with pytest.raises(RankError) as caught:
        ranks3(lambda: on_all(fail_on_0(PartialState().wait_for_everyone), "fit"))
    failures = caught.value.failures
    assert failures[0].splitlines()[-1] == "LookupError: no such data set"
    for rank in (1, 2):
        assert "DistributedOperationException: The processes are waiting" in failures[rank]
    assert ranks3(dist.get_rank) == [0, 1, 2]


def test_an_error_is_raised_although_the_others_wait_in_a_bare_barrier(ranks2):
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


def test_an_error_in_a_later_process_stays_there(ranks2):
    def fail_second() -> None:
        with PartialState().main_process_first():
            if dist.get_rank() == 1:
                raise LookupError("mine")

    with pytest.raises(RankError) as caught:
        ranks2(fail_second)
    assert list(caught.value.failures) == [1]


def test_main_process_first_on_one_process():
    calls = []
    with PartialState(cpu=True).main_process_first():
        calls.append(1)
    assert calls == [1]
    with pytest.raises(IndexError), PartialState().local_main_process_first():
        [][1]


def test_on_main_runs_on_rank_0_while_the_others_wait(ranks3):
    def run() -> list[str]:
        on_main(note)
        return sorted(name for name in os.listdir() if name.startswith("rank-"))

    assert ranks3(run) == [["rank-0"]] * 3


def test_on_main_on_one_process():
    calls = []
    on_main(lambda: calls.append(1))
    assert calls == [1]
    with pytest.raises(LookupError, match="full"):
        exchange(LookupError("full"), "test")


def test_run_where_returns_none_elsewhere_and_keeps_the_metadata():
    due = False

    def double(value: int) -> int:
        """Twice."""
        return 2 * value

    wrapped = run_where(lambda: due, double)
    assert wrapped(2) is None
    due = True  # asked at each call
    assert wrapped(value=2) == 4
    assert (wrapped.__name__, wrapped.__doc__, wrapped.__wrapped__) == ("double", "Twice.", double)
