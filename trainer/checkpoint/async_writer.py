"""Run one checkpoint save at a time, in the foreground or on a background thread.

State dicts refer to tensors that training continues to change, so a background save first copies
their values to host memory.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from trainer import xla
from trainer.checkpoint.parts import StatePart, Write, files_of
from trainer.checkpoint.save import Ranks
from trainer.errors import CheckpointError, module_logger
from trainer.tree import record_event, start_copy_to_host

logger = module_logger(__name__)


class HostCopies:
    """Host memory (pinned for CUDA and XPU) for the tensors of a save, reused by the next save.

    It is reused because allocating and mapping new pages takes longer than the copy itself.
    """

    def __init__(self) -> None:
        self._kept: dict[tuple[int, str], Tensor] = {}

    def hold(self, parts: Sequence[StatePart]) -> Write:
        """Copy the tensors' current values; return a function that writes these copies.

        The function returned by the previous call must have finished, because its memory is reused.
        Copies from a device are only enqueued here. They run in stream order, so later kernels
        cannot change their input.
        """
        copies: dict[tuple[int, str], Tensor] = {}
        arrivals: list[Any] = []
        for number, part in enumerate(parts):
            for name, tensor in part.tensors.items():
                if tensor.device.type == "xla":
                    copies[number, name], arrival = start_copy_to_host(tensor)
                    arrivals.append(arrival)
                else:
                    copies[number, name] = self._copy(tensor, self._kept.get((number, name)))
        self._kept = copies
        arrivals += _events_of([tensor for part in parts for tensor in part.tensors.values()])
        if xla.is_initialized():
            xla.sync()  # one graph with all copies; only this thread may end it
        writers = [part.write for part in parts]  # keep no reference to the live tensors
        files = files_of(parts)

        def write(folder: Path) -> list[str]:
            for arrival in arrivals:
                arrival.synchronize()
            for number, write_one in enumerate(writers):
                write_one({name: t for (part, name), t in copies.items() if part == number}, folder)
            return files

        return write

    @staticmethod
    def _copy(tensor: Tensor, buffer: Tensor | None) -> Tensor:
        if buffer is None or (buffer.shape, buffer.dtype) != (tensor.shape, tensor.dtype):
            pin = _copies_by_itself(tensor.device)
            buffer = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=pin)
        return buffer.copy_(tensor, non_blocking=_copies_by_itself(tensor.device))


def _copies_by_itself(device: torch.device) -> bool:
    return device.type in ("cuda", "xpu")


def _events_of(tensors: Sequence[Tensor]) -> list[Any]:
    """Record an event per device after the asynchronous copies that were just enqueued."""
    devices = {tensor.device for tensor in tensors if _copies_by_itself(tensor.device)}
    return list(map(record_event, devices))


class Writer:
    """Runs checkpoint saves, in the foreground or in the background while training continues.

    Its methods are called on all ranks. Between `open` and `close`, saves use their own process
    group, so that their collectives do not mix with the collectives of training.

    Args:
        state: The processes.

    Attributes:
        group: The process group of saves; None for the default one, or with a single process.
        copies: Host memory with the tensors of the save in flight; it can be reused after
            :meth:`wait`.
        failed: Whether a required save has failed, and :meth:`wait` has yet to raise the error.
    """

    def __init__(self, state: Ranks) -> None:
        self._state = state
        self._thread: threading.Thread | None = None
        self._required = True
        self._name: object = None
        self._failed: set[object] = set()  # names whose latest save failed
        self._error: CheckpointError | None = None
        self._abandoned = False
        self.failed = False
        self.group: dist.ProcessGroup | None = None
        self.copies = HostCopies()

    def open(self) -> None:
        """Create the process group for saves; collective."""
        if self._state.num_processes > 1:
            self.group = dist.new_group(backend="gloo")

    def start(
        self,
        work: Callable[..., object],
        *,
        name: object = None,
        required: bool = True,
        background: bool = True,
    ) -> None:
        """Run a save, or start it in the background; :meth:`wait` reports its outcome.

        Args:
            work: Performs the save. It is called with ``group``, the process group for its
                collectives.
            name: An identifier of the save for :meth:`wait`.
            required: A failure must end the run.
            background: Run on a thread.

        Raises:
            RuntimeError: Another save is in flight.
        """
        if self._thread is not None:
            raise RuntimeError("A save is in progress. Wait for it before starting another.")
        self._required, self._error, self._name = required, None, name
        self.failed = False
        self._failed.discard(name)
        group = self.group

        def run() -> None:
            try:
                if background:
                    # A new thread's current device is 0. Waiting there for a copy from another
                    # device would create a context on device 0, about 0.5 GB for each process.
                    self._state.set_device()
                work(group=group)
            except Exception as error:  # noqa: BLE001 - kept for `wait`, which raises it
                self._keep(error)

        if not background:
            run()
            return
        # A daemon thread, so that a second Ctrl-C ends the process even if a save hangs.
        self._thread = threading.Thread(target=run, name="cadence-save", daemon=True)
        self._thread.start()

    def _keep(self, error: Exception) -> None:
        if not isinstance(error, CheckpointError):
            failed = CheckpointError(f"A background save failed: {error!r}.")
            failed.__cause__ = error
            error = failed
        self._error, self.failed = error, self._required

    def wait(self, name: object = None) -> bool:
        """Wait for the save in flight, if any.

        Args:
            name: The name of the save to report on, even if other saves followed it; None for the
                latest.

        Returns:
            Whether the latest save of this name succeeded; later calls return the same. The failure
            of a save that is not required is logged.

        Raises:
            CheckpointError: A required save failed; raised on all processes.
        """
        if self._thread is not None and not self._abandoned:
            self._thread.join()
            self._thread = None
        error, self._error, self.failed = self._error, None, False
        if error is not None:
            self._failed.add(self._name)
            if self._required:
                raise error
            logger.warning("The run continues without this checkpoint. %s", error)
        return (self._name if name is None else name) not in self._failed

    def abandon(self) -> None:
        """Forget the save in flight without waiting for it, because the process is about to end."""
        if self._thread is not None and self._thread.is_alive():
            logger.warning("A checkpoint was still being written; it is abandoned.")
        self._abandoned = True

    def close(self) -> None:
        """Wait for the save in flight and destroy the group.

        Raises:
            CheckpointError: See :meth:`wait`.
        """
        try:
            self.wait()
        finally:
            if self.group is not None and not self._abandoned:
                dist.destroy_process_group(self.group)
                self.group = None
