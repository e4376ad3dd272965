"""Prepared loaders of several processes: dispatching, synchronised generators, joint errors."""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import sys
import time
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, IterableDataset

from tests.helpers.datasets import Numbers, SizedStream, Stream
from tests.helpers.ranks import RankError
from trainer.accelerator import Accelerator
from trainer.configuration import DataLoaderConfiguration
from trainer.data import workers
from trainer.data.dispatcher import DataLoaderDispatcher
from trainer.data.prepare import prepare_data_loader, skip_first_batches
from trainer.distributed.collectives import gather
from trainer.rng import set_seed
from trainer.state import GradientState
from trainer.utils import slice_tensors


class PrivateStream(Stream):
    """A stream that only rank 0 may read."""

    def __iter__(self):
        if dist.get_rank() != 0:
            raise AssertionError("another rank reads")
        return super().__iter__()


def dispatched(source: DataLoader[Any], **options: Any) -> DataLoaderDispatcher:
    loader = prepare_data_loader(
        source, put_on_device=True, **{"dispatch_batches": True, **options}
    )
    assert isinstance(loader, DataLoaderDispatcher)
    return loader


def rounds(
    items: int, batch_size: int, world_size: int, *, split: bool, even: bool, drop_last: bool
) -> list[list[list[int]]]:
    """What each process gets of a dispatched stream, by arithmetic on samples alone."""
    together = batch_size if split else batch_size * world_size
    found: list[list[list[int]]] = [[] for _ in range(world_size)]
    for start in range(0, items, together):
        part = list(range(start, min(start + together, items)))
        if len(part) < together and drop_last:
            continue
        own = -(-len(part) // world_size) if even else together // world_size
        if even:
            part += [number % items for number in range(own * world_size - len(part))]
        for rank in range(world_size):
            if mine := part[rank * own : (rank + 1) * own]:
                found[rank].append(mine)
    return found


def read_all(kind: type, world_size: int) -> list[str]:
    """Every case, on this rank; what differs from `rounds`."""
    rank, wrong = dist.get_rank(), []
    for split, even, drop_last in product([False, True], repeat=3):
        for batch_size, items in product([1, 2, 4], [0, 1, 3, 5, 8, 13]):
            if split and batch_size % world_size:
                continue
            loader = dispatched(
                DataLoader(kind(items), batch_size, drop_last=drop_last),
                split_batches=split,
                even_batches=even,
            )
            every = rounds(
                items, batch_size, world_size, split=split, even=even, drop_last=drop_last
            )
            own = every[rank]
            together = batch_size if split else batch_size * world_size
            left = -1 if drop_last else items % together
            seen = [(b.tolist(), loader.end_of_dataloader, loader.remainder) for b in loader]
            expected = [(batch, False, -1) for batch in own]
            if own:
                uneven = len(own) < len(every[0])  # its last batch is of a full round
                expected[-1] = (own[-1], True, 0 if uneven and not drop_last else left)
            announced = None if kind is Stream else len(loader)
            if seen != expected or announced not in (None, len(own)):
                wrong.append(
                    f"{items=} {batch_size=} {split=} {even=} {drop_last=}: {announced} "
                    f"{seen} for {expected}"
                )
    return wrong


@pytest.mark.parametrize("kind", [Numbers, SizedStream])
def test_dispatched_batches_on_two_processes(ranks2, kind):
    assert ranks2(read_all, kind, 2) == [[], []]


def test_dispatched_batches_on_four_processes(ranks4):
    assert ranks4(read_all, Stream, 4) == [[]] * 4


# -- dispatching -------------------------------------------------------------------------------


def test_dispatching_reads_on_rank_0_only(ranks2):
    def read() -> list[Any]:
        loader = dispatched(DataLoader(PrivateStream(5), 2, shuffle=False))
        found = [batch.tolist() for batch in loader]
        staying = DataLoader(Stream(5), 2, num_workers=1, persistent_workers=True)
        again = dispatched(staying)
        passes = [[batch.tolist() for batch in again] for _ in range(2)]
        again.epoch_iterator.close()
        return [found, *passes, again.gradient_state.in_dataloader]

    first, second = ranks2(read)
    assert first == [[[0, 1], [4]]] * 3 + [False]
    assert second == [[[2, 3], [0]]] * 3 + [False]


def test_samples_left_of_uneven_batches_go_to_the_next_round(ranks2):
    def read(batches: list[list[int]], even: bool) -> tuple[list[list[int]], int]:
        source = DataLoader(Numbers(20), batch_sampler=batches)
        loader = dispatched(source, even_batches=even)
        remainder = -1
        found = []
        for batch in loader:
            found.append(batch.tolist())
            remainder = loader.remainder
        return found, remainder

    batches = [[0, 1], [2], [3, 4], [5, 6], [7]]
    assert ranks2(read, batches, True) == [
        ([[0], [2, 3], [6]], 2),
        ([[1], [4, 5], [7]], 2),
    ]
    assert ranks2(read, [[0], [1], [2]], True) == [([[0], [2]], 1), ([[1], [0]], 1)]
    assert ranks2(read, [[0], [1], [2]], False) == [([[0], [2]], 1), ([[1]], 2)]


def test_ready_batches_that_cannot_be_joined_are_split_one_at_a_time(ranks2):
    def read(options: dict[str, Any]) -> Any:
        batches = [torch.full((4, width), float(width)) for width in (2, 3)]
        try:
            loader = dispatched(DataLoader(batches, batch_size=None), **options)
            return [batch.tolist() for batch in loader]
        except (ValueError, RuntimeError) as error:
            return str(error)

    for text in ranks2(read, {}):
        assert "split_batches=True to split one batch at a time" in text
    own = [[[2.0, 2.0]] * 2, [[3.0, 3.0, 3.0]] * 2]
    assert ranks2(read, {"split_batches": True}) == [own, own]


def test_slice_fn_for_dispatch(ranks2):
    def read() -> list[list[int]]:
        def every_other(batch, part, process_index, num_processes):
            assert part == slice(process_index * 2, process_index * 2 + 2)
            return batch[process_index::num_processes]

        loader = dispatched(DataLoader(Numbers(8), 2), slice_fn_for_dispatch=every_other)
        return [batch.tolist() for batch in skip_first_batches(loader, 1)]

    assert ranks2(read) == [[[4, 6]], [[5, 7]]]


@pytest.mark.parametrize("options", [
    {}, {"dispatch_batches": False}, {"even_batches": False},
    {"slice_fn_for_dispatch": slice_tensors},
])  # fmt: skip  # a table
def test_lists_that_are_no_columns_stay_whole(ranks2, options):
    """A list that is as long as a round, but not as a batch, belongs to the whole batch."""

    def collate(samples):
        numbers = torch.tensor(samples)
        names = tuple(f"n{number}" for number in numbers.tolist())
        return {"x": numbers, "name": names, "classes": ["first", "second"]}

    def job():
        source = DataLoader(Stream(5), 1, collate_fn=collate)
        loader = prepare_data_loader(source, put_on_device=True, **options)
        return [(batch["name"], batch["classes"]) for batch in loader]

    found = ranks2(job)
    if "slice_fn_for_dispatch" not in options:
        last = 0 if options.get("even_batches", True) else None
        expected = [[0, 2, 4], [1, 3, last]]
        assert [[name for name, _ in own] for own in found] == [
            [(f"n{n}",) for n in own if n is not None] for own in expected
        ]
    assert all(classes == ["first", "second"] for own in found for _, classes in own)


class Onward(IterableDataset):
    """Numbers, from where it is on; that is its state."""

    def __init__(self, size: int):
        self.size, self.at = size, 0

    def __iter__(self):
        self.at %= self.size
        while self.at < self.size:
            self.at += 1
            yield self.at - 1

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


@pytest.mark.parametrize(
    ("dispatch", "even", "stateful"),
    [(True, True, False), (True, False, True), (False, True, True), (False, False, False)],
)
def test_a_stateful_stream_resumes_on_all_processes(ranks2, tmp_path, dispatch, even, stateful):
    def job():
        config = DataLoaderConfiguration(
            dispatch_batches=dispatch, even_batches=even, use_stateful_dataloader=stateful
        )
        accelerator = Accelerator(cpu=True, dataloader_config=config)
        loader = accelerator.prepare(DataLoader(Onward(9), 2))
        found = [[], [], []]
        for epoch in range(3):
            for number, batch in enumerate(loader):
                found[epoch].append(batch.tolist())
                if (epoch, number) == (1, 0):
                    accelerator.save_state(tmp_path / "state")
        accelerator.load_state(tmp_path / "state")
        again = [loader if stateful else skip_first_batches(loader, 1), loader]
        return found, [[batch.tolist() for batch in batches] for batches in again]

    for (first, second, third), again in ranks2(job):
        assert first == second == third
        assert again == [second[1:], third]


def test_the_length_of_a_dispatcher_is_that_of_its_sampler(ranks2):
    def lengths() -> tuple[int, int]:
        source = DataLoader(Numbers(12), 4, sampler=range(10))
        loader = dispatched(source, split_batches=True, even_batches=False)
        return len(loader), len(list(loader))

    assert ranks2(lengths) == [(3, 3), (2, 2)]


def test_skip_first_batches_of_a_dispatcher(ranks2):
    def read() -> tuple[bool, list[int]]:
        reads: list[int] = []

        class Noisy(Numbers):
            def __getitem__(self, index):
                reads.append(index)
                return index, float(torch.rand(()))

        set_seed(1)
        loader = dispatched(DataLoader(Noisy(9), 2, shuffle=True))
        list(loader)
        loader.set_epoch(1)
        whole = [[leaf.tolist() for leaf in batch] for batch in loader]
        alike = []
        for skip in range(5):
            loader.set_epoch(1)
            reads.clear()
            skipped = skip_first_batches(loader, skip)
            rest = [[leaf.tolist() for leaf in batch] for batch in skipped]
            alike.append(rest == whole[skip:] and len(skipped) == len(rest))
            if skip == 2:  # the last sample, and the first round to complete its batch
                count = len(reads)
        stream = dispatched(DataLoader(Stream(9), 2))
        rest = [batch.tolist() for batch in skip_first_batches(stream, 1)]
        stream.set_epoch(0)
        ends = [rest == [batch.tolist() for batch in stream][1:]]
        return all(alike + ends), count

    assert ranks2(read) == [(True, 5), (True, 0)]


def test_broken_and_nested_loops_over_dispatchers(ranks2):
    def read() -> list[Any]:
        outer, inner = dispatched(DataLoader(Numbers(8), 2)), dispatched(DataLoader(Stream(6), 1))
        found = []
        for _ in outer:
            for batch in inner:
                found.append(batch.tolist())
                if len(found) % 2 == 0:
                    break
            found.append(GradientState().active_dataloader is outer)
        found += [a.tolist() + b.tolist() for a, b in zip(outer, inner, strict=False)]
        return found

    assert ranks2(read) == [
        [[0], [2], True, [0], True, [0, 1, 0], [4, 5, 2]],
        [[1], [3], True, [1], True, [2, 3, 1], [6, 7, 3]],
    ]


@pytest.mark.parametrize("place", ["at once", "later", "unlike", "unpicklable"])
def test_a_reading_error_on_rank_0_raises_on_all(ranks2, place):
    class Breaking(IterableDataset):
        def __iter__(self):
            if place == "at once":
                raise KeyError("no such file")
            yield from range(4)
            if place == "later":
                raise KeyError("no such file")
            yield from range(4)

    def collate(samples: list) -> Any:
        if place == "unlike" and len(reads) == 3:
            return torch.ones(2, 3)
        reads.append(samples)
        made: Any = torch.tensor(samples)
        return (made, lambda: None) if place == "unpicklable" else made

    reads: list[Any] = []

    def read() -> tuple[list[Any], str, str, bool]:
        reads.clear()
        loader = dispatched(DataLoader(Breaking(), 2, collate_fn=collate), split_batches=False)
        found: list[Any] = []
        try:
            found.extend((batch.tolist(), loader.end_of_dataloader) for batch in loader)
        except Exception as error:  # noqa: BLE001  # whatever it is, it is looked at
            kind, text = type(error).__name__, str(error)
        everybody = gather(torch.tensor([1])).tolist()
        return found, kind, text, everybody == [1, 1] and not GradientState().in_dataloader

    first, second = ranks2(read)
    before = place in ("later", "unlike")
    assert first[0] == ([([0, 1], False)] if before else [])
    assert second[0] == ([([2, 3], False)] if before else [])
    assert (first[3], second[3]) == (True, True)
    assert second[1] == "RuntimeError"
    assert f"Reading the data failed on rank 0: {first[1]}: {first[2]}" == second[2]
    expected = {"unlike": "samples have the shapes", "unpicklable": "lambda"}
    assert expected.get(place, "no such file") in first[2]


# -- on every process --------------------------------------------------------------------------


def test_the_shuffled_order_is_the_same_on_any_number_of_processes(ranks2, ranks4):
    def read() -> list[list[int]]:
        set_seed(3, device_specific=True)  # rank 0's seed counts
        source = DataLoader(Numbers(16), 2, shuffle=True)
        loader = prepare_data_loader(source, put_on_device=True)
        return [torch.cat([gather(batch) for batch in loader]).tolist() for _ in range(2)]

    set_seed(3)
    loader = prepare_data_loader(DataLoader(Numbers(16), 2, shuffle=True))
    alone = [torch.cat(list(loader)).tolist() for _ in range(2)]
    assert alone[0] != alone[1]
    assert ranks2(read) == [alone] * 2
    assert ranks4(read) == [alone] * 4


def test_one_rank_may_prepare_a_loader_for_itself(ranks2):
    def read() -> list[list[int]]:
        if dist.get_rank() == 1:
            return []
        own = prepare_data_loader(DataLoader(Numbers(5), 2), num_processes=1, process_index=0)
        return [batch.tolist() for batch in own]

    assert ranks2(read) == [[[0, 1], [2, 3], [4]], []]


def test_rng_types_are_synchronised_at_the_start_of_a_pass(ranks2):
    class Shuffling(Stream):
        def __init__(self, size: int):
            super().__init__(size)
            self.generator = torch.Generator()

        def __iter__(self):
            return iter(torch.randperm(self.size, generator=self.generator).tolist())

    def draw(kinds: list[str]) -> tuple[int, list[int]]:
        torch.manual_seed(dist.get_rank())
        dataset = Shuffling(8)
        dataset.generator.manual_seed(dist.get_rank())
        source = DataLoader(dataset, 2)
        loader = prepare_data_loader(source, rng_types=kinds)
        seen = [i for batch in loader for i in batch.tolist()]
        return int(torch.randint(10**6, ())), seen

    (one, ours), (other, theirs) = ranks2(draw, ["generator"])
    assert one != other
    assert sorted(ours + theirs) == list(range(8))
    (one, _), (other, _) = ranks2(draw, ["torch", "generator"])
    assert one == other
    assert [seen for _, seen in ranks2(draw, [])] == [ours, theirs]  # it is seeded as the order is


def test_a_stream_that_differs_between_ranks_raises(ranks2):
    class Own(Stream):
        def __iter__(self):
            return iter(range(dist.get_rank(), self.size))

    def read() -> None:
        list(prepare_data_loader(DataLoader(Own(8), 2)))

    with pytest.raises(RankError, match="The stream starts with a different batch on each process"):
        ranks2(read)


old_forks = pytest.mark.skipif(
    sys.version_info >= (3, 11, 8), reason="this Python's forks cannot hang so"
)


@old_forks
@pytest.mark.parametrize("late", ["forever", "a little"])
def test_a_worker_that_hangs_in_its_fork_is_forked_again(ranks2, late):
    def read() -> tuple[list[int], int, list[str]]:
        forks: list[int] = []
        messages: list[str] = []

        # This runs before the child's first instruction, where the lock is waited for.
        def in_child() -> None:
            if late == "forever" and len(forks) == 1:
                signal.pause()
            if late == "a little":
                time.sleep(0.02)

        os.register_at_fork(before=lambda: forks.append(1), after_in_child=in_child)
        source = DataLoader(Numbers(8), num_workers=2, timeout=30)
        loader = prepare_data_loader(source)
        with pytest.MonkeyPatch.context() as patch:
            if late == "a little":  # until it is doubled often enough, children begin too late
                patch.setattr(workers, "_START_PATIENCE", 1e-5)
            patch.setattr(logging.Handler, "emit", lambda _, record: messages.append(record.msg))
            workers.logger.addHandler(handler := logging.Handler())
            values = [int(batch) for batch in loader]
            workers.logger.removeHandler(handler)
        assert loader.multiprocessing_context is source.multiprocessing_context
        return values, len(forks), messages

    for rank, (values, forks, messages) in enumerate(ranks2(read)):
        assert values == [rank, rank + 2, rank + 4, rank + 6]
        assert forks >= 3
        assert "did not start within %g s after its fork" in messages[0]


@old_forks
def test_an_interrupt_while_workers_start_leaves_no_process(ranks2):
    def interrupted() -> list[str]:
        hangs: list[bool] = []

        def in_child() -> None:
            if hangs:
                signal.pause()

        def in_parent() -> None:
            if hangs:
                signal.setitimer(signal.ITIMER_REAL, 0.1)

        os.register_at_fork(after_in_child=in_child, after_in_parent=in_parent)
        loader = prepare_data_loader(DataLoader(Numbers(8), num_workers=1))
        before = signal.signal(signal.SIGALRM, signal.default_int_handler)
        hangs.append(True)
        try:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(workers, "_START_PATIENCE", 60.0)
                with pytest.raises(KeyboardInterrupt):
                    list(loader)
        finally:
            signal.signal(signal.SIGALRM, before)
            hangs.clear()
        children = Path("/proc/self/task").glob("*/children")
        return [pid for each in children for pid in each.read_text().split()]

    assert ranks2(interrupted) == [[], []]


@pytest.mark.parametrize("how", [None, "fork", "spawn"])
def test_the_users_multiprocessing_context_is_kept_where_it_is_safe(monkeypatch, how):
    context = None if how is None else multiprocessing.get_context(how)
    assert workers.safe_context(context) is context  # without a process group
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    safe = workers.safe_context(context)
    assert (safe is context) == (how == "spawn" or sys.version_info >= (3, 11, 8))
    if safe is not context:
        assert workers.safe_context(safe) is safe
