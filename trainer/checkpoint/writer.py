"""One save at a time, at once or on a thread that lives as long as the save."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

import torch.distributed as dist

from trainer.checkpoint.portions import HostCopies
from trainer.checkpoint.save import Ranks
from trainer.errors import CheckpointError

logger = logging.getLogger(__name__)


class Writer:
    """Makes a save, also while the training goes on.

    All processes call it together. Between `open` and `close` a save agrees over a process group of
    its own, since its collectives would mix with those of the training.

    Args:
        state: The processes.

    Attributes:
        group: The group to agree over; None for the usual one, or where one process is alone.
        copies: Memory for what is being written; it is free again after :meth:`wait`.
    """

    def __init__(self, state: Ranks) -> None:
        self._state = state
        self._thread: threading.Thread | None = None
        self._required = True
        self._name: object = None
        self._failed: set[object] = set()  # of which the latest save failed
        self._error: CheckpointError | None = None
        self._abandoned = False
        self.group: dist.ProcessGroup | None = None
        self.copies = HostCopies()

    def open(self) -> None:
        """Make the group, while all processes are here for sure; collective."""
        if self._state.num_processes > 1:
            self.group = dist.new_group(backend="gloo")

    @property
    def failed(self) -> bool:
        """The save in flight has ended in an error that must end the run, and nobody knows yet."""
        return self._error is not None and self._required

    def start(
        self,
        work: Callable[..., object],
        *,
        name: object = None,
        required: bool = True,
        background: bool = True,
    ) -> None:
        """Make or begin a save; :meth:`wait` tells how it ended.

        Args:
            work: Makes it, and agrees over the ``group`` that it is given.
            name: What is saved, to ask :meth:`wait` for.
            required: Its failure shall end the run.
            background: On a thread.

        Raises:
            RuntimeError: One is in flight; wait for it.
        """
        if self._thread is not None:
            raise RuntimeError("A save is in flight. Wait for it before the next one is begun.")
        self._required, self._error, self._name = required, None, name
        self._failed.discard(name)
        group = self.group

        def run() -> None:
            try:
                work(group=group)
            except Exception as error:  # noqa: BLE001 - kept for `wait`, which raises it
                self._keep(error)

        if not background:
            run()
            return
        # A daemon, so that a second Ctrl-C ends the process though a save hangs.
        self._thread = threading.Thread(target=run, name="cadence-save", daemon=True)
        self._thread.start()

    def _keep(self, error: Exception) -> None:
        if not isinstance(error, CheckpointError):
            failed = CheckpointError(f"A save in the background failed: {error!r}.")
            failed.__cause__ = error
            error = failed
        self._error = error

    def wait(self, name: object = None) -> bool:
        """Wait for the save in flight, if any.

        Args:
            name: Whose save is asked for, which others may have followed; None for the latest.

        Returns:
            Whether the latest one of this name succeeded, also when it is asked again; one that
            failed without being required is told in the log.

        Raises:
            CheckpointError: It was required and failed. On all processes alike.
        """
        if self._thread is not None and not self._abandoned:
            self._thread.join()
            self._thread = None
        error, self._error = self._error, None
        if error is not None:
            self._failed.add(self._name)
            if self._required:
                raise error
            logger.warning("The run goes on without this checkpoint. %s", error)
        return (self._name if name is None else name) not in self._failed

    def abandon(self) -> None:
        """Do not wait for the save in flight: its process is about to end."""
        if self._thread is not None:
            logger.warning("A checkpoint was still being written; it is given up.")
        self._abandoned = True

    def close(self) -> None:
        """Wait for the save in flight and give its group back.

        Raises:
            CheckpointError: See :meth:`wait`.
        """
        try:
            self.wait()
        finally:
            if self.group is not None and not self._abandoned:
                dist.destroy_process_group(self.group)
                self.group = None
