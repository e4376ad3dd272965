"""The prepared loader that reads on rank 0 only and broadcasts each global batch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

from torch.utils.data import BatchSampler, DataLoader

from trainer.data.batch import (
    concatenate,
    insert_tensors,
    length,
    pad_batch,
    split_off_tensors,
    take,
    unwrap_columns,
    wrap_columns,
)
from trainer.data.dataloader import (
    BatchWithFlags,
    LoaderSettings,
    PreparedLoader,
    Slice,
    seed_of_order,
)
from trainer.data.epoch_iterator import EpochIterator, lookahead
from trainer.data.iterable import Position
from trainer.data.prefetch import InFlight
from trainer.data.sampler import SAMPLES, BatchSharding
from trainer.data.seeding import order_generator
from trainer.distributed.collectives import broadcast
from trainer.distributed.objects import broadcast_object
from trainer.state import PartialState
from trainer.tree import find_batch_size, to_device


@dataclass(frozen=True)
class DispatchPlan:
    """A global batch, and how rank 0 splits it over the processes.

    Attributes:
        batch: All samples of the global batch, padding included; with several processes its lists
            are wrapped, see `wrap_columns`. It is on the host, or an asynchronous copy to the
            device. When rank 0 sends the plan, it is the batch without its tensors; see
            `split_off_tensors`.
        size: Samples per process; the highest ranks may get fewer.
        real: Samples without the padding; None if unknown.
        present: The number of processes that get any samples: ranks 0 to ``present - 1``.
        position: The position of a stream after this global batch; it is not sent.
        following: The number of processes that get samples of the next global batch; 0 at the end.
    """

    batch: Any = None
    size: int = 0
    real: int | None = None
    present: int = 0
    position: Position | None = None
    following: int = 0


class DataLoaderDispatcher(PreparedLoader):
    """A prepared loader that reads the data on rank 0 only and sends each process its part.

    It is for datasets that only one process can or should read, mainly iterable datasets. For each
    global batch, rank 0 reads one batch per process (with `split_batches`, one batch for all).
    Batches may hold more than tensors: lists with one entry per sample are split like tensors, and
    other values go to every process unchanged.

    The last global batch may be short. With `even_batches` it is split evenly: samples of the first
    global batch are added only until the size is divisible by the number of processes, so all last
    batches have the same, smaller size. Without `even_batches`, the lowest ranks get full batches,
    and ranks without samples end one batch earlier. In earlier global batches, samples that remain
    after an even split go to the next global batch; none is lost or repeated.

    If reading fails on rank 0, every process raises: rank 0 raises the error itself, the others
    raise a ``RuntimeError`` with its text.

    The constructor is for subclasses and for loaders built by hand; `prepare_data_loader` wraps an
    existing loader. It is collective.

    Args:
        dataset: Any dataset that a ``DataLoader`` takes.
        split_batches: Each batch that rank 0 reads is split; False reads one for each process.
        skip_batches: The number of this process's batches to skip at the beginning of each pass.
        use_stateful_dataloader: See `DataLoaderConfiguration`.
        _drop_last: Whether the last global batch has no padding to drop.
        _non_blocking: Copy to the device asynchronously.
        slice_fn: Replaces the default splitting. It is called on every process as
            ``slice_fn(batch, slice, process_index=…, num_processes=…)`` with the global batch and
            the slice of this process's samples, and returns this process's batch.
        torch_device_mesh: Must be None: rank 0 sends a different part to each process.
        iteration: The number of the first pass.
        **kwargs: Arguments of the ``DataLoader``.

    Raises:
        ValueError: There is a mesh.
    """

    def __init__(
        self,
        dataset: Any,
        split_batches: bool = False,
        skip_batches: int = 0,
        use_stateful_dataloader: bool = False,
        _drop_last: bool = False,
        _non_blocking: bool = False,
        slice_fn: Slice | None = None,
        torch_device_mesh: Any = None,
        iteration: int = 0,
        **kwargs: Any,
    ) -> None:
        if torch_device_mesh is not None:
            raise ValueError(
                "DataLoaderDispatcher has torch_device_mesh, but rank 0 sends a different part to "
                "each process: use DataLoaderShard, or dispatch_batches=False."
            )
        state, source = PartialState(), DataLoader(dataset, **kwargs)
        self._set_up(
            source,
            LoaderSettings(
                slice_fn=slice_fn,
                rank=state.process_index,
                world_size=state.num_processes,
                seed=seed_of_order(
                    order_generator(source), state.num_processes, state.process_index
                ),
                even_batches=True,
                device=state.device,
                non_blocking=_non_blocking,
                split_batches=split_batches,
                skip_batches=skip_batches,
                stateful=use_stateful_dataloader,
            ),
        )
        self._drops_last |= _drop_last
        self.iteration = iteration

    def _set_up(self, source: DataLoader[Any], settings: LoaderSettings) -> None:
        super()._set_up(source, settings)
        self.slice_fn = settings.slice_fn

    def _make_epoch_iterator(self, source: DataLoader[Any]) -> EpochIterator:
        return EpochIterator(source, seed=self.settings.seed, remember=True, rereads=True)

    def _batches(self) -> Iterator[BatchWithFlags]:
        plans = lookahead(self._transferred_plans()) if self.rank == 0 else iter(())
        following = self.world_size
        while following:
            plan = self._exchange(plans)
            following = plan.following
            if self.rank < plan.present:
                last = self.rank >= following
                batch = self._rank_slice(plan.batch, plan.size)
                yield batch, last, not following, plan.real, None

    def _rank_slice(self, batch: Any, size: int) -> Any:
        start, stop = self.rank * size, (self.rank + 1) * size
        if self.slice_fn is not None:
            return self.slice_fn(
                unwrap_columns(batch),
                slice(start, stop),
                process_index=self.rank,
                num_processes=self.world_size,
            )
        return batch if self.world_size == 1 else unwrap_columns(take(batch, start, stop))

    # -- sending from rank 0 to the others -----------------------------------------------------

    def _exchange(self, plans: Iterator[tuple[DispatchPlan, DispatchPlan | None]]) -> DispatchPlan:
        """Broadcast the next global batch from rank 0; a collective call.

        Raises:
            RuntimeError: On the other ranks, if reading failed on rank 0. Rank 0 raises the
                original error.
        """
        if self.rank != 0:
            sent: DispatchPlan | str = broadcast_object(None)
            if isinstance(sent, str):
                raise RuntimeError(f"Reading the data failed on rank 0: {sent}")
            batch, tensors = insert_tensors(sent.batch, self.device)
            broadcast(tensors)
            return replace(sent, batch=batch)
        try:
            plan = self._next(plans)
        except Exception as error:
            broadcast_object(f"{type(error).__name__}: {error}")
            raise
        if self.world_size > 1:
            skeleton, tensors = split_off_tensors(plan.batch)
            broadcast_object(replace(plan, batch=skeleton, position=None))
            broadcast(tensors)
        return plan

    def _next(self, plans: Iterator[tuple[DispatchPlan, DispatchPlan | None]]) -> DispatchPlan:
        """Return the next global batch on rank 0, on the device; an empty plan at the end."""
        plan, following = next(plans, (None, None))
        if plan is None:
            return DispatchPlan()
        self.epoch_iterator.used(plan.position, last=following is None)
        batch = plan.batch
        if isinstance(batch, InFlight):
            batch = batch.arrive()
        elif self.device is not None:
            batch = to_device(batch, self.device, non_blocking=self.non_blocking)
        return replace(plan, batch=batch, following=0 if following is None else following.present)

    # -- reading on rank 0 ---------------------------------------------------------------------

    def _transferred_plans(self) -> Iterator[DispatchPlan]:
        """Yield the global batches of a pass, copied ahead of use if the device has streams."""
        streams = self._streams
        transfer = self._transfer(streams)
        if streams is None or transfer is None:
            return self._plans()
        return (replace(plan, batch=transfer(plan.batch)) for plan in self._plans())

    def _plans(self) -> Iterator[DispatchPlan]:
        """Yield the global batches of a pass, without the skipped ones."""
        indexed = self._skips_by_index
        self.epoch_iterator.start_global_batch = (
            self.first_global_batch * self._batches_per_step if indexed else 0
        )
        return islice(self._all_plans(), 0 if indexed else self.first_global_batch, None)

    def _all_plans(self) -> Iterator[DispatchPlan]:
        # `held` has the samples that were left over by the even split of the previous global batch;
        # `first` is the first global batch, which pads the last one.
        first = held = None
        for (group, position), following in lookahead(self._groups(self.epoch_iterator)):
            if self.world_size == 1:
                yield DispatchPlan(group[0], 0, find_batch_size(group[0]), 1, position)
                continue
            batch = concatenate(group if held is None else [held, *group])
            first, held = batch if first is None else first, None
            total = length(batch)
            size, rest = divmod(total, self.world_size)
            if following is None:
                yield self._last_plan(batch, first, position)
            else:
                if rest:
                    held = take(batch, total - rest, total)
                    batch = take(batch, 0, total - rest)
                if size:
                    yield DispatchPlan(batch, size, total - rest, self.world_size, position)

    def _last_plan(self, batch: Any, first: Any, position: Position | None) -> DispatchPlan:
        total = length(batch)
        size = -(-total // self.world_size)
        if self.even_batches:
            if size * self.world_size > total:
                if self.epoch_iterator.start_global_batch:
                    first = self._read_first_batch()
                batch = pad_batch(batch, first, size * self.world_size)
            return DispatchPlan(batch, size, total, self.world_size, position)
        size = max(size, (self.total_batch_size or 0) // self.world_size)
        return DispatchPlan(batch, size, total, -(-total // size), position)

    def _groups(self, epoch_iterator: EpochIterator) -> Iterator[tuple[list[Any], Position | None]]:
        """Yield the loader's batches of each global batch, and the stream position after them."""
        global_batches = epoch_iterator.read()
        while group := list(islice(global_batches, self._batches_per_step)):
            if len(group) < self._batches_per_step and self._drops_last:
                return
            batches = [share.batch for share in group]
            position = group[-1].position
            yield batches if self.world_size == 1 else [*map(wrap_columns, batches)], position

    def _read_first_batch(self) -> Any:
        """Read the samples of the first global batch, which this pass has skipped, for padding."""
        epoch_iterator = self._make_epoch_iterator(self.source)
        epoch_iterator.resume_length(self.epoch_iterator.epoch, self.epoch_iterator.length)
        epoch_iterator.set_epoch(self.epoch_iterator.epoch)
        epoch_iterator.limit = self._batches_per_step
        return concatenate(next(self._groups(epoch_iterator))[0])

    @property
    def _skips_by_index(self) -> bool:
        """Whether batches can be skipped by index, without reading data (a map-style dataset)."""
        return (
            self.epoch_iterator.sampler is not None
            and type(self.source.batch_sampler) is BatchSampler
        )

    def __len__(self) -> int:
        """Return the number of batches of this process in a pass.

        The number is exact with `even_batches`, or if all batches before the last have one size.
        Otherwise it may be off by one: samples that remain after the split of earlier global
        batches decide which processes get a last batch, and are known only after reading.

        Raises:
            TypeError: The loader reads a stream that has no length.
        """
        total = self.epoch_iterator.num_batches
        if total is None:
            raise TypeError("The loader reads a stream that has no length.")
        sharding = BatchSharding(
            kind=SAMPLES,
            batch_size=self.total_batch_size,
            world_size=self.world_size,
            even=self.even_batches,
            split=self.split_batches,
            drop_last=self._drops_last,
        )
        samples = self.epoch_iterator.num_samples if self.split_batches else None
        batches = sharding.own_batches(total, samples, rank=self.rank)
        return max(0, batches - self.skip_batches)
