"""Samplers: which batches an epoch has, in which order, and which process gets each one.

An epoch is one list of batches, a pure function of the seed and the epoch number. `BatchSharding`
groups it into global batches, of one batch per process. With N processes there are two ways:

- Whole batches (the default): global batch *r* holds batches *rN … rN + N - 1* of the loader, and
  process *i* gets batch *rN + i*.
- ``split``: each batch of the loader is a global batch, split into N parts.

At the end of the data some processes may have no batch in the last global batch. Every process
iterates over the indices of all processes, without reading data, and so knows the batch sizes of
the others without communication.

The same code shards lists of sample indices and batches of data: `INDICES` and `SAMPLES` have the
operations to count, split and concatenate each kind.
"""

from __future__ import annotations

import copy
import operator
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import chain, cycle, islice
from typing import Any, NamedTuple, TypeVar

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

from trainer.data.batch import (
    concatenate,
    length,
    pad_batch,
    samples_in,
    take,
    unwrap_columns,
    wrap_columns,
)
from trainer.rng import isolated_rng, mix, seeded_iteration
from trainer.tree import count_samples

P = TypeVar("P")


@dataclass(frozen=True, kw_only=True)
class BatchOps:
    """Operations on one kind of batch: lists of indices, or batches of data.

    Attributes:
        name: The name of this object in this module, by which it is pickled.
        count: Returns the number of samples in a batch; 1 if unknown.
        length: Returns the number of samples in a batch that is to be split.
        take: Slices a batch: ``take(batch, start, stop)``.
        joined: Concatenates batches; returns None if they cannot be concatenated.
        pad_batch: Pads a batch: ``pad_batch(batch, beginning, samples)`` repeats the samples of
            `beginning` until the batch has `samples` samples.
    """

    name: str
    count: Callable[[Any], int]
    length: Callable[[Any], int]
    take: Callable[[Any, int, int], Any]
    joined: Callable[[Sequence[Any]], Any | None]
    pad_batch: Callable[[Any, Any, int], Any]

    def __reduce__(self) -> str:
        return self.name


def _indices(batch: Any) -> list[Any]:
    """Return a batch's indices as a list; the batch may be a single index (``batch_size=None``)."""
    return batch if isinstance(batch, list) else [batch]


INDICES = BatchOps(
    name="INDICES",
    count=lambda batch: len(batch) if isinstance(batch, list) else 1,
    length=len,
    take=lambda batch, start, stop: batch[start:stop],
    joined=lambda batches: list(chain.from_iterable(map(_indices, batches))),
    pad_batch=lambda batch, beginning, samples: list(
        islice(chain(batch, cycle(beginning)), samples)
    ),
)


SAMPLES = BatchOps(  # trees whose tensors have one row per sample
    name="SAMPLES",
    count=lambda batch: 1 if (samples := count_samples(batch)) is None else samples,
    length=length,
    take=lambda batch, start, stop: unwrap_columns(take(batch, start, stop)),
    joined=lambda batches: (
        None if None in map(samples_in, batches) else concatenate([*map(wrap_columns, batches)])
    ),
    pad_batch=pad_batch,
)


@dataclass(frozen=True, kw_only=True)
class DataShard:
    """Which part of a loader's data one process reads.

    Attributes:
        rank: The rank of the process.
        world_size: The number of processes.
        even: See `BatchSharding`.
        split: See `BatchSharding`.
        drop_last: See `BatchSharding`.
        presharded: Each process's stream is its own part of the data, and is read in full. Streams
            split by `datasets` or webdataset are detected.
    """

    rank: int = 0
    world_size: int = 1
    even: bool = False
    split: bool = False
    drop_last: bool = False
    presharded: bool = False

    def sharding_of(self, kind: BatchOps, batch_size: int | None) -> BatchSharding:
        """Return how batches of this kind and size are sharded."""
        return BatchSharding(
            kind=kind,
            batch_size=batch_size,
            world_size=self.world_size,
            even=self.even,
            split=self.split,
            drop_last=self.drop_last,
        )


WHOLE = DataShard()


@dataclass(kw_only=True)
class BatchSharding:
    """How batches are sharded over the processes; `even` may be set between passes.

    Args:
        kind: `INDICES` or `SAMPLES`.
        batch_size: Samples in a full batch of the loader; None if batches have no fixed size.
        world_size: The number of processes.
        even: Pad the last global batch with samples from the beginning of the epoch, so that every
            process has the same number of full batches.
        split: Split each batch into one part per process. The default gives each process whole
            batches.
        drop_last: Drop the last global batch if not every process has a batch in it.
    """

    kind: BatchOps
    batch_size: int | None
    world_size: int
    even: bool = False
    split: bool = False
    drop_last: bool = False

    def global_batches(
        self, batches: Iterator[tuple[Any, P]]
    ) -> Iterator[tuple[list[Any], int, P]]:
        """Group batches into global batches.

        Args:
            batches: Batches, each with the data position after it.

        Yields:
            The batches of each global batch in the order of ranks, its number of samples without
            the padding, and the data position after it.
        """
        sharded = self._sharded(batches)
        beginning: list[Any] = []  # the batches of the first global batch
        current = next(sharded, None)
        while current is not None:
            parts, position = current
            if self.drop_last and len(parts) < self.world_size:
                return
            real, following = sum(map(self.kind.count, parts)), None
            if self.even:
                beginning = beginning or parts
                if not self._is_full(parts):
                    following = next(sharded, None)
                    if following is None:  # sizes may vary: pad only the last global batch
                        parts = self._pad_last(parts, beginning)
            yield parts, real, position
            current = following or next(sharded, None)

    def own_batches(self, batches: int, samples: int | None, *, rank: int) -> int:
        """Return how many batches one rank gets in an epoch.

        Args:
            batches: Batches in the epoch, over all ranks.
            samples: Samples in the epoch. Used only for `split` without `even`; None assumes that
                every rank gets a part of the last batch.
            rank: The rank.
        """
        if not self.split:
            full, rest = divmod(batches, self.world_size)
            if self.drop_last:
                return full
            return full + (rest > 0 if self.even else rank < rest)
        size = self._size
        if self.even or self.drop_last or not (samples and self.batch_size and size):
            return batches
        return batches - (0 < samples % self.batch_size <= rank * size)

    def _sharded(self, batches: Iterator[tuple[Any, P]]) -> Iterator[tuple[list[Any], P]]:
        """Yield the batches of each global batch, before padding: at most one per process."""
        if not self.split:
            while read := list(islice(batches, self.world_size)):
                yield [batch for batch, _ in read], read[-1][1]
            return
        for batch, position in batches:
            total = self.kind.length(batch)
            size = max(self._size or 1, -(-total // self.world_size))
            starts = range(0, total, size)
            yield [self.kind.take(batch, start, start + size) for start in starts], position

    @property
    def _size(self) -> int | None:
        """The number of samples in a full batch of one process; None without a fixed size."""
        size = self.batch_size
        return size // self.world_size if size and self.split else size

    def _is_full(self, parts: list[Any]) -> bool:
        sizes = set(map(self.kind.count, parts))
        return len(parts) == self.world_size and (self._size is None or sizes == {self._size})

    def _pad_last(self, parts: list[Any], beginning: list[Any]) -> list[Any]:
        """Pad the last global batch to a full batch per process, with samples of `beginning`."""
        size, kind = self._size, self.kind
        not_a_batch = size is None or sum(map(kind.count, parts)) > self.world_size * size
        joined = None if not_a_batch else kind.joined(parts)
        if joined is None or size is None:
            # Batches that have no fixed size, or that cannot be split, are repeated whole.
            return parts + list(islice(cycle(beginning), max(self.world_size - len(parts), 0)))
        flat = kind.pad_batch(joined, kind.joined(beginning), self.world_size * size)
        return [kind.take(flat, i * size, (i + 1) * size) for i in range(self.world_size)]


# Indices to convert to Python integers at once: these take four times the memory of a tensor.
_AT_ONCE = 2**16
_PLAIN = (RandomSampler, SequentialSampler)


class SeededSampler(Sampler[int]):
    """A ``RandomSampler`` whose order is a pure function of the seed, the epoch and the length.

    Args:
        like: The original sampler. Its ``replacement``, ``num_samples`` and dataset length are read
            when a pass begins.
        seed: The run's seed.
    """

    def __init__(self, like: RandomSampler, seed: int) -> None:
        self.like = like
        self.seed = seed
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch to iterate over next."""
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        parts = (part.tolist() for order in self._draw() for part in order.split(_AT_ONCE))
        return chain.from_iterable(parts)  # avoids a Python frame per sample

    def _draw(self) -> Iterator[torch.Tensor]:
        generator = torch.Generator().manual_seed(mix(self.seed, self.epoch))
        length, remaining = len(self.like.data_source), self.like.num_samples
        if self.like.replacement:
            yield torch.randint(length, (remaining,), generator=generator)
            return
        while remaining > 0 < length:  # more samples than the dataset has: several permutations
            order = torch.randperm(length, generator=generator)[:remaining]
            remaining -= len(order)
            yield order

    def __len__(self) -> int:
        return self.like.num_samples


class BatchIndices(list[int]):
    """The indices of a batch, with its position in the run.

    Attributes:
        seed_key: The run's seed, the epoch, and the samples of the epoch before the batch.
            The batch's own seed is derived from them.
    """

    seed_key: tuple[int, int, int]


class SampleKey(NamedTuple):
    """Like `BatchIndices`, for a single index or key: a loader with ``batch_size=None``."""

    key: Any
    seed_key: tuple[int, int, int]


class RankShard(NamedTuple):
    """A rank's shard of one global batch: the sizes that are known before reading data.

    Attributes:
        present: Whether this rank has a batch.
        indices: The number of indices in this rank's batch; 0 for a ready-made batch
            (``batch_size=None``).
        samples: The number of samples in this rank's batch; None if unknown until read.
        global_samples: The number of samples in the global batch; None if unknown until read.
        real_samples: The number of samples in the global batch without padding; None for
            ready-made batches.
        batches: The number of ranks that have a batch.
        real_batches: The number of ranks whose batch is not only padding.
    """

    present: bool
    samples: int | None
    indices: int
    global_samples: int | None
    real_samples: int | None
    batches: int
    real_batches: int


class SkippedOrder:
    """A skipped order: the batches of an epoch without the first ones, for a resume.

    The batches are skipped here, inside `seeded_iteration`, not by its caller: `seeded_iteration`
    swaps the global generators at each batch that it yields, which takes longer than drawing one.

    Args:
        batches: The whole order.
        skip: The number of batches to skip.
        as_batch: Converts a batch of indices to a list.

    Attributes:
        before: The number of samples in the skipped batches.
        mark: A checksum of the order, computed from its first batch; None if its keys are not
            integers or tuples of integers.
    """

    def __init__(self, batches: Iterable[Any], skip: int, as_batch: Callable[[Any], Any]) -> None:
        self.batches, self.skip, self._as_batch = batches, skip, as_batch
        self.before = 0
        self.mark: int | None = None

    def __iter__(self) -> Iterator[Any]:
        batches = iter(self.batches)
        first = list(map(self._as_batch, islice(batches, 1)))  # read once: it may be an iterator
        batches = chain(first, batches)
        indices = [i for batch in first for i in _indices(batch)]
        keys = [part for i in indices[:64] for part in (i if type(i) is tuple else [i])]
        with suppress(TypeError):  # keys that are not integers
            self.mark = zlib.crc32(repr([*map(operator.index, keys)]).encode())
        skipped = map(self._as_batch, islice(batches, self.skip))
        self.before = sum(map(INDICES.count, skipped))
        return batches


MODES = ("min_size", "max_size_cycle", "max_size", "sequential")
"""How several loaders are read together; see `trainer.data.combined.CombinedLoader`."""

_ENDED: Any = object()


def joint_length(lengths: Sequence[int | None], mode: str) -> int | None:
    """Return the number of joint batches of loaders with these lengths; None if unknown."""
    sized = [n for n in lengths if n is not None]
    if len(sized) < len(lengths):
        return None
    if mode == "sequential":
        return sum(sized)
    return min(sized) if mode == "min_size" else max(sized)


def joint_rounds(
    passes: Sequence[Callable[[int], Iterable[Any]]], mode: str
) -> Iterator[list[tuple[int, Any]]]:
    """Yield joint batches, each a list of pairs (number of a loader, its batch).

    Args:
        passes: For each loader a function that returns its batches, given the number of the pass.
        mode: One of `MODES`. In ``"max_size"``, loaders that have ended are missing.
    """
    if mode == "sequential":
        for number, begin in enumerate(passes):
            for batch in begin(0):
                yield [(number, batch)]
        return
    iterators = [iter(begin(0)) for begin in passes]
    begun, over = [1] * len(passes), [False] * len(passes)
    while True:
        parts = []
        for number, begin in enumerate(passes):
            batch = next(iterators[number], _ENDED)
            if batch is _ENDED:
                over[number] = True
                if mode == "min_size" or all(over):
                    return
                if mode == "max_size_cycle":
                    iterators[number] = iter(begin(begun[number]))
                    begun[number] += 1
                    batch = next(iterators[number], _ENDED)
            if batch is not _ENDED:
                parts.append((number, batch))
        yield parts


class JointBatches(Sampler[list[tuple[int, Any]]]):
    """A batch sampler of several loaders: a joint batch is a list of (loader, key) pairs.

    Args:
        parts: For each loader its ``batch_sampler``, or its ``sampler`` if it has none, and whether
            it is the ``sampler``.
        mode: How the loaders are combined; see `MODES`.

    Attributes:
        orders: The batches of each loader; in the result of `seeded`, a function of seed and epoch.
        pure: Whether all orders are such functions.
    """

    def __init__(self, parts: Sequence[tuple[Any, bool]], mode: str) -> None:
        self.parts, self.mode, self.epoch = parts, mode, 0
        self.orders = [batches for batches, _ in parts]
        self.pure = False

    def seeded(self, seed: int, *, shuffle: bool) -> JointBatches:
        """Return a copy whose orders are drawn from a seed, which differs for each loader."""
        made = JointBatches(self.parts, self.mode)
        orders = [
            _pure_order(batches, mix(seed, number) if number else seed, shuffle=shuffle)
            for number, (batches, _) in enumerate(self.parts)
        ]
        made.orders, made.pure = [order for order, _ in orders], all(pure for _, pure in orders)
        return made

    def reseed(self, seed: int) -> None:
        """Use the seed of the run that is resumed."""
        for number, order in enumerate(self.orders):
            for sampler in _samplers_of(order):
                if isinstance(sampler, SeededSampler):
                    sampler.seed = mix(seed, number) if number else seed

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch to iterate over next, and call the samplers' ``set_epoch``, if any."""
        self.epoch = epoch
        for order in self.orders:
            for sampler in _samplers_of(order):
                if hasattr(sampler, "set_epoch"):
                    sampler.set_epoch(epoch)

    def __len__(self) -> int:
        length = joint_length([length_of(order) for order in self.orders], self.mode)
        if length is None:
            raise TypeError("A loader's sampler has no length.")
        return length

    def __iter__(self) -> Iterator[list[tuple[int, Any]]]:
        single = [keys for _, keys in self.parts]
        passes = [partial(self._begin, order, self.epoch) for order in self.orders]
        for parts in joint_rounds(passes, self.mode):
            yield [
                (number, key)
                for number, batch in parts
                for key in ([batch] if single[number] else _indices(_as_list(batch)))
            ]

    def _begin(self, order: Any, epoch: int, number: int) -> Iterable[Any]:
        """Return the batches of a loader for a pass of the epoch; passes have different orders."""
        for sampler in _samplers_of(order):
            if isinstance(sampler, SeededSampler):
                sampler.epoch = mix(epoch, number) if number else epoch
        batches: Iterable[Any] = order
        return batches


class EpochLength(NamedTuple):
    """The amount of data when an epoch began; the dataset may have grown or shrunk since.

    Attributes:
        samples: The number of samples in the dataset; None with a custom sampler.
        batches: The number of batches without a limit; None if unknown until read.
    """

    samples: int | None = None
    batches: int | None = None


def length_of(source: Any) -> int | None:
    """Return the length of a sampler or loader; None if its ``__len__`` is missing or raises."""
    try:
        return len(source)
    except (TypeError, NotImplementedError, ValueError, RuntimeError):
        return None


class ShardedSampler(Sampler[Any]):
    """Shards the batches of a loader's sampler over the processes.

    Iterating yields this rank's batches of indices. `shares` receives one `RankShard` per global
    batch, in the same order, including a last global batch in which this rank has no batch.

    Args:
        batches: The loader's ``batch_sampler``, or its ``sampler`` if it has none.
        keys: Whether `batches` is the ``sampler``. Each item it yields, even a tuple, is then one
            key of the dataset.
        shard: The part of the batches that this process reads.
        seed: The run's seed.
        shuffle: False reads the samples in the order of the dataset.
        counts: Whether a batch has as many samples as indices. A custom ``collate_fn`` may change
            the number of samples.
    """

    def __init__(
        self,
        batches: Sampler[Any] | Iterable[Any],
        shard: DataShard = WHOLE,
        *,
        seed: int,
        shuffle: bool = True,
        keys: bool = False,
        counts: bool = True,
    ) -> None:
        self.batch_sampler = batches  # the user's object, under the name that scripts use
        self._as_batch: Callable[[Any], Any] = _identity if keys else _as_list
        self._sampler, self.is_pure = _pure_order(batches, seed, shuffle=shuffle)
        source = self._sampler
        inner = source.sampler if type(source) is BatchSampler else source
        plain = inner.like if type(inner) is SeededSampler else inner
        self._plain: Any = plain if type(plain) in _PLAIN else None  # follows the dataset's length
        self._dataset = getattr(self._plain, "data_source", None)
        self.rank, self.world_size, self.seed = shard.rank, shard.world_size, seed
        self.sharding = shard.sharding_of(INDICES, getattr(batches, "batch_size", None))
        # Copies of the user's attributes, because scripts read them from a ``batch_sampler``.
        self.sampler: Any = getattr(batches, "sampler", batches)
        self.drop_last = shard.drop_last or bool(getattr(batches, "drop_last", False))
        self.batch_size = self.sharding.batch_size
        self.limit: int | None = None
        self.epoch = 0
        self.start_global_batch = 0  # global batches to skip, with the current number of processes
        self.start_batch = 0  # batches to skip before sharding, with any number of processes
        self.counts = counts
        self.shares: deque[RankShard] = deque()
        self.rest: SkippedOrder | None = None  # the order of the latest pass
        self.drawn: list[list[Any]] | None = None  # a list gets this rank's batches of indices

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch to iterate over next, and call the samplers' ``set_epoch``, if any."""
        self.epoch = epoch
        for sampler in _samplers_of(self._sampler):
            if hasattr(sampler, "set_epoch"):
                sampler.set_epoch(epoch)

    def reseed(self, seed: int) -> None:
        """Use the seed of the run that is resumed."""
        self.seed = seed
        if isinstance(self._sampler, JointBatches):
            self._sampler.reseed(seed)
        for sampler in _samplers_of(self._sampler):
            if isinstance(sampler, SeededSampler):
                sampler.seed = seed

    @property
    def orders(self) -> list[Any]:
        """The user's sampler or batch sampler; with several loaders, one of each."""
        batches: Any = self.batch_sampler
        joint = isinstance(batches, JointBatches)
        return [order for order, _ in batches.parts] if joint else [batches]

    @property
    def length(self) -> EpochLength:
        """The current amount of data in an epoch."""
        samples = None if self._plain is None else len(self._plain.data_source)
        return EpochLength(samples, length_of(self._sampler))

    def take_length(self, samples: int | None) -> None:
        """Iterate as if the dataset had `samples` samples; None uses its own length."""
        if self._plain is not None:
            self._plain.data_source = self._dataset if samples is None else range(samples)

    def __len__(self) -> int:
        lengths = [n for n in (length_of(self._sampler), self.limit) if n is not None]
        if not lengths:
            raise TypeError("The loader's sampler has no length.")
        return self.sharding.own_batches(min(lengths), self.num_samples, rank=self.rank)

    @property
    def num_samples(self) -> int | None:
        """The number of samples in an epoch without a limit; None for a custom batch sampler."""
        return length_of(self._sampler.sampler) if type(self._sampler) is BatchSampler else None

    def __iter__(self) -> Iterator[Any]:
        # Two passes may overlap, so each keeps the values it started with.
        shares, seed, epoch = self.shares, self.seed, self.epoch
        shares.clear()
        alone = self.world_size == 1 and not (self.sharding.even or self.sharding.split)
        batches = self._single_process_batches() if alone else self._sharded_batches()
        for share, batch, position in batches:
            shares.append(share)
            if not share.present:
                continue
            if isinstance(batch, list):
                if self.drawn is not None:
                    self.drawn.append(batch)
                indices = BatchIndices(batch)
                indices.seed_key = seed, epoch, position
                yield indices
            else:
                yield SampleKey(batch, (seed, epoch, position))

    def _single_process_batches(self) -> Iterator[tuple[RankShard, Any, int]]:
        """Fast path of `_sharded_batches` for one process, where each batch is a global batch."""
        rest = SkippedOrder(
            self._sampler, self.start_batch + self.start_global_batch, self._as_batch
        )
        stream = iter(self._order(rest))
        if type(self._sampler) is not BatchSampler:  # a BatchSampler yields lists already
            stream = map(self._as_batch, stream)
        position = 0
        for batch in stream:
            size = len(batch) if isinstance(batch, list) else None
            samples = size if self.counts else None
            yield (
                RankShard(True, samples, size or 0, samples, size, 1, 1),
                batch,
                rest.before + position,
            )
            position += 1 if size is None else size

    def _sharded_batches(self) -> Iterator[tuple[RankShard, Any, int]]:
        """Yield, per global batch, this rank's shard, its batch, and the samples before it."""
        for position, real, batches in self._global_batches():
            batch = batches[self.rank] if self.rank < len(batches) else None
            sizes = [len(batch) if isinstance(batch, list) else None for batch in batches]
            known_sizes = [size for size in sizes if size is not None]
            sizes_known = self.counts and len(known_sizes) == len(sizes)
            share = RankShard(
                present=batch is not None,
                samples=0 if batch is None else sizes[self.rank] if sizes_known else None,
                indices=len(batch) if isinstance(batch, list) else 0,
                global_samples=sum(known_sizes) if sizes_known else None,
                real_samples=real if known_sizes else None,
                batches=len(batches),
                real_batches=len(batches) if known_sizes else real,
            )
            before = sum(known_sizes[: self.rank]) if known_sizes else self.rank
            yield share, batch, position + before

    def _global_batches(self) -> Iterator[tuple[int, int, list[Any]]]:
        """Yield, per global batch, the samples before it, its samples, and its batches.

        Samples are counted without padding.
        """
        split = self.sharding.split
        as_batch = _as_list if split else self._as_batch
        rest = SkippedOrder(self._sampler, self.start_batch, as_batch)
        stream, position = map(as_batch, self._order(rest)), 0
        batches = ((batch, None) for batch in stream if not split or batch)
        for number, (parts, real, _) in enumerate(self.sharding.global_batches(batches)):
            if number >= self.start_global_batch:
                yield rest.before + position, real, parts
            position += real

    def _order(self, rest: SkippedOrder) -> Iterable[Any]:
        self.rest = rest
        stream: Iterable[Any] = rest
        if not self.is_pure:
            # A custom sampler may draw from the global generators. Without seeding, its order
            # would differ between processes, and between a resumed run and the original one.
            seed = mix(self.seed, self.epoch)
            at_once = _draw_whole_order(self._sampler, seed)
            if at_once is None:
                stream = seeded_iteration(rest, seed)
            else:
                rest.batches = at_once
        return stream if self.limit is None else islice(stream, max(0, self.limit - rest.skip))


def _samplers_of(batches: Any) -> list[Any]:
    """Return a batch sampler, or a sampler, and the sampler inside it."""
    return [s for s in (batches, getattr(batches, "sampler", None)) if s is not None]


def _as_list(batch: Any) -> Any:
    """Convert a batch of indices to a list; a single index is returned unchanged."""
    if type(batch) is list:
        return batch
    try:
        indices = iter(batch)
    except TypeError:
        return batch
    return list(indices)


def _identity(batch: Any) -> Any:  # a function with a name can be pickled
    return batch


def _draw_whole_order(batches: Any, seed: int) -> Iterable[Any] | None:
    """Return the seeded order of a torch sampler that draws the whole order at once; else None.

    The global generators are then swapped only once, whereas `seeded_iteration` swaps them at each
    batch.
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
    """Replace a ``RandomSampler`` by a `SeededSampler`, in copies of the user's objects.

    Returns:
        The sampler to use, and whether its order is a pure function of the seed and the epoch.

    Raises:
        ValueError: The sampler shards the data already, or `shuffle` is False and the order of the
            sampler cannot be replaced.
    """
    if isinstance(batches, JointBatches):
        seeded = batches.seeded(seed, shuffle=shuffle)
        return seeded, seeded.pure
    inner = batches.sampler if type(batches) is BatchSampler else batches
    if isinstance(inner, DistributedSampler) and inner.num_replicas > 1:
        raise ValueError(
            "The loader has a DistributedSampler, which would shard the data a second time. "
            "Remove it: loaders are sharded already."
        )
    pure = type(inner) in _PLAIN
    inner = copy.copy(inner) if pure else inner
    if type(inner) is RandomSampler:
        inner = SeededSampler(inner, seed) if shuffle else SequentialSampler(inner.data_source)
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
