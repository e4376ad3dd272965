"""Random augmentation as a function of a batch's place in the epoch.

Every batch of a map-style dataset is fetched under generators seeded from (seed, epoch, position
of its first sample): the number of workers, the number of processes and where a run was resumed
make no difference to what the dataset draws.

To seed Python's and numpy's generators and to put them back takes as long as a small batch. Without
workers it is left out for a dataset that draws from neither: its batches are read without, and the
generators watched. If they have moved after all, they are put back and that one batch is read again
as it should have been; if it draws then too, all further ones are seeded. (A dataset that draws for
its first batch, as nearly all do that draw, has no batch read twice.)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.utils.data import Dataset, Subset, TensorDataset, default_collate, get_worker_info

from trainer.data.by_value import sent
from trainer.data.rows import attribute_of_dataset
from trainer.data.sampling import BatchIndices, SampleIndex, SampleKey
from trainer.generators import Watch, watch
from trainer.rng import OF_TORCH, seed_local, set_rng_aside


def draws_nothing(dataset: Any, collate_fn: Any) -> bool:
    """The dataset is plain tensors, so that seeding it would cost and change nothing."""
    while type(dataset) is Subset:
        dataset = dataset.dataset
    return type(dataset) is TensorDataset and collate_fn is default_collate


def as_fetched(batch: Any) -> Any:
    """The ``collate_fn`` of a loader whose `SeededDataset` has collated already."""
    return batch


class SeededDataset(Dataset[Any]):
    """A map-style dataset whose batches are fetched under the seed that comes with their indices.

    They are collated here too: a ``collate_fn`` may draw as well (masked language modelling
    does). Everything else is the dataset's own.

    Args:
        dataset: The user's dataset.
        collate_fn: The user's; the loader's own is then `as_fetched`.
    """

    def __init__(self, dataset: Any, collate_fn: Any) -> None:
        self.dataset = dataset
        self.collate_fn = collate_fn
        self._draws = False
        self._watch: Watch | None = None

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_watch": None}  # of the generators of this process

    __getattr__ = attribute_of_dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: Any) -> Any:
        # Without a batch_sampler: one item.
        if isinstance(index, SampleKey):
            plain = index.key
        elif isinstance(index, (SampleIndex, BatchIndices)):
            plain = int(index) if isinstance(index, SampleIndex) else list(index)
        else:
            return self.dataset[index]
        return self._seeded(index.seed, lambda: self.collate_fn(self.dataset[plain]))

    def __getitems__(self, indices: BatchIndices) -> Any:
        return self._seeded(indices.seed, lambda: self.collate_fn(self._fetch(list(indices))))

    def _fetch(self, indices: list[int]) -> Any:
        dataset = self.dataset
        fetch = getattr(dataset, "__getitems__", None)
        return fetch(indices) if fetch else [dataset[index] for index in indices]

    def _seeded(self, seed: int, fetch: Callable[[], Any]) -> Any:
        if get_worker_info() is not None:  # a worker's generators serve nothing else
            seed_local(seed)
            return sent(fetch())
        if self._watch is not None and self._watch.nothing_drawn():
            put_back = set_rng_aside(seed, OF_TORCH)
            try:
                batch = fetch()
            except BaseException as error:
                if not self._watch.undo() or not isinstance(error, Exception):
                    raise
            else:
                if not self._watch.undo():
                    return batch
            finally:
                put_back()
        self._watch = None
        put_back = set_rng_aside(seed)
        try:
            seeded = None if self._draws else watch()
            batch = fetch()
            self._draws = seeded is None or not seeded.nothing_drawn()
        finally:
            put_back()
        if not self._draws:
            self._watch = watch()
        return batch
