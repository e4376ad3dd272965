"""Loaders that leave out their first batches, to go on inside an epoch."""

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
        skip_batches: How many to leave out of each pass.
    """

    def __init__(self, batch_sampler: Sampler[Any] | Iterable[Any], skip_batches: int = 0) -> None:
        self.batch_sampler: Any = batch_sampler
        self.skip_batches = skip_batches

    def __getattr__(self, name: str) -> Any:
        if name == "batch_sampler":  # asked for while unpickling, before there is one
            raise AttributeError(name)
        return getattr(self.batch_sampler, name)

    @property
    def sampler(self) -> Any:
        """That which the batches are made from; setting it leaves the batch sampler as it is."""
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
    """A loader that reads its first batches and throws them away: for streams.

    Args:
        dataset: Any that a ``DataLoader`` takes.
        skip_batches: How many to leave out of each pass.
        **kwargs: Of a ``DataLoader``.
    """

    def __init__(self, dataset: Any, skip_batches: int = 0, **kwargs: Any) -> None:
        self.skip_batches = skip_batches
        super().__init__(dataset, **kwargs)

    def __iter__(self) -> Any:
        """The batches that are left."""
        return islice(super().__iter__(), self.skip_batches, None)

    def __len__(self) -> int:
        return max(0, super().__len__() - self.skip_batches)


def skip_first_batches(dataloader: DataLoader[Any], num_batches: int = 0) -> DataLoader[Any]:
    """A loader of the same kind without the first batches of its pass; the given one stays whole.

    To go on inside an epoch, for one pass: the next is read from `dataloader` again. Of a map-style
    dataset nothing is read that is skipped; a stream is read and thrown away. A prepared loader
    keeps its order: what follows is exactly what would have followed in the pass that `dataloader`
    is in or begins next, random augmentation included, and `dataloader` then goes on with the pass
    after that. After a restart ``load_state`` says which pass it is, or ``set_epoch(epoch)``.

    Args:
        dataloader: Prepared or not.
        num_batches: Batches, of this process, to leave out.

    Raises:
        TypeError: It is no ``DataLoader``, or `num_batches` no int; or it is a subclass that reads
            in a way of its own.
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
            f"A {type(dataloader).__name__} reads in a way of its own, which a new loader would "
            "not have. Prepare it, or use itertools.islice."
        )
    if isinstance(dataloader.dataset, IterableDataset):
        return SkipDataLoader(skip_batches=num_batches, **kwargs, **what_kwargs(dataloader))
    batches = dataloader.batch_sampler
    rest = SkipBatchSampler(dataloader.sampler if batches is None else batches, num_batches)
    return DataLoader(**kwargs, **what_kwargs(dataloader, rest))
