"""Who runs what, and in which order."""

from __future__ import annotations

import os

import pytest
import torch.distributed as dist

from tests.helpers.ranks import RankError
from trainer.distributed.control import local_main_first
from trainer.state import PartialState


def note() -> None:
    """Write down that this rank was here, and who had been before."""
    rank = PartialState().process_index
    before = ",".join(sorted(name[-1] for name in os.listdir() if name.startswith("rank-")))
    with open(f"rank-{rank}", "w") as file:
        file.write(before)


def test_the_first_process_runs_before_the_others(ranks3, tmp_path):
    ranks3(lambda: local_main_first(note))
    assert (tmp_path / "rank-0").read_text() == ""
    for rank in (1, 2):
        assert "0" in (tmp_path / f"rank-{rank}").read_text()


def test_the_first_process_of_each_machine_runs_first(ranks4, tmp_path):
    def on_two_machines() -> None:
        os.environ["LOCAL_RANK"] = str(dist.get_rank() % 2)
        local_main_first(note)

    ranks4(on_two_machines)
    for rank in (0, 2):
        assert not set((tmp_path / f"rank-{rank}").read_text()) & set("13")
    for rank in (1, 3):
        assert set((tmp_path / f"rank-{rank}").read_text()) >= set("02")


def test_an_error_in_the_first_process_releases_the_others_with_it(ranks3, tmp_path):
    def fail_first() -> None:
        if dist.get_rank() == 0:
            raise LookupError("no such data set")
        note()

    with pytest.raises(RankError) as caught:
        ranks3(lambda: local_main_first(fail_first))
    failures = caught.value.failures
    assert "LookupError: no such data set" in failures[0]
    for rank in (1, 2):
        assert (
            "RuntimeError: Rank 0 failed while the others waited for it: "
            "LookupError: no such data set" in failures[rank]
        )
    assert not list(tmp_path.glob("rank-*"))  # the others did not run
    assert ranks3(dist.get_rank) == [0, 1, 2]


def test_an_interrupt_of_the_first_process_releases_the_others_too(ranks2):
    def interrupt() -> None:
        raise KeyboardInterrupt

    with pytest.raises(RankError) as caught:
        ranks2(lambda: local_main_first(interrupt))
    assert "\nKeyboardInterrupt" in caught.value.failures[0]
    assert "Rank 0 failed while the others waited for it" in caught.value.failures[1]


def test_an_error_in_another_process_stays_there(ranks2):
    def fail_second() -> None:
        if dist.get_rank() == 1:
            raise LookupError("mine")

    with pytest.raises(RankError) as caught:
        ranks2(lambda: local_main_first(fail_second))
    assert list(caught.value.failures) == [1]


def test_one_process_just_runs():
    calls = []
    local_main_first(lambda: calls.append(1))
    assert calls == [1]
    with pytest.raises(IndexError):
        local_main_first(lambda: [][1])
