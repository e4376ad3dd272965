"""An epoch's batches as rounds, in which every process has one batch or, at the end, none.

With N processes round *r* holds batches *rN … rN + N - 1*, and process *i* gets the *i*-th of them;
or each batch is a round, cut into N parts. Batches are lists of indices, or what a stream gives:
`INDICES` and `SAMPLES` know how such are counted, cut and joined.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, cycle, islice
from typing import Any, Protocol, TypeVar

from trainer.data.batches import completed, concatenate, length, samples_in, take
from trainer.tree import count_samples

P = TypeVar("P")


class Kind(Protocol):
    """What is known of the batches that are dealt out."""

    def count(self, batch: Any) -> int:
        """Samples in a batch; 1 where nothing tells."""

    def length(self, batch: Any) -> int:
        """Samples in a batch that is to be cut."""

    def take(self, batch: Any, start: int, stop: int) -> Any:
        """The samples from `start` to before `stop`."""

    def joined(self, batches: Sequence[Any]) -> Any | None:
        """The samples of several batches in one; None if they cannot be cut and joined."""

    def completed(self, batch: Any, beginning: Any, samples: int) -> Any:
        """A batch of `samples` samples: its own, then those of `beginning`, over and over."""


class Indices:
    """Batches that are lists of indices, or one ready-made batch's index."""

    def count(self, batch: Any) -> int:
        """How many there are."""
        return len(batch) if isinstance(batch, list) else 1

    def length(self, batch: Any) -> int:
        """How many there are."""
        return len(batch)

    def take(self, batch: Any, start: int, stop: int) -> Any:
        """Those from `start` to before `stop`."""
        return batch[start:stop]

    def joined(self, batches: Sequence[Any]) -> list[Any]:
        """All of them."""
        lists = (batch if isinstance(batch, list) else [batch] for batch in batches)
        return list(chain.from_iterable(lists))

    def completed(self, batch: Any, beginning: Any, samples: int) -> Any:
        """`samples` of them: the batch's own, then those of `beginning`, over and over."""
        return list(islice(chain(batch, cycle(beginning)), samples))


class Samples:
    """Batches that a stream gives: trees whose tensors have a row for each sample."""

    def count(self, batch: Any) -> int:
        """See `count_samples`; 1 where nothing tells."""
        samples = count_samples(batch)
        return 1 if samples is None else samples

    length = staticmethod(length)
    take = staticmethod(take)
    completed = staticmethod(completed)

    def joined(self, batches: Sequence[Any]) -> Any | None:
        """All rows in one; None if some batch cannot be cut into samples."""
        return None if None in map(samples_in, batches) else concatenate(batches)


@dataclass(frozen=True, kw_only=True)
class Dealing:
    """How batches are dealt out to the processes.

    Args:
        kind: `INDICES` or `SAMPLES`.
        batch_size: Samples in a full batch; None if they have no size in particular.
        world_size: How many processes there are.
        even: Fill the last round with samples of the beginning, so that every process has the
            same number of full batches.
        split: A batch is a round, cut into one part for each process; else each process gets whole
            batches.
        drop_last: Leave out a last round in which not every process has a batch.
    """

    kind: Kind
    batch_size: int | None
    world_size: int
    even: bool = False
    split: bool = False
    drop_last: bool = False

    def rounds(self, batches: Iterator[tuple[Any, P]]) -> Iterator[tuple[list[Any], int, P]]:
        """Of each round: its batches, its samples but repeated ones, and the place where it ends.

        Args:
            batches: Each with the place behind it, which is not looked at.
        """
        dealt = self._dealt(batches)
        beginning: list[Any] = []  # the first round's batches
        while found := next(dealt, None):  # which may be another iterator meanwhile
            parts, place = found
            if self.drop_last and len(parts) < self.world_size:
                return
            real = sum(map(self.kind.count, parts))
            if self.even:
                beginning = beginning or parts
                if not self._is_full(parts):
                    following = next(dealt, None)
                    if following is not None:  # of many sizes: only the last round is filled
                        dealt = chain([following], dealt)
                    else:
                        parts = self._filled(parts, beginning)
            yield parts, real, place

    def _dealt(self, batches: Iterator[tuple[Any, P]]) -> Iterator[tuple[list[Any], P]]:
        """The batches of each round, as many of them as there are processes, or fewer."""
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
        """Samples in a full batch of one process."""
        size = self.batch_size
        return size // self.world_size if size and self.split else size

    def _is_full(self, parts: list[Any]) -> bool:
        sizes = set(map(self.kind.count, parts))
        return len(parts) == self.world_size and (self._size is None or sizes == {self._size})

    def _filled(self, parts: list[Any], beginning: list[Any]) -> list[Any]:
        """The last round with a full batch for every process, filled from the beginning."""
        size, kind = self._size, self.kind
        whole = size is None or sum(map(kind.count, parts)) > self.world_size * size
        own = None if whole else kind.joined(parts)
        if own is None or size is None:
            # Batches of no size in particular, or that cannot be cut, are repeated whole.
            return parts + list(islice(cycle(beginning), max(self.world_size - len(parts), 0)))
        flat = kind.completed(own, kind.joined(beginning), self.world_size * size)
        return [kind.take(flat, i * size, (i + 1) * size) for i in range(self.world_size)]


INDICES: Kind = Indices()
SAMPLES: Kind = Samples()


def own_batches(
    batches: int,
    samples: int | None,
    batch_size: int | None,
    *,
    rank: int,
    world_size: int,
    even: bool,
    split: bool,
    drop_last: bool,
) -> int:
    """How many batches one process gets of an epoch.

    Args:
        batches: Batches in the epoch.
        samples: Samples in it; needed for `split` without `even` alone, where None counts the
            last batch as one of which every process gets a part.
        batch_size: Samples in one of those batches.
        rank: The process.
        world_size: How many there are.
        even: See `Dealing`.
        split: See `Dealing`.
        drop_last: See `Dealing`.
    """
    if not split:
        full, rest = divmod(batches, world_size)
        if drop_last:
            return full
        return full + (rest > 0 if even else rank < rest)
    if even or drop_last or not samples or not batch_size:
        return batches
    rest = samples % batch_size
    return batches - (0 < rest <= rank * (batch_size // world_size))
