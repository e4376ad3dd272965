"""Random augmentation as a function of a batch's place in the epoch.

Every batch of a map-style dataset is fetched under generators seeded from (seed, epoch, position
of its first sample), and told of the epoch under those of (seed, epoch): the number of workers, the
number of processes and where a run was resumed make no difference to what the dataset draws. They
are the global ones and those that the dataset keeps for itself.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from torch.utils.data import Dataset, Subset, TensorDataset, default_collate, get_worker_info

from trainer.data.by_value import sent
from trainer.data.own_generators import held_by, seed_all, set_aside
from trainer.data.rows import attribute_of_dataset
from trainer.data.sampling import BatchIndices, SampleIndex, SampleKey
from trainer.rng import isolated_rng, mix, seed_local, set_rng_aside

logger = logging.getLogger(__name__)

_LOOKS = 3  # the first batches of a process, before which generators are looked for


def draws_nothing(dataset: Any, collate_fn: Any) -> bool:
    """The dataset is plain tensors, so that seeding it would cost and change nothing."""
    while type(dataset) is Subset:
        dataset = dataset.dataset
    return type(dataset) is TensorDataset and collate_fn is default_collate


def tell_epoch(dataset: Any, seed: int, epoch: int) -> None:
    """Tell a dataset of the epoch, if it has ``set_epoch``; it may draw what it changes then.

    Every process and worker calls this for itself, so that each draws the same.

    Args:
        dataset: A loader's.
        seed: The run's.
        epoch: The one that is read next.
    """
    if isinstance(dataset, SeededDataset):
        dataset.told, dataset.own = (seed, epoch), None
    if hasattr(dataset, "set_epoch"):
        place = mix(seed, epoch, -1)  # no batch has this position
        if isinstance(dataset, SeededDataset):  # a stream's are seeded for the whole pass
            seed_all(held_by(dataset.dataset), mix(place, 1))
        with isolated_rng(place):
            dataset.set_epoch(epoch)


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
        self.told: tuple[int, int] | None = None  # the run's seed and the epoch; workers inherit it
        self.own: list[Any] | None = None  # generators that both keep; None: to be looked for
        self._looks: list[list[Any]] = []  # what was found before the first batches

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
            told = place.run_seed, place.epoch
            if self.told != told:  # the worker outlasts the epoch in which it began
                tell_epoch(self, *told)
            seed_local(place.seed)
            seed_all(self._generators(), mix(place.seed, 1))
            return sent(fetch())
        put_back = set_rng_aside(place.seed)
        try:
            own = self._generators()
            if not own:
                return fetch()
            with set_aside(own, mix(place.seed, 1)):
                return fetch()
        finally:
            put_back()

    def _generators(self) -> list[Any]:
        """Those that the dataset and the ``collate_fn`` keep for themselves."""
        if self.own is None or len(self._looks) < _LOOKS:
            self.own = held_by((self.dataset, self.collate_fn))
            if len(self._looks) < _LOOKS:
                self._looks.append(self.own)
                self._tell_of_late_ones()
        return self.own

    def _tell_of_late_ones(self) -> None:
        """Say so where a generator was made while the first batch was read, and stays."""
        if len(self._looks) < _LOOKS:
            return
        first, *later = ({id(generator) for generator in look} for look in self._looks)
        worker = get_worker_info()
        if set.intersection(*later) - first and (worker is None or worker.id == 0):
            logger.warning(
                "The dataset (%s) or its collate_fn made a random generator while its first batch "
                "was read. What that batch draws from it does not follow from the seed, in each "
                "worker, and is not the same after a resume: make it in __init__.",
                type(self.dataset).__name__,
            )
