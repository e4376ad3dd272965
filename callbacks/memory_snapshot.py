"""Record the allocations of a CUDA device's memory."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch

from callbacks.base import Callback
from trainer.checks import check_counts, given
from trainer.errors import module_logger
from trainer.files import absolute_folder

if TYPE_CHECKING:
    from trainer import Trainer, TrainModule

logger = module_logger(__name__)


class MemorySnapshot(Callback):
    """Record the history of a CUDA device's memory for a few updates of a ``fit``, and write it.

    The file ``memory-step-00000005-rank-00000.pickle`` is for https://docs.pytorch.org/memory_viz,
    which shows every allocation with the source lines that made it. It is written by torch and
    never read by Cadence. If memory runs out during the recording, the history is written to
    ``memory-…-oom.pickle``; with ``steps=None`` that can be at any time of the run.

    Only CUDA's allocator keeps such a history. On other devices nothing is recorded, with one
    warning, so that a script runs anywhere. With ``fast_dev_run`` nothing is recorded.

    Example::

        trainer = Trainer(max_steps=10, callbacks=[MemorySnapshot(skip_steps=2, steps=3)])

    Args:
        dirpath: The folder, by default ``memory`` in the Trainer's ``project_dir``.
        skip_steps: Updates of this start to skip before the recording; by default 1, and none if
            ``steps`` is None.
        steps: Updates to record. None records up to the end and writes only if memory runs out.
        all_ranks: Record every process, each to its own file; otherwise only the main process.
        max_entries: The number of newest allocations and releases to keep. Each takes a few hundred
            bytes of host memory.

    Attributes:
        snapshots: The files that this process has written.

    Raises:
        ValueError: If a number is invalid.
    """

    def __init__(
        self,
        dirpath: str | Path | None = None,
        *,
        skip_steps: int | None = None,
        steps: int | None = 3,
        all_ranks: bool = False,
        max_entries: int = 100_000,
    ) -> None:
        if skip_steps is None:
            skip_steps = 0 if steps is None else 1
        check_counts(0, skip_steps=skip_steps)
        check_counts(1, max_entries=max_entries, **given(steps=steps))
        self.dirpath = absolute_folder(dirpath)
        self.skip_steps, self.steps = skip_steps, steps
        self.all_ranks = all_ranks
        self.max_entries = int(max_entries)  # torch requires an int
        self.snapshots: list[Path] = []
        self._active = self._recording = False
        self._updates = 0

    def on_train_start(self, trainer: Trainer, module: TrainModule) -> None:
        """Check whether the memory can be recorded here."""
        accelerator = trainer.accelerator
        self.snapshots, self._updates = [], 0
        self._active = not trainer.fast_dev_run and (self.all_ranks or accelerator.is_main_process)
        if accelerator.device.type != "cuda":
            self._active = False
            if accelerator.is_main_process:
                logger.warning("MemorySnapshot records nothing: it needs a CUDA device.")
        self._record_if_due()

    def on_boundary(self, trainer: Trainer, module: TrainModule) -> None:
        """Count an update, and start or stop recording if due."""
        if not self._active:
            return
        self._updates += 1
        if self.steps is not None and self._updates == self.skip_steps + self.steps:
            self._write(trainer, "")
            self._stop()
        self._record_if_due()

    def on_train_end(self, trainer: Trainer, module: TrainModule) -> None:
        """Write a recording that is incomplete at the end of the run."""
        if self._recording and self.steps is not None and self._updates > self.skip_steps:
            self._write(trainer, "")
        self._stop()

    def on_preemption(self, trainer: Trainer, module: TrainModule) -> None:
        """Count the update, as at a boundary, and write an incomplete recording."""
        self.on_boundary(trainer, module)
        self.on_train_end(trainer, module)

    def on_exception(self, trainer: Trainer, module: TrainModule, exception: BaseException) -> None:
        """Write the history if memory ran out."""
        if self._recording and isinstance(exception, torch.OutOfMemoryError):
            self._write(trainer, "-oom")

    def teardown(self, trainer: Trainer, module: TrainModule, stage: str) -> None:
        """Stop recording."""
        self._stop()

    def _record_if_due(self) -> None:
        if self._active and not self._recording and self._updates == self.skip_steps:
            torch.cuda.memory._record_memory_history(max_entries=self.max_entries)
            self._recording = True

    def _stop(self) -> None:
        self._active = False
        if self._recording:
            self._recording = False
            torch.cuda.memory._record_memory_history(None)

    def _write(self, trainer: Trainer, suffix: str) -> None:
        folder = self.dirpath or trainer.project_dir / "memory"
        folder.mkdir(parents=True, exist_ok=True)
        rank = trainer.accelerator.process_index
        name = f"memory-step-{trainer.global_step:08d}-rank-{rank:05d}{suffix}.pickle"
        torch.cuda.memory._dump_snapshot(str(folder / name))
        self.snapshots.append(folder / name)
        logger.info("The memory history is in %s.", folder / name)
