"""Keep the weights of a process that fails."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING

from callbacks.base import Callback

if TYPE_CHECKING:
    from trainer import Trainer, TrainModule

logger = logging.getLogger(__name__)


class OnExceptionCheckpoint(Callback):
    """Save the weights of each process in which the training fails, for a look at them.

    They go to ``exception-<step>-rank-<rank>`` as that process has them, which may be in the middle
    of an update. No run goes on from them: that is for the checkpoints that a `ModelCheckpoint`
    keeps, beside which this may stand, and whose ``on_exception=True`` does the same in its folder.
    An interrupt is no failure: the run is saved then.

    Args:
        dirpath: Where they go; the run's checkpoints folder unless given.
    """

    def __init__(self, dirpath: str | os.PathLike[str] | None = None) -> None:
        self.dirpath = None if dirpath is None else Path(dirpath).expanduser()
        self._training = False

    def on_train_start(self, trainer: Trainer, module: TrainModule) -> None:
        """From here on there is something to look at."""
        self._training = True

    def on_exception(self, trainer: Trainer, module: TrainModule, exception: BaseException) -> None:
        """Save this process's weights."""
        if self._training:
            folder = self.dirpath or trainer.checkpoint_dir
            save_weights_at(exception, trainer, folder)

    def teardown(self, trainer: Trainer, module: TrainModule, stage: str) -> None:
        """The stage is over."""
        self._training = False


def save_weights_at(exception: BaseException, trainer: Trainer, folder: Path) -> None:
    """Save this process's weights; not where somebody wants the end at once."""
    if not isinstance(exception, Exception) or trainer.fast_dev_run:
        return
    rank = trainer.accelerator.process_index
    path = folder / f"exception-{trainer.global_step:08d}-rank-{rank:05d}"
    logger.warning("The weights at the exception are in %s.", trainer.save_own_weights(path))
