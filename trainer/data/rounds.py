"""Rounds of an epoch, in which each process has a batch, or none if too few are left."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from trainer.data.sampling import Share
from trainer.data.stateful import Place
from trainer.tree import count_samples

T = TypeVar("T")


@dataclass(slots=True)
class Round:
    """One round of an epoch as this process sees it.

    Attributes:
        present: Whether this process has a batch.
        batch: This process's batch, on the device, or None.
        samples: The samples in that batch.
        round_samples: The samples in the round over all processes; None if that takes a reduction.
        real_samples: Those that are not repeated to fill the round; None if unknown.
        batches: How many processes have a batch.
        last: Whether the epoch has no further round.
        ended: This process should have a batch, but its dataset has ended the epoch early by
            raising ``StopIteration``.
        place: The position of a stream after it.
        real_batches: See `Share`; None for a stream, whose `real_samples` are known.
    """

    present: bool
    batch: Any
    samples: int
    round_samples: int | None
    real_samples: int | None
    batches: int
    last: bool = False
    ended: bool = False
    place: Place | None = None
    real_batches: int | None = None


def absent_rounds(shares: Sequence[Share], left: int | None) -> Generator[Round, None, None]:
    """Yield the rounds after this process's last batch, in which the others may have one.

    There is at most one, unless the dataset has ended the epoch early. Then there are as many as
    the others have, which would otherwise wait for this process.

    Args:
        shares: The shares of the rounds requested and not read; workers request ahead.
        left: How many rounds the epoch still has; None if unknown.
    """
    ended = any(share.present for share in shares)
    absent = list(shares)
    if ended and left is not None:
        absent += [shares[-1]] * (left - len(shares))
    for share in absent:
        known = share.round_samples, share.real_samples, share.batches
        yield Round(False, None, 0, *known, ended=ended)


def own_round(batch: Any, share: Share, fetched: Any) -> Round:
    """Return a round in which this process has a batch.

    Args:
        batch: The batch on the device.
        share: What is known of the round.
        fetched: The batch as the loader yielded it.
    """
    samples = share.samples
    if samples is None:
        samples = _samples_in(fetched, share.indices)
    known = share.round_samples, share.real_samples, share.batches
    return Round(True, batch, samples, *known, real_batches=share.real_batches)


def _samples_in(batch: Any, indices: int) -> int:
    """Count the samples in a batch made by user code.

    There are fewer than indices if the ``collate_fn`` dropped some. A larger first dimension does
    not count samples, as in concatenated graphs.
    """
    found = count_samples(batch)
    if not indices:  # a ready-made batch
        return 1 if found is None else found
    return indices if found is None else min(found, indices)


def ahead(items: Iterable[T]) -> Generator[tuple[T, T | None], None, None]:
    """Yield each item with the one that follows, None after the last.

    An error while reading ahead is raised after the item before it was yielded, which is yielded as
    if something followed.
    """
    iterator = iter(items)
    current = next(iterator, None)
    while current is not None:
        try:
            following = next(iterator, None)
        except Exception:
            yield current, current
            raise
        yield current, following
        current = following
