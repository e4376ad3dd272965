"""Workers of data loaders: rebuilt loaders, safe forks, and workers that survive a signal.

A fork can hang while a process group is active. A thread of the process group frees its tensors
after a collective. To do so it registers with the Python interpreter and takes a lock. Until Python
3.11.7, a child that is forked at that moment waits for the lock forever, before it runs any code,
and its loader hangs (https://github.com/python/cpython/issues/112275). So each forked child sends a
byte when it has started. A child that does not is killed and forked again.
"""

from __future__ import annotations

import atexit
import gc
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from multiprocessing import parent_process
from multiprocessing.connection import Connection
from multiprocessing.context import BaseContext
from multiprocessing.util import Finalize
from types import FrameType
from typing import Any
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch._C import _remove_worker_pids  # otherwise torch reports the kill below as a crash
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from trainer.data.sampler import ShardedSampler
from trainer.data.seeding import identity_collate
from trainer.data.tensor_dataset import seeded_dataset
from trainer.errors import module_logger

logger = module_logger(__name__)

# Seconds to wait for a child to start, which takes milliseconds; doubled at each retry.
_START_PATIENCE = 1.0


def safe_context(context: BaseContext | None) -> BaseContext | None:
    """Return the multiprocessing context for workers; None is the default context."""
    if (
        sys.platform == "win32"  # no fork on Windows
        or sys.version_info >= (3, 11, 8)
        or not dist.is_initialized()
    ):
        return context
    default = context or multiprocessing.get_context()
    return _Context() if type(default) is ForkContext else context  # keep a custom context


if sys.platform != "win32":
    from multiprocessing.context import ForkContext, ForkProcess
    from multiprocessing.popen_fork import Popen

    class _Launch(Popen):
        def _launch(self, process_obj: Any) -> None:
            patience = _START_PATIENCE
            while not self._fork_started(process_obj, patience):
                logger.warning(
                    "A data-loader worker did not start within %g s after its fork; it is forked "
                    "again. Python 3.11.8 and later do not have this problem.",
                    patience,
                )
                patience *= 2  # in case the machine is only slow

        def _fork_started(self, process: _Process, patience: float) -> bool:
            """Fork, and return whether the child started in time; if not, it is killed."""
            process.parent_end, process.child_end = multiprocessing.Pipe()
            begun = False
            with process.parent_end, process.child_end:
                super()._launch(process)  # type: ignore[misc]  # typeshed lacks it
                try:
                    process.child_end.close()  # so that poll also returns if the child dies
                    begun = process.parent_end.poll(patience)
                    if begun:
                        with suppress(OSError):  # the child has died; its loader reports that
                            process.parent_end.send_bytes(b"")
                finally:
                    if not begun:
                        self._end()
            return begun

        def _end(self) -> None:
            with suppress(ProcessLookupError, ChildProcessError):  # if SIGCHLD is ignored
                os.kill(self.pid, signal.SIGKILL)
                os.waitpid(self.pid, 0)
            self.close()

    class _Process(ForkProcess):
        parent_end: Connection  # the parent's end of the pipe
        child_end: Connection

        @staticmethod
        def _Popen(process_obj: Any) -> Any:
            return _Launch(process_obj)

        def _bootstrap(self, parent_sentinel: Any = None) -> Any:
            self.parent_end.close()
            with self.child_end as parent:
                parent.send_bytes(b"")
                # A child that started too late is killed while it waits here, where it holds no
                # lock that other processes share.
                parent.recv_bytes()
            return super()._bootstrap(parent_sentinel)  # type: ignore[misc]  # as above

    class _Context(ForkContext):
        Process = _Process


_PATIENCE = 5.0  # seconds for all workers together to finish reading; torch waits 5 s for each


class SignalSafeWorker:
    """A ``worker_init_fn`` that makes a data-loader worker ignore the signals that stop a run.

    Ctrl-C and schedulers signal every process of a run. The main process then finishes the current
    update and saves a checkpoint. It still needs its workers for that, and shuts them down itself.
    So workers ignore SIGINT and the first SIGTERM; a second SIGTERM ends a worker, in case it is
    stuck.

    Args:
        user_init: The user's ``worker_init_fn``, called afterwards; None if there is none.
        wrapped: Whether the loader's dataset wraps the user's. ``get_worker_info().dataset`` must
            then return the user's dataset, because `user_init` may change it there.
    """

    def __init__(self, user_init: Callable[[int], None] | None, *, wrapped: bool = False) -> None:
        self.user_init, self.wrapped = user_init, wrapped
        self.gc_enabled = True
        self._interrupted = False

    def __call__(self, worker_id: int) -> None:
        """Set up the worker before it reads any data; runs in the worker process."""
        # Never collect garbage that the fork has inherited from the main process: destroying a
        # process group here would wait for threads that exist only there. `SignalSafeLoader` has
        # disabled garbage collection since the fork.
        gc.freeze()
        if self.gc_enabled:
            gc.enable()
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, self._exit_on_second_signal)
        if self.wrapped:
            info: Any = get_worker_info()
            object.__setattr__(info, "dataset", info.dataset.dataset)  # its __setattr__ raises
        if self.user_init is not None:
            self.user_init(worker_id)

    def _exit_on_second_signal(self, number: int, _: FrameType | None) -> None:
        if self._interrupted:
            os._exit(128 + number)
        self._interrupted = True


class SignalSafeLoader(DataLoader[Any]):
    """A signal-safe loader: its workers are set up by `SignalSafeWorker`.

    At exit, multiprocessing sends one SIGTERM to each remaining worker and waits for it. These
    workers ignore it. So the workers are shut down before that, through their queues.
    """

    def __iter__(self) -> Any:
        if not self.num_workers:
            return super().__iter__()
        gc_enabled = gc.isenabled()
        if isinstance(self.worker_init_fn, SignalSafeWorker):
            self.worker_init_fn.gc_enabled = gc_enabled
        context = self.multiprocessing_context
        gc.disable()  # until the workers are forked; see SignalSafeWorker
        try:
            self.multiprocessing_context = safe_context(context)
            batches = super().__iter__()
        finally:
            self.multiprocessing_context = context
            if gc_enabled:
                gc.enable()
        _stop_workers_at_exit(batches)
        return batches


_reading: dict[
    int, WeakSet[Any]
] = {}  # by process id: a fork inherits iterators that belong to its parent


def _stop_workers_at_exit(batches: Any) -> None:
    process = os.getpid()
    if process not in _reading:
        _reading.clear()
        _reading[process] = WeakSet()
        if parent_process() is None:
            atexit.register(_end_workers)  # runs before torch's own handler
        else:
            # Child processes run no atexit handlers. At priority 10, multiprocessing closes the
            # queues to the workers, so this must run before.
            Finalize(None, _end_workers, exitpriority=20)
    _reading[process].add(batches)


def _end_workers() -> None:
    end_workers(_reading.get(os.getpid(), ()))


def end_workers(iterators: Iterable[Any]) -> None:
    """Shut down all workers of these iterators within one deadline of `_PATIENCE` seconds."""
    reading = [iterator for iterator in iterators if not iterator._shutdown]
    for batches in reading:
        _stop_workers(batches)
    deadline = time.monotonic() + _PATIENCE
    for worker in [worker for batches in reading for worker in batches._workers]:
        worker.join(max(0.0, deadline - time.monotonic()))
    for batches in reading:
        _remove_worker_pids(id(batches))
        batches._worker_pids_set = False
        for worker in batches._workers:
            worker.kill()  # no effect if it has ended
        with suppress(RuntimeError):  # see `_stop_workers`; all workers have ended
            batches._shutdown_workers()


def _stop_workers(batches: Any) -> None:
    """Tell an iterator's workers to exit: the first part of torch's ``_shutdown_workers``.

    ``_shutdown_workers`` may still be called afterwards.
    """
    if hasattr(batches, "_pin_memory_thread"):  # first: an ending worker may break its queue
        batches._pin_memory_thread_done_event.set()
        # put may start a thread, which Python 3.12 refuses at exit. Without the message, the
        # pin-memory thread ends after a few seconds.
        with suppress(RuntimeError):
            batches._worker_result_queue.put((None, None))
        batches._pin_memory_thread.join()
    batches._workers_done_event.set()
    for queue in batches._index_queues:
        queue.put(None)
        queue.cancel_join_thread()  # a killed worker will not read it


def has_torch_iteration(kind: type[DataLoader[Any]]) -> bool:
    """Return whether a class iterates like torch's ``DataLoader``, so that it can be rebuilt."""
    return all(
        getattr(kind, name) is getattr(DataLoader, name) for name in ("__iter__", "_get_iterator")
    )


def reading_kwargs(loader: DataLoader[Any]) -> dict[str, Any]:
    """Return a loader's constructor arguments, except those that `batching_kwargs` returns."""
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


def batching_kwargs(loader: DataLoader[Any], sampler: Any = None) -> dict[str, Any]:
    """Return the constructor arguments for batches and sampling.

    Args:
        loader: The user's loader.
        sampler: Replaces the loader's sampler or batch sampler; None for a stream.
    """
    if sampler is None:
        return {"batch_size": loader.batch_size, "drop_last": loader.drop_last}
    if loader.batch_sampler is None:
        return {"batch_size": None, "sampler": sampler}
    return {"batch_sampler": sampler}


def signal_safe(loader: DataLoader[Any]) -> SignalSafeLoader:
    """Return a loader rebuilt with its own sampler, unsharded.

    Its workers end with each pass, like those of a stream; see `loader_kwargs`.
    """
    sampler = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
    stream = isinstance(loader.dataset, IterableDataset)
    kwargs = reading_kwargs(loader) | batching_kwargs(loader, None if stream else sampler)
    kwargs["worker_init_fn"] = SignalSafeWorker(loader.worker_init_fn)
    return SignalSafeLoader(**kwargs | {"persistent_workers": False})


def loader_kwargs(
    loader: DataLoader[Any], sampler: ShardedSampler | None, generator: torch.Generator
) -> dict[str, Any]:
    """Return the constructor arguments to rebuild a loader with another sampler.

    Args:
        loader: The user's loader.
        sampler: The new sampler; None for a stream. Its workers end with each epoch, even with
            ``persistent_workers=True``, because no checkpoint holds their generators and their
            copies of the dataset, and ``set_epoch`` would not reach them.
        generator: The generator for the workers' seeds, so that reading does not draw from the
            global generators.
    """
    kwargs = reading_kwargs(loader) | {"generator": generator}
    kwargs["worker_init_fn"] = SignalSafeWorker(loader.worker_init_fn)
    if sampler is None:
        return kwargs | batching_kwargs(loader) | {"persistent_workers": False}
    kwargs["worker_init_fn"] = SignalSafeWorker(loader.worker_init_fn, wrapped=True)
    kwargs |= {"dataset": seeded_dataset(loader), "collate_fn": identity_collate}
    return kwargs | batching_kwargs(loader, sampler)


def batches_of(loader: DataLoader[Any]) -> Iterable[Any]:
    """Return an iterable over the batches of a rebuilt loader with a map-style dataset.

    Without workers and pinned memory, the dataset is called directly: torch's iterator does nothing
    else, and takes longer than a training step of a small model. As in torch, a dataset may end the
    epoch by raising ``StopIteration``; a generator function could not pass that on, so ``map`` is
    used.
    """
    if loader.num_workers or loader.pin_memory or loader.timeout:
        return loader
    dataset: Any = loader.dataset
    if loader.batch_sampler is not None:
        return map(dataset.__getitems__, loader.batch_sampler)

    def fetch(index: Any) -> Any:
        return loader.collate_fn(dataset[index])

    return map(fetch, loader.sampler)
