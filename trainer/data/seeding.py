"""Reproducible augmentation: seed the random generators for each batch that is fetched.

Each batch of a map-style dataset is fetched with generators seeded from (seed, epoch, position of
its first sample). ``set_epoch`` is called with generators seeded from (seed, epoch). So the random
numbers of a batch do not depend on the number of workers or processes, or on where a run was
resumed. This covers the global generators of torch, Python and numpy, and generators that the
dataset keeps as attributes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from torch.utils.data import Dataset, get_worker_info

from trainer.data.by_value import sent
from trainer.data.latecomers import Latecomers
from trainer.data.own_generators import Found, alike, held_by, seed_all, set_aside
from trainer.data.sampling import BatchIndices, SampleIndex, SampleKey
from trainer.rng import isolated_rng, mix, seed_local, set_rng_aside

logger = logging.getLogger(__name__)


def tell_epoch(dataset: Any, seed: int, epoch: int) -> None:
    """Call a dataset's ``set_epoch``, if any, with seeded generators.

    ``set_epoch`` may draw random numbers. Every process and worker calls this function itself, and
    all draw the same numbers.

    Args:
        dataset: A loader's dataset.
        seed: The run's seed.
        epoch: The epoch that is read next.
    """
    if isinstance(dataset, SeededDataset):
        dataset.told, dataset._looks_anew = (seed, epoch), True
    if hasattr(dataset, "set_epoch"):
        place = mix(seed, epoch, -1)  # no batch has this position
        seeded = isinstance(dataset, SeededDataset)  # a stream is seeded for the whole pass
        own = dataset._find() if seeded else {}
        with isolated_rng(place), set_aside(own, mix(place, 1), dataset._alike if seeded else {}):
            dataset.set_epoch(epoch)


def as_fetched(batch: Any) -> Any:
    """The ``collate_fn`` of a rebuilt loader: `SeededDataset` has collated the batch already."""
    return batch


class SeededDataset(Dataset[Any]):
    """Wraps a map-style dataset; fetches each batch with the seed that comes with its indices.

    It also collates the batch, because a ``collate_fn`` may draw random numbers (for masked
    language modelling, for example). All other attributes are those of the wrapped dataset.

    Args:
        dataset: The user's dataset.
        collate_fn: The user's ``collate_fn``. The rebuilt loader's own one is `as_fetched`.
    """

    def __init__(self, dataset: Any, collate_fn: Any) -> None:
        self.dataset = dataset
        self.collate_fn = collate_fn
        self.told: tuple[int, int] | None = (
            None  # the run's seed and the epoch of the latest set_epoch; workers inherit it
        )
        self._alike = alike(self._find())
        self._looks_anew = True
        self._own: Found = {}  # generators of the dataset and the collate_fn
        self._latecomers = Latecomers(f"The dataset ({type(dataset).__name__}) or its collate_fn")

    def __getattr__(self, name: str) -> Any:
        if name == "dataset":  # looked up during unpickling, before it is set
            raise AttributeError(name)
        return getattr(self.dataset, name)

    def __getitem__(self, index: BatchIndices | SampleIndex | SampleKey) -> Any:
        # The loader has no batch_sampler, so it asks for one item.
        if isinstance(index, SampleKey):
            plain = index.key
        else:
            plain = int(index) if isinstance(index, SampleIndex) else list(index)
        return self._seeded(index, lambda: self.collate_fn(self.dataset[plain]))

    def __getitems__(self, indices: BatchIndices) -> Any:
        return self._seeded(indices, lambda: self.collate_fn(self._fetch(list(indices))))

    def _fetch(self, indices: list[int]) -> Any:
        dataset = self.dataset
        fetch = getattr(dataset, "__getitems__", None)
        return fetch(indices) if fetch else [dataset[index] for index in indices]

    def _seeded(
        self, index: BatchIndices | SampleIndex | SampleKey, fetch: Callable[[], Any]
    ) -> Any:
        seed = index.seed
        if get_worker_info() is not None:  # in a worker nothing else uses the generators
            run_seed, epoch, _ = index.place
            if self.told != (run_seed, epoch):  # a persistent worker, in a later epoch
                tell_epoch(self, run_seed, epoch)
            seed_local(seed)
            if own := self._generators():
                seed_all(own, mix(seed, 1), self._alike)
            batch = sent(fetch())
        else:
            put_back = set_rng_aside(seed)
            try:
                if own := self._generators():
                    with set_aside(own, mix(seed, 1), self._alike):
                        batch = fetch()
                else:
                    batch = fetch()
            finally:
                put_back()
        if self._latecomers.awaited:
            self._own = self._latecomers.look(self._find, self._own)
        return batch

    def _find(self) -> Found:
        """Find the random generators that the dataset and the ``collate_fn`` keep."""
        return held_by(dataset=self.dataset, collate_fn=self.collate_fn)

    def _generators(self) -> Found:
        """Return the generators of the dataset and the ``collate_fn``; search once per epoch."""
        if self._looks_anew:
            self._looks_anew = False
            # Keep generators that were found before: the search skips long containers, and a
            # container of the dataset may have grown.
            self._own = {**self._own, **self._find()}
        return self._own
