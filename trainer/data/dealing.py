"""Batch sharding: group an epoch's batches into global batches, one batch per process.

At the end of the data some processes may have no batch in the last global batch. There are two ways
to shard over N processes:

- Whole batches (the default): global batch *r* holds batches *rN … rN + N - 1* of the loader, and
  process *i* gets batch *rN + i*.
- ``split``: each batch of the loader is a global batch, split into N parts.

The same code shards lists of sample indices and batches of data: `INDICES` and `SAMPLES` have the
operations to count, split and concatenate each kind.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, cycle, islice
from typing import Any, TypeVar

from trainer.data.batches import completed, concatenate, length, marked, samples_in, take, unmarked
from trainer.tree import count_samples

P = TypeVar("P")


@dataclass(frozen=True, kw_only=True)
class Kind:
    """Operations on one kind of batch: lists of indices, or batches of data.

    Attributes:
        count: Returns the number of samples in a batch; 1 if unknown.
        length: Returns the number of samples in a batch that is to be split.
        take: Slices a batch: ``take(batch, start, stop)``.
        joined: Concatenates batches; returns None if they cannot be concatenated.
        completed: Pads a batch: ``completed(batch, beginning, samples)`` repeats the samples of
            `beginning` until the batch has `samples` samples.
    """

    count: Callable[[Any], int]
    length: Callable[[Any], int]
    take: Callable[[Any, int, int], Any]
    joined: Callable[[Sequence[Any]], Any | None]
    completed: Callable[[Any, Any, int], Any]


def _indices(batch: Any) -> list[Any]:
    """Return a batch's indices as a list; the batch may be a single index (``batch_size=None``)."""
    return batch if isinstance(batch, list) else [batch]


INDICES = Kind(
    count=lambda batch: len(batch) if isinstance(batch, list) else 1,
    length=len,
    take=lambda batch, start, stop: batch[start:stop],
    joined=lambda batches: list(chain.from_iterable(map(_indices, batches))),
    completed=lambda batch, beginning, samples: list(
        islice(chain(batch, cycle(beginning)), samples)
    ),
)


def _count(batch: Any) -> int:
    samples = count_samples(batch)
    return 1 if samples is None else samples


SAMPLES = Kind(  # trees whose tensors have one row per sample
    count=_count,
    length=length,
    take=lambda batch, start, stop: unmarked(take(batch, start, stop)),
    joined=lambda batches: (
        None if None in map(samples_in, batches) else concatenate([*map(marked, batches)])
    ),
    completed=completed,
)


@dataclass(frozen=True, kw_only=True)
class Dealing:
    """How batches are sharded over the processes.

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

    kind: Kind
    batch_size: int | None
    world_size: int
    even: bool = False
    split: bool = False
    drop_last: bool = False

    def rounds(self, batches: Iterator[tuple[Any, P]]) -> Iterator[tuple[list[Any], int, P]]:
        """Group batches into global batches.

        Args:
            batches: Batches, each with the data position after it.

        Yields:
            The batches of each global batch in the order of ranks, its number of samples without
            the padding, and the data position after it.
        """
        dealt = self._dealt(batches)
        beginning: list[Any] = []  # the batches of the first global batch
        found = next(dealt, None)
        while found is not None:
            parts, place = found
            if self.drop_last and len(parts) < self.world_size:
                return
            real, following = sum(map(self.kind.count, parts)), None
            if self.even:
                beginning = beginning or parts
                if not self._is_full(parts):
                    following = next(dealt, None)
                    if following is None:  # sizes may vary: pad only the last global batch
                        parts = self._filled(parts, beginning)
            yield parts, real, place
            found = following or next(dealt, None)

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

    def _dealt(self, batches: Iterator[tuple[Any, P]]) -> Iterator[tuple[list[Any], P]]:
        """Yield the batches of each global batch, before padding: at most one per process."""
        if not self.split:
            while read := list(islice(batches, self.world_size)):
                yield [batch for batch, _ in read], read[-1][1]
            return
        for batch, place in batches:
            total = self.kind.length(batch)
            size = max(self._size or 1, -(-total // self.world_size))
            starts = range(0, total, size)
            yield [self.kind.take(batch, start, start + size) for start in starts], place

    @property
    def _size(self) -> int | None:
        """The number of samples in a full batch of one process; None without a fixed size."""
        size = self.batch_size
        return size // self.world_size if size and self.split else size

    def _is_full(self, parts: list[Any]) -> bool:
        sizes = set(map(self.kind.count, parts))
        return len(parts) == self.world_size and (self._size is None or sizes == {self._size})

    def _filled(self, parts: list[Any], beginning: list[Any]) -> list[Any]:
        """Pad the last global batch to a full batch per process, with samples of `beginning`."""
        size, kind = self._size, self.kind
        whole = size is None or sum(map(kind.count, parts)) > self.world_size * size
        own = None if whole else kind.joined(parts)
        if own is None or size is None:
            # Batches that have no fixed size, or that cannot be split, are repeated whole.
            return parts + list(islice(cycle(beginning), max(self.world_size - len(parts), 0)))
        flat = kind.completed(own, kind.joined(beginning), self.world_size * size)
        return [kind.take(flat, i * size, (i + 1) * size) for i in range(self.world_size)]
