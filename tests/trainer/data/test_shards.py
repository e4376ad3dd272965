"""Samplers and datasets of one shard, against arithmetic on the order of all samples."""

from __future__ import annotations

from itertools import cycle, islice, product

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler

import trainer.data
from trainer.data import (
    BatchSamplerShard,
    DataLoaderDispatcher,
    DataLoaderShard,
    IterableDatasetShard,
    SeedableRandomSampler,
    SkipBatchSampler,
    SkipDataLoader,
    prepare_data_loader,
    skip_first_batches,
)
from trainer.state import GradientState

SIZES, PROCESSES, BATCH = (0, 1, 3, 7, 8, 12, 17, 24), (1, 2, 3, 4), 12
FLAGS = (False, True)


class Stream(IterableDataset):
    def __init__(self, samples):
        self.samples = samples

    def __iter__(self):
        return iter(range(self.samples))

    def __len__(self):
        return self.samples


def arithmetic(samples, processes, rank, *, split, even, drop_last):
    """The batches of a rank: slices of the samples, which start over at their end where needed."""
    own = BATCH // processes if split else BATCH
    together = own * processes
    order = list(range(samples))
    if drop_last:
        order = order[: samples // together * together]
    elif even:
        order = list(islice(cycle(order), -(-samples // together) * together))
    starts = range(rank * own, len(order), together)
    return [order[start : start + own] for start in starts]


def test_batches_of_a_shard_are_slices_of_the_order():
    for samples, processes, split, even, drop_last in product(
        SIZES, PROCESSES, FLAGS, FLAGS, FLAGS
    ):
        for rank in range(processes):
            whole = BatchSampler(range(samples), BATCH, drop_last)
            shard = BatchSamplerShard(whole, processes, rank, split, even)
            mode = {"split": split, "even": even, "drop_last": drop_last}
            expected = arithmetic(samples, processes, rank, **mode)
            assert list(shard) == expected, (samples, processes, rank, mode)
            if not split or even or drop_last:
                assert len(shard) == len(expected), (samples, processes, rank, mode)
            assert shard.total_length == len(whole)


def test_samples_of_a_shard_of_a_stream_are_slices_of_the_order():
    for samples, processes, split, drop_last in product(SIZES, PROCESSES, FLAGS, FLAGS):
        for rank in range(processes):
            shard = IterableDatasetShard(Stream(samples), BATCH, drop_last, processes, rank, split)
            mode = {"split": split, "even": True, "drop_last": drop_last}
            batches = arithmetic(samples, processes, rank, **mode)
            expected = [sample for batch in batches for sample in batch]
            assert list(shard) == expected
            assert len(shard) == len(expected)


def test_a_stream_gets_the_epoch_or_its_generator_the_seed():
    class Epochs(Stream):
        def set_epoch(self, epoch):
            self.samples = epoch

    shard = IterableDatasetShard(Epochs(0), 2)
    shard.set_epoch(4)
    assert list(shard) == [0, 1, 2, 3]

    class Drawn(Stream):
        generator = torch.Generator()

        def __iter__(self):
            yield from torch.randperm(4, generator=self.generator).tolist()

    shard = IterableDatasetShard(Drawn(4), 2)
    shard.set_epoch(3)
    expected = torch.randperm(4, generator=torch.Generator().manual_seed(3)).tolist()
    assert list(shard) == list(shard) == expected


def test_the_order_of_a_seedable_sampler_is_that_of_seed_and_epoch():
    sampler = SeedableRandomSampler(range(9), data_seed=7)

    def order(epoch):
        return list(RandomSampler(range(9), generator=torch.Generator().manual_seed(7 + epoch)))

    assert [list(sampler), list(sampler)] == [order(0), order(1)]
    sampler.set_epoch(5)
    assert list(sampler) == order(5)
    assert SeedableRandomSampler(range(9)).initial_seed == torch.initial_seed()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"num_processes": 2, "process_index": 2}, "process_index is 2 of num_processes=2"),
        ({"num_processes": 5, "split_batches": True}, "batch size 12.*multiple.*processes, 5"),
    ],
)
def test_shards_that_cannot_be_are_refused(arguments, said):
    with pytest.raises(ValueError, match=said):
        BatchSamplerShard(BatchSampler(range(9), BATCH, False), **arguments)
    with pytest.raises(ValueError, match=said):
        IterableDatasetShard(Stream(9), BATCH, **arguments)
    with pytest.raises(ValueError, match="split_batches=True with batch size None"):
        BatchSamplerShard([[0], [1]], split_batches=True)


def read(loader):
    """The batches of a pass, and what is known at its end."""
    batches = []
    for batch in loader:
        batches.append(batch.tolist())
        end, remainder = GradientState().end_of_dataloader, GradientState().remainder
    return batches, end, remainder


class Counted(DataLoaderShard):
    """A subclass with a constructor of its own."""

    def __init__(self, name, samples, **kwargs):
        super().__init__(range(samples), **kwargs)
        self.name = name


def test_loaders_built_by_hand_are_those_that_prepare_makes():
    for split, rank in product(FLAGS, (0, 1)):
        whole = BatchSampler(range(17), 4, False)
        made = DataLoaderShard(
            range(17), batch_sampler=BatchSamplerShard(whole, 2, rank, split), num_workers=0
        )
        prepared = prepare_data_loader(DataLoader(range(17), 4), None, 2, rank, split)
        assert read(made) == read(prepared)
        assert (len(made), made.total_batch_size) == (len(prepared), prepared.total_batch_size)
        stream = IterableDatasetShard(Stream(17), 4, False, 2, rank, split)
        made = DataLoaderShard(stream, batch_size=2 if split else 4)
        assert read(made) == read(
            prepare_data_loader(DataLoader(Stream(17), 4), None, 2, rank, split)
        )
    dispatched = DataLoaderDispatcher(range(17), split_batches=True, batch_size=4, skip_batches=1)
    assert read(dispatched)[0] == [*map(list, (range(4, 8), range(8, 12), range(12, 16), [16]))]
    with pytest.raises(ValueError, match="DataLoaderDispatcher has torch_device_mesh"):
        DataLoaderDispatcher(range(4), torch_device_mesh=object())


def test_a_subclass_has_its_own_constructor_and_keeps_its_attributes_when_skipping():
    loader = Counted("mine", 9, batch_size=2, skip_batches=1)
    rest = skip_first_batches(loader, 2)
    assert type(rest) is Counted
    assert rest.name == "mine"
    assert read(rest)[0] == [[6, 7], [8]]
    assert read(loader)[0] == [[2, 3], [4, 5], [6, 7], [8]]
    orders = [
        read(
            DataLoaderShard(
                range(9),
                synchronized_generator=torch.Generator().manual_seed(seed),
                shuffle=True,
                iteration=iteration,
                batch_size=9,
            )
        )[0]
        for seed, iteration in ((1, 0), (1, 0), (2, 0), (1, 1))
    ]
    assert orders[0] == orders[1]
    assert len({str(order) for order in orders}) == 3


def test_names_that_are_in_the_package():
    assert {each for each in trainer.data.__all__ if not hasattr(trainer.data, each)} == set()
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        trainer.data.Nothing
    assert list(SkipBatchSampler([[0], [1]], 1)) == [[1]]
    assert SkipBatchSampler([[0], [1]], 1).total_length == 2
    with pytest.raises(ValueError, match="prepare the loader"):
        SkipDataLoader(range(3), use_stateful_dataloader=True)


def test_processes_of_a_mesh_that_share_data_read_the_same(ranks4):
    def body():
        from torch.distributed.device_mesh import init_device_mesh

        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_shard", "tp"))
        loader = DataLoader(range(8), 2)
        for names in (("dp", "model"), None):
            other = init_device_mesh("cpu", (2, 2), mesh_dim_names=names)
            with pytest.raises(ValueError, match=f"a dimension named {names and names[1]!r}, but"):
                prepare_data_loader(loader, torch_device_mesh=other)
        return [batch.tolist() for batch in prepare_data_loader(loader, torch_device_mesh=mesh)]

    first, second = [[0, 1], [4, 5]], [[2, 3], [6, 7]]
    assert ranks4(body) == [first, first, second, second]
