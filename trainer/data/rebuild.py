"""Loaders like the user's, reading what we say, in workers that outlast a signal."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
from torch.utils.data import DataLoader

from trainer.data.rows import TensorRows
from trainer.data.sampling import ShardedSampler
from trainer.data.seeding import SeededDataset, as_fetched, draws_nothing


class LastingWorker:
    """The ``worker_init_fn`` of a worker that goes on when its main process is told to end.

    Ctrl-C and schedulers send their signal to every process of a run. The main process ends the
    update at hand and saves; it still needs its workers for that, and ends them itself. SIGINT is
    ignored; SIGTERM ends a worker when it comes a second time, so that a stuck one can be ended.

    Args:
        users: The user's ``worker_init_fn``, called afterwards.
    """

    def __init__(self, users: Callable[[int], None] | None) -> None:
        self.users = users
        self._told = False

    def __call__(self, worker_id: int) -> None:
        """In the worker, before it reads anything."""
        # Garbage that a fork has brought along is the main process's to collect: a process group
        # among it would wait here for threads that are there alone.
        gc.freeze()
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, self._end_at_the_second)
        if self.users is not None:
            self.users(worker_id)

    def _end_at_the_second(self, number: int, _: FrameType | None) -> None:
        if self._told:
            os._exit(128 + number)
        self._told = True


def users_kwargs(loader: DataLoader[Any]) -> dict[str, Any]:
    """The arguments of a ``DataLoader`` that say how it reads, without those that say what."""
    return {
        "dataset": loader.dataset,
        "num_workers": loader.num_workers,
        "collate_fn": loader.collate_fn,
        "pin_memory": loader.pin_memory,
        "timeout": loader.timeout,
        "worker_init_fn": loader.worker_init_fn,
        "multiprocessing_context": loader.multiprocessing_context,
        "generator": loader.generator,
        "prefetch_factor": loader.prefetch_factor,
        "persistent_workers": loader.persistent_workers,
    }


def loader_kwargs(
    loader: DataLoader[Any], sampler: ShardedSampler | None, generator: torch.Generator
) -> dict[str, Any]:
    """The arguments of a ``DataLoader`` like this one, reading what `sampler` says.

    It draws its workers' seeds from `generator`, so that reading leaves the global generators
    alone.
    """
    kwargs = users_kwargs(loader) | {"generator": generator}
    kwargs["worker_init_fn"] = LastingWorker(loader.worker_init_fn)
    if sampler is None:
        return kwargs | {"batch_size": loader.batch_size, "drop_last": loader.drop_last}
    if not draws_nothing(loader.dataset, loader.collate_fn):
        kwargs["dataset"] = SeededDataset(loader.dataset, loader.collate_fn)
        kwargs["collate_fn"] = as_fetched
    elif loader.batch_sampler is not None:
        kwargs["dataset"] = TensorRows(loader.dataset)
        kwargs["collate_fn"] = as_fetched
    if loader.batch_sampler is None:
        return kwargs | {"sampler": sampler, "batch_size": None}
    return kwargs | {"batch_sampler": sampler}
