"""Loaders that go on inside an epoch."""

from __future__ import annotations

import logging
import pickle

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, RandomSampler

from tests.helpers.datasets import SizedStream, Stream
from trainer.data.dataloader import DataLoaderShard
from trainer.data.prepare import (
    SkipBatchSampler,
    SkipDataLoader,
    prepare_data_loader,
    skip_first_batches,
)
from trainer.state import GradientState


class Noisy(Dataset):
    """An index with a number drawn for it; what is read is noted."""

    def __init__(self, size: int):
        self.size, self.reads = size, []

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        self.reads.append(index)
        return index, float(torch.rand(()))


def prepared(source, world_size: int = 1, rank: int = 0, **options) -> DataLoaderShard:
    return prepare_data_loader(source, num_processes=world_size, process_index=rank, **options)


def alike(found, expected) -> bool:
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    return True


# -- prepared loaders --------------------------------------------------------------------------


@pytest.mark.parametrize("dispatch", [False, True])
@pytest.mark.parametrize("workers", [0, 2])
def test_skip_first_batches_gives_the_rest_of_the_pass(workers, dispatch):
    source = DataLoader(Noisy(13), 2, shuffle=True, num_workers=workers)
    loader = prepared(source, put_on_device=True, dispatch_batches=dispatch)
    list(loader)
    skipped = skip_first_batches(loader, 3)
    assert type(skipped) is type(loader)
    rest, following = list(skipped), list(loader)  # which counts as the loader's own pass
    assert len(rest) == len(skipped) == 4
    assert len(loader) == len(following) == 7
    loader.set_epoch(1)
    assert alike(rest, list(loader)[3:])
    assert alike(following, list(loader))


@pytest.mark.parametrize("options", [{}, {"split_batches": True}, {"even_batches": False}])
@pytest.mark.parametrize("source", [Noisy(21), SizedStream(21)])
def test_skip_first_batches_on_every_rank(source, options, caplog):
    for rank in (0, 1):
        loader = prepared(DataLoader(source, 4), 2, rank, **options)
        whole = list(loader)
        for skip in range(len(whole) + 2):
            loader.set_epoch(0)
            skipped = skip_first_batches(loader, skip)
            assert alike(list(skipped), whole[skip:])
            assert len(skipped) == max(0, len(whole) - skip)
    said = "batches are read again and discarded" in caplog.text
    assert said == isinstance(source, Stream)


def test_skipped_samples_are_not_read():
    for dispatch in (False, True):
        dataset = Noisy(9)
        loader = prepared(DataLoader(dataset, 2), put_on_device=True, dispatch_batches=dispatch)
        list(skip_first_batches(loader, 3))
        assert dataset.reads == [6, 7, 8]


def resumed(source, state, **options) -> DataLoaderShard:
    loader = prepared(source, **options)
    loader.load_state_dict(state)
    return loader


KINDS = [{}, {"put_on_device": True, "dispatch_batches": True}]


@pytest.mark.parametrize("kind", KINDS)
def test_a_pass_resumed_more_than_once(kind):
    source = DataLoader(Noisy(12), 2, shuffle=True)
    loader = prepared(source, **kind)
    first, second, third = (list(loader) for _ in range(3))
    loader.set_epoch(1)
    iterator = iter(loader)
    found, state = [next(iterator)], loader.state_dict()
    for skip in (1, 3):  # each time the run is ended by a kill inside the pass
        again = resumed(source, state, **kind)
        iterator = iter(skip_first_batches(skip_first_batches(again, skip - 1), 1))
        found += [next(iterator), next(iterator)]
        state = again.state_dict()
        assert state["iteration"] == 1
    again = resumed(source, state, **kind)
    found += list(skip_first_batches(again, 5))
    assert alike(found, second)
    assert alike(list(again), third)
    assert [batch[0].tolist() for batch in first] != [batch[0].tolist() for batch in second]


@pytest.mark.parametrize("kind", KINDS)
def test_a_resumed_pass_keeps_the_length_of_its_beginning(kind):
    source = DataLoader(Noisy(9), 2, shuffle=True)
    loader = prepared(source, **kind)
    whole = list(loader)
    loader.set_epoch(0)
    for number, _ in enumerate(loader):
        if number == 2:
            state = loader.state_dict()
            source.dataset.size = 12
            break
    again = resumed(source, state, **kind)
    assert again.state_dict() == state
    assert len(again) == 5
    assert alike(list(skip_first_batches(loader, 3)), whole[3:])
    assert alike(list(skip_first_batches(skip_first_batches(again, 2), 1)), whole[3:])
    assert len(again) == len(loader) == 6
    following = list(loader)
    assert alike(list(again), following)
    assert sorted(torch.cat([x for x, _ in following]).tolist()) == list(range(12))


class StatefulStream(IterableDataset):
    """Goes on where it is, and begins again once it is over; both are its state."""

    def __init__(self, size: int):
        self.size, self.at, self.given = size, 0, 0

    def __iter__(self):
        self.at %= self.size
        while self.at < self.size:
            self.at, self.given = self.at + 1, self.given + 1
            yield self.at - 1, float(torch.rand(()))

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


@pytest.mark.parametrize("new", [False, True], ids=["the same process", "a new one"])
@pytest.mark.parametrize("epoch", [0, 1])
@pytest.mark.parametrize("kind", KINDS)
def test_a_stateful_stream_resumes(kind, epoch, new, caplog):
    def source():
        return DataLoader(StatefulStream(9), 2)

    loader = prepared(source(), **kind)
    states = [loader.state_dict()]
    whole = [list(loader) for _ in range(3)]
    loader = resumed(source(), states[0], **kind)
    for number in range(epoch + 1):
        for batch, _ in enumerate(loader):
            states.append(loader.state_dict())
            if (number, batch) == (epoch, 3):
                break
    for skip in (4, 2, 4, 0, 5):  # also another number than when it was saved, and more than once
        again = prepared(source(), **kind) if new else loader
        again.load_state_dict(states[5 * epoch + 4])
        assert alike(list(skip_first_batches(again, skip)), whole[epoch][skip:])
        assert alike(list(again), whole[epoch + 1])
    for at, state in enumerate(states):
        again.load_state_dict(state)
        assert alike(list(skip_first_batches(again, at % 5)), whole[at // 5][at % 5 :])
    assert "A dataset with state_dict" not in caplog.text


@pytest.mark.parametrize("dataset", [Noisy, StatefulStream])
@pytest.mark.parametrize("kind", KINDS)
def test_use_stateful_dataloader_resumes_without_skipping(kind, dataset):
    def source():
        return DataLoader(dataset(9), 2, shuffle=dataset is Noisy or None)

    kind = kind | {"use_stateful_dataloader": True}
    loader = prepared(source(), **kind)
    states = [loader.state_dict()]
    passes = []
    for _ in range(3):
        passes.append([])
        for batch in loader:
            passes[-1].append(batch)
            states.append(loader.state_dict())
    for at, state in enumerate(states[:10]):
        for again in (loader, prepared(source(), **kind)):
            again.load_state_dict(state)
            again.set_epoch(at // 5)  # as scripts do at the beginning of each epoch
            assert again.state_dict()["batches"] == at % 5
            batches = iter(again)
            assert alike(next(batches), passes[at // 5][at % 5])
            later = again.state_dict()  # a second interruption
            batches.close()
            again.load_state_dict(later)
            rest = passes[at // 5][at % 5 + 1 :] or passes[at // 5 + 1]
            assert alike(list(again), rest)
            again.load_state_dict(state)
            again.set_epoch(at // 5)
            assert alike(list(skip_first_batches(again, 2)), passes[at // 5][2:])
    other = prepared(source(), world_size=2, use_stateful_dataloader=True)
    with pytest.raises(ValueError, match=r"after 3 batches of a pass.* among 2 processes"):
        other.load_state_dict(states[3])


@pytest.mark.parametrize("stateful", [True, False])
@pytest.mark.parametrize("dataset", [Noisy, StatefulStream])
def test_a_loaded_place_is_saved_again_while_an_iterator_is_open(dataset, stateful):
    loader = prepared(DataLoader(dataset(18), 2), use_stateful_dataloader=stateful)
    batches = iter(loader)
    states = [loader.state_dict() for _ in zip(range(7), batches, strict=False)]
    loader.load_state_dict(states[2])
    assert loader.state_dict() == states[2]
    if dataset is Noisy:  # the pass goes on all the same
        next(batches)
        assert loader.state_dict()["batches"] == states[6]["batches"] + 1
        batches.close()
        assert len(list(loader)) == 9
    batches.close()


def test_data_seed():
    def order(manual: int, seed: int | None, **options) -> list[int]:
        torch.manual_seed(manual)
        generator = torch.Generator().manual_seed(manual)
        source = DataLoader(Noisy(20), 20, shuffle=True, generator=generator)
        return next(iter(prepared(source, data_seed=seed, **options)))[0].tolist()

    assert order(1, 5) == order(2, 5) == order(3, 5, use_seedable_sampler=True)
    assert len({tuple(order(1, seed)) for seed in (None, 5, 6)}) == 3


def test_skipped_batches_of_a_stateful_stream_are_not_read():
    source = DataLoader(StatefulStream(9), 2)
    loader = prepared(source)
    for number, _ in enumerate(loader):
        if number == 2:
            break
    again = resumed(DataLoader(StatefulStream(9), 2), loader.state_dict() | {"iteration": 0})
    assert len(list(skip_first_batches(again, 3))) == 2
    assert again.source.dataset.given == 3


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rest", [False, True])
def test_a_state_of_the_last_batch_resumes_with_the_next_pass(rest, kind):
    source = DataLoader(Noisy(12), 2, shuffle=True)
    loader = prepared(source, **kind)
    passes, states = [], []
    for epoch in range(4):
        batches = skip_first_batches(loader, 2) if rest and epoch == 1 else loader
        passes.append([])
        for batch in batches:
            passes[-1].append(batch)
            state = loader.state_dict()
            if epoch == 1 and state["iteration"] not in [each["iteration"] for each in states]:
                states.append(state)
    assert [state["iteration"] for state in states] == [1, 2]
    for skips in ([], [6], [2, 4]):  # none of the next pass, or all of the one before
        again = resumed(source, states[1], **kind)
        batches = again
        for skip in skips:
            batches = skip_first_batches(batches, skip)
        if sum(skips) > 0:
            assert list(batches) == []
            batches = again
        assert alike(list(batches), passes[2])
        assert alike(list(again), passes[3])
    again = resumed(source, states[1], **kind)
    again.set_epoch(2)  # said by the script, it is the pass whose batches are left out
    list(skip_first_batches(again, 6))
    assert alike(list(again), passes[3])

    again = resumed(source, states[1], **kind)
    list(again)
    list(skip_first_batches(again, 6))  # no longer as it was loaded
    assert again.iteration == 4


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("source", [Noisy(12), Stream(12)], ids=["sized", "stream"])
def test_a_pass_left_at_its_last_batch_has_ended(kind, source):
    loader = prepared(DataLoader(source, 2), **kind)
    for number in (1, 2, 3, 4, 5, 6):
        list(loader)
        for batch, _ in enumerate(loader, 1):
            if batch == number:
                break
        assert loader.state_dict()["ended"] == (number == 6)
    again = resumed(DataLoader(source, 2), loader.state_dict(), **kind)
    assert list(skip_first_batches(again, 6)) == []
    list(again)
    assert again.iteration == 13


def test_resume_of_a_stream_without_a_length():
    source = DataLoader(Stream(6), 2)
    again = prepared(source)
    again.load_state_dict({"iteration": 1, "seed": 3})
    assert list(skip_first_batches(again, 3)) == []
    assert again.iteration == 2


class EpochStream(Stream):
    """Yields other numbers in each pass."""

    epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        return iter(range(100 * self.epoch, 100 * self.epoch + self.size))


@pytest.mark.parametrize("dispatch", [False, True])
@pytest.mark.parametrize("at", ["the last batch", "the end"])
def test_skipping_a_whole_pass_of_a_stream(at, dispatch):
    options = {"put_on_device": True, "dispatch_batches": dispatch}

    def firsts(batches):
        return [int(batch[0]) for batch in batches]

    loader = prepared(DataLoader(EpochStream(6), 2), **options)
    list(loader)
    if at == "the last batch":
        for _ in loader:
            state = loader.state_dict()
    else:
        list(loader)
        state = loader.state_dict()
    for skip in (0, 3):
        again = prepared(DataLoader(EpochStream(6), 2), **options)
        again.load_state_dict(state)
        if skip:
            assert firsts(skip_first_batches(again, skip)) == []
        assert firsts(again) == [200, 202, 204]
        assert firsts(again) == [300, 302, 304]


def test_a_state_inside_a_pass_of_a_stream():
    loader = prepared(DataLoader(EpochStream(6), 2))
    list(loader)
    states = [loader.state_dict() for _ in loader]
    again = prepared(DataLoader(EpochStream(6), 2))
    again.load_state_dict(states[1])
    assert [int(batch[0]) for batch in skip_first_batches(again, 2)] == [104]
    assert [int(batch[0]) for batch in again] == [200, 202, 204]


def test_end_of_dataloader_in_a_skipped_pass():
    state = GradientState()
    skipped = skip_first_batches(prepared(DataLoader(Noisy(9), 2), 2, 1), 1)
    seen = [(state.end_of_dataloader, state.remainder) for _ in skipped]
    assert seen == [(False, -1), (True, 1)]
    assert state.active_dataloader is None


# -- plain loaders -----------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [0, 1])
def test_a_plain_loader_is_skipped_without_reading(workers):
    dataset = Noisy(9)
    loader = DataLoader(dataset, 2, num_workers=workers)
    skipped = skip_first_batches(loader, 3)
    assert (len(skipped), len(loader)) == (2, 5)
    assert [batch[0].tolist() for batch in skipped] == [[6, 7], [8]]
    assert dataset.reads == ([] if workers else [6, 7, 8])
    assert (skipped.num_workers, skipped.dataset) == (workers, dataset)
    assert len(skip_first_batches(loader, 7)) == 0
    assert list(skip_first_batches(loader, 7)) == []
    assert len(skip_first_batches(skipped, 1)) == 1


@pytest.mark.parametrize("batch_size", [2, None])
def test_a_plain_stream_is_skipped_by_reading(batch_size):
    loader = DataLoader(SizedStream(5), batch_size, drop_last=batch_size is not None)
    whole = list(loader)
    skipped = skip_first_batches(loader, 1)
    assert type(skipped) is SkipDataLoader
    assert alike(list(skipped), whole[1:])
    assert alike(list(skip_first_batches(skipped, 1)), whole[2:])
    assert len(skipped) == len(whole) - 1
    assert len(skip_first_batches(loader, 9)) == 0


def test_skip_batch_sampler():
    inner = BatchSampler(RandomSampler(range(9)), 2, drop_last=True)
    sampler = pickle.loads(pickle.dumps(SkipBatchSampler(inner, 1)))
    assert (sampler.batch_size, sampler.drop_last, len(sampler)) == (2, True, 3)
    assert len(list(sampler)) == 3
    with pytest.raises(AttributeError, match="colour"):
        _ = sampler.colour


def test_a_plain_skipped_loader_can_be_prepared():
    skipped = skip_first_batches(DataLoader(list(range(9)), 2), 1)
    own = [prepared(skipped, 2, rank) for rank in (0, 1)]
    assert [[batch.tolist() for batch in each] for each in own] == [
        [[2, 3], [6, 7]],
        [[4, 5], [8, 2]],
    ]


# -- what is refused ---------------------------------------------------------------------------


class Own(DataLoader):
    def __iter__(self):
        yield from ()


class Behind(DataLoader):
    def _get_iterator(self):
        return map(str, super()._get_iterator())


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ((DataLoader([1]), -1), ValueError, "num_batches is -1; it must be 0 or more"),
        (([1], 1), TypeError, "dataloader is a list; .* use itertools.islice"),
        ((Own([1]), 1), TypeError, "A Own overrides how a DataLoader reads"),
        ((Behind([1]), 1), TypeError, "A Behind overrides how a DataLoader reads"),
    ],
)
def test_skip_first_batches_of_other_objects_raises(arguments, error, text):
    with pytest.raises(error, match=text):
        skip_first_batches(*arguments)


def test_a_custom_loader_is_skipped_once_prepared(caplog):
    caplog.set_level(logging.WARNING)

    class Doubling(DataLoader):
        def __iter__(self):
            return (batch * 2 for batch in super().__iter__())

    loader = prepared(Doubling(list(range(5)), 2), 2, 1)
    assert [batch.tolist() for batch in loader] == [[4, 6], [2, 4]]
    assert [batch.tolist() for batch in skip_first_batches(loader, 1)] == [[2, 4]]
