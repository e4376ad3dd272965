"""Pending saves: checkpoints requested inside a gradient accumulation window.

Inside a window the state is incomplete, so the save is made at the next update boundary. Saving is
collective, so all ranks take part even if only one requested it. The step sync, or another
collective that is due anyway, tells the other ranks of a request, so updates without a request cost
nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from trainer.distributed.objects import all_gather_object
from trainer.errors import module_logger

logger = module_logger(__name__)


class PendingSaves:
    """The pending saves of this rank: one per folder, with the options of the latest request.

    Args:
        save: Saves to a path with the given options; called at an update boundary.

    Attributes:
        waiting: The options of each save that was requested, by its path.
    """

    def __init__(self, save: Callable[..., object]) -> None:
        self._save = save
        self.waiting: dict[Path, dict[str, Any]] = {}

    def add(self, target: Path, **options: Any) -> None:
        """Request a save."""
        self.waiting[target] = options

    def make(self, world_size: int) -> None:
        """Make the saves that any rank has requested, at an update boundary; collective.

        Raises:
            CheckpointError: A save failed; raised on all ranks.
        """
        saves = self.waiting if world_size == 1 else _of_all(self.waiting)
        self.waiting = {}
        for target, options in saves.items():
            self._save(target, **options)

    def give_up(self) -> None:
        """Drop the pending saves, with a warning for each."""
        for target in self.waiting:
            logger.warning(
                "The checkpoint %s was not saved: it was requested inside a window that never "
                "completed.",
                target,
            )
        self.waiting = {}


def _of_all(waiting: dict[Path, dict[str, Any]]) -> dict[Path, dict[str, Any]]:
    """Return the saves that any rank has requested, in the same order on all ranks."""
    of_ranks = all_gather_object(waiting)
    names = [[target.name for target in of_rank] for of_rank in of_ranks]
    if all(of_rank == names[0] for of_rank in names):
        return waiting  # the same saves, but the paths may differ between machines
    return {target: options for of_rank in of_ranks for target, options in of_rank.items()}
