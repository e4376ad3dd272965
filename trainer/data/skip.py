"""`skip_first_batches` and the loaders behind it, to resume inside an epoch."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

from torch.utils.data import BatchSampler, DataLoader, IterableDataset, Sampler

from trainer.data.loader import PreparedLoader
from trainer.data.rebuild import reads_as_torchs, users_kwargs, what_kwargs


class SkipBatchSampler(BatchSampler):
    """A batch sampler without its first batches.

    Args:
        batch_sampler: A batch sampler, or a sampler of ready-made batches.
        skip_batches: The number of batches to skip in each pass.
    """

    def __init__(self, batch_sampler: Sampler[Any] | Iterable[Any], skip_batches: int = 0) -> None:
        self.batch_sampler: Any = batch_sampler
        self.skip_batches = skip_batches

    def __getattr__(self, name: str) -> Any:
        if name == "batch_sampler":  # looked up during unpickling, before it is set
            raise AttributeError(name)
        return getattr(self.batch_sampler, name)

    @property
    def sampler(self) -> Any:
        """The batch sampler's ``sampler``; setting it changes a copy of the given batch sampler."""
        return self.batch_sampler.sampler

    @sampler.setter
    def sampler(self, sampler: Any) -> None:
        self.batch_sampler = copy.copy(self.batch_sampler)
        self.batch_sampler.sampler = sampler

    def __iter__(self) -> Iterator[Any]:
        return islice(iter(self.batch_sampler), self.skip_batches, None)

    def __len__(self) -> int:
        return max(0, len(self.batch_sampler) - self.skip_batches)


class SkipDataLoader(DataLoader[Any]):
    """A ``DataLoader`` for streams that reads its first batches and discards them.

    Args:
        dataset: Any dataset that a ``DataLoader`` takes.
        skip_batches: The number of batches to skip in each pass.
        **kwargs: Arguments of the ``DataLoader``.
    """

    def __init__(self, dataset: Any, skip_batches: int = 0, **kwargs: Any) -> None:
        self.skip_batches = skip_batches
        super().__init__(dataset, **kwargs)

    def __iter__(self) -> Any:
        """Yield the remaining batches."""
        return islice(super().__iter__(), self.skip_batches, None)

    def __len__(self) -> int:
        return max(0, super().__len__() - self.skip_batches)


def skip_first_batches(dataloader: DataLoader[Any], num_batches: int = 0) -> DataLoader[Any]:
    """Return a loader that skips the first batches, to resume inside an epoch.

    Use it for one pass and read the next pass from `dataloader`, which is not changed. With a
    map-style dataset, skipped samples are not read. A stream is read and discarded.

    A prepared loader keeps its order: the result yields exactly the batches that would have
    followed in the current or next pass of `dataloader`, random augmentation included, and
    `dataloader` then continues with the pass after that. After a restart, ``load_state`` restores
    the pass; otherwise call ``set_epoch(epoch)``.

    Args:
        dataloader: A ``DataLoader``, prepared or not.
        num_batches: The number of this process's batches to skip.

    Raises:
        TypeError: `dataloader` is not a ``DataLoader`` or is a subclass that overrides iteration,
            or `num_batches` is not an int.
        ValueError: `num_batches` is negative.
    """
    if isinstance(num_batches, bool) or not isinstance(num_batches, int):
        raise TypeError(f"num_batches is {num_batches!r}; it must be an int.")
    if num_batches < 0:
        raise ValueError(f"num_batches is {num_batches}; it must be 0 or more.")
    if isinstance(dataloader, PreparedLoader):
        return dataloader.skipping(num_batches)
    if not isinstance(dataloader, DataLoader):
        raise TypeError(
            f"dataloader is a {type(dataloader).__name__}; skip_first_batches takes a DataLoader, "
            "prepared or not. For other iterables use itertools.islice."
        )
    kwargs = users_kwargs(dataloader)
    if isinstance(dataloader, SkipDataLoader):
        num_batches += dataloader.skip_batches
    elif not reads_as_torchs(type(dataloader)):
        raise TypeError(
            f"A {type(dataloader).__name__} overrides how a DataLoader reads, which a new loader "
            "would not do. Prepare it, or use itertools.islice."
        )
    if isinstance(dataloader.dataset, IterableDataset):
        return SkipDataLoader(skip_batches=num_batches, **kwargs, **what_kwargs(dataloader))
    batches = dataloader.batch_sampler
    rest = SkipBatchSampler(dataloader.sampler if batches is None else batches, num_batches)
    return DataLoader(**kwargs, **what_kwargs(dataloader, rest))
