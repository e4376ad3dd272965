"""Generators that loaders, samplers and datasets keep for themselves."""

from __future__ import annotations

import copy
import logging
import random
from collections import deque
from functools import partial
from types import SimpleNamespace

import numpy
import pytest
import torch
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    SequentialSampler,
    get_worker_info,
)

from trainer import Trainer, TrainModule
from trainer.data.epoch_iterator import EpochIterator
from trainer.data.sampler import DataShard
from trainer.data.seeding import LONGEST, generators_in

KINDS = [
    (torch.Generator, lambda g: torch.rand((), generator=g).item()),
    (lambda: random.Random(1), lambda g: g.random()),
    (lambda: numpy.random.default_rng(1), lambda g: g.random()),
    (lambda: numpy.random.RandomState(1), lambda g: g.standard_normal()),
]
NAMES = ["torch", "python", "numpy", "numpy's older"]
WORKERS = [{}, {"num_workers": 2}, {"num_workers": 2, "persistent_workers": True}]


def plain(items):
    return items


class Jitter:
    """A transform that draws from a generator of its own."""

    def __init__(self, make, draw):
        self.rng, self.draw = make(), draw

    def __call__(self, index):
        return index, self.draw(self.rng)


class Jittered(Dataset):
    """Indices as a transform gives them back."""

    def __init__(self, transform):
        self.transform = transform

    def __len__(self):
        return 12

    def __getitem__(self, index):
        return self.transform(index)


def read(epoch_iterator, *epochs, start=0):
    """The batches of each epoch, the first of them from inside."""
    found = []
    for epoch in epochs:
        epoch_iterator.start_batch = 0 if found else start
        epoch_iterator.set_epoch(epoch)
        found.append([each.batch for each in epoch_iterator.global_batches() if each.present])
    epoch_iterator.close()
    return found


def iterator_of(dataset, *, rank=0, world_size=1, seed=3, **kwargs):
    options = {"batch_size": 2, "collate_fn": plain, **kwargs}
    return EpochIterator(
        DataLoader(dataset, **options), DataShard(rank=rank, world_size=world_size), seed=seed
    )


# -- of datasets -------------------------------------------------------------------------------


@pytest.mark.parametrize(("make", "draw"), KINDS, ids=NAMES)
def test_draws_from_a_datasets_own_generator_follow_the_seed(make, draw):
    def epoch_iterator(**kwargs):
        return iterator_of(Jittered(Jitter(make, draw)), **kwargs)

    whole = read(epoch_iterator(), 0, 1, 2)
    drawn = [value for epoch in whole for batch in epoch for _, value in batch]
    assert len(set(drawn)) == 36
    for workers in WORKERS:
        assert read(epoch_iterator(**workers), 0, 1, 2) == whole
        assert read(epoch_iterator(**workers), 1, 2, start=4) == [whole[1][4:], whole[2]]
    shares = [read(epoch_iterator(world_size=2, rank=rank), 1)[0] for rank in (0, 1)]
    assert shares == [whole[1][0::2], whole[1][1::2]]
    assert read(epoch_iterator(seed=4), 0) != whole[:1]


@pytest.mark.parametrize(("make", "draw"), KINDS, ids=NAMES)
def test_the_state_of_a_datasets_generator_is_restored_for_the_training(make, draw):
    transform = Jitter(make, draw)
    twin = copy.deepcopy(transform.rng)
    assert draw(transform.rng) == draw(twin)  # half a pair of numpy's older kind is left over
    for epoch in read(iterator_of(Jittered(transform)), 0, 1):
        assert len(epoch) == 6
        assert draw(transform.rng) == draw(twin)


def at(kind, seed):
    return kind().manual_seed(seed) if kind is torch.Generator else kind(seed)


def test_generators_of_one_dataset_draw_independently():
    seeds = range(len(KINDS) * 2)
    seeded = [
        torch.Generator,
        random.Random,
        numpy.random.default_rng,
        numpy.random.RandomState,
    ] * 2
    transforms = [
        Jitter(lambda kind=kind, n=n: at(kind, n), draw)
        for n, kind, (_, draw) in zip(seeds, seeded, KINDS * 2, strict=True)
    ]

    def transform(index):
        every = [each(index)[1] for each in transforms]
        every += [torch.rand(()).item(), random.random(), numpy.random.rand()]
        return [round(value, 6) for value in every]

    ((batch, *_),) = read(iterator_of(Jittered(transform)), 0)
    for drawn in batch:
        assert len(set(drawn)) == len(drawn) == 11


class Collating:
    """A ``collate_fn`` that masks by a generator of its own."""

    def __init__(self):
        self.rng = numpy.random.default_rng(1)

    def __call__(self, items):
        return [(index, self.rng.random()) for index, _ in items]


def test_draws_from_the_generator_of_a_collate_fn_follow_the_seed():
    def epoch_iterator(**workers):
        dataset = Jittered(lambda index: (index, 0))
        return iterator_of(dataset, collate_fn=Collating(), **workers)

    (whole,) = read(epoch_iterator(), 1)
    assert len({value for batch in whole for _, value in batch}) == 12
    assert read(epoch_iterator(num_workers=2), 1, start=3) == [whole[3:]]


class Late(Jittered):
    """Makes its generator when it is first asked."""

    def __init__(self, *, every):
        self.every, self.rng = every, None

    def __getitem__(self, index):
        if self.rng is None or self.every:
            self.rng = random.Random(index)
        return self.rng.random()


def shown(worker):
    logging.getLogger("trainer.data").addHandler(logging.StreamHandler())


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("every", [False, True])
def test_a_lazy_generator_warns(capfd, caplog, every, workers):
    epoch_iterator = iterator_of(Late(every=every), num_workers=workers, worker_init_fn=shown)
    with caplog.at_level("WARNING"):
        read(epoch_iterator, 0)
    said = capfd.readouterr().err + caplog.text
    messages = said.count("(Late) or its collate_fn created a random generator")
    assert messages == (0 if every else 1)
    assert ("first batch. In each worker, what" in said) == (not every and bool(workers))


def test_where_generators_are_found():
    rngs = [random.Random(number) for number in range(14)]
    linked = SimpleNamespace(rng=rngs[0])
    linked.itself = linked

    def closed(value, rng=rngs[1], *, named=rngs[2]):
        return value + rngs_of_closure[0].random() + rng.random() + named.random()

    class Shared:
        rng = rngs[12]

    class Sharing(Shared):
        pass

    class Slotted:
        __slots__ = ("rng", "unset")

    slotted = Slotted()
    slotted.rng = rngs[13]

    rngs_of_closure = [rngs[3]]
    found = generators_in(
        things={
            "itself": linked,
            "function": closed,
            "partial": partial(closed, rngs[4], rng=rngs[5]),
            "method": SimpleNamespace(rng=rngs[6], call=Jitter(lambda: rngs[7], None).__call__),
            "builtin": rngs[8].random,
            "several": [(rngs[9],), deque([{"deep": [rngs[10]]}])],
            "class": Sharing(),
            "slots": slotted,
            "module": torch.nn.Sequential(torch.nn.Identity()),
            "subset": torch.utils.data.Subset(Jittered(Jitter(lambda: rngs[11], None)), [0]),
        }
    )
    assert {id(each) for each in found.values()} == {id(each) for each in rngs}
    assert len(found) == len(rngs)


class Player(TrainModule):
    """Draws its data from an environment of its own, in a method that a dataset is given."""

    def __init__(self, dataset, bind):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.environment = SimpleNamespace(rng=numpy.random.default_rng(7))
        self.dataset, self.bind, self.seen = dataset, bind, []

    def play(self, index=None):
        return self.environment.rng.random(1)

    def train_dataloader(self):
        return DataLoader(self.dataset(self.bind(self)), 2)

    def training_step(self, batch, batch_idx):
        self.seen += batch.flatten().tolist()
        return self.layer(batch.float()).mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Played(IterableDataset):
    def __init__(self, play):
        self.play = play

    def __iter__(self):
        return (self.play() for _ in range(12))


@pytest.mark.parametrize("dataset", [Played, Jittered])
@pytest.mark.parametrize("bind", [lambda m: m.play, lambda m: lambda i=0: m.play(i)])
def test_what_the_module_draws_for_a_dataset_follows_the_seed_of_its_user(dataset, bind, tmp_path):
    module = Player(dataset, bind)
    options = {"cpu": True, "progress_bar": False, "project_dir": tmp_path, "checkpointing": False}
    trainer = Trainer(max_epochs=2, **options)
    trainer.fit(module)
    assert module.seen == numpy.random.default_rng(7).random(24).tolist()
    teacher = torch.nn.ModuleDict({"inner": Player(dataset, bind)})
    module.teacher = teacher  # a module of its own is searched
    assert len(generators_in(module=module)) == 2


class Paired(Jittered):
    """An image and its mask, changed alike by generators that were made alike."""

    def __init__(self, *_):
        self.image, self.mask = random.Random(5), random.Random(5)
        self.other = random.Random(6)

    def __getitem__(self, index):
        return index, self.image.random(), self.mask.random(), self.other.random()


def test_generators_with_equal_states_stay_equal():
    whole = read(iterator_of(Paired()), 0, 1)
    for _, image, mask, other in [item for epoch in whole for batch in epoch for item in batch]:
        assert image == mask != other
    assert read(iterator_of(Paired(), num_workers=2), 0, 1) == whole
    assert read(iterator_of(Paired(), num_workers=2), 1, start=3) == [whole[1][3:]]


def test_global_and_system_generators_are_not_seeded():
    def unbound():
        return later  # has no value yet

    things = [
        random.SystemRandom(),
        random.random,
        numpy.random.mtrand._rand,
        numpy.random.rand,
        torch.default_generator,
        unbound,
        [random.Random(1)] * (LONGEST + 1),
    ]
    assert generators_in(things=things) == {}
    later = None


class Keeping(TrainModule):
    """Keeps what it is given."""

    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(1, 1)
        self.seen = {}

    def training_step(self, batch, batch_idx):
        self.seen.setdefault("train", batch)
        return self.net(batch[:, None]).mean()

    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        self.seen.setdefault(dataloader_idx, batch)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Noise(Dataset):
    """Nothing but what a generator draws."""

    def __init__(self, draw):
        self.draw = draw

    def __len__(self):
        return 4

    def __getitem__(self, index):
        return self.draw()


def test_validation_data_are_drawn_independently_of_training_data():
    rng = random.Random(1)
    for draw in (lambda: torch.rand(()), lambda: torch.tensor(rng.random())):
        module = Keeping()
        trainer = Trainer(cpu=True, max_epochs=1, seed=1, progress_bar=False, checkpointing=False)
        loaders = [DataLoader(Noise(draw), 4) for _ in range(3)]
        trainer.fit(module, loaders[0], loaders[1:])
        first, *others = module.seen.values()
        assert len({str(each) for each in (first, *others)}) == 3


# -- of streams --------------------------------------------------------------------------------


class Stream(IterableDataset):
    """Its order is drawn from a generator of its own, and split between workers."""

    def __init__(self, make=lambda: numpy.random.default_rng(1)):
        self.rng = make()

    def __iter__(self):
        order = self.rng.permutation(12).tolist()
        worker = get_worker_info()
        return iter(order if worker is None else order[worker.id :: worker.num_workers])


class Batches:
    """An iterable of batches."""

    def __init__(self):
        self.rng = numpy.random.default_rng(1)

    def __iter__(self):
        return iter(self.rng.permutation(12).reshape(6, 2).tolist())


class Stateful(Stream):
    """Looks after its own generator."""

    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        pass


@pytest.mark.parametrize("make", [lambda: DataLoader(Stream(), 2, collate_fn=plain), Batches])
def test_resume_of_a_stream_with_its_own_generator(make):
    def epoch_iterator(**shard):
        return EpochIterator(make(), DataShard(**shard), seed=3)

    whole = read(epoch_iterator(), 0, 1, 2)
    assert len({str(epoch) for epoch in whole}) == 3
    assert read(epoch_iterator(), 1, 2, start=4) == [whole[1][4:], whole[2]]
    shares = [read(epoch_iterator(world_size=2, rank=rank), 1)[0] for rank in (0, 1)]
    assert shares == [whole[1][0::2], whole[1][1::2]]


def test_workers_of_a_stream_draw_one_order_per_epoch():
    whole = read(iterator_of(Stream(), num_workers=2), 0, 1)
    for epoch in whole:
        assert sorted(index for batch in epoch for index in batch) == list(range(12))
    assert whole[0] != whole[1]
    assert read(iterator_of(Stream(), num_workers=2), 1) == whole[1:]


def test_generators_of_a_stateful_stream_are_left_alone():
    twin = numpy.random.default_rng(1)
    for epoch in read(iterator_of(Stateful()), 0, 1):
        assert [index for batch in epoch for index in batch] == twin.permutation(12).tolist()


# -- of samplers -------------------------------------------------------------------------------


class Own(SequentialSampler):
    """Draws its order from a generator of its own, which goes on from epoch to epoch."""

    def __init__(self, make):
        super().__init__(range(12))
        self.rng = make()

    def __iter__(self):
        if isinstance(self.rng, torch.Generator):
            return iter(torch.randperm(12, generator=self.rng).tolist())
        order = list(range(12))
        self.rng.shuffle(order)
        return iter(order)


@pytest.mark.parametrize(
    "make",
    [torch.Generator, random.Random, numpy.random.default_rng, numpy.random.RandomState],
)
@pytest.mark.parametrize("batched", [True, False])
def test_resume_of_a_sampler_with_its_own_generator(make, batched):
    def epoch_iterator(world_size=1, rank=0):
        source = DataLoader(range(12), batch_size=2 if batched else None, sampler=Own(make))
        return EpochIterator(source, DataShard(world_size=world_size, rank=rank), seed=3)

    def read(epoch_iterator, epoch, start=0):
        epoch_iterator.set_epoch(epoch)
        epoch_iterator.start_batch = start
        return [
            numpy.asarray(each.batch).tolist()
            for each in epoch_iterator.global_batches()
            if each.present
        ]

    whole = epoch_iterator()
    first, second = read(whole, 0), read(whole, 1)
    assert first != second
    assert read(epoch_iterator(), 1, start=2) == second[2:]
    assert [read(epoch_iterator(2, rank), 1) for rank in (0, 1)] == [second[0::2], second[1::2]]


@pytest.mark.parametrize(("make", "draw"), KINDS, ids=NAMES)
def test_an_isolated_epoch_restores_the_generators(make, draw):
    sampler = SequentialSampler(range(2))
    sampler.mine = generator = make()
    epoch_iterator = EpochIterator(
        DataLoader(range(2), sampler=sampler), DataShard(rank=0, world_size=1), seed=0
    )
    twin = copy.deepcopy(generator)
    assert draw(generator) == draw(twin)  # half a pair of numpy's older kind is left over
    with epoch_iterator.isolated_epoch(3):
        assert len(list(epoch_iterator.global_batches())) == 2
        draw(generator)
    assert draw(generator) == draw(twin)
