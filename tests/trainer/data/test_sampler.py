"""Which batches an epoch has, in which order, and who gets them."""

from __future__ import annotations

import gc
import tracemalloc
from itertools import chain

import numpy
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DistributedSampler,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from trainer.data.sampler import (
    INDICES,
    BatchIndices,
    BatchSharding,
    DataShard,
    SampleKey,
    SeededSampler,
    ShardedSampler,
)
from trainer.rng import mix


def sequential(items: int, batch_size: int, *, drop_last: bool = False) -> BatchSampler:
    return BatchSampler(SequentialSampler(range(items)), batch_size, drop_last)


def shuffled(items: int, batch_size: int) -> BatchSampler:
    return BatchSampler(RandomSampler(range(items)), batch_size, drop_last=False)


def shard(batches, world_size: int = 1, *, epoch=0, seed=0, shuffle=True, limit=None, **sharding):
    """The batches of each process in one epoch."""
    shards = [DataShard(rank=rank, world_size=world_size, **sharding) for rank in range(world_size)]
    samplers = [ShardedSampler(batches, shard, seed=seed, shuffle=shuffle) for shard in shards]
    for sampler in samplers:
        sampler.set_epoch(epoch)
        sampler.limit = limit
    sharded = [list(sampler) for sampler in samplers]
    for sampler, own in zip(samplers, sharded, strict=True):
        assert len(sampler) == len(own)
        assert [share.samples for share in sampler.shares if share.present] == [
            len(batch) if isinstance(batch, list) else None for batch in own
        ]
    return sharded


# -- the order ---------------------------------------------------------------------------------


def test_the_order_follows_seed_and_epoch():
    first = shard(shuffled(20, 4), seed=3, epoch=5)
    torch.manual_seed(99)
    assert shard(shuffled(20, 4), seed=3, epoch=5) == first
    assert shard(shuffled(20, 4), seed=3, epoch=6) != first
    assert shard(shuffled(20, 4), seed=4, epoch=5) != first
    assert sorted(chain.from_iterable(first[0])) == list(range(20))


@pytest.mark.parametrize("batches", [shuffled(20, 4), RandomSampler(range(9))])
def test_reseed(batches):
    sampler = ShardedSampler(batches, DataShard(rank=0, world_size=1), seed=3)
    sampler.reseed(8)
    assert list(sampler) == shard(batches, seed=8)[0]


def test_shuffling_can_be_switched_off():
    assert shard(shuffled(5, 2), shuffle=False) == [[[0, 1], [2, 3], [4]]]
    assert shard(sequential(5, 2), shuffle=False) == [[[0, 1], [2, 3], [4]]]


def test_shuffle_false_of_another_random_sampler_raises():
    weighted = BatchSampler(WeightedRandomSampler([1.0] * 4, 4), 2, drop_last=False)
    with pytest.raises(ValueError, match="The order of a WeightedRandomSampler cannot"):
        shard(weighted, shuffle=False)


def test_replacement_and_num_samples():
    def keys(sampler):
        return [sample.key for sample in shard(sampler)[0]]

    drawn = keys(RandomSampler(range(5), replacement=True, num_samples=40))
    assert len(drawn) == 40
    assert set(drawn) <= set(range(5))
    assert drawn[:5] != drawn[5:10]
    many = keys(RandomSampler(range(5), num_samples=12))
    assert sorted(many[:5]) == sorted(many[5:10]) == list(range(5))
    assert len(set(many[10:])) == 2
    assert len(SeededSampler(RandomSampler(range(5), num_samples=3), 0)) == 3
    assert len(shard(RandomSampler(range(5), num_samples=3))[0]) == 3


@pytest.mark.parametrize("replacement", [False, True])
def test_a_long_order_is_listed_piece_by_piece(replacement):
    sampler = SeededSampler(RandomSampler(range(300_000), replacement=replacement), 0)
    generator = torch.Generator().manual_seed(mix(0, 0))
    expected = (
        torch.randint(300_000, (300_000,), generator=generator)
        if replacement
        else torch.randperm(300_000, generator=generator)
    )
    assert list(sampler) == expected.tolist()
    tracemalloc.start()  # which does not see tensors
    try:
        for _ in zip(sampler, range(100_000), strict=False):
            pass
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 6e6  # whole it takes 12 MB


class Coin(Sampler[int]):
    """Draws from the global generator while it is read."""

    def __iter__(self):
        for _ in range(8):
            yield int(torch.randint(1000, ()))

    def __len__(self):
        return 8


def test_a_sampler_that_draws_globally_follows_seed_and_epoch():
    coins = BatchSampler(Coin(), 2, drop_last=False)
    first = shard(coins, epoch=1)
    torch.manual_seed(99)
    assert shard(coins, epoch=1) == first
    assert shard(coins, epoch=2) != first
    assert shard(coins, epoch=1, seed=1) != first


class Weighted(WeightedRandomSampler):
    """The user's own, which may draw whenever it pleases."""


class Chosen(SubsetRandomSampler):
    """Likewise."""


@pytest.mark.parametrize("own_generator", [False, True])
@pytest.mark.parametrize(
    ("ours", "users", "arguments"),
    [
        (WeightedRandomSampler, Weighted, ([0.1, 0.2, 0.3, 0.4] * 3, 11)),
        (SubsetRandomSampler, Chosen, (range(20, 31),)),
    ],
)
def test_samplers_of_torch_drawn_at_once_equal_drawing_on_the_way(
    monkeypatch, ours, users, arguments, own_generator
):
    def sharded(kind, batched):
        generator = torch.Generator().manual_seed(7) if own_generator else None
        sampler = kind(*arguments, generator=generator)
        batches = BatchSampler(sampler, 3, drop_last=True) if batched else sampler
        return [shard(batches, 2, epoch=epoch, seed=5, limit=3) for epoch in (0, 1)]

    torch.manual_seed(1)
    before = torch.get_rng_state()
    expected = [sharded(users, batched) for batched in (True, False)]
    assert expected[0][0] != expected[0][1]
    monkeypatch.delattr("trainer.data.sampler.seeded_iteration")
    assert [sharded(ours, batched) for batched in (True, False)] == expected
    assert torch.equal(torch.get_rng_state(), before)


def test_a_distributed_sampler_raises():
    sampler = DistributedSampler(range(8), num_replicas=2, rank=0)
    with pytest.raises(ValueError, match="shard the data a second time"):
        shard(BatchSampler(sampler, 2, drop_last=False), world_size=2)
    alone = DistributedSampler(range(4), num_replicas=1, rank=0, shuffle=False)
    assert shard(BatchSampler(alone, 2, drop_last=False)) == [[[0, 1], [2, 3]]]


# -- sharing out -------------------------------------------------------------------------------


def test_even_batches_of_a_sampler_without_a_batch_size():
    batches = [[0], [1, 2], [3, 4, 5], [6], [7, 8]]
    assert shard(batches, 2) == [[[0], [3, 4, 5], [7, 8]], [[1, 2], [6]]]
    assert shard(batches, 3, even=True) == [
        [[0], [6]],
        [[1, 2], [7, 8]],
        [[3, 4, 5], [0]],
    ]


class Sized(list):
    """Batches of the user's own choice, with a size that they have as a rule."""

    batch_size = 2


def test_only_the_last_global_batch_of_uneven_batches_is_filled():
    batches = Sized([[0], [1, 2], [3, 4], [5, 6], [7]])
    assert shard(batches, 2, even=True) == [
        [[0], [3, 4], [7, 0]],
        [[1, 2], [5, 6], [1, 2]],
    ]
    batches = Sized([[0, 1], [2, 3, 4], [5, 6, 7]])
    assert shard(batches, 2, even=True) == [[[0, 1], [5, 6]], [[2, 3, 4], [7, 0]]]
    batches = Sized([[0], [1, 2, 3, 4]])  # more than a full round has: left as it is
    assert shard(batches, 2, even=True) == [[[0]], [[1, 2, 3, 4]]]


def test_sharding_keeps_no_old_batches():

    sharding = BatchSharding(kind=INDICES, batch_size=4, world_size=2, even=True)
    global_batches = sharding.global_batches(([number], None) for number in range(10_000))
    next(global_batches)
    gc.collect()
    before = len(gc.get_objects())
    for _ in range(1_000):
        next(global_batches)
    assert len(gc.get_objects()) - before < 100


def test_split_batches():
    assert shard(sequential(10, 4), 2, split=True) == [
        [[0, 1], [4, 5], [8, 9]],
        [[2, 3], [6, 7]],
    ]
    assert shard(sequential(10, 4), 2, split=True, even=True) == [
        [[0, 1], [4, 5], [8, 9]],
        [[2, 3], [6, 7], [0, 1]],
    ]
    batches = Sized([[0, 1], [], [2, 3, 4], [5]])  # an empty one is none, a large one is shared too
    sampler = [
        ShardedSampler(batches, DataShard(rank=r, world_size=2, split=True), seed=0) for r in (0, 1)
    ]
    assert [list(own) for own in sampler] == [[[0], [2, 3], [5]], [[1], [4]]]


class Endless(Sampler[list[int]]):
    def __iter__(self):
        number = 0
        while True:
            yield [number]
            number += 1


def test_a_limit_on_a_sampler_without_a_length():
    sampler = ShardedSampler(Endless(), DataShard(rank=1, world_size=2), seed=0)
    with pytest.raises(TypeError, match="has no length"):
        len(sampler)
    sampler.limit = 5
    assert len(sampler) == 2
    assert list(sampler) == [[1], [3]]
    of_samples = BatchSampler(chain.from_iterable(Endless()), batch_size=2, drop_last=False)
    sampler = ShardedSampler(of_samples, DataShard(rank=1, world_size=2), seed=0)
    sampler.limit = 3
    assert (sampler.num_samples, len(sampler)) == (None, 1)


# -- limits, positions, shares -----------------------------------------------------------------


def test_a_limit_counts_batches_of_all_ranks():
    assert shard(sequential(9, 2), 2, limit=3) == [[[0, 1], [4, 5]], [[2, 3]]]
    assert shard(sequential(9, 2), 2, limit=99) == shard(sequential(9, 2), 2)
    assert shard(sequential(9, 2), 2, limit=0) == [[], []]


def test_even_batches_at_a_limit():
    sharded = shard(sequential(9, 2), 2, limit=3, even=True)
    assert sharded == [[[0, 1], [4, 5]], [[2, 3], [0, 1]]]


# -- seeds of batches --------------------------------------------------------------------------


def test_yielded_batches_are_indices():
    ((batch,),) = shard(sequential(2, 2))
    assert type(batch) is BatchIndices
    assert torch.arange(10)[batch].tolist() == [0, 1]
    ((sample,),) = shard(SequentialSampler(range(1)))
    assert type(sample) is SampleKey
    assert sample.key == 0


class Made:
    """Batches that are made anew in each pass."""

    def __init__(self, kind):
        self.kind = kind

    def __len__(self):
        return 3

    def __iter__(self):
        return map(self.kind, [[0, 1], [2, 3], [4, 5]])


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("kind", [iter, dict.fromkeys, numpy.array])
def test_batches_may_be_any_iterables(world_size, split, kind):
    assert shard(Made(kind), world_size, split=split) == shard(Made(list), world_size, split=split)
