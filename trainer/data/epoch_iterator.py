"""Iterating over an epoch: sharded over the processes, and read one batch ahead.

An epoch is a sequence of global batches. Each process has one batch of a global batch, or none if
too few are left (`GlobalBatch`). `EpochIterator` yields them.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any, TypeVar

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    default_collate,
)

from trainer.data.iterable import (
    Position,
    Stream,
    check_same_stream,
    has_stream_state,
)
from trainer.data.libraries import (
    samples_mark,
    seed_shuffles,
    set_epoch_of_shuffles,
    user_shard,
)
from trainer.data.sampler import (
    SAMPLES,
    WHOLE,
    DataShard,
    EpochLength,
    RankShard,
    ShardedSampler,
    length_of,
)
from trainer.data.seeding import (
    NamedGenerators,
    generators_in,
    group_equal,
    isolated_generators,
    sampler_generators,
    seed_all,
    set_epoch_of,
)
from trainer.data.workers import (
    SignalSafeLoader,
    batches_of,
    end_workers,
    has_torch_iteration,
    loader_kwargs,
)
from trainer.distributed.guards import all_gather_ints
from trainer.distributed.objects import all_gather_object
from trainer.errors import CheckpointError, module_logger
from trainer.rng import mix
from trainer.tree import count_samples

logger = module_logger(__name__)

T = TypeVar("T")
Transfer = Callable[[Any], Any]


@dataclass(slots=True)
class GlobalBatch:
    """One global batch, as this process sees it.

    Attributes:
        present: Whether this process has a batch.
        batch: This process's batch, on the device. If it has none, `trainer.loops.device_transfer`
            puts a dummy batch here, and it is None before.
        samples: The number of samples in this process's batch.
        global_samples: The number of samples in the global batch; None if only a reduction over the
            processes could tell.
        real_samples: The number of samples in the global batch without padding; None if unknown.
        batches: The number of processes with a batch.
        first: The lowest rank with a batch.
        last: Whether this is the last global batch of the epoch.
        next_missing: Whether this process has no batch in the next global batch.
        ended: Whether this process should have a batch, but its dataset has ended the epoch early
            by raising ``StopIteration``.
        position: The position of a stream after this global batch; None for a map-style dataset.
        real_batches: See `RankShard`; None for a stream, which has `real_samples` instead.
    """

    present: bool
    batch: Any
    samples: int
    global_samples: int | None
    real_samples: int | None
    batches: int
    first: int = 0
    last: bool = False
    next_missing: bool = False
    ended: bool = False
    position: Position | None = None
    real_batches: int | None = None


def absent_batches(
    shares: Sequence[RankShard], remaining: int | None
) -> Generator[GlobalBatch, None, None]:
    """Yield the global batches after this process's last batch, in which it has no batch.

    There is at most one, unless this process's dataset has ended the epoch early. Then there are as
    many as the other processes still have, because they would otherwise wait for this process.

    Args:
        shares: This rank's shards of the global batches that were requested but not read; workers
            prefetch, so there may be several.
        remaining: The number of global batches left in the epoch; None if unknown.
    """
    ended = any(share.present for share in shares)
    absent = list(shares)
    if ended and remaining is not None:
        absent += [shares[-1]] * (remaining - len(shares))
    for share in absent:
        counts = share.global_samples, share.real_samples, share.batches
        yield GlobalBatch(False, None, 0, *counts, ended=ended)


def _ignore(number: int | None) -> None:
    """Do nothing."""


def lookahead(
    items: Iterable[T], reads: Callable[[int | None], None] = _ignore
) -> Generator[tuple[T, T | None], None, None]:
    """Yield each item together with the next one, which is None after the last item.

    If prefetching the next item raises an error, the current item is yielded first, with itself as
    the next one, so that it does not look like the last.

    Args:
        items: The items.
        reads: Called with the number of an item before it is read or its error is raised, and with
            None after it is read.
    """
    iterator, number = iter(items), 0
    reads(0)
    current = next(iterator, None)
    while current is not None:
        number += 1
        reads(number)
        try:
            following = next(iterator, None)
        except Exception:
            reads(None)
            yield current, current
            reads(number)
            raise
        reads(None)
        yield current, following
        current = following
    reads(None)


class EpochIterator:
    """Epoch iterator: yields a loader's global batches, sharded over the processes.

    A loader of a map-style dataset is rebuilt around a `ShardedSampler`. A stream (a loader of an
    ``IterableDataset``, or any iterable of batches) is read in full by every process, and each
    process keeps its own batches. This is exact for streams of any length, but N processes read
    all data N times.

    Args:
        source: A ``DataLoader`` or an iterable of batches.
        shard: Which part of the data this process reads.
        seed: The run's seed. The order of samples is a function of the seed and the epoch.
        loader_id: Identifies the loader in the run; 0 is the training loader. It is mixed into the
            seed, so that each loader has its own random numbers.
        shuffle: See `ShardedSampler`.
        remember: The caller saves `position`. A stream with a ``state_dict`` is then read together
            with its state; see `trainer.data.iterable`.
        rereads: The caller may restart a pass of a stream from its beginning after reading part of
            it.

    Attributes:
        limit: The number of batches, over all processes, after which an epoch ends; a float is a
            fraction of all batches, and None means no limit.
        limited_by: The user's argument that sets `limit`, for messages.
        length: The amount of data when the latest pass began; it holds for that whole pass.
        resumed: The epoch to resume, and its amount of data; see `resume_length`.
        batches_read: The number of processes with a batch in the global batch being read.
        reading: The number of the global batch that is being read, or failed to be read, counted
            from the beginning of the pass; None while none is read.
        dummy_batch: The batch that this process runs when it has none; see
            `trainer.engines.lockstep`.
        weighted_by_samples: Whether losses or metrics are weighted by the samples of a batch, and
            no warning about an ambiguous number has been logged yet; None until known.

    Raises:
        TypeError: The source cannot be iterated.
        ValueError: The source is sharded already.
    """

    def __init__(
        self,
        source: Any,
        shard: DataShard = WHOLE,
        *,
        seed: int = 0,
        loader_id: int = 0,
        shuffle: bool = True,
        remember: bool = False,
        rereads: bool = False,
    ) -> None:
        if not isinstance(source, Iterable):
            raise TypeError(
                f"A loader is {source!r} of type {type(source).__name__}; it must be a "
                "DataLoader, as in DataLoader(dataset, batch_size=32), or another iterable of "
                "batches. To pass several loaders together, subclass trainer.DataModule."
            )
        self._source: Any = source
        self._loader_id, seed = loader_id, mix(seed, loader_id) if loader_id else seed
        self.rank, self.world_size, self.seed = shard.rank, shard.world_size, seed
        self.epoch = 0
        self.start_global_batch = 0  # global batches to skip, with the current number of processes
        self.start_batch = 0  # loader batches to skip before sharding, with any number of processes
        self._mark: int | None = None
        self._shard, self._shuffle = shard, shuffle
        self.limited_by = ""
        self.batches_read = shard.world_size
        self.reading: int | None = None
        seed_shuffles(source, seed)
        self.dummy_batch: Any = None
        self.weighted_by_samples: bool | None = None
        self.sampler: ShardedSampler | None = None
        self.loader: Any = source
        self.limit: int | float | None = None
        self.resumed: tuple[int, EpochLength] | None = None
        self.length = EpochLength()
        self._generator = torch.Generator()
        if getattr(source, "_is_accelerate_prepared", False) and shard.world_size > 1:
            raise ValueError(
                "The loader was prepared by an Accelerator and is already sharded; pass the "
                "original loader, the argument of prepare()."
            )
        # A DataLoader subclass that overrides iteration is read as a stream.
        if isinstance(source, DataLoader) and has_torch_iteration(type(source)):
            if not isinstance(source.dataset, IterableDataset):
                self.sampler = ShardedSampler(
                    source.sampler if source.batch_sampler is None else source.batch_sampler,
                    shard,
                    keys=source.batch_sampler is None,
                    seed=seed,
                    shuffle=shuffle,
                    counts=source.collate_fn is default_collate,
                )
            self.loader = SignalSafeLoader(**loader_kwargs(source, self.sampler, self._generator))
        self._stream: Stream | None = None
        self._part = None if self.sampler is not None or shard.presharded else user_shard(source)
        self.presharded = (
            self.sampler is None
            and shard.world_size > 1
            and (shard.presharded or self._part is not None)
        )
        self._own_position: dict[str, Any] | None = None  # in a presharded stream, see `position`
        self._resumed_position: dict[str, Any] | None = None  # where the next pass continues
        self._first_batch = 0  # this process's batches before the first one of the pass
        if self.sampler is not None:
            self.sharding = self.sampler.sharding
        else:
            self.sharding = shard.sharding_of(SAMPLES, getattr(self.loader, "batch_size", None))
            self._stream = Stream(
                source,
                self.loader,
                self._generator,
                set_epoch=self.set_epoch,
                remember=remember,
                rereads=rereads,
                shown=shard.rank == 0,
            )
        self._equal_generators = group_equal(self.users_generators)

    @property
    def dataset(self) -> Any:
        """The user's dataset, unwrapped; None if the source has none."""
        return getattr(self._source, "dataset", None)

    @property
    def samples_mark(self) -> list[int]:
        """Numbers that differ if processes are known to hold different samples."""
        return [] if self.sampler is None else samples_mark(self.dataset)

    @property
    def reads_once(self) -> bool:
        """Whether the source is a one-shot iterator, such as a generator.

        Iterators of user classes do not count: they may restart when iterated again.
        """
        kind = type(self._source)
        is_builtin = kind.__module__ in ("builtins", "itertools", "torch.utils.data.dataloader")
        return issubclass(kind, Generator) or (is_builtin and issubclass(kind, Iterator))

    @property
    def num_batches(self) -> int | None:
        """The number of batches in the epoch, over all processes; None if unknown until read."""
        limits = [n for n in (self.length_now.batches, self._max_batches) if n is not None]
        return min(limits, default=None)

    @property
    def length_now(self) -> EpochLength:
        """The amount of data in the epoch: the saved one for a resumed epoch, else the current."""
        if self._resumed_length != EpochLength():
            return self._resumed_length
        if self.sampler is not None:
            return self.sampler.length
        return EpochLength(None, self.num_all_batches)

    def resume_length(self, epoch: int, length: EpochLength | None) -> None:
        """Set the amount of data with which an epoch began, for a resume inside it.

        The dataset may have grown or shrunk since.

        Args:
            epoch: The epoch to resume.
            length: Its amount of data; None uses the current amount.
        """
        self.resumed = None if length is None else (epoch, length)
        if self.sampler is not None:
            self.sampler.take_length(self._resumed_length.samples)

    @property
    def _resumed_length(self) -> EpochLength:
        epoch, length = self.resumed or (None, EpochLength())
        return length if epoch == self.epoch else EpochLength()

    @property
    def _max_batches(self) -> int | None:
        """The limit as a number of batches; None if there is no limit."""
        if not isinstance(self.limit, float):
            return self.limit
        total = self.length_now.batches
        assert total is not None  # `apply_limit` refuses a fraction of an unknown number
        return math.floor(round(total * self.limit, 6))  # in floats, 100 * 0.29 is below 29

    @property
    def num_all_batches(self) -> int | None:
        """The number of batches in the epoch without a limit; None if unknown."""
        if self.presharded:  # the other processes may have more or fewer than this one
            return None
        return length_of(self.loader if self.sampler is None else self.sampler.batch_sampler)

    @property
    def num_samples(self) -> int | None:
        """The number of samples in the epoch without a limit; None if unknown."""
        samples = None if self.sampler is None else self.sampler.num_samples
        return length_of(self.dataset) if samples is None else samples

    @property
    def num_global_batches(self) -> int | None:
        """The number of global batches in the epoch; None if unknown until read."""
        total = self.num_batches
        return None if total is None else -(-total // self.world_size)

    @property
    def num_own_batches(self) -> int | None:
        """The number of batches of this process in the epoch; None if unknown until read."""
        total = self.num_batches
        if total is None:
            return None
        samples = None
        if self.sharding.split:
            samples = self.num_samples if self.sampler is None else self.sampler.num_samples
        return self.sharding.own_batches(total, samples, rank=self.rank)

    def state_dict(self) -> dict[str, Any]:
        """Return the state that makes positions in the epoch comparable: data, order and length.

        The data are [batch size, samples, batches], each None where unknown. The number of batches,
        which may change with the epoch, is given only for a batch sampler without a fixed batch
        size.
        """
        return {"data": self._data(), "order": self.mark, "length": list(self.length)}

    def _data(self) -> list[int | None]:
        if self.sampler is None:
            size = getattr(self.loader, "batch_size", None)
            return [size if isinstance(size, int) else None, None, None]
        data, size = self.dataset, self.sampler.batch_size
        samples = len(data) if hasattr(data, "__len__") else None
        return [size, samples, self.num_all_batches if size is None else None]

    def resume_epoch(self, epoch: int, state: Mapping[str, Any]) -> None:
        """Continue an epoch with the order and the length that it had when it began.

        Args:
            epoch: The epoch.
            state: The `state_dict` saved inside this epoch.

        Raises:
            CheckpointError: The batch size, the number of samples or the number of batches differs
                from the saved one: samples would be skipped or seen twice.
        """
        if state["data"] is None:  # unknown for checkpoints of other libraries
            return
        self.mark = state.get("order")  # missing in checkpoints of earlier releases
        if "length" in state:  # missing in checkpoints of earlier releases
            self.resume_length(epoch, EpochLength(*state["length"]))
        saved = [*state["data"], None][:3]  # an earlier release did not save the number of batches
        with self.isolated_epoch(epoch):  # the length of the data may depend on the epoch
            here = self._data()
            if None in (saved[2], here[2]):
                here[2] = saved[2]
            elif here != saved and self.sampler is not None:
                next(iter(self.sampler), None)  # it may count its batches when iteration starts
                here = self._data()
        both_streams = saved[1] is here[1] is None
        if here == saved or (both_streams and here[2] == saved[2] and None in (saved[0], here[0])):
            return
        raise CheckpointError(
            f"The checkpoint was saved inside an epoch in {_describe(saved)}, but the training "
            f"loader now has {_describe(here)}. Use the same loader (the number of processes may "
            "differ), or resume from a checkpoint at the end of an epoch. Data that change "
            "during the run are part of its state: save and load them in on_save_checkpoint and "
            "on_load_checkpoint, or in a DataModule's state_dict and load_state_dict."
        )

    @contextmanager
    def isolated_epoch(self, epoch: int) -> Iterator[None]:
        """Set the epoch inside the block, then restore the user's generators.

        Another pass may be using these generators.
        """
        with isolated_generators(self.users_generators):
            self.set_epoch(epoch)
            yield

    @property
    def users_generators(self) -> NamedGenerators:
        """The user's generators that are seeded once per epoch.

        Generators of a map-style dataset are not among them: they are seeded for each batch.
        """
        if self.sampler is not None or has_stream_state(self._source):
            return sampler_generators(self._source)
        return generators_in(loader=self._source)

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch that is read next, and seed the order and the user's generators for it."""
        self.epoch = epoch
        self._generator.manual_seed(mix(self.seed, epoch, 1))
        # Otherwise the order would depend on the generators' states, which no checkpoint holds.
        seed_all(self.users_generators, mix(self.seed, epoch, 3), self._equal_generators)
        if self.sampler is not None:
            self.sampler.take_length(self._resumed_length.samples)
            self.sampler.set_epoch(epoch)
        set_epoch_of(self.loader, self.seed, epoch)
        set_epoch_of(getattr(self.loader, "dataset", None), self.seed, epoch)
        set_epoch_of_shuffles(self._source, epoch)

    def position(self) -> dict[str, Any] | None:
        """Return the position in a stream after the global batches used so far, for a checkpoint.

        The position is the same on all processes, except in a presharded stream, where it also says
        how many batches of the epoch this process has had. It is None for a map-style dataset,
        where the number of batches is enough to resume.
        """
        position = None if self._stream is None else self._stream.position()
        return (
            position if self._own_position is None else {**self._own_position, "stream": position}
        )

    def resume_at(self, position: dict[str, Any] | None) -> None:
        """Start the next pass at a position that `position` returned.

        `start_batch` must be the number of batches before that position. If the position cannot be
        used, the stream is read from its beginning and that many batches are discarded.

        Args:
            position: The saved position, or None.

        Raises:
            CheckpointError: The position is inside an epoch that a different number of workers
                read, or of presharded streams on a different number of processes.
        """
        if self._stream is None:
            return
        self._own_position = self._resumed_position = None
        if position is not None and "parts" in position:
            parts = self.world_size if self.presharded else None
            if position["parts"] != parts and not position["over"]:
                raise CheckpointError(
                    "The checkpoint was saved inside an epoch of streams that were split over "
                    f"{position['parts']} processes, each with a different part. Resume on the "
                    "same number of processes with the same parts, or from a checkpoint at the "
                    "end of an epoch."
                )
            self._own_position = self._resumed_position = position if parts else None
            position = position["stream"]
        self._stream.resume_at(position)

    @property
    def mark(self) -> int | None:
        """A checksum of the current pass's order of samples; None if there is none.

        Set it to the saved value before resuming inside an epoch: a different order then gives a
        warning.
        """
        rest = None if self.sampler is None else self.sampler.rest
        return self._mark if rest is None else rest.mark

    @mark.setter
    def mark(self, mark: int | None) -> None:
        self._mark = mark

    def _warn_of_changed_order(self) -> None:
        """Warn if the checksum of the order does not match the `mark` that was set."""
        before, self._mark = self._mark, None
        if self.rank > 0 or not self.start_batch or before in (None, self.mark):
            return
        orders = self.sampler.orders if self.sampler is not None else []
        names = [type(o.sampler if type(o) is BatchSampler else o).__name__ for o in orders]
        logger.warning(
            "The order of epoch %d differs from before the resume: in that epoch some samples "
            "are read twice and others not at all. Make the order of its %s depend on the global "
            "generators or on set_epoch, not on state that it keeps between epochs.",
            self.epoch + 1,  # as progress bars print it
            " or ".join(dict.fromkeys(names)),
        )

    def check_same_order(self) -> None:
        """Check that the user's own sampler gives all processes the same order; collective.

        Call it after the first batch of a pass has been read.

        Raises:
            ValueError: The orders differ, so samples would be missed or read twice.
        """
        if self.sampler is None or self.sampler.is_pure:
            return
        marks = all_gather_object(self.mark)
        if differing := [str(rank) for rank, mark in enumerate(marks) if mark != marks[0]]:
            raise ValueError(
                f"The sampler ({type(self.sampler.sampler).__name__}) gives rank "
                f"{', '.join(differing)} a different order than rank 0. Each process reads its "
                "share of one common order: seed the sampler the same on all. If it splits the "
                "data by rank, make it yield the whole order, or read the data through an "
                "IterableDataset with DataLoaderConfiguration(presharded=True)."
            )

    def close(self) -> None:
        """Shut down persistent workers."""
        if isinstance(self.loader, DataLoader):
            self.loader._iterator = None

    def _end_workers_of(self, batches: Iterator[Any]) -> None:
        """Shut down an iterator's workers immediately, without waiting for garbage collection.

        An error keeps the iterator alive until the garbage collector runs. The collector may free
        the queues that torch uses for the shutdown first; the workers would then stay alive until
        this process exits.
        """
        if hasattr(batches, "_shutdown_workers"):
            end_workers([batches])
            self.close()

    def independent_copy(self) -> EpochIterator:
        """Return a second, independent epoch iterator over the same data with the same limit.

        It works only for map-style datasets, because the position of a stream is part of its state.
        """
        duplicate = EpochIterator(self._source, self._shard, seed=self.seed, shuffle=self._shuffle)
        duplicate.limit = self.limit
        return duplicate

    def reseed(self, seed: int) -> None:
        """Use the seed of the run that is resumed."""
        self.seed = seed = mix(seed, self._loader_id) if self._loader_id else seed
        if self.sampler is not None:
            self.sampler.reseed(seed)

    def global_batches(
        self, transfer: Transfer | None = None
    ) -> Generator[GlobalBatch, None, None]:
        """Yield the epoch's global batches, each with `GlobalBatch.last` set; prefetches one batch.

        Args:
            transfer: Moves a batch to the device; called one batch ahead of its use.
        """
        for current, following in lookahead(self.read(transfer), partial(setattr, self, "reading")):
            current.last = following is None
            current.next_missing = following is not None and not following.present
            ended = self.presharded and not current.present
            self.used(current.position, last=current.last or ended)
            if self.presharded:
                self._own_position = {
                    "parts": self.world_size,
                    "epoch": self.epoch,
                    "batches": current.position.batches if current.position else self._first_batch,
                    "ended": ended,
                    "over": current.last,
                }
            yield current

    def used(self, position: Position | None, *, last: bool) -> None:
        """Record that the run has used a stream's batches up to a position; see `Stream.used`."""
        if self._stream is not None and position is not None:
            self._stream.used(position, last=last)

    def leave(self) -> None:
        """End the epoch before its last batch; a stream restarts in the next epoch."""
        if self._stream is not None:
            self._stream.leave()

    def share_stream(self, other: EpochIterator) -> None:
        """Use the stream of another epoch iterator of the same loader, at its current position."""
        self._stream, self._generator, self.loader = other._stream, other._generator, other.loader

    def read(self, transfer: Transfer | None = None) -> Iterator[GlobalBatch]:
        """Yield the epoch's global batches without prefetching: `GlobalBatch.last` is not set."""
        self.length = self.length_now
        if self.sampler is None:
            yield from self._read_stream(transfer)
            return
        self.sampler.start_global_batch = self.start_global_batch
        self.sampler.start_batch = self.start_batch
        self.sampler.limit, total = self._max_batches, self.num_batches
        shares = self.sampler.shares = deque()  # one deque per pass: two passes may overlap
        batches = iter(batches_of(self.loader))
        read = 0
        try:
            for batch in batches:
                read += 1
                if self._mark is not None:
                    self._warn_of_changed_order()
                share = shares.popleft()
                self.batches_read = share.batches
                samples = share.samples
                if samples is None:
                    samples = self._samples_in(batch, share.indices)
                counts = share.global_samples, share.real_samples, share.batches
                moved = batch if transfer is None else transfer(batch)
                yield GlobalBatch(True, moved, samples, *counts, real_batches=share.real_batches)
        except (Exception, KeyboardInterrupt):
            self._end_workers_of(batches)
            raise
        if not getattr(self.loader, "persistent_workers", False):
            self._end_workers_of(batches)  # a dataset may have ended the epoch by StopIteration
        if self.world_size > 1:
            yield from absent_batches(shares, self._remaining_batches(total, read))
        elif shares:
            logger.warning(
                "The dataset (%s) raised StopIteration in epoch %d after %d of %s batches: is its "
                "__len__ too large?",
                type(self._source.dataset).__name__,
                self.epoch + 1,
                read,
                total,
            )

    def _samples_in(self, batch: Any, indices: int) -> int:
        """Count the samples in a batch from a user's ``collate_fn``; see `count_samples`.

        Args:
            batch: The batch.
            indices: The number of indices it was fetched for; 0 for a ready-made batch.
        """
        samples = count_samples(batch, indices or None)
        if samples is None:
            return 1
        if self.weighted_by_samples and samples < indices:
            self.weighted_by_samples = False
            logger.warning(
                "A batch of %d samples is counted as %d, the first dimension of its tensors. If "
                "that is not its number of samples, define count_items in the module: it weights "
                "losses and metrics.",
                indices,
                samples,
            )
        return samples

    def _remaining_batches(self, total: int | None, read: int) -> int | None:
        """Return how many global batches are left after `read` of them; None if unknown."""
        if total is None:
            return None
        per_round = 1 if self.sharding.split else self.world_size
        batches, rest = divmod(total - self.start_batch, per_round)
        return batches + (rest > 0 and not self.sharding.drop_last) - self.start_global_batch - read

    def _read_stream(self, transfer: Transfer | None) -> Iterator[GlobalBatch]:
        assert self._stream is not None
        if self.presharded:
            yield from self._read_presharded(self._stream, transfer)
            return
        skip, batches_to_skip = self.start_batch, self.start_global_batch
        batches_again = self.start_global_batch * (1 if self.sharding.split else self.world_size)
        if not self.sharding.even:  # else the first global batch is read, for padding
            skip, batches_to_skip = skip + batches_again, 0
        elif batches_to_skip and self.rank == 0:
            self._stream.warn_of_replay(batches_again)
        stream = self._stream.read(self.seed, self.epoch, skip=skip, limit=self._max_batches)
        if self.world_size > 1:
            stream = check_same_stream(stream)
        global_batches = self.sharding.global_batches(stream)
        for batches, real, position in islice(global_batches, batches_to_skip, None):
            sizes = [SAMPLES.count(batch) for batch in batches]
            counts = sum(sizes), real, len(batches)
            self.batches_read = len(batches)
            if self.rank < len(batches):
                batch = batches[self.rank]
                batch = batch if transfer is None else transfer(batch)
                yield GlobalBatch(True, batch, sizes[self.rank], *counts, position=position)
            else:
                yield GlobalBatch(False, None, 0, *counts, position=position)

    def check_presharded(self) -> None:
        """Check that all processes read the whole data, or each a different part; collective.

        Raises:
            ValueError: Only some processes read a part, or two read the same part.
        """
        ranks = all_gather_object((self.presharded, self._part))
        shards = [part for _, part in ranks if part is not None]
        alike = len({presharded for presharded, _ in ranks}) == 1
        sizes = {size for _, size in shards} | {len(set(shards))}
        if not alike or (shards and sizes != {self.world_size}):
            reads = ", ".join(
                f"rank {rank} reads {'all' if part is None else f'part {part[0]} of {part[1]}'}"
                for rank, (_, part) in enumerate(ranks)
            )
            raise ValueError(
                f"The processes' streams are not {self.world_size} parts of the data: {reads}. "
                f"Split them by rank and number of processes (here {self.world_size}; those that "
                "share a model's layers read the same part), or give all of them the whole "
                "stream. If this is intended, set DataLoaderConfiguration(presharded=True)."
            )

    @property
    def first_position(self) -> int:
        """The number of batches before the first one of a pass, as counted by the batch seeds."""
        if not self.presharded:
            return self.start_batch
        resumed = self._position_to_resume()
        return resumed["batches"] * self.world_size if resumed else 0

    def _position_to_resume(self) -> dict[str, Any] | None:
        """Return the position in a presharded stream where the next pass continues, or None."""
        resumed = self._resumed_position
        return (
            resumed if resumed and resumed["epoch"] == self.epoch and not resumed["over"] else None
        )

    def _read_presharded(self, stream: Stream, transfer: Transfer | None) -> Iterator[GlobalBatch]:
        """Yield the batches of a presharded stream until the streams of all processes have ended.

        The processes tell each other how many samples each has: one small exchange on the host for
        each global batch.
        """
        resumed, self._resumed_position = self._position_to_resume(), None
        if resumed is None and self.start_batch:
            raise CheckpointError(
                f"The run resumes after {self.start_batch} batches of an epoch in which all "
                "processes read the same stream, but now each reads a different one. Give all "
                "processes the same stream, or resume from a checkpoint at the end of an epoch."
            )
        max_batches = self._max_batches
        limit = None if max_batches is None else len(range(self.rank, max_batches, self.world_size))
        seed, skip = mix(self.seed, self.rank), resumed["batches"] if resumed else 0
        batches: Iterator[tuple[Any, Position | None]] = iter(())
        if resumed is None or not resumed["ended"]:
            batches = stream.read(seed, self.epoch, skip=skip, limit=limit)
        self._first_batch, position = skip, None
        while True:
            following = next(batches, None)
            batch, position = (None, position) if following is None else following
            samples = 0 if following is None else SAMPLES.count(batch)
            rows = all_gather_ints([self.rank, following is not None, samples])
            samples_of = {rank: rank_samples for rank, present, rank_samples in rows if present}
            if not samples_of:
                return
            self.batches_read = len(samples_of)
            if following is not None and transfer is not None:
                batch = transfer(batch)
            total, present = sum(samples_of.values()), following is not None
            counts = total, total, len(samples_of), min(samples_of)
            yield GlobalBatch(present, batch, samples, *counts, position=position)


def _describe(data: Sequence[int | None]) -> str:
    size, samples, batches = data
    words = f"batches of {size}" if batches is None else f"{batches} batches"
    return words if samples is None else f"{words} of {samples} samples"
