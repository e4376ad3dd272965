"""Save the weights of a process that fails."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from callbacks.base import Callback
from trainer.errors import module_logger
from trainer.files import absolute_folder

if TYPE_CHECKING:
    from trainer import Trainer, TrainModule

logger = module_logger(__name__)


class OnExceptionCheckpoint(Callback):
    """Save the weights of each process in which training fails, for inspection.

    They are saved to ``exception-<step>-rank-<rank>``, possibly in the middle of an update. No run
    can resume from them. To resume, use `ModelCheckpoint`; its ``on_exception=True`` saves the same
    weights in its folder. An interrupt (Ctrl-C) is not a failure: it saves the run. With a sharded
    model, `fit` raises an error for this callback, because each process has only its shard of the
    weights.

    Example::

        trainer = Trainer(max_epochs=10, callbacks=[OnExceptionCheckpoint()])

    Args:
        dirpath: The folder, by default the run's checkpoints folder.
    """

    requires_unsharded = True

    def __init__(self, dirpath: str | os.PathLike[str] | None = None) -> None:
        self.dirpath = absolute_folder(dirpath)
        self._training = False

    def on_train_start(self, trainer: Trainer, module: TrainModule) -> None:
        """Enable saving at exceptions."""
        self._training = True

    def on_exception(self, trainer: Trainer, module: TrainModule, exception: BaseException) -> None:
        """Save this process's weights."""
        if self._training:
            folder = self.dirpath or trainer.checkpoint_dir
            save_weights_at(exception, trainer, folder)

    def teardown(self, trainer: Trainer, module: TrainModule, stage: str) -> None:
        """Stop saving at exceptions."""
        self._training = False


def save_weights_at(exception: BaseException, trainer: Trainer, folder: Path) -> Path | None:
    """Save this process's weights, and return their path.

    Nothing is saved after an interrupt, so that the process ends at once.
    """
    if not isinstance(exception, Exception) or trainer.fast_dev_run:
        return None
    rank = trainer.accelerator.process_index
    path = folder / f"exception-{trainer.global_step:08d}-rank-{rank:05d}"
    saved = trainer.save_own_weights(path)
    logger.warning("The weights at the exception are in %s.", saved)
    return saved
