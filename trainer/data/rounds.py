"""Global batches of an epoch: one batch per process, or none on some at the end of the data."""

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
    """One global batch, as this process sees it.

    Attributes:
        present: Whether this process has a batch.
        batch: This process's batch, on the device; None if it has none.
        samples: The number of samples in this process's batch.
        round_samples: The number of samples in the global batch; None if only a reduction over the
            processes could tell.
        real_samples: The number of samples in the global batch without padding; None if unknown.
        batches: The number of processes with a batch.
        last: Whether this is the last global batch of the epoch.
        ended: Whether this process should have a batch, but its dataset has ended the epoch early
            by raising ``StopIteration``.
        place: The position of a stream after this global batch; None for a map-style dataset.
        real_batches: See `Share`; None for a stream, where `real_samples` is known.
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
    """Yield the global batches after this process's last batch, in which it has no batch.

    There is at most one, unless this process's dataset has ended the epoch early. Then there are as
    many as the other processes still have, because they would otherwise wait for this process.

    Args:
        shares: This rank's shards of the global batches that were requested but not read; workers
            prefetch, so there may be several.
        left: The number of global batches left in the epoch; None if unknown.
    """
    ended = any(share.present for share in shares)
    absent = list(shares)
    if ended and left is not None:
        absent += [shares[-1]] * (left - len(shares))
    for share in absent:
        known = share.round_samples, share.real_samples, share.batches
        yield Round(False, None, 0, *known, ended=ended)


def own_round(batch: Any, share: Share, fetched: Any) -> Round:
    """Return the `Round` of a global batch in which this process has a batch.

    Args:
        batch: The batch on the device.
        share: The sizes that the sampler knows for this global batch.
        fetched: The batch as the loader yielded it.
    """
    samples = share.samples
    if samples is None:
        samples = _samples_in(fetched, share.indices)
    known = share.round_samples, share.real_samples, share.batches
    return Round(True, batch, samples, *known, real_batches=share.real_batches)


def _samples_in(batch: Any, indices: int) -> int:
    """Count the samples in a batch from a user's ``collate_fn``.

    There are fewer samples than indices if the ``collate_fn`` dropped some. A first dimension that
    is larger than the number of indices does not count samples (concatenated graphs, for example).

    Args:
        batch: The batch.
        indices: The number of indices it was fetched for; 0 for a ready-made batch.
    """
    found = count_samples(batch)
    if not indices:  # a ready-made batch
        return 1 if found is None else found
    return indices if found is None else min(found, indices)


def ahead(items: Iterable[T]) -> Generator[tuple[T, T | None], None, None]:
    """Yield each item together with the next one, which is None after the last item.

    If prefetching the next item raises an error, the current item is yielded first, with itself as
    the next one, so that it does not look like the last.
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
