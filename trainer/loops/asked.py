"""Saves that are asked for inside a window, where the run is between two states.

They are made at the boundary, by all processes, also where one has asked alone: it would wait for
the others in vain. That somebody has asked is known to all with the window's reduction, or where
they speak with each other anyway, so that it costs nothing at the updates at which nobody has.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

from trainer.distributed.collectives import all_gather_object

logger = logging.getLogger(__name__)


class AskedSaves:
    """What this process has asked for, each folder once, with the options of the latest call.

    Args:
        save: Saves to a path with the options, at a boundary.
    """

    def __init__(self, save: Callable[..., object]) -> None:
        self._save = save
        self._waiting: dict[Path, dict[str, Any]] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, target: Path, **options: Any) -> None:
        """Ask for a save."""
        self._waiting[target] = options

    def make(self, world_size: int) -> None:
        """Make those that any process has asked for; every process calls it, at a boundary.

        Raises:
            CheckpointError: On all processes alike, if one fails.
        """
        asked = self._waiting if world_size == 1 else _of_all(self._waiting)
        self._waiting = {}
        for target, options in asked.items():
            self._save(target, **options)

    def give_up(self) -> None:
        """Tell in the log what will not be made."""
        for target in self._waiting:
            logger.warning(
                "The checkpoint %s was asked for inside a window that came to no end: it was not "
                "made.",
                target,
            )
        self._waiting = {}


def _of_all(own: dict[Path, dict[str, Any]]) -> dict[Path, dict[str, Any]]:
    """What any process has asked for, in the same order on all."""
    everybody = all_gather_object(own)
    names = [[target.name for target in each] for each in everybody]
    if all(each == names[0] for each in names):
        return own  # by its own paths: the machines may have disks of their own
    return {target: options for each in everybody for target, options in each.items()}
