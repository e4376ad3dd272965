"""Random augmentation is a function of a batch's place in the epoch."""

from __future__ import annotations

import pickle
import random
import threading

import numpy
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    SequentialSampler,
    Subset,
    TensorDataset,
    default_collate,
    get_worker_info,
)

from trainer.data.epoch_iterator import EpochIterator
from trainer.data.sampler import DataShard
from trainer.data.seeding import SeededDataset
from trainer.data.tensor_dataset import TensorRows
from trainer.rng import mix, rng_state, seed_generators


class Noisy(Dataset):
    """Each item is its index and what all three generators drew for it."""

    def __init__(self, size: int = 12):
        self.size = size

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        return index, random.random(), float(numpy.random.rand()), torch.rand(()).item()


class NoisyAtOnce(Noisy):
    def __getitems__(self, indices):
        noise = torch.rand(len(indices))
        return [(index, float(value)) for index, value in zip(indices, noise, strict=True)]


def noisy_collate(items):
    return [(index, random.random()) for index, *_ in items]


def plain(items):
    return items


def drawn(
    loader: DataLoader, *, world_size: int = 1, epoch: int = 0, seed: int = 0
) -> dict[int, tuple[float, ...]]:
    """Index of each sample -> what was drawn for it, over all processes of one epoch."""
    found = {}
    for rank in range(world_size):
        torch.manual_seed(1000 + rank)  # processes are not seeded alike
        epoch_iterator = EpochIterator(
            loader, DataShard(rank=rank, world_size=world_size), seed=seed
        )
        epoch_iterator.set_epoch(epoch)
        for current in epoch_iterator.global_batches():
            if current.present:
                found |= {item[0]: tuple(item[1:]) for item in current.batch}
    return found


def loader(dataset, batch_size: int | None = 3, **kwargs) -> DataLoader:
    return DataLoader(
        dataset, batch_size=batch_size, **{"shuffle": True, "collate_fn": plain, **kwargs}
    )


@pytest.mark.parametrize("dataset", [Noisy(), NoisyAtOnce()])
def test_augmentation_does_not_depend_on_the_number_of_workers(dataset):
    alone = drawn(loader(dataset))
    assert len(alone) == 12
    assert len(set(alone.values())) == 12  # every sample is augmented differently
    assert drawn(loader(dataset, num_workers=1)) == alone
    assert drawn(loader(dataset, num_workers=2)) == alone


def test_augmentation_does_not_depend_on_the_number_of_processes():
    alone = drawn(loader(Noisy()))
    assert drawn(loader(Noisy()), world_size=2) == alone
    assert drawn(loader(Noisy()), world_size=3) == alone


def test_augmentation_changes_with_epoch_and_run():
    first = set(drawn(loader(Noisy())).values())
    assert not first & set(drawn(loader(Noisy()), epoch=1).values())
    assert not first & set(drawn(loader(Noisy()), seed=1).values())


def test_a_collate_function_that_draws_is_seeded_too():
    alone = drawn(loader(Noisy(), collate_fn=noisy_collate))
    assert len(set(alone.values())) == 12
    assert drawn(loader(Noisy(), collate_fn=noisy_collate, num_workers=2)) == alone


def one(item):
    return [item]


def test_samples_without_batches_are_seeded():
    alone = drawn(loader(Noisy(), batch_size=None, collate_fn=one))
    assert len(set(alone.values())) == 12
    assert drawn(loader(Noisy(), batch_size=None, collate_fn=one, num_workers=2)) == alone
    assert drawn(loader(Noisy(), batch_size=None, collate_fn=one), world_size=2) == alone


class Bulk(Dataset):
    """Reads many samples at once, as databases do: its index is a list."""

    def __len__(self):
        return 5

    def __getitem__(self, indices):
        assert type(indices) is list
        return {"index": numpy.asarray(indices), "noise": torch.rand(len(indices))}


@pytest.mark.parametrize("workers", [0, 2])
def test_samples_read_in_bulk_are_seeded(workers):
    sampler = BatchSampler(SequentialSampler(range(5)), 2, drop_last=False)
    bulk = DataLoader(Bulk(), sampler=sampler, batch_size=None, num_workers=workers)
    batches = []
    for rank in (0, 1):
        torch.manual_seed(rank)
        epoch_iterator = EpochIterator(bulk, DataShard(rank=rank, world_size=2))
        epoch_iterator.set_epoch(0)
        batches.append(
            [current.batch for current in epoch_iterator.global_batches() if current.present]
        )
    assert [[b["index"].tolist() for b in own] for own in batches] == [[[0, 1], [4]], [[2, 3]]]
    torch.manual_seed(7)
    epoch_iterator = EpochIterator(bulk)
    epoch_iterator.set_epoch(0)
    whole = [current.batch["noise"].tolist() for current in epoch_iterator.global_batches()]
    assert [b["noise"].tolist() for b in batches[0]] == whole[0::2]
    assert [b["noise"].tolist() for b in batches[1]] == whole[1::2]


def from_python():
    return random.random(), random.gauss(0, 1), random.getrandbits(40)  # gauss leaves a number over


def from_numpy():
    return float(numpy.random.randn()), int(numpy.random.randint(1 << 40))  # and so does randn


def from_torch():
    return torch.rand(()).item(), torch.randn(3).tolist()


def after_seeding_itself():
    random.seed(3)
    numpy.random.set_state(numpy.random.RandomState(4).get_state())
    torch.manual_seed(5)
    return from_all()


def in_a_thread():
    found = []
    thread = threading.Thread(target=lambda: found.append(from_all()))
    thread.start()
    thread.join()
    return found[0]


def from_all():
    return from_python(), from_numpy(), from_torch()


class Drawing(Dataset):
    """Each item is its index and what `draw` returns, from the item `first` on."""

    def __init__(self, draw, first: int = 0):
        self.draw, self.first = draw, first

    def __len__(self):
        return 30

    def __getitem__(self, index):
        return index, self.draw() if index >= self.first else None


def drawn_by_hand(dataset: Dataset, seed: int, epoch: int) -> list[list]:
    """Each batch of three under freshly seeded generators, which nobody puts back."""
    found = []
    for start in range(0, 30, 3):
        seed_generators(mix(seed, epoch, start))
        found.append([dataset[index] for index in range(start, start + 3)])
    return found


def same_states(one, two) -> bool:
    """Of all generators, to the last bit and the number that is left over from a pair."""
    return pickle.dumps(one["python"]) == pickle.dumps(two["python"]) and all(
        numpy.array_equal(a, b)
        for a, b in zip((*one["numpy"], one["torch"]), (*two["numpy"], two["torch"]), strict=True)
    )


@pytest.mark.parametrize("first", [0, 22])
@pytest.mark.parametrize("draw", [from_all, after_seeding_itself, in_a_thread])
@pytest.mark.parametrize("left_over", [0, 1])
def test_batches_and_training_draw_independently(draw, first, left_over):
    dataset = Drawing(draw, first)
    expected = drawn_by_hand(dataset, 7, 2)
    seed_generators(1)
    numbers = [from_all() for _ in range(12)]
    seed_generators(1)
    for _ in range(left_over):
        assert (random.gauss(0, 1), numpy.random.randn()) == pytest.approx(
            (random.Random(1).gauss(0, 1), numpy.random.RandomState(1).randn()), abs=0
        )
    epoch_iterator = EpochIterator(loader(dataset, shuffle=False), seed=7)
    epoch_iterator.set_epoch(2)
    before, found = rng_state(), []
    for current in epoch_iterator.read():
        assert same_states(rng_state(), before)
        found.append(current.batch)
        if not left_over:
            assert from_all() == numbers[len(found) - 1]
            before = rng_state()
    assert found == expected


def from_a_copy():
    """Two idioms that read a generator and leave it where it is."""
    copy = random.Random()
    copy.setstate(random.getstate())
    return copy.random(), numpy.random.default_rng(numpy.random.get_state()[1][:2]).random()


def and_restore():
    state = random.getstate(), numpy.random.get_state(), torch.get_rng_state()
    drawn = from_all()
    random.setstate(state[0])
    numpy.random.set_state(state[1])
    torch.set_rng_state(state[2])
    return drawn


@pytest.mark.parametrize("draw", [from_a_copy, and_restore, torch.initial_seed])
def test_a_generator_that_is_read_without_moving_it_is_seeded(draw):
    dataset = Drawing(draw)
    expected = drawn_by_hand(dataset, 7, 2)
    assert len({str(batch[0][1]) for batch in expected}) == 10
    for workers in (0, 2):
        seed_generators(1)
        epoch_iterator = EpochIterator(loader(dataset, shuffle=False, num_workers=workers), seed=7)
        epoch_iterator.set_epoch(2)
        assert [current.batch for current in epoch_iterator.global_batches()] == expected


@pytest.mark.parametrize("start", [6, 7, 8])
def test_resume_where_a_dataset_begins_to_draw(start):
    dataset = Drawing(from_all, 22)
    expected = drawn_by_hand(dataset, 7, 2)[start:]
    for workers in (0, 2) if start == 7 else (0,):
        epoch_iterator = EpochIterator(loader(dataset, shuffle=False, num_workers=workers), seed=7)
        epoch_iterator.set_epoch(2)
        epoch_iterator.start_batch = start
        assert [current.batch for current in epoch_iterator.global_batches()] == expected


def test_a_failed_fetch_restores_the_generators():
    class Failing(Drawing):
        fails = True

        def __getitem__(self, index):
            item = super().__getitem__(index)
            if index == 10 and self.fails:
                raise LookupError(index)
            return item

    dataset = Failing(from_all)
    epoch_iterator = EpochIterator(loader(dataset, shuffle=False), seed=7)
    epoch_iterator.set_epoch(2)
    from_all()
    before = rng_state()
    with pytest.raises(LookupError):
        list(epoch_iterator.global_batches())
    assert same_states(rng_state(), before)
    dataset.fails = False
    expected = drawn_by_hand(dataset, 7, 2)
    assert [current.batch for current in epoch_iterator.global_batches()] == expected


def test_only_tensor_datasets_are_not_seeded():
    def kind(dataset, **kwargs):
        return type(EpochIterator(DataLoader(dataset, 2, **kwargs)).loader.dataset)

    tensors = TensorDataset(torch.arange(4))
    assert kind(tensors) is TensorRows
    assert kind(Subset(Subset(tensors, [0, 1]), [1])) is TensorRows
    assert kind(tensors, collate_fn=noisy_collate) is SeededDataset
    assert kind(Noisy()) is SeededDataset

    class Augmented(TensorDataset):
        pass

    assert kind(Augmented(torch.arange(4))) is SeededDataset


def test_a_seeded_dataset_has_the_users_attributes_and_can_be_pickled():
    seeded = pickle.loads(pickle.dumps(SeededDataset(Noisy(7), default_collate)))
    assert seeded.size == 7
    with pytest.raises(AttributeError, match="'Noisy' object has no attribute 'nothing'"):
        seeded.nothing


def itself(batch):
    return batch


KEYS = ["0007", (1, 2), numpy.int64(3), slice(1, 3), 5]


class Shifted(Noisy):
    shift = 0

    def __getitem__(self, index):
        assert get_worker_info().dataset is self
        return index + self.shift


def shift(worker):
    dataset = get_worker_info().dataset
    if isinstance(dataset, Shifted):
        dataset.shift = 100
    else:
        dataset.tensors = (dataset.tensors[0] + 100,)


@pytest.mark.parametrize("dataset", [Shifted(4), TensorDataset(torch.arange(4))])
@pytest.mark.parametrize("batch_size", [2, None])
def test_worker_init_fn_gets_the_users_dataset(dataset, batch_size):
    loader = DataLoader(dataset, batch_size, num_workers=1, worker_init_fn=shift)
    expected = [str(batch) for batch in loader]
    assert "100" in expected[0]
    assert [str(each.batch) for each in EpochIterator(loader).global_batches()] == expected


class Lookup(Dataset):
    """Is asked by whatever its sampler thinks of, and draws."""

    def __getitem__(self, key):
        return type(key).__name__, repr(key), torch.rand(()).item()


class KeySampler:
    def __iter__(self):
        return iter(KEYS)

    def __len__(self):
        return len(KEYS)


def test_a_dataset_gets_the_keys_of_its_sampler():
    def found(workers, world_size=1):
        options = {"sampler": KeySampler(), "num_workers": workers, "collate_fn": itself}
        loader = DataLoader(Lookup(), None, **options)
        parts = []
        for rank in range(world_size):
            epoch_iterator = EpochIterator(
                loader, DataShard(rank=rank, world_size=world_size), seed=3
            )
            epoch_iterator.set_epoch(1)
            parts.append([each.batch for each in epoch_iterator.global_batches() if each.present])
        return parts

    (alone,) = found(0)
    assert [batch[:2] for batch in alone] == [(type(key).__name__, repr(key)) for key in KEYS]
    assert len({batch[2] for batch in alone}) == len(KEYS)
    assert found(1) == [alone]
    assert found(0, world_size=2) == [alone[0::2], alone[1::2]]


class Epochs(Dataset):
    """Every sample is the epoch that the dataset stands in."""

    epoch = messages = 0

    def __len__(self):
        return 4

    def __getitem__(self, key):
        return self.epoch, self.messages

    def set_epoch(self, epoch):
        self.epoch = epoch
        self.messages += 1


@pytest.mark.parametrize(
    "how",
    [
        {"batch_size": 2, "shuffle": True},
        {"batch_size": None, "sampler": range(2)},
        {"batch_size": None, "sampler": ["a", "b"]},
    ],
)
def test_set_epoch_reaches_persistent_workers(how):
    def seen(*epochs, **workers):
        epoch_iterator = EpochIterator(DataLoader(Epochs(), collate_fn=itself, **how, **workers))
        found = []
        for epoch in epochs:
            epoch_iterator.set_epoch(epoch)
            found.append([each.batch for each in epoch_iterator.global_batches()])
        epoch_iterator.close()
        return found

    expected = seen(3, 4, 6)
    assert [set(found[0]) if how["batch_size"] else {found[0]} for found in expected] == [
        {(3, 1)},
        {(4, 2)},
        {(6, 3)},
    ]
    assert seen(3, 4, 6, num_workers=1, persistent_workers=True) == expected


class Repaired(Dataset):
    """Draws its order anew in each epoch, from all generators."""

    def __init__(self):
        self.order = list(range(12))

    def __len__(self):
        return 12

    def __getitem__(self, key):
        return self.order[key], torch.rand(()).item()

    def set_epoch(self, epoch):
        self.order = torch.randperm(12).tolist()
        random.shuffle(self.order)
        self.order = numpy.random.permutation(self.order).tolist()


WORKERS = [
    {"num_workers": 2},
    {"num_workers": 2, "persistent_workers": True},
]


def repaired(*epochs, start=0, seed=0, reseed=None, **workers):
    """The batches of each epoch, the first of them from inside."""
    torch.manual_seed(len(workers) + start)
    epoch_iterator = EpochIterator(loader(Repaired(), shuffle=False, **workers), seed=seed)
    found = []
    for epoch in epochs:
        epoch_iterator.start_batch = 0 if found else start
        before = rng_state()
        epoch_iterator.set_epoch(epoch)
        assert same_states(rng_state(), before)
        found.append([each.batch for each in epoch_iterator.global_batches()])
        if reseed is not None:
            epoch_iterator.reseed(reseed)
    epoch_iterator.close()
    return found


def test_draws_in_set_epoch_are_the_same_in_all_workers():
    expected = repaired(0, 1, 2)
    orders = [[index for batch in epoch for index, _ in batch] for epoch in expected]
    assert len({tuple(order) for order in orders}) == 3
    assert [sorted(order) for order in orders] == [list(range(12))] * 3
    assert repaired(0) != repaired(0, seed=1)
    for workers in WORKERS:
        assert repaired(0, 1, 2, **workers) == expected


@pytest.mark.parametrize("workers", [{}, *WORKERS])
def test_draws_in_set_epoch_are_resumed(workers):
    # With one batch left, the second worker has none until the next epoch.
    first, *others = repaired(1, 2, 3)
    assert repaired(1, 2, 3, start=3, **workers) == [first[3:], *others]


def test_reseed_reaches_persistent_workers():
    expected = [*repaired(1), *repaired(1, seed=5)]
    assert repaired(1, 1, reseed=5, **WORKERS[1]) == expected
