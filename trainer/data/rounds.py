"""One round of an epoch, in which each process has a batch, or none if too few are left."""

from __future__ import annotations

from collections.abc import Generator, Iterable
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
        present: This process has a batch in it.
        batch: That batch, on the device; None otherwise.
        samples: Samples in that batch.
        round_samples: Samples in the round over all processes; None if only a reduction can tell.
        real_samples: Of those, the ones that are not repeated to fill the round; None if unknown.
        batches: How many processes have a batch in it.
        last: The epoch has no further round.
        ended: This process should have a batch in it, but its dataset has ended the epoch before,
            by raising ``StopIteration``.
        place: Where a stream stands after it.
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


def absent_round(share: Share, *, ended: bool) -> Round:
    """A round in which this process has no batch; see `Round.ended`."""
    known = share.round_samples, share.real_samples, share.batches
    return Round(False, None, 0, *known, ended=ended)


def own_round(batch: Any, share: Share, fetched: Any) -> Round:
    """A round in which it has one.

    Args:
        batch: It, on the device.
        share: What is known of the round.
        fetched: The batch as the loader gave it.
    """
    samples = share.samples
    if samples is None:
        samples = _samples_in(fetched, share.indices)
    return Round(True, batch, samples, share.round_samples, share.real_samples, share.batches)


def _samples_in(batch: Any, indices: int) -> int:
    """What a batch made by somebody else's code holds.

    Fewer than its indices if the ``collate_fn`` left some out. More is no number of samples: the
    first dimension is then another, as for graphs laid end to end.
    """
    found = count_samples(batch)
    if not indices:  # a ready-made batch
        return 1 if found is None else found
    return indices if found is None else min(found, indices)


def ahead(items: Iterable[T]) -> Generator[tuple[T, T | None], None, None]:
    """Each item with the one that follows, None after the last.

    An error while reading ahead is raised when the item before it has been handed over, which says
    until then that something follows.
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
