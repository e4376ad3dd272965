"""`prepare_data_loader`: the prepared form of a user's loader, and loaders that skip batches."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, Sampler

from trainer.data.dataloader import DataLoaderShard, LoaderSettings, PreparedLoader, seed_of_order
from trainer.data.dispatcher import DataLoaderDispatcher
from trainer.data.libraries import user_shard
from trainer.data.seeding import order_generator
from trainer.data.workers import batching_kwargs, has_torch_iteration, reading_kwargs
from trainer.state import PartialState


class SkipBatchSampler(BatchSampler):
    """A batch sampler without its first batches.

    Args:
        batch_sampler: A batch sampler, or a sampler of ready-made batches.
        skip_batches: The number of batches to skip in each pass.
    """

    def __init__(self, batch_sampler: Sampler[Any] | Iterable[Any], skip_batches: int = 0) -> None:
        self.batch_sampler: Any = batch_sampler
        self.skip_batches = skip_batches

    def __getattr__(self, name: str) -> Any:
        if name == "batch_sampler":  # looked up during unpickling, before it is set
            raise AttributeError(name)
        return getattr(self.batch_sampler, name)

    @property
    def sampler(self) -> Any:
        """The batch sampler's ``sampler``; setting it changes a copy of the given batch sampler."""
        return self.batch_sampler.sampler

    @sampler.setter
    def sampler(self, sampler: Any) -> None:
        self.batch_sampler = copy.copy(self.batch_sampler)
        self.batch_sampler.sampler = sampler

    @property
    def total_length(self) -> int:
        """The number of batches with the skipped ones."""
        return len(self.batch_sampler)

    def __iter__(self) -> Iterator[Any]:
        return islice(iter(self.batch_sampler), self.skip_batches, None)

    def __len__(self) -> int:
        return max(0, len(self.batch_sampler) - self.skip_batches)


class SkipDataLoader(DataLoader[Any]):
    """A ``DataLoader`` for streams that reads its first batches and discards them.

    Args:
        dataset: Any dataset that a ``DataLoader`` takes.
        skip_batches: The number of batches to skip in each pass.
        use_stateful_dataloader: Must be False; a prepared loader has a ``state_dict``.
        **kwargs: Arguments of the ``DataLoader``.

    Raises:
        ValueError: `use_stateful_dataloader` is True.
    """

    def __init__(
        self,
        dataset: Any,
        skip_batches: int = 0,
        use_stateful_dataloader: bool = False,
        **kwargs: Any,
    ) -> None:
        if use_stateful_dataloader:
            raise ValueError(
                "A SkipDataLoader has no state: prepare the loader, with DataLoaderConfiguration("
                "use_stateful_dataloader=True), and use what skip_first_batches returns."
            )
        self.skip_batches = skip_batches
        super().__init__(dataset, **kwargs)

    def __iter__(self) -> Any:
        """Yield the remaining batches."""
        return islice(super().__iter__(), self.skip_batches, None)

    def __len__(self) -> int:
        return max(0, super().__len__() - self.skip_batches)


def skip_first_batches(dataloader: DataLoader[Any], num_batches: int = 0) -> DataLoader[Any]:
    """Return a loader that skips the first batches, to resume inside an epoch.

    Use it for one pass and read the next pass from `dataloader`, which is not changed. With a
    map-style dataset, skipped samples are not read. A stream is read and discarded.

    A prepared loader keeps its order: the result yields exactly the batches that would have
    followed in the current or next pass of `dataloader`, random augmentation included, and
    `dataloader` then continues with the pass after that. After a restart, ``load_state`` restores
    the pass; otherwise call ``set_epoch(epoch)``.

    Example::

        for inputs, targets in skip_first_batches(train_loader, num_batches=100):
            outputs = model(inputs)

    Args:
        dataloader: A ``DataLoader``, prepared or not.
        num_batches: The number of this process's batches to skip.

    Raises:
        TypeError: `dataloader` is not a ``DataLoader`` or is a subclass that overrides iteration.
        ValueError: `num_batches` is negative.
    """
    if num_batches < 0:
        raise ValueError(f"num_batches is {num_batches}; it must be 0 or more.")
    if isinstance(dataloader, PreparedLoader):
        return dataloader.skipping(num_batches)
    if not isinstance(dataloader, DataLoader):
        raise TypeError(
            f"dataloader is a {type(dataloader).__name__}; skip_first_batches takes a DataLoader, "
            "prepared or not. For other iterables use itertools.islice."
        )
    kwargs = reading_kwargs(dataloader)
    if isinstance(dataloader, SkipDataLoader):
        num_batches += dataloader.skip_batches
    elif not has_torch_iteration(type(dataloader)):
        raise TypeError(
            f"A {type(dataloader).__name__} overrides how a DataLoader reads, which a new loader "
            "would lose. Prepare it, or use itertools.islice."
        )
    if isinstance(dataloader.dataset, IterableDataset):
        return SkipDataLoader(skip_batches=num_batches, **kwargs, **batching_kwargs(dataloader))
    batches = dataloader.batch_sampler
    rest = SkipBatchSampler(dataloader.sampler if batches is None else batches, num_batches)
    return DataLoader(**kwargs, **batching_kwargs(dataloader, rest))


def prepare_data_loader(
    dataloader: DataLoader[Any],
    device: torch.device | None = None,
    num_processes: int | None = None,
    process_index: int | None = None,
    split_batches: bool = False,
    put_on_device: bool = False,
    rng_types: Sequence[str] | None = None,
    dispatch_batches: bool | None = None,
    even_batches: bool = True,
    slice_fn_for_dispatch: Callable[..., Any] | None = None,
    use_seedable_sampler: bool = False,
    data_seed: int | None = None,
    non_blocking: bool = False,
    use_stateful_dataloader: bool = False,
    torch_device_mesh: Any = None,
    *,
    presharded: bool = False,
    _from_accelerator: bool = False,
) -> PreparedLoader:
    """Return a loader that yields this process's shard of the data; call it on every process.

    The order of a shuffling loader is a function of a seed and the pass number, the same on all
    processes and for any number of processes. Rank 0 broadcasts its seed, so the call is a
    collective, unless `num_processes` differs from the number of running processes. A loader
    without a generator gets a seed derived from ``set_seed``'s and the number of loaders prepared
    since; the first loader gets ``set_seed``'s seed itself.

    The user's loader, samplers and dataset are not changed, with two exceptions. Their
    ``set_epoch`` is called. And their random generators are seeded again: those of samplers and
    streams for each pass, those of a map-style dataset for each batch.

    Args:
        dataloader: The user's loader. A prepared loader is returned unchanged.
        device: The device for batches with `put_on_device`; None means the process's device.
        num_processes: The number of processes; None takes it from `PartialState`.
        process_index: The rank of this process; None takes it from `PartialState`.
        split_batches: The loader's batch size is that of the global batch: each batch is split into
            one part per process. If False, each process gets whole batches.
        put_on_device: Move batches to the device.
        rng_types: Generators that take rank 0's state when a pass begins: ``"torch"``, ``"cuda"``,
            …, or ``"generator"`` for the one of the sampler or the iterable dataset. The order of
            the samples does not need this; it matters for user code that draws from the global
            generators in the main process. None synchronizes nothing.
        dispatch_batches: Whether rank 0 reads for all processes (see `DataLoaderDispatcher`) or
            every process reads (see `DataLoaderShard`). None means rank 0 for iterable datasets
            with `put_on_device`, else every process.
        even_batches: Every process gets the same number of batches of the same size; the last
            global batch is padded with samples from the beginning. If False, some processes may end
            one batch earlier or with a shorter batch. It has no effect with one process.
        slice_fn_for_dispatch: See `DataLoaderDispatcher`; unused if every process reads.
        use_seedable_sampler: Always derive the seed of the order from ``set_seed``. If False, a
            generator that was given to the loader or its sampler determines the seed.
        data_seed: The seed of the order; it overrides all other seeds.
        non_blocking: Copy to the device asynchronously, one batch ahead of use; this needs pinned
            memory to be of use.
        use_stateful_dataloader: After ``load_state_dict``, the next pass continues after the last
            batch that was yielded before the save.
        torch_device_mesh: A mesh of all processes, with names. Dimensions named ``dp``,
            ``dp_replicate`` and ``dp_shard`` divide the data; processes that differ only in ``tp``,
            ``cp``, ``sp`` or ``pp`` get the same data. It replaces `num_processes` and
            `process_index`.
        presharded: See `DataLoaderConfiguration`. Each process reads its own stream to its end;
            ``join_uneven_inputs`` allows some to end before others.
        _from_accelerator: Whether the `Accelerator` calls this, on all processes.

    Raises:
        TypeError: `dataloader` is not a ``DataLoader``.
        ValueError: Options contradict each other, the batch size cannot be split, the mesh has
            other dimension names, or the sampler shards the data already.
    """
    if isinstance(dataloader, PreparedLoader):
        return dataloader
    if not isinstance(dataloader, DataLoader):
        raise TypeError(
            f"dataloader is a {type(dataloader).__name__}; it must be a torch DataLoader. Wrap a "
            "dataset in torch.utils.data.DataLoader(dataset, batch_size=…) first."
        )
    state = PartialState()
    if torch_device_mesh is not None:
        num_processes, process_index = _data_coordinates(torch_device_mesh)
        if dispatch_batches is None and num_processes != state.num_processes:
            dispatch_batches = False  # rank 0 can only send different batches
    world_size = state.num_processes if num_processes is None else num_processes
    rank = state.process_index if process_index is None else process_index
    if not 0 <= rank < world_size:
        raise ValueError(
            f"process_index is {rank} of num_processes={world_size}; it must lie between 0 and "
            f"{world_size - 1}."
        )
    options = {"split_batches": split_batches, "dispatch_batches": dispatch_batches}
    reads_part = _reads_part(dataloader, rank, world_size, presharded, options)
    if dispatch_batches is None:
        dispatch_batches = (
            not reads_part and put_on_device and isinstance(dataloader.dataset, IterableDataset)
        )
    if dispatch_batches and not put_on_device:
        raise ValueError(
            "dispatch_batches=True with put_on_device=False: rank 0 sends batches from device to "
            "device. Pass put_on_device=True, or dispatch_batches=False."
        )
    if dispatch_batches and world_size != state.num_processes:
        raise ValueError(
            f"dispatch_batches=True with num_processes={world_size}, but {state.num_processes} are "
            "running, and each batch is divided among all of them. Leave num_processes out, "
            "or pass dispatch_batches=False."
        )
    if split_batches:
        _check_split(dataloader, world_size, dispatched=bool(dispatch_batches))
    generator = None if use_seedable_sampler else order_generator(dataloader)
    settings = LoaderSettings(
        rank=rank,
        world_size=world_size,
        seed=seed_of_order(generator, world_size, rank, data_seed, collective=_from_accelerator),
        even_batches=even_batches,
        device=(state.device if device is None else device) if put_on_device else None,
        non_blocking=non_blocking,
        split_batches=split_batches,
        rng_types=rng_types,
        stateful=use_stateful_dataloader,
        slice_fn=slice_fn_for_dispatch,
    )
    if reads_part:
        # Each stream is read as if by one process, with separate random numbers.
        settings = replace(settings, rank=0, world_size=1, part=rank)
    elif dispatch_batches:
        return DataLoaderDispatcher.of(dataloader, settings)
    return DataLoaderShard.of(dataloader, settings)


def _reads_part(
    dataloader: DataLoader[Any],
    rank: int,
    world_size: int,
    presharded: bool,
    options: dict[str, bool | None],
) -> bool:
    """Return whether a stream is already this process's own part of the data.

    Raises:
        ValueError: The stream is the part of another process, or an option would split its batches.
    """
    if not isinstance(dataloader.dataset, IterableDataset) or world_size == 1:
        return False
    part = None if presharded else user_shard(dataloader)
    if part is not None and part != (rank, world_size):
        raise ValueError(
            f"The stream of rank {rank} is part {part[0]} of {part[1]} of the data, but must be "
            f"part {rank} of {world_size}. Split it that way. If this is intended, set "
            "DataLoaderConfiguration(presharded=True)."
        )
    reads_part = presharded or part is not None
    dividing = [name for name, value in options.items() if value]
    if reads_part and dividing:
        raise ValueError(
            f"{dividing[0]}=True divides batches among the processes, but the stream is already "
            f"this process's part of the data. Leave {dividing[0]} out, or give all processes "
            "the whole stream."
        )
    return reads_part


def _data_coordinates(mesh: Any) -> tuple[int, int]:
    """Return the number of data shares of a mesh, and the index of this process's share."""
    shares, share = 1, 0
    for name in mesh.mesh_dim_names or (None,):
        if name in ("dp", "dp_replicate", "dp_shard"):
            size = mesh[name].size()
            shares, share = shares * size, share * size + mesh.get_local_rank(name)
        elif name not in ("tp", "cp", "sp", "pp"):
            raise ValueError(
                f"torch_device_mesh has a dimension named {name!r}, but the known names are 'dp', "
                "'dp_replicate' and 'dp_shard', which divide the data, and 'tp', 'cp', 'sp' and "
                "'pp', which share it. Use these mesh_dim_names, or pass num_processes and "
                "process_index instead."
            )
    return shares, share


def _check_split(dataloader: DataLoader[Any], world_size: int, *, dispatched: bool) -> None:
    batches = dataloader.batch_sampler
    size = dataloader.batch_size
    size = getattr(batches, "batch_size", None) if size is None else size
    if not isinstance(size, int):
        if dispatched:  # rank 0 splits the batches after reading
            return
        owner = "a loader without batches" if batches is None else f"a {type(batches).__name__}"
        raise ValueError(
            f"split_batches=True needs a batch size to split, and {owner} has batch_size={size!r}. "
            "Give the loader or its batch sampler an int batch_size, or pass split_batches=False."
        )
    if size % world_size:
        raise ValueError(
            f"split_batches=True with batch size {size}, which must be a multiple of the number of "
            f"processes ({world_size}), such as {world_size * -(-size // world_size)}; or pass "
            "split_batches=False."
        )
