"""Random augmentation as a function of a batch's place in the epoch.

Every batch of a map-style dataset is fetched under generators seeded from (seed, epoch, position
of its first sample): the number of workers, the number of processes and where a run was resumed
make no difference to what the dataset draws.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.utils.data import Dataset, Subset, TensorDataset, default_collate, get_worker_info

from trainer.data.by_value import sent
from trainer.data.rows import attribute_of_dataset
from trainer.data.sampling import BatchIndices, SampleIndex, SampleKey
from trainer.rng import seed_local, set_rng_aside


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
        self._epoch: int | None = None  # that the dataset of a worker stands in

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
        return self._seeded(index, lambda: self.collate_fn(self.dataset[plain]))

    def __getitems__(self, indices: BatchIndices) -> Any:
        return self._seeded(indices, lambda: self.collate_fn(self._fetch(list(indices))))

    def _fetch(self, indices: list[int]) -> Any:
        dataset = self.dataset
        fetch = getattr(dataset, "__getitems__", None)
        return fetch(indices) if fetch else [dataset[index] for index in indices]

    def _seeded(
        self, place: BatchIndices | SampleIndex | SampleKey, fetch: Callable[[], Any]
    ) -> Any:
        if get_worker_info() is not None:  # a worker's generators serve nothing else
            self._tell(place.epoch)
            seed_local(place.seed)
            return sent(fetch())
        put_back = set_rng_aside(place.seed)
        try:
            return fetch()
        finally:
            put_back()

    def _tell(self, epoch: int) -> None:
        """Let a dataset in a worker that outlasts the epoch hear of the next one."""
        if self._epoch not in (None, epoch) and hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(epoch)
        self._epoch = epoch
