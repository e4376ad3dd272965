"""Reading an epoch in rounds, sharded over the processes and read one batch ahead."""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager
from itertools import islice
from typing import Any

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    SequentialSampler,
    default_collate,
)

from trainer.data.dealing import SAMPLES, Dealing
from trainer.data.own_generators import (
    Found,
    alike,
    held_by,
    of_samplers,
    seed_all,
    set_aside,
)
from trainer.data.rebuild import (
    LastingLoader,
    batches_of,
    end_workers,
    loader_kwargs,
    reads_as_torchs,
    say_workers_end,
)
from trainer.data.rounds import Round, absent_rounds, ahead, own_round
from trainer.data.sampling import EpochLength, ShardedSampler
from trainer.data.seeding import tell_epoch
from trainer.data.stateful import Place
from trainer.data.streams import (
    Stream,
    knows_where_it_is,
    refuse_different,
)
from trainer.rng import mix

logger = logging.getLogger(__name__)

Transfer = Callable[[Any], Any]


def _expect_length(source: DataLoader[Any]) -> None:
    """Raise where torch's sampler would, in the middle of the run, without saying what to do."""
    dataset, batches = source.dataset, source.batch_sampler
    # A loader with a batch sampler of the user's own has an unused sequential one.
    reads_in_order = isinstance(source.sampler, SequentialSampler) and (
        batches is None or type(batches) is BatchSampler
    )
    if reads_in_order and not hasattr(dataset, "__len__"):
        raise TypeError(
            f"The dataset {type(dataset).__name__} has no __len__, so it is unknown how many "
            "samples an epoch has. Define __len__, or make it an IterableDataset."
        )


class Feed:
    """A loader's epochs, sharded in rounds and read one batch ahead.

    A map-style loader is rebuilt around a `ShardedSampler`. A stream (an ``IterableDataset``'s
    loader, or any iterable of batches) is read whole by every process, each keeping its own
    batches: exact for every length, at the cost of reading *N* times.

    Args:
        source: A ``DataLoader`` or an iterable of batches.
        rank: This process.
        world_size: The number of processes.
        seed: The run's seed; the order is a function of it and the epoch.
        place: Gives each loader of the run its own random numbers; 0 for the training's.
        shuffle: See `ShardedSampler`.
        even: See `Dealing`.
        split: See `Dealing`.
        drop_last: See `Dealing`.
        remember: `position` will be saved: a stream that has a state is read with it; see
            `trainer.data.streams`.
        rereads: A pass of a stream may be read again, although it was read further.

    Attributes:
        limit: Batches of all processes, or the fraction of them as a float, after which an epoch
            ends; None for all.
        limited_by: The user's argument that limits it, for messages.
        length: How much data there was when the latest pass began, which lasts for that pass.
        resumed: An epoch that has begun, and how much data there was; see `resume_length`.
        batches_read: How many processes have a batch in the round that is being read.

    Raises:
        TypeError: The source cannot be iterated, or its dataset has no length.
        ValueError: Its sampler shards the data already.
    """

    def __init__(
        self,
        source: Any,
        *,
        rank: int = 0,
        world_size: int = 1,
        seed: int = 0,
        place: int = 0,
        shuffle: bool = True,
        even: bool = False,
        split: bool = False,
        drop_last: bool = False,
        remember: bool = False,
        rereads: bool = False,
    ) -> None:
        if not isinstance(source, Iterable):
            wrap = " Wrap it: DataLoader(dataset, batch_size=32)." * isinstance(source, Dataset)
            if hasattr(source, "train_dataloader"):  # Lightning's, for one
                wrap = " To hold several loaders, derive its class from trainer.DataModule."
            raise TypeError(
                f"A loader is {source!r} of type {type(source).__name__}; it must be a DataLoader "
                f"or another iterable of batches.{wrap}"
            )
        self._source: Any = source
        self._shuffle = shuffle
        self._place, seed = place, mix(seed, place) if place else seed
        self.rank, self.world_size, self.seed = rank, world_size, seed
        self.epoch = 0
        self.start_round = 0  # skipped in rounds of this number of processes, …
        self.start_batch = 0  # … or in batches, before the rest is sharded
        self._mark: int | None = None
        self._even, self.split, self.drop_last = even, split, drop_last
        self.limited_by = ""
        self.batches_read = world_size
        self.sampler: ShardedSampler | None = None
        self.loader: Any = source
        self.limit: int | float | None = None
        self.resumed: tuple[int, EpochLength] | None = None
        self.length = EpochLength()
        self._generator = torch.Generator()
        if getattr(source, "_is_accelerate_prepared", False) and world_size > 1:
            raise ValueError(
                "The loader was prepared by an Accelerator and is sharded already; pass the one "
                "that was given to prepare()."
            )
        # A subclass that overrides how it reads is read as a stream.
        if isinstance(source, DataLoader) and reads_as_torchs(type(source)):
            streams = isinstance(source.dataset, IterableDataset)
            if not streams:
                _expect_length(source)
                self.sampler = ShardedSampler(
                    source.sampler if source.batch_sampler is None else source.batch_sampler,
                    keys=source.batch_sampler is None,
                    rank=rank,
                    world_size=world_size,
                    seed=seed,
                    shuffle=shuffle,
                    even=even,
                    split=split,
                    drop_last=drop_last,
                    counts=source.collate_fn is default_collate,
                )
            elif source.persistent_workers:
                say_workers_end(type(source.dataset).__name__)
            self.loader = LastingLoader(**loader_kwargs(source, self.sampler, self._generator))
        self._stream: Stream | None = None
        if self.sampler is None:
            self._stream = Stream(
                source,
                self.loader,
                self._generator,
                set_epoch=self.set_epoch,
                remember=remember,
                rereads=rereads,
                shown=rank == 0,
            )
        self._alike = alike(self.users_generators)

    @property
    def dataset(self) -> Any:
        """The user's dataset, not a wrapper of it; None if there is none."""
        return getattr(self._source, "dataset", None)

    @property
    def reads_once(self) -> bool:
        """Whether the source is an iterator without a beginning, as a generator is.

        One of the user's own classes may begin anew where it is iterated again.
        """
        kind = type(self._source)
        pythons = kind.__module__ in ("builtins", "itertools")
        return issubclass(kind, Generator) or (pythons and issubclass(kind, Iterator))

    @property
    def even(self) -> bool:
        """Whether every process gets the same number of full batches; see `ShardedSampler`."""
        return self._even

    @even.setter
    def even(self, even: bool) -> None:
        self._even = even
        if self.sampler is not None:
            self.sampler.even = even

    @property
    def num_batches(self) -> int | None:
        """The number of batches in the epoch over all processes; None if unknown until read."""
        limits = [each for each in (self.length_now.batches, self._most) if each is not None]
        return min(limits, default=None)

    @property
    def length_now(self) -> EpochLength:
        """How much data the epoch has: when it began, if it is resumed, and else now."""
        if self._resumed_length != EpochLength():
            return self._resumed_length
        if self.sampler is not None:
            return self.sampler.length
        return EpochLength(None, self.num_all_batches)

    def resume_length(self, epoch: int, length: EpochLength | None) -> None:
        """Read an epoch as when it began; None reads it with the data that there are."""
        self.resumed = None if length is None else (epoch, length)
        if self.sampler is not None:
            self.sampler.take_length(self._resumed_length.samples)

    @property
    def _resumed_length(self) -> EpochLength:
        epoch, length = self.resumed or (None, EpochLength())
        return length if epoch == self.epoch else EpochLength()

    @property
    def _most(self) -> int | None:
        """The limit as a number of batches."""
        if not isinstance(self.limit, float):
            return self.limit
        total = self.length_now.batches
        assert total is not None  # `apply_limit` refuses a fraction of what is unknown
        return math.floor(round(total * self.limit, 6))  # 100 * 0.29 is a little less than 29

    @property
    def num_all_batches(self) -> int | None:
        """The number of batches in the epoch without a limit; None if unknown."""
        source: Any = self.loader if self.sampler is None else self.sampler.batch_sampler
        try:
            return len(source)
        except (TypeError, NotImplementedError, ValueError, RuntimeError):
            return None  # ways in which loaders report that they have none yet

    @property
    def num_samples(self) -> int | None:
        """The number of samples in the epoch without a limit; None if unknown."""
        known = None if self.sampler is None else self.sampler.num_samples
        if known is None and hasattr(self.dataset, "__len__"):
            known = len(self.dataset)
        return known

    @property
    def num_rounds(self) -> int | None:
        """The number of rounds in the epoch; None if unknown until read."""
        total = self.num_batches
        return None if total is None else -(-total // self.world_size)

    @property
    def num_own_batches(self) -> int | None:
        """The number of batches of this process in the epoch; None if unknown until read."""
        total = self.num_batches
        if total is None:
            return None
        if self.sampler is not None:
            return self.sampler.own_batches(total)
        samples = self.num_samples if self.split else None
        return self._dealing().own_batches(total, samples, rank=self.rank)

    def _dealing(self) -> Dealing:
        return Dealing(
            kind=SAMPLES,
            batch_size=getattr(self.loader, "batch_size", None),
            world_size=self.world_size,
            even=self.even,
            split=self.split,
            drop_last=self.drop_last,
        )

    @contextmanager
    def apart(self, epoch: int) -> Iterator[None]:
        """Choose an epoch for the block, then restore generators that another pass may use."""
        with set_aside(self.users_generators):
            self.set_epoch(epoch)
            yield

    @property
    def users_generators(self) -> Found:
        """The generators to seed per epoch; a map-style dataset's own are seeded per batch."""
        if self.sampler is not None or knows_where_it_is(self._source):
            return of_samplers(self._source)
        return held_by(loader=self._source)

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch that is read next."""
        self.epoch = epoch
        self._generator.manual_seed(mix(self.seed, epoch, 1))
        # Otherwise their states would decide, which no checkpoint holds.
        seed_all(self.users_generators, mix(self.seed, epoch, 3), self._alike)
        if self.sampler is not None:
            self.sampler.take_length(self._resumed_length.samples)
            self.sampler.set_epoch(epoch)
        if hasattr(self.loader, "set_epoch"):
            self.loader.set_epoch(epoch)
        tell_epoch(getattr(self.loader, "dataset", None), self.seed, epoch)

    def position(self) -> dict[str, Any] | None:
        """Return the position in a stream after the rounds handed over, as a tree to be saved.

        It is the same on all processes. It is None if none is needed: in a map-style dataset the
        number of batches is enough.
        """
        return None if self._stream is None else self._stream.position()

    def resume_at(self, position: dict[str, Any] | None) -> None:
        """Resume from what `position` returned, in the epoch that is read next.

        `start_batch` must agree with it; if `position` cannot be used, the stream is read again and
        that many batches are discarded.

        Raises:
            CheckpointError: Another number of workers read the stream inside the epoch.
        """
        if self._stream is not None:
            self._stream.resume_at(position)

    @property
    def mark(self) -> int | None:
        """A checksum of the current pass's order; None if there is none.

        If it is set before a pass resumes inside an epoch, a different order is logged.
        """
        rest = None if self.sampler is None else self.sampler.rest
        return self._mark if rest is None else rest.mark

    @mark.setter
    def mark(self, mark: int | None) -> None:
        self._mark = mark

    def _tell_of_another_order(self) -> None:
        """Warn if the order does not match the `mark` that was set."""
        before, self._mark = self._mark, None
        if self.rank > 0 or not self.start_batch or before in (None, self.mark):
            return
        batches = self._source.batch_sampler
        plain = batches is None or type(batches) is BatchSampler
        logger.warning(
            "The order of epoch %d differs from before the resume: some samples will be read twice "
            "in it, and others not at all. If the loader is unchanged, its %s keeps state between "
            "epochs, such as a list that it shuffles again: let each epoch's order depend on the "
            "global generators, or on set_epoch.",
            self.epoch,
            type(self._source.sampler if plain else batches).__name__,
        )

    def close(self) -> None:
        """End persistent workers."""
        if isinstance(self.loader, DataLoader):
            self.loader._iterator = None

    def _end_workers_of(self, batches: Iterator[Any]) -> None:
        """End workers at once, since an error keeps the iterator alive until garbage collection.

        That might collect first the queues through which torch ends the workers, which would then
        stay until this process ends.
        """
        if hasattr(batches, "_shutdown_workers"):
            end_workers([batches])
            self.close()

    def another(self) -> Feed:
        """Return a second, independent reader of the same data within the same limits.

        It is for map-style data: a stream's position is part of its state.
        """
        twin = Feed(
            self._source,
            rank=self.rank,
            world_size=self.world_size,
            seed=self.seed,
            shuffle=self._shuffle,
            even=self.even,
            split=self.split,
            drop_last=self.drop_last,
        )
        twin.limit = self.limit
        return twin

    def reseed(self, seed: int) -> None:
        """Take the seed of the run that is resumed."""
        self.seed = seed = mix(seed, self._place) if self._place else seed
        if self.sampler is not None:
            self.sampler.reseed(seed)

    def rounds(self, transfer: Transfer | None = None) -> Generator[Round, None, None]:
        """Yield the epoch's rounds, each with `Round.last` set.

        Args:
            transfer: Puts a batch on the device; called one batch ahead of its use.
        """
        for current, following in ahead(self.read(transfer)):
            current.last = following is None
            if current.place is not None:
                self.used(current.place, last=current.last)
            yield current

    def used(self, place: Place, *, last: bool) -> None:
        """Note that the run has used a stream up to a place; see `Stream.used`."""
        if self._stream is not None:
            self._stream.used(place, last=last)

    def share_stream(self, other: Feed) -> None:
        """Read the stream of another feed of the same loader from the position that it is in."""
        self._stream, self._generator, self.loader = other._stream, other._generator, other.loader

    def read(self, transfer: Transfer | None = None) -> Iterator[Round]:
        """Yield the epoch's rounds, each as soon as it has been read, without `Round.last`."""
        self.length = self.length_now
        if self.sampler is None:
            yield from self._read_stream(transfer)
            return
        self.sampler.start_round, self.sampler.start_batch = self.start_round, self.start_batch
        self.sampler.limit, total = self._most, self.num_batches
        shares = self.sampler.shares = deque()  # this pass's: another may begin before it ends
        batches = iter(batches_of(self.loader))
        read = 0
        try:
            for batch in batches:
                read += 1
                if self._mark is not None:
                    self._tell_of_another_order()
                share = shares.popleft()
                self.batches_read = share.batches
                moved = batch if transfer is None else transfer(batch)
                yield own_round(moved, share, batch)
        except (Exception, KeyboardInterrupt):
            self._end_workers_of(batches)
            raise
        if not getattr(self.loader, "persistent_workers", False):
            self._end_workers_of(batches)  # a dataset may have ended the epoch by StopIteration
        if self.world_size > 1:
            yield from absent_rounds(shares, self._rounds_left(total, read))
        elif shares:
            logger.warning(
                "The dataset (%s) ended epoch %d by StopIteration after %d of %s batches. If that "
                "is not intended, make its __len__ return the number of samples.",
                type(self._source.dataset).__name__,
                self.epoch,
                read,
                "an unknown number of" if total is None else total,
            )

    def _rounds_left(self, total: int | None, read: int) -> int | None:
        """Return how many rounds a pass of `total` batches has after `read`; None if unknown."""
        if total is None:
            return None
        batches, rest = divmod(total - self.start_batch, 1 if self.split else self.world_size)
        return batches + (rest > 0 and not self.drop_last) - self.start_round - read

    def _read_stream(self, transfer: Transfer | None) -> Iterator[Round]:
        assert self._stream is not None
        skip, rounds_again = self.start_batch, self.start_round
        batches_again = self.start_round * (1 if self.split else self.world_size)
        if not self.even:  # or else the first round is needed, to fill the last one
            skip, rounds_again = skip + batches_again, 0
        elif rounds_again and self.rank == 0:
            self._stream.say_what_it_costs(batches_again)
        stream = self._stream.read(self.seed, self.epoch, skip=skip, limit=self._most)
        if self.world_size > 1:
            stream = refuse_different(stream)
        rounds = self._dealing().rounds(stream)
        for batches, real, place in islice(rounds, rounds_again, None):
            sizes = [SAMPLES.count(batch) for batch in batches]
            known = sum(sizes), real, len(batches)
            self.batches_read = len(batches)
            if self.rank < len(batches):
                batch = batches[self.rank]
                batch = batch if transfer is None else transfer(batch)
                yield Round(True, batch, sizes[self.rank], *known, place=place)
            else:
                yield Round(False, None, 0, *known, place=place)
