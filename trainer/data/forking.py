"""Forking data-loader workers beside a process group, whose threads may make a fork hang.

The thread that ran a collective drops its tensors afterwards, for which it registers with Python,
under a lock. Up to Python 3.11.7, a child forked at that moment waits for the lock forever, before
it has executed anything (https://github.com/python/cpython/issues/112275), and its loader waits for
it. So each child says that it has begun, and one that does not is ended and forked again.
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

_PATIENCE = 1.0  # seconds for a child to begin, which takes milliseconds; doubled each time


def safe_context(context: BaseContext | None) -> BaseContext | None:
    """Return the context in which to start workers; None is the default one."""
    if (
        sys.platform == "win32"  # which has no forks
        or sys.version_info >= (3, 11, 8)
        or not dist.is_initialized()
    ):
        return context
    known = context or multiprocessing.get_context()
    return _Context() if type(known) is ForkContext else context  # a user's own is kept


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
            """Fork, and return whether the child began in time; otherwise it is ended."""
            process.here, process.there = multiprocessing.Pipe()
            begun = False
            with process.here, process.there:
                super()._launch(process)  # type: ignore[misc]  # typeshed lacks it
                try:
                    process.there.close()  # so that the death of the child is seen too
                    begun = process.here.poll(patience)
                    if begun:
                        with suppress(OSError):  # it is dead, which its loader will see
                            process.here.send_bytes(b"")
                finally:
                    if not begun:
                        self._end()
            return begun

        def _end(self) -> None:
            with suppress(ProcessLookupError, ChildProcessError):  # where SIGCHLD is ignored
                os.kill(self.pid, signal.SIGKILL)
                os.waitpid(self.pid, 0)
            self.close()

    class _Process(ForkProcess):
        here: Connection  # the parent's end
        there: Connection

        @staticmethod
        def _Popen(process_obj: Any) -> Any:
            return _Launch(process_obj)

        def _bootstrap(self, parent_sentinel: Any = None) -> Any:
            self.here.close()
            with self.there as parent:
                parent.send_bytes(b"")
                # One that came too late is ended here, where it holds no lock of the others.
                parent.recv_bytes()
            return super()._bootstrap(parent_sentinel)  # type: ignore[misc]  # as above

    class _Context(ForkContext):
        Process = _Process
