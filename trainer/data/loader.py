"""Reading an epoch: its rounds, one batch ahead; the loader that `prepare` returns."""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset, default_collate

from trainer.data.sampling import ShardedSampler, Share
from trainer.data.seeding import SeededDataset, as_fetched, draws_nothing
from trainer.distributed.collectives import all_gather_object
from trainer.rng import mix, seeded_iteration
from trainer.state import GradientState
from trainer.tree import find_batch_size, leaves, to_device

logger = logging.getLogger(__name__)
Transfer = Callable[[Any], Any]


@dataclass(slots=True)
class Round:
    """One round of an epoch as this process sees it.

    Attributes:
        present: This process has a batch in it.
        batch: That batch, on the device; None otherwise.
        samples: Samples in that batch.
        round_samples: Samples in the round over all processes; None if only a reduction can tell.
        complete: Every process has a batch in it.
        real_samples: Of those, the ones that are not repeated to fill the round; None if unknown.
        last: The epoch has no further round.
    """

    present: bool
    batch: Any
    samples: int
    round_samples: int | None
    real_samples: int | None
    complete: bool
    last: bool = False


class Feed:
    """A loader's epochs, dealt out in rounds and read one batch ahead.

    A map-style loader is rebuilt around a `ShardedSampler`. A stream (an ``IterableDataset``'s
    loader, or any iterable of batches) is read whole by every process, each keeping its own
    batches: exact for every length, at the cost of reading *N* times.

    Args:
        source: A ``DataLoader`` or an iterable of batches.
        rank: This process.
        world_size: How many there are.
        seed: The run's seed; the order is a function of it and the epoch.
        shuffle: See `ShardedSampler`.
        even: See `ShardedSampler`.

    Raises:
        TypeError: The source cannot be iterated.
        ValueError: Its sampler shares the data out already.
    """

    def __init__(
        self,
        source: Any,
        *,
        rank: int = 0,
        world_size: int = 1,
        seed: int = 0,
        shuffle: bool = True,
        even: bool = False,
    ) -> None:
        if not isinstance(source, Iterable):
            raise TypeError(
                f"A loader is {source!r} of type {type(source).__name__}; it must be a DataLoader "
                "or another iterable of batches."
            )
        self.rank, self.world_size, self.seed = rank, world_size, seed
        self.epoch = 0
        self.start_round = 0
        self.even = even
        self.sampler: ShardedSampler | None = None
        self.loader: Any = source
        self._limit: int | None = None
        self._generator = torch.Generator()
        self._users_generators = _generators_of(source)
        if isinstance(source, DataLoaderShard) and world_size > 1:
            raise ValueError(
                "The loader was prepared by an Accelerator and is shared out already; pass the one "
                "that was given to prepare()."
            )
        # A subclass that reads in its own way is read by it, as a stream.
        if isinstance(source, DataLoader) and type(source).__iter__ is DataLoader.__iter__:
            streams = isinstance(source.dataset, IterableDataset)
            if not streams:
                self.sampler = ShardedSampler(
                    source.sampler if source.batch_sampler is None else source.batch_sampler,
                    rank=rank,
                    world_size=world_size,
                    seed=seed,
                    shuffle=shuffle,
                    even=even,
                )
                self.sampler.counts = source.collate_fn is default_collate
            self.loader = DataLoader(**loader_kwargs(source, self.sampler, self._generator))

    @property
    def limit(self) -> int | None:
        """Batches over all processes after which the epoch ends; None for all of them."""
        return self._limit

    @limit.setter
    def limit(self, limit: int | None) -> None:
        self._limit = limit
        if self.sampler is not None:
            self.sampler.limit = limit

    @property
    def num_batches(self) -> int | None:
        """Batches in the epoch over all processes; None if only reading can tell."""
        if self.sampler is not None:
            return self.sampler.num_batches
        try:
            total = len(self.loader)
        except TypeError:
            return self._limit
        return total if self._limit is None else min(total, self._limit)

    @property
    def num_rounds(self) -> int | None:
        """Rounds in the epoch; None if only reading can tell."""
        total = self.num_batches
        return None if total is None else -(-total // self.world_size)

    @property
    def num_own_batches(self) -> int | None:
        """Batches in the epoch that this process gets; None if only reading can tell."""
        total = self.num_batches
        if total is None:
            return None
        full, rest = divmod(total, self.world_size)
        return full + (rest > 0 if self.even else self.rank < rest)

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch that is read next."""
        self.epoch = epoch
        self._generator.manual_seed(mix(self.seed, epoch, 1))
        for generator in self._users_generators:  # else its state decides, which no resume knows
            generator.manual_seed(mix(self.seed, epoch, 3))
        if self.sampler is not None:
            self.sampler.set_epoch(epoch)
        dataset = getattr(self.loader, "dataset", None)
        if dataset is not None and hasattr(dataset, "set_epoch"):
            dataset.set_epoch(epoch)

    def close(self) -> None:
        """End workers that would wait for a further epoch."""
        if isinstance(self.loader, DataLoader):
            self.loader._iterator = None

    def reseed(self, seed: int) -> None:
        """Take over the seed of the run that is resumed."""
        self.seed = seed
        if self.sampler is not None:
            self.sampler.reseed(seed)

    def rounds(self, transfer: Transfer | None = None) -> Generator[Round, None, None]:
        """The epoch's rounds, each known to be the last one or not when it is handed over.

        Args:
            transfer: Puts a batch on the device; called one batch ahead of its use.
        """
        ahead: Round | None = None
        for following in self._read(transfer):
            if ahead is not None:
                yield ahead
            ahead = following
        if ahead is not None:
            ahead.last = True
            yield ahead

    def _read(self, transfer: Transfer | None) -> Iterator[Round]:
        if self.sampler is None:
            yield from self._read_stream(transfer)
            return
        self.sampler.start_round = self.start_round
        shares = self.sampler.shares
        for batch in self.loader:
            yield _own(batch if transfer is None else transfer(batch), shares.popleft(), batch)
        while shares:  # a last round in which only other processes have a batch
            share = shares.popleft()
            yield Round(False, None, 0, share.round_samples, share.real_samples, share.complete)

    def _read_stream(self, transfer: Transfer | None) -> Iterator[Round]:
        stream: Iterator[Any] = iter(seeded_iteration(self.loader, mix(self.seed, self.epoch, 2)))
        if self.world_size > 1:
            stream = _refuse_different(stream)
        if self._limit is not None:
            stream = islice(stream, self._limit)
        if self.start_round:
            logger.warning(
                "Resuming inside an epoch of a stream: %d batches are read again and thrown away.",
                self.start_round * self.world_size,
            )
            for _ in islice(stream, self.start_round * self.world_size):
                pass
        beginning: list[Any] = []
        while batches := list(islice(stream, self.world_size)):
            real = sum(find_batch_size(batch) or 1 for batch in batches)
            if self.even:
                beginning = beginning or batches
                missing = self.world_size - len(batches)
                batches += [beginning[i % len(beginning)] for i in range(missing)]
            sizes = [find_batch_size(batch) or 1 for batch in batches]
            total, complete = sum(sizes), len(batches) == self.world_size
            if self.rank < len(batches):
                batch = batches[self.rank]
                batch = batch if transfer is None else transfer(batch)
                yield Round(True, batch, sizes[self.rank], total, real, complete)
            else:
                yield Round(False, None, 0, total, real, complete)


def _samples_in(batch: Any, indices: int) -> int:
    """What a batch made by somebody else's code holds.

    Fewer than its indices if the ``collate_fn`` left some out. More is no number of samples: the
    first dimension is then another, as for graphs laid end to end.
    """
    found = find_batch_size(batch)
    if not indices:  # a ready-made batch
        return found or 1
    return indices if found is None else min(found, indices)


def _generators_of(source: Any) -> list[torch.Generator]:
    """The generators that a loader and its samplers draw from."""
    batches = getattr(source, "batch_sampler", None)
    owners = (source, getattr(source, "sampler", None), batches, getattr(batches, "sampler", None))
    found = {id(g): g for owner in owners if (g := getattr(owner, "generator", None)) is not None}
    return list(found.values())


def _refuse_different(stream: Iterator[Any]) -> Iterator[Any]:
    """The stream itself, if it begins alike on all processes; collective.

    Raises:
        ValueError: On all processes alike: each has a stream of its own, of which the others'
            batches would be thrown away.
    """
    first = list(islice(stream, 1))
    seen = [leaf.detach().cpu() for leaf in leaves(first) if isinstance(leaf, torch.Tensor)]
    sums = [float(leaf.double().sum()) for leaf in seen if not leaf.is_complex()]
    if len({repr(each) for each in all_gather_object(sums)}) > 1:
        raise ValueError(
            "The stream begins with another batch on each process. Every process reads the whole "
            "stream and keeps its own batches: give all the same one, not a part of it each."
        )
    return chain(first, stream)


def _own(batch: Any, share: Share, fetched: Any) -> Round:
    samples = share.samples
    if samples is None:
        samples = _samples_in(fetched, share.indices)
    return Round(True, batch, samples, share.round_samples, share.real_samples, share.complete)


def loader_kwargs(
    loader: DataLoader[Any], sampler: ShardedSampler | None, generator: torch.Generator
) -> dict[str, Any]:
    """The arguments of a ``DataLoader`` like this one, reading what `sampler` says.

    It draws its workers' seeds from `generator`, so that reading leaves the global generators
    alone.
    """
    kwargs: dict[str, Any] = {
        "dataset": loader.dataset,
        "num_workers": loader.num_workers,
        "collate_fn": loader.collate_fn,
        "pin_memory": loader.pin_memory,
        "timeout": loader.timeout,
        "worker_init_fn": loader.worker_init_fn,
        "multiprocessing_context": loader.multiprocessing_context,
        "generator": generator,
        "prefetch_factor": loader.prefetch_factor,
        "persistent_workers": loader.persistent_workers,
    }
    if sampler is None:
        return kwargs | {"batch_size": loader.batch_size, "drop_last": loader.drop_last}
    if not draws_nothing(loader.dataset, loader.collate_fn):
        kwargs["dataset"] = SeededDataset(loader.dataset, loader.collate_fn)
        kwargs["collate_fn"] = as_fetched
    if loader.batch_sampler is None:
        return kwargs | {"sampler": sampler, "batch_size": None}
    return kwargs | {"batch_sampler": sampler}


class DataLoaderShard(DataLoader[Any]):
    """The loader that `Accelerator.prepare` returns: this process's part of the user's loader.

    Batches come on the device, read one ahead so that ``end_of_dataloader`` is true while the
    last one is at hand. The order of a shuffling loader changes with every pass, alike on all
    processes.

    Args:
        source: The user's loader.
        rank: This process.
        world_size: How many there are.
        seed: The same on all processes.
        even_batches: See `DataLoaderConfiguration`.
        device: Where batches are put; None leaves them where they are.
        non_blocking: Copy asynchronously.
    """

    def __init__(
        self,
        source: DataLoader[Any],
        *,
        rank: int,
        world_size: int,
        seed: int,
        even_batches: bool,
        device: torch.device | None,
        non_blocking: bool,
    ) -> None:
        self.feed = Feed(
            source,
            rank=rank,
            world_size=world_size,
            seed=seed,
            even=even_batches and world_size > 1,
        )
        # Being a DataLoader too serves those who ask for its attributes; reading is the feed's.
        super().__init__(**loader_kwargs(source, self.feed.sampler, torch.Generator()))
        self.device = device
        self.non_blocking = non_blocking
        self.gradient_state = GradientState()
        self.iteration = 0
        self.end_of_dataloader = False
        self.remainder = -1

    def set_epoch(self, epoch: int) -> None:
        """Choose the order of the next pass; without a call each pass takes the next one."""
        self.iteration = epoch

    def __iter__(self) -> Any:
        """The batches of this process."""
        self.feed.set_epoch(self.iteration)
        self.end_of_dataloader, self.remainder = False, -1
        self.gradient_state._add_dataloader(self)
        device = self.device
        try:
            for current in self.feed.rounds(
                None
                if device is None
                else lambda batch: to_device(batch, device, non_blocking=self.non_blocking)
            ):
                self.end_of_dataloader = current.last
                if current.last and current.real_samples is not None:
                    self.remainder = current.real_samples
                if current.present:
                    yield current.batch
            self.iteration += 1
        finally:  # also when the caller's loop is left by break
            self.gradient_state._remove_dataloader(self)

    def __len__(self) -> int:
        if self.feed.sampler is not None:
            return len(self.feed.sampler)
        own = self.feed.num_own_batches
        if own is None:
            raise TypeError("The loader reads a stream that has no length.")
        return own
