"""Data loading: reproducible sample order, sharding over processes, and resume inside an epoch.

The order of an epoch is a function of the seed and the epoch number. `sampler` decides which
batches an epoch has and which process gets each one. `seeding` makes random augmentation a function
of the batch's position in the epoch. `epoch_iterator` reads an epoch, sharded over the processes.

The loaders that `Accelerator.prepare` returns are built on these. `dataloader` reads on every
process. `dispatcher` reads on rank 0 and sends each process its part. `prepare` chooses between
them, and skips batches to resume inside an epoch. `batch` splits and concatenates batches.

`shards` has samplers and datasets of one shard, for code that builds loaders by hand. The names of
the documented API's ``data_loader`` module can be imported from this package.
"""

from importlib import import_module
from typing import Any

_HOME = {
    "BatchSamplerShard": "shards",
    "DataLoaderDispatcher": "dispatcher",
    "DataLoaderShard": "dataloader",
    "IterableDatasetShard": "shards",
    "SeedableRandomSampler": "shards",
    "SkipBatchSampler": "prepare",
    "SkipDataLoader": "prepare",
    "prepare_data_loader": "prepare",
    "skip_first_batches": "prepare",
}

__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'trainer.data' has no attribute {name!r}")
    return getattr(import_module(f"trainer.data.{_HOME[name]}"), name)
