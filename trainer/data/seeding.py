"""Random augmentation as a function of a batch's place in the epoch.

Every batch of a map-style dataset is fetched under generators seeded from (seed, epoch, position
of its first sample), and told of the epoch under those of (seed, epoch): the number of workers, the
number of processes and where a run was resumed make no difference to what the dataset draws.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.utils.data import Dataset, Subset, TensorDataset, default_collate, get_worker_info

from trainer.data.by_value import sent
from trainer.data.rows import attribute_of_dataset
from trainer.data.sampling import BatchIndices, SampleIndex, SampleKey
from trainer.rng import isolated_rng, mix, seed_local, set_rng_aside


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
        dataset.told = seed, epoch
    if hasattr(dataset, "set_epoch"):
        with isolated_rng(mix(seed, epoch, -1)):  # no batch has this position
            dataset.set_epoch(epoch)


def own_generators(source: Any) -> list[Any]:
    """The generators that a loader and its samplers draw from, by whatever name a sampler has them.

    They are torch's, Python's and numpy's; not the global ones, which others draw from too.
    """
    batches = getattr(source, "batch_sampler", None)
    samplers = getattr(source, "sampler", None), batches, getattr(batches, "sampler", None)
    found = [getattr(owner, "generator", None) for owner in (source, *samplers)]
    for sampler in samplers:
        found += getattr(sampler, "__dict__", {}).values()
    kinds: tuple[type, ...] = torch.Generator, random.Random
    everybodys: list[Any] = [torch.default_generator, getattr(random.random, "__self__", None)]
    if numpy := sys.modules.get("numpy"):
        kinds += numpy.random.Generator, numpy.random.RandomState
        everybodys.append(numpy.random.mtrand._rand)
    own = [g for g in found if isinstance(g, kinds) and not any(g is each for each in everybodys)]
    return list({id(generator): generator for generator in own}.values())


def seed_own(generator: Any, seed: int) -> None:
    """Seed one that `own_generators` has found."""
    if isinstance(generator, torch.Generator):
        generator.manual_seed(seed)
    elif isinstance(generator, random.Random):
        generator.seed(seed)
    elif hasattr(generator, "get_state") and type(_bits_of(generator)).__name__ == "MT19937":
        generator.seed(seed % 2**32)
    else:  # numpy's newer kinds have no method
        bits = _bits_of(generator)
        bits.state = type(bits)(seed).state


def set_own_aside(generator: Any) -> Callable[[], object]:
    """What brings one that `own_generators` has found back to where it is."""
    if isinstance(generator, torch.Generator):
        return partial(generator.set_state, generator.get_state())
    if isinstance(generator, random.Random):
        return partial(generator.setstate, generator.getstate())
    if hasattr(generator, "get_state"):  # numpy's older kind, which may keep half a pair
        return partial(generator.set_state, generator.get_state(legacy=False))
    bits = _bits_of(generator)
    return partial(setattr, bits, "state", bits.state)


def _bits_of(generator: Any) -> Any:
    return getattr(generator, "bit_generator", None) or generator._bit_generator


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
            return sent(fetch())
        put_back = set_rng_aside(place.seed)
        try:
            return fetch()
        finally:
            put_back()
