"""Fork data-loader workers safely while a process group is active.

A thread of the process group frees its tensors after a collective. To do so it registers with the
Python interpreter and takes a lock. Until Python 3.11.7, a child that is forked at that moment
waits for the lock forever, before it runs any code, and its loader hangs
(https://github.com/python/cpython/issues/112275). So each forked child sends a byte when it has
started. A child that does not is killed and forked again.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import sys
from contextlib import suppress
from multiprocessing.connection import Connection
from multiprocessing.context import BaseContext
from typing import Any

import torch.distributed as dist

logger = logging.getLogger(__name__)

# Seconds to wait for a child to start, which takes milliseconds; doubled at each retry.
_PATIENCE = 1.0


def safe_context(context: BaseContext | None) -> BaseContext | None:
    """Return the multiprocessing context for workers; None is the default context."""
    if (
        sys.platform == "win32"  # no fork there
        or sys.version_info >= (3, 11, 8)
        or not dist.is_initialized()
    ):
        return context
    known = context or multiprocessing.get_context()
    return _Context() if type(known) is ForkContext else context  # keep a custom context


if sys.platform != "win32":
    from multiprocessing.context import ForkContext, ForkProcess
    from multiprocessing.popen_fork import Popen

    class _Launch(Popen):
        def _launch(self, process_obj: Any) -> None:
            patience = _PATIENCE
            while not self._has_begun(process_obj, patience):
                logger.warning(
                    "A data-loader worker did not begin within %g s after its fork, and is forked "
                    "again. Python 3.11.8 and later have no such forks.",
                    patience,
                )
                patience *= 2  # in case the machine is only slow

        def _has_begun(self, process: _Process, patience: float) -> bool:
            """Fork, and return whether the child started in time; if not, it is killed."""
            process.here, process.there = multiprocessing.Pipe()
            begun = False
            with process.here, process.there:
                super()._launch(process)  # type: ignore[misc]  # typeshed lacks it
                try:
                    process.there.close()  # so that poll also returns if the child dies
                    begun = process.here.poll(patience)
                    if begun:
                        with suppress(OSError):  # the child has died; its loader reports that
                            process.here.send_bytes(b"")
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
        here: Connection  # the parent's end of the pipe
        there: Connection

        @staticmethod
        def _Popen(process_obj: Any) -> Any:
            return _Launch(process_obj)

        def _bootstrap(self, parent_sentinel: Any = None) -> Any:
            self.here.close()
            with self.there as parent:
                parent.send_bytes(b"")
                # A child that started too late is killed while it waits here, where it holds no
                # lock that other processes share.
                parent.recv_bytes()
            return super()._bootstrap(parent_sentinel)  # type: ignore[misc]  # as above

    class _Context(ForkContext):
        Process = _Process
