"""`prepare_data_loader`: the prepared form of a user's loader."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from trainer.data.dispatch import DataLoaderDispatcher
from trainer.data.loader import DataLoaderShard, PreparedLoader
from trainer.data.own_generators import of_order
from trainer.distributed.objects import broadcast_object
from trainer.rng import next_seed
from trainer.state import PartialState


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
) -> PreparedLoader:
    """Give this process its part of a loader; called by every process alike.

    The order of a shuffling loader is a function of a seed and of the number of the pass, alike on
    all processes and on any number of them: rank 0 tells its seed, so that the call is collective
    unless `num_processes` is another number than that of the processes that run. Loaders without a
    generator of their own have a seed each, made from the one that ``set_seed`` set and from how
    many were prepared since; the first has that seed itself.

    The user's loader, samplers and dataset are not changed, except that they hear of the epoch
    (``set_epoch``), and that generators of their own are seeded anew: those of the samplers and of
    a stream for each pass, those of a map-style dataset for each batch.

    Args:
        dataloader: Preparing it a second time returns it as it is.
        device: Where batches are put with `put_on_device`; None is the process's device.
        num_processes: None asks `PartialState`.
        process_index: None asks `PartialState`.
        split_batches: The loader's batch size is that of all processes together: each batch is cut
            into one part for each. Else each process gets whole batches.
        put_on_device: Put batches on the device.
        rng_types: Generators that take the state of rank 0's when a pass begins: ``"torch"``,
            ``"cuda"``, … or ``"generator"``, the sampler's or the stream's own. The order needs
            none of them; they matter to what draws from the global generators in the main process.
            None synchronises none.
        dispatch_batches: Rank 0 reads for all (see `DataLoaderDispatcher`); None means so for
            streams with `put_on_device`. Else every process reads (see `DataLoaderShard`).
        even_batches: Every process gets the same number of batches of the same size; samples of
            the beginning are repeated for that. Without, some end one batch earlier or with a
            shorter one. With one process there is nothing to even out.
        slice_fn_for_dispatch: See `DataLoaderDispatcher`; unused without dispatching.
        use_seedable_sampler: The seed of the order always follows the one that ``set_seed`` set.
            Else the generator that was given to the loader or its sampler decides, where there is
            one.
        data_seed: The seed of the order, whatever else there is.
        non_blocking: Copy to the device asynchronously, a batch ahead and beside what it computes;
            useful from pinned memory.
        use_stateful_dataloader: After ``load_state_dict`` the next pass continues after the last
            batch that was handed out.

    Raises:
        TypeError: `dataloader` is no ``DataLoader``, or the slicing function cannot be called.
        ValueError: Options contradict each other, the batch size cannot be split, or the sampler
            shares the data out already.
    """
    if isinstance(dataloader, PreparedLoader):
        return dataloader
    if not isinstance(dataloader, DataLoader):
        raise TypeError(
            f"dataloader is a {type(dataloader).__name__}; it must be a torch DataLoader. Wrap a "
            "dataset in torch.utils.data.DataLoader(dataset, batch_size=…) first."
        )
    if slice_fn_for_dispatch is not None and not callable(slice_fn_for_dispatch):
        raise TypeError(
            f"slice_fn_for_dispatch is {slice_fn_for_dispatch!r}; it must be a function of (batch, "
            "slice, process_index=…, num_processes=…), or None."
        )
    state = PartialState()
    world_size = state.num_processes if num_processes is None else num_processes
    rank = state.process_index if process_index is None else process_index
    if not 0 <= rank < world_size:
        raise ValueError(
            f"process_index is {rank} of num_processes={world_size}; it must lie between 0 and "
            f"{world_size - 1}."
        )
    if dispatch_batches is None:
        dispatch_batches = put_on_device and isinstance(dataloader.dataset, IterableDataset)
    if dispatch_batches and not put_on_device:
        raise ValueError(
            "dispatch_batches=True with put_on_device=False: rank 0 sends batches from device to "
            "device. Pass put_on_device=True, or dispatch_batches=False."
        )
    if dispatch_batches and world_size != state.num_processes:
        raise ValueError(
            f"dispatch_batches=True with num_processes={world_size}, but {state.num_processes} are "
            "running, and all of them take part in sharing a batch out. Leave num_processes out, "
            "or pass dispatch_batches=False."
        )
    if split_batches:
        _check_split(dataloader, world_size)
    generator = None if use_seedable_sampler else of_order(dataloader)
    seed = next_seed(world_size, rank) if generator is None else generator.initial_seed()
    seed = seed if data_seed is None else data_seed
    settings: dict[str, Any] = {
        "rank": rank,
        "world_size": world_size,
        # Some processes may prepare a loader for themselves alone.
        "seed": broadcast_object(seed) if world_size == state.num_processes else seed,
        "even_batches": even_batches,
        "device": (state.device if device is None else device) if put_on_device else None,
        "non_blocking": non_blocking,
        "split_batches": split_batches,
        "rng_types": rng_types,
        "stateful": use_stateful_dataloader,
    }
    if dispatch_batches:
        return DataLoaderDispatcher(dataloader, slice_fn=slice_fn_for_dispatch, **settings)
    return DataLoaderShard(dataloader, **settings)


def _check_split(dataloader: DataLoader[Any], world_size: int) -> None:
    batches = dataloader.batch_sampler
    size = dataloader.batch_size
    size = getattr(batches, "batch_size", None) if size is None else size
    if not isinstance(size, int):
        owner = "a loader without batches" if batches is None else f"a {type(batches).__name__}"
        raise ValueError(
            f"split_batches=True needs a batch size to split, and {owner} has batch_size={size!r}. "
            "Give the loader or its batch sampler an int batch_size, or pass split_batches=False."
        )
    if size % world_size:
        below, above = size - size % world_size, size + world_size - size % world_size
        near = f"{below} or {above}" if below else f"{above}"
        raise ValueError(
            f"split_batches=True with batch size {size}, which must be a round multiple of the "
            f"number of processes ({world_size}): use {near}, or split_batches=False."
        )
