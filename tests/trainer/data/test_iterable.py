"""A stream goes on where it was left, however it was read ahead."""

from __future__ import annotations

import itertools
import logging
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

from tests.helpers.datasets import HuggingFaceStream, hugging_face
from tests.helpers.requires import requires_datasets
from trainer.checkpoint.serialization import load_tree, save_tree
from trainer.data.dataloader import DataLoaderShard, LoaderSettings
from trainer.data.epoch_iterator import EpochIterator
from trainer.data.sampler import DataShard
from trainer.errors import CheckpointError
from trainer.tree import map_tree

# Three workers are more than a small machine has cores.
pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")
SAMPLES = 11


def noise() -> tuple[float, float, float]:
    return random.random(), float(numpy.random.rand()), torch.rand(()).item()


def shard(samples: int) -> range:
    """What this worker reads: shares of unequal length, so that some workers end before others."""
    info = get_worker_info()
    if info is None or info.num_workers == 1:
        return range(samples)
    cuts = [samples * i * (i + 1) // (info.num_workers * (info.num_workers + 1)) for i in range(9)]
    return range(cuts[info.id], cuts[info.id + 1])


class Stateful(IterableDataset):
    """Its place is its own: a pass begins where the last one was left, at 0 after its end."""

    def __init__(self, samples: int = SAMPLES) -> None:
        self.samples, self.at, self.passes, self.epoch, self.reads = samples, 0, 0, 0, 0

    def __iter__(self) -> Iterator[Any]:
        own = shard(self.samples)
        while self.at < len(own):
            self.at += 1
            self.reads += 1
            yield own[self.at - 1], self.passes, self.epoch, *noise()
        self.at = 0
        self.passes += 1

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at, "passes": self.passes}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at, self.passes = state["at"], state["passes"]


class Anew(Stateful):
    """Each pass begins at 0, but for the one after a state was loaded."""

    begin = 0

    def __iter__(self) -> Iterator[Any]:
        own = shard(self.samples)
        begin, self.begin = self.begin, 0
        for self.at in range(begin + 1, len(own) + 1):
            yield own[self.at - 1], 0, self.epoch, *noise()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.begin = state["at"]


class Shuffling(Anew):
    """Draws its order when a pass is asked for, not when it is read."""

    def __iter__(self) -> Iterator[Any]:
        order = torch.randperm(self.samples).tolist()
        return ((order[item[0]], *item[1:]) for item in super().__iter__())


class Drawing(IterableDataset):
    """Draws from a generator of its own, without an end of itself; its state is a live tensor."""

    def __init__(self, samples: int = SAMPLES) -> None:
        self.samples = samples
        self.mean = torch.zeros(2)
        self.generator = torch.Generator().manual_seed(3)
        self.left: int | None = None

    def __iter__(self) -> Iterator[Any]:
        self.left = len(shard(self.samples)) if self.left is None else self.left
        while self.left:
            self.left -= 1
            self.mean.mul_(0.5).add_(torch.rand(2, generator=self.generator))
            yield self.mean.tolist(), *noise()
        self.left = None

    def state_dict(self) -> dict[str, Any]:
        state = {"left": self.left, "mean": self.mean}
        return state | {"generator": self.generator.get_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.left, self.mean = state["left"], state["mean"]
        self.generator.set_state(state["generator"])


class Plain(IterableDataset):
    """Nothing but its samples."""

    def __init__(self, samples: int = SAMPLES) -> None:
        self.samples, self.epoch = samples, 0

    def __iter__(self) -> Iterator[Any]:
        for sample in shard(self.samples):
            yield sample, self.epoch, *noise()

    set_epoch = Stateful.set_epoch


class Draws(IterableDataset):
    """Neither has a state nor hears of an epoch, and leaves something behind in its workers."""

    passes = 0

    def __iter__(self) -> Iterator[Any]:
        self.passes += 1
        for _ in range(SAMPLES):
            yield torch.rand(()).item(), self.passes


class Ordered(IterableDataset):
    """Draws its order as it hears of an epoch."""

    def __iter__(self) -> Iterator[Any]:
        yield from self.order

    def set_epoch(self, epoch: int) -> None:
        self.order = torch.randperm(SAMPLES).tolist()


class Batches:
    """Ready batches, with a place of their own."""

    def __init__(self) -> None:
        self.at, self.epoch = 0, 0

    def __iter__(self) -> Iterator[Any]:
        while self.at < 6:
            self.at += 1
            yield [(self.at, self.epoch, *noise())]
        self.at = 0

    set_epoch = Stateful.set_epoch

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]


def listed(items: list[Any]) -> list[Any]:
    return items


def collate_noisily(items: list[Any]) -> list[Any]:
    return [*items, noise()]


def loader(dataset: Any, batch_size: int | None = 2, **kwargs: Any) -> DataLoader[Any]:
    return DataLoader(dataset, batch_size, **{"collate_fn": listed, **kwargs})


def iterator_of(
    source: Any, rank: int = 0, world: int = 1, *, limit: int | None = None
) -> EpochIterator:
    epoch_iterator = EpochIterator(
        source, DataShard(rank=rank, world_size=world), seed=5, remember=True
    )
    epoch_iterator.limit = limit
    return epoch_iterator


def through_disk(position: Any) -> Any:
    folder = Path("saved")
    folder.mkdir(exist_ok=True)
    save_tree(position, folder, "position")
    return load_tree(folder, "position")


def plain(position: Any) -> Any:
    """A position that can be compared."""
    if position is not None and position["over"] and not position["batches"]:
        return None  # after an epoch of one batch: the state that is loaded only to be left again
    return map_tree(
        lambda leaf: leaf.tolist() if isinstance(leaf, torch.Tensor) else leaf, position
    )


Seen = list[tuple[int, int, Any, Any]]  # of each round: epoch, batches up to it, batch, position


def read(epoch_iterator: EpochIterator, begin: tuple[int, int] = (0, 0), epochs: int = 3) -> Seen:
    """Every round from a place on, with where the feed says that it stands after it."""
    seen: Seen = []
    epoch, epoch_iterator.start_batch = begin
    for number in range(epoch, epochs):
        epoch_iterator.set_epoch(number)
        batches = epoch_iterator.start_batch
        for current in epoch_iterator.global_batches():
            batches += epoch_iterator.world_size
            seen.append((number, batches, current.batch, epoch_iterator.position()))
            if current.last:
                seen[-1] = (number + 1, 0, current.batch, epoch_iterator.position())
        epoch_iterator.start_batch = 0
    return seen


def assert_resumes(
    make: Callable[[], Any],
    world: int = 1,
    limit: int | None = None,
    epochs: int = 3,
    *,
    positions: bool = True,
    every: int = 1,
) -> Seen:
    """Stopped after any round, in any epoch, on any process, the rest is as if it had not been.

    Workers take long to start: there a stop after every third round, and at the end of each epoch,
    comes upon each worker.
    """
    for rank in range(world):
        torch.manual_seed(rank)
        whole = read(iterator_of(make(), rank, world, limit=limit), epochs=epochs)
        assert [epoch for epoch, batches, *_ in whole if batches == 0] == [*range(1, epochs + 1)]
        for number, (epoch, batches, _, position) in enumerate(whole, 1):
            if batches and number % every:
                continue
            torch.manual_seed(99)
            epoch_iterator = iterator_of(make(), rank, world, limit=limit)
            epoch_iterator.resume_at(through_disk(position))
            assert plain(epoch_iterator.position()) == plain(
                position
            )  # saved again before anything is read
            rest = read(epoch_iterator, (epoch, batches), epochs)
            assert [each[:3] for each in rest] == [each[:3] for each in whole[number:]]
            found, expected = ([plain(each[3]) for each in run] for run in (rest, whole[number:]))
            assert found == expected or not positions
    return whole


def samples_of(seen: Seen, epoch: int = 0) -> list[Any]:
    counted, found = 0, []
    for _, batches, batch, _ in seen:
        if counted == epoch and batch is not None:
            found += [item[0] for item in batch]
        counted += batches == 0
    return found


# -- exactness ---------------------------------------------------------------------------------


@pytest.mark.parametrize("dataset", [Stateful, Anew, Drawing])
@pytest.mark.parametrize("workers", [0, 2])
def test_resume_of_a_stateful_dataset(dataset, workers):
    epochs = 2 if workers else 3
    seen = assert_resumes(
        lambda: loader(dataset(), num_workers=workers), epochs=epochs, every=3 if workers else 1
    )
    if dataset is not Drawing:
        assert sorted(samples_of(seen)) == list(range(SAMPLES))


@pytest.mark.parametrize("dataset", [Stateful, Anew, Shuffling])
@pytest.mark.parametrize(("samples", "limit"), [(11, 3), (12, None), (2, None), (9, 1)])
def test_resume_with_a_limit(dataset, samples, limit):
    assert_resumes(lambda: loader(dataset(samples)), limit=limit)


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("limit", [None, 5])
def test_resume_on_several_ranks(world, limit):
    assert_resumes(lambda: loader(Stateful()), world, limit)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(
    "options",
    [
        {"drop_last": True},
        {"collate_fn": collate_noisily},
        {"batch_size": None, "collate_fn": lambda item: [item]},
    ],
)
def test_resume_with_loader_options(workers, options):
    epochs = 1 if workers else 3
    assert_resumes(lambda: loader(Stateful(), num_workers=workers, **options), epochs=epochs)


def test_persistent_workers_restart_in_every_epoch():
    seen = assert_resumes(
        lambda: loader(Stateful(), num_workers=2, persistent_workers=True), limit=3, every=2
    )
    assert {item[2] for _, _, batch, _ in seen for item in batch} == {0, 1, 2}  # set_epoch arrived
    # Without a state too: the workers of a resumed run would know an epoch that others did not.
    staying = {"num_workers": 1, "persistent_workers": True}
    assert_resumes(lambda: loader(Draws(), **staying), limit=2, epochs=2)
    seen = assert_resumes(lambda: loader(Plain(), **staying), limit=2, epochs=2)
    assert {item[1] for _, _, batch, _ in seen for item in batch} == {0, 1}


def test_draws_in_set_epoch_of_a_stream_follow_the_epoch():
    def seen(state, **settings):
        torch.manual_seed(state)
        epoch_iterator = EpochIterator(loader(Ordered(), **settings))
        found = []
        for epoch in (0, 1):
            epoch_iterator.set_epoch(epoch)
            found.append([item for each in epoch_iterator.global_batches() for item in each.batch])
        return found

    first, second = seen(1)
    assert first != second
    assert sorted(first) == sorted(second) == list(range(SAMPLES))
    assert seen(2) == seen(3, num_workers=1) == [first, second]


@pytest.mark.parametrize("limit", [None, 4, 1])
def test_resume_of_a_stateful_iterable_of_batches(limit):
    assert_resumes(Batches, limit=limit)
    assert_resumes(Batches, 2, limit=limit)


@pytest.mark.parametrize("limit", [None, 4])
@pytest.mark.parametrize("workers", [0, 2])
def test_resume_of_a_stream_without_a_state(workers, limit):
    every = 3 if workers else 1
    assert_resumes(lambda: loader(Plain(), num_workers=workers), limit=limit, epochs=2, every=every)


def test_resume_of_a_prepared_loader():
    def make() -> Any:
        options: Any = {"even_batches": False, "device": None, "non_blocking": False}
        source = DataLoader(Numbers(), 2, shuffle=True, collate_fn=listed)
        settings = LoaderSettings(rank=0, world_size=1, seed=1, **options)
        return DataLoaderShard.of(source, settings)

    seen = assert_resumes(make)
    assert samples_of(seen) != samples_of(seen, 1)


class Numbers(Dataset):
    """Draws nothing: what torchdata's workers draw is not in its state."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[int]:
        return (index,)


class Silent(Anew):
    def __iter__(self) -> Iterator[Any]:
        for item in super().__iter__():
            yield item[:3]


class Masking:
    """A collate function that draws from a generator of its own, or from one of its dataset."""

    def __init__(self, generator: torch.Generator | None = None) -> None:
        self.generator = generator or torch.Generator().manual_seed(1)

    def __call__(self, items: list[Any]) -> list[Any]:
        return [*items, (torch.rand((), generator=self.generator).item(),)]


class Augmented(Numbers):
    """Draws from a generator of its own."""

    def __init__(self) -> None:
        self.generator = numpy.random.default_rng(2)

    def __getitem__(self, index: int) -> tuple[Any, ...]:
        return index, float(self.generator.random())


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("dataset", [Stateful, Drawing])
def test_resume_of_a_collate_fn_with_a_generator(dataset, workers):
    seen = assert_resumes(
        lambda: loader(dataset(), collate_fn=Masking(), num_workers=workers),
        epochs=2,
        every=3 if workers else 1,
    )
    drawn = [batch[-1] for _, _, batch, _ in seen]
    assert len(set(drawn)) == len(drawn)


def test_a_generator_in_the_dataset_state_is_not_seeded():
    def make() -> Any:
        dataset = Drawing()
        return loader(dataset, collate_fn=Masking(dataset.generator))

    seen = assert_resumes(make)
    assert [batch[-1] for _, _, batch, _ in seen[:3]] == [batch[-1] for batch in make()][:3]


class Shuffled(IterableDataset):
    """Has no state: its order goes on from one epoch to the next."""

    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(3)

    def __iter__(self) -> Iterator[tuple[int]]:
        for index in torch.randperm(SAMPLES, generator=self.generator).tolist():
            yield (index,)


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
@pytest.mark.parametrize(
    ("dataset", "workers", "limit", "masks"),
    [
        (Silent, 0, None, False),
        (Silent, 2, 3, False),
        (Numbers, 0, 3, False),
        (Numbers, 2, None, False),
        (Shuffled, 0, None, False),
        (Shuffled, 2, None, False),
        (Silent, 0, None, True),  # from a generator of the collate function
        (Numbers, 0, None, True),
        (Augmented, 0, None, True),
    ],
)
def test_resume_of_torchdata_loaders(dataset, workers, limit, masks):
    from torchdata.stateful_dataloader import StatefulDataLoader

    loaders = []
    streams = issubclass(dataset, IterableDataset)
    options = {"num_workers": workers, "shuffle": None if streams else True}

    def make() -> Any:
        for each in loaders:
            each._iterator = None  # ends its workers
        collate = Masking() if masks else listed
        loaders.append(StatefulDataLoader(dataset(), 2, collate_fn=collate, **options))
        return loaders[-1]

    every = 3 if workers else 1
    # It keeps unused seeds.
    seen = assert_resumes(make, limit=limit, epochs=2, positions=False, every=every)
    make()
    if masks:
        drawn = [batch[-1] for _, _, batch, _ in seen]
        assert len(set(drawn)) == len(drawn)
    elif limit is None and not (dataset is Shuffled and workers):
        assert sorted(samples_of(seen)) == list(range(SAMPLES))


# -- what is drawn and read --------------------------------------------------------------------


def test_draws_are_the_same_with_no_worker_and_one():
    alone = [each[:3] for each in read(iterator_of(loader(Stateful())), epochs=1)]
    assert [
        each[:3] for each in read(iterator_of(loader(Stateful(), num_workers=1)), epochs=1)
    ] == alone
    drawn = [item[3:] for _, _, batch in alone for item in batch]
    assert len(set(drawn)) == SAMPLES
    other = iterator_of(loader(Stateful()))
    other.reseed(6)
    seen = read(other, epochs=1)
    assert not {item[3:] for _, _, batch, _ in seen for item in batch} & set(drawn)


def test_every_worker_and_epoch_draws_differently():
    seen = read(iterator_of(loader(Stateful(), num_workers=3)))
    drawn = [item[3:] for _, _, batch, _ in seen for item in batch]
    assert len(drawn) == len(set(drawn)) == 3 * SAMPLES


def test_the_order_is_that_of_a_plain_loader():
    for workers in (0, 2, 3):
        expected = [
            [item[0] for item in batch] for batch in loader(Stateful(), num_workers=workers)
        ]
        seen = read(iterator_of(loader(Stateful(), num_workers=workers)), epochs=1)
        assert [[item[0] for item in batch] for _, _, batch, _ in seen] == expected


def test_resume_of_a_stateful_dataset_reads_nothing_again(caplog):
    whole = read(iterator_of(loader(Stateful(20))), epochs=1)
    dataset = Stateful(20)
    epoch_iterator = iterator_of(loader(dataset))
    epoch_iterator.resume_at(whole[6][3])
    read(epoch_iterator, whole[6][:2], epochs=1)
    assert dataset.reads == 20 - 14
    assert caplog.text == ""


def test_the_position_excludes_batches_read_ahead():
    epoch_iterator = iterator_of(loader(dataset := Stateful()))
    epoch_iterator.set_epoch(0)
    global_batches = epoch_iterator.global_batches()
    next(global_batches)
    assert dataset.at == 4
    assert epoch_iterator.position()["states"] == [{"Stateful": {"at": 2, "passes": 0}}]
    global_batches.close()


def shuffled_numbers():
    from datasets import IterableDataset

    stream = IterableDataset.from_generator(
        lambda shards: ({"x": each} for each in shards), gen_kwargs={"shards": [*range(50)]}
    )
    return stream.shuffle(seed=3, buffer_size=8)


class Wrapped(IterableDataset):
    """Delegates everything to a stream that it holds."""

    def __init__(self, stream: Any) -> None:
        self.stream = stream

    def __iter__(self) -> Iterator[Any]:
        return iter(self.stream)

    def state_dict(self) -> dict[str, Any]:
        return self.stream.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.stream.load_state_dict(state)


@pytest.mark.parametrize(
    "make",
    [
        lambda: HuggingFaceStream(50, 8),
        lambda: Wrapped(HuggingFaceStream(50, 8)),
        pytest.param(shuffled_numbers, marks=requires_datasets),
    ],
)
def test_a_stream_whose_state_lacks_its_shuffle_buffer_is_read_again(make, monkeypatch, caplog):
    if make is not shuffled_numbers:
        hugging_face(monkeypatch)
    whole = read(iterator_of(loader(make())), epochs=1)
    samples = [str(each) for _, _, batch, _ in whole for each in batch]
    assert len(set(samples)) == len(samples) == 50
    for cut in (1, 7, 24):
        epoch_iterator = iterator_of(loader(make()))
        epoch_iterator.resume_at(through_disk(whole[cut - 1][3]))
        rest = read(epoch_iterator, whole[cut - 1][:2], epochs=1)
        assert [each[2] for each in rest] == [each[2] for each in whole[cut:]]
    assert "24 batches are read again and discarded" in caplog.text


def test_resume_of_a_stream_without_a_state_warns_of_its_cost(caplog):
    whole = read(iterator_of(loader(Plain())))
    epoch_iterator = iterator_of(loader(Plain()))
    epoch_iterator.resume_at(whole[2][3])
    read(epoch_iterator, whole[2][:2])
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert "3 batches are read again and discarded" in caplog.text
    assert "state_dict and load_state_dict" in caplog.text


# -- other numbers of processes and workers ----------------------------------------------------


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2), (3, 2)])
def test_resume_on_another_number_of_ranks(before, after, workers):
    whole = read(iterator_of(loader(Stateful(), num_workers=workers)), epochs=1)
    stopped = read(iterator_of(loader(Stateful(), num_workers=workers), 0, before), epochs=1)
    _, batches, _, position = stopped[0]
    rest = {}
    for rank in range(after):
        epoch_iterator = iterator_of(loader(Stateful(), num_workers=workers), rank, after)
        epoch_iterator.resume_at(through_disk(position))
        for number, (*_, batch, _) in enumerate(read(epoch_iterator, (0, batches), epochs=1)):
            rest[batches + number * after + rank] = batch
    found = [batch for _, batch in sorted(rest.items()) if batch is not None]
    assert found == [batch for _, _, batch, _ in whole[batches:]]


@pytest.mark.parametrize("dataset", [Stateful, Plain])
@pytest.mark.parametrize(("before", "after"), [(0, 1), (1, 0)])
def test_resume_with_one_worker_instead_of_none(dataset, before, after):
    whole = read(iterator_of(loader(dataset(), num_workers=before)), epochs=2)
    for epoch, batches, _, position in whole[:-1]:
        epoch_iterator = iterator_of(loader(dataset(), num_workers=after))
        epoch_iterator.resume_at(position)
        rest = read(epoch_iterator, (epoch, batches), epochs=epoch + 1)
        expected = samples_of(whole, epoch)[2 * batches :]
        assert samples_of([(0, *each[1:]) for each in rest]) == expected


@pytest.mark.parametrize("dataset", [Stateful, Plain])
@pytest.mark.parametrize(("before", "after"), [(2, 3), (2, 0), (0, 2)])
def test_resume_with_another_number_of_workers_between_epochs_only(dataset, before, after):
    whole = read(iterator_of(loader(dataset(), num_workers=before)), epochs=2)
    inside = whole[1]
    epoch_iterator = iterator_of(loader(dataset(), num_workers=after))
    with pytest.raises(CheckpointError, match=f"{before} workers.*{after}.*num_workers={before}"):
        epoch_iterator.resume_at(inside[3])
    end = next(each for each in whole if each[1] == 0)
    epoch_iterator.resume_at(end[3])
    rest = read(epoch_iterator, end[:2], epochs=2)
    assert sorted(samples_of(rest)) == list(range(SAMPLES))


def test_resume_from_the_position_of_another_kind_of_stream(caplog):
    positions = [None, read(iterator_of(Batches()))[2][3], read(iterator_of(loader(Plain())))[2][3]]
    whole = read(iterator_of(loader(Stateful())))
    for number, position in enumerate(positions, 1):
        epoch_iterator = iterator_of(loader(Stateful()))
        epoch_iterator.resume_at(position)
        assert [each[:3] for each in read(epoch_iterator, (0, 3))] == [
            each[:3] for each in whole[3:]
        ]
        assert len(caplog.records) == number


# -- lengths -----------------------------------------------------------------------------------


@pytest.mark.parametrize("said", [4, SAMPLES, 40])
def test_a_stream_whose_length_is_wrong(said):
    class Sized(Stateful):
        def __len__(self):
            return said

    seen = assert_resumes(lambda: loader(Sized()))
    assert samples_of(seen) == list(range(SAMPLES))
    assert iterator_of(loader(Sized())).num_batches == said // 2 + said % 2


# -- errors ------------------------------------------------------------------------------------


class Failing(Stateful):
    def state_dict(self) -> dict[str, Any]:
        raise LookupError("lost")


class Strange(Stateful):
    def state_dict(self) -> dict[str, Any]:
        return {"at": lambda: 0}


@pytest.mark.parametrize(("dataset", "why"), [(Failing, "LookupError: lost"), (Strange, "lambda")])
def test_a_state_dict_that_fails_raises(dataset, why):
    epoch_iterator = iterator_of(loader(dataset()))
    epoch_iterator.set_epoch(0)
    with pytest.raises(RuntimeError, match=rf"{dataset.__name__}.state_dict\(\) raised .*{why}"):
        next(epoch_iterator.global_batches())


def test_the_state_is_not_asked_for_without_checkpoints():
    epoch_iterator = EpochIterator(loader(Failing()))
    epoch_iterator.set_epoch(0)
    assert len(list(epoch_iterator.global_batches())) == 6
    assert epoch_iterator.position() is None


@pytest.mark.parametrize(("epoch", "logged"), [(0, False), (2, True)])
def test_resume_of_an_iterator_warns(caplog, epoch, logged):
    epoch_iterator = iterator_of(itertools.cycle([torch.zeros(1)]), limit=2)
    epoch_iterator.set_epoch(epoch)
    epoch_iterator.resume_at(None)
    assert len(list(epoch_iterator.global_batches())) == 2
    assert ("is an iterator (cycle)" in caplog.text) == logged
    caplog.clear()
    epoch_iterator.set_epoch(epoch + 1)
    assert len(list(epoch_iterator.global_batches())) == 2
    assert caplog.text == ""
