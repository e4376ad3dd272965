"""Prepared loaders that read on every process, as `Accelerator.prepare` returns them."""

from __future__ import annotations

import copy
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from trainer.data.epoch_iterator import EpochIterator, lookahead
from trainer.data.prefetch import Streams, send, streams_for
from trainer.data.sampler import DataShard, EpochLength
from trainer.data.seeding import order_generator
from trainer.data.shards import BatchSamplerShard, IterableDatasetShard
from trainer.data.workers import batching_kwargs, reading_kwargs
from trainer.distributed.objects import broadcast_object
from trainer.enums import RNGType
from trainer.rng import as_types, next_seed, synchronize_rng_states
from trainer.state import GradientState, PartialState
from trainer.tree import children, to_device
from trainer.xla import marker

if TYPE_CHECKING:
    from typing_extensions import Self

Slice = Callable[..., Any]  # see `DataLoaderDispatcher`
# (batch, last, over, real, real_batches): the batch; whether it is the last one of this process;
# whether it belongs to the last global batch; the number of samples in the global batch without
# padding, None if unknown; if that is unknown and some ranks have a batch that is only padding, the
# number of ranks, from rank 0 on, whose batch is not.
BatchWithFlags: TypeAlias = "tuple[Any, bool, bool, int | None, int | None]"


@dataclass(kw_only=True)
class LoaderSettings:
    """Which part of a loader a process reads, and how.

    Attributes:
        rank: The rank of this process.
        world_size: The number of processes.
        seed: The seed of the order; it must be the same on all processes.
        even_batches: Every process gets the same number of batches of the same size. The last
            global batch is padded with samples from the beginning of the epoch.
        device: The device for batches; None leaves them where they are.
        non_blocking: Copy to the device asynchronously, on a side stream; see
            `trainer.data.prefetch`.
        split_batches: Split each batch of the user's loader between the processes. If False, each
            process gets whole batches.
        rng_types: Generators that take rank 0's state when a pass begins; see `synchronized`.
        skip_batches: The number of this process's batches to skip at the beginning of each pass.
        stateful: After `load_state_dict`, the next pass continues after the last batch that was
            yielded before the save.
        part: The number of this process's part of the data, if the stream is only that part and is
            read as if by a single process; None if the stream or dataset has all data.
        slice_fn: See `DataLoaderDispatcher`.
    """

    rank: int
    world_size: int
    seed: int
    even_batches: bool
    device: torch.device | None
    non_blocking: bool
    split_batches: bool = False
    rng_types: Sequence[str | RNGType] | None = None
    skip_batches: int = 0
    stateful: bool = False
    part: int | None = None
    slice_fn: Slice | None = None

    def __post_init__(self) -> None:
        """Check the types of generators."""
        if self.rng_types is not None:
            self.rng_types = as_types(self.rng_types)


class PreparedLoader(DataLoader[Any]):
    """Base class of the prepared loaders: wraps the user's loader and yields this rank's batches.

    It is a ``DataLoader`` with the user's dataset and settings, so code that reads these attributes
    works. Subclasses read the data in `_batches`. A pass is one iteration over the loader.

    Args:
        source: The user's loader; it is not changed.
        settings: Which part this process reads, and how.

    Attributes:
        iteration: The number of the current or next pass, from 0; it determines the order. After a
            ``break``, it increases when the next pass begins.
        end_of_dataloader: Whether the current batch is the last one of this process.
        remainder: At the last batch, the number of samples in the last global batch without
            padding, or 0 if that batch is full. Before the last batch, and with ``drop_last``, -1.
    """

    _is_accelerate_prepared = True

    @classmethod
    def of(cls, source: DataLoader[Any], settings: LoaderSettings) -> Self:
        """Return a loader that reads a part of `source`."""
        loader = cls.__new__(cls)
        loader._set_up(source, settings)
        return loader

    def _set_up(self, source: DataLoader[Any], settings: LoaderSettings) -> None:
        self.settings = settings
        self.rank, self.world_size = settings.rank, settings.world_size
        self.device, self.non_blocking = settings.device, settings.non_blocking
        self.split_batches, self.skip_batches = settings.split_batches, settings.skip_batches
        self.iteration = 0
        self.end_of_dataloader = False
        self.remainder = -1
        self._real_batches: int | None = None  # at the last batch, see `BatchWithFlags`
        self._all_end = False  # whether the current batch belongs to the last global batch
        self._unfinished = False
        self._resume_at = 0  # batches, over all ranks, that the resumed pass has read already
        # Global batches read in the current pass. A list, because setting an attribute of a
        # DataLoader is slow.
        self._read_global_batches = [0]
        self._reader: PreparedLoader | None = (
            None  # the loader that reads the pass: this one, or a skipping copy
        )
        self._ended = False  # whether the latest pass was read to its last batch
        self._loaded = False  # whether the pass comes from a state dict and has not begun
        self._continues: PreparedLoader | None = None  # the loader whose pass this one continues
        self._set_source(source)
        DataLoader.__init__(
            self, **reading_kwargs(source), **batching_kwargs(source, self.epoch_iterator.sampler)
        )

    def _set_source(self, source: DataLoader[Any]) -> None:
        self.source = source
        batches = source.batch_sampler
        self._drops_last = bool(source.drop_last or getattr(batches, "drop_last", False))
        self.epoch_iterator = self._make_epoch_iterator(source)

    @abstractmethod
    def _make_epoch_iterator(self, source: DataLoader[Any]) -> EpochIterator:
        """Create the epoch iterator that reads the user's loader on this process."""

    @abstractmethod
    def _batches(self) -> Iterator[BatchWithFlags]:
        """Yield this process's batches, with the values that `BatchWithFlags` lists."""

    def __iter__(self) -> Any:
        """Yield the batches of this process."""
        self._synchronize()
        iteration = self.iteration + self._unfinished
        self._set_pass(iteration, unfinished=True)
        self._set_reader(self)
        self.epoch_iterator.set_epoch(self.iteration)
        for loader in self._continued_loaders():
            loader.epoch_iterator.length = self.epoch_iterator.length_now
        self.end_of_dataloader, self.remainder, self._real_batches = False, -1, None
        self._all_end = False
        resume_at = self._resume_at if self.settings.stateful else 0
        self.first_global_batch, self._resume_at = (
            self.skip_batches + resume_at // self._batches_per_step,
            0,
        )
        global_batches = self._read_global_batches = [self.first_global_batch]
        state = self.gradient_state
        state._add_dataloader(self)
        mark_step = marker(self.device)
        try:
            for batch, last, over, real, real_batches in self._batches():
                mark_step()
                global_batches[0] += 1
                if self._reader is None:  # a state was loaded meanwhile, but this pass continues
                    self._set_pass(iteration, unfinished=True)
                    self._set_reader(self)
                    self._resume_at, self.epoch_iterator.resumed = 0, None
                self.end_of_dataloader = last
                if over is not self._all_end:  # setting an attribute of a DataLoader is slow
                    self._all_end = over
                if real_batches is not self._real_batches:
                    self._real_batches = real_batches
                if last and real is not None and not self._drops_last:
                    self.remainder = 0 if real == self.total_batch_size else real
                self.__dict__["_batch"] = batch  # setting an attribute of a DataLoader is slow
                yield batch
            mark_step()
            self._set_pass(self.iteration + 1, unfinished=False)
        except GeneratorExit:  # the caller left its loop with break
            state._keep_end(self)
            for loader in self._continued_loaders():
                if loader._reader is self:
                    loader._ended = self.end_of_dataloader
            raise
        finally:
            self.__dict__["_batch"] = None
            self._set_reader(None)
            state._remove_dataloader(self)

    def _continued_loaders(self) -> Iterator[PreparedLoader]:
        """Yield this loader, then each loader whose pass it continues; see `skipping`."""
        loader: PreparedLoader | None = self
        while loader is not None:
            yield loader
            loader = loader._continues

    def _set_pass(self, iteration: int, *, unfinished: bool) -> None:
        for loader in self._continued_loaders():
            loader.iteration, loader._unfinished, loader._loaded = iteration, unfinished, False
            loader._ended = not unfinished
            if not unfinished:
                loader.epoch_iterator.resume_length(iteration, None)

    def _set_reader(self, reader: PreparedLoader | None) -> None:
        for loader in self._continued_loaders():
            if reader is not None or loader._reader is self:
                loader._reader = reader

    def _synchronize(self) -> None:
        generator = self.synchronized
        types = self.settings.rng_types or []
        if generator is None:
            types = [kind for kind in types if str(kind) != "generator"]
        synchronize_rng_states(types, generator)

    @property
    def synchronized(self) -> torch.Generator | None:
        """The generator for ``"generator"`` in `rng_types`: the sampler's or the stream's."""
        if isinstance(self.source.dataset, IterableDataset):
            return getattr(self.source.dataset, "generator", None)
        return order_generator(self.source)

    @property
    def _streams(self) -> Streams | None:
        """The CUDA streams for asynchronous copies; None if the compute stream copies batches."""
        if self.device is None or not self.non_blocking:
            return None
        return streams_for(torch.device(self.device))

    def _transfer(self, streams: Streams | None) -> Callable[[Any], Any] | None:
        """Return a function that moves a batch to the device, asynchronously with `streams`."""
        if self.device is None:
            return None
        move = partial(to_device, device=self.device, non_blocking=self.non_blocking)
        return move if streams is None else partial(send, move=move, streams=streams)

    @property
    def gradient_state(self) -> GradientState:
        """The state that tracks which loader is being read."""
        return GradientState()

    @property
    def even_batches(self) -> bool:
        """Whether every process gets the same number of batches; may be set between passes."""
        return bool(self.settings.even_batches)

    @even_batches.setter
    def even_batches(self, even: bool) -> None:
        self.settings.even_batches = even
        self.epoch_iterator.sharding.even = even and self.epoch_iterator.world_size > 1

    @property
    def total_batch_size(self) -> int | None:
        """The number of samples in a full global batch; None if batches have no fixed size."""
        size = self.source.batch_size
        if size is None:
            size = getattr(self.source.batch_sampler, "batch_size", None)
        return size if size is None or self.split_batches else size * self.world_size

    @property
    def _batch_sizes(self) -> frozenset[int]:
        """The numbers that could be the sample count of this process's current batch."""
        batch = self.__dict__.get("_batch")
        columns = [batch, *(value for _, value in children(batch) or ())]
        sizes = {len(column) for column in columns if isinstance(column, (list, tuple))}
        sizes |= {len(column) for column in columns if isinstance(column, Tensor) and column.ndim}
        nominal = self.total_batch_size
        return frozenset(sizes if nominal is None else sizes | {nominal // self.world_size})

    @property
    def total_dataset_length(self) -> int:
        """The number of samples in the dataset, over all processes."""
        return len(self.source.dataset)  # type: ignore[arg-type]  # a stream may have no length

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next pass, which determines its order; by default it counts up.

        The ``set_epoch`` of the sampler, the batch sampler and the dataset is called, if any.
        """
        if epoch != self.iteration:  # for the same epoch, a loaded pass continues
            self._resume_at, self.epoch_iterator.resumed = 0, None
        self.iteration = epoch
        self._unfinished = self._loaded = self._ended = False
        self.epoch_iterator.set_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint: the pass to read after a restart, and its position.

        Inside a pass, the state names that pass (which `skip_first_batches` can continue), the
        number of batches read, and the amount of data when it began. From the last batch on, or
        after a ``break``, it names the next pass. It also holds the seed, the stream's position,
        and whether a pass has just ended.
        """
        ended = self._ended if self._reader is None else self._reader.end_of_dataloader
        over = self._unfinished and (ended or self._reader is None)
        resumed = self.epoch_iterator.resumed and self.epoch_iterator.resumed[1]
        length = resumed if self._reader is None else self.epoch_iterator.length
        batches = self._resume_at
        if self._reader is not None:
            batches = self._reader._read_global_batches[0] * self._batches_per_step
        return {
            "iteration": self.iteration + over,
            "seed": self.settings.seed,
            "ended": int(ended),
            "length": None if over or length is None else list(length),
            "stream": self.epoch_iterator.position(),
            "batches": 0 if over else batches,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the pass, the position and the seed from a `state_dict`.

        Until an iterator that is already open reads on, `state_dict` returns the loaded values.

        Args:
            state: The saved state.

        Raises:
            ValueError: The loader is stateful, and the saved number of batches is not a whole
                number of batches for each process.
        """
        if self._reader is not None:
            self._reader._set_reader(None)
        self.settings.seed = state["seed"]
        self.epoch_iterator.reseed(state["seed"])
        self.set_epoch(state["iteration"])
        # States of an earlier release have neither "length" nor "batches".
        length = state.get("length")
        self.epoch_iterator.resume_length(
            self.iteration, None if length is None else EpochLength(*length)
        )
        self._resume_at = state.get("batches", 0)
        if self.settings.stateful and self._resume_at % self._batches_per_step:
            raise ValueError(
                f"The loader was saved after {self._resume_at} batches of a pass, which cannot be "
                f"divided evenly among {self.world_size} processes. Resume with another number of "
                "processes, or save at the end of a pass."
            )
        self._loaded, self._ended = True, bool(state.get("ended"))
        self.epoch_iterator.resume_at(state.get("stream"))

    @property
    def state_is_own(self) -> bool:
        """Whether the state belongs to this process only, and may differ between processes."""
        return self.settings.part is not None

    @property
    def _batches_per_step(self) -> int:
        """The number of the user's batches in a global batch."""
        return 1 if self.split_batches else self.world_size

    def get_sampler(self) -> Any:
        """Return the user's sampler."""
        batches = self.source.batch_sampler
        return getattr(batches, "sampler", batches) if batches is not None else self.source.sampler

    def set_sampler(self, sampler: Any) -> None:
        """Use another sampler from the next pass on.

        Raises:
            ValueError: The loader reads a stream, or its batch sampler has no ``sampler``.
        """
        batches = self.source.batch_sampler
        if isinstance(self.source.dataset, IterableDataset):
            raise ValueError("An iterable dataset has no sampler to replace; its order is fixed.")
        if batches is not None:
            if not hasattr(batches, "sampler"):
                raise ValueError(
                    f"A {type(batches).__name__} creates its batches without a sampler, so none "
                    "can be replaced; prepare a loader that yields the batches that you want."
                )
            batches = copy.copy(batches)
            batches.sampler = sampler
        batching = batching_kwargs(self.source, sampler if batches is None else batches)
        self._set_source(DataLoader(**reading_kwargs(self.source), **batching))
        self.epoch_iterator.set_epoch(self.iteration)
        # A DataLoader refuses to set this attribute again. The value is for inspection only: the
        # epoch iterator does the reading.
        self.__dict__["sampler" if batches is None else "batch_sampler"] = (
            self.epoch_iterator.sampler
        )

    def skipping(self, num_batches: int) -> PreparedLoader:
        """Return a copy of this loader that skips `num_batches` more batches of the same pass.

        Reading the copy counts as reading this loader's pass: this loader then continues with the
        next pass.

        Args:
            num_batches: The number of this process's batches to skip.
        """
        skip = self.skip_batches + num_batches
        skipped = type(self).of(self.source, replace(self.settings, skip_batches=skip))
        for name, value in vars(self).items():  # including attributes that a user's subclass added
            vars(skipped).setdefault(name, value)
        skipped.iteration = self.iteration
        # An unfinished pass keeps its amount of data, even if the dataset has grown since.
        length = (
            self.epoch_iterator.length
            if self._unfinished
            else self.epoch_iterator.resumed and self.epoch_iterator.resumed[1]
        )
        skipped.epoch_iterator.resume_length(self.iteration, length)
        if self.epoch_iterator.sampler is None:
            skipped.epoch_iterator.share_stream(self.epoch_iterator)
        skipped._continues, skipped._loaded, skipped._ended = self, self._loaded, self._ended
        if self._loaded and self._ended and num_batches and self.iteration:
            # A state that was saved at the last batch names the next pass, but a script may skip
            # all batches of the previous pass instead. Comparing num_batches with len(self) would
            # not decide it: the length differs between ranks, and with drop_last it depends on
            # the number of processes.
            skipped.iteration, skipped._loaded = self.iteration - 1, False
        return skipped

    def __len__(self) -> int:
        batches = self.epoch_iterator.num_own_batches
        if batches is None:
            raise TypeError("The loader reads a stream that has no length.")
        return max(0, batches - self.skip_batches)


def _source(
    dataset: Any, kwargs: dict[str, Any]
) -> tuple[BatchSamplerShard | IterableDatasetShard | None, DataLoader[Any]]:
    """Return the shard in a loader's arguments, and a loader of the whole data."""
    shard = kwargs.get("batch_sampler")
    if type(shard) is BatchSamplerShard:
        return shard, DataLoader(dataset, **kwargs | {"batch_sampler": shard.batch_sampler})
    if type(dataset) is IterableDatasetShard:
        options = {"batch_size": dataset.batch_size, "drop_last": dataset.drop_last}
        return dataset, DataLoader(dataset.dataset, **kwargs | options)
    return None, DataLoader(dataset, **kwargs)


def seed_of_order(
    generator: torch.Generator | None,
    world_size: int,
    rank: int,
    data_seed: int | None = None,
    *,
    collective: bool = False,
) -> int:
    """Return the seed of a loader's order: rank 0's, on all processes that share the data.

    Args:
        generator: Its initial seed is used; None takes the next seed of ``set_seed``.
        world_size: The number of processes that share the data.
        rank: The rank of this process among them.
        data_seed: The seed; it overrides the others.
        collective: Whether all running processes call this. If False, the call is collective only
            if all processes share the data, since otherwise only some may call it.
    """
    seed = next_seed(world_size, rank) if generator is None else generator.initial_seed()
    seed = seed if data_seed is None else data_seed
    collective |= world_size == PartialState().num_processes
    return int(broadcast_object(seed)) if collective else seed


class DataLoaderShard(PreparedLoader):
    """The loader that `Accelerator.prepare` returns: yields this rank's shard of the user's loader.

    Batches are on the device. One batch is prefetched, so ``end_of_dataloader`` is already True at
    the last batch. The order of a shuffling loader is a function of the seed and the pass number.
    It changes with every pass, and it is the same on all processes and for any number of processes.

    With N processes, process *i* gets batch *i* of every N batches. With `split_batches`, it gets
    the *i*-th part of every batch. A stream is read in full by every process, and each process
    keeps its own batches. With `even_batches`, the last global batch is padded with samples of the
    first one until every process has a full batch; ``gather_for_metrics`` drops the padding. With
    ``drop_last``, an incomplete last global batch is dropped.

    The constructor is for subclasses and for loaders built by hand; `prepare_data_loader` wraps an
    existing loader. The constructor itself shards nothing: pass a `BatchSamplerShard` as
    `batch_sampler`, or an `IterableDatasetShard` as `dataset`.

    Args:
        dataset: Any dataset that a ``DataLoader`` takes.
        device: The device for batches; None leaves them where they are.
        rng_types: Generators that take rank 0's state when a pass begins.
        synchronized_generator: Its initial seed is the seed of the order.
        skip_batches: The number of batches to skip at the beginning of each pass.
        use_stateful_dataloader: See `DataLoaderConfiguration`.
        _drop_last: Whether the last global batch has no padding to drop.
        _non_blocking: Copy to the device asynchronously.
        torch_device_mesh: Not used: the shard determines which processes share data.
        iteration: The number of the first pass.
        **kwargs: Arguments of the ``DataLoader``.
    """

    def __init__(
        self,
        dataset: Any,
        device: torch.device | None = None,
        rng_types: Sequence[str] | None = None,
        synchronized_generator: torch.Generator | None = None,
        skip_batches: int = 0,
        use_stateful_dataloader: bool = False,
        _drop_last: bool = False,
        _non_blocking: bool = False,
        torch_device_mesh: Any = None,  # noqa: ARG002 - of the documented API
        iteration: int = 0,
        **kwargs: Any,
    ) -> None:
        shard, source = _source(dataset, kwargs)
        world_size = 1 if shard is None else shard.num_processes
        rank = 0 if shard is None else shard.process_index
        self._set_up(
            source,
            LoaderSettings(
                rank=rank,
                world_size=world_size,
                seed=seed_of_order(
                    synchronized_generator or order_generator(source), world_size, rank
                ),
                even_batches=getattr(shard, "even_batches", shard is not None),
                device=device,
                non_blocking=_non_blocking,
                split_batches=shard is not None and shard.split_batches,
                rng_types=rng_types,
                skip_batches=skip_batches,
                stateful=use_stateful_dataloader,
            ),
        )
        self._drops_last |= _drop_last
        self.iteration = iteration

    def _make_epoch_iterator(self, source: DataLoader[Any]) -> EpochIterator:
        several = self.world_size > 1
        shard = DataShard(
            rank=self.rank,
            world_size=self.world_size,
            even=self.settings.even_batches and several,
            split=self.split_batches and several,
            drop_last=self._drops_last and several,
            presharded=self.state_is_own,
        )
        return EpochIterator(
            source,
            shard,
            seed=self.settings.seed,
            loader_id=self.settings.part or 0,  # separate random numbers for each part
            remember=True,
            rereads=True,
        )

    def _batches(self) -> Iterator[BatchWithFlags]:
        streams = self._streams
        self.epoch_iterator.start_global_batch = self.first_global_batch
        for current, following in lookahead(self.epoch_iterator.read(self._transfer(streams))):
            self.epoch_iterator.used(current.position, last=following is None)
            if current.present:
                last = following is None or not following.present
                batch = current.batch if streams is None else current.batch.arrive()
                real, filled = current.real_samples, current.real_batches
                if self.state_is_own:  # samples that others gather are never padding
                    real = None
                repeats = real is None and filled is not None and filled < current.batches
                over = following is None
                yield batch, last, over, real, filled if repeats else None
