"""Which batches an epoch has, in which order, and who gets them."""

from __future__ import annotations

import copy
import gc
import random
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
    SampleKey,
    SeededSampler,
    ShardedSampler,
)
from trainer.rng import mix


def sequential(items: int, batch_size: int, *, drop_last: bool = False) -> BatchSampler:
    return BatchSampler(SequentialSampler(range(items)), batch_size, drop_last)


def shuffled(items: int, batch_size: int) -> BatchSampler:
    return BatchSampler(RandomSampler(range(items)), batch_size, drop_last=False)


def deal(batches, world_size: int = 1, *, epoch: int = 0, limit: int | None = None, **kwargs):
    """The batches of each process in one epoch."""
    samplers = [
        ShardedSampler(batches, rank=rank, world_size=world_size, **{"seed": 0, **kwargs})
        for rank in range(world_size)
    ]
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


def test_the_order_is_a_function_of_seed_and_epoch():
    first = deal(shuffled(20, 4), seed=3, epoch=5)
    torch.manual_seed(99)
    assert deal(shuffled(20, 4), seed=3, epoch=5) == first
    assert deal(shuffled(20, 4), seed=3, epoch=6) != first
    assert deal(shuffled(20, 4), seed=4, epoch=5) != first
    assert sorted(chain.from_iterable(first[0])) == list(range(20))


def test_epochs_can_be_read_in_any_order_and_again():
    sampler = ShardedSampler(shuffled(20, 4), rank=0, world_size=1, seed=3)
    orders = []
    for epoch in (1, 0, 1, 1):
        sampler.set_epoch(epoch)
        orders.append(list(sampler))
    assert orders[0] == orders[2] == orders[3] != orders[1]


def test_reading_leaves_the_global_generators_alone():
    state = torch.get_rng_state()
    deal(shuffled(20, 4))
    deal(BatchSampler(WeightedRandomSampler([1.0] * 9, 9), 2, drop_last=False))
    assert torch.equal(torch.get_rng_state(), state)


def test_the_users_sampler_is_left_as_it_is():
    batches = shuffled(20, 4)
    inner = batches.sampler
    deal(batches)
    assert batches.sampler is inner


def test_a_resumed_run_takes_over_the_seed():
    sampler = ShardedSampler(shuffled(20, 4), rank=0, world_size=1, seed=3)
    sampler.reseed(8)
    assert list(sampler) == deal(shuffled(20, 4), seed=8)[0]


def test_a_sampler_without_batches_takes_over_the_seed_too():
    sampler = ShardedSampler(RandomSampler(range(9)), rank=0, world_size=1, seed=3)
    sampler.reseed(8)
    assert list(sampler) == deal(RandomSampler(range(9)), seed=8)[0]


def test_shuffling_can_be_switched_off():
    assert deal(shuffled(5, 2), shuffle=False) == [[[0, 1], [2, 3], [4]]]
    assert deal(sequential(5, 2), shuffle=False) == [[[0, 1], [2, 3], [4]]]


def test_an_order_that_cannot_be_switched_off_is_refused():
    weighted = BatchSampler(WeightedRandomSampler([1.0] * 4, 4), 2, drop_last=False)
    with pytest.raises(ValueError, match="The order of a WeightedRandomSampler cannot"):
        deal(weighted, shuffle=False)


def test_samples_with_replacement_and_more_of_them_than_there_are():
    def keys(sampler):
        return [sample.key for sample in deal(sampler)[0]]

    drawn = keys(RandomSampler(range(5), replacement=True, num_samples=40))
    assert len(drawn) == 40
    assert set(drawn) <= set(range(5))
    assert drawn[:5] != drawn[5:10]
    many = keys(RandomSampler(range(5), num_samples=12))
    assert sorted(many[:5]) == sorted(many[5:10]) == list(range(5))
    assert len(set(many[10:])) == 2
    assert len(SeededSampler(RandomSampler(range(5), num_samples=3), 0)) == 3
    assert len(deal(RandomSampler(range(5), num_samples=3))[0]) == 3


@pytest.mark.parametrize("replacement", [False, True])
def test_a_long_order_is_made_of_integers_piece_by_piece(replacement):
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

    def __init__(self):
        self.epochs = []

    def set_epoch(self, epoch):
        self.epochs.append(epoch)

    def __iter__(self):
        for _ in range(8):
            yield int(torch.randint(1000, ()))

    def __len__(self):
        return 8


def test_a_sampler_that_draws_from_the_global_generator_is_a_function_of_seed_and_epoch():
    coins = BatchSampler(Coin(), 2, drop_last=False)
    first = deal(coins, epoch=1)
    torch.manual_seed(99)
    assert deal(coins, epoch=1) == first
    assert deal(coins, epoch=2) != first
    assert deal(coins, epoch=1, seed=1) != first


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
def test_an_order_that_is_drawn_at_once_is_that_of_drawing_on_the_way(
    monkeypatch, ours, users, arguments, own_generator
):
    def sharded(kind, batched):
        generator = torch.Generator().manual_seed(7) if own_generator else None
        sampler = kind(*arguments, generator=generator)
        batches = BatchSampler(sampler, 3, drop_last=True) if batched else sampler
        return [deal(batches, 2, epoch=epoch, seed=5, limit=3) for epoch in (0, 1)]

    torch.manual_seed(1)
    before = torch.get_rng_state()
    expected = [sharded(users, batched) for batched in (True, False)]
    assert expected[0][0] != expected[0][1]
    monkeypatch.delattr("trainer.data.sampler.seeded_iteration")
    assert [sharded(ours, batched) for batched in (True, False)] == expected
    assert torch.equal(torch.get_rng_state(), before)


def test_processes_seeded_differently_agree_about_a_random_sampler_of_the_users_own():
    coins = BatchSampler(Coin(), 2, drop_last=False)
    whole = deal(coins)[0]
    halves = []
    for rank in (0, 1):
        torch.manual_seed(rank)
        halves.append(list(ShardedSampler(coins, rank=rank, world_size=2, seed=0)))
    assert halves == [whole[0::2], whole[1::2]]


def test_a_sampler_of_the_users_own_hears_of_the_epoch():
    coin = Coin()
    ShardedSampler(BatchSampler(coin, 2, drop_last=False), rank=0, world_size=1, seed=0).set_epoch(
        4
    )
    ShardedSampler(coin, rank=0, world_size=1, seed=0).set_epoch(5)
    assert coin.epochs == [4, 5]


def test_a_sampler_that_shares_out_already_is_refused():
    sampler = DistributedSampler(range(8), num_replicas=2, rank=0)
    with pytest.raises(ValueError, match="shard the data a second time"):
        deal(BatchSampler(sampler, 2, drop_last=False), world_size=2)
    alone = DistributedSampler(range(4), num_replicas=1, rank=0, shuffle=False)
    assert deal(BatchSampler(alone, 2, drop_last=False)) == [[[0, 1], [2, 3]]]


# -- sharing out -------------------------------------------------------------------------------


def test_batch_b_goes_to_rank_b_mod_n_and_nothing_is_repeated():
    assert deal(sequential(9, 2), 2) == [[[0, 1], [4, 5], [8]], [[2, 3], [6, 7]]]
    assert deal(sequential(3, 4), 2) == [[[0, 1, 2]], []]


@pytest.mark.parametrize("items", [1, 7, 8, 24, 25])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_every_sample_is_dealt_once(items, world_size):
    sharded = deal(shuffled(items, 4), world_size)
    assert sorted(chain.from_iterable(chain.from_iterable(sharded))) == list(range(items))


# The table of `reference/`, with its lengths.
EVEN = [
    (9, 2, [[[0, 1], [4, 5], [8, 0]], [[2, 3], [6, 7], [1, 2]]]),
    (3, 4, [[[0, 1, 2, 0]], [[1, 2, 0, 1]]]),
    (8, 2, [[[0, 1], [4, 5]], [[2, 3], [6, 7]]]),
    (6, 2, [[[0, 1], [4, 5]], [[2, 3], [0, 1]]]),
    (7, 2, [[[0, 1], [4, 5]], [[2, 3], [6, 0]]]),
    (1, 1, [[[0]], [[0]]]),
]


@pytest.mark.parametrize(("items", "batch_size", "expected"), EVEN)
def test_even_batches_are_filled_from_the_beginning(items, batch_size, expected):
    assert deal(sequential(items, batch_size), 2, even=True) == expected


def test_even_batches_drop_what_is_not_a_full_round_where_asked():
    dropping = sequential(9, 2, drop_last=True)
    assert deal(dropping, 2, even=True, drop_last=True) == [[[0, 1], [4, 5]], [[2, 3], [6, 7]]]
    dropping = sequential(11, 2, drop_last=True)
    assert deal(dropping, 2, drop_last=True) == [[[0, 1], [4, 5]], [[2, 3], [6, 7]]]


def test_the_loaders_own_drop_last_holds_without_even_batches():
    assert deal(sequential(11, 2, drop_last=True), 2) == [
        [[0, 1], [4, 5], [8, 9]],
        [[2, 3], [6, 7]],
    ]


def test_even_batches_of_a_shuffled_epoch_are_filled_from_its_own_beginning():
    (alone,) = deal(shuffled(9, 2))
    sharded = deal(shuffled(9, 2), 2, even=True)
    beginning = list(chain.from_iterable(alone))
    assert sharded[0][-1] == [beginning[8], beginning[0]]
    assert sharded[1][-1] == beginning[1:3]


def test_ready_made_samples_are_shared_out_one_by_one():
    def keys(**kwargs):
        sharded = deal(SequentialSampler(range(5)), 2, **kwargs)
        return [[sample.key for sample in own] for own in sharded]

    assert keys() == [[0, 2, 4], [1, 3]]
    assert keys(even=True) == [[0, 2, 4], [1, 3, 0]]


def test_batches_without_a_size_are_repeated_whole():
    batches = [[0], [1, 2], [3, 4, 5], [6], [7, 8]]
    assert deal(batches, 2) == [[[0], [3, 4, 5], [7, 8]], [[1, 2], [6]]]
    assert deal(batches, 3, even=True) == [[[0], [6]], [[1, 2], [7, 8]], [[3, 4, 5], [0]]]


class Sized(list):
    """Batches of the user's own choice, with a size that they have as a rule."""

    batch_size = 2


def test_only_the_last_round_is_filled_where_sizes_differ():
    batches = Sized([[0], [1, 2], [3, 4], [5, 6], [7]])
    assert deal(batches, 2, even=True) == [[[0], [3, 4], [7, 0]], [[1, 2], [5, 6], [1, 2]]]
    batches = Sized([[0, 1], [2, 3, 4], [5, 6, 7]])
    assert deal(batches, 2, even=True) == [[[0, 1], [5, 6]], [[2, 3, 4], [7, 0]]]
    batches = Sized([[0], [1, 2, 3, 4]])  # more than a full round has: left as it is
    assert deal(batches, 2, even=True) == [[[0]], [[1, 2, 3, 4]]]


def test_rounds_of_many_sizes_leave_nothing_behind():
    """Else what was read ahead to know the last one makes each slower than the one before."""
    sharding = BatchSharding(kind=INDICES, batch_size=4, world_size=2, even=True)
    global_batches = sharding.global_batches(([number], None) for number in range(10_000))
    next(global_batches)
    gc.collect()
    before = len(gc.get_objects())
    for _ in range(1_000):
        next(global_batches)
    assert len(gc.get_objects()) - before < 100


def test_batches_are_split_into_a_part_for_each_process():
    assert deal(sequential(10, 4), 2, split=True) == [[[0, 1], [4, 5], [8, 9]], [[2, 3], [6, 7]]]
    assert deal(sequential(10, 4), 2, split=True, even=True) == [
        [[0, 1], [4, 5], [8, 9]],
        [[2, 3], [6, 7], [0, 1]],
    ]
    batches = Sized([[0, 1], [], [2, 3, 4], [5]])  # an empty one is none, a large one is shared too
    sampler = [ShardedSampler(batches, rank=r, world_size=2, seed=0, split=True) for r in (0, 1)]
    assert [list(own) for own in sampler] == [[[0], [2, 3], [5]], [[1], [4]]]


@pytest.mark.parametrize(
    "batches",
    [
        [(0, 1), (2, 3), (4,)],
        numpy.array_split(numpy.arange(5), [2, 4]),
        torch.arange(5).split(2),
    ],
)
def test_batches_may_be_any_sequence_of_indices(batches):
    sharded = deal(batches, 2)
    assert [[[int(i) for i in batch] for batch in own] for own in sharded] == [
        [[0, 1], [4]],
        [[2, 3]],
    ]


class Endless(Sampler[list[int]]):
    def __iter__(self):
        number = 0
        while True:
            yield [number]
            number += 1


def test_a_sampler_without_length_is_read_up_to_the_limit():
    sampler = ShardedSampler(Endless(), rank=1, world_size=2, seed=0)
    with pytest.raises(TypeError, match="has no length"):
        len(sampler)
    sampler.limit = 5
    assert len(sampler) == 2
    assert list(sampler) == [[1], [3]]
    of_samples = BatchSampler(chain.from_iterable(Endless()), batch_size=2, drop_last=False)
    sampler = ShardedSampler(of_samples, rank=1, world_size=2, seed=0)
    sampler.limit = 3
    assert (sampler.num_samples, len(sampler)) == (None, 1)


# -- limits, positions, shares -----------------------------------------------------------------


def test_a_limit_counts_batches_over_all_processes():
    assert deal(sequential(9, 2), 2, limit=3) == [[[0, 1], [4, 5]], [[2, 3]]]
    assert deal(sequential(9, 2), 2, limit=99) == deal(sequential(9, 2), 2)
    assert deal(sequential(9, 2), 2, limit=0) == [[], []]


def test_a_limit_is_filled_like_an_end():
    sharded = deal(sequential(9, 2), 2, limit=3, even=True)
    assert sharded == [[[0, 1], [4, 5]], [[2, 3], [0, 1]]]


def test_reading_can_start_at_any_round_with_the_same_batches_and_seeds():
    sampler = ShardedSampler(shuffled(23, 2), rank=1, world_size=3, seed=0)
    whole = list(sampler)
    sampler.start_global_batch = 2
    rest = list(sampler)
    assert rest == whole[2:]
    assert [batch.place for batch in rest] == [batch.place for batch in whole[2:]]
    assert len(sampler.shares) == 2


def test_shares_tell_what_all_processes_have_in_each_round():
    shares = []
    for rank in (0, 1):
        sampler = ShardedSampler(sequential(9, 2), rank=rank, world_size=2, seed=0)
        list(sampler)
        shares.append(list(sampler.shares))
    for ours, theirs in zip(*shares, strict=True):
        assert ours.global_samples == theirs.global_samples == ours.samples + theirs.samples
        assert ours.batches == theirs.batches == ours.present + theirs.present
    assert [share.samples for share in shares[1]] == [2, 2, 0]
    assert [share.real_samples for share in shares[0]] == [4, 4, 1]


def test_shares_tell_repeated_samples_from_real_ones():
    sampler = ShardedSampler(sequential(9, 2), rank=1, world_size=2, seed=0, even=True)
    list(sampler)
    assert [(s.global_samples, s.real_samples) for s in sampler.shares] == [(4, 4), (4, 4), (4, 1)]


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_sampler_that_draws_is_passed_over_at_once(monkeypatch, world_size):
    """Not with the generators set aside for each batch, which takes longer than the drawing."""
    asked, getstate = [], random.getstate
    monkeypatch.setattr(random, "getstate", lambda: asked.append(1) or getstate())

    def first_behind(start: int) -> tuple[object, int]:
        coins = BatchSampler(Coin(), 1, drop_last=False)
        sampler = ShardedSampler(coins, rank=0, world_size=world_size, seed=0)
        sampler.start_batch = start
        asked.clear()
        batch = next(iter(sampler))
        return (batch, batch.place), len(asked)

    whole, drawn = deal(BatchSampler(Coin(), 1, drop_last=False)), first_behind(0)[1]
    for start in (0, 4, 6):
        assert first_behind(start) == ((whole[0][start], whole[0][start].place), drawn)


# -- seeds of batches --------------------------------------------------------------------------


def seeds(sharded) -> dict[int, int]:
    """First sample of each batch -> the seed it is fetched under."""
    return {
        (batch[0] if isinstance(batch, list) else batch.key): batch.place
        for own in sharded
        for batch in own
    }


@pytest.mark.parametrize("world_size", [2, 3])
def test_the_seed_of_a_batch_does_not_depend_on_the_number_of_processes(world_size):
    alone = seeds(deal(sequential(23, 4)))
    assert seeds(deal(sequential(23, 4), world_size)) == alone
    assert len(set(alone.values())) == 6


def test_the_seed_of_a_batch_changes_with_epoch_and_run():
    first = set(seeds(deal(sequential(23, 4))).values())
    assert not first & set(seeds(deal(sequential(23, 4), epoch=1)).values())
    assert not first & set(seeds(deal(sequential(23, 4), seed=1)).values())


def test_ready_made_samples_have_seeds_of_their_own():
    alone = seeds(deal(SequentialSampler(range(5))))
    assert seeds(deal(SequentialSampler(range(5)), 2)) == alone
    assert len(set(alone.values())) == 5


def test_what_is_yielded_still_is_an_index():
    ((batch,),) = deal(sequential(2, 2))
    assert type(batch) is BatchIndices
    assert torch.arange(10)[batch].tolist() == [0, 1]
    ((sample,),) = deal(SequentialSampler(range(1)))
    assert type(sample) is SampleKey
    assert sample.key == 0


def test_indices_keep_their_seed_on_the_way_to_a_worker():
    ((batch,),) = deal(sequential(2, 2))
    assert copy.deepcopy(batch).place == batch.place


@pytest.mark.parametrize(
    "batches",
    [
        BatchSampler(SequentialSampler(range(7)), 3, drop_last=False),
        [(1, 0), (2,), torch.tensor([4, 3])],
        [range(1, 3), {4: None}, "ab"],
        [[], [3]],
        SequentialSampler(range(3)),  # ready-made batches
    ],
)
@pytest.mark.parametrize("counts", [True, False])
@pytest.mark.parametrize(("start_global_batch", "start_batch"), [(0, 0), (1, 0), (0, 1)])
def test_one_process_gets_what_it_would_among_several(
    batches, counts, start_global_batch, start_batch
):
    """Alone it takes a shorter way."""
    sampler = ShardedSampler(batches, rank=0, world_size=1, seed=0, counts=counts)
    sampler.start_global_batch, sampler.start_batch = start_global_batch, start_batch
    alone = list(sampler._alone())
    assert alone == list(sampler._together())
    assert all(isinstance(batch, (int, list)) for _, batch, _ in alone)
    assert len(alone) == len(list(batches)) - start_global_batch - start_batch


class Asked:
    """Indices that are asked for one after the other."""

    def __init__(self, indices):
        self.indices = indices

    def __getitem__(self, place):
        return self.indices[place]


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
@pytest.mark.parametrize("kind", [iter, Asked, dict.fromkeys, tuple])
def test_batches_may_be_any_iterables(world_size, split, kind):
    """Also those that can be read only once."""
    assert deal(Made(kind), world_size, split=split) == deal(Made(list), world_size, split=split)
