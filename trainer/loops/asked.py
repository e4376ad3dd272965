"""Saves that are requested inside a window, where the run is between two states.

All processes make them at the boundary, even if only one asked, which would otherwise wait for the
others in vain. They learn of a request by the window's reduction, or by a collective that is due
anyway, so that updates without a request cost nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

from trainer.distributed.objects import all_gather_object

logger = logging.getLogger(__name__)


class AskedSaves:
    """The saves requested on this process: each folder once, with the options of the latest call.

    Args:
        save: Saves to a path with the options, at a boundary.
    """

    def __init__(self, save: Callable[..., object]) -> None:
        self._save = save
        self._waiting: dict[Path, dict[str, Any]] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, target: Path, **options: Any) -> None:
        """Request a save."""
        self._waiting[target] = options

    def make(self, world_size: int) -> None:
        """Make the saves that any process has requested, at a boundary; collective.

        Raises:
            CheckpointError: On all processes alike, if one fails.
        """
        asked = self._waiting if world_size == 1 else _of_all(self._waiting)
        self._waiting = {}
        for target, options in asked.items():
            self._save(target, **options)

    def give_up(self) -> None:
        """Log which saves will not be made, and drop them."""
        for target in self._waiting:
            logger.warning(
                "The checkpoint %s was not saved: it was requested inside a window that never "
                "completed.",
                target,
            )
        self._waiting = {}


def _of_all(own: dict[Path, dict[str, Any]]) -> dict[Path, dict[str, Any]]:
    """Return the saves that any process has requested, in the same order on all."""
    everybody = all_gather_object(own)
    names = [[target.name for target in each] for each in everybody]
    if all(each == names[0] for each in names):
        return own  # with its own paths, which may differ between machines
    return {target: options for each in everybody for target, options in each.items()}
