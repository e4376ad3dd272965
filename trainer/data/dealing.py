"""An epoch's batches as rounds, in which every process has one batch or, at the end, none.

With N processes round *r* holds batches *rN … rN + N - 1*, and process *i* gets the *i*-th of them;
or each batch is a round, cut into N parts. Batches are lists of indices, or batches of a stream:
`INDICES` and `SAMPLES` count, cut and join the two kinds.
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
    """Operations on one kind of batches.

    Attributes:
        count: Returns the samples in a batch; 1 if unknown.
        length: Returns the samples in a batch that is to be cut.
        take: Returns the samples from one place up to another, as a batch.
        joined: Returns several batches as one, to be cut or completed; None if they cannot be.
        completed: Extends a batch to a number of samples, cycling through those of another.
    """

    count: Callable[[Any], int]
    length: Callable[[Any], int]
    take: Callable[[Any, int, int], Any]
    joined: Callable[[Sequence[Any]], Any | None]
    completed: Callable[[Any, Any, int], Any]


def _indices(batch: Any) -> list[Any]:
    """Return a batch's indices; the batch may be the index of a ready-made batch."""
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
    """How batches are assigned to processes.

    Args:
        kind: `INDICES` or `SAMPLES`.
        batch_size: Samples in a full batch; None if batches have no fixed size.
        world_size: The number of processes.
        even: Fill the last round with samples from the beginning, so that every process has the
            same number of full batches.
        split: Cut each batch into one part per process; otherwise each process gets whole batches.
        drop_last: Leave out a last round in which not every process has a batch.
    """

    kind: Kind
    batch_size: int | None
    world_size: int
    even: bool = False
    split: bool = False
    drop_last: bool = False

    def rounds(self, batches: Iterator[tuple[Any, P]]) -> Iterator[tuple[list[Any], int, P]]:
        """Yield each round's batches, its number of samples without repeats, and the place it ends.

        Args:
            batches: Each with the place after it, which is passed through.
        """
        dealt = self._dealt(batches)
        beginning: list[Any] = []  # the first round's batches
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
                    if following is None:  # of many sizes, only the last round is filled
                        parts = self._filled(parts, beginning)
            yield parts, real, place
            found = following or next(dealt, None)

    def own_batches(self, batches: int, samples: int | None, *, rank: int) -> int:
        """Return how many batches one process gets in an epoch.

        Args:
            batches: Batches in the epoch.
            samples: Samples in the epoch; only used for `split` without `even`, where None assumes
                that every process gets a part of the last batch.
            rank: The process.
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
        """Yield the batches of each round, one per process or fewer."""
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
        """The number of samples in a full batch of one process."""
        size = self.batch_size
        return size // self.world_size if size and self.split else size

    def _is_full(self, parts: list[Any]) -> bool:
        sizes = set(map(self.kind.count, parts))
        return len(parts) == self.world_size and (self._size is None or sizes == {self._size})

    def _filled(self, parts: list[Any], beginning: list[Any]) -> list[Any]:
        """Return the last round with a full batch for every process, filled from the beginning."""
        size, kind = self._size, self.kind
        whole = size is None or sum(map(kind.count, parts)) > self.world_size * size
        own = None if whole else kind.joined(parts)
        if own is None or size is None:
            # Batches without a fixed size, or that cannot be cut, are repeated whole.
            return parts + list(islice(cycle(beginning), max(self.world_size - len(parts), 0)))
        flat = kind.completed(own, kind.joined(beginning), self.world_size * size)
        return [kind.take(flat, i * size, (i + 1) * size) for i in range(self.world_size)]
