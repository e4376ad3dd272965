"""What `prepare_data_loader` gives each process, against a reference, and what it refuses."""

from __future__ import annotations

import copy
import pickle
from itertools import chain, product

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    SequentialSampler,
)

from tests.helpers.datasets import Numbers, SizedStream, Stream
from trainer.accelerator import Accelerator
from trainer.data.dataloader import DataLoaderShard
from trainer.data.dispatcher import DataLoaderDispatcher
from trainer.data.prepare import prepare_data_loader, skip_first_batches
from trainer.data.sampler import DataShard, ShardedSampler
from trainer.rng import set_seed
from trainer.state import AcceleratorState

CPU = torch.device("cpu")


class NoisyNumbers(Numbers):
    """A number drawn from the global generator beside each."""

    def __getitem__(self, index):
        return index, float(torch.rand(()))


class OddSampler(BatchSampler):
    """Batches of two, made without a sampler."""

    def __init__(self):
        self.batch_size, self.drop_last = 2, False

    def __iter__(self):
        yield from ([0, 1], [2, 3], [4])

    def __len__(self):
        return 3


def each(source, world_size: int = 2, **options) -> list:
    return [
        prepare_data_loader(source, num_processes=world_size, process_index=rank, **options)
        for rank in range(world_size)
    ]


def read(loaders) -> list[list[list[int]]]:
    return [[batch.tolist() for batch in loader] for loader in loaders]


# -- the batches of each process ---------------------------------------------------------------


def shares(
    items: int, batch_size: int, world_size: int, *, split: bool, even: bool, drop_last: bool
) -> tuple[list[list[list[int]]], int]:
    """What each process reads, by arithmetic on samples alone; and the remainder."""
    own = batch_size // world_size if split else batch_size
    together = own * world_size
    samples = list(range(items))
    if drop_last and world_size == 1:
        samples = samples[: items // own * own]
    elif drop_last:
        samples = samples[: items // together * together]
    full = -(-len(samples) // together) * together
    if even and world_size > 1:
        samples += [number % items for number in range(full - len(samples))]
    starts = range(0, full, together)
    found = [
        [part for start in starts if (part := samples[start + rank * own :][:own])]
        for rank in range(world_size)
    ]
    return found, -1 if drop_last or not items else items % together


CASES = [
    (split, even, drop_last, world_size, batch_size)
    for split, even, drop_last in product([False, True], repeat=3)
    for world_size, batch_size in product([1, 2, 3, 4], [1, 2, 3, 4])
    if not split or batch_size % world_size == 0
]


def test_sharded_indices_against_arithmetic():
    for (split, even, drop_last, world_size, batch_size), items in product(CASES, range(18)):
        if world_size == 1:
            continue  # nothing is shared out
        batches = BatchSampler(SequentialSampler(range(items)), batch_size, drop_last)
        options = {"split": split, "even": even, "drop_last": drop_last}
        expected, _ = shares(items, batch_size, world_size, **options)
        for rank in range(world_size):
            shard = DataShard(rank=rank, world_size=world_size, **options)
            own = ShardedSampler(batches, shard, seed=0)
            where = (items, batch_size, world_size, split, even, drop_last, rank)
            assert list(own) == expected[rank], where
            assert len(own) == len(expected[rank]), where


@pytest.mark.parametrize("kind", [Numbers, Stream, SizedStream])
def test_prepared_loaders_against_arithmetic(kind):
    few = [case for case in CASES if case[3:] in [(1, 2), (2, 2), (2, 4), (3, 3), (4, 1)]]
    for (split, even, drop_last, world_size, batch_size), items in product(few, [0, 1, 3, 8, 13]):
        prepared = each(
            DataLoader(kind(items), batch_size, drop_last=drop_last),
            world_size,
            split_batches=split,
            even_batches=even,
            dispatch_batches=False,
        )
        expected, remainder = shares(
            items, batch_size, world_size, split=split, even=even, drop_last=drop_last
        )
        kept = []
        for rank, own in enumerate(prepared):
            where = (items, batch_size, world_size, split, even, drop_last, rank)
            if kind is not Stream:
                assert len(own) == len(expected[rank]), where
            seen = [(b.tolist(), own.end_of_dataloader, own.remainder) for b in own]
            assert [batch for batch, _, _ in seen] == expected[rank], where
            assert [end for _, end, _ in seen] == [False] * (len(seen) - 1) + [True] * bool(seen)
            if even and seen:
                assert [left for _, _, left in seen] == [-1] * (len(seen) - 1) + [remainder], where
            kept.append([batch for batch, _, _ in seen])
        if even and not drop_last and items:  # what gather_for_metrics keeps
            global_batches = [list(chain(*batches)) for batches in zip(*kept, strict=True)]
            global_batches[-1] = global_batches[-1][: remainder or None]
            assert list(chain(*global_batches)) == list(range(items)), where


def test_custom_samplers_are_sharded():
    ready = DataLoader(Numbers(5), batch_size=None, sampler=[4, 3, 2, 1, 0])
    assert [list(own) for own in each(ready)] == [[4, 2, 0], [3, 1, 4]]
    backwards = DataLoader(Numbers(5), 2, sampler=[4, 3, 2, 1, 0])
    assert read(each(backwards)) == [[[4, 3], [0, 4]], [[2, 1], [3, 2]]]
    odd = DataLoader(Numbers(5), batch_sampler=OddSampler())
    assert read(each(odd)) == [[[0, 1], [4, 0]], [[2, 3], [1, 2]]]
    assert read(each(odd, split_batches=True)) == [[[0], [2], [4]], [[1], [3], [0]]]
    assert [len(own) for own in each(odd, split_batches=True, even_batches=False)] == [3, 3]


def test_stream_batches_without_samples_are_repeated_whole():
    loader = DataLoader(Stream(3), 2, collate_fn=str)
    assert [list(own) for own in each(loader)] == [["[0, 1]"], ["[2]"]]
    loader = DataLoader(Stream(5), 2, collate_fn=str)
    assert [list(own) for own in each(loader)] == [["[0, 1]", "[4]"], ["[2, 3]", "[0, 1]"]]


def test_only_the_last_global_batch_of_a_stream_is_filled():
    # The ends of two workers' parts are short, and lie in the middle.
    class Parts(IterableDataset):
        def __iter__(self):
            yield from ()

    batches = [[0, 1], [2, 3], [4], [5], [6, 7]]
    loader = DataLoader(Parts(), 2)
    loader.__class__ = type(
        "Own", (DataLoader,), {"__iter__": lambda self: map(torch.tensor, batches)}
    )
    assert read(each(loader)) == [[[0, 1], [4], [6, 7]], [[2, 3], [5], [0, 1]]]


# -- the order ---------------------------------------------------------------------------------


def order(world_size: int = 1, source=None, **options) -> list[list[int]]:
    """The global order of two passes."""
    source = source or DataLoader(Numbers(16), 2, shuffle=True)
    loaders = each(source, world_size, **options)
    passes = []
    for _ in range(2):
        global_batches = zip(*loaders, strict=True)
        passes.append([int(i) for batches in global_batches for batch in batches for i in batch])
    return passes


def test_the_seed_decides_the_order_on_any_number_of_ranks():
    set_seed(5)
    first = order()
    assert first[0] != first[1] != sorted(first[1])
    for world_size, options in [(1, {}), (2, {}), (4, {}), (2, {"split_batches": True})]:
        set_seed(5)
        assert order(world_size, **options) == first
    set_seed(6)
    assert order() != first


@pytest.mark.parametrize("seedable", [True, False])
def test_every_loader_has_an_order_and_noise_of_its_own(seedable):
    def passes(count: int) -> list[list]:
        source = DataLoader(NoisyNumbers(16), 16, shuffle=True)
        options = {"use_seedable_sampler": seedable}
        loaders = [each(source, 1, **options)[0] for _ in range(count)]
        return [[value.tolist() for value in batch] for loader in loaders for batch in loader]

    set_seed(5)
    found = passes(4)
    assert len({tuple(order) for order, _ in found}) == 4
    assert len(set(chain.from_iterable(noise for _, noise in found))) == 64
    set_seed(5)
    assert passes(2) + passes(2) == found
    torch.manual_seed(6)
    assert passes(1) != found[:1]
    torch.manual_seed(5)
    assert passes(2) == found[:2]


def test_a_new_accelerator_repeats_the_orders_and_free_memory_does_not():
    def orders(accelerator: Accelerator) -> list[list[int]]:
        found = []
        for _ in range(3):  # folds, one after the other
            loader = accelerator.prepare(DataLoader(range(16), 16, shuffle=True))
            found += [batch.tolist() for batch in loader]
            accelerator.free_memory()
        return found

    folds = orders(Accelerator(cpu=True))
    assert len({tuple(order) for order in folds}) == 3
    assert orders(Accelerator(cpu=True)) == folds
    first, second = Accelerator(cpu=True), Accelerator(cpu=True)
    source = DataLoader(range(16), 16, shuffle=True)
    (ours,), (theirs,) = first.prepare(source), second.prepare(source)
    assert [ours.tolist(), theirs.tolist()] == folds[:2]
    AcceleratorState._reset_state(reset_partial_state=True)
    assert orders(Accelerator(cpu=True)) == folds


def test_a_loader_with_a_generator_does_not_change_the_order_of_others():
    source = DataLoader(range(16), 16, shuffle=True)
    own = DataLoader(range(16), 16, shuffle=True, generator=torch.Generator().manual_seed(1))
    set_seed(9)
    expected = read(each(source, 1))
    set_seed(9)
    each(own, 1)
    assert read(each(source, 1)) == expected


@pytest.mark.parametrize("seedable", [True, False])
def test_use_seedable_sampler_ignores_the_generator_of_the_loader(seedable):
    def source(seed: int) -> DataLoader:
        generator = torch.Generator().manual_seed(seed)
        return DataLoader(Numbers(16), 2, shuffle=True, generator=generator)

    def found(seed: int, own: int) -> list[list[int]]:
        set_seed(seed)
        return order(2, source(own), use_seedable_sampler=seedable)

    assert (found(5, 1) == found(6, 1)) is not seedable
    assert (found(5, 1) == found(5, 2)) is seedable


def test_the_order_after_a_pass_left_by_break():
    (loader,) = each(DataLoader(Numbers(16), 2, shuffle=True), 1)
    first = read([loader])
    loader.set_epoch(0)
    for _ in loader:
        break
    assert loader.iteration == 0
    second = read([loader])
    assert (loader.iteration, second != first) == (2, True)
    for _ in loader:
        break
    loader.set_epoch(0)
    assert read([loader]) == first


class Epoch:
    """Keeps the epoch that it is told."""

    epoch = None

    def set_epoch(self, epoch):
        self.epoch = epoch


def test_set_epoch_reaches_sampler_and_dataset():
    class EpochSampler(Epoch, SequentialSampler):
        pass

    class EpochBatches(Epoch, OddSampler):
        pass

    class EpochNumbers(Epoch, Numbers):
        pass

    sampler, dataset, batches = EpochSampler(range(5)), EpochNumbers(5), EpochBatches()
    (loader,) = each(DataLoader(dataset, 2, sampler=sampler), 1)
    loader.set_epoch(3)
    assert (sampler.epoch, dataset.epoch) == (3, 3)
    list(loader)
    list(loader)
    assert (sampler.epoch, dataset.epoch, loader.iteration) == (4, 4, 5)
    (loader,) = each(DataLoader(dataset, batch_sampler=batches), 1)
    loader.set_epoch(7)
    assert batches.epoch == 7


# -- what it is --------------------------------------------------------------------------------


def collate(samples: list) -> torch.Tensor:
    return torch.tensor(samples)


def test_a_prepared_loader_has_the_users_settings():
    dataset, generator = NoisyNumbers(10), torch.Generator()
    source = DataLoader(
        dataset,
        4,
        num_workers=2,
        persistent_workers=True,
        prefetch_factor=3,
        timeout=7,
        collate_fn=collate,
        generator=generator,
        worker_init_fn=print,
        multiprocessing_context="fork",
    )
    loader = each(source)[1]
    assert isinstance(loader, DataLoader)
    assert type(loader) is DataLoaderShard
    assert loader.dataset is dataset
    assert loader.generator is generator
    names = (
        "num_workers persistent_workers prefetch_factor timeout collate_fn pin_memory "
        "worker_init_fn multiprocessing_context"
    )
    for name in names.split():
        for own in (loader, loader.epoch_iterator.loader):
            if own is loader or name not in ("collate_fn", "worker_init_fn"):
                assert getattr(own, name) == getattr(source, name), name
    assert (loader.batch_sampler.batch_size, loader.batch_sampler.drop_last) == (4, False)
    assert (loader.total_batch_size, loader.total_dataset_length) == (8, 10)
    assert each(source, split_batches=True)[0].total_batch_size == 4
    assert each(DataLoader(dataset, batch_size=None))[0].total_batch_size is None


def test_a_prepared_loader_is_returned_unchanged():
    (loader,) = each(DataLoader(Numbers(4), 2), 1)
    assert prepare_data_loader(loader) is loader


def test_dispatch_batches_chooses_the_class():
    stream, numbers = DataLoader(Stream(4), 2), DataLoader(Numbers(4), 2)
    assert type(prepare_data_loader(numbers, put_on_device=True)) is DataLoaderShard
    assert type(prepare_data_loader(stream)) is DataLoaderShard
    assert type(prepare_data_loader(stream, put_on_device=True)) is DataLoaderDispatcher
    options = {"put_on_device": True, "dispatch_batches": False}
    assert type(prepare_data_loader(stream, **options)) is DataLoaderShard
    options["dispatch_batches"] = True
    assert type(prepare_data_loader(numbers, **options)) is DataLoaderDispatcher


def test_put_on_device():
    source, meta = DataLoader(Numbers(4), 2), torch.device("meta")
    assert {b.device for b in prepare_data_loader(source, meta, put_on_device=True)} == {meta}
    assert {b.device for b in prepare_data_loader(source, meta)} == {CPU}
    assert prepare_data_loader(source, put_on_device=True).device == CPU
    assert prepare_data_loader(source).device is None


def test_even_batches_can_be_switched():
    first, second = each(DataLoader(Numbers(9), 2))
    assert (first.even_batches, len(second)) == (True, 3)
    for loader in (first, second):
        loader.even_batches = False
    assert read([first, second]) == [[[0, 1], [4, 5], [8]], [[2, 3], [6, 7]]]
    assert (second.even_batches, len(second)) == (False, 2)
    for loader in (first, second):
        loader.even_batches = True
    assert read([first, second]) == [[[0, 1], [4, 5], [8, 0]], [[2, 3], [6, 7], [1, 2]]]
    (alone,) = each(DataLoader(Numbers(3), 2), 1)
    alone.even_batches = True
    assert read([alone]) == [[[0, 1], [2]]]


def test_set_sampler():
    sampler = SequentialSampler(range(6))
    first, second = each(DataLoader(Numbers(6), 2, sampler=sampler))
    assert first.get_sampler() is sampler
    backwards = [5, 4, 3, 2, 1, 0]
    for loader in (first, second):
        list(loader)
        loader.set_sampler(backwards)
        assert loader.get_sampler() is backwards
    assert read([first, second]) == [[[5, 4], [1, 0]], [[3, 2], [5, 4]]]
    assert list(first.batch_sampler) == [[5, 4], [1, 0]]
    assert first.iteration == 2
    (ready,) = each(DataLoader(Numbers(3), batch_size=None), 1)
    ready.set_sampler([2, 0])
    assert list(ready) == [2, 0]
    assert [sample.key for sample in ready.sampler] == [2, 0]
    rest = skip_first_batches(DataLoader(Numbers(6), 2), 1)
    (skipping,) = each(rest, 1)
    skipping.set_sampler(backwards)
    assert read([skipping]) == [[[3, 2], [1, 0]]]
    assert [batch.tolist() for batch in rest] == [[2, 3], [4, 5]]  # it stays as it was


def test_set_sampler_without_a_sampler_raises():
    (odd,) = each(DataLoader(Numbers(5), batch_sampler=OddSampler()), 1)
    assert isinstance(odd.get_sampler(), OddSampler)
    with pytest.raises(ValueError, match="OddSampler creates its batches without a sampler"):
        odd.set_sampler([1])
    (stream,) = each(DataLoader(Stream(5), 2), 1)
    with pytest.raises(ValueError, match="An iterable dataset has no sampler"):
        stream.set_sampler([1])


@pytest.mark.parametrize("dispatch", [False, True])
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_a_prepared_loader_can_be_copied(copied, dispatch):
    loader = prepare_data_loader(
        DataLoader(NoisyNumbers(9), 2, shuffle=True),
        put_on_device=True,
        dispatch_batches=dispatch,
    )
    list(loader)
    twin = copied(loader)
    assert twin.iteration == 1
    for ours, theirs in zip(loader, twin, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


# -- loops -------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [0, 1])
def test_a_loader_inside_itself(workers):
    source = DataLoader(NoisyNumbers(6), 2, shuffle=True, num_workers=workers)
    (loader,) = each(source, 1)
    passes = [list(loader) for _ in range(4)]
    loader.set_epoch(0)
    outer = []
    for number, batch in enumerate(loader):
        outer.append(batch)
        if number == 0:
            torch.testing.assert_close(list(loader), passes[1], rtol=0, atol=0)
    torch.testing.assert_close(outer, passes[0], rtol=0, atol=0)


def test_one_batch_is_read_ahead():
    reads = []

    class Noting(Numbers):
        def __getitem__(self, index):
            reads.append(index)
            return index

    (loader,) = each(DataLoader(Noting(6), 2), 1)
    seen = [(batch.tolist(), len(reads)) for batch in loader]
    assert seen == [([0, 1], 4), ([2, 3], 6), ([4, 5], 6)]


# -- what is refused ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "options", "error", "text"),
    [
        ([1, 2], {}, TypeError, r"dataloader is a list; it must be a torch DataLoader"),
        (
            DataLoader(Numbers(4), 2),
            {"num_processes": 2, "process_index": 2},
            ValueError,
            r"process_index is 2 of num_processes=2; it must lie between 0 and 1",
        ),
        (
            DataLoader(Numbers(4), 2),
            {"dispatch_batches": True},
            ValueError,
            r"dispatch_batches=True with put_on_device=False.*Pass put_on_device=True",
        ),
        (
            DataLoader(Numbers(4), 2),
            {"dispatch_batches": True, "put_on_device": True, "num_processes": 3},
            ValueError,
            r"dispatch_batches=True with num_processes=3, but 1 are running",
        ),
        (
            DataLoader(Numbers(4), 3),
            {"split_batches": True, "num_processes": 2},
            ValueError,
            r"split_batches=True with batch size 3, which must be a multiple of the number of "
            r"processes \(2\), such as 4; or pass",
        ),
        (
            DataLoader(Numbers(4), batch_sampler=[[0], [1]]),
            {"split_batches": True},
            ValueError,
            r"needs a batch size to split, and a list has batch_size=None",
        ),
        (
            DataLoader(Numbers(4), sampler=DistributedSampler(Numbers(4), num_replicas=2, rank=0)),
            {},
            ValueError,
            r"DistributedSampler, which would shard the data a second time",
        ),
    ],
)
def test_arguments_that_do_not_fit_raise(source, options, error, text):
    with pytest.raises(error, match=text):
        prepare_data_loader(source, **options)


def test_the_length_of_a_stream_without_one_raises():
    for dispatch in (True, False):
        loader = prepare_data_loader(
            DataLoader(Stream(4), 2), put_on_device=True, dispatch_batches=dispatch
        )
        with pytest.raises(TypeError, match="reads a stream that has no length"):
            len(loader)


def test_an_unknown_rng_type_raises():
    (loader,) = each(DataLoader(Numbers(4), 2), 1, rng_types="torhc")
    with pytest.raises(ValueError, match="torhc"):
        list(loader)
    (loader,) = each(DataLoader(Numbers(4), 2), 1, rng_types=["generator"])
    assert len(list(loader)) == 2  # there is none to synchronise


def test_batch_sampler_attributes_are_the_users():
    source = DataLoader(range(10), batch_size=4, drop_last=True)
    batches = prepare_data_loader(source).batch_sampler
    assert (batches.sampler, batches.batch_size, batches.drop_last) == (source.sampler, 4, True)
    assert not prepare_data_loader(DataLoader(range(10), batch_size=4)).batch_sampler.drop_last
