"""Generators that a dataset or a ``collate_fn`` creates while the first batch is read."""

from __future__ import annotations

import logging
from collections.abc import Callable

from torch.utils.data import get_worker_info

from trainer.data.own_generators import Found

logger = logging.getLogger(__name__)

_LOOKS = 2  # after the first batches of a process, or those of its first passes


class Latecomers:
    """Finds the generators that a process creates while it reads its first batch, and keeps.

    They are seeded from the second look on. For the first it is too late, which is told.

    Args:
        owner: Who creates them, for the message.

    Attributes:
        awaited: Whether to `look` after the next batch.
    """

    def __init__(self, owner: str) -> None:
        self._owner = owner
        self.awaited = True
        self._looks = 0
        self._late: Found = {}

    def look(self, find: Callable[[], Found], own: Found) -> Found:
        """Return the generators found after a batch, with those that were known before it."""
        self._looks += 1
        self.awaited = self._looks < _LOOKS
        found = find()
        if self._looks == 1:
            self._late = {path: each for path, each in found.items() if path not in own}
            return {**own, **found}
        late = [path for path, each in self._late.items() if found.get(path) is each]
        worker = get_worker_info()
        if late and (worker is None or worker.id == 0):
            logger.warning(
                "%s created a random generator (%s) while its first batch was read. %s that batch "
                "draws from it does not depend on the seed and differs after a resume: create it "
                "in __init__.",
                self._owner,
                ", ".join(late),
                "What" if worker is None else "In each worker, what",
            )
        return own
