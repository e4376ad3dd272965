"""The numbers that the processes sum, as DDP sums them: scaled, in float32, in any order."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.helpers.device import DEVICE, counted_waits
from trainer.distributed.collectives import reduce
from trainer.distributed.step_sync import NOTHING, StepStats, StepSync, exact_in_float32
from trainer.loops import preemption

CPU = torch.device("cpu")


def reduced(vectors: list[torch.Tensor], generator: random.Random) -> torch.Tensor:
    """What DDP makes of these: each times 1/W, then added two at a time, whichever come first."""
    sums = [sync_vector * (1.0 / len(vectors)) for sync_vector in vectors]
    while len(sums) > 1:
        generator.shuffle(sums)
        one, other, *rest = sums
        # A ring adds to one sum, a tree to many.
        sums = [one + other, *rest] if generator.random() < 0.7 else [*rest, one + other]
    return sums[0]


def in_turn(vectors: list[torch.Tensor]) -> torch.Tensor:
    """The longest chain of roundings: one sum to which all are added."""
    total = vectors[0] * (1.0 / len(vectors))
    for sync_vector in vectors[1:]:
        total = total + sync_vector * (1.0 / len(vectors))
    return total


def count_of(total: torch.Tensor) -> StepStats:
    step_sync = StepSync(CPU, whole_items=True)
    assert step_sync.count(total) == step_sync.items_seen == step_sync.latest.items
    return step_sync.latest


def stats_of_ranks(world_size: int, items: list[int]) -> list[StepStats]:
    return [
        StepStats(
            float(items[rank]),
            stop_votes=float(rank % 3 == 0),
            signals=1.0,
            seconds=1e6 + 1 / 3 if rank == 0 else 0.0,
            ended=1.0,
            failed_saves=float(rank == 1),
            requested_saves=float(rank % 5),
            ended_ranks=float(rank) if rank == world_size - 1 else 0.0,
            bad_losses=1.0,
        )
        for rank in range(world_size)
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("world_size", [2, 3, 7, 49, 180, 256])
def test_sums_of_whole_numbers_are_exact_for_many_processes(world_size, dtype):
    generator = random.Random(world_size)
    own = StepSync(CPU, whole_items=True)
    largest = 2**40 if dtype == torch.float64 else 2**48
    for items in (
        [largest - 1] * world_size,  # digits that are all as large as can be
        [0xFEFDFBF7EF >> rank % 7 for rank in range(world_size)],
        [generator.randrange(largest) for _ in range(world_size)],
        [generator.randrange(300) for _ in range(world_size)],
    ):
        given = stats_of_ranks(world_size, items)
        vectors = [own.sync_vector(each, dtype, times=world_size) for each in given]
        for total in (reduced(vectors, generator), in_turn(vectors)):
            found = count_of(total)
            assert found.items == float(sum(items))
            assert found.seconds == pytest.approx(given[0].seconds, abs=0.07)
            exact = [sum(column) for column in zip(*given, strict=True)]
            exact[0], exact[3] = found.items, found.seconds
            assert list(found) == exact


def test_float32_is_used_where_it_is_exact_and_shares_a_bucket():
    def dtype(*types: torch.dtype, processes: int = 2, whole: bool = True) -> torch.dtype:
        parameters = [nn.Parameter(torch.zeros(1, dtype=each)) for each in types]
        return StepSync(CPU, whole_items=whole).dtype_beside(parameters, processes)

    assert dtype(torch.float32) == dtype(torch.bfloat16, torch.float32) == torch.float32
    assert dtype(torch.bfloat16) == dtype(torch.float64, torch.float32) == torch.float64
    assert dtype(torch.float32, whole=False) == torch.float64
    assert dtype(torch.float32, processes=180) == torch.float32
    assert dtype(torch.float32, processes=181) == torch.float64
    assert [n for n in range(170, 300) if exact_in_float32(n)] == [*range(170, 181), 256]
    assert exact_in_float32(2**16)
    assert not exact_in_float32(2**17)


def test_items_may_be_fractions():
    step_sync = StepSync(CPU)
    given = [NOTHING._replace(items=items, ended=1.0) for items in (0.25, 1.5, 2.0)]
    total = in_turn([step_sync.sync_vector(each, times=3) for each in given])
    assert step_sync.count(total) == pytest.approx(3.75, rel=1e-15)
    assert step_sync.latest.ended == 3


def test_a_bad_loss_flag_on_the_device_is_counted():
    def sync_vector(bad: Any) -> list[float]:
        own = NOTHING._replace(items=259.0, bad_losses=bad)
        return StepSync(CPU).sync_vector(own, torch.float32, times=2).tolist()

    assert sync_vector(torch.tensor(1.0)) == sync_vector(1.0) == [6, 2, *[0] * 13, 2]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_on_an_accelerator_sums_are_read_one_update_later_without_a_device_sync(monkeypatch, dtype):
    first = NOTHING._replace(items=2.0**40 + 255.0, seconds=8.0, ended=1.0)
    with counted_waits(monkeypatch) as waits:
        step_sync = StepSync(DEVICE, whole_items=True)
        found = []
        for update in range(3):
            bad = torch.full((), float(update == 2), device=DEVICE)  # on the device alone
            own = first._replace(items=first.items + update, bad_losses=bad)
            # As DDP leaves a sum of two, not quite whole.
            total = (
                step_sync.sync_vector(own, dtype, times=2) * 0.5 * (1 - torch.finfo(dtype).eps / 2)
            )
            items = step_sync.count(total)
            assert items.device == step_sync.bad_losses.device == DEVICE
            found.append((items, step_sync.bad_losses, step_sync.latest.items))
            waits.updates += 1
        assert waits.total == 0
        step_sync.read_pending()
    assert [items.host.item() for items, _, _ in found] == [first.items + n for n in range(3)]
    assert [bad.host.item() for _, bad, _ in found] == [0.0, 0.0, 1.0]
    assert [known for _, _, known in found] == [0.0, first.items, first.items + 1]
    assert step_sync.latest.bad_losses == step_sync.latest.ended == 1
    assert step_sync.items_seen == 3 * first.items + 3


@pytest.mark.parametrize(
    ("seconds", "rounds_after", "aligned"),
    [(0.0, 16, True), (0.3, 3, True), (5.0, 1, True), (5.0, 16, False)],
)
def test_a_signal_to_one_rank_in_evaluation_reaches_all_within_about_a_second(
    ranks2, seconds, rounds_after, aligned
):
    def rounds_until_seen() -> list[tuple[int, int]]:
        """Signal rank 1 in the eleventh round of each of two evaluations."""
        vote, rank = preemption.ExitVote(), dist.get_rank()
        now, asked, heard = [0.0], [], []

        def recorded(votes: torch.Tensor) -> torch.Tensor:
            asked.append(votes)
            return reduce(votes)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(preemption, "reduce", recorded)
            # Only rank 0's clock counts, so that all ask in the same rounds.
            patch.setattr(preemption.time, "monotonic", lambda: now[0] if rank == 0 else 0.0)
            for _ in range(2):
                for round_idx in range(60):
                    messages = round_idx >= 10 and rank == 1
                    where = {"rank": rank, "device": torch.device("cpu"), "aligned": aligned}
                    if vote.any_rank(round_idx, messages, **where):
                        break
                    now[0] += seconds
                heard.append((round_idx, len(asked)))
        return heard

    (first, again), others = ranks2(rounds_until_seen)
    assert others == [first, again]
    assert first[0] == again[0] <= 10 + rounds_after
    assert again[1] == 2 * first[1]
    if not seconds:
        assert first[1] == 5  # before rounds 0, 1, 3, 7 and 15
    if not aligned:
        assert first[1] == 2  # before rounds 0 and 16


@pytest.mark.parametrize("items", [0.0, 3.0])
def test_votes_to_end_an_epoch_are_read_before_other_processes_learn_of_them(monkeypatch, items):
    with counted_waits(monkeypatch):
        step_sync = StepSync(DEVICE, whole_items=True)
        step_sync.count(step_sync.sync_vector(NOTHING._replace(items=items, epoch_votes=1.0)))
        assert step_sync.no_batch_ran() is (items == 0)
        assert step_sync.latest == NOTHING
        step_sync.read_pending()
    assert (step_sync.latest.epoch_votes, step_sync.items_seen) == (1, items)
