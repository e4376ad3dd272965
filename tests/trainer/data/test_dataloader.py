"""Epochs in rounds, one batch ahead, and the loader that `Accelerator.prepare` returns."""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from itertools import chain

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    SequentialSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from trainer.accelerator import Accelerator
from trainer.data import workers
from trainer.data.dataloader import DataLoaderShard
from trainer.data.epoch_iterator import EpochIterator
from trainer.state import GradientState

CPU = torch.device("cpu")


class Numbers(Dataset):
    def __init__(self, size: int):
        self.size = size
        self.epochs = []

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        return index

    def set_epoch(self, epoch):
        self.epochs.append(epoch)


class Stream(IterableDataset):
    """Numbers one by one; how many it gave is counted."""

    def __init__(self, size: int):
        self.size = size
        self.given = 0

    def __iter__(self):
        for number in range(self.size):
            self.given += 1
            yield number


class SizedStream(Stream):
    def __len__(self):
        return self.size


class RandomStream(Stream):
    def __iter__(self):
        for _ in range(self.size):
            yield int(torch.randint(10**6, ()))


def listed(batch) -> list[int]:
    return batch.tolist()


def read(source, world_size: int = 1, *, epoch: int = 0, limit: int | None = None, **kwargs):
    """The batches of each process in one epoch; None where it has none in a round."""
    epoch_iterators = [
        EpochIterator(source, rank=rank, world_size=world_size, **kwargs)
        for rank in range(world_size)
    ]
    found = []
    for epoch_iterator in epoch_iterators:
        epoch_iterator.limit = limit
        epoch_iterator.set_epoch(epoch)
        found.append(
            [listed(r.batch) if r.present else None for r in epoch_iterator.global_batches()]
        )
    return found


def shard(source, rank: int = 0, world_size: int = 1, *, even: bool = True) -> DataLoaderShard:
    return DataLoaderShard(
        source,
        rank=rank,
        world_size=world_size,
        seed=0,
        even_batches=even,
        device=CPU,
        non_blocking=False,
    )


def shards(source, world_size: int = 2, *, even: bool = True) -> list[list[list[int]]]:
    """What each process reads, checked against the lengths that it announces."""
    found = []
    for rank in range(world_size):
        own = shard(source, rank, world_size, even=even)
        batches = [listed(batch) for batch in own]
        assert len(own) == len(batches)
        found.append(batches)
    return found


# -- rounds ------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [0, 2])
def test_every_process_sees_every_round(workers):
    loader = DataLoader(Numbers(9), 2, num_workers=workers)
    assert read(loader, 2) == [[[0, 1], [4, 5], [8]], [[2, 3], [6, 7], None]]
    assert read(loader, 3) == [[[0, 1], [6, 7]], [[2, 3], [8]], [[4, 5], None]]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("stream", [Stream, SizedStream])
def test_a_stream_is_dealt_out_like_a_dataset(stream, workers):
    loader = DataLoader(stream(9), 2, num_workers=workers and 1)
    assert read(loader, 2) == read(DataLoader(Numbers(9), 2), 2)
    assert read(loader, 3) == read(DataLoader(Numbers(9), 2), 3)


def test_any_iterable_of_batches_is_dealt_out():
    batches = [torch.tensor([0, 1]), torch.tensor([2]), torch.tensor([3])]
    assert read(batches, 2) == [[[0, 1], [3]], [[2], None]]
    assert EpochIterator(batches, world_size=2).num_batches == 3


def test_a_source_that_cannot_be_read_is_refused():
    with pytest.raises(TypeError, match=r"A loader is 7 of type int; it must be a DataLoader"):
        EpochIterator(7)
    holder = type("Holder", (), {"train_dataloader": None})()  # as Lightning's data modules
    with pytest.raises(TypeError, match=r"derives from trainer\.DataModule"):
        EpochIterator(holder)


class Endless(torch.utils.data.Dataset):
    def __getitem__(self, index):
        return torch.tensor(index)


def test_a_dataset_without_a_length_is_refused_unless_the_sampler_knows_what_to_read():
    with pytest.raises(TypeError, match="'Endless' has no len"):
        read(DataLoader(Endless(), 2))
    assert read(DataLoader(Endless(), 2, sampler=[5, 3, 4])) == [[[5, 3], [4]]]
    assert read(DataLoader(Endless(), batch_sampler=[[5, 3], [4]])) == [[[5, 3], [4]]]


@pytest.mark.parametrize("source", [DataLoader(Numbers(9), 2), DataLoader(Stream(9), 2)])
def test_rounds_tell_sizes_and_the_end_alike_on_all_processes(source):
    global_batches = []
    for rank in (0, 1):
        epoch_iterator = EpochIterator(source, rank=rank, world_size=2)
        epoch_iterator.set_epoch(0)
        global_batches.append(list(epoch_iterator.global_batches()))
    for own in global_batches:
        assert [r.last for r in own] == [False, False, True]
        assert [r.global_samples for r in own] == [4, 4, 1]
        assert [r.real_samples for r in own] == [4, 4, 1]
        assert [r.batches for r in own] == [2, 2, 1]
    assert [r.samples for r in global_batches[0]] == [2, 2, 1]
    assert [r.samples for r in global_batches[1]] == [2, 2, 0]


def test_an_epoch_without_data_has_no_round():
    assert read(DataLoader(Numbers(0), 2), 2) == [[], []]
    assert read(DataLoader(Stream(0), 2), 2) == [[], []]


@pytest.mark.parametrize("source", [Numbers(9), Stream(9), SizedStream(9)])
def test_limits_count_batches_over_all_processes(source):
    loader = DataLoader(source, 2)
    assert read(loader, 2, limit=3) == [[[0, 1], [4, 5]], [[2, 3], None]]
    assert read(loader, 2, limit=50) == read(loader, 2)
    epoch_iterator = EpochIterator(loader, rank=1, world_size=2)
    epoch_iterator.limit = 3
    assert (
        epoch_iterator.num_batches,
        epoch_iterator.num_global_batches,
        epoch_iterator.num_own_batches,
    ) == (3, 2, 1)


def test_a_limited_stream_is_not_read_further():
    dataset = Stream(100)
    read(DataLoader(dataset, 2), limit=2)
    assert dataset.given == 4


def test_numbers_of_batches_are_known_where_something_has_a_length():
    epoch_iterator = EpochIterator(DataLoader(Numbers(9), 2), rank=1, world_size=2)
    assert (
        epoch_iterator.num_batches,
        epoch_iterator.num_global_batches,
        epoch_iterator.num_own_batches,
    ) == (5, 3, 2)
    epoch_iterator = EpochIterator(DataLoader(SizedStream(9), 2), rank=0, world_size=2)
    assert (
        epoch_iterator.num_batches,
        epoch_iterator.num_global_batches,
        epoch_iterator.num_own_batches,
    ) == (5, 3, 3)
    epoch_iterator = EpochIterator(DataLoader(Stream(9), 2), world_size=2)
    assert (
        epoch_iterator.num_batches,
        epoch_iterator.num_global_batches,
        epoch_iterator.num_own_batches,
    ) == (None, None, None)


def test_the_transfer_is_called_one_batch_ahead():
    moved = []

    def transfer(batch):
        moved.append(listed(batch))
        return batch + 100

    epoch_iterator = EpochIterator(DataLoader(Numbers(3), 1))
    epoch_iterator.set_epoch(0)
    seen = [(listed(r.batch), len(moved)) for r in epoch_iterator.global_batches(transfer)]
    assert seen == [([100], 2), ([101], 3), ([102], 3)]


def test_the_size_of_a_ready_made_batch_is_read_from_it():
    dataset = [torch.arange(3), torch.arange(1), torch.tensor(7)]
    epoch_iterator = EpochIterator(DataLoader(dataset, batch_size=None), rank=0, world_size=2)
    epoch_iterator.set_epoch(0)
    global_batches = list(epoch_iterator.global_batches())
    assert [(r.samples, r.global_samples) for r in global_batches] == [(3, None), (1, None)]


def test_samples_without_batches_are_read():
    loader = DataLoader([torch.tensor([i]) for i in range(5)], batch_size=None)
    assert read(loader, 2) == [[[0], [2], [4]], [[1], [3], None]]


def test_reading_can_start_inside_an_epoch():
    epoch_iterator = EpochIterator(DataLoader(Numbers(9), 2, shuffle=True), rank=0, world_size=2)
    epoch_iterator.set_epoch(3)
    whole = [listed(r.batch) for r in epoch_iterator.global_batches()]
    epoch_iterator.start_global_batch = 1
    epoch_iterator.set_epoch(3)
    assert [listed(r.batch) for r in epoch_iterator.global_batches()] == whole[1:]


def test_a_stream_read_again_from_inside_says_what_it_costs(caplog):
    caplog.set_level(logging.WARNING)
    epoch_iterator = EpochIterator(DataLoader(Stream(9), 2), rank=0, world_size=2)
    epoch_iterator.set_epoch(0)
    epoch_iterator.start_global_batch = 2
    assert [listed(r.batch) for r in epoch_iterator.global_batches()] == [[8]]
    assert "4 batches are read again and discarded" in caplog.text


# -- the order ---------------------------------------------------------------------------------


def test_the_order_of_a_loader_is_a_function_of_seed_and_epoch():
    loader = DataLoader(Numbers(20), 4, shuffle=True)
    first = read(loader, seed=3, epoch=5)
    torch.manual_seed(99)
    assert read(loader, seed=3, epoch=5) == first
    assert read(loader, seed=3, epoch=6) != first
    assert read(loader, seed=4, epoch=5) != first
    epoch_iterator = EpochIterator(loader, seed=3)
    epoch_iterator.reseed(4)
    epoch_iterator.set_epoch(5)
    assert [[listed(r.batch) for r in epoch_iterator.global_batches()]] == read(
        loader, seed=4, epoch=5
    )


def test_samplers_that_draw_globally_are_a_function_of_seed_and_epoch():
    sampler = WeightedRandomSampler([1.0] * 20, 20)
    loader = DataLoader(Numbers(20), 4, sampler=sampler)
    torch.manual_seed(1)
    first = read(loader, 2, epoch=1)
    torch.manual_seed(2)
    assert read(loader, 2, epoch=1) == first
    assert read(loader, 2, epoch=2) != first


def test_streams_that_draw_globally_are_alike_on_all_processes():
    loader = DataLoader(RandomStream(8), 2)
    (alone,) = read(loader, seed=3, epoch=1)
    found = []
    for rank in (0, 1):
        torch.manual_seed(rank)
        epoch_iterator = EpochIterator(loader, rank=rank, world_size=2, seed=3)
        epoch_iterator.set_epoch(1)
        found.append([listed(r.batch) for r in epoch_iterator.global_batches()])
    assert found == [alone[0::2], alone[1::2]]
    assert read(loader, seed=3, epoch=2) != [alone]


def test_streams_that_draw_in_a_worker_are_a_function_of_seed_and_epoch():
    loader = DataLoader(RandomStream(4), 2, num_workers=1)
    first = read(loader, 2, seed=3, epoch=1)
    torch.manual_seed(99)
    assert read(loader, 2, seed=3, epoch=1) == first
    assert read(loader, 2, seed=3, epoch=2) != first
    assert read(loader, 2, seed=4, epoch=1) != first


def test_reading_leaves_the_global_generators_alone():
    for source in (
        DataLoader(Numbers(8), 2, shuffle=True),
        DataLoader(Numbers(8), 2, shuffle=True, num_workers=1),
        DataLoader(RandomStream(8), 2),
    ):
        state = torch.get_rng_state()
        read(source)
        assert torch.equal(torch.get_rng_state(), state)


def test_the_dataset_hears_of_the_epoch():
    dataset = Numbers(4)
    read(DataLoader(dataset, 2), epoch=7)
    assert dataset.epochs == [7]


def test_persistent_workers_read_the_next_epoch_after_one_that_was_left():
    loader = DataLoader(Numbers(12), 2, shuffle=True, num_workers=1, persistent_workers=True)
    epoch_iterator = EpochIterator(loader)
    epoch_iterator.set_epoch(0)
    global_batches = epoch_iterator.global_batches()
    next(global_batches)
    global_batches.close()
    epoch_iterator.set_epoch(1)
    left = [(listed(r.batch), r.samples) for r in epoch_iterator.global_batches()]
    assert [batch for batch, _ in left] == read(DataLoader(Numbers(12), 2, shuffle=True), epoch=1)[
        0
    ]
    assert [samples for _, samples in left] == [2] * 6
    del epoch_iterator, global_batches


# -- the prepared loader -----------------------------------------------------------------------

# The table of `reference/` for two processes.


def test_even_batches_are_filled_from_the_beginning():
    loader = DataLoader(Numbers(9), 2)
    assert shards(loader) == [[[0, 1], [4, 5], [8, 0]], [[2, 3], [6, 7], [1, 2]]]
    assert shards(DataLoader(Numbers(3), 4)) == [[[0, 1, 2, 0]], [[1, 2, 0, 1]]]


def test_uneven_batches_are_left_as_they_are():
    assert shards(DataLoader(Numbers(9), 2), even=False) == [
        [[0, 1], [4, 5], [8]],
        [[2, 3], [6, 7]],
    ]


def test_drop_last_leaves_full_rounds():
    loader = DataLoader(Numbers(9), 2, drop_last=True)
    assert shards(loader) == [[[0, 1], [4, 5]], [[2, 3], [6, 7]]]


@pytest.mark.parametrize("stream", [Stream, SizedStream])
def test_every_process_gets_as_many_batches_of_a_stream(stream):
    def read_by_both(items: int, batch_size: int) -> list[list[list[int]]]:
        loader = DataLoader(stream(items), batch_size)
        return [[listed(batch) for batch in shard(loader, rank, 2)] for rank in (0, 1)]

    assert read_by_both(8, 2) == [[[0, 1], [4, 5]], [[2, 3], [6, 7]]]
    assert read_by_both(9, 2) == [[[0, 1], [4, 5], [8, 0]], [[2, 3], [6, 7], [1, 2]]]
    assert read_by_both(3, 4) == [[[0, 1, 2, 0]], [[1, 2, 0, 1]]]


def test_the_remainder_of_a_stream_counts_no_repeated_samples():
    for rank in (0, 1):
        loader = shard(DataLoader(Stream(9), 2), rank, 2)
        assert [loader.remainder for _ in loader] == [-1, -1, 1]


def test_one_process_repeats_nothing():
    assert shards(DataLoader(Numbers(3), 2), 1) == [[[0, 1], [2]]]


@pytest.mark.parametrize("rank", [0, 1])
def test_the_end_and_the_remainder_are_known_while_the_last_batch_is_at_hand(rank):
    loader = shard(DataLoader(Numbers(9), 2), rank, 2)
    state = GradientState()
    seen = [(state.end_of_dataloader, state.remainder) for _ in loader]
    assert seen == [(False, -1), (False, -1), (True, 1)]
    assert (state.in_dataloader, state.end_of_dataloader, state.remainder) == (False, False, -1)


@pytest.mark.parametrize("source", [Numbers(8), Stream(8)])
def test_nothing_remains_of_a_full_last_round(source):
    loader = shard(DataLoader(source, 2), 0, 2)
    assert [loader.remainder for _ in loader] == [-1, 0]


@pytest.mark.parametrize("source", [Numbers(9), Stream(9)])
def test_the_remainder_of_a_loader_that_drops_the_last_batch_is_unknown(source):
    loader = shard(DataLoader(source, 2, drop_last=True), 0, 2)
    assert [(loader.end_of_dataloader, loader.remainder) for _ in loader] == [
        (False, -1),
        (True, -1),
    ]


@pytest.mark.parametrize("source", [Numbers(9), Stream(9)])
def test_a_process_without_a_batch_in_the_last_round_ends_with_its_own_last_one(source):
    loader = shard(DataLoader(source, 2), 1, 2, even=False)
    assert [(loader.end_of_dataloader, loader.remainder) for _ in loader] == [
        (False, -1),
        (True, 0),
    ]
    loader = shard(DataLoader(source, 2), 0, 2, even=False)
    assert [(loader.end_of_dataloader, loader.remainder) for _ in loader] == [
        (False, -1),
        (False, -1),
        (True, 1),
    ]


def test_a_loop_left_by_break_leaves_no_active_loader():
    state = GradientState()
    loader = shard(DataLoader(Numbers(9), 2))
    for _ in loader:
        assert state.active_dataloader is loader
        break
    assert not state.in_dataloader


def test_a_loader_inside_another_is_the_active_one():
    state = GradientState()
    outer, inner = shard(DataLoader(Numbers(1), 1)), shard(DataLoader(Numbers(2), 1))
    for _ in outer:
        assert state.end_of_dataloader
        assert [state.end_of_dataloader for _ in inner] == [False, True]
        assert state.end_of_dataloader
        assert state.active_dataloader is outer


def test_each_pass_shuffles_anew_and_alike_on_all_processes():
    loader = DataLoader(Numbers(20), 2, shuffle=True)
    ours, theirs = shard(loader, 0, 2), shard(loader, 1, 2)
    passes = [([listed(b) for b in ours], [listed(b) for b in theirs]) for _ in range(2)]
    assert passes[0] != passes[1]
    for own, other in passes:
        assert sorted(chain.from_iterable(own + other)) == list(range(20))
    ours.set_epoch(0)
    assert [listed(b) for b in ours] == passes[0][0]
    assert [listed(b) for b in ours] == passes[1][0]  # and on from there


def test_batches_are_put_on_the_device():
    source = DataLoader(TensorDataset(torch.zeros(4)), 2)
    kwargs = {"rank": 0, "world_size": 1, "seed": 0, "even_batches": True, "non_blocking": True}
    moved = DataLoaderShard(source, device=torch.device("meta"), **kwargs)
    assert {batch[0].device.type for batch in moved} == {"meta"}
    stays = DataLoaderShard(source, device=None, **kwargs)
    assert {batch[0].device.type for batch in stays} == {"cpu"}


def test_it_is_a_data_loader_with_the_users_settings():
    source = DataLoader(
        Numbers(9), 2, num_workers=1, prefetch_factor=3, timeout=5, collate_fn=torch.tensor
    )
    prepared = shard(source)
    assert isinstance(prepared, DataLoader)
    assert (prepared.num_workers, prepared.prefetch_factor, prepared.timeout) == (1, 3, 5)
    assert prepared.epoch_iterator.loader.num_workers == 1
    assert prepared.dataset.size == 9


def test_a_stream_without_length_has_none():
    with pytest.raises(TypeError, match="reads a stream that has no length"):
        len(shard(DataLoader(Stream(9), 2)))
    assert len(shard(DataLoader(SizedStream(9), 2), 1, 2, even=False)) == 2
    assert len(shard(DataLoader(SizedStream(9), 2), 1, 2)) == 3


def test_batches_of_a_sampler_of_the_users_own_are_read():
    sampler = BatchSampler(SequentialSampler(range(9)), 4, drop_last=True)
    assert shards(DataLoader(Numbers(9), batch_sampler=sampler), 1) == [
        [[0, 1, 2, 3], [4, 5, 6, 7]]
    ]


STILL_READING = """
import multiprocessing
import time
import torch
from torch.utils.data import DataLoader, IterableDataset, _utils
from trainer import Accelerator
from trainer.data import workers

workers._PATIENCE = 0.5
_utils.MP_STATUS_CHECK_INTERVAL = 3600.0  # torch's own patience
asleep = multiprocessing.Event()

class Slow(torch.utils.data.Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, index):
        if index:
            asleep.set()
            time.sleep(3600)
        return index

class Stream(IterableDataset):
    def __iter__(self):
        yield from torch.arange(40.0)

def read():
    settings = {"batch_size": 2, "num_workers": 1}
    loaders = [
        DataLoader(torch.arange(40.0), persistent_workers=True, **settings),
        DataLoader(torch.arange(40.0), **settings),
        DataLoader(Stream(), **settings),
        DataLoader(Slow(), num_workers=1, persistent_workers=True),
        DataLoader(Slow(), num_workers=1),
    ]
    kept, half, stream, *slow = Accelerator(cpu=True).prepare(*loaders)
    list(kept)
    iterators = [iter(half), iter(stream)]
    first = [next(each) for each in iterators]
    for each in slow:
        asleep.clear()
        # The accelerator's reads one batch ahead, which never comes.
        iterators.append(iter(each.epoch_iterator.loader))
        next(iterators[-1])
        asleep.wait()
    return kept, iterators, first

def read_and_keep():
    global kept
    kept = read()

process = multiprocessing.get_context("fork").Process(target=read_and_keep)
process.start()
process.join()
print("child", process.exitcode)
read_and_keep()
"""


def test_a_process_ends_whatever_its_workers_still_read():
    command = [sys.executable, "-W", "error", "-c", STILL_READING]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert (ended.stdout, ended.stderr, ended.returncode) == ("child 0\n", "", 0)


class Interrupting(Dataset):
    """A worker that interrupts its main process in its second read, and reads on."""

    def __len__(self):
        return 4

    def __getitem__(self, index):
        if index:
            os.kill(os.getppid(), signal.SIGINT)
            time.sleep(3600)
        return index


def test_an_interrupt_leaves_no_workers_whoever_keeps_the_error(monkeypatch):
    monkeypatch.setattr(workers, "_PATIENCE", 0.5)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    kept = []
    try:
        for _ in Accelerator(cpu=True).prepare(DataLoader(Interrupting(), num_workers=1)):
            pass
    except KeyboardInterrupt as error:
        kept.append(error)
    finally:
        signal.signal(signal.SIGINT, before)
    assert kept
    assert not multiprocessing.active_children()


class Mapped(DataLoader):
    """Does the second half of its reading here, as loaders of graphs do."""

    def _get_iterator(self):
        return map(torch.neg, super()._get_iterator())


def test_a_loader_that_goes_on_reading_behind_torchs_is_read_by_itself():
    loader = Accelerator(cpu=True).prepare(Mapped(Numbers(3), batch_size=2))
    assert [batch.tolist() for batch in loader] == [[0, -1], [-2]]


@pytest.mark.parametrize("kind", [ValueError, NotImplementedError, TypeError])
def test_however_a_sampler_says_that_it_has_no_length(kind):
    class Unmeasured(SequentialSampler):
        def __len__(self):
            raise kind("no length")

    batches = BatchSampler(Unmeasured(range(3)), 2, drop_last=False)
    epoch_iterator = EpochIterator(
        DataLoader(Numbers(3), batch_sampler=batches), rank=0, world_size=1, seed=0
    )
    assert epoch_iterator.num_batches is None
    assert [step.batch.tolist() for step in epoch_iterator.global_batches()] == [[0, 1], [2]]
