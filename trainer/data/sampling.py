"""Which batches an epoch has, in which order, and which process gets which.

An epoch is one global list of batches, a pure function of the seed and the epoch. It is sharded in
rounds, see `trainer.data.dealing`. Every process iterates over all indices, without reading data,
so each knows what the others have.
"""

from __future__ import annotations

import copy
import operator
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from itertools import chain, islice
from typing import Any, NamedTuple

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

from trainer.data.dealing import INDICES, Dealing
from trainer.rng import isolated_rng, mix, seeded_iteration

_AT_ONCE = 2**16  # indices to convert at once: Python's integers take four times a tensor's memory
_PLAIN = (RandomSampler, SequentialSampler)
_TELLING = 64  # indices of a batch that go into a checksum


class SeededSampler(Sampler[int]):
    """The order of a ``RandomSampler``, but a pure function of seed, epoch and length.

    Args:
        like: The sampler whose replacement, number of samples and dataset's length are used, each
            as it is when a pass begins.
        seed: The run's seed.
    """

    def __init__(self, like: RandomSampler, seed: int) -> None:
        self.like = like
        self.seed = seed
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch to iterate over next."""
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        return chain.from_iterable(self._orders())  # avoids a Python frame per sample

    def _orders(self) -> Iterator[list[int]]:
        for order in self._drawn():
            for part in order.split(_AT_ONCE):
                yield part.tolist()

    def _drawn(self) -> Iterator[torch.Tensor]:
        generator = torch.Generator().manual_seed(mix(self.seed, self.epoch))
        length, left = len(self.like.data_source), self.like.num_samples
        if self.like.replacement:
            yield torch.randint(length, (left,), generator=generator)
            return
        while left > 0 < length:  # more samples than the dataset has: several permutations
            order = torch.randperm(length, generator=generator)[:left]
            left -= len(order)
            yield order

    def __len__(self) -> int:
        return self.like.num_samples


class BatchIndices(list[int]):
    """The indices of a batch, with its place: the run's seed, the epoch, the samples before it."""

    place: tuple[int, int, int]

    @property
    def seed(self) -> int:
        """The seed for fetching it; a function of its place, found only if it is asked for."""
        return mix(*self.place)


class SampleIndex(int):
    """Like `BatchIndices`, for a ready-made batch (a loader with ``batch_size=None``)."""

    place: tuple[int, int, int]

    @property
    def seed(self) -> int:
        """See `BatchIndices`."""
        return mix(*self.place)


class SampleKey(NamedTuple):
    """Like `SampleIndex`, for a dataset whose keys are not ints."""

    key: Any
    place: tuple[int, int, int]

    @property
    def seed(self) -> int:
        """See `BatchIndices`."""
        return mix(*self.place)


class Share(NamedTuple):
    """What this process has in one round.

    Attributes:
        present: Whether it has a batch.
        indices: The number of indices in that batch; 0 for a ready-made one.
        samples: The samples in that batch; None if unknown until read.
        round_samples: The samples in the round over all processes; None if unknown until read.
        real_samples: Those that are not repeated to fill the round.
        batches: How many processes have a batch.
        real_batches: How many of them have one that is not repeated whole.
    """

    present: bool
    samples: int | None
    indices: int
    round_samples: int | None
    real_samples: int | None
    batches: int
    real_batches: int


class Rest:
    """An order without its first batches, which are skipped when it begins.

    They are skipped in one go: for a sampler that draws, `seeded_iteration` swaps the generators at
    each batch that it yields, which takes longer than creating one.

    Args:
        batches: The whole order.
        skip: How many batches to skip.
        as_batch: Converts batches to lists, to be counted.

    Attributes:
        before: The samples in the skipped batches.
        mark: A checksum of the order by its first batch; None if its entries are not ints.
    """

    def __init__(self, batches: Iterable[Any], skip: int, as_batch: Callable[[Any], Any]) -> None:
        self.batches, self.skip, self._as_batch = batches, skip, as_batch
        self.before = 0
        self.mark: int | None = None

    def __iter__(self) -> Iterator[Any]:
        batches = iter(self.batches)
        first = list(map(self._as_batch, islice(batches, 1)))  # an iterator is read only once
        batches = chain(first, batches)
        indices = [i for each in first for i in (each if isinstance(each, list) else [each])]
        with suppress(TypeError):  # other keys are not indices
            telling = list(map(operator.index, indices[:_TELLING]))
            self.mark = zlib.crc32(repr(telling).encode())
        skipped = map(self._as_batch, islice(batches, self.skip))
        self.before = sum(map(INDICES.count, skipped))
        return batches


class EpochLength(NamedTuple):
    """How much data there was when an epoch began; they may have grown or shrunk since.

    Attributes:
        samples: In the dataset; None if the user's own sampler decides.
        batches: Without a limit; None if unknown until read.
    """

    samples: int | None = None
    batches: int | None = None


def _length_of(sampler: Any) -> int | None:
    """Return the length of a sampler; None if it has none, in the ways that samplers say so."""
    try:
        return len(sampler)
    except (TypeError, NotImplementedError, ValueError):
        return None


class ShardedSampler(Sampler[Any]):
    """Shards the batches of a loader's own sampler over the processes.

    Iterating yields this process's batches; `shares` receives one `Share` per round, in the same
    order, also for a last round in which this process has no batch.

    Args:
        batches: The loader's ``batch_sampler``, or its ``sampler`` if it has none.
        keys: It is the ``sampler``: whatever it yields, even a tuple, is a key of the dataset.
        rank: This process.
        world_size: The number of processes.
        seed: The run's seed.
        shuffle: False takes the samples in order, whatever the sampler does.
        even: See `Dealing`.
        split: See `Dealing`.
        drop_last: See `Dealing`.
        counts: A batch has as many samples as indices, which a ``collate_fn`` may change.
    """

    def __init__(
        self,
        batches: Sampler[Any] | Iterable[Any],
        *,
        rank: int,
        world_size: int,
        seed: int,
        shuffle: bool = True,
        even: bool = False,
        split: bool = False,
        drop_last: bool = False,
        keys: bool = False,
        counts: bool = True,
    ) -> None:
        self.batch_sampler = batches  # the user's own, under the name by which scripts find it
        self._as_batch: Callable[[Any], Any] = _as_it_is if keys else _listed
        self._sampler, self._pure = _pure_order(batches, seed, shuffle=shuffle)
        whole = self._sampler
        inner = whole.sampler if type(whole) is BatchSampler else whole
        plain = inner.like if type(inner) is SeededSampler else inner
        self._plain: Any = plain if type(plain) in _PLAIN else None  # has the dataset's length
        self._dataset = getattr(self._plain, "data_source", None)
        self.rank, self.world_size, self.seed, self.even = rank, world_size, seed, even
        self.split, self._drops_rest = split, drop_last
        # The user's own, since scripts read these attributes of a ``batch_sampler``.
        self.sampler: Any = getattr(batches, "sampler", batches)
        self.drop_last = drop_last or bool(getattr(batches, "drop_last", False))
        self.batch_size: int | None = getattr(batches, "batch_size", None)
        self.limit: int | None = None
        self.epoch = 0
        self.start_round = 0  # skipped in rounds of this number of processes, …
        self.start_batch = 0  # … or in batches, before the rest is sharded
        self.counts = counts
        self.shares: deque[Share] = deque()
        self.rest: Rest | None = None  # of the latest pass

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch to iterate over next, and call the samplers' ``set_epoch``, if any."""
        self.epoch = epoch
        for sampler in (self._sampler, getattr(self._sampler, "sampler", None)):
            if sampler is not None and hasattr(sampler, "set_epoch"):
                sampler.set_epoch(epoch)

    def reseed(self, seed: int) -> None:
        """Take the seed of the run that is resumed."""
        self.seed = seed
        for sampler in (self._sampler, getattr(self._sampler, "sampler", None)):
            if isinstance(sampler, SeededSampler):
                sampler.seed = seed

    @property
    def length(self) -> EpochLength:
        """How much data the epoch has."""
        samples = None if self._plain is None else len(self._plain.data_source)
        return EpochLength(samples, _length_of(self._sampler))

    def take_length(self, samples: int | None) -> None:
        """Iterate as if the dataset had so many samples; None for as many as it has."""
        if self._plain is not None:
            self._plain.data_source = self._dataset if samples is None else range(samples)

    @property
    def num_batches(self) -> int | None:
        """The number of batches over all processes; None for a sampler without a length."""
        known = [each for each in (self.length.batches, self.limit) if each is not None]
        return min(known, default=None)

    def own_batches(self, total: int) -> int:
        """Return how many of the epoch's batches are this process's."""
        return self._dealing().own_batches(total, self.num_samples, rank=self.rank)

    def __len__(self) -> int:
        total = self.num_batches
        if total is None:
            raise TypeError("The loader's sampler has no length.")
        return self.own_batches(total)

    @property
    def num_samples(self) -> int | None:
        """The number of samples without a limit; None for batches made by the user's code."""
        return _length_of(self._sampler.sampler) if type(self._sampler) is BatchSampler else None

    def _dealing(self) -> Dealing:
        return Dealing(
            kind=INDICES,
            batch_size=self.batch_size,
            world_size=self.world_size,
            even=self.even,
            split=self.split,
            drop_last=self._drops_rest,
        )

    def __iter__(self) -> Iterator[Any]:
        # Another pass may begin before this one ends: each keeps what it started with.
        shares, seed, epoch = self.shares, self.seed, self.epoch
        shares.clear()
        alone = self.world_size == 1 and not (self.even or self.split)
        for share, batch, position in self._alone() if alone else self._together():
            shares.append(share)
            if not share.present:
                continue
            if isinstance(batch, list):
                placed: Any = BatchIndices(batch)
            elif type(batch) is int:
                placed = SampleIndex(batch)
            else:
                yield SampleKey(batch, (seed, epoch, position))
                continue
            placed.place = seed, epoch, position
            yield placed

    def _alone(self) -> Iterator[tuple[Share, Any, int]]:
        """Do as `_together` does, for one process: each batch is a round."""
        rest = Rest(self._sampler, self.start_batch + self.start_round, self._as_batch)
        stream = iter(self._order(rest))
        if type(self._sampler) is not BatchSampler:  # which yields lists already
            stream = map(self._as_batch, stream)
        position = 0
        for batch in stream:
            size = len(batch) if isinstance(batch, list) else None
            samples = size if self.counts else None
            yield (
                Share(True, samples, size or 0, samples, size, 1, 1),
                batch,
                rest.before + position,
            )
            position += 1 if size is None else size

    def _together(self) -> Iterator[tuple[Share, Any, int]]:
        """Yield for each round this process's share and batch, and the samples before the batch."""
        for position, real, batches in self._rounds():
            own = batches[self.rank] if self.rank < len(batches) else None
            sizes = [len(batch) if isinstance(batch, list) else None for batch in batches]
            known = [size for size in sizes if size is not None]
            told = self.counts and len(known) == len(sizes)
            share = Share(
                present=own is not None,
                samples=0 if own is None else sizes[self.rank] if told else None,
                indices=len(own) if isinstance(own, list) else 0,
                round_samples=sum(known) if told else None,
                real_samples=real if known else None,
                batches=len(batches),
                real_batches=len(batches) if known else real,
            )
            before = sum(known[: self.rank]) if known else self.rank
            yield share, own, position + before

    def _rounds(self) -> Iterator[tuple[int, int, list[Any]]]:
        """Yield for each round the samples before it, its real samples, and its batches."""
        as_batch = _listed if self.split else self._as_batch
        rest = Rest(self._sampler, self.start_batch, as_batch)
        stream, position = map(as_batch, self._order(rest)), 0
        batches = ((batch, None) for batch in stream if not self.split or batch)
        for number, (parts, real, _) in enumerate(self._dealing().rounds(batches)):
            if number >= self.start_round:
                yield rest.before + position, real, parts
            position += real

    def _order(self, rest: Rest) -> Iterable[Any]:
        self.rest = rest
        stream: Iterable[Any] = rest
        if not self._pure:
            # A user's sampler may draw from the global generators: the order would differ between
            # processes, and between a resumed run and the original one.
            seed = mix(self.seed, self.epoch)
            at_once = _drawn_at_once(self._sampler, seed)
            if at_once is None:
                stream = seeded_iteration(rest, seed)
            else:
                rest.batches = at_once
        return stream if self.limit is None else islice(stream, max(0, self.limit - rest.skip))


def _listed(batch: Any) -> Any:
    """Return a batch of indices as a list, whatever iterable the user's sampler yields."""
    if type(batch) is list:
        return batch
    try:
        indices = iter(batch)
    except TypeError:
        return batch
    return list(indices)


def _as_it_is(batch: Any) -> Any:
    return batch


def _drawn_at_once(batches: Any, seed: int) -> Iterable[Any] | None:
    """Return the seeded order of a sampler that draws it all when it begins; None for others.

    The generators are then swapped once rather than per batch, as `seeded_iteration` does.
    """
    inner = batches.sampler if type(batches) is BatchSampler else batches
    if type(inner) not in (WeightedRandomSampler, SubsetRandomSampler):
        return None
    with isolated_rng(seed):
        order = list(inner)
    if inner is batches:
        return order
    return BatchSampler(order, batches.batch_size, batches.drop_last)


def _pure_order(batches: Any, seed: int, *, shuffle: bool) -> tuple[Any, bool]:
    """Replace a sampler's shuffling by a seeded one; return it and whether its order is pure.

    The user's objects are not changed: copies are.
    """
    inner = batches.sampler if type(batches) is BatchSampler else batches
    if isinstance(inner, DistributedSampler) and inner.num_replicas > 1:
        raise ValueError(
            "The loader has a DistributedSampler, which would shard the data a second time. "
            "Remove it: loaders are sharded already."
        )
    pure = type(inner) in _PLAIN
    inner = copy.copy(inner) if pure else inner
    if type(inner) is RandomSampler:
        if shuffle:
            inner = SeededSampler(inner, seed)
        else:
            inner = SequentialSampler(inner.data_source)
    elif not shuffle and not pure:
        raise ValueError(
            f"The order of a {type(inner).__name__} cannot be switched off, as overfit_batches "
            "needs; give the loader shuffle=False or no sampler."
        )
    if type(batches) is not BatchSampler:
        return inner, pure
    batches = copy.copy(batches)
    batches.sampler = inner
    return batches, pure
