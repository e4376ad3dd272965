"""Run Python's garbage collection on all ranks at the same update."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING

from callbacks.base import Callback
from trainer.interval import Interval, Progress

if TYPE_CHECKING:
    from trainer import Trainer, TrainModule


class GarbageCollection(Callback):
    """Collect garbage on all ranks at the same update, instead of automatically.

    With automatic collection, each process collects at a different time, and all others wait for it
    at the next all-reduce. Automatic collection is restored after the fit, also after an error.
    Tensors that are not part of a reference cycle are freed at once, as always. A step that creates
    many reference cycles needs a smaller interval.

    Example::

        trainer = Trainer(max_epochs=10, callbacks=[GarbageCollection(every="500 steps")])

    Args:
        every: The interval of collections, besides one before the first update.
        generation: The oldest generation to collect, from 0 (the youngest objects) to 2 (all).

    Raises:
        ValueError: An argument is invalid.
        TypeError: ``every`` is of another type.
    """

    def __init__(self, every: Interval | int | str = 1000, *, generation: int = 2) -> None:
        if generation not in (0, 1, 2):
            raise ValueError(f"generation is {generation!r}; it must be 0, 1 or 2.")
        self.every = Interval.given("every", every)
        self.generation = int(generation)
        self._was_enabled: bool | None = None
        self._handled = Progress()

    def on_train_start(self, trainer: Trainer, module: TrainModule) -> None:
        """Collect once, and disable automatic collection."""
        self._was_enabled = gc.isenabled()
        gc.disable()
        gc.collect(self.generation)
        self._handled = trainer.progress

    def on_boundary(self, trainer: Trainer, module: TrainModule) -> None:
        """Collect if due."""
        before, self._handled = self._handled, trainer.progress
        if self.every.due(before, self._handled):
            gc.collect(self.generation)

    def teardown(self, trainer: Trainer, module: TrainModule, stage: str) -> None:
        """Restore automatic collection."""
        if self._was_enabled:
            gc.enable()
        self._was_enabled = None
