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
from multiprocessing.connection import Connection
from multiprocessing.context import BaseContext, ForkContext, ForkProcess
from multiprocessing.popen_fork import Popen
from typing import Any

import torch.distributed as dist

logger = logging.getLogger(__name__)

_PATIENCE = 1.0  # seconds for a child to begin, which takes milliseconds; doubled each time


def safe_context(context: BaseContext | None) -> BaseContext | None:
    """Return the context in which to start workers; None is the default one."""
    if sys.version_info >= (3, 11, 8) or not dist.is_initialized():
        return context
    forks = (
        multiprocessing.get_start_method() == "fork"
        if context is None
        else (
            type(context) is ForkContext  # anything else is left alone
        )
    )
    return _Context() if forks else context


class _Launch(Popen):
    def _launch(self, process_obj: Any) -> None:
        patience = _PATIENCE
        while True:
            reader, process_obj.begun = multiprocessing.Pipe(duplex=False)
            with reader, process_obj.begun:
                super()._launch(process_obj)  # type: ignore[misc]  # typeshed lacks it
                process_obj.begun.close()  # so that the death of the child is seen as well
                if reader.poll(patience):
                    return
            logger.warning(
                "A data-loader worker did not begin within %g s after its fork, and is forked "
                "again. Python 3.11.8 and later have no such forks.",
                patience,
            )
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
            self.close()
            patience *= 2  # in case the machine is only slow


class _Process(ForkProcess):
    begun: Connection

    @staticmethod
    def _Popen(process_obj: Any) -> Any:
        return _Launch(process_obj)

    def _bootstrap(self, parent_sentinel: Any = None) -> Any:
        self.begun.send_bytes(b"")
        self.begun.close()
        return super()._bootstrap(parent_sentinel)  # type: ignore[misc]  # typeshed lacks it


class _Context(ForkContext):
    Process = _Process
