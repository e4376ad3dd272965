"""Epochs in rounds, one batch ahead, and the loader that `Accelerator.prepare` returns."""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import subprocess
import sys
import time

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    SequentialSampler,
)

from tests.helpers.datasets import Numbers, SizedStream, Stream
from trainer.accelerator import Accelerator
from trainer.data import workers
from trainer.data.dataloader import DataLoaderShard, LoaderSettings
from trainer.data.epoch_iterator import EpochIterator
from trainer.data.sampler import DataShard
from trainer.state import GradientState

CPU = torch.device("cpu")


class RandomStream(Stream):
    def __iter__(self):
        for _ in range(self.size):
            yield int(torch.randint(10**6, ()))


def listed(batch) -> list[int]:
    return batch.tolist()


def read(source, world_size: int = 1, *, epoch=0, seed=0, limit: int | None = None, **sharding):
    """The batches of each process in one epoch; None where it has none in a round."""
    shards = [DataShard(rank=rank, world_size=world_size, **sharding) for rank in range(world_size)]
    epoch_iterators = [EpochIterator(source, shard, seed=seed) for shard in shards]
    found = []
    for epoch_iterator in epoch_iterators:
        epoch_iterator.limit = limit
        epoch_iterator.set_epoch(epoch)
        found.append(
            [listed(r.batch) if r.present else None for r in epoch_iterator.global_batches()]
        )
    return found


def shard(source, rank: int = 0, world_size: int = 1, *, even: bool = True) -> DataLoaderShard:
    settings = LoaderSettings(
        rank=rank,
        world_size=world_size,
        seed=0,
        even_batches=even,
        device=CPU,
        non_blocking=False,
    )
    return DataLoaderShard.of(source, settings)


# -- rounds ------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [0, 2])
def test_every_rank_sees_every_global_batch(workers):
    loader = DataLoader(Numbers(9), 2, num_workers=workers)
    assert read(loader, 2) == [[[0, 1], [4, 5], [8]], [[2, 3], [6, 7], None]]
    assert read(loader, 3) == [[[0, 1], [6, 7]], [[2, 3], [8]], [[4, 5], None]]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("stream", [Stream, SizedStream])
def test_a_stream_is_sharded_like_a_dataset(stream, workers):
    loader = DataLoader(stream(9), 2, num_workers=workers and 1)
    assert read(loader, 2) == read(DataLoader(Numbers(9), 2), 2)
    assert read(loader, 3) == read(DataLoader(Numbers(9), 2), 3)


def test_any_iterable_of_batches_is_sharded():
    batches = [torch.tensor([0, 1]), torch.tensor([2]), torch.tensor([3])]
    assert read(batches, 2) == [[[0, 1], [3]], [[2], None]]
    assert EpochIterator(batches, DataShard(world_size=2)).num_batches == 3


def test_a_source_that_is_no_loader_raises():
    with pytest.raises(TypeError, match=r"A loader is 7 of type int; it must be a DataLoader"):
        EpochIterator(7)
    holder = type("Holder", (), {"train_dataloader": None})()  # as Lightning's data modules
    with pytest.raises(TypeError, match=r"subclass trainer\.DataModule"):
        EpochIterator(holder)


class Endless(torch.utils.data.Dataset):
    def __getitem__(self, index):
        return torch.tensor(index)


def test_a_dataset_without_a_length_needs_a_sampler():
    with pytest.raises(TypeError, match="'Endless' has no len"):
        read(DataLoader(Endless(), 2))
    assert read(DataLoader(Endless(), 2, sampler=[5, 3, 4])) == [[[5, 3], [4]]]
    assert read(DataLoader(Endless(), batch_sampler=[[5, 3], [4]])) == [[[5, 3], [4]]]


@pytest.mark.parametrize("source", [DataLoader(Numbers(9), 2), DataLoader(Stream(9), 2)])
def test_global_batches_count_the_samples_of_all_ranks(source):
    global_batches = []
    for rank in (0, 1):
        epoch_iterator = EpochIterator(source, DataShard(rank=rank, world_size=2))
        epoch_iterator.set_epoch(0)
        global_batches.append(list(epoch_iterator.global_batches()))
    for own in global_batches:
        assert [r.last for r in own] == [False, False, True]
        assert [r.global_samples for r in own] == [4, 4, 1]
        assert [r.real_samples for r in own] == [4, 4, 1]
        assert [r.batches for r in own] == [2, 2, 1]
    assert [r.samples for r in global_batches[0]] == [2, 2, 1]
    assert [r.samples for r in global_batches[1]] == [2, 2, 0]


def test_an_empty_epoch():
    assert read(DataLoader(Numbers(0), 2), 2) == [[], []]
    assert read(DataLoader(Stream(0), 2), 2) == [[], []]


@pytest.mark.parametrize("source", [Numbers(9), Stream(9), SizedStream(9)])
def test_limits_count_batches_of_all_ranks(source):
    loader = DataLoader(source, 2)
    assert read(loader, 2, limit=3) == [[[0, 1], [4, 5]], [[2, 3], None]]
    assert read(loader, 2, limit=50) == read(loader, 2)
    assert numbers_of_batches(loader, 1, limit=3) == (3, 2, 1)


def test_a_limited_stream_is_not_read_further():
    class Counting(Stream):
        given = 0

        def __iter__(self):
            for number in super().__iter__():
                self.given += 1
                yield number

    dataset = Counting(100)
    read(DataLoader(dataset, 2), limit=2)
    assert dataset.given == 4


def numbers_of_batches(loader, rank: int, limit: int | None = None) -> tuple[int | None, ...]:
    """Of all ranks, of global batches, of this rank."""
    found = EpochIterator(loader, DataShard(rank=rank, world_size=2))
    found.limit = limit
    return found.num_batches, found.num_global_batches, found.num_own_batches


def test_numbers_of_batches():
    assert numbers_of_batches(DataLoader(Numbers(9), 2), 1) == (5, 3, 2)
    assert numbers_of_batches(DataLoader(SizedStream(9), 2), 0) == (5, 3, 3)
    assert numbers_of_batches(DataLoader(Stream(9), 2), 0) == (None, None, None)


def test_the_size_of_a_ready_made_batch_is_read_from_it():
    dataset = [torch.arange(3), torch.arange(1), torch.tensor(7)]
    epoch_iterator = EpochIterator(
        DataLoader(dataset, batch_size=None), DataShard(rank=0, world_size=2)
    )
    epoch_iterator.set_epoch(0)
    global_batches = list(epoch_iterator.global_batches())
    assert [(r.samples, r.global_samples) for r in global_batches] == [(3, None), (1, None)]


def test_skipping_in_a_stream_warns_of_its_cost(caplog):
    caplog.set_level(logging.WARNING)
    epoch_iterator = EpochIterator(DataLoader(Stream(9), 2), DataShard(rank=0, world_size=2))
    epoch_iterator.set_epoch(0)
    epoch_iterator.start_global_batch = 2
    assert [listed(r.batch) for r in epoch_iterator.global_batches()] == [[8]]
    assert "4 batches are read again and discarded" in caplog.text


# -- the order ---------------------------------------------------------------------------------


def test_streams_that_draw_globally_are_the_same_on_all_ranks():
    loader = DataLoader(RandomStream(8), 2)
    (alone,) = read(loader, seed=3, epoch=1)
    found = []
    for rank in (0, 1):
        torch.manual_seed(rank)
        epoch_iterator = EpochIterator(loader, DataShard(rank=rank, world_size=2), seed=3)
        epoch_iterator.set_epoch(1)
        found.append([listed(r.batch) for r in epoch_iterator.global_batches()])
    assert found == [alone[0::2], alone[1::2]]
    assert read(loader, seed=3, epoch=2) != [alone]


def test_streams_that_draw_in_a_worker_follow_seed_and_epoch():
    loader = DataLoader(RandomStream(4), 2, num_workers=1)
    first = read(loader, 2, seed=3, epoch=1)
    torch.manual_seed(99)
    assert read(loader, 2, seed=3, epoch=1) == first
    assert read(loader, 2, seed=3, epoch=2) != first
    assert read(loader, 2, seed=4, epoch=1) != first


def test_reading_restores_the_global_generators():
    for source in (
        DataLoader(Numbers(8), 2, shuffle=True),
        DataLoader(Numbers(8), 2, shuffle=True, num_workers=1),
        DataLoader(RandomStream(8), 2),
    ):
        state = torch.get_rng_state()
        read(source)
        assert torch.equal(torch.get_rng_state(), state)


def test_persistent_workers_after_an_epoch_that_was_left():
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


@pytest.mark.parametrize("rank", [0, 1])
def test_end_of_dataloader_and_remainder_during_the_last_batch(rank):
    loader = shard(DataLoader(Numbers(9), 2), rank, 2)
    state = GradientState()
    seen = [(state.end_of_dataloader, state.remainder) for _ in loader]
    assert seen == [(False, -1), (False, -1), (True, 1)]
    assert (state.in_dataloader, state.end_of_dataloader, state.remainder) == (False, False, -1)


@pytest.mark.parametrize("source", [Numbers(9), Stream(9)])
def test_end_of_dataloader_on_a_rank_without_a_last_batch(source):
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


def test_a_process_exits_while_its_workers_read():
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


def test_an_interrupt_leaves_no_workers(monkeypatch):
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


def test_a_loader_that_overrides_get_iterator():
    loader = Accelerator(cpu=True).prepare(Mapped(Numbers(3), batch_size=2))
    assert [batch.tolist() for batch in loader] == [[0, -1], [-2]]


@pytest.mark.parametrize("kind", [ValueError, NotImplementedError, TypeError])
def test_a_sampler_whose_length_raises(kind):
    class Unmeasured(SequentialSampler):
        def __len__(self):
            raise kind("no length")

    batches = BatchSampler(Unmeasured(range(3)), 2, drop_last=False)
    epoch_iterator = EpochIterator(
        DataLoader(Numbers(3), batch_sampler=batches), DataShard(rank=0, world_size=1), seed=0
    )
    assert epoch_iterator.num_batches is None
    assert [step.batch.tolist() for step in epoch_iterator.global_batches()] == [[0, 1], [2]]
