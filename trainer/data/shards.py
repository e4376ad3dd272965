"""Samplers and datasets of one process's shard, for the documented API.

Prepared loaders do not need them: they shard the user's own samplers. They are for code that builds
or subclasses loaders itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

import torch
from torch.utils.data import BatchSampler, IterableDataset, RandomSampler

from trainer.checks import check_bools, check_counts
from trainer.data.sampler import INDICES, BatchSharding


class SeedableRandomSampler(RandomSampler):
    """A ``RandomSampler`` whose order in each epoch comes from the seed ``initial_seed + epoch``.

    Args:
        *args: Arguments of ``RandomSampler``.
        data_seed: The initial seed; None takes torch's.
        **kwargs: Arguments of ``RandomSampler``.

    Attributes:
        epoch: The next epoch; it increases after each complete pass.
    """

    def __init__(self, *args: Any, data_seed: int | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.initial_seed = torch.initial_seed() if data_seed is None else data_seed
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next pass."""
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        if self.generator is None:
            self.generator = torch.Generator()
        self.generator.manual_seed(self.initial_seed + self.epoch)
        yield from super().__iter__()
        self.set_epoch(self.epoch + 1)


class BatchSamplerShard(BatchSampler):
    """One process's batches of a batch sampler; see `trainer.data.sampler.BatchSharding`.

    Args:
        batch_sampler: The batch sampler of the whole data.
        num_processes: The number of shards.
        process_index: The number of this shard.
        split_batches: Split each batch into one part for each process; False gives each process
            whole batches.
        even_batches: Give every process the same number of full batches, by repeating samples from
            the beginning. If False, some may get one batch fewer, or a shorter one.

    Raises:
        ValueError: There is no such shard, or batches are to be split and their size is not a
            multiple of the number of processes.
    """

    def __init__(
        self,
        batch_sampler: Any,
        num_processes: int = 1,
        process_index: int = 0,
        split_batches: bool = False,
        even_batches: bool = True,
    ) -> None:
        check_bools(split_batches=split_batches, even_batches=even_batches)
        self.batch_sampler = batch_sampler
        self.batch_size: Any = getattr(batch_sampler, "batch_size", None)
        _check_shard(num_processes, process_index, self.batch_size if split_batches else 0)
        self.drop_last = bool(getattr(batch_sampler, "drop_last", False))
        self.num_processes, self.process_index = num_processes, process_index
        self.split_batches, self.even_batches = split_batches, even_batches

    @property
    def sampler(self) -> Any:
        """The batch sampler's own sampler."""
        return self.batch_sampler.sampler

    @sampler.setter
    def sampler(self, sampler: Any) -> None:
        self.batch_sampler.sampler = sampler

    @property
    def total_length(self) -> int:
        """The number of batches over all processes."""
        return len(self.batch_sampler)

    def _sharding(self) -> BatchSharding:
        return BatchSharding(
            kind=INDICES,
            batch_size=self.batch_size,
            world_size=self.num_processes,
            even=self.even_batches,
            split=self.split_batches,
            drop_last=self.drop_last,
        )

    def __len__(self) -> int:
        return self._sharding().own_batches(self.total_length, None, rank=self.process_index)

    def __iter__(self) -> Iterator[list[Any]]:
        batches = ((list(batch), None) for batch in self.batch_sampler)
        for parts, _, _ in self._sharding().global_batches(batches):
            if self.process_index < len(parts):
                yield parts[self.process_index]


class IterableDatasetShard(IterableDataset[Any]):
    """One process's samples of a stream that every process reads.

    Args:
        dataset: The stream.
        batch_size: The batch size into which the samples are grouped.
        drop_last: Drop samples that do not fill a batch on every process; False fills the last
            batches with samples from the beginning.
        num_processes: The number of shards.
        process_index: The number of this shard.
        split_batches: `batch_size` is the total over all processes; if False, that of each process.

    Raises:
        ValueError: There is no such shard, or batches are to be split and their size is not a
            multiple of the number of processes.
    """

    def __init__(
        self,
        dataset: Any,
        batch_size: int = 1,
        drop_last: bool = False,
        num_processes: int = 1,
        process_index: int = 0,
        split_batches: bool = False,
    ) -> None:
        check_bools(drop_last=drop_last, split_batches=split_batches)
        check_counts(1, batch_size=batch_size)
        _check_shard(num_processes, process_index, batch_size if split_batches else 0)
        self.dataset = dataset
        self.batch_size, self.drop_last, self.split_batches = batch_size, drop_last, split_batches
        self.num_processes, self.process_index = num_processes, process_index
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch, and the stream's epoch if it has a ``set_epoch``."""
        self.epoch = epoch
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(epoch)

    @property
    def _global_batch_size(self) -> int:
        return self.batch_size if self.split_batches else self.batch_size * self.num_processes

    def __len__(self) -> int:
        full_batches, rest = divmod(len(self.dataset), self._global_batch_size)
        share = self._global_batch_size // self.num_processes
        return (full_batches + (rest > 0 and not self.drop_last)) * share

    def __iter__(self) -> Iterator[Any]:
        generator = getattr(self.dataset, "generator", None)
        if isinstance(generator, torch.Generator) and not hasattr(self.dataset, "set_epoch"):
            generator.manual_seed(self.epoch)
        size, samples = self._global_batch_size, iter(self.dataset)
        sharding = BatchSharding(
            kind=INDICES, batch_size=size, world_size=self.num_processes, even=True, split=True
        )
        batches = iter(lambda: list(islice(samples, size)), [])
        full = ((batch, None) for batch in batches if len(batch) == size or not self.drop_last)
        for parts, _, _ in sharding.global_batches(full):
            yield from parts[self.process_index]


def _check_shard(num_processes: int, process_index: int, batch_size: Any) -> None:
    check_counts(1, num_processes=num_processes)
    if not 0 <= process_index < num_processes:
        raise ValueError(
            f"process_index is {process_index} of num_processes={num_processes}; it must lie "
            f"between 0 and {num_processes - 1}."
        )
    if batch_size is None or batch_size % num_processes:
        raise ValueError(
            f"split_batches=True with batch size {batch_size}, which must be a multiple of the "
            f"number of processes, {num_processes}."
        )
