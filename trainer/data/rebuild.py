"""Loaders like the user's, reading what we say, in workers that outlast a signal."""

from __future__ import annotations

import atexit
import gc
import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import cache
from multiprocessing import parent_process
from multiprocessing.util import Finalize
from types import FrameType
from typing import Any
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch._C import _remove_worker_pids
from torch.utils.data import DataLoader, get_worker_info

from trainer.data.rows import TensorRows
from trainer.data.sampling import ShardedSampler
from trainer.data.seeding import SeededDataset, as_fetched, draws_nothing

logger = logging.getLogger(__name__)

_PATIENCE = 5.0  # seconds for workers that still read when their process ends; torch's, for each
_LET_GO = 0.01  # seconds in which a backend's threads let go of what was exchanged last


class LastingWorker:
    """The ``worker_init_fn`` of a worker that goes on when its main process is told to end.

    Ctrl-C and schedulers send their signal to every process of a run. The main process ends the
    update at hand and saves; it still needs its workers for that, and ends them itself. SIGINT is
    ignored; SIGTERM ends a worker when it comes a second time, so that a stuck one can be ended.

    Args:
        users: The user's ``worker_init_fn``, called afterwards.
        wrapped: The loader's dataset is one of ours around the user's, which is what
            ``get_worker_info().dataset`` shall be: it is there to be changed by `users`.
    """

    def __init__(self, users: Callable[[int], None] | None, *, wrapped: bool = False) -> None:
        self.users, self.wrapped = users, wrapped
        self.collects = True
        self._told = False

    def __call__(self, worker_id: int) -> None:
        """In the worker, before it reads anything."""
        # Garbage that a fork has brought along is the main process's to collect: a process group
        # among it would wait here for threads that are there alone. `LastingLoader` has seen to it
        # that nothing was collected since the fork.
        gc.freeze()
        if self.collects:
            gc.enable()
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, self._end_at_the_second)
        if self.wrapped:
            info: Any = get_worker_info()
            object.__setattr__(info, "dataset", info.dataset.dataset)  # it refuses the usual way
        if self.users is not None:
            self.users(worker_id)

    def _end_at_the_second(self, number: int, _: FrameType | None) -> None:
        if self._told:
            os._exit(128 + number)
        self._told = True


class LastingLoader(DataLoader[Any]):
    """A loader whose workers are `LastingWorker`.

    Workers that a process still has when it ends are sent SIGTERM by multiprocessing, once, and
    waited for; these go on at the first. So they are ended before, by the word that they wait for.
    """

    def __iter__(self) -> Any:
        if not self.num_workers:
            return super().__iter__()
        collects = gc.isenabled()
        if isinstance(self.worker_init_fn, LastingWorker):
            self.worker_init_fn.collects = collects
        gc.disable()  # until the workers have been forked; see LastingWorker
        try:
            if self._iterator is None:  # else it has workers, which persist
                _let_backends_finish()
            batches = super().__iter__()
        finally:
            if collects:
                gc.enable()
        _end_with_process(batches)
        return batches


def _let_backends_finish() -> None:
    """Give the threads of a process group the interpreter before workers are forked.

    The thread that ran a collective drops its tensors behind it. To do so it becomes known to
    Python, under a lock that a child forked in that moment waits for without end, up to Python
    3.11.7 (https://github.com/python/cpython/issues/112275).
    """
    if sys.version_info < (3, 11, 8) and dist.is_initialized():
        time.sleep(_LET_GO)


_reading: dict[int, WeakSet[Any]] = {}  # by process: a fork inherits what is its parent's to end


def _end_with_process(batches: Any) -> None:
    process = os.getpid()
    if process not in _reading:
        _reading.clear()
        _reading[process] = WeakSet()
        if parent_process() is None:
            atexit.register(_end_workers)  # so before torch's own, behind which it ends none
        else:
            # Such processes have no atexit; behind 10 the queues to the workers are closed.
            Finalize(None, _end_workers, exitpriority=20)
    _reading[process].add(batches)


def _end_workers() -> None:
    end_workers(_reading.get(os.getpid(), ()))


def end_workers(iterators: Iterable[Any]) -> None:
    """All within one patience; torch waits so long for each worker that is in a long read."""
    reading = [each for each in iterators if not each._shutdown]
    for batches in reading:
        _say_it_ends(batches)
    deadline = time.monotonic() + _PATIENCE
    for worker in [worker for batches in reading for worker in batches._workers]:
        worker.join(max(0.0, deadline - time.monotonic()))
    for batches in reading:
        _remove_worker_pids(id(batches))  # else torch takes the kill for a crash
        batches._worker_pids_set = False
        for worker in batches._workers:
            worker.kill()  # which does nothing to one that has ended
        with suppress(RuntimeError):  # as below; all have ended
            batches._shutdown_workers()


def _say_it_ends(batches: Any) -> None:
    """The beginning of torch's ``_shutdown_workers``, which may be called after it."""
    if hasattr(batches, "_pin_memory_thread"):  # first: a worker that ends may break its queue
        batches._pin_memory_thread_done_event.set()
        with suppress(RuntimeError):  # a put may start a thread, which Python 3.12 refuses here:
            batches._worker_result_queue.put((None, None))  # the thread then ends after seconds
        batches._pin_memory_thread.join()
    batches._workers_done_event.set()
    for queue in batches._index_queues:
        queue.put(None)
        queue.cancel_join_thread()  # whoever is killed reads no more of it


@cache  # a run may make its loaders again in every epoch
def say_workers_end(dataset: str, why: str) -> None:
    """Tell that the ``persistent_workers`` of a stream do not persist."""
    logger.warning(
        "persistent_workers=True is not used for the stream %s: its workers begin anew in each "
        "epoch, since %s.",
        dataset,
        why,
    )


def reads_as_torchs(kind: type[DataLoader[Any]]) -> bool:
    """A loader of this class reads as torch's do, so that one may be made like it."""
    return all(
        getattr(kind, name) is getattr(DataLoader, name) for name in ("__iter__", "_get_iterator")
    )


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


def what_kwargs(loader: DataLoader[Any], sampler: Any = None) -> dict[str, Any]:
    """Those that say what it reads: by `sampler` in place of its own, or a stream."""
    if sampler is None:
        return {"batch_size": loader.batch_size, "drop_last": loader.drop_last}
    if loader.batch_sampler is None:
        return {"batch_size": None, "sampler": sampler}
    return {"batch_sampler": sampler}


def loader_kwargs(
    loader: DataLoader[Any],
    sampler: ShardedSampler | None,
    generator: torch.Generator,
    *,
    remember: bool = False,
) -> dict[str, Any]:
    """The arguments of a ``DataLoader`` like this one, reading what `sampler` says.

    It draws its workers' seeds from `generator`, so that reading leaves the global generators
    alone. To `remember` where a stream stands, its workers must leave nothing to the next epoch:
    no checkpoint knows their generators and their copies of the dataset.
    """
    kwargs = users_kwargs(loader) | {"generator": generator}
    kwargs["worker_init_fn"] = LastingWorker(loader.worker_init_fn)
    if sampler is None:
        told = hasattr(loader.dataset, "set_epoch")
        if loader.persistent_workers and (told or remember):
            unheard, unknown = "they would not hear of set_epoch", "no checkpoint knows their state"
            say_workers_end(type(loader.dataset).__name__, unheard if told else unknown)
            kwargs["persistent_workers"] = False
        return kwargs | what_kwargs(loader)
    wrapper: Any = None
    if not draws_nothing(loader.dataset, loader.collate_fn):
        wrapper = SeededDataset(loader.dataset, loader.collate_fn)
    elif loader.batch_sampler is not None:
        wrapper = TensorRows(loader.dataset)
    if wrapper is not None:
        worker = LastingWorker(loader.worker_init_fn, wrapped=True)
        kwargs |= {"dataset": wrapper, "collate_fn": as_fetched, "worker_init_fn": worker}
    return kwargs | what_kwargs(loader, sampler)
